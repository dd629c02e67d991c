"""From one mesh to another: sub-meshes, disjoint meshes, the same ranks in another shape."""

import itertools
import random

import pytest
import torch

from tests.ranks import run_ranks
from tests.tensor.moving.known import made, part_of

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
    from torchshard.tensor.gradients import autograd

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


def as_users_do_it(rank, world):
    """Part of a job on a sub-mesh, by the public interface alone."""
    from torchshard import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import ShardingError

    whole, part, rest = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    full = torch.arange(20.0).view(5, 4)
    x = distribute_tensor(full, whole, [Shard(0)]).requires_grad_()
    y = x.redistribute(part, [Shard(1)])
    z = y.redistribute(rest, [Replicate()], async_op=True)
    back = z.redistribute(whole, [Shard(0)])
    (back.to_local() * (rank + 1)).sum().backward()
    term = torch.ones(3, 2) * (rank + 1) if rank < 2 else torch.empty(0)
    summed = DTensor.from_local(term, part, [Partial()], shape=(3, 2), stride=(2, 1)).redistribute(whole, [Replicate()])
    even = DTensor.from_local(torch.full((2, 3), rank + 1.0).t(), part, [Shard(1)]) * 2
    assert (even.shape, even.stride()) == ((3, 4), (1, 3))  # on ranks outside, too
    columns = even.sum(0).redistribute(whole, [Replicate()])
    nobody = x.redistribute(part, [Shard(0)]).redistribute(part, [Replicate()])
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for one, other in [(square["a"], square["b"]), (square["a"], square), (square, square["b"])]:
        with pytest.raises(ShardingError, match=r"between a mesh and its slice, or slices along different axes"):
            distribute_tensor(full, one).redistribute(other, [Shard(0)] * other.ndim)
    told, line = {"shape": full.shape, "stride": full.stride()}, distribute_tensor(full, square["a"], [Shard(0)])
    lifted = DTensor.from_local(line.to_local(), square, [Shard(0), Replicate()], **told).redistribute(
        square, [Replicate(), Shard(1)]
    )
    lowered = DTensor.from_local(lifted.to_local(), square["b"], [Shard(1)], **told)
    return {
        "on the sub-mesh": y.to_local().shape == ((5, 2) if rank < 2 else (0,)),
        "on the rest": z.to_local().shape == ((5, 4) if rank > 1 else (0,)),
        "mesh": z.device_mesh is rest,
        "values": torch.equal(back.full_tensor(), full),
        "gradient": torch.equal(x.grad.to_local(), torch.full(x.to_local().shape, rank + 1.0)),
        "of even pieces": columns.to_local().tolist() == [6.0, 6.0, 12.0, 12.0],
        "reduced first": torch.equal(summed.to_local(), torch.full((3, 2), 3.0)),
        "from slice to slice, as the error says": torch.equal(lowered.full_tensor(), full),
        "moved within": nobody.to_local().shape == ((5, 4) if rank < 2 else (0,)),
    }


def with_operators_between(rank, world):
    """A model of which a layer lives on a sub-mesh, trained by one program on all ranks."""
    from torchshard import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import UnsupportedOperatorError

    whole, part = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [1, 2])
    full, weight = torch.linspace(-1, 1, 24).view(6, 4), torch.linspace(0, 1, 12).view(4, 3)
    x = distribute_tensor(full, whole, [Shard(0)]).requires_grad_()
    w = torch.nn.Parameter(distribute_tensor(weight, part, [Shard(1)]))
    inner = torch.relu(x * 2).redistribute(part, [Replicate()])
    y = (torch.softmax((inner @ w).t().contiguous(), 0) + w.sum() + inner.sum()).redistribute(whole, [Shard(1)])
    (y**2).sum().backward()
    with torch.no_grad():
        w.add_(w.grad, alpha=-0.1)
    plain, plain_w = full.clone().requires_grad_(), weight.clone().requires_grad_()
    between = torch.relu(plain * 2)
    ((torch.softmax((between @ plain_w).t(), 0) + plain_w.sum() + between.sum()) ** 2).sum().backward()
    stepped = w.detach().redistribute(whole, [Replicate()]).to_local()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    torch.testing.assert_close(stepped, plain_w.detach() - 0.1 * plain_w.grad)
    said = []
    for ask in (lambda: w.sum().item(), lambda: w.sum(0).tolist(), lambda: w.sum().numpy(force=True).item()):
        try:
            said.append(ask())
        except UnsupportedOperatorError as error:
            said.append(str(error))
    return said


def test_operators_on_ranks_outside_of_the_mesh():
    first, second, third, last = run_ranks(4, with_operators_between)
    assert second == third
    assert all("a rank outside of the mesh does not know" in sentence for sentence in first)
    assert first == last


TRAINED = {
    "clipped": lambda p: (torch.nn.utils.clip_grad_norm_(p, 0.1), torch.optim.SGD(p, 0.1).step()),
    "clipped by the largest": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, norm_type=torch.inf, foreach=True),
    "one by one": lambda p: (torch.nn.utils.clip_grad_norm_(p, 0.1, foreach=False), torch.optim.SGD(p, 0.1).step()),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True).step(),
    "Adam foreach": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, foreach=True).step(),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.1, fused=True).step(),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1).step(),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1).step(),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5, centered=True, foreach=True).step(),
}


