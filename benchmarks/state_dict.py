"""Conversions of a state dict on four gloo ranks: torchshard beside torch's nearest, in turns.

    python -m benchmarks.state_dict --gib 1

Ranks share one machine and have one thread each. A round is a turn of either side; what counts is the ratio of CPU
times, user and system, of all ranks together: moving bytes between processes of one machine is work of its CPUs. Peak
memory is that of the allocator: what a call holds at most beyond what there was before, on the rank where that is
largest, results included (for large parameters; the profiler that sees it is slow). Small parameters are an eighth of
the size in all. The state dict of FSDP1 is its sharded one, of torch's ShardedTensors; what torch has for these is the
gathering that `get_model_state_dict` does, a function of torch.distributed._state_dict_utils.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tabulate import tabulate

from benchmarks.harness import Comparison, compare, in_turns
from tests.ranks import run_ranks

WORLD = 4


@dataclass(frozen=True, slots=True)
class Row:
    """Times of one case, and MiB that either side holds at most."""

    times: Comparison
    ours: float
    theirs: float


def _state(mesh, gib: float, many: bool, dim: int):
    """Parameters of 16 MiB, or many of 64 KiB, cut along a dim: the same local tensors as our DTensors and torch's."""
    import torch.distributed.tensor as upstream

    from torchshard import state_dict

    shape = [128, 128] if many else [2048, 2048]
    count = max(1, round(gib * 2**30 / (4 * shape[0] * shape[1])))
    size = list(shape)
    size[dim] //= WORLD
    torch.manual_seed(dist.get_rank())
    theirs = {
        f"layers.{k}.weight": upstream.DTensor.from_local(
            torch.rand(size), mesh, [upstream.Shard(dim)], run_check=False
        )
        for k in range(count)
    }
    return state_dict.from_torch(theirs), theirs


class _Holder(torch.nn.Module):
    """A module with these parameters."""

    def __init__(self, state):
        super().__init__()
        for name, value in state.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(value))


def _full_loop(theirs):
    return {name: value.full_tensor() for name, value in theirs.items()}


def _cases(ours, theirs, mesh):
    """Name -> (ours, theirs): each makes what the other makes."""
    import torch.distributed.tensor as upstream
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    import torchshard
    from torchshard import state_dict

    module = _Holder(theirs)
    everywhere = StateDictOptions(full_state_dict=True)
    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def redistributed(x: dict, kind):
        return {name: value.redistribute(mesh, [kind.Shard(1)]) for name, value in x.items()}

    return {
        "full on all ranks, full_tensor loop": (lambda: state_dict.to_full(ours), lambda: _full_loop(theirs)),
        "full on all ranks, get_model_state_dict": (
            lambda: state_dict.to_full(ours),
            lambda: get_model_state_dict(module, options=everywhere),
        ),
        "full on rank 0, get_model_state_dict": (
            lambda: state_dict.to_full(ours, rank0_only=True, cpu_offload=True),
            lambda: get_model_state_dict(module, options=offloaded),
        ),
        "rows to columns, redistribute loop": (
            lambda: state_dict.to_dtensor(ours, mesh, [torchshard.Shard(1)]),
            lambda: redistributed(theirs, upstream),
        ),
    }


def _fsdp_cases(gib: float):
    """Name -> (ours, theirs), of the sharded state dict of FSDP1."""
    from torch.distributed._state_dict_utils import _gather_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from torchshard import state_dict

    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(max(1, round(gib * 64)))]
    device = torch.device("cpu")
    module = FullyShardedDataParallel(
        torch.nn.Sequential(*layers), auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), device_id=device
    )
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        sharded = module.state_dict()
    return {
        "full on all ranks, _gather_state_dict": (
            lambda: state_dict.to_full(sharded),
            lambda: _gather_state_dict(sharded, pg=None, device=device),
        ),
        "full on rank 0, _gather_state_dict": (
            lambda: state_dict.to_full(sharded, rank0_only=True, cpu_offload=True),
            lambda: _gather_state_dict(sharded, pg=None, device=device, cpu_offload=True, ranks_only=(0,)),
        ),
    }


def _compare(rank, world, kind, gib, rounds):
    """Case -> rounds of (ours, theirs) in seconds, and the peaks in bytes; as this rank saw them."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    many, dim = kind.startswith("64 KiB"), int("columns" in kind)
    cases = _fsdp_cases(gib) if "FSDP1" in kind else _cases(*_state(mesh, gib, many, dim), mesh)
    found = {}
    for name, (mine, other) in cases.items():
        if "rows" in name and dim:
            continue
        _check_equal(mine(), other())
        peaks = tuple(_peak(side) for side in (mine, other)) if not many else (math.nan, math.nan)
        found[name] = in_turns(mine, other, rounds, _turn), peaks
    return found


def _turn(side: Callable[[], object]) -> float:
    dist.barrier()
    start = time.process_time()
    made = side()
    seconds = time.process_time() - start
    dist.barrier()
    del made
    return seconds


def _peak(side: Callable[[], object]) -> int:
    """The most bytes of tensors that are alive at once, beyond those before, by the allocator's own events."""
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        made = side()
    del made
    held = most = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _check_equal(mine, other) -> None:
    for a, b in zip(mine.values(), other.values(), strict=False):  # a rank may have nothing
        a, b = (x.to_local() if hasattr(x, "to_local") else x for x in (a, b))
        assert torch.equal(a, b)


def measured(gib: float = 1.0, rounds: int = 7) -> list[Row]:
    """All cases: large parameters cut by rows and by columns, those of FSDP1, and many small ones."""
    rows = []
    for what, size in (
        ("16 MiB by rows", gib),
        ("16 MiB by columns", gib),
        ("16 MiB in FSDP1", gib),
        ("64 KiB by rows", gib / 8),
    ):
        answers = run_ranks(WORLD, _compare, what, size, rounds, timeout=1500)
        for name in answers[0]:
            times = [
                tuple(map(sum, zip(*seen, strict=True))) for seen in zip(*[a[name][0] for a in answers], strict=True)
            ]
            ours, theirs = (max(a[name][1][k] for a in answers) / 2**20 for k in (0, 1))
            rows.append(Row(compare(f"{what}: {name}", times), ours, theirs))
    return rows


def main(gib: float = 1.0, rounds: int = 7) -> str:
    """The table."""
    rows = measured(gib, rounds)
    shown = [
        (
            r.times.name,
            r.times.ours,
            r.times.theirs,
            r.times.ratio,
            f"{r.times.low:.2f} .. {r.times.high:.2f}",
            r.ours,
            r.theirs,
        )
        for r in rows
    ]
    headers = ["case", "torchshard CPU s", "torch CPU s", "ratio", "95 % of the ratio", "peak MiB", "torch's"]
    text = tabulate(shown, headers, tablefmt="github", floatfmt=(None, ".2f", ".2f", ".2f", None, ".0f", ".0f"))
    mean = statistics.geometric_mean([r.times.ratio for r in rows])
    return (
        f"{text}\n\ngeometric mean of the ratios: {mean:.2f}; {gib:g} GiB on {WORLD} ranks, torch {torch.__version__}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of all parameters")
    parser.add_argument("--rounds", type=int, default=7, help="turns of either side")
    options = parser.parse_args()
    print(main(options.gib, options.rounds))
