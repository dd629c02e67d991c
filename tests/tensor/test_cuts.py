"""Splits in runs and in units: a split dim stays split when others are flattened into it, even or not, and everything
goes on from there.
"""

import itertools
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

from tests.older import require
from tests.ranks import run_ranks
from tests.tensor.proving import proof
from tests.tensor.proving.cases import GROUPS
from tests.tensor.proving.proof import exact, place
from torchshard.errors import ShardingError


def layer_of_a_split_batch(rank, world, batch_first, batch):
    """An encoder layer with the batch split, forward and backward: no collective, and one process's numbers."""
    from torchshard import Replicate, Shard, distribute_module, distribute_tensor, explain, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first)
    x = torch.randn(*((batch, 6) if batch_first else (6, batch)), 16)
    layer(x).square().sum().backward()
    wanted = {name: p.grad for name, p in layer.named_parameters()}
    y = layer(x).detach()
    layer.zero_grad()
    distribute_module(layer, mesh)
    rows = distribute_tensor(x, mesh, [Shard(0 if batch_first else 1)])
    seen = explain(lambda: layer(rows))
    assert not seen.collectives, seen
    assert seen.result.placements == rows.placements
    backward = explain(lambda: seen.result.square().sum().backward())
    assert not backward.collectives, backward
    torch.testing.assert_close(seen.result.full_tensor(), y)
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad.redistribute(placements=[Replicate()]).to_local(), wanted[name])


@pytest.mark.parametrize(("world", "batch"), [(2, 4), (2, 7), (3, 5)])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_layer_keeps_its_batch_split(batch_first, world, batch):
    run_ranks(world, layer_of_a_split_batch, batch_first, batch)


def layers_of_samples_and_time(rank, world, lengths):
    """Where an axis splits samples and another time, linear layers send nothing, forward, and weights' terms backward."""
    from torchshard import Replicate, Shard, distribute_module, distribute_tensor, explain, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8, bias=False))
    x = torch.randn(*lengths, 8, requires_grad=True)
    layers(x).square().sum().backward()
    wanted = {name: p.grad for name, p in layers.named_parameters()}
    layers.zero_grad()
    distribute_module(layers, mesh)
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)]):
        placed = distribute_tensor(x.detach(), mesh, placements).requires_grad_()
        seen = explain(lambda placed=placed: layers(placed))
        assert not seen.collectives, seen
        assert seen.result.placements == tuple(placements)
        backward = explain(lambda seen=seen: seen.result.square().sum().backward())
        assert not backward.collectives, backward
        torch.testing.assert_close(placed.grad.full_tensor(), x.grad)
        for name, p in layers.named_parameters():
            torch.testing.assert_close(p.grad.redistribute(placements=[Replicate()] * 2).to_local(), wanted[name])
        layers.zero_grad()
        flat = placed.detach().flatten(0, 1)
        again = distribute_tensor(x.detach().flatten(0, 1), mesh, flat.placements)
        assert torch.equal(again.to_local(), flat.to_local())
        whole = flat.redistribute(placements=[Replicate(), Shard(1)])
        assert torch.equal(whole.redistribute(placements=flat.placements).to_local(), flat.to_local())


@pytest.mark.parametrize("lengths", [(4, 6), (3, 5), (2, 4)])
def test_linear_layers_of_samples_and_time_that_are_split(lengths):
    run_ranks(4, layers_of_samples_and_time, lengths)


