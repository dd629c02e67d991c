"""fully_shard of parameters on a mesh that has FSDP's axes, too (dp_mesh_dims=): gradients are those of torch's class."""

import pytest
import torch
from torch import nn

from tests.older import known, require
from tests.parallel.fsdp_cases import MLP, WIDTH
from tests.ranks import run_ranks

CASES = {
    "shard": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "hybrid": ((2, 1, 2), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
    "replicate": ((2, 2), ("rep", "tp"), {"replicate": "rep"}),
    "several": ((2, 1, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
}
REST = ("replicate", "several")  # for full runs, as torch plans anew for each mesh, which takes it long


def spread(library, mesh, *hidden):
    """A model whose parameters lie on all of the mesh; only its last axis cuts some."""

    def partition(name, module, mesh):
        for key, p in list(module.named_parameters(recurse=False)):
            last = {"up": library.Shard(0), "down": library.Shard(1)}.get(name.rpartition(".")[2], library.Replicate())
            if name.endswith("down") and key == "bias":
                last = library.Replicate()
            cut = [*[library.Replicate()] * (mesh.ndim - 1), last]
            module.register_parameter(key, nn.Parameter(library.distribute_tensor(p.detach(), mesh, cut)))

    torch.manual_seed(0)
    model = nn.Sequential(*map(MLP, hidden))
    library.distribute_module(model, mesh, partition)
    return model


def made(library, shard, mesh, dims):
    model = spread(library, mesh, 8, 12)
    for block in (*model, model):
        shard(block, mesh=mesh, dp_mesh_dims=dims)
    return model


def run(model, library, mesh, reduction="sum"):
    """The loss of a batch that all axes but the last split."""
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))
    cut = [*[library.Shard(0)] * (mesh.ndim - 1), library.Replicate()]
    return getattr(model(library.distribute_tensor(x, mesh, cut)).square(), reduction)().full_tensor()


def gradients(model, library, mesh, summed):
    if summed:
        for module in (model, *model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    for _ in range(2):
        run(model, library, mesh, "mean" if summed else "sum").backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def sent(model, library, mesh, mode):
    """The collectives of a third backward."""
    loss = run(model, library, mesh)
    with mode() as comms:
        loss.backward()
    return {str(what): n for what, n in comms.get_comm_counts().items() if n}


def compared(rank, world, name):
    import torch.distributed.tensor as theirs
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.distributed.tensor.debug import CommDebugMode as TorchMode

    import torchshard as ours
    from torchshard.debug import CommDebugMode
    from torchshard.parallel.fsdp import fully_shard

    shape, names, dims = CASES[name]
    mesh = ours.init_device_mesh("cpu", shape, mesh_dim_names=names)
    dims = DataParallelMeshDims(**dims)
    for summed in (False, True):
        his, mine = made(theirs, torch_fully_shard, mesh, dims), made(ours, fully_shard, mesh, dims)
        want, got = gradients(his, theirs, mesh, summed), gradients(mine, ours, mesh, summed)
        for (key, _), g, w in zip(mine.named_parameters(), got, want, strict=True):
            torch.testing.assert_close(g, w, msg=f"summed {summed}, {key}")
    assert sent(mine, ours, mesh, CommDebugMode) == sent(his, theirs, mesh, TorchMode)
    for key, x in his.state_dict().items():
        y = mine.state_dict()[key]
        assert x.placements == y.placements, key
        assert torch.equal(x.full_tensor(), y.full_tensor()), key


@pytest.mark.parametrize("name", ["shard", "hybrid", *(pytest.param(name, marks=pytest.mark.full) for name in REST)])
def test_gradients_on_the_whole_mesh_are_those_of_torch(name):
    require("meshes of FSDP among others")
    run_ranks(4, compared, name)


def ignored_and_refused(rank, world):
    from torch.distributed.fsdp import DataParallelMeshDims

    import torchshard as ours
    from torchshard.parallel.fsdp import fully_shard, torch_parameters

    mesh, dims = ours.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), DataParallelMeshDims(shard="dp")
    torch.manual_seed(0)
    plain, model = nn.Sequential(MLP(8), MLP(8)), spread(ours, mesh, 8, 8)
    ignored = {model[0].up.weight}
    for block in (*model, model):
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims, ignored_params=ignored)
    run(model, ours, mesh).backward()
    plain(torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    for (key, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        expected = p.grad if key == "0.up.weight" else p.grad / 2  # FSDP divides by the number of its ranks
        torch.testing.assert_close(q.grad.full_tensor(), expected, msg=key)

    with pytest.raises(NotImplementedError, match="leave torch_parameters"):
        fully_shard(torch_parameters(spread(ours, mesh, 8)), mesh=mesh, dp_mesh_dims=dims)


def test_ignored_parameters_have_whole_gradients():
    require("meshes of FSDP among others")
    run_ranks(4, ignored_and_refused)


class Normed(nn.Module):
    """Some of its gradients are no sums over the batch: those of a norm, and of what is added once."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.alone = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.norm(self.inner(x)).square().mean() + self.alone.square().sum()


def values_and_terms(rank, world):
    from torch.distributed.fsdp import DataParallelMeshDims

    import torchshard as ours
    from torchshard.parallel.fsdp import fully_shard

    mesh = ours.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain, model = Normed(), Normed()
    model.load_state_dict(plain.state_dict())
    ours.distribute_module(model, mesh)
    fully_shard((model,), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))  # torch takes tuples, too
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    for factor in (2.0, 1.0):  # FSDP's own is the number of its ranks
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(True)
        plain.zero_grad()
        model.zero_grad()
        plain(x).backward()
        model(ours.distribute_tensor(x, mesh, [ours.Shard(0), ours.Replicate()])).backward()
        for (key, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(
                q.grad.full_tensor(), p.grad / factor, msg=lambda m, at=(key, factor): f"{at}: {m}"
            )


def test_gradients_that_have_their_value_are_not_added():
    require("meshes of FSDP among others")
    run_ranks(4, values_and_terms)


class Plain(nn.Module):
    """A batch of each rank's own, as a plain tensor, and parameters as what a function makes of them."""

    def __init__(self, library, mesh, part, cut):
        super().__init__()
        whole = torch.arange(12.0).reshape(4, 3)
        self.weight = nn.Parameter(library.distribute_tensor(whole, mesh, [library.Replicate(), cut]))
        self.part, self.library = part, library

    def forward(self, x):
        return (x @ self.part(self.library, self.weight)).square()


def _through_map(library, weight):
    from torch.distributed.tensor.experimental import local_map as torch_local_map

    from torchshard.parallel import local_map

    mapped = local_map if library.__name__ == "torchshard" else torch_local_map
    placements = weight.placements
    return mapped(lambda w: w * 2, list(placements), in_placements=(placements,))(weight).to_local()


PARTS = {
    "to_local": lambda library, w: w.to_local(),
    "full_tensor": lambda library, w: w.full_tensor(),
    "a view": lambda library, w: w.view(3, 4).t().to_local(),
    "redistributed": lambda library, w: w.redistribute(placements=[library.Replicate()] * 2).to_local(),
    "local_map": _through_map,
}
SPLIT = "to_local", "full_tensor", "redistributed"


def plain_batches(rank, world):
    import torch.distributed.tensor as theirs
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import torchshard as ours
    from torchshard.parallel.fsdp import fully_shard

    mesh = ours.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    x = torch.arange(8.0).reshape(2, 4) + mesh.get_local_rank("dp")  # the same on the ranks of an axis "tp"

    def gradient(library, shard, part, cut, compiled):
        model = Plain(library, mesh, part, cut)
        if compiled == "before":
            model.compile(backend="aot_eager")
        shard(model, mesh=mesh, dp_mesh_dims=dims)
        run = torch.compile(model, backend="aot_eager") if compiled == "whole" else model
        run(x).sum().backward()
        return model.weight.grad.full_tensor()

    for name, part in PARTS.items():
        for cut in (ours.Replicate(), ours.Shard(1)) if name in SPLIT else (ours.Replicate(),):
            want = gradient(theirs, torch_fully_shard, part, cut, None)
            for compiled in (None, "before", "whole"):
                got = gradient(ours, fully_shard, part, cut, compiled)
                torch.testing.assert_close(got, want, msg=lambda m, at=(name, cut, compiled): f"{at}: {m}")

    def in_a_branch(_, weight):
        return torch.cond(torch.tensor(True), lambda w: w.to_local() * 3, lambda w: w.to_local() * 2, (weight,))

    if known("subclasses in nested regions"):
        with pytest.raises(Exception, match=r"takes no parameter under fully_shard\(dp_mesh_dims=\)"):
            gradient(ours, fully_shard, in_a_branch, ours.Replicate(), None)


def test_gradients_of_plain_parts_are_terms():
    require("meshes of FSDP among others")
    run_ranks(4, plain_batches)
