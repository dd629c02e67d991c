"""flex_attention of DTensors gives what it gives of whole tensors, on each rank for its samples and heads."""

import contextlib

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.ranks import many, run_ranks

IDS = torch.tensor([[0] * 4 + [1] * 4, [0] * 2 + [1] * 6, [0] * 8])


def by_place(score, b, h, m, n):
    return score + (b * 3 + h) * (m - n) * 0.1


def by_ids(score, b, h, m, n):
    return torch.where(IDS[b, m] == IDS[b, n], score, -1e9)


def by_bias(bias):
    return lambda score, b, h, m, n: score * bias[h]


def causal(b, h, m, n):
    return m >= n


def of_some(b, h, m, n):
    return (m >= n) | ((h == 1) & (b == 0))


Q, ONE = (3, 4, 8, 8), (1, 4, 8, 8)
CASES = {  # what is given beside, the shapes of queries and keys, how all are split (on one axis), how the result is
    "by heads": ({}, Q, Q, 1, 1),
    "by samples, of which one rank has one": ({}, Q, Q, 0, 0),
    "by queries": ({}, Q, Q, 2, None),
    "places of heads": ({"score_mod": by_place}, Q, Q, 1, 1),
    "places of samples": ({"score_mod": by_place}, Q, Q, 0, 0),
    "heads that share keys": ({"score_mod": by_place, "enable_gqa": True}, Q, (3, 2, 8, 8), 1, 1),
    "heads that all share one": ({"score_mod": by_place, "enable_gqa": True}, Q, (3, 1, 8, 8), 1, None),
    "fewer heads than ranks": ({"score_mod": by_place}, (2, 1, 8, 8), (2, 1, 8, 8), 1, None),
    "a mask for each head": ({"block_mask": (of_some, 3, 4)}, Q, Q, 1, 1),
    "a mask for each sample": ({"block_mask": (of_some, 3, 4), "score_mod": by_place}, Q, Q, 0, 0),
    "a mask for all": ({"block_mask": (causal, None, None)}, Q, Q, 1, 1),
    "keys of one sample": ({"block_mask": (causal, 3, None)}, Q, ONE, 0, 0),
    "sums": ({"return_lse": True}, Q, Q, 1, 1),
    "tensors that are read": ({"score_mod": by_ids}, Q, Q, 0, 0),
    "a parameter that is read": ({"score_mod": by_bias}, Q, Q, 1, 1),
}


FEW = [  # which between them go all ways that graphs of the others go
    "by queries", "places of samples", "heads that share keys", "fewer heads than ranks", "a mask for each head",
    "keys of one sample", "sums", "tensors that are read",
]  # fmt: skip


def given_beside(beside, queries, keys, bias):
    beside = dict(beside)
    if "block_mask" in beside:
        rule, samples, heads = beside["block_mask"]
        beside["block_mask"] = create_block_mask(rule, samples, heads, queries[2], keys[2], device="cpu")
    if beside.get("score_mod") is by_bias:
        beside["score_mod"] = by_bias(bias)
    return beside


def compare(rank, world, mesh_shape, backend, names):
    from torchshard import Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh

    flex._validate_device = lambda *tensors: None  # which says that CPUs have no backward; this one they have
    mesh = init_device_mesh("cpu", mesh_shape)
    found, generator = {}, torch.Generator().manual_seed(0)
    for name in names:
        beside, queries, keys, dim, kept = CASES[name]
        if name == "a parameter that is read" and backend:
            continue  # torch itself has no gradient for it there, where it is no input of the graph
        torch._dynamo.reset()
        values = [torch.randn(shape, generator=generator) for shape in (queries, keys, keys, (4,))]
        whole = [x.requires_grad_() for x in values]
        on = [Shard(dim)] if len(mesh_shape) == 1 else [Shard(0), Shard(1)]
        split = [
            distribute_tensor(x.detach(), mesh, [Replicate() if p.dim == 0 and x.shape[0] == 1 else p for p in on])
            for x in values[:3]
        ]
        split.append(distribute_tensor(values[3].detach(), mesh, [Replicate()] * mesh.ndim))
        split = [x.requires_grad_() for x in split]
        results = []
        for (*qkv, bias), compiled in ((whole, False), (split, backend is not None)):
            options = given_beside(beside, queries, keys, bias)

            def attend(q, k, v, options=options):
                return flex_attention(q, k, v, **options)

            run = torch.compile(attend, backend=backend, fullgraph=True) if compiled else attend
            with implicit_replication() if beside.get("score_mod") is by_ids else contextlib.nullcontext():
                y = run(*qkv)
            results.append(y if isinstance(y, tuple) else (y,))
            results[-1][0].square().sum().backward()
        if len(mesh_shape) == 1:
            assert results[1][0].placements == ((Replicate() if kept is None else Shard(kept)),), name
        pairs = list(zip(results[1], results[0], strict=True))
        pairs += [(x.grad, y.grad) for x, y in zip(split, whole, strict=True) if y.grad is not None]
        found[name] = max((x.full_tensor() - y).abs().max().item() for x, y in pairs)
    return found


