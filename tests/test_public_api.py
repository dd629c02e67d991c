"""The names and signatures that users rely on, written down: a change of them is seen in review.

EXPECTTEST_ACCEPT=1 refreshes the list.
"""

import ast
import inspect
from pathlib import Path
from types import UnionType

import pytest
from expecttest import assert_expected_inline

import torchshard
from torchshard import checkpoint, compiler, ddp, keys, parallel, state_dict
from torchshard.parallel import fsdp


def signature(function) -> str:
    """Names, kinds and defaults of the parameters; types are mypy's business."""
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


def described(name: str, room=torchshard) -> list[str]:
    value = getattr(room, name)
    home, names = getattr(value, "__module__", ""), getattr(room, "__all__", ())
    if isinstance(value, UnionType):
        return [f"{name} = {' | '.join(each.__name__ for each in value.__args__)}"]
    if home.split(".")[0] != "torchshard":
        return [f"{name}: torch's own"]
    if not inspect.isclass(value):
        return [name + signature(value)]
    lines = [f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"]
    if "__init__" in vars(value):
        lines.append("    __init__" + signature(value.__init__))
    own = [
        c
        for c in value.__mro__
        if c.__module__.split(".")[0] == "torchshard" and (c is value or c.__name__ not in names)
    ]
    for member, what in sorted({k: v for c in reversed(own) for k, v in vars(c).items()}.items()):
        if member.startswith("_"):
            continue
        function = getattr(what, "__func__", what)
        if inspect.isfunction(function):
            lines.append(f"    {member}{signature(function)}")
        elif isinstance(what, property):
            lines.append(f"    {member}: property")
    return lines


def test_names_and_signatures():
    text = "\n".join(line for name in sorted(torchshard.__all__) for line in described(name))
    assert_expected_inline(
        text,
        """\
class DTensor(WithoutMemory, TurnsInPlace, Tangent, Tensor)
    apply_(self, function)
    backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None)
    data: property
    data_ptr(self)
    device_mesh: property
    from_local(local_tensor, device_mesh=None, placements=None, *, run_check=False, shape=None, stride=None, grad_placements=None)
    from_torch(upstream)
    full_tensor(self, *, grad_placements=None)
    is_shared(self)
    new(self, *data, device=None)
    numpy(self, *, force=False)
    placements: property
    redistribute(self, device_mesh=None, placements=None, *, async_op=False, forward_dtype=None, backward_dtype=None)
    share_memory_(self)
    squeeze_(self, *dim, **named)
    storage(self)
    swapaxes_(self, axis0, axis1)
    swapdims_(self, dim0, dim1)
    t_(self)
    to_local(self, *, grad_placements=None)
    to_torch(self)
    tolist(self)
    transpose_(self, dim0, dim1)
    unsqueeze_(self, dim)
DeviceMesh: torch's own
class DistributedDataParallel(Engine, Compatibility, Joining, Explaining, States, DistributedDataParallel)
    __init__(self, module, device_ids=None, output_device=None, dim=0, broadcast_buffers=None, init_sync=True, process_group=None, bucket_cap_mb=None, find_unused_parameters=False, check_reduction=False, gradient_as_bucket_view=False, static_graph=False, delay_all_reduce_named_params=None, param_to_hook_all_reduce=None, mixed_precision=None, device_mesh=None, skip_all_reduce_unused_params=False, bucket_cap_mb_list=None, batched_grad_copy=False, forward_sync_buffers=None, lazy_bucket_allocation=False)
    broadcast_buffers: property
    explain(self)
    finalize_backward(self)
    forward(self, *inputs, **kwargs)
    join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False)
    join_device: property
    join_hook(self, **kwargs)
    join_process_group: property
    load_state_dict(self, state_dict, strict=True, assign=False)
    register_comm_hook(self, state, hook)
    require_manual_backward_finalization: property
    should_finalize_after_backward: property
    state_dict(self, *args, **kwargs)
    will_sync_module_buffers(self)
Partial: torch's own
Placement: torch's own
Replicate: torch's own
Shard: torch's own
class ShardedTensor(HeldInParts, TracedByParts, Tensor)
    apply_(self, callable)
    backward(self, gradient=None, *args, **options)
    cpu(self, memory_format=torch.preserve_format, process_group=None)
    cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format, process_group=None)
    data: property
    from_local(cls, local_tensor, dim=0, process_group=None)
    from_local_shards(cls, local_shards, *global_size, process_group=None, init_rrefs=False)
    from_shards_and_metadata(cls, local_shards, sharded_tensor_metadata, process_group=None, init_rrefs=False, sharding_spec=None)
    from_spec(cls, spec, *size, **options)
    from_torch(cls, upstream)
    gather(self, dst=0, out=None, enforce_dtype=False, dtype=None)
    is_pinned(self, device=None)
    is_shared(self)
    local_shards(self)
    local_tensor(self)
    metadata(self)
    remote_shards(self)
    reshard(self, resharding_spec)
    sharding_spec(self)
    share_memory_(self)
    storage(self)
    to(self, *args, **options)
    to_torch(self)
class UnitShard(Placement)
    __init__(self, dim, unit=1, runs=1)
    is_partial(self, reduce_op=None)
    is_replicate(self)
    is_shard(self, dim=None)
distribute_module(module, device_mesh=None, partition_fn=None, input_fn=None, output_fn=None)
distribute_tensor(tensor, device_mesh=None, placements=None, *, src_data_rank=0)
empty(*size, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None)
explain(fn, *args, **kwargs)
fallback(mode)
full(size, fill_value, *, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None)
implicit_replication()
init_device_mesh: torch's own
layout_of(x)
linspace(start, end, steps, *, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None)
logspace(start, end, steps, base=10.0, *, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None)
ones(*size, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None)
rand(*size, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None)
randn(*size, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None)
register_rule(op, notation, *, lin=None, red=None, plus=None, moves=False, mono=False, like=False, full=False, reads=None, samples=None, override=False)
validate_rule(op, samples, *, backward=True, meshes=((2,), (3,), (2, 2)), strict=True)
zeros(*size, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None)""",
    )


def test_names_and_signatures_of_parallel():
    text = "\n".join(line for name in parallel.__all__ for line in described(name, parallel))
    assert_expected_inline(
        text,
        """\
class ColwiseParallel(_CutWeights)
    __init__(self, *, input_layouts=None, output_layouts=None, use_local_output=True, unit=1, runs=1)
class HeadwiseParallel(ParallelStyle)
    __init__(self, *, input_layouts=None, output_layouts=None, use_local_output=True)
class ParallelStyle(ABC)
class ParameterwiseParallel(ParallelStyle)
    __init__(self, placements, *, input_layouts=None, desired_input_layouts=None, output_layouts=None, use_local_output=True)
class PrepareModuleInput(ParallelStyle)
    __init__(self, *, input_layouts=None, desired_input_layouts=None, input_kwarg_layouts=None, desired_input_kwarg_layouts=None, use_local_output=False)
class PrepareModuleInputOutput(ParallelStyle)
    __init__(self, *, input_layouts=None, desired_input_layouts=None, input_kwarg_layouts=None, desired_input_kwarg_layouts=None, use_local_input=False, output_layouts, desired_output_layouts, use_local_output=True)
class PrepareModuleOutput(ParallelStyle)
    __init__(self, *, output_layouts, desired_output_layouts, use_local_output=True)
class RowwiseParallel(_CutWeights)
    __init__(self, *, input_layouts=None, output_layouts=None, use_local_output=True, unit=1)
class SequenceParallel(ParallelStyle)
    __init__(self, *, sequence_dim=1, use_local_output=False)
context_parallel(*args, **kwargs)
local_map(func=None, out_placements=None, in_placements=None, in_grad_placements=None, device_mesh=None, *, redistribute_inputs=False, spmd_types=False)
local_parameters(module)
loss_parallel()
parallelize_module(module, device_mesh=None, parallelize_plan=None, *, src_data_rank=0)
placed_parameters(module)
placed_states(module, optimizer)""",
    )


def test_names_and_signatures_of_state_dict():
    text = "\n".join(line for name in state_dict.__all__ for line in described(name, state_dict))
    assert_expected_inline(
        text,
        """\
class KeyRules(KeyRules)
add_prefix(prefix)
from_torch(sd)
fuse(parts, whole, dim=0, *, sizes=())
rename(pattern, replacement)
split(whole, parts, dim=0, *, sizes=())
strip_prefix(prefix, *, everywhere=False)
to_dtensor(sd, device_mesh, placements, *, strict=True, src_rank=None, reduce_partial=False)
to_full(sd, *, rank0_only=False, cpu_offload=False, reduce_partial=False)
to_sharded_tensor(sd, *, dim=None, process_group=None, spec=None, reduce_partial=False)
to_torch(sd)
transpose(pattern)""",
    )


def test_names_and_signatures_of_the_other_rooms():
    rooms = checkpoint, compiler, ddp, keys
    text = "\n".join(
        line
        for room in rooms
        for name in room.__all__
        if name not in torchshard.__all__
        for line in described(name, room)
    )
    assert_expected_inline(
        text,
        """\
class Checkpoint(Mapping)
    __init__(self, path, index)
    close(self)
    format: property
    layout(self, key)
    metadata: property
class Conversion(object)
    __init__(self, src, dst, to, tensors, pieces, nbytes, files, left_out, rows, seconds, written)
    table(self)
class Difference(object)
    __init__(self, changes, same)
    as_dict(self)
Entry = TensorEntry | ObjectEntry
class Inspection(object)
    __init__(self, path, format, rows, files, metadata)
    as_dict(self)
    totals: property
class ObjectEntry(object)
    __init__(self, read, nbytes=0, key='')
    value(self)
class Statistics(tuple)
class Stored(tuple)
class TensorEntry(object)
    __init__(self, dtype, shape, pieces, key='', stored='', sharding=None, requires_grad=False, parameter=False, attributes=())
    boxes: property
    cut: property
    itemsize: property
    itemsize_stored: property
    nbytes: property
    numpy(self)
    stored_dtype: property
convert(src, dst, *, to, max_memory=67108864, select=(), exclude=(), rename=None, dtype=None, shard_size=None, mesh=None, placements=None, verify=False, overwrite=False, resume=False, fsync=True, dry_run=False, progress=None)
diff(a, b, *, rtol=0.0, atol=0.0, values=True, progress=None)
inspect(path, *, stats=False, select=(), progress=None)
load_into(path, state_dict, *, rename=None, verify=False, progress=None)
open(path)
measure(model, *args, loss=None, repeat=5, **kwargs)
simulate(plan, *, world_size, bandwidth, latency=0.0, algorithm='ring', ranks_per_node=1, inside=None, times=None)
split_backend(bucket_cap_mb=25, first_bucket_mb=1, inner='inductor')
support_caches()
support_groups()
bare_state_dict(module)
class KeyRules(object)
    __init__(self, rules, *, strict=False)
    inverse(self, of=None)
    of_flat(self, sd)
    renamed(self, keys)
add_prefix(prefix)
fuse(parts, whole, dim=0, *, sizes=())
rename(pattern, replacement)
split(whole, parts, dim=0, *, sizes=())
strip_prefix(prefix, *, everywhere=False)
transpose(pattern)""",
    )


def test_names_and_signatures_of_fsdp():
    text = "\n".join(line for name in fsdp.__all__ for line in described(name, fsdp))
    assert_expected_inline(
        text,
        """\
class DTensorExtensions(FSDPExtensions)
    __init__(self, device_handle=None)
    all_gather_dtensor(self, tensor, parent_mesh)
    chunk_dtensor(self, tensor, rank, device_mesh)
    chunk_tensor(self, tensor, rank, world_size, num_devices_per_node, pg, device=None)
    post_unflatten_transform(self, tensor, param_extension)
    pre_flatten_transform(self, tensor)
    pre_load_state_dict_transform(self, tensor)
fully_shard(module, **options)
install()
load(state_dict, *, checkpoint_id=None, storage_reader=None, process_group=None)
torch_parameters(module)""",
    )


PACKAGES = [torchshard, checkpoint, compiler, ddp, fsdp, parallel, state_dict]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_listed_once_everywhere(package):
    names = package.__all__
    assert len(set(names)) == len(names)
    assert set(names) == {name for names in package._HOMES.values() for name in names.split()} <= set(dir(package))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_find_what_is_imported_on_first_use(package):
    """Names, and the packages inside that need no import of their own."""
    module = ast.parse(Path(package.__file__).read_text())
    (block,) = (node for node in module.body if isinstance(node, ast.If))
    typed = {alias.asname or alias.name for node in block.body for alias in node.names}
    call = module.body[-1].value
    inside = {name for keyword in call.keywords for name in keyword.value.value.split()}
    if package is torchshard:
        assert "errors" in inside
    assert typed == set(package.__all__) | inside


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'torchshard' has no attribute 'nothing'"):
        _ = torchshard.nothing
    with pytest.raises(AttributeError, match=r"module 'torchshard\.parallel' has no attribute 'nothing'"):
        _ = parallel.nothing
