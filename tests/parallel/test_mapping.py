"""local_map: functions of local tensors as functions of DTensors."""

import pytest
import torch

from tests.older import require
from tests.ranks import run_ranks


def product(rank, world):
    from torchshard import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.parallel import local_map

    mesh = init_device_mesh("cpu", (world,))
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 6, generator=g), torch.randn(6, 3, generator=g)
    x, y = (distribute_tensor(t, mesh, [Shard(d)]).requires_grad_() for t, d in ((a, 1), (b, 0)))
    p, q = a.clone().requires_grad_(), b.clone().requires_grad_()
    seen = []

    def multiply(name, left, right, *, scale=1):
        seen.append((name, type(left), tuple(left.shape)))
        return left @ right * scale, name

    mapped = local_map(
        multiply,
        out_placements=([Partial()], None),
        in_placements=(None, [Shard(-1)], (Shard(0),)),
        in_grad_placements=(None, [Shard(1)], [Shard(0)]),
    )
    got, name = mapped("n", x, y, scale=2)
    want = p @ q * 2
    assert (name, seen) == ("n", [("n", torch.Tensor, (4, 6 // world))])
    assert got.placements == (Partial(),)
    torch.testing.assert_close(got.full_tensor(), want)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), p.grad)
    torch.testing.assert_close(y.grad.full_tensor(), q.grad)

    whole = distribute_tensor(a, mesh, [Replicate()])
    with pytest.raises(ValueError, match="redistribute_inputs=True"):
        mapped("n", whole, y)
    moving = local_map(
        lambda left, right: left @ right,
        out_placements=[Partial()],
        in_placements=([Shard(1)], [Shard(0)]),
        redistribute_inputs=True,
    )
    torch.testing.assert_close(moving(whole, y).full_tensor(), a @ b)
    assert torch.equal(moving(a, b), a @ b)  # no DTensor: as it is

    @local_map(out_placements=[Shard(0)], device_mesh=mesh)
    def twice(t):
        return t * 2

    assert torch.equal(twice(distribute_tensor(a, mesh, [Shard(0)])).full_tensor(), a * 2)

    for wrong, arguments, message in [
        (local_map(twice.args[0], [Shard(0)], ([Shard(0)], None)), (x,), "2 entries for 1 arguments"),
        (local_map(twice.args[0], [Shard(0)], (None,)), (x,), "must not be None"),
        (local_map(twice.args[0], [Shard(0)], None, (None,)), (x,), "in_grad_placements must not be None"),
        (local_map(multiply, ([Partial()], None), ([Shard(0)], [Shard(1)], [Shard(0)])), ("n", x, y), "no tensor"),
        (local_map(lambda t: (t, 1), [Shard(0)]), (x,), "2 results and out_placements for 1"),
        (local_map(lambda t: 1, [Shard(0)]), (x,), "is no tensor"),
        (local_map(lambda t: DTensor.from_local(t, mesh, [Shard(0)]), [Shard(0)]), (x,), "is a DTensor"),
    ]:
        with pytest.raises(AssertionError, match=message):
            wrong(*arguments)
    with pytest.raises(NotImplementedError, match="in_grad_placements"):
        local_map(twice.args[0], [Shard(0)], spmd_types=True)


def test_local_map():
    run_ranks(2, product)


def of_uneven_pieces(rank, world):
    from torchshard import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.debug import CommDebugMode
    from torchshard.errors import ShardingError
    from torchshard.parallel import local_map

    mesh = init_device_mesh("cpu", (world,))
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 6, generator=g), torch.randn(6, 4, generator=g)  # 2, 2 and 1 rows
    x = distribute_tensor(a, mesh, [Shard(0)]).requires_grad_()
    y = distribute_tensor(b, mesh, [Replicate()]).requires_grad_()
    p, q = a.clone().requires_grad_(), b.clone().requires_grad_()
    rows = local_map(
        torch.mm,
        [Shard(0)],
        ([Shard(0)], [Replicate()]),
        in_grad_placements=([Shard(0)], [Partial()]),
    )
    got, want = rows(x, y), p @ q
    assert got.shape == (5, 4)
    torch.testing.assert_close(got.full_tensor(), want)
    got.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), p.grad)
    torch.testing.assert_close(y.grad.full_tensor(), q.grad)

    empty = distribute_tensor(a[:2], mesh, [Shard(0)])  # the last rank has none
    torch.testing.assert_close(rows(empty, y).full_tensor(), a[:2] @ b)
    fixed = local_map(lambda t: t.sum(0, keepdim=True), [Shard(0)], ([Shard(0)],))
    assert fixed(empty).shape == (world, 6)
    both = local_map(lambda t: (t * 2, t.sum(0)), ([Shard(0)], [Partial()]), ([Shard(0)],))
    twice, total = both(x)
    torch.testing.assert_close(twice.full_tensor(), 2 * a)
    torch.testing.assert_close(total.full_tensor(), a.sum(0))

    even = distribute_tensor(torch.ones(2 * world, 6), mesh, [Shard(0)])
    with CommDebugMode() as mode:
        rows(even, y)
    assert not mode.get_total_counts()
    longer = local_map(lambda t: t.new_ones(1 + t.shape[0] % 2), [Shard(0)], ([Shard(0)],))  # 1, 1 and 2 rows
    with pytest.raises(ShardingError) as caught:
        longer(x)
    assert isinstance(rows(x, y), DTensor)
    return str(caught.value)


def test_results_of_uneven_pieces_have_the_shape_that_they_make_up():
    for text in run_ranks(3, of_uneven_pieces):
        assert "are not the pieces of one tensor" in text
        assert "local_map" in text


def of_uneven_pieces_in_a_region(rank, world, backend):
    from torchshard import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.compiler.advice import way_around
    from torchshard.parallel import local_map

    mesh = init_device_mesh("cpu", (world,))
    double = local_map(lambda t: t * 2, [Shard(0)], ([Shard(0)],))
    whole = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))

    def region(x):
        return double(x * 3).sin()

    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    y = torch.compile(region, backend=backend)(x)
    torch.testing.assert_close(y.full_tensor(), (6 * whole).sin())
    y.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 6 * (6 * whole).cos())

    even = distribute_tensor(whole[:2], mesh, [Shard(0)])
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(region, backend=backend, fullgraph=True)(even).full_tensor(), (6 * whole[:2]).sin()
    )
    moving = local_map(
        lambda t: t.sum(-1),
        [Partial()],
        ([Shard(-1)],),
        in_grad_placements=([Shard(1)],),
        redistribute_inputs=True,
    )
    compiled = torch.compile(lambda t: moving(t * 3).sin().sum(), backend=backend, fullgraph=True)
    compiled(x := distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()).backward()
    p = whole.clone().requires_grad_()
    (p * 3).sum(-1).sin().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), p.grad)

    columns = local_map(lambda t: t * 2, [Shard(1)], ([Shard(1)],), redistribute_inputs=True)  # they are even
    x = distribute_tensor(whole, mesh, [Shard(0)])
    moved = torch.compile(lambda t: columns(t), backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(moved.full_tensor(), 2 * whole)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(region, backend=backend, fullgraph=True)(x)
    assert "a graph cannot ask the other ranks for the sizes of their parts" in str(caught.value)
    assert "from_local" in way_around(str(caught.value))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_ends_where_ranks_ask_for_sizes(backend):
    require("meshes in graphs")
    run_ranks(2, of_uneven_pieces_in_a_region, backend)
