"""What a step may do besides: optimizers in backward, lower precision, delayed reduction, finishing by hand, ..."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from tests.models import Parts, mlp
from tests.ranks import run_ranks


def _loss(model, x):
    return model(x).square().mean()


def _in_backward(rank, world):
    """Optimizers that step in backward, on averages; as with the optimizer's own step after it."""
    from torchshard.ddp import DistributedDataParallel

    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for how in ("each its own", "fused"):
        torch.manual_seed(0)
        reference = mlp(8)
        model = DistributedDataParallel(copy.deepcopy(reference), bucket_cap_mb=0.0005)
        optimizer = sgd(reference.parameters())
        if how == "fused":
            model._register_fused_optim(torch.optim.SGD, lr=0.1, momentum=0.9)
        else:
            _apply_optimizer_in_backward(torch.optim.SGD, model.module.parameters(), {"lr": 0.1, "momentum": 0.9})
        for _ in range(3):
            x = torch.randn(world, 3, 8)
            optimizer.zero_grad()
            _loss(reference, x.flatten(0, 1)).backward()
            optimizer.step()
            if how == "fused":
                model.zero_grad()
            _loss(model, x[rank]).backward()
            assert how == "fused" or all(p.grad is None for p in model.parameters())
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q, p)


def _mixed(rank, world):
    from torchshard.ddp import DistributedDataParallel

    for reduce_dtype in (None, torch.float32):
        torch.manual_seed(0)
        module = nn.Sequential(mlp(8), nn.BatchNorm1d(8, affine=False))
        reference = copy.deepcopy(module).bfloat16()
        config = _MixedPrecision(torch.bfloat16, reduce_dtype, torch.bfloat16)
        model, dtypes = DistributedDataParallel(module, mixed_precision=config), []
        model.module.register_forward_hook(lambda m, a, out: dtypes.append((a[0].dtype, out.dtype)))  # noqa: B023
        assert {b.dtype for b in model.buffers()} == {torch.bfloat16, torch.int64}
        full = [p.data_ptr() for p in model.parameters()]
        for step in range(4):
            x = torch.randn(world, 3, 8)
            with model.no_sync() if step == 2 else contextlib.nullcontext():
                loss = _loss(model, x[rank])
                assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
                loss.backward()
            assert {t.dtype for p in model.parameters() for t in (p, p.grad)} == {torch.float32}
            assert [p.data_ptr() for p in model.parameters()] == full
            for r in range(world):
                (_loss(reference, x[r].bfloat16()) / world).backward()
            if step != 2:
                for p, q in zip(reference.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(q.grad, p.grad.float(), rtol=0.1, atol=0.02)
                reference.zero_grad()
                model.zero_grad(set_to_none=step != 1)
        try:
            raise KeyError
        except KeyError:  # a forward in a handler of the caller's has not failed
            loss = _loss(model, x[rank])
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        loss.backward()
        with torch.no_grad():
            model(x[rank])
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(3, 9))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert set(dtypes) == {(torch.bfloat16, torch.bfloat16)}


def _delayed(rank, world):
    from torchshard.ddp import DistributedDataParallel

    for all_of_them in (False, True):
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        names = [n for n, _ in module.named_parameters() if all_of_them or not n.startswith("0")]
        named = [(n, p) for n, p in module.named_parameters() if n in names]
        extra = nn.Parameter(torch.ones(8))
        model = DistributedDataParallel(
            module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=extra, find_unused_parameters=True
        )
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        first = weights.clone()
        dist.broadcast(first, 0)
        assert torch.equal(weights, first)
        assert model._delay_all_reduce_all_params == all_of_them
        reference = copy.deepcopy(module)
        for step in range(4):
            x = torch.randn(world, 3, 8, generator=torch.Generator().manual_seed(step))
            with model.no_sync() if step == 2 else contextlib.nullcontext():
                _loss(model, x[rank] * extra).backward()
            _loss(reference, x.flatten(0, 1)).backward()
            if step != 2:
                for p, q in zip(reference.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(q.grad, p.grad)
                reference.zero_grad()
                model.zero_grad(set_to_none=step != 1)


def _delayed_between(rank, world):
    """What counts is the forward whose backward runs, not the last one."""
    from torchshard.ddp import DistributedDataParallel

    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    model = DistributedDataParallel(
        nn.Sequential(first, second),
        delay_all_reduce_named_params=[("1.weight", second.weight)],
        param_to_hook_all_reduce=first.bias,
    )
    data = torch.arange(1.0, world + 1).reshape(world, 1, 1).expand(world, 1, 2)
    reduced = model(data[rank]).sum()
    with model.no_sync():
        unreduced = model(data[rank]).sum()
    reduced.backward()
    average = first(data).mean(0)  # of the gradients of the second weight
    torch.testing.assert_close(second.weight.grad, average)
    model(data[rank])
    unreduced.backward()
    torch.testing.assert_close(second.weight.grad, average + first(data[rank]))


def _conjugated(rank, world):
    from torchshard.ddp import DistributedDataParallel

    class Conjugates(nn.Module):
        def __init__(self):
            super().__init__()
            self.z = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))

        def forward(self, x):
            return torch.view_as_real(x @ self.z.conj()).sum()

    model = DistributedDataParallel(Conjugates())
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 2), rank + 1.0, dtype=torch.complex64)).backward()
        assert model.module.z.grad.tolist() == [[1.5 - 1.5j] * 2] * 2


