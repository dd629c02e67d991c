"""Weights that are packed behind one another, under tensor parallelism: nn.MultiheadAttention, and layers of one's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.older import require
from tests.ranks import run_ranks

WIDTH = 4  # of a head


def relative(got, want):
    full = got.full_tensor() if hasattr(got, "full_tensor") else got
    assert full.shape == want.shape
    return (full - want).abs().max().item() / max(1.0, want.abs().max().item())


def decoder(rank, world, heads, compiled, dropout):
    """A decoder of torch's, which attends to itself and to others: training and inference, as one process."""
    from torchshard import fallback, init_device_mesh
    from torchshard.parallel import ColwiseParallel, HeadwiseParallel, RowwiseParallel, parallelize_module

    width, mesh, errors = heads * WIDTH, init_device_mesh("cpu", (world,)), {}
    for norm_first in (True,) if compiled else (True, False):
        torch.manual_seed(0)
        layer = nn.TransformerDecoderLayer(width, heads, 20, dropout=dropout, batch_first=True, norm_first=norm_first)
        plain = nn.TransformerDecoder(layer, 1 if compiled else 2)
        model = copy.deepcopy(plain)
        plan = {
            "layers.*.self_attn": HeadwiseParallel(),
            "layers.*.multihead_attn": HeadwiseParallel(),
            "layers.*.linear1": ColwiseParallel(use_local_output=False),  # dropout of a plain part draws this rank's
            "layers.*.linear2": RowwiseParallel(),
        }
        parallelize_module(model, mesh, plan)
        assert model.layers[0].self_attn.in_proj_weight.to_local().shape[0] < 3 * width
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        x, memory = torch.randn(2, 5, width), torch.randn(2, 6, width)
        told = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5), "tgt_is_causal": True}
        for training in (True, False):
            model.train(training), plain.train(training)
            with fallback("error"), torch.set_grad_enabled(training):
                torch.manual_seed(1)
                got = run(x, memory, **told)
                torch.manual_seed(1)
                want = plain(x, memory, **told)
            errors[norm_first, training] = relative(got, want)
            if training:
                got.square().sum().backward(), want.square().sum().backward()
                for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                    errors[norm_first, name] = relative(p.grad, q.grad)
    return max((e, name) for name, e in errors.items())


@pytest.mark.parametrize(
    ("world", "heads", "compiled", "dropout"), [(2, 4, False, 0.0), (4, 3, False, 0.2), (2, 3, True, 0.2)]
)
def test_a_decoder(world, heads, compiled, dropout):
    for worst, name in run_ranks(world, decoder, heads, compiled, dropout):
        assert worst < 1e-5, name


def ways_to_attend(rank, world):
    from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.debug import CommDebugMode
    from torchshard.parallel import HeadwiseParallel, parallelize_module

    mesh, errors = init_device_mesh("cpu", (world,)), {}
    x, other = torch.randn(3, 5, 12), torch.randn(3, 7, 6)
    padded = torch.zeros(3, 5, dtype=torch.bool)
    padded[0, 4] = padded[2, 1:] = True
    options = {
        "itself": ({}, (x, x, x), {}),
        "itself, time first": ({"batch_first": False}, (x, x, x), {}),
        "padded": ({}, (x, x, x), {"key_padding_mask": padded}),
        "both masks": ({}, (x, x, x), {"key_padding_mask": padded, "attn_mask": torch.ones(5, 5).triu(1).bool()}),
        "weights of each head": ({}, (x, x, x), {"average_attn_weights": False}),
        "no weights": ({}, (x, x, x), {"need_weights": False}),
        "keys of another width": ({"kdim": 6, "vdim": 6}, (x, other, other), {}),
        "keys and values that are added": ({"add_bias_kv": True}, (x, x, x), {}),
        "no biases": ({"bias": False}, (x, x, x), {}),
        "a mask by its place": ({}, (x, x, x, padded), {}),
        "keywords": ({}, (), {"query": x, "key": x, "value": x}),
        "all by place": ({"dropout": 0.5}, (x, x, x, None, False, torch.ones(5, 5).triu(1).bool(), True, True), {}),
    }
    for name, (how, args, keywords) in options.items():
        for heads, training in ((3, True), (3, False), (4, False)):  # the kernel for inference takes even numbers
            torch.manual_seed(0)
            plain = nn.MultiheadAttention(12, heads, **{"batch_first": True, **how}).train(training)
            plain.apply(lambda m: [nn.init.normal_(p) for p in m.parameters()])
            model = parallelize_module(copy.deepcopy(plain), mesh, HeadwiseParallel())
            with torch.set_grad_enabled(training):
                torch.manual_seed(1)
                want, shares = plain(*args, **keywords)
                torch.manual_seed(1)
                with CommDebugMode() as sent:
                    got, found = model(*args, **keywords)
            assert not isinstance(got, DTensor)
            asked = shares is not None
            assert sent.get_total_counts() == 1 + asked, f"{name}: {sent.get_comm_counts()}"
            assert (found is None) == (shares is None)
            pairs = [(got, want), *([(found, shares)] if asked else [])]
            errors[name, heads, training] = max(relative(*pair) for pair in pairs)
            if training:
                got.square().sum().backward(), want.square().sum().backward()
                for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                    errors[name, key] = relative(p.grad, q.grad)
    rows = parallelize_module(
        copy.deepcopy(plain), mesh,
        HeadwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1), use_local_output=False),
    )  # fmt: skip
    with pytest.raises(TypeError, match="multiple values"):
        rows(x, x, x, query=x)
    part = distribute_tensor(x, mesh, [Shard(1)]).to_local()
    if part.shape[1] * world == x.shape[1]:
        got, _ = rows(part, part, part)
        assert got.placements == (Shard(1),)
    ahead = distribute_tensor(x, mesh, [Replicate()])
    got, _ = rows(ahead, ahead, ahead)
    assert got.placements == (Shard(1),)
    errors["a DTensor"] = relative(got, plain(x, x, x)[0])
    return max((e, name) for name, e in errors.items())


