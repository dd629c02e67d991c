"""distribute_tensor, distribute_module and the factories."""

import warnings

import torch

from tests.ranks import run_ranks


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
