"""Operators that torch makes, in traces, of plain tensors of numbers alone: compiled with DTensors, against plain torch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.older import known
from tests.ranks import fake_ranks, run_ranks


def put_whole(x):
    return x


def one_hot(put, n):
    x = put(torch.randn(n, 6)).requires_grad_()
    return lambda x: F.one_hot(x.detach().argmax(1), 6) * x, x


def interpolate(put, n, dims, **how):
    x = put(torch.randn(n, 3, *[5, 7, 9][:dims])).requires_grad_()
    return lambda x: F.interpolate(x, **how), x


def margin(put, n, loss, target):
    x, wanted = put(torch.randn(n, 6)).requires_grad_(), put(target(n))
    return lambda x: loss(x, wanted), x


PROGRAMS = {
    "one_hot": (one_hot, {}),
    "nearest": (interpolate, {"dims": 2, "scale_factor": 2}),
    "nearest-exact": (interpolate, {"dims": 3, "size": (4, 6, 5), "mode": "nearest-exact"}),
    "linear": (interpolate, {"dims": 1, "scale_factor": 2, "mode": "linear"}),
    "bilinear": (interpolate, {"dims": 2, "scale_factor": 2, "mode": "bilinear"}),
    "bicubic": (interpolate, {"dims": 2, "size": (4, 6), "mode": "bicubic"}),
    "trilinear": (interpolate, {"dims": 3, "scale_factor": 2, "mode": "trilinear", "align_corners": True}),
    "multi_margin_loss": (margin, {"loss": F.multi_margin_loss, "target": lambda n: torch.arange(n) % 6}),
}


def result_and_gradient(put, name, n, compiled):
    torch.manual_seed(n)
    make, how = PROGRAMS[name]
    function, x = make(put, n, **how)
    y = compiled(function)(x)
    y.square().mean().backward()
    return y, x.grad


def compare(rank, world, names):
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))

    def put(x):
        placed = distribute_tensor(x, mesh, [Shard(0)])
        torch._dynamo.maybe_mark_dynamic(placed, 0)
        return placed

    for name in names:
        torch._dynamo.reset()
        for n in (7, 9):
            got = result_and_gradient(put, name, n, partial(torch.compile, backend="aot_eager", fullgraph=True))
            want = result_and_gradient(put_whole, name, n, put_whole)
            torch.testing.assert_close([x.full_tensor() for x in got], list(want), msg=f"{name}: {got}, not {want}")
            assert got[0].ndim == 0 or got[0].placements == (Shard(0),)


@pytest.mark.parametrize("part", range(2))
def test_values_and_gradients_are_those_of_plain_torch(part):
    names = sorted(name for name in PROGRAMS if name != "one_hot" or known("one_hot in graphs"))
    run_ranks(2, compare, names[part::2], timeout=120)


def test_plain_tensors_of_users_are_refused_there_too():
    from torchshard import Shard, distribute_tensor, init_device_mesh

    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        x, wanted = (distribute_tensor(t, mesh, [Shard(0)]) for t in (torch.randn(4, 6), torch.arange(4)))
        compiled = torch.compile(F.multi_margin_loss, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="is a plain torch"):
            compiled(x, wanted, weight=torch.rand(6))


def test_a_plain_index_whose_length_follows_from_values_is_refused_as_any_other():
    """That which torch makes of repeats."""
    from torchshard import Shard, distribute_tensor, init_device_mesh

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: x.repeat_interleave(torch.arange(x.shape[0]), 0), backend="aot_eager", fullgraph=True
    )
    with (
        fake_ranks(2),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(Exception, match="'index' is a plain torch"),
    ):
        compiled(distribute_tensor(torch.randn(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_())
