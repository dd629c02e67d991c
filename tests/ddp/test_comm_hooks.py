"""Communication hooks: torch's own, unchanged, give what they give under torch's wrapper; what a hook may do."""

import copy
import pickle
import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.models import mlp
from tests.ranks import run_ranks


class Several(nn.Module):
    """Parameters large and small, so that there are several buckets at small caps."""

    def __init__(self):
        super().__init__()
        self.body, self.wide, self.scale = mlp(16), nn.Linear(16, 300), nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        return self.wide(self.body(x)) * self.scale


def _power(**settings):
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5, **settings
    )


def _local():
    return post_localSGD_hook.PostLocalSGDState(None, dist.new_group([dist.get_rank()]), start_localSGD_iter=3)


HOOKS = {  # a state and a hook, and how far results may be apart
    "allreduce": lambda: (None, default_hooks.allreduce_hook, 0.0),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook, 0.0),
    "fp16 around allreduce": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 0.0),
    "noop": lambda: (None, debugging_hooks.noop_hook, 0.0),
    "power": lambda: (_power(), powerSGD_hook.powerSGD_hook, 1e-4),
    "power, cold, without feedback": lambda: (
        _power(use_error_feedback=False, warm_start=False),
        powerSGD_hook.powerSGD_hook,
        1e-4,
    ),
    "power in fp16": lambda: (_power(), default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), 1e-2),
    "post-localSGD": lambda: (_local(), post_localSGD_hook.post_localSGD_hook, 0.0),
}


def _hooks(rank, world):
    for name, make in HOOKS.items():
        _compare(name, make, "fp16" in name, rank)  # some with bucket views
    for settings in ({}, {"static_graph": True, "gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        _restarted(rank, settings)
    _sharded_steps(rank)


def _batch(step, rank):
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(step * 10 + rank))


def _restarted(rank, settings):
    """PowerSGD's state remembers something of each bucket: saved and loaded, it goes on as if nothing had been."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module, seen = Several(), []

    def watching(state, bucket):
        seen.append([p.numel() for p in bucket.parameters()])
        return powerSGD_hook.powerSGD_hook(state, bucket)

    def wrapped(module, state):
        model = DistributedDataParallel(module, bucket_cap_mb=0.002, **settings)
        model.register_comm_hook(state, watching)
        return model

    model = wrapped(module, _power())
    for step in range(4):
        model(_batch(step, rank)).square().mean().backward()
    kinds = seen[: len(model.reducer.plan)]
    assert len(kinds) > 1
    assert seen == 4 * kinds, "a hook sees the buckets that stay, from the first backward on"
    model.zero_grad()
    again = wrapped(copy.deepcopy(module), pickle.loads(pickle.dumps(model._comm_hooks[0][1])))
    for step in range(4, 7):
        for each in (model, again):
            each(_batch(step, rank)).square().mean().backward()
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)


def _sharded_steps(rank):
    """Optimizers that step their shares in a hook ask the wrapper whether its buckets have been laid out."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module, gloo = Several(), dist.get_backend
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    dist.get_backend = lambda *_: "nccl"  # torch refuses gloo; with hooks in turn it works
    model.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer))
    dist.get_backend = gloo
    for _ in range(4):
        model.zero_grad()
        model(_batch(0, rank)).square().mean().backward()
    for _ in range(3):  # the first backward has told torch's optimizer where its parameters lie
        plain.zero_grad()
        sum(plain(_batch(0, r)).square().mean() / 2 for r in range(2)).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def _compare(name, make, views, rank):
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module, settings = Several(), {"gradient_as_bucket_view": views}
    models = [TorchDDP(copy.deepcopy(module), **settings), DistributedDataParallel(module, **settings)]
    for model in models:
        state, hook, tolerance = make()
        model.register_comm_hook(state, hook)
    for step in range(4):
        x = _batch(step, rank)
        for model in models:
            model(x).square().mean().backward()
        for (n, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            if tolerance is not None:
                where = f"{name}, step {step}, {n}: "
                torch.testing.assert_close(
                    q.grad, p.grad, rtol=tolerance, atol=tolerance, msg=lambda m, where=where: where + m
                )
        for model in models:
            model.zero_grad(set_to_none=step % 2 == 0)
    if tolerance is None:  # gradients side by side in another order: another matrix, another approximation
        assert all(q.grad is None or q.grad.isfinite().all() for q in models[1].parameters())


def test_torchs_hooks():
    run_ranks(2, _hooks)


class Rotated(nn.Module):
    """A complex parameter, contiguous or not, beside a real one."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64).t())
        self.shift, self.size = nn.Parameter(torch.randn(6, dtype=torch.complex64)), nn.Parameter(torch.ones(6))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.turn + self.shift).abs() * self.size


def _complex(rank, world):
    """Hooks see pairs of real numbers: those that convert to real dtypes lose nothing."""
    from torchshard.ddp import DistributedDataParallel

    shown = []

    def seeing(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket.set_buffer(bucket.buffer().double())
        shown.extend((g.dtype, g.shape[-1]) for g in bucket.gradients() if g.shape[-1] == 2)
        return default_hooks.allreduce_hook(state, bucket)

    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        torch.manual_seed(0)
        module = Rotated()
        for views in (False, True):
            models = [
                cls(copy.deepcopy(module), gradient_as_bucket_view=views) for cls in (TorchDDP, DistributedDataParallel)
            ]
            for model in models:
                model.register_comm_hook(None, hook)
            for step in range(3):
                for model in models:
                    model(torch.randn(5, 4, generator=torch.Generator().manual_seed(step + rank))).sum().backward()
                for p, q in zip(*(model.parameters() for model in models), strict=True):
                    torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, seeing)
    model(torch.ones(5, 4)).sum().backward()
    assert shown == [(torch.float64, 2)] * 2
    assert module.shift.grad.imag.abs().sum() > 0.1


def test_complex_gradients():
    run_ranks(2, _complex)


def _power_of_many(rank, world):
    """On gloo torch's wrapper comes to no end here: callbacks wait for collectives, and hold all of its threads."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = Several()
    models = [TorchDDP(copy.deepcopy(module)), DistributedDataParallel(module, bucket_cap_mb=0.001)]
    models[1].register_comm_hook(_power(use_error_feedback=False), powerSGD_hook.powerSGD_hook)
    for step in range(8):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(step * 10 + rank))
        for model in models:
            model.zero_grad()
            model(x).square().mean().backward()
    assert len(models[1].reducer.plan) > 3
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        found = torch.stack([q.grad, q.grad])
        dist.broadcast(found[0], 0)
        torch.testing.assert_close(*found, rtol=0, atol=0)
        assert (q.grad - p.grad).norm() < p.grad.norm()  # of rank 2


