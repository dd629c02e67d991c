"""Optimizers and gradient clipping on DTensors do what they do on plain tensors."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import ASGD, LBFGS, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop

from tests.ranks import run_ranks
from tests.tensor.programs import VALUES, check, put
from torchshard.errors import UnsupportedOperatorError

WEIGHT, BIAS, SCALE = VALUES.double() / 10, torch.tensor([1.0, 2, 3]).double(), torch.tensor(0.5).double()
INPUT = torch.linspace(-1, 1, 30).view(6, 5).double().sin()


def _trains(kind, only_matrices=False, rounded=False, idle=(), **options):
    """Five steps of a small regression, with a state dict saved and loaded after the second."""

    def run(put):
        parameters = [nn.Parameter(put(t)) for t in ((WEIGHT,) if only_matrices else (WEIGHT, BIAS, SCALE, *idle))]
        x = put(INPUT)
        optimizer = kind(parameters, **options)

        def loss():
            optimizer.zero_grad()
            weight, bias, scale = parameters[:3] if len(parameters) > 1 else (*parameters, 1.0, 1.0)
            out = ((x @ weight + bias) * scale - x[:, 1:4]).square().mean() + 0.1 * weight.square().sum()
            out.backward()
            return out

        for step in range(5):
            if kind is LBFGS:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
            if step == 1:
                state = optimizer.state_dict()
                optimizer = kind(parameters, **options)
                optimizer.load_state_dict(state)
        held = {
            f"{k} {name}": value
            for k, s in optimizer.state_dict()["state"].items()
            for name, value in s.items()
            if isinstance(value, torch.Tensor)
        }
        return [p.detach().bfloat16() if rounded else p.detach() for p in parameters], {} if rounded else held

    return run


_EACH_WAY = {
    "SGD": (SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "SGD nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD dampened": (SGD, {"momentum": 0.5, "dampening": 0.1, "maximize": True}),
    "Adam amsgrad": (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (AdamW, {}),
    "Adafactor": (Adafactor, {}),
    "Adagrad": (Adagrad, {}),
    "Adadelta": (Adadelta, {}),
    "Adamax": (Adamax, {}),
    "ASGD": (ASGD, {}),
    "NAdam": (NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (RAdam, {}),
    "RMSprop": (RMSprop, {"centered": True, "momentum": 0.5}),
}
OPTIMIZERS = {
    f"{name} foreach={foreach}": _trains(kind, lr=0.01, foreach=foreach, **options)
    for name, (kind, options) in _EACH_WAY.items()
    for foreach in (True, False)
}
FUSED = {
    "SGD": _trains(SGD, lr=0.01, fused=True),
    "SGD momentum": _trains(SGD, lr=0.01, fused=True, momentum=0.9),
    "Adam": _trains(Adam, lr=0.01, fused=True, amsgrad=True),
    "AdamW": _trains(AdamW, lr=0.01, fused=True),
    "Adagrad": _trains(Adagrad, lr=0.01, fused=True),
    "AdamW, rate in a tensor": _trains(AdamW, lr=torch.tensor(0.01), foreach=False),
    "AdamW, fused, rate in a tensor of one element": _trains(AdamW, lr=torch.tensor([0.01]), fused=True),
    "LBFGS": _trains(LBFGS, lr=0.5, max_iter=2),
    "LBFGS strong Wolfe": _trains(LBFGS, lr=0.5, max_iter=2, line_search_fn="strong_wolfe"),
    "LBFGS, a parameter without gradient": _trains(LBFGS, lr=0.5, max_iter=2, idle=(BIAS,)),
    # Its matrix products run in bfloat16, so that the order of sums shows.
    "Muon": _trains(torch.optim.Muon, lr=0.001, only_matrices=True, rounded=True),
}


@pytest.mark.parametrize("table", ["OPTIMIZERS", "FUSED"])
def test_five_steps_equal_a_single_process(table):
    check(__name__, table, mesh_shapes=((2,),), texts=("S0", "S1"))
    check(__name__, table, mesh_shapes=((2, 2),), texts=("S0 R",))


def _graded(put, change=lambda g: g):
    parameters = [nn.Parameter(put(t)) for t in (WEIGHT, BIAS, SCALE)]
    for p, g in zip(parameters, (VALUES.double(), BIAS, SCALE), strict=True):
        p.grad = put(change(g))
    return parameters


def _clips(order, foreach):
    def run(put):
        parameters = _graded(put)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=order, foreach=foreach)
        return norm, norm.item(), [p.grad for p in parameters]

    return run


def _clips_values(put):
    parameters = _graded(put)
    nn.utils.clip_grad_value_(parameters, 0.9)
    return [p.grad for p in parameters]


def _refuses(put):
    return nn.utils.clip_grad_norm_(_graded(put, lambda g: g * float("nan")), 1.0, error_if_nonfinite=True)


def _not_finite(put):
    parameters = _graded(put, lambda g: torch.where(g > 14, float("inf"), g))
    return nn.utils.clip_grad_norm_(parameters, 1.0), [p.grad for p in parameters]


def _total(put):
    parameters = _graded(put)
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
    return norm, [p.grad for p in parameters]


def _scaled(put):
    p = nn.Parameter(put(VALUES))
    optimizer, scaler = SGD([p], lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for step in range(3):
        optimizer.zero_grad()
        one = p[0, 0] * (float("inf") if step == 1 else 1)  # only the rank that holds it finds out by itself
        scaler.scale((p * p).sum() + one).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p], 1.0)
        scaler.step(optimizer)
        scaler.update()
    return p.detach(), scaler.get_scale()


def _vectors(put):
    parameters = _graded(put)
    vector = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(vector * 2, parameters)
    return vector, [p.detach() for p in parameters]


def _joined(made, **options):
    """Parameters that forward joins: their gradients are views of one tensor, which split ones have to be moved for."""

    def run(put):
        weight, *joined = [nn.Parameter(put(t)) for t in (WEIGHT.repeat(1, 3), BIAS, BIAS * 2, BIAS * 3)]
        optimizer = made([weight, *joined], lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            (put(INPUT) @ weight + torch.cat(joined)).square().sum().backward()
            norm = nn.utils.clip_grad_norm_([weight, *joined], 1.0, foreach=True)
            nn.utils.clip_grad_value_([weight, *joined], 0.2, foreach=True)
            optimizer.step()
        return norm, weight, joined, [p.grad for p in joined]

    return run


def _beside_plain(kind, **options):
    """Parameters some of which no plan names, so that they stay plain; which every loop over tensors takes."""

    def run(put):
        parameters = [nn.Parameter(t.clone()) for t in (BIAS, put(WEIGHT), SCALE, put(BIAS))]
        optimizer, scaler = kind(parameters, lr=0.1, **options), torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        for step in range(3):
            for p in parameters:
                p.grad = p.detach() * (float("inf") if step == 1 and p is parameters[0] else 8)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(parameters, 0.2, foreach=True)
            scaler.step(optimizer)
            scaler.update()
        versions = [p._version for p in parameters] if options.get("foreach") else None
        return [p.detach() for p in parameters], scaler.get_scale(), versions

    return run


CLIPPING = {
    "beside plain ones, SGD": _beside_plain(SGD, foreach=True, momentum=0.9),
    "beside plain ones, Adam": _beside_plain(Adam, foreach=True, amsgrad=True),
    "beside plain ones, AdamW": _beside_plain(AdamW, fused=True),
    "joined, SGD": _joined(SGD, foreach=True, momentum=0.9),
    "joined, AdamW": _joined(AdamW, fused=True),
    "joined, Adam, maximized": _joined(Adam, foreach=True, maximize=True, weight_decay=0.1),
    **{f"norm {o} foreach={f}": _clips(o, f) for o in (2.0, 1.0, 3.0, 0.0, float("inf")) for f in (True, False)},
    "values": _clips_values,
    "error_if_nonfinite": _refuses,
    "not finite": _not_finite,
    "total": _total,
    "scaler": _scaled,
    "vectors": _vectors,
}


def test_clipping_and_scaling():
    check(__name__, "CLIPPING", raises=1)


def stepped_on_meshes(rank, world, rate):
    from torchshard import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    where = (mesh["tp"], "S0"), (mesh, "S0 S1"), (mesh["dp"], "R")
    leaves = [nn.Parameter(put(t * 3, *there)) for t, there in zip((BIAS, WEIGHT, SCALE), where, strict=True)]
    for p in leaves:
        p.grad = p.detach() * 0.5
    AdamW(leaves, lr=torch.tensor(rate), fused=True).step()
    return [p.detach().full_tensor().tolist() for p in leaves]


@pytest.mark.parametrize("rate", [0.1, [0.1]])
def test_a_rate_in_a_tensor_goes_with_parameters_of_several_meshes(rate):
    parameters = [nn.Parameter(t * 3) for t in (BIAS, WEIGHT, SCALE)]
    for p in parameters:
        p.grad = p.detach() * 0.5
    AdamW(parameters, lr=0.1).step()
    for stepped in run_ranks(4, stepped_on_meshes, rate):
        for got, p in zip(stepped, parameters, strict=True):
            torch.testing.assert_close(torch.tensor(got).double(), p.detach(), rtol=1e-5, atol=1e-6)


def meshes(rank, world, foreach):
    from torchshard import DTensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    where = (mesh, "S0 S1"), (mesh["tp"], "S0"), (mesh["dp"], "R")
    placed = [put(t * 3, *there) for t, there in zip((WEIGHT, BIAS, SCALE), where, strict=True)]
    norm = nn.utils.get_total_norm(placed, foreach=foreach)
    leaves = [nn.Parameter(g) for g in placed]
    for p, g in zip(leaves, placed, strict=True):
        p.grad = g.clone()
    same = nn.utils.clip_grad_norm_(leaves, 1.0, foreach=foreach)
    nn.utils.clip_grad_value_(leaves, 0.2, foreach=foreach)
    assert all(isinstance(p.grad, DTensor) for p in leaves)
    return norm.item(), same.item(), [p.grad.full_tensor().tolist() for p in leaves]


def test_gradients_of_several_meshes():
    parameters = [nn.Parameter(t * 3) for t in (WEIGHT, BIAS, SCALE)]
    for p in parameters:
        p.grad = p.detach().clone()
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    nn.utils.clip_grad_value_(parameters, 0.2)
    for foreach in (True, False):
        for one, same, grads in run_ranks(4, meshes, foreach):
            assert one == pytest.approx(norm.item())
            assert same == pytest.approx(norm.item())
            for got, p in zip(grads, parameters, strict=True):
                torch.testing.assert_close(torch.tensor(got).double(), p.grad, rtol=1e-5, atol=1e-6)


def plain_states(rank, world):
    """States that were loaded whole: what the error says, and that its advice is right."""
    from torchshard import init_device_mesh
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torchshard.state_dict import to_dtensor

    def placements_of(model):
        found = {name: p.placements for name, p in model.named_parameters()}
        return lambda key, x: next(found[name] for name in found if name in key) if x.ndim else None

    def step(model, optimizer):
        for p in model.parameters():
            p.grad = p.detach() * 0.5
        optimizer.step()

    def made(make):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        return model, make(model.parameters())

    mesh = init_device_mesh("cpu", (world,))
    said = []
    for make in (
        lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=False),
        lambda p: Adam(p, lr=0.1, foreach=True),
        lambda p: AdamW(p, lr=0.1, fused=True),
    ):
        plain, its_optimizer = made(make)
        step(plain, its_optimizer)
        whole = copy.deepcopy(its_optimizer.state_dict())
        model, _ = made(make)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = make(model.parameters())
        optimizer.load_state_dict(copy.deepcopy(whole))
        with pytest.raises(UnsupportedOperatorError) as error:
            step(model, optimizer)
        said.append(error.value.fix.rpartition("; ")[2])
        names = [name for name, _ in model.named_parameters()]
        states = {names[i]: state for i, state in whole["state"].items()}
        placed = to_dtensor({"weights": plain.state_dict(), "states": states}, mesh, placements_of(model))
        optimizer = make(model.parameters())
        optimizer.load_state_dict({**whole, "state": dict(enumerate(placed["states"].values()))})
        model.load_state_dict(placed["weights"])
        for m, o in ((plain, its_optimizer), (model, optimizer)):
            step(m, o)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p)
    return said


def test_states_that_were_loaded_whole():
    for said in run_ranks(2, plain_states):
        assert len({*said}) == 1
        assert said[0].startswith("states of an optimizer are loaded after torchshard.state_dict.to_dtensor(")
