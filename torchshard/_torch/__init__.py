"""The only room that touches private names of torch: each with its reason, the versions it was seen in, its fallback.

A name is looked for when it is first used; where it is missing, a public way takes its place. `without_fast_paths()`
switches the optional ones off, so that the fallbacks are tested as they are.
"""

from torchshard._torch.autograd import (
    Inherited,
    base_of,
    compiled_autograd_may_come,
    counts_after,
    has_hooks,
    has_hooks_at_end,
    hooks_after,
    hooks_of,
    in_compiled_autograd,
    in_distributed_autograd,
    in_transform,
    is_nested,
    may_nest,
    preserve_versions,
    profiled,
    queue_callback,
    recording,
    register_after_grad,
    remove_optimizer_hooks,
    spanned,
    take_missing_gradients,
    will_run,
)
from torchshard._torch.checkpoints import keeps_one_part, keeps_one_rank, reader_for
from torchshard._torch.collectives import functional_collectives
from torchshard._torch.comm_mode import end_modules_once
from torchshard._torch.data_parallel import (
    AFTER_FORWARD,
    buffer_hook,
    in_functional_call,
    is_before_forward,
    is_ignored_by_ddp,
    is_joining,
    keep_metadata,
)
from torchshard._torch.dtensors import (
    asked,
    bring_home,
    current_mesh,
    exchange,
    expected,
    graphs_are_shared,
    in_region,
    introduce,
    is_compiled,
    is_on_its_way,
    is_referred_to,
    is_traced,
    lie_with_others,
    mend_strides_of_results,
    mend_trace,
    norm_partial,
    notes_of_trace,
    number,
    orders_of_axes,
    portable_constructor,
    real_object,
    renewed,
    root_mesh,
    standing_for,
    strided_shard,
    takes_plain_for_replicated,
    traced_value,
    unrecorded,
    waited,
    wrapper_constructor,
)
from torchshard._torch.dynamo import (
    after_every_forward,
    current_node,
    graph_break,
    graph_breaks,
    guard_attribute,
    guard_every_source,
    guard_instances,
    is_watched,
    leaf_of_gradient,
    leaves_of,
    let_ask,
    let_ask_results,
    let_ask_the_world,
    let_find_groups,
    note_of_input,
    noted_of_gradient,
    placements_are_values,
    register_placement,
    source_name,
    trace_artifact,
    trace_methods,
    tree_of,
    uncompiled,
)
from torchshard._torch.exporting import exported_whole, exports, is_recorded
from torchshard._torch.finding import without_fast_paths
from torchshard._torch.frames import ends_graphs, skip_alone, skip_frame, skip_methods, tensors_of_call, untraced
from torchshard._torch.fsdp import FSDPGradients, FSDPUser, fsdp_extension_base, fsdp_names, mark_flattened
from torchshard._torch.groups import (
    debug_level,
    default_group,
    device_carried,
    gloo_threads,
    group_backend,
    group_name,
    group_named,
    group_of_members,
    group_ranks,
    group_store,
    group_timeout,
    is_gloo,
    is_registered,
    stand_in,
)
from torchshard._torch.importing import whole_in_graphs
from torchshard._torch.inductor import (
    backend_by_name,
    compile_with_inductor,
    expect_strides,
    gradient_outputs,
    inductor_options,
    inductor_patches,
    mark_cacheable,
    masked_index_put,
    read_after_waits,
    trace_backward,
)
from torchshard._torch.isolating import as_if_uncompiled, no_trace_in_dynamo
from torchshard._torch.nested import (
    decompose_within,
    find_memory_of_parts,
    keep_operands_of_functions,
    nest_in_place,
    operate_with,
    print_parts,
)
from torchshard._torch.operators import (
    below_autograd,
    below_dispatch,
    beneath_intercepting,
    beneath_modes,
    called_directly,
    decomposition,
    has_modes,
    in_backward,
    in_forward_ad,
    intercepting,
    is_missing_tangent,
    is_view,
    lacks_fake,
    lies_as_device_likes,
    local_callable,
    no_torch_function,
    one_operator,
    operator_in,
    operator_names,
    outside_of_traces,
    overload_of,
    pretending,
    reading_conjugates,
    reading_number,
    refuses_kind,
    refuses_overlap,
    returning,
    schema,
)
from torchshard._torch.optimizing import Standing, given_backend
from torchshard._torch.partitioning import (
    count_written_parts,
    expect_gradients_of_written,
    fill_unused_results,
    run_collectives_once,
)
from torchshard._torch.pieces import compile_pieces
from torchshard._torch.recomputing import recomputed_region
from torchshard._torch.regions import (
    crosses,
    example_of,
    is_known,
    let_return_beside_gradients,
    memories,
    modes,
    nesting,
    passes_no_gradient,
    setting,
    was_written,
    write_known_sizes,
    writes_arguments,
)
from torchshard._torch.sharded import (
    below_torch_functions,
    group_of_loaded,
    group_of_theirs,
    is_sharded_tensor,
    sharded_tensors,
    their_sharded_tensor,
)
from torchshard._torch.sharing import mend_graphs, part_gradients
from torchshard._torch.storing import store_who_asks
from torchshard._torch.tensors import (
    aliasing,
    bytes_of,
    copy_all,
    device_index,
    flatten,
    memory_of,
    storage_uses,
    take_all,
    unflatten,
    without_autocast,
)