def samples_and_time_elsewhere(rank, world, lengths, path):
    """Files, state dicts, pickles, torch's own class: what is split at two levels is the same in all of them."""
    import torch.distributed.tensor as upstream

    from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, state_dict, zeros

    mesh, ends = init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]
    full = torch.arange(4.0 * math.prod(lengths)).reshape(*lengths, 4)
    rows = full.flatten(0, 1)
    x = distribute_tensor(full, mesh, ends).flatten(0, 1)
    dcp.save({"x": x}, checkpoint_id=path)
    for placements in ([Shard(0), Replicate()], x.placements):
        loaded = {"x": zeros(*rows.shape, device_mesh=mesh, placements=placements)}
        dcp.load(loaded, checkpoint_id=path)
        assert torch.equal(loaded["x"].full_tensor(), rows)
    assert torch.equal(state_dict.to_full({"x": x})["x"], rows)
    assert torch.equal(state_dict.to_full(state_dict.to_sharded_tensor({"x": x}))["x"], rows)
    for same in (
        distribute_tensor(rows, mesh, x.placements),
        state_dict.to_dtensor({"x": rows}, mesh, x.placements)["x"],
        DTensor.from_local(x.to_local(), mesh, x.placements, shape=x.shape, stride=x.stride()),
        pickle.loads(pickle.dumps(x)),
    ):
        assert same._spec.sharding is x._spec.sharding
        assert torch.equal(same.to_local(), x.to_local())
    with pytest.raises(ShardingError, match="torch's DTensor cannot be told"):
        x.to_torch()
    if lengths == (4, 6):
        theirs = upstream.distribute_tensor(full, mesh, ends).flatten(0, 1)
        assert theirs.placements == x.placements
        assert DTensor.from_torch(theirs)._spec is x._spec


@pytest.mark.parametrize("lengths", [(4, 6), (3, 5)])
def test_samples_and_time_that_are_split_elsewhere(lengths, tmp_path):
    if lengths == (4, 6):
        require("strided shards")
    run_ranks(4, samples_and_time_elsewhere, lengths, tmp_path / "saved")


# What may follow once a split dim and another have been flattened: x is (12, 8), k is (8, 5), t are 12 classes.
FOLLOWING = {
    "mm": lambda x, k, t: x @ k,
    "linear": lambda x, k, t: F.linear(x, k.t(), k[0]),
    "unflatten": lambda x, k, t: x.view(3, 4, 8).sin(),
    "unflatten otherwise": lambda x, k, t: x.view(2, 6, 8).sin(),
    "flatten again": lambda x, k, t: x.reshape(96).exp(),
    "transpose": lambda x, k, t: (x.t() * 2).t(),
    "sum of all": lambda x, k, t: x.sum(),
    "sum of rows": lambda x, k, t: x.sum(0),
    "largest": lambda x, k, t: x.amax(0),
    "mean": lambda x, k, t: x.mean((0, 1)),
    "variance": lambda x, k, t: x.var(0),
    "softmax of rows": lambda x, k, t: x.softmax(-1),
    "softmax over rows": lambda x, k, t: x.softmax(0),
    "layer_norm": lambda x, k, t: F.layer_norm(x, (8,)),
    "cumsum": lambda x, k, t: x.cumsum(0),
    "sort": lambda x, k, t: x.sort(0).values,
    "rows": lambda x, k, t: x[2:7],
    "one row": lambda x, k, t: x[5],
    "flip": lambda x, k, t: x.flip(0),
    "roll": lambda x, k, t: x.roll(1, 0),
    "cat": lambda x, k, t: torch.cat([x, 2 * x]),
    "split": lambda x, k, t: x.split(5)[1],
    "index": lambda x, k, t: x.index_select(0, t.clamp(max=11)),
    "cross entropy": lambda x, k, t: F.cross_entropy(x @ k, t % 5),
    "cross entropy of each": lambda x, k, t: F.cross_entropy(x @ k, t % 5, reduction="none"),
    "embedding": lambda x, k, t: F.embedding(t % 8, k) * x[:, :5],
    "norm": lambda x, k, t: torch.linalg.vector_norm(x),
    "mask": lambda x, k, t: torch.where(x > 0, x, -1.0),
    "triangle": lambda x, k, t: x.tril(),
    "in place": lambda x, k, t: (x * 1).mul_(3).add_(x),
    "with another split": lambda x, k, t: x + torch.ones_like(k).sum() + x.sum(1, keepdim=True),
    "pad": lambda x, k, t: F.pad(x, (0, 0, 1, 2)),
    "dropout": lambda x, k, t: F.dropout(x, 0.0),
    "expand": lambda x, k, t: x.unsqueeze(0).expand(2, 12, 8).sin(),
}


