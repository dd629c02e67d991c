"""Modules with weights of their own, cut by name: experts, as models run them, and linear layers the other way round."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.older import require
from tests.ranks import run_ranks

TOKENS, WIDTH, EXPERTS = 10, 8, 4


class Experts(nn.Module):
    """Each token goes to some experts, which hold their gates packed with what they let through."""

    def __init__(self, hidden):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * hidden, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, hidden) / 4)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, chosen, shares):
        result = torch.zeros_like(x)
        asked = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for expert in range(EXPERTS):
            place, token = torch.where(asked[expert])
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down[expert]) * self.scale
            result.index_add_(0, token, made * shares[token, place, None])
        return result


class Sorted(Experts):
    """All experts at once, by tokens in the order of experts."""

    def forward(self, x, chosen, shares):
        experts, order = chosen.reshape(-1).sort()
        rows = x.repeat_interleave(chosen.shape[-1], 0)[order]
        ends = F.one_hot(experts, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows, self.gate_up.mT, offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends) * self.scale
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return ((made * shares.reshape(-1)[order, None])[back]).unflatten(0, chosen.shape).sum(1)


class Layer(nn.Module):
    def __init__(self, kind, hidden):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), kind(hidden)

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(2, -1)
        return x + self.experts(x, chosen, shares=shares)


def plan(**options):
    from torchshard import Shard, UnitShard
    from torchshard.parallel import ParameterwiseParallel

    return {"experts": ParameterwiseParallel({"gate_up": UnitShard(1, runs=2), "down": Shard(2)}, **options)}


def trained(rank, world, kind, hidden, compiled):
    """Relative errors of results and gradients, and, where that is not compiled, collectives sent by forward."""
    from torchshard import DTensor, implicit_replication, init_device_mesh
    from torchshard.debug import CommDebugMode
    from torchshard.parallel import parallelize_module

    torch.manual_seed(0)
    dtype = torch.bfloat16 if compiled else torch.float32  # torch traces grouped_mm of the former alone
    plain, x = Layer(globals()[kind], hidden).to(dtype), torch.randn(TOKENS, WIDTH, dtype=dtype)
    model = parallelize_module(copy.deepcopy(plain), init_device_mesh("cpu", (world,)), plan())
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    with implicit_replication(), contextlib.nullcontext() if compiled else CommDebugMode() as sent:
        got = run(mine)
    want = plain(other)
    assert not isinstance(got, DTensor)
    got.square().sum().backward(), want.square().sum().backward()
    pairs = [(got, want), (mine.grad, other.grad)]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        pairs.append((p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, q.grad))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs), sent and sent.get_total_counts()


@pytest.mark.filterwarnings("ignore:.*gathers its operands")
@pytest.mark.parametrize(
    ("world", "kind", "hidden", "compiled", "collectives"),
    [
        (2, "Experts", 6, False, EXPERTS),
        (4, "Experts", 6, False, EXPERTS),
        (2, "Sorted", 24, False, 1),
        (2, "Sorted", 24, True, None),
    ],
)
def test_experts(world, kind, hidden, compiled, collectives):
    if compiled:
        require("sizes as numbers")
    for error, sent in run_ranks(world, trained, kind, hidden, compiled):
        assert error < (0.02 if compiled else 1e-5)
        assert sent == collectives


class Nested(Experts):
    def forward(self, inputs, routed):
        return {"made": [super().forward(*inputs, *routed["routed"])], "count": len(inputs)}


def layouts(rank, world):
    from torchshard import DTensor, Shard, distribute_tensor, init_device_mesh
    from torchshard.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    plain, x = Experts(6), torch.randn(TOKENS, WIDTH)
    shares, chosen = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(2, -1)
    nested = Nested(6)
    inside = parallelize_module(copy.deepcopy(nested), mesh, plan()["experts"])
    got, want = [m([x], {"routed": (chosen, shares)})["made"][0] for m in (inside, nested)]
    assert not isinstance(got, DTensor)
    torch.testing.assert_close(got, want)
    style = plan(input_layouts=Shard(0), output_layouts=Shard(0), use_local_output=False)["experts"]
    model = parallelize_module(copy.deepcopy(plain), mesh, style)
    parts = [distribute_tensor(t, mesh, [Shard(0)]).to_local() for t in (x, chosen, shares)]
    got = model(parts[0], chosen=parts[1], shares=parts[2])
    assert got.placements == (Shard(0),)
    assert isinstance(model.scale, DTensor)
    assert repr(style).startswith("ParameterwiseParallel({'gate_up': UnitShard(")
    with pytest.raises(NotImplementedError, match=r"say ParameterwiseParallel of its parameters \(gate_up, down\)"):
        parallelize_module(copy.deepcopy(plain), mesh, ColwiseParallel())
    with pytest.raises(ValueError, match=r"to cut gate_up, down, and Linear has weight, bias"):
        parallelize_module(nn.Linear(2, 2), mesh, plan()["experts"])
    return (got.full_tensor() - plain(x, chosen, shares)).abs().max().item()


@pytest.mark.filterwarnings("ignore:.*gathers its operands")
def test_layouts_of_inputs_and_outputs():
    assert max(run_ranks(2, layouts)) < 1e-5


class Linear(nn.Module):
    """(inputs, outputs), as GPT-2 has it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.outputs = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 4), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.outputs)


class Block(nn.Module):
    def __init__(self, heads):
        super().__init__()
        width = heads * WIDTH
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 20), Linear(20, width)

    def forward(self, x):
        q, k, v = [t.view(*t.shape[:-1], -1, WIDTH).transpose(1, 2) for t in self.qkv(x).split(x.shape[-1], 2)]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2).transpose(1, 2)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


def packed(rank, world, heads):
    from torchshard import DTensor, UnitShard, fallback, implicit_replication, init_device_mesh
    from torchshard.debug import CommDebugMode
    from torchshard.parallel import ParameterwiseParallel, parallelize_module

    def columns(unit=1, runs=1):
        cuts = {"weight": UnitShard(1, unit, runs), "bias": UnitShard(0, unit, runs)}
        return ParameterwiseParallel(cuts, output_layouts=UnitShard(-1, unit, runs), use_local_output=False)

    def rows(unit=1):
        return ParameterwiseParallel({"weight": UnitShard(0, unit)}, desired_input_layouts=UnitShard(-1, unit))

    torch.manual_seed(0)
    plain, x = Block(heads), torch.randn(2, 5, heads * WIDTH)
    model = copy.deepcopy(plain)
    plan = {"qkv": columns(WIDTH, 3), "out": rows(WIDTH), "up": columns(), "down": rows()}
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.manual_seed(1)
    with fallback("error"), implicit_replication(), CommDebugMode() as sent:
        got = model(mine)
    torch.manual_seed(1)
    want = plain(other)
    assert not isinstance(got, DTensor)
    assert sent.get_total_counts() == 2
    got.square().sum().backward(), want.square().sum().backward()
    pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in [(got, want), (mine.grad, other.grad), *pairs])


@pytest.mark.parametrize("heads", [4, 3])
def test_packed_layers_the_other_way_round(heads):
    assert max(run_ranks(2, packed, heads)) < 1e-5