class Casts(nn.Linear):
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


def _converted(rank, world):
    """A module that is converted between two steps, as a whole or in part, is reduced in its new dtypes."""
    from torchshard.ddp import DistributedDataParallel

    for width, views in ((8, False), (128, False), (128, True)):
        layers = nn.Sequential(Casts(width, width), Casts(width, width))
        model = DistributedDataParallel(layers, gradient_as_bucket_view=views)
        data = torch.randn(world, 4, width, generator=torch.Generator().manual_seed(1))
        for convert in (layers.float, layers.double, layers[1].float, layers.double, layers[0].float):
            convert()
            for _ in range(2):
                model.zero_grad()
                model(data[rank]).square().mean().backward()
            reference = copy.deepcopy(layers)
            reference.zero_grad()
            reference(data.flatten(0, 1)).square().mean().backward()
            for p, q in zip(reference.parameters(), model.parameters(), strict=True):
                near = {"rtol": 1e-12, "atol": 1e-14} if convert == layers.double else {}
                torch.testing.assert_close(q.grad, p.grad, **near)


def _by_hand(rank, world):
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(mlp(8))
    reference, x = copy.deepcopy(model.module), torch.randn(world, 3, 8)
    _loss(reference, x.flatten(0, 1)).backward()
    with pytest.raises(RuntimeError, match="needs require_manual_backward_finalization"):
        model.finalize_backward()
    model.require_manual_backward_finalization = True
    assert not model.should_finalize_after_backward
    with pytest.raises(RuntimeError, match="nothing to do"):
        model.finalize_backward()
    for _ in range(3):
        model.zero_grad()
        _loss(model, x[rank]).backward()
        assert model.should_finalize_after_backward
        with pytest.raises(RuntimeError, match="Expected finalize_backward"):
            model(x[rank])
        model.finalize_backward()
        assert not model.should_finalize_after_backward
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)


def _skipped_by_one(rank, world, known):
    """Ranks that differ in what they skip are told, where torch would hang, or add up what does not belong together."""
    from torchshard.ddp import DistributedDataParallel
    from torchshard.errors import RankMismatchError

    model = DistributedDataParallel(
        Parts(), bucket_cap_mb=0, find_unused_parameters=True, skip_all_reduce_unused_params=True
    )
    picks = [(1, 2), (0, 1)]
    for pick in picks if known else picks[1:] * 2:
        model.module.pick = pick
        _loss(model, torch.randn(3, 8)).backward()
    model.module.pick = picks[0] if rank else picks[1]
    with pytest.raises(RankMismatchError, match="have different buckets"):
        _loss(model, torch.randn(3, 8)).backward()
    dist.destroy_process_group()  # one rank has issued what the other will not join


def _skipped_alike(rank, world):
    """Ranks that lack other gradients, but of the same buckets none at all, go on together."""
    from torchshard.ddp import DistributedDataParallel

    settings = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    module = Parts()
    models = [TorchDDP(copy.deepcopy(module), **settings), DistributedDataParallel(module, **settings)]
    for pick in ((0, 1, 2, 3), (1, 2), (0, 1)):
        x = torch.randn(3, 8)
        for model in models:
            model.module.pick = pick if rank else (0, 1, 2, 3)
            model.zero_grad()
            _loss(model, x).backward()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(q.grad, p.grad)


def _skipped(rank, world):
    """Buckets without gradients are not sent."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    settings = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    models = [TorchDDP(Parts(), **settings), DistributedDataParallel(Parts(), bucket_cap_mb=0, **settings)]
    models[1].module.load_state_dict(models[0].module.state_dict())
    for _ in range(3):
        x, issued = torch.randn(3, 8), models[1].reducer.exchange.issued
        for model in models:
            model.zero_grad()
            _loss(model, x).backward()
        for (n, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), n
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad)
    assert models[1].reducer.exchange.issued - issued == 4 + 1  # and which parameters are used


def _toggled(rank, world):
    """Parameters frozen after wrapping count as unused; those that were frozen when wrapped are averaged as well."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = Parts()
    module.pick = (0, 1, 2, 3)
    module.parts[3].requires_grad_(False)
    models = [wrap(copy.deepcopy(module), find_unused_parameters=True) for wrap in (TorchDDP, DistributedDataParallel)]
    for step in range(6):
        x = torch.randn(3, 8) + rank
        for model in models:
            model.zero_grad()
            model.module.parts[1].requires_grad_(step not in (0, 3))
            model.module.parts[3].requires_grad_(step >= 4)
            _loss(model, x).backward()
        for (n, p), q in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
            assert (p.grad is None) == (q[1].grad is None), f"{step} {n}"
            if p.grad is not None:
                if "parts.3" in n:  # torch leaves each rank its own
                    dist.all_reduce(p.grad.div_(world))
                torch.testing.assert_close(q[1].grad, p.grad, msg=lambda m, s=step, n=n: f"{s} {n}: {m}")
    model = DistributedDataParallel(mlp(8))
    _loss(model, x).backward()
    model.module[0].requires_grad_(False)
    _loss(model, x).backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        model(x)


