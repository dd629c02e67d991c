"""Gradients lie as their parameters while an optimizer steps, and so does what it keeps of them."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.ranks import fake_ranks, run_ranks
from torchshard import DTensor, distribute_tensor, init_device_mesh
from torchshard.state_dict import to_full

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "AdamW": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "NAdam": {},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 7)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def _distributed(net, mesh, split):
    for i, (name, p) in enumerate([*net.named_parameters()]):
        placement = Shard(i % p.ndim) if split else Replicate()
        module, _, last = name.rpartition(".")
        setattr(net.get_submodule(module), last, nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])))
    return net


def _trained(rank, world, kind, options, split, batch, folder):
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain = Net().double()
    net = _distributed(copy.deepcopy(plain), mesh, split)
    optimizers = [getattr(torch.optim, kind)(n.parameters(), lr=0.1, **options) for n in (plain, net)]
    for step in range(3):
        for micro in range(2):  # terms are added to terms
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + micro), dtype=torch.float64)
            plain(x).square().mean().backward()
            net(distribute_tensor(x, mesh, [batch])).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)  # else the next are added to what is brought
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p)
    states = [optimizer.state_dict() for optimizer in optimizers]
    whole = to_full(states[1])
    for i, kept in states[0]["state"].items():
        for name, value in kept.items():
            torch.testing.assert_close(whole["state"][i][name], value)
            mine = states[1]["state"][i][name]
            assert value.ndim == 0 or mine.placements == list(net.parameters())[i].placements
    dcp.save({"optimizer": states[1]}, checkpoint_id=folder)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("split", [True, False], ids=["split", "replicated"])
@pytest.mark.parametrize("batch", [Shard(0), Replicate()], ids=["batch split", "batch replicated"])
def test_what_an_optimizer_keeps_lies_as_the_parameter(kind, split, batch, tmp_path):
    foreach = {"foreach": split}  # both ways
    run_ranks(3, _trained, kind, OPTIMIZERS[kind] | foreach, split, batch, str(tmp_path))


def _by_closure(rank, world, kind, options, by_name):
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain = Net().double()
    nets = plain, _distributed(copy.deepcopy(plain), mesh, split=False)
    x = torch.randn(4, 6, dtype=torch.float64)
    states = []
    for net, batch in zip(nets, (x, distribute_tensor(x, mesh, [Shard(0)])), strict=True):
        optimizer = getattr(torch.optim, kind)(net.parameters(), **options)

        def closure(net=net, batch=batch, optimizer=optimizer):
            optimizer.zero_grad()
            loss = net(batch).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        states.append((loss, optimizer.state))
    torch.testing.assert_close(states[1][0].full_tensor(), states[0][0])
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(q.full_tensor(), p)
        kept = states[1][1].get(q, {}) if kind != "LBFGS" else {}  # which keeps flat ones of all
        assert all(x.placements == q.placements for x in kept.values() if isinstance(x, DTensor) and x.ndim)


@pytest.mark.parametrize("by_name", [True, False], ids=["named", "in place"])
@pytest.mark.parametrize("kind", ["SGD", "Rprop", "Adam", "LBFGS"])
def test_gradients_that_a_closure_makes_are_brought_as_well(kind, by_name):
    run_ranks(2, _by_closure, kind, {"SGD": {"lr": 0.1, "momentum": 0.9}}.get(kind, {}), by_name)


def test_a_gradient_that_is_to_be_differentiated_stays():
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        p, q = (nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])) for _ in range(2))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        (x @ p).square().sum().backward(create_graph=True)
        (x @ q).square().sum().backward()
        assert p.grad.requires_grad
        assert p.grad.placements == q.grad.placements == (Partial(),)
        optimizer = torch.optim.SGD([p, q], lr=0.1, momentum=0.9)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.extend([p.grad.placements, q.grad.placements]))
        optimizer.step()
        assert seen == [(Partial(),), (Shard(0),)]


def _held(rank, world):
    """What a user holds of gradients, and the memory that he gave them."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain = Net().double()
    nets = plain, _distributed(copy.deepcopy(plain), mesh, split=False)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    memory = torch.zeros(sum(p.numel() for p in plain.parameters()), dtype=torch.float64)
    at = 0
    for p in nets[1].parameters():  # gradients are views of one flat tensor of terms
        p.grad = DTensor.from_local(memory[at : at + p.numel()].view(p.shape), mesh, [Partial()])
        at += p.numel()
    kept = [p.grad for p in nets[1].parameters()]
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizers[0].zero_grad()
        memory.zero_()
        for net, batch in zip(nets, (x, distribute_tensor(x, mesh, [Shard(0)])), strict=True):
            net(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert all(p.grad is g for p, g in zip(nets[1].parameters(), kept, strict=True))
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(q.full_tensor(), p)


def test_a_gradient_is_afterwards_the_tensor_that_it_was():
    run_ranks(2, _held)


def _written(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    p = nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))
    p.grad = gradient = DTensor.from_local(torch.ones(5, 3), mesh, [Partial()])
    optimizer = torch.optim.SGD([p], lr=0.1)

    def doubled(*_):  # as a fused one takes a scale off
        p.grad.mul_(2)

    handle = optimizer.register_step_pre_hook(doubled)
    optimizer.step()
    handle.remove()
    assert p.grad is gradient
    torch.testing.assert_close(gradient.full_tensor(), torch.full((5, 3), 2.0 * world))
    torch.testing.assert_close(p.full_tensor(), torch.full((5, 3), 1 - 0.2 * world))


def test_what_a_step_writes_to_a_gradient_is_in_it_afterwards():
    run_ranks(2, _written)


def test_plain_parameters_and_those_without_gradients_are_left_alone():
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        q, r = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        q.grad = gradient = torch.ones(3)
        torch.optim.SGD([p, q, r], lr=0.1, foreach=False).step()
        assert p.grad is r.grad is None
        assert q.grad is gradient


def _compiled(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        p.grad = DTensor.from_local(torch.full((4, 4), rank + 1.0), mesh, [Partial()])
        step()
    torch.testing.assert_close(p.full_tensor(), torch.full((4, 4), 1 - 0.5 * 3 - 0.5 * 4.5))
    assert p.placements == (Shard(0),)


def _compiled_closure(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    x = distribute_tensor(torch.eye(4), mesh, [Shard(0)])
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (x @ p).square().sum()
        loss.backward()
        return loss

    step = torch.compile(lambda: optimizer.step(closure), backend="aot_eager")
    for _ in range(2):
        step()
    torch.testing.assert_close(p.full_tensor(), torch.full((4, 4), -0.5))


@pytest.mark.parametrize("body", [_compiled, _compiled_closure], ids=["gradients given", "a closure"])
def test_a_compiled_step(body):
    run_ranks(2, body)
