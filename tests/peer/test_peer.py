"""torch's own tests of DistributedDataParallel pass with our class in its place."""

import json
import subprocess
import sys

import pytest

from tests.older import known
from tests.peer import lists

QUICK = [
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_create_graph",
    "test_ddp_device_mesh_initialization",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_join_model_equivalence",
    JOIN := "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_logging_data_cpu",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_sink_noclone",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_invalid_static_graph",
    "test_static_graph_api_cpu",
]


def verdicts(names: list[str]) -> dict[str, str]:
    """Run tests of the suite, in one process that loads it once and forks the ranks of each."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.peer", "--json", *names], capture_output=True, text=True, timeout=280, check=False
    )
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(names), run.stderr
    return {o["name"]: "passes" if o["verdict"] == "passes" else f"{o['verdict']}: {o['text']}" for o in found}


def test_the_list_is_in_order():
    assert lists.passing() == sorted(set(lists.passing()))
    assert set(QUICK) <= set(lists.passing())


def test_quick_ones():
    names = [name for name in QUICK if name != JOIN or known("join without buffers")]
    assert verdicts(names) == dict.fromkeys(names, "passes")


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_all(part):
    names = lists.passing()[part::4]
    assert verdicts(names) == dict.fromkeys(names, "passes")