def trained_along(rank, world):
    """Optimizers and clipping on a rank outside of the parameters' mesh do nothing; they do not fail."""
    from torchshard import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import ShardingError, UnsupportedOperatorError

    part, rest, everyone = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2]), init_device_mesh("cpu", (3,))
    whole = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(0, 1, 3), torch.tensor([0.5])
    placed = [Shard(0)], [Replicate()], [Replicate()]
    for name, step in TRAINED.items():
        plain = [torch.nn.Parameter(x.clone()) for x in whole]
        ours = [torch.nn.Parameter(distribute_tensor(x, part, p)) for x, p in zip(whole, placed, strict=True)]
        for weight, bias, scale in (plain, ours):
            ((weight.sin() * bias).sum() * scale).sum().backward()
        step(plain)
        step(ours)
        for mine, theirs in zip(ours, plain, strict=True):
            value = mine.detach().full_tensor()
            assert torch.allclose(value, theirs) if rank < 2 else value.numel() == 0, name
    # Lists over several meshes: each rank runs its own.
    x, y, z = (distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]) for mesh in (part, rest, everyone))
    torch._foreach_add_([x, y, z], [1.0, 2.0, 3.0])
    x2, y2, z2 = torch._foreach_mul([x, y, z], [10.0, 20.0, 30.0])
    assert (x2.shape, y2.shape, z2.dtype) == ((3, 2), (3, 2), torch.float32)
    assert z2.full_tensor().unique().tolist() == [120.0]
    assert x2.full_tensor().unique().tolist() == ([20.0] if rank < 2 else [])
    assert y2.full_tensor().unique().tolist() == ([60.0] if rank == 2 else [])
    assert [n.full_tensor().numel() for n in torch._foreach_max([x, z])] == [int(rank < 2), 1]
    labels = distribute_tensor(torch.tensor([0, 1, 0]), everyone, [Shard(0)])
    for meet in (
        lambda: torch._foreach_add([z, x], [z, z]),
        lambda: torch._foreach_mul([z, x], distribute_tensor(torch.tensor(2.0), everyone, [Replicate()])),
        lambda: torch.nn.functional.embedding(labels, x),
        lambda: torch.nn.functional.cross_entropy(x.redistribute(placements=[Shard(1)]), labels),
    ):
        with pytest.raises(ShardingError, match="the arguments live on different meshes"):
            meet()
    gradients = [torch.nn.Parameter(x), torch.nn.Parameter(z)]
    for p in gradients:
        p.grad = p.detach().clone()
    try:
        total = torch.nn.utils.clip_grad_norm_(gradients, 1.0)
    except UnsupportedOperatorError as error:
        return str(error)
    return total.item()


def test_optimizers_on_ranks_outside_of_the_mesh():
    first, second, last = run_ranks(3, trained_along)
    assert first == second == pytest.approx((6 * 4 + 6 * 16) ** 0.5)
    assert "outside of a mesh does not know the norms" in last


def test_a_sub_mesh_and_back():
    for found in run_ranks(4, as_users_do_it):
        assert all(found.values()), found


def ranks_that_say_different_things(rank, world):
    from torchshard import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import RankMismatchError

    whole, part = init_device_mesh("cpu", (3,)), DeviceMesh("cpu", [1, 2])
    full = torch.arange(12.0).view(4, 3)
    x = distribute_tensor(full, whole, [Shard(0)])
    try:
        x.redistribute(part, [Shard(0) if rank == 1 else Replicate()])
    except RankMismatchError as error:
        told = str(error)
    assert x.redistribute(part, [Replicate()]).to_local().shape == ((4, 3) if rank else (0,))  # they agree anew
    return told


def test_ranks_that_say_different_things_are_told():
    for message in run_ranks(3, ranks_that_say_different_things):
        assert "have different redistributions between meshes" in message
        assert "S(0)" in message


def of_other_devices(rank, world):
    from torchshard import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import ShardingError

    x = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    other = DeviceMesh("meta", [0, 1], _init_backend=False)
    try:
        x.redistribute(other, [Replicate()])
    except ShardingError as error:
        return str(error)


def test_other_devices_are_refused():
    for message in run_ranks(2, of_other_devices):
        assert "to a mesh of other devices" in message


def in_different_numbers_of_groups(rank, world, fast):
    """Groups over several meshes or axes whose members are in different numbers of groups already."""
    import contextlib

    from torchshard import DeviceMesh, Replicate, Shard, _torch, distribute_tensor

    one = DeviceMesh("cpu", [0, 1])
    if fast:
        for _ in range(2):
            DeviceMesh("cpu", [0, 1])
    other = DeviceMesh("cpu", [2])
    full = torch.arange(4.0)
    with contextlib.nullcontext() if fast else _torch.without_fast_paths():
        x = distribute_tensor(full, one, [Shard(0)])
        y = x.redistribute(other, [Replicate()])
        back = y.redistribute(one, [Replicate()])
    return torch.equal(y.to_local(), full if rank == 2 else full[:0]), back.to_local().shape == (
        (0,) if rank > 1 else (4,)
    )


def test_groups_are_found_by_members_that_are_in_different_numbers_of_groups():
    assert run_ranks(4, in_different_numbers_of_groups, True)[:3] == [(True, True)] * 3


def test_groups_made_the_public_way():
    assert run_ranks(3, in_different_numbers_of_groups, False) == [(True, True)] * 3


def compiled_between(rank, world):
    from torchshard import DeviceMesh, Shard, distribute_tensor, init_device_mesh

    flat, square = init_device_mesh("cpu", (world,)), DeviceMesh("cpu", torch.arange(world).view(1, world))
    x = distribute_tensor(torch.ones(4, 4), flat, [Shard(0)])
    distribute_tensor(torch.ones(4, 4), square, [Shard(0), Shard(1)])  # the mesh is known
    move = torch.compile(lambda t: t.redistribute(square, [Shard(0), Shard(1)]), backend="aot_eager", fullgraph=True)
    try:
        move(x)
    except Exception as error:
        return str(error)
    return "moved"


def test_a_move_between_meshes_is_not_compiled():
    assert all("cannot be compiled" in said for said in run_ranks(2, compiled_between))