def _twice_differentiated(rank, world):
    """A penalty on gradients, and backward(create_graph=True): as torch."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    models = [wrap(copy.deepcopy(module)) for wrap in (TorchDDP, DistributedDataParallel)]
    for _ in range(3):
        x = torch.randn(3, 8, requires_grad=True)
        for model in models:
            model.zero_grad()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            ((slope.norm() - 1) ** 2 + _loss(model, x)).backward()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(q.grad, p.grad)


def _pipeline(rank, world):
    """As torch's pipelining does it: forwards under no_sync, and the last backward is declared to be reduced."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(mlp(8))
    reference, xs = copy.deepcopy(model.module), torch.randn(3, world, 2, 8)
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        with model.no_sync():
            outs = [model(x[rank]) for x in xs]
        for k, out in enumerate(outs):
            if k < 2:
                with model.no_sync():
                    out.square().mean().backward()
            else:
                model.reducer.prepare_for_backward([out])
                out.square().mean().backward()
        for x in xs:
            _loss(reference, x.flatten(0, 1)).backward()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)


def _aliased(rank, world):
    """Gradients that are other tensors than the bucket's views, in the same memory."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    models = [TorchDDP(copy.deepcopy(module)), DistributedDataParallel(module, gradient_as_bucket_view=True)]
    for _ in range(3):
        x = torch.randn(4, 8)
        for model in models:
            _loss(model, x).backward()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
            q.grad = q.grad.detach()


def _elsewhere(rank, world):
    """Another default device is none of the wrapper's business."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module, x = Parts(), torch.randn(3, 8)
    group = dist.new_group()  # of which nothing is known yet
    with torch.device("meta"):
        model = DistributedDataParallel(
            module, process_group=group, find_unused_parameters=True, skip_all_reduce_unused_params=True
        )
        for _ in range(3):
            model.zero_grad()
            _loss(model, x).backward()
            assert all(p.grad is None or p.grad.device.type == "cpu" for p in model.parameters())


def _expanded(rank, world):
    """What cannot be written to is refused by all ranks, also by the one that all others would copy."""
    from torchshard.ddp import DistributedDataParallel

    module = mlp(8)
    module.register_buffer("mask", torch.ones(1, 4).expand(4, 4))
    with pytest.raises(RuntimeError, match="more than one element at the same place in memory"):
        DistributedDataParallel(module)


def _surface(rank, world):
    """What join and torch's tests ask of a reducer."""
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(Parts(), find_unused_parameters=True, bucket_cap_mb=0)
    reducer = model.reducer
    for pick in ((0, 1), (0, 1), (0, 2)):
        assert reducer._ddp_graph_static()
        model.module.pick = pick
        _loss(model, torch.randn(3, 8)).backward()
    assert not reducer._ddp_graph_static()
    assert reducer._get_local_used_map().tolist() == [world * n for n in (1, 1, 0, 0, 1, 1, 0, 0)]
    zeros = reducer._get_zeros_like_grad_buckets()
    assert [b.buffer().numel() for b in zeros] == [b.nbytes // 4 for b in reducer.plan]
    assert [b.is_last() for b in zeros] == [False] * 7 + [True]
    zeros[0].buffer().fill_(rank + 1)
    assert reducer._run_comm_hook(zeros[0]).wait()[0].eq(3).all()
    assert reducer._rebuild_buckets() is False
    future = torch.futures.Future()
    reducer._install_post_backward_futures([future.then(lambda f: seen.append(f.value()))])
    seen = []
    future.set_result(5)
    _loss(model, torch.randn(3, 8)).backward()
    assert seen == [5]
    assert not reducer.post_backward


CASES = [
    _in_backward, _mixed, _delayed, _delayed_between, _conjugated, _converted, _by_hand, _skipped, _skipped_alike, _toggled, _twice_differentiated, _pipeline, _surface, _aliased, _elsewhere, _expanded,
]  # fmt: skip


def _run(rank, world):
    for case in CASES:
        try:
            case(rank, world)
        except BaseException as error:
            error.add_note(f"in {case.__name__}")
            raise


@pytest.mark.parametrize("known", [False, True])
def test_buckets_skipped_by_one_rank_only(known):
    run_ranks(2, _skipped_by_one, known)


def test_steps():
    run_ranks(2, _run)
