"""Parameters without a gradient: on this rank, on all ranks, now and then."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks


class Branches(nn.Module):
    """A trunk and two branches, of which the caller picks; `never` is not used at all."""

    def __init__(self):
        super().__init__()
        self.trunk, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 600), nn.Linear(8, 3)])

    def forward(self, x, picks):
        x = self.trunk(x)
        return [self.branches[k](x) for k in picks]


def _picks(rank, step):
    """On this rank: both, none in common with the other rank, one and the same, ..."""
    return [(0, 1), (rank,), (1,), (1 - rank,), (0, 1) if rank else (0,)][step % 5]


def _changing(rank, world, views, set_to_none):
    from torchshard.ddp import DistributedDataParallel

    settings = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    torch.manual_seed(rank)
    module = Branches()
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(module), **settings)
    ours = DistributedDataParallel(module, bucket_cap_mb=0.01, **settings)
    for step in range(11):
        x = torch.randn(5, 8)
        for model in (theirs, ours):
            with model.no_sync() if step == 6 else contextlib.nullcontext():
                sum(y.square().mean() for y in model(x, _picks(rank, step))).backward()
        for (n, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"step {step} {n}"
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0, msg=lambda m, n=n, s=step: f"{s} {n}: {m}")
        if step != 6:  # step 7 adds to what step 6 has left
            theirs.zero_grad(set_to_none)
            ours.zero_grad(set_to_none)


@pytest.mark.parametrize("views", [False, True])
def test_which_changes_with_rank_and_step(views):
    for set_to_none in (True, False):
        run_ranks(2, _changing, views, set_to_none)


def _unused_everywhere(rank, world):
    """A gradient of long ago stays as it is, to the bit, where no rank uses the parameter."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    old = torch.randn(3, 8) / 3
    for _ in range(3):
        model.zero_grad()
        model.module.branches[1].weight.grad = old.clone()
        model(torch.randn(4, 8), (0,))[0].sum().backward()
        assert torch.equal(model.module.branches[1].weight.grad, old)
        assert model.module.never.weight.grad is None
    model(torch.randn(4, 8), (1,))[0].sum().backward()
    kept = model.module.branches[1].weight.grad.clone()
    model(torch.randn(4, 8), (0,))[0].sum().backward()  # the gradient of before lies in the bucket
    assert torch.equal(model.module.branches[1].weight.grad, kept)


def test_unused_everywhere_stays_untouched():
    run_ranks(2, _unused_everywhere)


def _last_in_ready_order(rank, world):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0)
    for _ in range(2):
        model(torch.randn(4, 8), (1,))[0].sum().backward()
    return [b.params[0] for b in model.reducer.plan]


def test_what_is_unused_goes_last():
    order = run_ranks(2, _last_in_ready_order)[0]
    assert order[4:] == ["branches.0.bias", "branches.0.weight", "never.bias", "never.weight"]
    assert set(order[:2]) == {"branches.1.bias", "branches.1.weight"}


def _reported(rank, world):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(Branches())
    x = torch.randn(4, 8)
    model(x, (1,))[0].sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as caught:
        model(x, (1,))
    with pytest.raises(RuntimeError, match="Expected to have finished"):
        model._check_reducer_finalized()
    return str(caught.value)


def test_reported_by_name_if_not_asked_for():
    text = run_ranks(2, _reported)[1]
    assert "did not receive grad for rank 1: 2 3 4 5" in text
    assert "never.weight, never.bias, branches.0.weight, branches.0.bias" in text
    assert "find_unused_parameters=True" in text


def _in_two_backwards(rank, world):
    """One forward, the losses of its outputs run backward one by one: reduced when the last gradient is there."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})
    module.forward = lambda x: (module["a"](x), module["b"](x))
    model, x = DistributedDataParallel(module), torch.randn(world, 4, 8)
    expected = module["a"](x.flatten(0, 1)).square().mean()
    expected = torch.autograd.grad(expected, module["a"].weight)[0]
    for _ in range(3):
        model.zero_grad()
        a, b = model(x[rank])
        a.square().mean().backward()
        b.square().mean().backward()
        torch.testing.assert_close(module["a"].weight.grad, expected)
    return model.reducer.counters.backwards


def test_one_forward_in_two_backwards():
    assert run_ranks(2, _in_two_backwards) == [3, 3]


class Auxiliary(nn.Module):
    """Its forward runs a loss of its own backward, through the layer `side`, which the output may use as well."""

    def __init__(self, uses):
        super().__init__()
        self.main, self.side, self.uses = nn.Linear(8, 3), nn.Linear(8, 8), uses

    def forward(self, x):
        self.side(x).square().mean().backward()
        return self.main(self.side(x) if self.uses else x)


def _beside(rank, world, settings):
    """What a backward within forward, or one of the module inside, has left is averaged with what comes next."""
    from torchshard.ddp import DistributedDataParallel

    for uses in (True, False) if "find_unused_parameters" in settings else (True,):
        module = Auxiliary(uses)
        twin, x = copy.deepcopy(module), torch.randn(world, 4, 8)
        model = DistributedDataParallel(module, **settings)
        for step in range(4):
            model.zero_grad()
            twin.zero_grad()
            if step == 2:
                module.side(x[rank]).sum().backward()
                (twin.side(x.flatten(0, 1)).sum() / world).backward()
            model(x[rank]).square().mean().backward()
            twin(x.flatten(0, 1)).square().mean().backward()
            for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name, s=step: f"{settings} {s} {n}: {m}")


@pytest.mark.parametrize("views", [False, True])
def test_what_a_backward_beside_the_wrapper_leaves_is_averaged_with_the_next(views):
    for settings in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        run_ranks(2, _beside, {"gradient_as_bucket_view": views, **settings})


def _dropped(rank, world):
    """What came under no_sync and was dropped counts no more: no rank has a gradient of that branch."""
    from torchshard.ddp import DistributedDataParallel

    model, x = DistributedDataParallel(Branches(), find_unused_parameters=True), torch.randn(4, 8)
    for _ in range(3):
        with model.no_sync():
            model(x, (0,))[0].sum().backward()
        model.zero_grad()
        model(x, (1,))[0].sum().backward()
        assert model.module.branches[0].weight.grad is None


def test_what_is_dropped_before_it_is_reduced_counts_as_unused():
    run_ranks(2, _dropped)
