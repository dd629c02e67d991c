"""distribute_tensor, distribute_module and the factories."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.ranks import fake_ranks, meet, run_ranks
from torchshard.errors import RankMismatchError, ShardingError


def tensors(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    mine = torch.arange(7.0) + 100 * rank
    scattered = distribute_tensor(mine, mesh, [Shard(0)])
    own = distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=None)
    last = distribute_tensor(mine, mesh, [Replicate()], src_data_rank=world - 1)
    parameter = distribute_tensor(torch.nn.Parameter(mine), mesh, [Shard(0)])
    with mesh:
        inside = distribute_tensor(mine)
    return (
        scattered.full_tensor().tolist(),
        own.to_local().tolist() == mine.chunk(world)[rank].tolist(),
        last.to_local().tolist(),
        (parameter.requires_grad, parameter.is_leaf, scattered.requires_grad),
        inside.placements == (Replicate(),),
        (mine[0].item(), scattered.to_local()[0].item() == scattered.to_local()[0].item()),
    )


def test_values_come_from_one_rank():
    for rank, (scattered, own, last, flags, inside, _) in enumerate(run_ranks(3, tensors)):
        assert scattered == list(range(7)), rank
        assert own
        assert last == [200.0 + k for k in range(7)]
        assert flags == (True, True, False)
        assert inside


def modules(rank, world):
    from torchshard import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(rank)  # the first rank's values count
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)

    def cut(name, module, mesh):
        if name == "2":
            module.bias = torch.nn.Parameter(distribute_tensor(module.bias.detach(), mesh, [Shard(0)]))

    def enter(module, inputs, mesh):
        return tuple(DTensor.from_local(x, mesh, [Shard(0)]) for x in inputs)

    def leave(module, output, mesh):
        return output.redistribute(placements=[Replicate()]).to_local()

    distribute_module(model, mesh, cut, enter, leave)
    model.eval()
    y = model(torch.ones(3, 4))
    try:
        distribute_module(model, mesh)
        again = "returned"
    except RuntimeError as error:
        again = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        distribute_module(torch.nn.Linear(2, 2), mesh, input_fn=lambda inputs, mesh: inputs)
    return (
        type(y).__name__,
        tuple(y.shape),
        all(isinstance(t, DTensor) for t in (*model.parameters(), *model.buffers())),
        model[2].weight is model[0].weight,
        (model[0].bias.requires_grad, model[0].weight.requires_grad),
        str(model[2].bias.placements),
        again,
        [str(w.message) for w in caught],
        model[0].weight.full_tensor().sum().item(),
        sorted(model.state_dict()) == sorted(torch.nn.Sequential(*model).state_dict()),
    )


def test_modules_keep_their_ties_and_flags():
    found = run_ranks(2, modules)
    for kind, shape, all_placed, tied, grads, bias, again, caught, total, keys in found:
        assert (kind, shape) == ("Tensor", (6, 4))
        assert all_placed
        assert tied
        assert keys
        assert grads == (False, True)
        assert bias == "(Shard(dim=0),)"
        assert "already been called" in again
        assert len(caught) == 1
        assert "deprecated" in caught[0]
        assert total == found[0][8]


def factories(rank, world, mesh_shape):
    import torchshard
    from torchshard import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Shard(0), Shard(0)] if mesh.ndim == 2 else [Shard(0)]
    options = {"device_mesh": mesh, "placements": placements}
    pairs = [
        (torchshard.zeros(5, 2, **options), torch.zeros(5, 2)),
        (torchshard.ones((1, 2), dtype=torch.int64, **options), torch.ones(1, 2, dtype=torch.int64)),
        (torchshard.full((5,), 2.5, **options), torch.full((5,), 2.5)),
        (torchshard.full((5,), 2, **options), torch.full((5,), 2)),
        (torchshard.linspace(0, 1, 7, **options), torch.linspace(0, 1, 7)),
        (torchshard.logspace(0, 1, 7, base=2, **options), torch.logspace(0, 1, 7, base=2)),
    ]
    empty = torchshard.empty(5, 3, requires_grad=True, **options)
    with mesh:
        inside = torchshard.zeros(3)
    return (
        [(torch.equal(x.full_tensor(), y), x.dtype == y.dtype, x.placements == tuple(placements)) for x, y in pairs],
        (tuple(empty.shape), empty.requires_grad, empty.is_leaf),
        inside.placements == (Replicate(),) * mesh.ndim,
    )


def test_factories():
    for mesh_shape, world in (((2,), 2), ((2, 2), 4)):
        for pairs, empty, inside in run_ranks(world, factories, mesh_shape):
            assert all(all(p) for p in pairs), pairs
            assert empty == ((5, 3), True, True)
            assert inside


def diverging(rank, world):
    from torchshard import Shard, distribute_module, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(RankMismatchError, match="Ranks do not distribute the same tensor") as caught:
        distribute_tensor(torch.zeros(10 + 2 * rank, 3), mesh, [Shard(0)])
    shapes = (4, 6), (6, 4)
    for shape in shapes:  # goes on, once they do
        assert distribute_tensor(torch.ones(shape), mesh, [Shard(0)]).full_tensor().sum() == 24
    with pytest.raises(RankMismatchError):  # known ones, in another order
        distribute_tensor(torch.ones(shapes[rank]), mesh, [Shard(0)])
    with pytest.raises(RankMismatchError):
        distribute_tensor(torch.ones(4, dtype=[torch.float32, torch.bfloat16][rank]), mesh, [Shard(0)])
    layers = [torch.nn.Linear(2 + (rank and k), 2) for k in range(3)]
    for count in (2, 3 - rank):
        with pytest.raises(RankMismatchError, match="Ranks do not distribute the same tensor"):
            distribute_module(torch.nn.Sequential(*layers[:count]), mesh)
    return str(caught.value)


def test_tensors_that_are_others_on_other_ranks():
    for message in run_ranks(2, diverging):
        assert "rank 0: torch.float32 of shape (10, 3) as (0=2:S(0)), from place 0" in message
        assert "rank 1: torch.float32 of shape (12, 3) as (0=2:S(0)), from place 0" in message


def turned(rank, world):
    """A tensor that lies in memory by columns on one rank only: those of the rank whose values count are its strides."""
    from torchshard import Shard, distribute_module, distribute_tensor, init_device_mesh

    mesh, found = init_device_mesh("cpu", (2, 2)), []
    rows = torch.arange(12.0).view(3, 4) + rank
    for columns in (0, 3, None):
        module = torch.nn.Linear(4, 3)
        module.weight = torch.nn.Parameter(rows.t().contiguous().t() if rank == columns else rows)
        module.other, large = module.weight, torch.full((5000,), rank)
        for name, buffer in (("mask", rows > 5), ("none", rows[:0] * 1j), ("large", large)):
            module.register_buffer(name, buffer)
        distribute_module(module, mesh)
        values = [getattr(module, name).full_tensor() for name in ("weight", "bias", "mask", "none", "large")]
        assert module.weight is module.other
        assert module.weight.stride() == ((1, 3) if columns == 0 else (4, 1))
        for x, want in zip(values, (rows - rank, None, rows - rank > 5, rows[:0] * 1j, large * 0), strict=True):
            assert want is None or torch.equal(x, want)
        sizes = [getattr(module, name).to_local().untyped_storage().nbytes() for name in ("weight", "bias", "mask")]
        assert sizes == [48, 12, 12]
    for columns in (0, 3):
        mine = rows.t().contiguous().t() if rank == columns else rows
        for source in (0, 1):
            x = distribute_tensor(mine, mesh, [Shard(1), Shard(0)], src_data_rank=source)
            found.append(((x * 2).stride(), x.full_tensor()[0, 0].item()))
    return found


def test_strides_are_those_of_the_rank_whose_values_count():
    want = [((1, 3), 0.0), ((4, 1), 3.0), ((4, 1), 0.0), ((1, 3), 3.0)]
    assert run_ranks(4, turned, timeout=60) == [want] * 4


def orders(rank, world):
    """Parts lie in memory in the order that the whole does, results of convolutions too."""
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    w = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)
    want = torch.nn.functional.conv2d(x, w)
    for source in (0, None):
        for at in (Shard(0), Replicate(), Shard(1), Shard(2)):
            part = distribute_tensor(x, mesh, [at], src_data_rank=source)
            assert part.stride() == x.stride()
            assert part.to_local().is_contiguous(memory_format=torch.channels_last), (source, at)
            for kernels in (Shard(0), Replicate()):
                found = torch.nn.functional.conv2d(part, distribute_tensor(w, mesh, [kernels], src_data_rank=source))
                assert found.stride() == want.stride(), (source, at, kernels)
                assert found.to_local().is_contiguous(memory_format=torch.channels_last), (source, at, kernels)
    t = distribute_tensor(torch.arange(12.0).view(3, 4).t(), mesh, [Shard(0)])
    return t.stride() == (1, 4) and t.to_local().stride() == (1, 2)


def test_parts_lie_in_memory_as_the_whole_does():
    assert all(run_ranks(2, orders))


def lost(rank, world, place):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.arange(6.0), mesh["a"], [Shard(0)])
    meet(place, rank, world)
    if rank == world - 1:
        os._exit(0)
    message = ""
    if rank == 1:  # the others are in a group with none that is lost
        with pytest.raises(RankMismatchError) as caught:
            x.redistribute(placements=[Replicate()]).to_local()
        message = str(caught.value)
    dist.destroy_process_group()
    return message


def test_a_rank_that_is_lost(tmp_path):
    message = run_ranks(4, lost, str(tmp_path / "place"), expect_dead=(3,), timeout=60)[1]
    assert (
        "waited in vain for a collective of DTensors of a group; its ranks 0, 1, ... are [1, 3] of the world" in message
    )
    assert "no answer within 3 s from rank 1" in message


def crossing(rank, world):
    """torch's DTensor orders pieces by rank, not by place in the mesh."""
    import torch.distributed.tensor as upstream
    from torch.distributed.device_mesh import DeviceMesh

    from torchshard import DTensor, Replicate, Shard, distribute_tensor
    from torchshard.state_dict import to_full

    mesh = DeviceMesh("cpu", [1, 0])
    ours = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    theirs = upstream.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert ours.full_tensor().tolist() == theirs.full_tensor().tolist() == [0, 1, 2, 3]
    for cross in (ours.to_torch, lambda: DTensor.from_torch(theirs), lambda: to_full({"x": theirs})):
        with pytest.raises(ShardingError, match="Ranks do not ascend along an axis that splits"), torch.device("meta"):
            cross()  # where tensors are made by default makes no difference
    whole = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    return whole.to_torch().full_tensor().tolist()


