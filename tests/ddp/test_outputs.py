"""Whatever forward returns comes back as it is, and its backward is reduced."""

import collections
import dataclasses

import pytest
import torch
from torch import nn

from tests.models import mlp
from tests.ranks import run_ranks

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Data:
    out: torch.Tensor
    rest: object = None


FORMS = {
    "tuple": lambda a, b: (a, (b, 3)),
    "named tuple": Pair,
    "dict": lambda a, b: {"a": a, "deeper": {"b": [b]}},
    "dataclass": lambda a, b: Data(a, Data(b)),
    "a view beside its base": lambda a, b: [a, a[0], b],
}


class Returns(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.one, self.two, self.form = mlp(8), nn.Linear(8, 8), form

    def forward(self, x):
        return self.form(self.one(x), self.two(x))


def _loss(value):
    if isinstance(value, torch.Tensor):
        return value.square().sum()
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_loss, value)) if isinstance(value, list | tuple) else 0


def _reduced(rank, world):
    from torchshard.ddp import DistributedDataParallel

    for name, form in FORMS.items():
        for settings in ({}, {"find_unused_parameters": True}):
            model = DistributedDataParallel(Returns(form), **settings)
            reference = Returns(form)
            reference.load_state_dict(model.module.state_dict())
            for _ in range(2):
                for m in (model, reference):
                    m.zero_grad()
                for r in range(world):
                    (_loss(reference(torch.full((2, 8), 1.0 + r))) / world).backward()
                out = model(torch.full((2, 8), 1.0 + rank))
                assert type(out) is type(reference(torch.ones(2, 8))), name
                _loss(out).backward()
                for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_containers():
    run_ranks(2, _reduced)


class Partly(nn.Module):
    """Returns something without a gradient when it is told to."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x, how):
        if how == "detached":
            return self.net(x).detach()
        return None if how == "nothing" else self.net(x)


def _without_gradients(rank, world):
    from torchshard.ddp import DistributedDataParallel

    for settings in ({}, {"find_unused_parameters": True}):
        model = DistributedDataParallel(Partly(), **settings)
        for how in ("detached", "nothing", "all", "nothing", "all"):
            out = model(torch.ones(2, 8), how)
            assert (out is None) == (how == "nothing")
            if how == "all":
                model.zero_grad()
                out.sum().backward()
        assert model.reducer.counters.backwards == 2


def test_forwards_without_a_backward():
    run_ranks(2, _without_gradients)


class Aside(nn.Module):
    """Keeps losses for itself; what it returns may be a view."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        self.some = self.c(x).sum()
        out = self.c(self.a(x))
        self.all = out.sum()
        return out[:, 0]


def _beside(rank, world):
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    reference = Aside()
    data = torch.randn(world, 4, 4)
    model = DistributedDataParallel(reference)
    pristine = [p.detach().clone() for p in reference.parameters()]

    def scaled(m, x):
        out = m(x)
        out.mul_(2)  # gives a view another node
        return out.mean()

    def dropped(m, x):
        m(x)
        return getattr(m, "module", m).all / len(x)

    for loss in (scaled, dropped):
        plain = Aside()
        torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(pristine), plain.parameters())
        loss(plain, data.flatten(0, 1)).backward()
        for _ in range(3):
            model.zero_grad()
            loss(model, data[rank]).backward()
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad)


def test_writing_to_an_output_and_dropping_it():
    run_ranks(2, _beside)


def _quiet_part(rank, world, settings):
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(Aside(), **settings)
    x = torch.ones(2, 4)
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    out = model(x)
    model.module.some.backward()  # only parameters whose hooks say nothing
    del out
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        model(x)


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}])
def test_a_backward_of_a_part_beside_the_outputs_is_told(settings):
    run_ranks(2, _quiet_part, settings)


def _references(rank, world, folder):
    from torch.distributed import rpc

    from torchshard.ddp import DistributedDataParallel

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    model = DistributedDataParallel(Returns(lambda a, b: rpc.RRef(a + b)))
    for _ in range(3):
        model.zero_grad()
        model(torch.full((2, 8), 1.0 + rank)).local_value().sum().backward()
    assert model.reducer.counters.backwards == 3
    rpc.shutdown()
    return [p.grad.sum().item() for p in model.parameters()]


def test_remote_references(tmp_path):
    pytest.importorskip("torch.distributed.rpc")
    first, second = run_ranks(2, _references, str(tmp_path))
    assert first == second
