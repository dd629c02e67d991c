"""What hypothesis draws: small meshes, shapes and shardings of every kind, and Partial terms of known value."""

import numpy as np
from hypothesis import strategies as st

from torchshard.layout import Mesh, Partial, R, Shard
from torchshard.layout.reductions import may_mix, parse_norm

OPS = ["sum", "avg", "max", "min", "product", "band", "bor", "bxor", "norm(2.0)", "norm(inf)", "norm(1.0)"]


class Item:
    """Stands for a dtype."""

    def __init__(self, itemsize):
        self.itemsize = itemsize


F32 = Item(4)


@st.composite
def meshes(draw, max_axes=4, max_size=24):
    sizes = []
    for _ in range(draw(st.integers(1, max_axes))):
        sizes.append(draw(st.integers(1, max(1, min(4, max_size // max(1, int(np.prod(sizes))))))))
    return Mesh(sizes)


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def shardings(draw, mesh, ndim, partial=()):
    """A sharding of `mesh` for a tensor of `ndim` dims; `partial` lists the reductions that it may have."""
    kinds = [R, *[Shard(d) for d in range(ndim)], *map(Partial, partial)]
    placements = []
    for _ in range(mesh.ndim):
        used = [p for p in placements if isinstance(p, Partial)]
        allowed = [k for k in kinds if not isinstance(k, Partial) or all(may_mix(k.op, p.op) for p in used)]
        placements.append(draw(st.sampled_from(allowed)))
    splits = {}
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            splits.setdefault(p.dim, []).append(axis)
    return mesh.sharding(placements, {d: draw(st.permutations(axes)) for d, axes in splits.items()})


def terms(rng, sharding, shape, integer=False):
    """Random parts of every rank, and the full tensor that they stand for.

    Terms of Partial axes are drawn for the whole tensor first, one array for every combination of their coordinates,
    and reduced axis by axis; so the value is known without any of the code under test.
    """
    mesh, axes = sharding.mesh, sharding.partial
    ops = [sharding.placements[a].op for a in axes]
    grid = tuple(mesh.shape[a] for a in axes)
    integer = integer or any(op in ("band", "bor", "bxor") for op in ops)
    drawn = rng.integers(1, 4, grid + shape) if integer else rng.integers(-3, 4, grid + shape) / 2
    drawn = drawn.astype(np.int64 if integer else np.float64)
    if any(parse_norm(op) is not None for op in ops):
        drawn = np.abs(drawn)
    if not integer and any(op in ("max", "min") for op in ops):
        drawn[rng.random(drawn.shape) < 0.1] = np.nan
    full = drawn
    for _, op in zip(axes, ops, strict=True):
        full = _reduce(op, full)
    parts = []
    for coordinate, box in zip(mesh.coordinates(), sharding.boxes(shape), strict=True):
        parts.append(drawn[tuple(coordinate[a] for a in axes)][box.slices].copy())
    return parts, np.asarray(full)


def _reduce(op, x):
    norm = parse_norm(op)
    if norm is not None:
        return np.abs(x).max(0) if norm == np.inf else (np.abs(x) ** norm).sum(0) ** (1 / norm)
    return {
        "sum": lambda: x.sum(0),
        "avg": lambda: x.mean(0),
        "max": lambda: x.max(0),
        "min": lambda: x.min(0),
        "product": lambda: x.prod(0),
        "band": lambda: np.bitwise_and.reduce(x, 0),
        "bor": lambda: np.bitwise_or.reduce(x, 0),
        "bxor": lambda: np.bitwise_xor.reduce(x, 0),
    }[op]()
