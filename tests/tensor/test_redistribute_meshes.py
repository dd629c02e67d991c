"""From one mesh to another: sub-meshes, disjoint meshes, the same ranks in another shape."""

import itertools
import random

import pytest
import torch

from tests.ranks import RankFailed, run_ranks
from tests.tensor.moving import made, part_of

MESHES = {
    "all": [0, 1, 2, 3],
    "square": [[0, 1], [2, 3]],
    "turned": [[3, 1], [0, 2]],
    "left": [0, 1],
    "right": [3, 2],
    "three": [1, 3, 0],
    "one": [2],
}


def pairs_of_meshes(rank, world, count):
    """Values, gradients and gradients of gradients of `count` moves between meshes that are drawn."""
    from torchshard import DeviceMesh
    from torchshard.tensor.mesh import bind

    meshes = {name: bind(DeviceMesh("cpu", torch.tensor(ranks))) for name, ranks in MESHES.items()}
    draw, bad = random.Random(0), []
    pairs = [(a, b) for a, b in itertools.permutations(meshes, 2)]
    for k in range(count):
        one, other = pairs[k % len(pairs)]
        shape = draw.choice([(5, 4), (1, 3), (0, 2), (8, 6), (7,)])
        op = draw.choice(["sum", "avg", "max", "min", "product"])
        source, target = drawn(draw, meshes[one], shape, op), drawn(draw, meshes[other], shape, "sum")
        found = moved_twice(source, target, shape, k)
        for what, (got, want) in found.items():
            if not torch.allclose(got, want, equal_nan=True):
                bad.append(f"{what} of {one} {source} -> {other} {target}, {shape}: {got} for {want}")
    return bad


def drawn(draw, mesh, shape, op):
    from torchshard.layout import Partial, R, Shard

    placements = [draw.choice([R, Partial(op), *map(Shard, range(len(shape)))]) for _ in range(mesh.ndim)]
    splits = {d: [a for a, p in enumerate(placements) if p is Shard(d)] for d in range(len(shape))}
    return mesh.sharding(placements, {d: draw.sample(axes, len(axes)) for d, axes in splits.items() if axes})


def moved_twice(source, target, shape, seed):
    """What this rank holds of the value, gradient and second gradient, with what it should hold.

    Local parts are worked with as the full tensor is: no operator on DTensors is needed, which a rank outside has not.
    """
    from torchshard.tensor import autograd

    x, full = made(source, shape, seed)
    x.requires_grad_()
    plain, back, whole = full.clone().requires_grad_(), source.without_partial(), target.without_partial()
    weight = torch.linspace(-1, 1, full.numel(), dtype=full.dtype).view(full.shape)
    y = autograd.redistribute(autograd.redistribute(x, target), whole)
    (first,) = torch.autograd.grad((y.to_local() ** 3 * part_of(weight, whole)).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first.to_local() ** 2).sum(), x)
    (once,) = torch.autograd.grad((plain**3 * weight).sum(), plain, create_graph=True)
    (twice,) = torch.autograd.grad((once**2).sum(), plain)
    assert first._spec.sharding is second._spec.sharding is back
    return {
        "value": (y.to_local().detach(), part_of(full, whole)),
        "gradient": (first.to_local().detach(), part_of(once.detach(), back)),
        "second gradient": (second.to_local(), part_of(twice, back)),
    }


def test_values_and_gradients_between_meshes():
    for bad in run_ranks(4, pairs_of_meshes, 42):
        assert not bad, bad[:5]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_values_and_gradients_between_meshes_at_length():
    for bad in run_ranks(4, pairs_of_meshes, 2000, timeout=800):
        assert not bad, bad[:5]