def test_callbacks_that_wait_in_several_buckets():
    run_ranks(2, _power_of_many)


def _more_buckets(rank, world):
    """Hooks whose results do not depend on what shares a bucket."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = Several()
    reference = TorchDDP(copy.deepcopy(module))
    x = torch.randn(5, 16) * (1 + rank)
    reference(x).square().mean().backward()
    seen = []

    def chained(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert isinstance(bucket, dist.GradBucket)
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        assert all(g.shape == p.shape for g, p in zip(bucket.gradients(), bucket.parameters(), strict=True))
        assert torch.equal(bucket.buffer(), torch.cat([g.flatten() for g in bucket.gradients()]))  # as hooks cut it
        seen.append((bucket.index(), bucket.is_last()))
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0] * 2).then(lambda f: f.value() / (2 * state))

    for hook, state, tolerance in [
        (chained, world, 1e-6),
        (default_hooks.bf16_compress_hook, None, 2e-2),
        (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), None, 2e-2),
    ]:
        model = DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=0.001)
        model.register_comm_hook(state, hook)
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
            for p, q in zip(reference.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad, rtol=tolerance, atol=tolerance)
    count = len(model.reducer.plan)
    assert count > 3
    assert seen == [(k, k == count - 1) for _ in range(3) for k in range(count)]


def test_futures_in_several_buckets():
    run_ranks(2, _more_buckets)


def _builtin_and_enum(rank, world):
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook

    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module, x, grads = mlp(16), torch.randn(3, 16) + rank, []
    for kind in (None, dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS, "enum"):
        model = DistributedDataParallel(copy.deepcopy(module))
        if kind == "enum":
            register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, model, dist.group.WORLD)
        elif kind:
            model._register_builtin_comm_hook(kind)
        model(x).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for other, tolerance in zip(grads[1:], (0, 1e-3, 0), strict=True):
        torch.testing.assert_close(other, grads[0], rtol=tolerance, atol=tolerance)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def test_builtin_hooks():
    run_ranks(2, _builtin_and_enum)


def _unused_and_accumulated(rank, world):
    """With a hook too: parameters without gradients, no_sync, and gradients that are there already."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
    module.forward = lambda x, k: module[k](module[0](x))
    models = [wrap(copy.deepcopy(module), find_unused_parameters=True) for wrap in (TorchDDP, DistributedDataParallel)]
    for model in models:
        model.module.forward = lambda x, k, m=model.module: m[k](m[0](x))
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for step, k in enumerate((1, 1 + rank, 2, 1, 1)):
        x = torch.randn(4, 8)
        for model in models:
            if step == 3:
                with model.no_sync():
                    model(x, k).square().mean().backward()
            model(x, k).square().mean().backward()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert (p.grad is None) == (q.grad is None), step
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4)
        if step % 2:
            for model in models:
                model.zero_grad()


