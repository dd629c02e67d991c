"""Which collectives a step issues, in which order and from where, on fake groups of 2 and of 1,024 ranks."""

import torch
from expecttest import assert_expected_inline

from tests.compiler.models import batch, make
from tests.compiler.traced import traced
from tests.ranks import fake_ranks
from torchshard import _torch
from torchshard.buckets import names_text, size_text
from torchshard.comm import summing
from torchshard.ddp import DistributedDataParallel, exchange


def _collectives(name, world, monkeypatch, cap):
    """The third step: each collective's bucket, and whether it was issued by a graph, by a hook or at the end."""
    sent = []
    send = summing.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        node = _torch.current_node()
        where = "at the end" if node is None else "in the graph" if "Compiled" in node.name() else "by a hook"
        sent.append((where, tensor.numel() * tensor.element_size()))
        return send(tensor, *args, **kwargs)

    with fake_ranks(world):
        ddp = DistributedDataParallel(make(name), bucket_cap_mb=cap, find_unused_parameters=name in ("tied", "unused"))
        compiled = torch.compile(ddp, backend=traced)
        for _ in range(3):
            ddp.zero_grad()
            with monkeypatch.context() as patch:
                sent.clear()
                patch.setattr(exchange, "all_reduce", all_reduce)
                compiled(batch(name, 2)[0]).sum().backward()
        plan, flags = ddp.reducer.plan, sent[len(ddp.reducer.plan) :]
    lines = [f"{where}: {names_text(b.params)}" for b, (where, _) in zip(plan, sent, strict=False)]
    return lines + [f"{where}: {size_text(nbytes)} of flags" for where, nbytes in flags]


def _everywhere(name, monkeypatch, cap=0.01):
    found = {world: _collectives(name, world, monkeypatch, cap) for world in (2, 1024)}
    assert found[2] == found[1024]
    return "\n".join(found[2])


def test_gpt(monkeypatch):
    assert_expected_inline(
        _everywhere("gpt", monkeypatch, 0.03),
        """\
in the graph: head.weight
in the graph: blocks.1.down.weight .. blocks.1.up.weight (5)
in the graph: blocks.1.up.bias .. blocks.0.down.weight (10)
in the graph: blocks.0.down.bias .. blocks.0.qkv.weight (8)
in the graph: blocks.0.qkv.bias .. tokens.weight (5)""",
    )


def test_tied_and_checkpointed_gpt(monkeypatch):
    assert_expected_inline(
        _everywhere("tied gpt", monkeypatch, 0.03),
        """\
in the graph: blocks.1.down.weight .. blocks.1.up.weight (5)
in the graph: blocks.1.up.bias .. blocks.0.down.weight (10)
in the graph: blocks.0.down.bias .. blocks.0.qkv.weight (8)
in the graph: blocks.0.qkv.bias .. tokens.weight (5)""",
    )


def test_mixed_types_and_frozen(monkeypatch):
    assert_expected_inline(
        _everywhere("normed", monkeypatch),
        """\
in the graph: f64.weight, f64.bias
in the graph: scale .. embedding.weight (6)""",
    )


def test_tied(monkeypatch):
    assert_expected_inline(
        _everywhere("tied", monkeypatch),
        """\
in the graph: b.weight
in the graph: c.bias .. a.bias (4)
at the end: c.weight
at the end: 24 B of flags""",
    )


def test_unused(monkeypatch):
    assert_expected_inline(
        _everywhere("unused", monkeypatch),
        """\
in the graph: c.weight, c.bias, a.weight
in the graph: a.bias
at the end: b.bias, b.weight
at the end: 24 B of flags""",
    )


def test_checkpoint(monkeypatch):
    assert_expected_inline(
        _everywhere("checkpoint", monkeypatch),
        """\
in the graph: c.weight, c.bias, b.weight
in the graph: b.bias, a.weight, a.bias""",
    )


def test_graph_break(monkeypatch):
    assert_expected_inline(
        _everywhere("break", monkeypatch),
        """\
in the graph: c.weight, c.bias
by a hook: b.bias, b.weight
in the graph: a.weight, a.bias""",
    )


def test_a_weight_in_two_graphs(monkeypatch):
    assert_expected_inline(
        _everywhere("both", monkeypatch),
        """\
in the graph: c.weight, c.bias
in the graph: a.weight, a.bias
by a hook: b.weight
by a hook: b.bias""",
    )
