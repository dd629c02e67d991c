"""Convolution and pooling along split dims: eager's values and gradients, and neighbours' rows are all that is sent."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import run_ranks
from tests.tensor.proving.cases import case
from tests.tensor.proving.proof import exact, place, same
from tests.watching import Sent

# The operator, of images and kernels; their shapes.
CONVOLUTIONS = [
    case("conv1d", lambda x, w: F.conv1d(x, w, padding=1), (2, 3, 7), (4, 3, 3)),
    case("conv1d of stride 2", lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=2), (1, 2, 9), (3, 2, 4), (3,)),
    case("conv1d that reaches far", lambda x, w: F.conv1d(x, w, padding=4, dilation=3), (1, 2, 5), (2, 2, 3)),
    case("conv1d with gaps", lambda x, w: F.conv1d(x, w, stride=4), (1, 2, 11), (2, 2, 2)),
    case("conv1d of one result", lambda x, w: F.conv1d(x, w), (1, 2, 5), (2, 2, 5)),
    case("conv1d beyond the edge", lambda x, w: F.conv1d(x, w, padding=5), (1, 1, 2), (1, 1, 2)),
    case("conv1d without a batch", lambda x, w: F.conv1d(x, w, padding=1), (2, 5), (2, 2, 3)),
    case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 3, 5, 6), (4, 3, 3, 3), (4,)),
    case("conv2d of points", lambda x, w, b: F.conv2d(x, w, b), (1, 3, 4, 5), (2, 3, 1, 1), (2,)),
    case("conv2d in groups", lambda x, w: F.conv2d(x, w, padding=(1, 2), groups=2), (1, 4, 5, 4), (4, 2, 3, 3)),
    case("conv2d, uneven", lambda x, w: F.conv2d(x, w, stride=(2, 1), padding=(0, 1)), (1, 2, 8, 5), (2, 2, 3, 2)),
    case("conv2d, channels last", lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w, padding=1), (1, 3, 5, 4), (2, 3, 3, 3)),
    case("conv3d", lambda x, w: F.conv3d(x, w, padding=1), (1, 2, 4, 3, 3), (2, 2, 3, 3, 3)),
]  # fmt: skip
POOLINGS = [
    case("max_pool1d", lambda x: F.max_pool1d(x, 3, padding=1), (1, 2, 7)),
    case("max_pool2d", lambda x: F.max_pool2d(x, 2), (1, 2, 6, 5)),
    case("max_pool2d that overlaps", lambda x: F.max_pool2d(x, 3, 2, padding=1, ceil_mode=True), (1, 2, 6, 8)),
    case("max_pool2d of gaps", lambda x: F.max_pool2d(x, (2, 3), 1, dilation=2), (2, 5, 7)),
    case("max_pool2d of nothing", lambda x: F.max_pool2d(x.where(x > 9, -math.inf), 3, 1, 1, return_indices=True)[1], (1, 1, 4, 4), grad=False),
    case("max_pool2d, channels last", lambda x: F.max_pool2d(x.to(memory_format=torch.channels_last), 3, 1), (1, 2, 5, 6)),
    case("max_pool3d", lambda x: F.max_pool3d(x, 3, 2, padding=1), (1, 2, 5, 4, 3)),
    case("avg_pool1d", lambda x: F.avg_pool1d(x, 2, padding=1), (1, 2, 7)),
    case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, padding=1), (1, 2, 6, 5)),
    case("avg_pool2d that overlaps", lambda x: F.avg_pool2d(x, 4, 1, divisor_override=2), (1, 2, 6, 5)),
    case("avg_pool3d", lambda x: F.avg_pool3d(x, 2, 1), (1, 2, 5, 4, 3)),
]  # fmt: skip
CASES = [*CONVOLUTIONS, *POOLINGS]

ON_SEVERAL_AXES = ("conv1d of stride 2", "conv2d", "conv2d in groups", "max_pool2d that overlaps")


def splits(ndim, spatial, axes):
    """Placements of images on a mesh: some axis splits a dim along which kernels slide."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    along = [Shard(ndim - 1 - k) for k in range(spatial)]
    if axes == 1:
        return [[s] for s in along]
    others = [Replicate(), Partial(), *([Shard(0)] if ndim > spatial + 1 else [])]
    return [[s, o] for s in along for o in (*others, *along)] + [[o, along[0]] for o in others]


def values(rank, world, mesh_shape, cases):
    from torchshard import Replicate, Shard, fallback, init_device_mesh

    mesh = init_device_mesh("cpu", mesh_shape)
    for k in cases:
        c, g = CASES[k], torch.Generator().manual_seed(0)
        full = [exact(shape, g) for shape in c.shapes]
        spatial = next(int(letter) for letter in c.name if letter.isdigit())
        for p in splits(full[0].ndim, spatial, mesh.ndim):
            kernels = [[Replicate()] * mesh.ndim, [Shard(0) if not q.is_shard() else Replicate() for q in p]]
            for of_kernels in kernels[: mesh.ndim if len(full) > 1 else 1]:
                plain = [t.clone().requires_grad_(c.grad) for t in full]
                placed = [place(plain[0], mesh, p), *[place(t, mesh, of_kernels) for t in plain[1:]]]
                want = c.run(*plain)
                with fallback("error"):
                    got = c.run(*placed)
                    told = f"{c.name} of {p}, kernels {of_kernels}: "
                    same(got, want, told)
                    for q, r in zip(p, got.placements, strict=True):
                        assert not q.is_shard() or q == r, f"{told}the result is {got.placements}"
                    if not c.grad:
                        continue
                    grad = exact(want.shape, g)
                    want.backward(grad)
                    got.backward(place(grad, mesh, got.placements))
                for a, b in zip(placed, plain, strict=True):
                    same(a.grad, b.grad, told)


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_values(mesh_shape):
    cases = [k for k, c in enumerate(CASES) if len(mesh_shape) == 1 or c.name in ON_SEVERAL_AXES]
    run_ranks(math.prod(mesh_shape), values, mesh_shape, cases, timeout=280)


def sent(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(torch.randn(1, 3, 8, 5), mesh, [Shard(2)]).requires_grad_()
    found = []
    for kernel in (3, 1):
        w = distribute_tensor(torch.randn(2, 3, kernel, kernel), mesh, [Replicate()])
        with Sent() as sending:
            y = F.conv2d(x, w, padding=kernel // 2)
            F.max_pool2d(y, 2).sum().backward()
        found.append(sending.calls)
    return found


def test_neighbours_rows_are_all_that_is_sent():
    row = 3 * 5
    for three, one in run_ranks(2, sent):
        # forward; backward, which reads the rows again; their gradients
        assert three == [("all_to_all_single", row)] * 3
        assert one == []
