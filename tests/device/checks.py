"""What is checked on a device: bodies of other tests, and what only shows there."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.models import mlp

BODIES: list[tuple[int, str, tuple[Any, ...]]] = [
    (2, "tests.device.checks:steps_do_not_wait", ()),
    (2, "tests.device.checks:operators_do_not_wait", ()),
    (2, "tests.device.checks:tensors_of_the_host_are_carried", ()),
    (2, "tests.device.checks:draws_are_the_same", ()),
    (2, "tests.comm.test_collectives:_moves", ()),
    (2, "tests.comm.test_collectives:_reduces", (True,)),
    (4, "tests.parallel.test_fully_shard:tied_uneven_hybrid", ()),
    (2, "tests.ddp.test_training:_mixed", ()),
    (2, "tests.ddp.test_training:_by_hand", ()),
    (2, "tests.ddp.test_training:_delayed", ()),
    (2, "tests.ddp.test_training:_twice_differentiated", ()),
]
"""Ranks, body and arguments."""


@contextlib.contextmanager
def without_waiting(what: str) -> Iterator[None]:
    """Within, the host must not wait for the device."""
    kind = torch.get_default_device().type
    if kind == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    before = torch.strict.waits()  # type: ignore[attr-defined]
    yield
    waits = torch.strict.waits() - before  # type: ignore[attr-defined]
    assert not waits, f"{what}: the host waits {waits} times"


def _train(what: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Steps 3, 5 and 6 wait for nothing; at the others ranks ask one another whether to lay out buckets anew."""
    x = torch.randn(4, 8)
    for step in range(1, 7):
        with without_waiting(f"{what}, step {step}") if step in (3, 5, 6) else contextlib.nullcontext():
            model(x).square().mean().backward()
            with torch.device("cpu"):  # where its counts of steps are, as without a default device
                optimizer.step()
            optimizer.zero_grad()


def steps_do_not_wait(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel.distributed import _MixedPrecision

    from torchshard import Shard
    from torchshard.ddp import DistributedDataParallel
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    for options in (
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"mixed_precision": _MixedPrecision(torch.bfloat16, None, torch.bfloat16)},
    ):
        module = nn.Sequential(mlp(8), nn.BatchNorm1d(8))
        model = DistributedDataParallel(module, **options)
        if not options:
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        _train(str(options), model, torch.optim.AdamW(module.parameters()))
    mesh = init_device_mesh("cpu", (world,))
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        split = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        module = parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        _train(f"tensor parallel, {options}", module, torch.optim.AdamW(module.parameters(), **options))
    # Of plain pieces ranks compare the sizes first, and before they draw, their generators.
    split = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
    rows = {"input_layouts": Shard(0), "use_local_output": False}
    plan = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(**rows)}
    module = parallelize_module(split, mesh, plan | {"3": RowwiseParallel(output_layouts=Shard(0))})
    _train("sequence parallel", module, torch.optim.AdamW(module.parameters()))


_COUNT = ("bincount", "bincount of ones", "attention causal")  # how many there are is asked; a plain mask


def operators_do_not_wait(rank: int, world: int) -> None:
    """An operator's second call on DTensors waits as often as on plain tensors."""
    from torch.distributed.device_mesh import init_device_mesh

    from tests.tensor.proving.cases import GROUPS
    from torchshard import Replicate, Shard, distribute_tensor

    mesh, bad = init_device_mesh("cpu", (world,)), list[str]()
    for case in [case for group in GROUPS.values() for case in group if case.name not in _COUNT]:
        whole = [_operand(case, i, shape) for i, shape in enumerate(case.shapes)]
        allowed = contextlib.nullcontext if _waits(case.run, whole) else without_waiting
        for placement in (Shard(0), Replicate()):
            spread = [distribute_tensor(x, mesh, [placement if x.ndim else Replicate()]) for x in whole]
            try:
                for held in (lambda _: contextlib.nullcontext(), lambda _: contextlib.nullcontext(), allowed):
                    operands = [x.clone() for x in spread]
                    with held(f"{case.name} of {placement}"):
                        case.run(*operands)
            except (AssertionError, RuntimeError) as error:
                bad.append(f"{case.name} of {placement}: {error}")
    assert not bad, "\n".join(bad)


def _waits(run: Callable[..., Any], operands: list[torch.Tensor]) -> bool:
    operands = [x.clone() for x in operands]
    try:
        with without_waiting(""):
            run(*operands)
    except (AssertionError, RuntimeError):
        return True
    return False


def _operand(case: Any, i: int, shape: tuple[int, ...]) -> torch.Tensor:
    if case.integers and i in case.integers:
        return torch.randint(0, case.integers[i], shape)
    x = torch.rand(shape)
    return x > 0.5 if i in case.booleans else x + 0.1 if case.positive else x - 0.5


def tensors_of_the_host_are_carried(rank: int, world: int) -> None:
    """State dicts on the CPU, over a group that takes nothing from there; parts large enough to be joined."""
    from torchshard import state_dict
    from torchshard.tensor.sharded import specs
    from torchshard.tensor.sharded.sharded_tensor import ShardedTensor

    here = torch.get_default_device()
    whole = torch.arange(512.0 * 512, device="cpu").view(512, 512)
    for dim in (0, 1):
        for kind in ("cpu", here.type):
            there = torch.get_device_module(here).device_count()
            places = [f"rank:{r}/cpu" if kind == "cpu" else f"rank:{r}/{kind}:{r % there}" for r in range(world)]
            x = ShardedTensor(specs.ChunkShardingSpec(dim, places), whole.shape)
            [shard] = x.local_shards()
            shard.tensor.copy_(whole.chunk(world, dim)[rank])
            full = state_dict.to_full({"x": x})["x"]
            assert full.device == (torch.device(kind) if kind == "cpu" else here)
            assert torch.equal(full.cpu(), whole)


def draws_are_the_same(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    import torchshard

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(3 + rank)
    first = torchshard.rand(5, 3, device_mesh=mesh, placements=[torchshard.Shard(0)])
    second = torch.nn.functional.dropout(first)
    if rank == 0:
        torch.manual_seed(3)
    whole, kept = first.full_tensor(), second.full_tensor()
    if rank == 0:
        plain = torch.rand(5, 3)
        assert torch.equal(whole, plain)
        assert torch.equal(kept, torch.nn.functional.dropout(plain))
