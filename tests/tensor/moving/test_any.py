"""Any layout to any layout of one mesh, as hypothesis draws them: values, gradients, gradients of gradients."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.layout.strategies import OPS, shapes, shardings
from tests.ranks import run_ranks
from tests.tensor.moving.known import made, part_of
from torchshard.layout import Mesh, Partial
from torchshard.layout.reductions import masking


@st.composite
def moves(draw, mesh_shape):
    """(source, target, shape, seed); both may be Partial, in one way, and nested in any order."""
    mesh, shape = Mesh(mesh_shape), draw(shapes)
    op = draw(st.sampled_from(OPS))
    source, target = (draw(shardings(mesh, len(shape), (op,))) for _ in range(2))
    return said(source), said(target), shape, draw(st.integers(0, 2**16))


def said(sharding):
    return sharding.placements, dict(sharding.order)


def carried_out(rank, world, mesh_shape, cases):
    """Complaints about what this rank holds after each move."""
    from torchshard import init_device_mesh
    from torchshard.errors import ShardingError
    from torchshard.tensor.gradients import autograd
    from torchshard.tensor.mesh import bind

    mesh, bad = bind(init_device_mesh("cpu", mesh_shape)), []
    for one, other, shape, seed in cases:
        source, target = mesh.sharding(*one), mesh.sharding(*other)
        ops = {source.placements[a].op for a in source.partial}
        fractions = not ops & {"band", "bor", "bxor"}
        x, full = made(source, shape, seed, torch.float64 if fractions else torch.int64)
        if impossible(source, target):
            try:
                autograd.redistribute(x, target)
                bad.append(f"{source} -> {target}: was not refused")
            except ShardingError:
                continue
        for what, (got, want) in results(x, full, source, target, fractions).items():
            if got.shape != want.shape or not torch.allclose(got, want, equal_nan=True):
                bad.append(f"{what} of {source} -> {target}, {shape}, seed {seed}: {got} for {want}")
    return bad


def impossible(source, target):
    """Whether some axis would have to become Partial in a way that cannot be made."""
    pairs = zip(source.placements, target.placements, strict=True)
    return any(type(b) is Partial and a is not b and not masking(b.op) for a, b in pairs)


def results(x, full, source, target, differentiable):
    from torchshard.tensor.gradients import autograd

    whole, back = target.without_partial(), source.without_partial()
    x.requires_grad_(differentiable)
    moved = autograd.redistribute(x, target)
    assert moved._spec.sharding is target
    assert moved.to_local().shape == moved._spec.local_shape
    y = autograd.redistribute(moved, whole)
    found = {"value": (y.to_local().detach(), part_of(full, whole))}
    if differentiable:
        plain = full.clone().requires_grad_()
        weight = torch.linspace(-1, 1, full.numel(), dtype=full.dtype).view(full.shape)
        (first,) = torch.autograd.grad((y.to_local() ** 3 * part_of(weight, whole)).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first.to_local() ** 2).sum(), x)
        (once,) = torch.autograd.grad((plain**3 * weight).sum(), plain, create_graph=True)
        (twice,) = torch.autograd.grad((once**2).sum(), plain)
        assert first._spec.sharding is second._spec.sharding is back
        found["gradient"] = first.to_local().detach(), part_of(once.detach(), back)
        found["second gradient"] = second.to_local(), part_of(twice, back)
    return found


MESHES = [(2,), (2, 2), (2, 1, 2, 1)]
LONG = [(6,), (3, 2), (2, 3), (2, 2, 2), (2, 2, 1, 2)]


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_any_layout_to_any_layout(mesh_shape):
    hold(mesh_shape, 50)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh_shape", MESHES + LONG)
def test_any_layout_to_any_layout_at_length(mesh_shape):
    hold(mesh_shape, 500)


def hold(mesh_shape, count):
    cases = []

    @settings(max_examples=count, phases=[Phase.generate], deadline=None)
    @given(moves(mesh_shape))
    def draw(case):
        cases.append(case)

    draw()  # all cases first, so that ranks are started once
    for bad in run_ranks(math.prod(mesh_shape), carried_out, mesh_shape, cases, timeout=600):
        assert not bad, bad[:3]