# These send two numbers at most.
KEEP_SPLIT = {
    "mm",
    "linear",
    "unflatten",
    "flatten again",
    "transpose",
    "sum of rows",
    "largest",
    "softmax of rows",
    "layer_norm",
    "cross entropy",
    "cross entropy of each",
    "in place",
    "mask",
    "dropout",
    "expand",
}


def operators_that_follow(rank, world, mesh_shape, lengths, split, written, moved):
    from torchshard import Replicate, Shard, explain, init_device_mesh, layout_of

    mesh = init_device_mesh("cpu", mesh_shape)
    g = torch.Generator().manual_seed(0)
    full, weight = exact((*lengths, 8), g).requires_grad_(), exact((8, 5), g).requires_grad_()
    classes = torch.randint(0, 12, lengths, generator=g)
    batch = [Shard(d) for d in split]
    whole = [Replicate()] * mesh.ndim
    for name, fn in FOLLOWING.items():
        x, k = full.detach().requires_grad_(), weight.detach().requires_grad_()
        wanted = fn(x.reshape(12, 8), k, classes.reshape(12))
        weights = exact(tuple(wanted.shape), torch.Generator().manual_seed(1))
        (wanted * weights).sum().backward()
        dx, dk = place(full, mesh, batch), place(weight, mesh, whole)
        rows, labels = dx.reshape(12, 8), place(classes, mesh, batch).reshape(12)
        assert " ".join(map(repr, layout_of(rows).placements)) == written, rows.placements
        got = fn(rows, dk, labels)
        (got * place(weights, mesh, whole)).sum().backward()
        if name in KEEP_SPLIT and name != moved:
            seen = explain(fn, rows.detach(), dk.detach(), labels)
            assert seen.nbytes <= 48, seen
        torch.testing.assert_close(got.full_tensor(), wanted.detach(), msg=lambda m, name=name: f"{name}: {m}")
        for mine, theirs in ((dx, x), (dk, k)):
            if theirs.grad is None:
                assert mine.grad is None or not mine.grad.full_tensor().any(), name
                continue
            found = mine.grad.full_tensor()
            torch.testing.assert_close(found, theirs.grad, msg=lambda m, name=name: f"gradient of {name}: {m}")


@pytest.mark.parametrize(
    ("mesh_shape", "lengths", "split", "written", "moved"),
    [
        ((2,), (3, 4), (1,), "S(0/3)", None),
        ((2, 2), (3, 4), (1, 1), "S(0/3) S(0/3)", None),
        # Uneven, as those that follow; the 3 runs that it is viewed as are others.
        ((2,), (4, 3), (1,), "S(0/4)", "unflatten"),
        ((2,), (3, 4), (0,), "S(0*4)", None),
        ((2, 2), (3, 4), (0, 0), "S(0*4) S(0*4)", "largest"),  # a rank has nothing, of which there is no largest
        # Each of two dims by an axis of its own.
        ((2, 2), (3, 4), (0, 1), "S(0*4) S(0/3)", None),
        ((2, 2), (3, 4), (1, 0), "S(0/3) S(0*4)", None),
        ((2, 2), (4, 3), (0, 1), "S(0*3) S(0/4)", "unflatten"),
        ((2, 2), (2, 6), (0, 1), "S(0*6) S(0/2)", "unflatten"),
    ],
)
def test_operators_that_follow(mesh_shape, lengths, split, written, moved):
    run_ranks(math.prod(mesh_shape), operators_that_follow, mesh_shape, lengths, split, written, moved)


def axes_of_size_one(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, explain, init_device_mesh

    full = torch.arange(8.0).view(2, 4)
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape)
        for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
            x = distribute_tensor(full, mesh, placements).requires_grad_()
            flat = x.flatten()
            (flat * flat).sum().backward()
            torch.testing.assert_close((flat * 2).full_tensor(), full.flatten() * 2)
            torch.testing.assert_close(x.grad.full_tensor(), full * 2)
            assert not explain(lambda x: x.view(2, 4) * 2, flat.detach()).nbytes
        # Where each splits a dim of its own, the axis of one rank goes along with what the other needs.
        rows, columns = distribute_tensor(full.clone(), mesh, [Shard(0), Shard(1)]), full.clone()
        flat = rows.flatten()
        assert flat._local_tensor.data_ptr() == rows._local_tensor.data_ptr()
        assert not explain(lambda x: x.flatten(), rows).collectives
        flat.mul_(3)
        columns.flatten().mul_(3)
        torch.testing.assert_close(rows.full_tensor(), columns)


