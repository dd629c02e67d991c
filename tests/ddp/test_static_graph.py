"""static_graph: the first backward shows what is used and how often; and what works without it."""

import copy
import functools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from tests.models import Parts, mlp
from tests.ranks import run_ranks
from torchshard.errors import RankMismatchError


class Checkpointed(nn.Module):
    """Activation checkpoints: one after another, nested, of a block used twice, and an unused parameter."""

    def __init__(self, reentrant, nested=False, twice=False, unused=False):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(mlp(8, 2) for _ in range(3))
        self.never = nn.Linear(3, 3) if unused else None
        self.settings = {"use_reentrant": reentrant}
        self.nested, self.twice = nested, twice

    def _inner(self, x):
        return checkpoint(self.blocks[1], checkpoint(self.blocks[0], x, **self.settings), **self.settings)

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self._inner, x, **self.settings) if self.nested else self._inner(x)
        if self.twice:
            x = checkpoint(self.blocks[0], x, **self.settings)
        return checkpoint(self.blocks[2], x, **self.settings)


def _compare(make, rank, case, static=True, **settings):
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = make()
    models = [
        TorchDDP(copy.deepcopy(module), static_graph=static, **settings),
        DistributedDataParallel(module, static_graph=static, bucket_cap_mb=0.0005, **settings),
    ]
    for step in range(3):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step * 10 + rank))
        for model in models:
            model.zero_grad(set_to_none=step != 1)
            model(x).square().mean().backward()
        for (n, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{case}, step {step}, {n}"
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, msg=lambda m, s=step, n=n: f"{case}, step {s}, {n}: {m}")
    return models[1]


def _checkpoints(rank, world):
    for reentrant in (True, False):
        for nested, twice, unused in [(False, False, False), (True, True, True), (False, True, False)]:
            case = f"{reentrant=} {nested=} {twice=} {unused=}"
            make = functools.partial(Checkpointed, reentrant, nested, twice, unused)
            model = _compare(make, rank, case)
            assert len(model.reducer.plan) > 3
            assert len(model.reducer.usage.repeated) == (4 if twice and reentrant else 0), case
            if not unused and not (twice and reentrant):
                _compare(make, rank, case + " dynamic", static=False)


def _unused_on_ranks(rank, world):
    def make():
        module = Parts()
        module.pick = (0, 2) if rank else (0, 1)
        return module

    for views in (False, True):
        model = _compare(make, rank, f"{views=}", gradient_as_bucket_view=views)
    assert model.reducer.counters.backwards == 3
    # No collective but the gradients' after the first backward, and no hook that looks at more than it must.
    assert not model.reducer.is_attentive


def _changed(rank, world):
    """A graph that changes is reported, in backward and before the next forward; then the wrapper goes on."""
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(Parts(), static_graph=True)
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
    model.module.pick = (0, 3)
    with pytest.raises(RuntimeError, match=r"(?s)Your training graph has changed in this iteration.*parts\.3\."):
        model(torch.randn(3, 8)).sum().backward()
    model.module.pick = (0, 1)
    left_out = r"(?s)Expected to have finished reduction in the prior iteration.*static_graph.*parts\.1\."
    with pytest.raises(RuntimeError, match=left_out):
        model(torch.randn(3, 8))
    model(torch.randn(3, 8)).sum().backward()
    model.module.pick = (0,)
    model(torch.randn(3, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=left_out):
        model(torch.randn(3, 8))


def _steps(model, count):
    for _ in range(count):
        model(torch.randn(3, 8)).sum().backward()


def _changed_on_one_rank(rank, world):
    """A parameter more, or less, on one rank: that rank names it, the other one says who has not come."""
    from torchshard.ddp import DistributedDataParallel

    for pick, expected in (((0, 3), r"(?s)Your training graph has changed.*parts\.3\."), ((0,), r"parts\.1\.")):
        group = dist.new_group(timeout=timedelta(seconds=2))
        model = DistributedDataParallel(Parts(), static_graph=True, process_group=group, bucket_cap_mb=0)
        _steps(model, 2)
        start = time.monotonic()
        error = RankMismatchError, r"(?s)waited in vain for bucket.*no answer.* from rank 0"
        if rank == 0:
            model.module.pick, error = pick, (RuntimeError, expected)
        with pytest.raises(error[0], match=error[1]):
            _steps(model, 2)
        assert time.monotonic() - start < 10
        dist.barrier()


def _no_sync_first(rank, world):
    """The first backwards are local: what is learned is learned from the first that is reduced."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(mlp(8), static_graph=True)
    reference, xs = copy.deepcopy(model.module), torch.randn(4, world, 3, 8)
    for repeat in range(3):
        model.zero_grad()
        reference.zero_grad()
        for step, x in enumerate(xs):
            if step < 3:
                with model.no_sync():
                    model(x[rank]).square().mean().backward()
            else:
                model(x[rank]).square().mean().backward()
            reference(x.flatten(0, 1)).square().mean().backward()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=lambda m, r=repeat: f"{r}: {m}")


def _afterwards(rank, world):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(Parts())
    model._set_static_graph()
    with pytest.warns(UserWarning, match="no need to set it again"):
        model._set_static_graph()
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
    other = DistributedDataParallel(mlp(8))
    other(torch.randn(3, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        other._set_static_graph()
    with pytest.warns(UserWarning, match="find_unused_parameters"):
        DistributedDataParallel(Parts(), static_graph=True, find_unused_parameters=True)


def _hooked(rank, world):
    """With a hook, and in several forwards before one backward."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    models = [
        wrap(Checkpointed(True, twice=True, unused=True), static_graph=True)
        for wrap in (TorchDDP, DistributedDataParallel)
    ]
    models[1].module.load_state_dict(models[0].module.state_dict())
    for model in models:
        model.register_comm_hook(None, allreduce_hook)
    for _ in range(3):
        x = torch.randn(3, 8, requires_grad=True)
        for model in models:
            model.zero_grad()
            (model(x).square().mean() + model(x * 2).square().mean()).backward()
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)


def _twice_without(rank, world):
    """Without static_graph a block in two reentrant checkpoints is torch's error, and names the parameter."""
    from torchshard.ddp import DistributedDataParallel

    for wrap in (DistributedDataParallel, TorchDDP):
        model = wrap(Checkpointed(True, twice=True))
        with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
            model(torch.randn(3, 8)).sum().backward()


def _all(rank, world):
    _checkpoints(rank, world)
    _unused_on_ranks(rank, world)
    _changed(rank, world)
    _changed_on_one_rank(rank, world)
    _no_sync_first(rank, world)
    _afterwards(rank, world)
    _hooked(rank, world)
    _twice_without(rank, world)


def test_static_graph():
    run_ranks(2, _all, timeout=90)