def test_hooks_with_unused_parameters():
    run_ranks(2, _unused_and_accumulated)


@dataclass
class Times:
    """A hook with settings, which cannot be hashed."""

    factor: float

    def __call__(self, state, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0] * self.factor)


def _failing(rank, world):
    """What a hook raises is raised by backward, and the wrapper goes on."""
    from torchshard.ddp import DistributedDataParallel

    model, fail = DistributedDataParallel(mlp(16), bucket_cap_mb=0), ["at once"]

    def hook(state, bucket):
        if fail == ["at once"]:
            raise ValueError("no such luck")
        if fail == ["set"]:
            unlucky = torch.futures.Future()
            unlucky.set_exception(KeyError("no luck set"))
            return unlucky
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def then(f):
            if fail == ["later"]:
                raise ValueError("no luck later")
            return [f.value()] if fail == ["list"] else f.value()[0] / world

        return 3 if fail == ["number"] else future.then(then)

    model.register_comm_hook(None, hook)
    x = torch.randn(2, 16)
    for case, kind, text in [
        ("at once", ValueError, "no such luck"),
        ("later", RuntimeError, "ValueError: no luck later"),
        ("set", KeyError, "no luck set"),
        ("list", TypeError, "must hold one tensor"),
        ("number", RuntimeError, "callback must return a torch.futures.Future object, but got builtins.int"),
    ]:
        fail[0] = case
        with pytest.raises(kind, match=text):
            model(x).square().mean().backward()
        fail[0] = ""
        model.zero_grad()
        model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, hook)
    sums = DistributedDataParallel(nn.Linear(1, 1))
    sums.register_comm_hook(None, Times(3.0))
    sums(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert sums.module.weight.grad.item() == 3 * world * (world + 1) / 2


def test_hooks_that_raise():
    run_ranks(2, _failing)


WRONG = {  # what a hook may give by mistake, and what is said of it
    "short": (lambda flat: flat[:-1], "torch.float32 of shape [271] on cpu"),
    "long": (lambda flat: torch.cat([flat, flat]), "torch.float32 of shape [544] on cpu"),
    "without values": (lambda flat: flat.to("meta"), "torch.float32 of shape [272] on meta"),
    "complex": (lambda flat: flat.to(torch.complex64), "torch.complex64 of shape [272] on cpu"),
    "sparse": (lambda flat: flat.to_sparse(), "torch.float32, sparse_coo, of shape [272] on cpu"),
    "list": (lambda flat: [flat], "list"),
    "nothing": (lambda flat: None, "NoneType"),
}


def _unfit(rank, world):
    """Hook, bucket, what was expected and what came are named, and the wrapper goes on."""
    from torchshard.ddp import DistributedDataParallel

    change = [lambda flat: flat]

    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(change[0](bucket.buffer()))
        return future

    model, x = DistributedDataParallel(nn.Linear(16, 16)), torch.ones(2, 16)
    model.register_comm_hook(None, hook)
    for change[0], got in WRONG.values():
        with pytest.raises((ValueError, TypeError)) as error:
            model(x).sum().backward()
        text = str(error.value)
        for part in ("_unfit.<locals>.hook", "bucket 0", "torch.float32 of shape [272] on cpu", f"holds {got}"):
            assert part in text
    model.zero_grad()
    change[0] = lambda flat: flat.double().view(17, 16).t().contiguous().t()  # another dtype and form
    model(x).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((16, 16), 2.0))

    rows = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    rows.register_comm_hook(None, hook)
    change[0] = lambda flat: flat.to_dense()[1:]
    with pytest.raises(ValueError, match=r"float32, sparse_coo, of shape \[4, 2\] on cpu.*shape \[3, 2\] on cpu"):
        rows(torch.tensor([1])).sum().backward()


def test_results_that_do_not_fit():
    run_ranks(1, _unfit)


def _bad_bucket(state, bucket: int) -> torch.futures.Future[torch.Tensor]: ...


def _bad_return(state, bucket: dist.GradBucket) -> int: ...


@pytest.mark.parametrize("hook", [3, _bad_bucket, _bad_return])
def test_what_is_no_hook(fake_group, hook):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(mlp(8))
    with pytest.raises((TypeError, ValueError)) as ours:
        model.register_comm_hook(None, hook)
    with pytest.raises(type(ours.value), match=re.escape(str(ours.value))):
        TorchDDP._check_comm_hook(model, hook)


def test_what_a_hook_calls_its_bucket_is_its_own_affair(fake_group):
    """Torch's wrapper says KeyError: 'bucket'."""
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(mlp(8))
    model.register_comm_hook(None, lambda _, flat: default_hooks.allreduce_hook(None, flat))
    with pytest.raises(ValueError, match="called with a state and a bucket, and its signature is \\(bucket\\)"):
        model.register_comm_hook(None, lambda bucket: None)