def test_axes_of_size_one():
    run_ranks(2, axes_of_size_one)


def all_operators(rank, world, kind):
    """Every case of cases.py with its operands split in runs or in units, where their lengths allow."""
    from torch.distributed.tensor import Replicate

    from torchshard import UnitShard, init_device_mesh
    from torchshard._torch import strided_shard

    def cut(t, case):
        if kind == "runs":
            found = [strided_shard()(d, split_factor=2) for d, n in enumerate(t.shape) if n and n % 4 == 0]
        else:
            found = [UnitShard(d, 2 if n % 2 == 0 else n) for d, n in enumerate(t.shape) if n > 1]
        return [*found, Replicate()] if found else placements_of(t, case)

    placements_of, proof.placements_of = proof.placements_of, cut
    mesh, done, bad = init_device_mesh("cpu", (world,)), 0, []
    for case in itertools.chain.from_iterable(GROUPS.values()):
        if any(n > 1 and (n % 4 == 0 or kind == "units") for shape in case.shapes for n in shape):
            count, complaints = proof.prove(case, mesh, 12)
            done += count
            bad += complaints
    return done, bad


@pytest.mark.full
@pytest.mark.parametrize("kind", ["runs", "units"])
def test_all_operators(kind):
    for done, bad in run_ranks(2, all_operators, kind, timeout=280.0):
        assert not bad, bad[:5]
        assert done > 600


def placements_of_torch(rank, world):
    """torch writes the same thing as _StridedShard: both ways, and from and to every other placement."""
    from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard._torch import strided_shard

    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(64.0).reshape(16, 4)
    strided = strided_shard()
    ends = [
        [strided(0, split_factor=2), Replicate()],
        [strided(0, split_factor=4), strided(0, split_factor=4)],
        [strided(0, split_factor=4), strided(0, split_factor=2)],
        [Shard(1), strided(0, split_factor=2)],
        [strided(0, split_factor=2), strided(1, split_factor=2)],
        [Shard(0), strided(0, split_factor=4)],  # of (8, 2), one by each axis
        [strided(0, split_factor=4), Shard(0)],
        [strided(0, split_factor=8), strided(0, split_factor=2)],
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
    ]
    for before in ends:
        x = distribute_tensor(full, mesh, before)
        assert x.placements == tuple(before)
        if before in [*ends[1:3], *ends[5:8]]:  # several axes, which torch would take for an order of axes
            with pytest.raises(ShardingError, match="torch's DTensor cannot be told"):
                x.to_torch()
        else:
            assert DTensor.from_torch(x.to_torch())._spec is x._spec
            assert torch.equal(x.to_torch().full_tensor(), full), before
        for after in ends:
            y = x.redistribute(placements=after)
            assert y.placements == tuple(after)
            assert torch.equal(y.to_local(), distribute_tensor(full, mesh, after).to_local()), (before, after)
            assert torch.equal(y.full_tensor(), full)
    assert distribute_tensor(full[:10], mesh, ends[0]).to_local().shape[0] == (6, 4)[rank // 2]  # 5 of each of 2 runs
    runs = DTensor.from_local(full[:4], mesh, [strided(0, split_factor=2), Replicate()])
    assert runs.shape == (8, 4)
    with pytest.raises(ShardingError, match="no nesting of axes"):
        distribute_tensor(full[:9], mesh, ends[0])
    assert [(c.offsets[0], c.sizes[0]) for c in runs.__create_chunk_list__()] == [
        (2 * (rank // 2), 2), (4 + 2 * (rank // 2), 2)
    ]  # fmt: skip


def test_the_same_as_torch_writes_it():
    require("strided shards")
    run_ranks(4, placements_of_torch)
