"""Gradients of another dtype than their parameters', as `grad_dtype` has it: reduced in their own."""

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

BATCH, WIDTH = 5, 72  # weights are large for a bucket, biases small


def module(dtype, grad_dtype):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)).to(dtype)
    set_to(made, grad_dtype)
    return made


def set_to(made, grad_dtype):
    for p in made.parameters():
        p.grad_dtype = grad_dtype


def batch(step, rank, dtype):
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def backward(made, step, rank, dtype):
    made(batch(step, rank, dtype)).float().square().mean().backward()


def averages(world, steps, dtype, grad_dtype):
    """The mean over ranks of the gradients that `steps` backwards leave behind, in double precision."""
    sums = None
    for rank in range(world):
        made = module(dtype, grad_dtype)
        for step in steps:
            backward(made, step, rank, dtype)
        found = [p.grad.double() / world for p in made.parameters()]
        sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
    return sums


def compare(made, want, grad_dtype, case):
    # Sums of two rounded numbers, in the gradients' own precision.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if grad_dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for p, value in zip(made.parameters(), want, strict=True):
        assert p.grad.dtype is grad_dtype, case
        torch.testing.assert_close(p.grad.double(), value, **tolerance, msg=lambda m: f"{case}: {m}")


def reduced(rank, world):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from torchshard import DistributedDataParallel

    options = ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True})
    for dtype, grad_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        want = [averages(world, (step,), dtype, grad_dtype) for step in range(3)]
        twice = averages(world, (0, 1), dtype, grad_dtype)
        for option in (*options, "hook", "later"):
            case = dtype, grad_dtype, option
            made = module(dtype, None if option == "later" else grad_dtype)
            wrapped = DistributedDataParallel(made, **(option if isinstance(option, dict) else {}))
            if option == "hook":
                wrapped.register_comm_hook(None, allreduce_hook)
            for step in range(3):
                if option == "later":
                    set_to(made, grad_dtype)
                wrapped.zero_grad(set_to_none=step == 1)
                backward(wrapped, step, rank, dtype)
                compare(made, want[step], grad_dtype, case)
            wrapped.zero_grad()
            if option not in ("hook", {"static_graph": True}):
                with wrapped.no_sync():
                    backward(wrapped, 0, rank, dtype)
                backward(wrapped, 1, rank, dtype)
                compare(made, twice, grad_dtype, (*case, "accumulated"))


def test_gradients_are_reduced_in_their_own_dtype():
    run_ranks(2, reduced)


def elsewhere(rank, world):
    """Delayed parameters, joined ranks, mixed precision."""
    from torch.nn.parallel.distributed import _MixedPrecision

    from torchshard import DistributedDataParallel

    dtype, grad_dtype = torch.bfloat16, torch.float32
    want = averages(world, (0,), dtype, grad_dtype)
    made = module(dtype, grad_dtype)
    named = [(name, p) for name, p in made.named_parameters() if name.startswith("0.")]
    wrapped = DistributedDataParallel(
        made, delay_all_reduce_named_params=named, param_to_hook_all_reduce=made[2].weight
    )
    backward(wrapped, 0, rank, dtype)
    compare(made, want, grad_dtype, "delayed")

    made = module(dtype, grad_dtype)
    wrapped = DistributedDataParallel(made)
    with wrapped.join():
        for step in range(1 + rank):
            wrapped.zero_grad()
            backward(wrapped, step, rank, dtype)
    assert all(p.grad.dtype is grad_dtype for p in made.parameters())

    low = module(torch.float32, torch.bfloat16)
    wrapped = DistributedDataParallel(low, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    backward(wrapped, 0, rank, torch.float32)
    compare(low, averages(world, (0,), torch.float32, torch.bfloat16), torch.bfloat16, "mixed precision")


def test_delayed_parameters_joined_ranks_and_mixed_precision():
    run_ranks(2, elsewhere)


class Foreign(torch.autograd.Function):
    """Whose gradient for its weight is in full precision, whatever that of the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.saved_tensors[0].float().T @ grad.float()


class WithForeign(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, 3, dtype=torch.bfloat16))

    def forward(self, x):
        return Foreign.apply(x, self.weight)


def undecided(rank, world):
    """With None each gradient says what it is: fine where it is of the parameter's own dtype."""
    from torchshard import DistributedDataParallel

    made = module(torch.bfloat16, None)
    wrapped = DistributedDataParallel(made)
    for step in range(2):
        wrapped.zero_grad()
        backward(wrapped, step, rank, torch.bfloat16)
        compare(made, averages(world, (step,), torch.bfloat16, None), torch.bfloat16, "None")

    foreign = WithForeign()
    foreign.weight.grad_dtype = torch.float32
    wrapped = DistributedDataParallel(foreign)
    wrapped(batch(0, rank, torch.bfloat16)).sum().backward()
    want = sum(batch(0, r, torch.bfloat16).float().sum(0) for r in range(world)) / world
    torch.testing.assert_close(foreign.weight.grad, want[:, None].expand(WIDTH, 3))

    foreign = WithForeign()
    foreign.weight.grad_dtype = None
    wrapped = DistributedDataParallel(foreign)
    with pytest.raises(RuntimeError, match=r"torch\.float32.* bucket of torch\.bfloat16.*grad_dtype = torch\.float32"):
        wrapped(batch(0, rank, torch.bfloat16)).sum().backward()


def test_no_dtype_is_decided():
    run_ranks(2, undecided)


def compiled(rank, world):
    from torchshard import DistributedDataParallel

    for dtype, grad_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        made = module(dtype, grad_dtype)
        model = torch.compile(DistributedDataParallel(made), backend="torchshard", options={"inner": "aot_eager"})
        for step in range(3):
            made.zero_grad()
            backward(model, step, rank, dtype)
            compare(made, averages(world, (step,), dtype, grad_dtype), grad_dtype, (dtype, "compiled"))


def test_compiled():
    run_ranks(2, compiled)
