"""Activation checkpoints in the wrapper and around it: backwards inside of a backward, forwards run again in one."""

import contextlib
import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from tests.models import Stops, mlp, stumble
from tests.ranks import run_ranks
from torchshard import _torch

SETTINGS = {}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}
BFLOAT = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)


def _wrap(module, **settings):
    from torchshard.ddp import DistributedDataParallel

    return DistributedDataParallel(module, **{"bucket_cap_mb": 0.0005, **settings})


class Inside(nn.Module):
    """Every parameter is in a checkpoint: in a re-entrant one, backward of the outputs reaches none itself."""

    def __init__(self, reentrant, nested=False):
        super().__init__()
        self.blocks, self.nested, self.reentrant = nn.ModuleList(mlp(8, 2) for _ in range(3)), nested, reentrant
        self.stumbles = False

    def _run(self, act, x):
        return act(x) if self.reentrant is None else checkpoint(act, x, use_reentrant=self.reentrant)

    def _middle(self, x):
        x = self._run(self.blocks[1], x)
        return Stops.apply(x, stumble) if self.stumbles else x

    def forward(self, x, skip=False):
        if skip:
            return x * 2
        x = self._run(self.blocks[0], x)
        x = self._run(self._middle, x) if self.nested else self._middle(x)
        return self._run(self.blocks[2], x)