def test_meshes_whose_ranks_do_not_ascend():
    assert run_ranks(2, crossing) == [[0, 1, 2, 3]] * 2


def another_order(rank, world):
    """One of torch's DTensors of which the second axis splits a dim before the first."""
    import torch.distributed.tensor as upstream
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    from torchshard import DTensor, Shard, init_device_mesh
    from torchshard.checkpoint.loading import _of_torch
    from torchshard.state_dict import to_full

    mesh, full = init_device_mesh("cpu", (2, 2)), torch.arange(8.0)
    first, second = mesh.get_coordinate()
    local = full.chunk(2)[second].chunk(2)[first].clone()
    meta, order = TensorMeta(full.shape, full.stride(), full.dtype), (ShardOrderEntry(0, (1, 0)),)
    theirs = upstream.DTensor(
        local, DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order), requires_grad=False
    )
    assert torch.equal(theirs.full_tensor(), full)
    ours = DTensor.from_torch(theirs)
    assert torch.equal(ours.full_tensor(), full)
    assert ours.to_local().data_ptr() == local.data_ptr()
    assert torch.equal(to_full({"x": theirs})["x"], full)
    assert torch.equal(ours.to_torch().full_tensor(), full)
    return [(box.offset, box.size) for box, _ in _of_torch(theirs)]


def test_torchs_orders_of_axes_are_read():
    assert run_ranks(4, another_order) == [
        [((2 * (2 * second + first),), (2,))] for first in (0, 1) for second in (0, 1)
    ]


def test_leaves_are_made_of_tensors_that_are_only_fake():
    """As torch's estimators of memory and time have models made."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from torchshard import Shard, distribute_tensor, init_device_mesh, randn, zeros

    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        options = {"requires_grad": True, "device_mesh": mesh, "placements": [Shard(0)]}
        with FakeTensorMode():
            given = distribute_tensor(torch.ones(3, 4, requires_grad=True), mesh, [Shard(0)])
            for x in (zeros(3, 4, **options), randn(3, 4, **options), given):
                assert x.is_leaf
                (x * x).sum().backward()
                assert isinstance(x.grad.to_local(), FakeTensor)
                assert x.grad.to_local().shape == (2, 4)