def test_all_that_torchs_attention_takes():
    for worst, name in run_ranks(2, ways_to_attend):
        assert worst < 1e-5, name


class Attention(nn.Module):
    """One layer makes queries, keys and values, and another one a gate and what it lets through."""

    def __init__(self, heads, bias=True):
        super().__init__()
        width = heads * WIDTH
        self.qkv, self.out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, 20, bias), nn.Linear(10, width, bias)

    def forward(self, x):
        q, k, v = [t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, through = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * through)


def plan(local=True):
    from torchshard.parallel import ColwiseParallel, RowwiseParallel

    return {
        "qkv": ColwiseParallel(unit=WIDTH, runs=3, use_local_output=local),
        "out": RowwiseParallel(unit=WIDTH),
        "up": ColwiseParallel(runs=2, use_local_output=local),
        "down": RowwiseParallel(),
    }


def packed(rank, world, heads, local, compiled):
    from torchshard import fallback, init_device_mesh
    from torchshard.parallel import parallelize_module

    torch.manual_seed(0)
    plain = Attention(heads)
    model = copy.deepcopy(plain)
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan(local))
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x = torch.randn(2, 5, heads * WIDTH)
    with fallback("error"):
        got, want = run(x), plain(x)
        got.square().sum().backward(), want.square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(relative(got, want), *[relative(p.grad, q.grad) for p, q in pairs])


@pytest.mark.parametrize(
    ("world", "heads", "local", "compiled"),
    [(2, 4, True, False), (2, 3, False, False), (4, 3, True, False), (2, 3, True, True), (2, 3, False, True)],
)
def test_packed_layers(world, heads, local, compiled):
    if compiled:
        require("units in graphs")
    if world > heads:
        require("attention without heads")
    assert max(run_ranks(world, packed, heads, local, compiled)) < 1e-5


def with_fsdp(rank, world):
    """FSDP cannot cut the runs across; along the other dim it can, and torch tells where everything lies."""
    from torchshard import DTensor, Shard, init_device_mesh
    from torchshard.errors import ShardingError
    from torchshard.parallel import parallelize_module
    from torchshard.parallel.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Attention(4, bias=False)
    with pytest.raises(ShardingError, match="FSDP would cut the runs of a parameter across"):
        fully_shard(parallelize_module(copy.deepcopy(plain), mesh["tp"], plan()), mesh=mesh["dp"])
    with pytest.raises(ShardingError, match=r"no placements(.|\n)*where: +out\.weight(.|\n)*DistributedDataParallel"):
        fully_shard(parallelize_module(Attention(3, bias=False), mesh["tp"], {"out": plan()["out"]}), mesh=mesh["dp"])
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan())
    model = fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(int(p.shape[0] > 16)))
    x = torch.randn(2, 5, 16)
    got, want = model(x), plain(x)
    got.square().sum().backward(), want.square().sum().backward()
    pairs = [*zip(model.parameters(), plain.parameters(), strict=True)]
    pairs += [(p.grad, q.grad) for p, q in pairs]
    return max(relative(got, want), *[relative(DTensor.from_torch(p.detach()), q) for p, q in pairs])


def test_with_fsdp():
    assert max(run_ranks(4, with_fsdp)) < 1e-5


def refused(rank, world):
    from torchshard import init_device_mesh
    from torchshard.parallel import ColwiseParallel, HeadwiseParallel, parallelize_module

    mesh, said = init_device_mesh("cpu", (world,)), []
    for module, style in ((nn.Linear(4, 4), HeadwiseParallel()), (nn.Linear(4, 7), ColwiseParallel(runs=3))):
        try:
            parallelize_module(module, mesh, style)
        except (NotImplementedError, ValueError) as error:
            said.append(str(error))
    return said


def test_what_is_refused():
    for other, uneven in run_ranks(2, refused):
        assert "HeadwiseParallel takes nn.MultiheadAttention, and this is a torch.nn.modules.linear.Linear" in other
        assert "runs of equal length" in uneven


def test_texts():
    from torchshard.parallel import ColwiseParallel, HeadwiseParallel

    assert repr(ColwiseParallel(unit=4, runs=3)).endswith("use_local_output=True, unit=4, runs=3)")
    assert repr(HeadwiseParallel()) == (
        "HeadwiseParallel(input_layouts=(Replicate(),), output_layouts=(Replicate(),), use_local_output=True)"
    )