class BiasLast(nn.Module):
    """Its last operation needs nothing of the forward: a gradient comes before a checkpoint around it runs it again."""

    def __init__(self):
        super().__init__()
        self.inner, self.bias = mlp(8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.inner(x).sin() + self.bias


def _inputs(rank, world, step):
    """One rank's, and all ranks'."""
    every = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
    return every[rank], every.flatten(0, 1)


def _same(model, reference, case):
    for (name, p), q in zip(reference.named_parameters(), model.module.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda m, n=name: f"{case}, {n}: {m}")


def _inside(rank, world):
    """Gradients are those of one process, whatever the setting, also where they are accumulated."""
    for settings in SETTINGS:
        for nested in (False, True):
            torch.manual_seed(0)
            module = Inside(reentrant=True, nested=nested)
            model, reference = _wrap(module, **settings), copy.deepcopy(module)
            for step in range(4):
                model.zero_grad()
                reference.zero_grad()
                for local in (True, False) if step % 2 else (False,):
                    own, every = _inputs(rank, world, 2 * step + local)
                    with model.no_sync() if local else contextlib.nullcontext():
                        model(own).square().mean().backward()
                    reference(every).square().mean().backward()
                _same(model, reference, f"{settings} {nested=} {step=}")
            assert model.reducer.counters.backwards == 4, settings


def _no_reduction(rank, world):
    """A backward that reaches no parameter, or ends in an exception, on one rank or on all, is no reduction."""
    for settings, one_bucket in itertools.product(SETTINGS, (False, True)):  # of quiet parameters all but one
        module = Inside(reentrant=True)
        model = _wrap(module, bucket_cap_mb=25 if one_bucket else 0.0005, **settings)
        reference = copy.deepcopy(model.module)
        for step in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            if rank == 0:
                model(x, skip=True).sum().backward()
                torch.autograd.grad(model(x, skip=True).sum(), x)
            if step:
                module.stumbles = True
                with pytest.raises(ValueError, match="stumbled"):
                    model(x).sum().backward()
                module.stumbles = False
            model.zero_grad()
            reference.zero_grad()
            own, every = _inputs(rank, world, step)
            model(own).square().mean().backward()
            reference(every).square().mean().backward()
            _same(model, reference, f"{settings} {step=}")
            assert model.reducer.counters.backwards == step + 1


class SomeUnused(Inside):
    """The last parameters get no gradient: none but quiet hooks are called."""

    def __init__(self):
        super().__init__(reentrant=True)
        self.unused = nn.Linear(8, 8)


def _unused(rank, world):
    """With find_unused_parameters the gradients of each backward are reduced at its end."""
    module = SomeUnused()
    model, reference = _wrap(module, bucket_cap_mb=25, find_unused_parameters=True), copy.deepcopy(module)
    for step in range(4):
        model.zero_grad()
        reference.zero_grad()
        own, every = _inputs(rank, world, step)
        model(own).square().mean().backward()
        reference(every).square().mean().backward()
        assert model.reducer.counters.backwards == step + 1
        assert model.module.unused.weight.grad is None
        _same(model, reference, f"{step=}")


class Holder:
    def __init__(self, held):
        self.held = held


class Hidden(Inside):
    """The wrapper does not find its outputs."""

    def forward(self, x):
        return Holder(super().forward(x))


def _hidden(rank, world):
    """Where nothing tells of the outer backward, gradients are right or an error says why they cannot be."""
    for settings in SETTINGS:
        for around in (False, True):
            torch.manual_seed(0)
            model = _wrap(Hidden(reentrant=True) if not around else Hidden(None), **settings)
            reference = copy.deepcopy(model.module)
            for step in range(3):
                own, every = _inputs(rank, world, step)
                model.zero_grad()
                reference.zero_grad()
                held = checkpoint(lambda x, m=model: m(x).held, own, use_reentrant=True) if around else model(own).held
                if not around and ("static_graph" in settings or "find_unused_parameters" in settings):
                    with pytest.raises(NotImplementedError, match="use_reentrant=False"), _torch.without_fast_paths():
                        held.square().mean().backward()
                    continue
                held.square().mean().backward()
                reference(every).held.square().mean().backward()
                _same(model, reference, f"{settings} {around=} {step=}")


def _lowered(rank, world):
    """In low precision: the gradients are those without checkpoints, and parameters have their own dtype again."""
    for reentrant, around in ((True, False), (False, False), (None, True)):
        torch.manual_seed(0)
        models = [_wrap(Inside(how), mixed_precision=BFLOAT) for how in (None, reentrant)]
        models[1].module.load_state_dict(models[0].module.state_dict())
        for step in range(3):
            x, _ = _inputs(rank, world, step)
            for model, again in zip(models, (False, around), strict=True):
                model.zero_grad()
                out = checkpoint(model, x, use_reentrant=False) if again else model(x)
                out.float().square().mean().backward()
            _same(models[1], models[0].module, f"{reentrant=} {around=} {step=}")
            assert {t.dtype for p in models[1].parameters() for t in (p, p.grad)} == {torch.float32}


def _around(rank, world):
    """A checkpoint around the wrapper runs it again in backward; a step stays one step."""
    for settings in SETTINGS:
        for make in (BiasLast, partial(mlp, 8), partial(Inside, False)):
            torch.manual_seed(0)
            model = _wrap(make(), **settings)
            reference, again = copy.deepcopy(model.module), partial(checkpoint, model, use_reentrant=False)
            for step in range(4):
                model.zero_grad()
                reference.zero_grad()
                for local in (True, False) if step % 2 else (False,):
                    own, every = _inputs(rank, world, 2 * step + local)
                    with model.no_sync() if local else contextlib.nullcontext():
                        loss = again(again(own) if step == 2 else own).square().mean()
                    loss.backward()
                    reference(reference(every) if step == 2 else every).square().mean().backward()
                _same(model, reference, f"{settings} {step=}")
            assert model.reducer.counters.backwards == 4
            shown = model.explain().step
            assert shown.forward <= shown.forward_end <= shown.backward <= shown.backward_end <= shown.end


def _inference(rank, world):
    """inference_mode in low precision: parameters and the gradients that are there stay what they are."""
    model = _wrap(mlp(8), mixed_precision=BFLOAT)
    x = torch.randn(4, 8)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            expected = copy.deepcopy(model.module).to(torch.bfloat16)(x.to(torch.bfloat16))
            torch.testing.assert_close(model(x), expected)
        assert all(p.dtype is torch.float32 and not p.is_inference() for p in model.parameters())
        model(x).float().square().mean().backward()
        before = [p.grad.clone() for p in model.parameters()]
        with mode():
            model(x)
            with pytest.raises(RuntimeError):
                model(torch.randn(4, 9))
        for p, grad in zip(model.parameters(), before, strict=True):
            assert torch.equal(p.grad, grad)
            assert not p.grad.is_inference()
            p.grad.zero_()


@pytest.mark.parametrize("body", [_inside, _no_reduction, _unused, _hidden, _lowered, _around, _inference])
def test_two_ranks(body):
    run_ranks(2, body, timeout=60)
