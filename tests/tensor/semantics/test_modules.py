"""Modules that hold DTensors: meta devices, state dicts, conversions, copies, and distribute_module around them."""

import copy

import pytest
import torch
from torch import nn

import torchshard
from tests.ranks import fake_ranks, run_ranks
from tests.tensor.programs import check
from torchshard.errors import UnsupportedOperatorError

INPUT = torch.linspace(-1, 1, 12).view(4, 3)


def _module(put, tied=True):
    """A module with ties, buffers and a frozen parameter, whose tensors are as `put` makes them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].eval()
    for module in model:
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(put(p.detach()), requires_grad=name != "bias"))
        for name, b in list(module.named_buffers(recurse=False)):
            setattr(module, name, put(b))
    if tied:
        model[3].weight = model[2].weight
    return model


def _outcome(model, x):
    y = model(x)
    y.float().square().mean().backward()
    return [y, dict(model.named_buffers()), {name: p.grad for name, p in model.named_parameters()}]


def _as_it_is(put):
    model = _module(put)
    return _outcome(model, put(INPUT))


def _copied(put):
    model = _module(put)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    return [_outcome(model, put(INPUT)), _outcome(other, put(INPUT)), other[3].weight is other[2].weight]


def _converted(put):
    model = _module(put)
    kinds = [model.double()[0].weight.dtype, model.half()[0].weight.dtype, model.to(torch.float32)[0].weight.dtype]
    return [kinds, model[3].weight is model[2].weight, _outcome(model.cpu().float(), put(INPUT))]


def _in_bfloat16(put):
    model = _module(put)
    return model.bfloat16()(put(INPUT).bfloat16())


def _loaded(assign):
    def run(put):
        model = _module(put)
        other = copy.deepcopy(model)
        before = other[0].weight
        with torch.no_grad():
            for t in other.state_dict().values():
                t.zero_()
        missing, unexpected = other.load_state_dict(model.state_dict(), assign=assign)
        flags = [p.requires_grad for p in other.parameters()], other[0].weight is before, missing, unexpected
        return [flags, _outcome(other, put(INPUT)), other[3].weight is other[2].weight]

    return run


def _loaded_wrongly(put):
    model = _module(put)
    model.load_state_dict({**model.state_dict(), "0.weight": put(torch.ones(2, 2))})


def _emptied(put):
    """A module on the meta device: its DTensors know their layout; to_empty makes room, and init fills it."""
    # Not tied: there plain modules lose their ties, and those of wrapper classes keep them.
    model = _module(put, tied=False).to("meta")
    devices = [str(t.device) for t in model.state_dict().values()]
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.apply(_reset)
    return [devices, _outcome(model, put(INPUT)), torch.rand(2)]


def _reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def _initialised(put):
    model = _module(put)
    torch.manual_seed(5)
    model.apply(lambda m: isinstance(m, nn.Linear) and nn.init.kaiming_normal_(m.weight) is nn.init.zeros_(m.bias))
    return [list(model.parameters()), torch.rand(2)]


def _normalised(put):
    """parametrize.orthogonal and weight_norm compute a weight from other DTensors at each use."""
    model = nn.Linear(3, 5, bias=False)
    model.weight = nn.Parameter(put(torch.linspace(-1, 2, 15).view(5, 3)))
    nn.utils.parametrizations.weight_norm(model)
    return _outcome(model, put(INPUT))


def _by_kernel(name):
    """Batch normalisation by a kernel that only a GPU has for plain tensors; nothing is gathered."""

    def run(put):
        x, vector = put(torch.linspace(-1, 2, 30).view(5, 3, 2)), torch.linspace(0.5, 2, 3)
        weight, bias, mean, var = (put(vector * n) for n in (1, 2, 3, 4))
        for leaf in (x, weight, bias):
            leaf.requires_grad_()
        if x.__class__ is torch.Tensor:
            y = nn.functional.batch_norm(x, mean, var, weight, bias, True, 0.3, 1e-5)
        else:
            with torchshard.fallback("error"):
                y = getattr(torch.ops.aten, name)(x, weight, bias, mean, var, True, 0.3, 1e-5)[0]
        y.sin().sum().backward()
        return [y, mean, var, x.grad, weight.grad, bias.grad]

    return run


def _by_sample(put):
    """Normalisation of each sample: torch makes its channels those of one batch, which split samples split in units."""
    x, vector = put(torch.linspace(-9, 9, 30).sin().view(5, 3, 2)), torch.linspace(0.5, 2, 3)
    weight, bias, mean, var = (put(vector * n) for n in (1, 2, 3, 4))
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    y = nn.functional.instance_norm(x, mean, var, weight, bias, True, 0.3, 1e-5)
    y.sin().sum().backward()
    return [y, mean, var, x.grad, weight.grad, bias.grad]


def _statistics_alone(put):
    x, mean, var = put(torch.randn(4, 3, 5)), put(torch.zeros(3)), put(torch.ones(3))
    return [*torch.batch_norm_update_stats(x, mean, var, 0.3), mean, var]


def _sampled(put):
    x, grid = put(torch.linspace(-1, 2, 96).view(4, 3, 2, 4)), put(torch.linspace(-1, 1, 48).view(4, 3, 2, 2))
    x.requires_grad_(), grid.requires_grad_()
    if x.__class__ is torch.Tensor:
        y = nn.functional.grid_sample(x, grid, align_corners=True)
    else:
        with torchshard.fallback("silent"):
            y = torch.ops.aten.cudnn_grid_sampler(x, grid)
    y.sin().sum().backward()
    return [y, x.grad, grid.grad]


def _spread(put):
    model = _module(put)
    return [len(list(model.parameters())), sum(p.numel() for p in model.parameters()), str(model), model.training]


MODULES = {
    "as it is": _as_it_is,
    "copied": _copied,
    "converted": _converted,
    "bfloat16": _in_bfloat16,
    "loaded": _loaded(False),
    "loaded, assigned": _loaded(True),
    "loaded wrongly": _loaded_wrongly,
    "meta": _emptied,
    "initialised": _initialised,
    "weight_norm": _normalised,
    "cudnn": _by_kernel("cudnn_batch_norm"),
    "miopen": _by_kernel("miopen_batch_norm"),
    "by sample": _by_sample,
    "statistics alone": _statistics_alone,
    "grid sampler": _sampled,
    "counted": _spread,
}


def test_as_with_plain_tensors():
    check(__name__, "MODULES", mesh_shapes=((2,),), texts=("R", "S0", "S1"), raises=1)
    check(__name__, "MODULES", mesh_shapes=((2, 2),), texts=("S0 R",), raises=1)


def from_meta(rank, world, shape):
    from torchshard import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", shape)

    def cut(name, module, mesh):
        if isinstance(module, nn.Linear):
            whole = [Replicate()] * (mesh.ndim - 1)
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [*whole, Shard(0)]))

    def enter(module, inputs, mesh):
        return tuple(distribute_tensor(x, mesh) for x in inputs)

    def leave(module, outputs, mesh):
        return outputs.full_tensor()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    distribute_module(model, mesh, cut, enter, leave)
    layouts = [(p.placements, p.is_meta) for p in model.parameters()]
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.apply(_reset)
    assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
    assert [p.placements for p in model.parameters()] == [placements for placements, _ in layouts]
    assert all(meta for _, meta in layouts)
    y = model(INPUT)
    y.sum().backward()
    return y.tolist(), [p.grad.tolist() for p in model.parameters()], torch.rand(2).tolist()


def test_a_module_made_on_the_meta_device():
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    after = torch.rand(2)
    y = plain(INPUT)
    y.sum().backward()
    for shape, world in (((2,), 2), ((2, 2), 4)):
        for got, grads, drawn in run_ranks(world, from_meta, shape):
            torch.testing.assert_close(torch.tensor(got), y.detach())
            torch.testing.assert_close([torch.tensor(g) for g in grads], [p.grad for p in plain.parameters()])
            assert drawn == after.tolist()


def partial_buffer(rank, world):
    from torchshard import DTensor, Partial, init_device_mesh

    module = torch.nn.Module()
    mesh, total = init_device_mesh("cpu", (world,)), torch.zeros(2, device="meta")
    module.register_buffer("total", DTensor.from_local(total, mesh, [Partial("max")]))
    module.to_empty(device="cpu")
    module.total.zero_()
    return module.total.placements, module.total.device.type, module.total.full_tensor().tolist()


def test_a_partial_buffer_stays_partial_when_it_gets_room():
    from torchshard import Partial

    assert run_ranks(2, partial_buffer) == [((Partial("max"),), "cpu", [0.0, 0.0])] * 2


class Scaled(nn.Module):
    """A weight from numbers that are the same on every rank, as a parametrization with its inverse."""

    factors = torch.tensor([1.0, 2.0, 4.0])

    def forward(self, x):
        return x * self.factors

    def right_inverse(self, y):
        return y / self.factors


def test_a_parametrization_is_not_made_without_its_inverse():
    """torch takes a NotImplementedError for there being no inverse: the weight would be another, and nothing said."""
    model = nn.Linear(3, 5, bias=False)
    weight = model.weight.detach().clone()
    with fake_ranks(2):
        torchshard.distribute_module(model, torchshard.init_device_mesh("cpu", (2,)))
        with pytest.raises(UnsupportedOperatorError, match=r"plain torch\.Tensor among DTensors"):
            nn.utils.parametrize.register_parametrization(model, "weight", Scaled(), unsafe=True)
        assert not nn.utils.parametrize.is_parametrized(model)
        with torchshard.implicit_replication():
            nn.utils.parametrize.register_parametrization(model, "weight", Scaled(), unsafe=True)
            assert torch.equal(model.weight.to_local(), weight)