@pytest.mark.parametrize(
    ("mesh_shape", "backend", "names"),
    [
        ((2,), "aot_eager", FEW),
        ((2,), None, CASES),
        ((2, 2), None, ["places of heads", "a mask for each sample"]),
        pytest.param((2,), "aot_eager", CASES, marks=pytest.mark.full),
        pytest.param((2, 2), None, CASES, marks=pytest.mark.full),
        pytest.param((2, 2), "aot_eager", CASES, marks=pytest.mark.full),
    ],
)
def test_values_and_gradients(mesh_shape, backend, names):
    for found in run_ranks(2 * len(mesh_shape), compare, mesh_shape, backend, list(names), timeout=200):
        assert {name: error for name, error in found.items() if error > 1e-5} == {}


def refused(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, other = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world))
    q = distribute_tensor(torch.randn(Q), mesh, [Shard(1)])
    elsewhere = distribute_tensor(torch.randn(Q), other, [Replicate(), Shard(1)])
    said = []
    many, few = [distribute_tensor(torch.randn(n, 4, 8, 8), mesh, [Shard(0)]) for n in (2 * world, world)]
    mask = create_block_mask(causal, 2 * world, None, 8, 8, device="cpu")
    for arguments, options in (
        ((q, torch.randn(Q), q), {}), ((q, q, elsewhere), {}), ((q, q, q), {"score_mod": by_ids}),
        ((many, few, few), {"block_mask": mask}), ((many, many, few), {}),
    ):  # fmt: skip
        try:
            flex_attention(*arguments, **options)
        except Exception as error:
            said.append(str(error))
    return said


def test_refusals():
    for plain, meshes, read, samples, values in run_ranks(2, refused, timeout=100):
        assert "flex_attention: the argument 'key' is a plain torch.Tensor among DTensors" in plain
        assert "flex_attention: the arguments live on different meshes" in meshes
        assert "implicit_replication()" in read
        assert "Bq and Bkv must broadcast" in samples
        assert "must match" in values or "shape" in values


def of_one(b, h, m, n):
    return (m >= n) | (h == 3)


MASKS = [((of_some, 2, 4), 1), ((of_one, None, 4), 1), ((of_some, 2, 4), 0)]  # and the dim that is split


def infer(rank, world, masks):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    values = torch.randn(3, 2, 4, 16, 16, generator=torch.Generator().manual_seed(0))

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod=by_place)

    with torch.no_grad():
        y = torch.compile(attend, fullgraph=True)(*[distribute_tensor(x, mesh, [Shard(1)]) for x in values])
        assert y.placements == (Shard(1),)
        torch.testing.assert_close(y.full_tensor(), attend(*values))
        for rows, dim in masks:
            mask = create_block_mask(*rows, 16, 16, device="cpu", BLOCK_SIZE=4)

            def masked(q, k, v, mask=mask):
                return flex_attention(q, k, v, block_mask=mask)

            on = Shard(dim), Replicate(), Shard(dim)
            q, k, v = [distribute_tensor(x, mesh, [at]) for x, at in zip(values, on, strict=True)]
            y = torch.compile(masked, fullgraph=True)(q, k, v)
            torch.testing.assert_close(y.full_tensor(), masked(*values))


def test_inductors_kernel():
    run_ranks(2, infer, MASKS[: many(len(MASKS))], timeout=200)
