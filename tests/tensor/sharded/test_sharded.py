"""ShardedTensor: made, gathered, cut anew, computed with, saved; and the cases where torch's own is wrong."""

import copy
import io
import re

import pytest

from tests.ranks import run_ranks
from torchshard.errors import UnsupportedOperatorError


def _imports():
    import torch

    from torchshard import ShardedTensor
    from torchshard.tensor.sharded import factories, specs

    return torch, ShardedTensor, factories, specs


def _chunk(specs, dim=0, world=4):
    return specs.ChunkShardingSpec(dim, [f"rank:{r}/cpu" for r in range(world)])


def _made_from(whole, spec, ShardedTensor):
    """A ShardedTensor with the values of a whole tensor."""
    x = ShardedTensor(spec, whole.shape, dtype=whole.dtype)
    for shard in x.local_shards():
        box = tuple(
            slice(o, o + n) for o, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        )
        shard.tensor.copy_(whole[box])
    return x


def _gathered(x, torch, rank, dst=0, **options):
    out = torch.empty(x.shape, dtype=options.get("dtype") or x.dtype) if rank == dst else None
    x.gather(dst, out, **options)
    return out


def _making(rank, world):
    torch, ShardedTensor, factories, specs = _imports()
    # 5 rows on 4 ranks: the last holds nothing, at the end of the tensor.
    x = factories.zeros(_chunk(specs), 5, 3)
    assert [s.shard_sizes for s in x.metadata().shards_metadata] == [[2, 3], [2, 3], [1, 3], [0, 3]]
    assert x.metadata().shards_metadata[3].shard_offsets == [5, 0]
    assert x.shape == (5, 3)
    assert x.local_tensor().shape == ((2, 2, 1, 0)[rank], 3)
    ones = factories.ones(_chunk(specs), 5, 3, dtype=torch.int64)
    assert ones.dtype == torch.int64
    assert factories.full(_chunk(specs), (4,), 2.5).local_tensor().tolist() == [2.5]
    torch.manual_seed(3)
    drawn = factories.rand(_chunk(specs), 5, 3)
    torch.manual_seed(3)
    whole = torch.rand(5, 3)
    got = _gathered(drawn, torch, rank)
    assert rank or torch.equal(got, whole)
    # From local parts, sizes exchanged; and with offsets, checked by all.
    local = torch.arange(3 * (rank + 1)).view(rank + 1, 3)
    y = ShardedTensor.from_local(local)
    assert y.shape == (10, 3)
    assert y.local_tensor() is local
    assert y.sharding_spec() == specs.EnumerableShardingSpec(y.metadata().shards_metadata)
    z = ShardedTensor.from_local(torch.full((2, 1), rank), dim=1)
    assert (z.shape, z.sharding_spec().dim) == ((2, 4), 1)
    # Two parts on one rank, none on another.
    offsets = {0: [0, 6], 1: [2], 2: [4], 3: []}[rank]
    parts = [specs.Shard.from_tensor_and_offsets(torch.full((2,), o, dtype=torch.int16), [o], rank) for o in offsets]
    two = ShardedTensor.from_local_shards(parts, 8)
    got = _gathered(two, torch, rank, dst=2)
    assert rank != 2 or got.tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert (two + 1).local_shards() == [] if rank == 3 else (two + 1).local_shards()[0].tensor.dtype == torch.int16
    if rank in (0, 3):
        with pytest.raises(NotImplementedError, match="parts, not one"):
            two.local_tensor()
    with pytest.raises(NotImplementedError, match="not by RPC"):
        factories.empty(_chunk(specs), 4, init_rrefs=True)
    grid = specs.GridShardingSpec((2, 2), [f"rank:{r}/cpu" for r in range(4)])
    whole = torch.randn(5, 7, dtype=torch.float64)
    got = _gathered(_made_from(whole, grid, ShardedTensor), torch, rank)
    assert rank or torch.equal(got, whole)
    return True


def _faults(rank, world):
    """What each rank is told of parts that do not fit together."""
    torch, ShardedTensor, _, specs = _imports()

    def parts(offset, size, dtype=torch.float32, owner=None):
        shard = specs.Shard(
            torch.zeros(size, dtype=dtype),
            specs.ShardMetadata([offset], [size], f"rank:{rank if owner is None else owner}/cpu"),
        )
        return [shard]

    def told(make):
        with pytest.raises((ValueError, RuntimeError, TypeError)) as error:
            make()
        return f"{type(error.value).__name__}: {error.value}"

    said = {
        "overlap": told(lambda: ShardedTensor.from_local_shards(parts(rank, 2), 5)),
        "hole": told(lambda: ShardedTensor.from_local_shards(parts(2 * rank, 1), 8)),
        "outside": told(lambda: ShardedTensor.from_local_shards(parts(2 * rank, 2), 7)),
        "size": told(lambda: ShardedTensor.from_local_shards(parts(2 * rank, 2), 8 + (rank == 2))),
        "dtype": told(
            lambda: ShardedTensor.from_local_shards(parts(2 * rank, 2, (torch.float32, torch.int64)[rank == 3]), 8)
        ),
        "owner": told(lambda: ShardedTensor.from_local_shards(parts(2 * rank, 2, owner=0 if rank == 1 else None), 8)),
        "missing": told(lambda: ShardedTensor.from_local_shards(parts(2 * rank, 2) if rank != 2 else [], 8)),
        "none": told(lambda: ShardedTensor.from_local_shards([], 8)),
        "kind": told(lambda: ShardedTensor.from_local_shards([torch.ones(2)] if rank == 1 else parts(2 * rank, 2), 8)),
    }
    unplaced = [specs.Shard(torch.zeros(2), specs.ShardMetadata([2], [2]))]
    said["unplaced"] = told(lambda: ShardedTensor.from_local_shards(unplaced if rank == 1 else parts(2 * rank, 2), 8))
    said["spec"] = told(lambda: ShardedTensor(["rank:0/cpu"], 8))  # a ValueError, as torch's
    said["unknown"] = told(lambda: ShardedTensor.from_local_shards(parts(2 * rank, 2), None))
    x = ShardedTensor.from_local_shards(parts(2 * rank, 2), 8)
    wrong = copy.deepcopy(x.metadata())
    wrong.shards_metadata[rank].shard_sizes = [1]
    said["metadata"] = told(lambda: ShardedTensor.from_shards_and_metadata(x.local_shards(), wrong))
    out = torch.empty(7) if rank == 1 else None
    said["gather"] = told(lambda: x.gather(1, out))
    assert ShardedTensor.from_shards_and_metadata(x.local_shards(), x.metadata()).local_tensor() is x.local_tensor()
    return said


def _moving(rank, world):
    torch, ShardedTensor, factories, specs = _imports()
    rows, columns = _chunk(specs), _chunk(specs, 1)
    grid = specs.GridShardingSpec((2, 2), [f"rank:{r}/cpu" for r in (3, 1, 2, 0)])
    # Exact where torch goes through float32, or where gloo knows no such type.
    for dtype in (torch.int64, torch.float64, torch.int16, torch.bool, torch.complex64, torch.bfloat16):
        whole = torch.randint(-(2**52), 2**52, (5, 6)).to(dtype)
        whole = whole + 1 if dtype is torch.int64 else whole
        torch.distributed.broadcast_object_list(held := [whole], 0)
        whole = held[0]
        x = _made_from(whole, rows, ShardedTensor)
        for spec in (columns, grid, rows):
            assert x.reshard(spec) is x
            assert x.sharding_spec() is spec
            got = _gathered(x, torch, rank, dst=1)
            assert rank != 1 or torch.equal(got, whole)
            assert x.local_tensor().dtype == dtype
    x = _made_from(torch.arange(12.0).view(4, 3), rows, ShardedTensor)
    got = _gathered(x, torch, rank, dtype=torch.int32)
    assert rank or got.tolist() == torch.arange(12).view(4, 3).tolist()
    assert x.cpu() is x
    assert x.to(torch.float32) is x
    assert x.to("cpu") is x
    half = x.to(torch.float16)
    assert (half.dtype, half.local_tensor().dtype, half.metadata().tensor_properties.dtype) == (torch.float16,) * 3
    assert x.to(device="meta").local_tensor().is_meta
    assert x.to(torch.float32, copy=True).local_tensor().data_ptr() != x.local_tensor().data_ptr()
    # torch's own, and back: the same shards and metadata.
    theirs = x.to_torch()
    assert type(theirs).__module__.startswith("torch.")
    assert theirs.local_shards()[0].tensor is x.local_tensor()
    back = ShardedTensor.from_torch(theirs)
    assert back.local_tensor() is x.local_tensor()
    assert back.metadata() is theirs.metadata()
    empty = factories.ones(_chunk(specs), 5, 3).to_torch()
    assert empty.local_shards()[0].tensor.shape[0] == (2, 2, 1, 0)[rank]
    return True


def _computing(rank, world):
    torch, ShardedTensor, _, specs = _imports()
    rows = _chunk(specs)
    torch.manual_seed(1)
    w, v = torch.randn(5, 3), torch.rand(5, 3) + 1
    x, y = _made_from(w, rows, ShardedTensor), _made_from(v, rows, ShardedTensor)

    def check(got, expected):
        here = _gathered(got, torch, rank)
        assert rank or torch.equal(here, expected)
        assert got.dtype == expected.dtype

    for run in (
        lambda a, b: a + b,
        lambda a, b: 2 * a - b / 3,
        lambda a, b: torch.addcdiv(a, a, b, value=0.5),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: a.to(torch.float64) * b,
        lambda a, b: a.detach().clone().clamp_(min=0).add_(b).sqrt(),
        lambda a, b: torch.zeros_like(a) + torch.ones_like(b) * torch.tensor(3.0),
        lambda a, b: torch.frexp(a).mantissa,
        lambda a, b: a.isnan() | (b == 1),
        lambda a, b: torch.full_like(a, 7, dtype=torch.int32),
        lambda a, b: torch._foreach_mul([a, b], 2.0)[1],
    ):
        check(run(x, y), run(w, v))
    z = x.clone()
    versions = [shard.tensor._version for shard in z.local_shards()]
    z.zero_()
    torch._foreach_zero_([z])
    z.copy_(y)
    assert [shard.tensor._version for shard in z.local_shards()] == [n + 3 for n in versions]  # as autograd asks
    check(z, v)
    check(copy.deepcopy(z), v)
    with pytest.raises(
        UnsupportedOperatorError, match=re.compile("mm.*not an operator of ShardedTensors.*to_dtensor", re.S)
    ):
        x @ y.to(torch.float32)
    with pytest.raises(UnsupportedOperatorError, match="sum"):
        x.sum()
    # Random numbers are those of the whole tensor; what depends on values, too, is refused.
    for fill in (
        torch.nn.init.kaiming_uniform_,
        torch.nn.init.xavier_normal_,
        lambda a: a.bernoulli_(0.5).add_(a.exponential_()),
        lambda a: a.bernoulli_(torch.tensor([0.1, 0.5, 0.9])),
        lambda a: torch.randn_like(a, dtype=torch.float64),
        lambda a: torch.randint_like(a, 9),
        lambda a: torch.dropout(torch.ones_like(a), 0.5, True),
    ):
        drawn = []
        for a in (torch.nn.Parameter(z), torch.nn.Parameter(w.clone())):
            torch.manual_seed(4)
            with torch.no_grad():
                drawn.append(fill(a))
        check(*drawn)
    with pytest.raises(UnsupportedOperatorError, match="rrelu"):
        torch.rrelu(x, training=True)
    with pytest.raises(UnsupportedOperatorError, match="bernoulli_"):
        z.bernoulli_(torch.ones_like(z))
    with pytest.raises(UnsupportedOperatorError, match="_foreach_norm"):
        torch._foreach_norm([x, y])
    with pytest.raises(ValueError, match=re.compile("argument 1 is a plain tensor.*to_sharded_tensor", re.S)):
        x + w
    with pytest.raises(ValueError, match=re.compile("cut in different ways.*reshard", re.S)):
        x + y.clone().reshard(_chunk(specs, 1))
    # Optimizers: one and many tensors at a time; as on a single process.
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
        for foreach in (False, True):
            options = {"lr": 0.1, "foreach": foreach, **({"momentum": 0.9} if make is torch.optim.SGD else {})}
            ours, plain = torch.nn.Parameter(x.clone()), torch.nn.Parameter(w.clone())
            assert isinstance(ours, ShardedTensor)
            one, other = make([ours], **options), make([plain], **options)
            for _ in range(3):
                ours.grad, plain.grad = (ours.detach() * 0.5).cos(), (plain.detach() * 0.5).cos()
                one.step()
                other.step()
            check(ours.detach(), plain.detach())
    leaf = x.clone().requires_grad_()
    (leaf * y).relu().backward(_made_from(torch.ones(5, 3), rows, ShardedTensor))
    check(leaf.grad, v * (w * v > 0))
    # Converted, and told to talk by way of another group: with history.
    import torch.distributed as dist

    leaf = x.clone().requires_grad_()
    there = leaf.to(torch.float64, process_group=dist.new_group(list(range(world))))
    assert there.dtype is torch.float64
    assert there._process_group is not x._process_group
    (there * there).backward(there.detach())
    assert leaf.grad._process_group is x._process_group
    check(leaf.grad, 2 * w * w)
    # Lists: results have one dtype on all ranks, also where one holds nothing, and writes are counted.
    whole = torch.tensor([4, 9])  # on two of four ranks
    number = _made_from(whole, _chunk(specs), ShardedTensor)
    (root,) = torch._foreach_sqrt([number])
    assert root.dtype is torch.float32
    check(root, whole.sqrt())
    # Numbers go with their items, of which a rank has two parts or none, in a list or in a tensor.
    cuts = [specs.ChunkShardingSpec(0, [f"rank:{r}/cpu"] * 2) for r in (0, 1)]
    items = [_made_from(w, cut, ShardedTensor) for cut in cuts]
    for numbers in ([2.0, 5.0], torch.tensor([2.0, 5.0])):
        for got, number in zip(torch._foreach_addcdiv(items, items, items, numbers), (2, 5), strict=True):
            check(got, torch.addcdiv(w, w, w, value=number))
    # What is drawn goes with others, also on ranks that have no part.
    for item in items:
        drawn = []
        for a in (item, w):
            torch.manual_seed(4)
            drawn.append(torch.randn_like(a) * a)
        check(*drawn)
    # Conjugates and negatives, which torch makes when they are read.
    whole = torch.complex(w, v)
    number = _made_from(whole, rows, ShardedTensor)
    for run in (
        lambda a: a.conj() + 1,
        lambda a: a != a.conj(),
        lambda a: torch._foreach_mul([a.conj()], 2.0)[0],
        lambda a: torch._neg_view(a) + 1j,
    ):
        check(run(number), run(whole))
    for a in (number, whole):
        a.conj().add_(2j)
    check(number.detach(), whole)
    leaf = x.clone().requires_grad_()
    saved = leaf * 1
    squares = saved * saved
    with torch.no_grad():
        torch._foreach_mul_([saved], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward(x)
    return True


def _saving(rank, world):
    torch, _, factories, specs = _imports()
    from torchshard.tensor.sharded import saving

    files = []
    for spec in (_chunk(specs), specs.GridShardingSpec((2, 2), [f"rank:{r}/cpu" for r in range(4)])):
        x = factories.rand(spec, 5, 4, dtype=torch.float64)
        file = io.BytesIO()
        torch.save({"w": x}, file)
        y = torch.load(io.BytesIO(file.getvalue()))["w"]  # weights_only, the default
        assert y.sharding_spec() == spec
        assert torch.equal(y.local_tensor(), x.local_tensor())
        files.append(file.getvalue())

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = factories.ones(_chunk(specs), 5, 4)
            self.inner = torch.nn.Linear(2, 2)

    holder = Holder()
    holder.register_state_dict_post_hook(saving.state_dict_hook)
    holder.register_load_state_dict_pre_hook(saving.pre_load_state_dict_hook)
    state = holder.state_dict()
    assert list(state) == ["inner.weight", "inner.bias", "table"]
    other = Holder()
    other.register_load_state_dict_pre_hook(saving.pre_load_state_dict_hook)
    other.load_state_dict({**state, "table": factories.zeros(_chunk(specs), 5, 4)})
    assert not other.table.local_tensor().any()

    # Hooks of a module within another, which has none: the names are those of attributes.
    outer = torch.nn.Sequential(holder, torch.nn.Linear(2, 2))
    state = outer.state_dict()
    assert {name for name in state if "table" in name} == {"0.table"}
    holder.table = None
    twice = {("0..table" if name == "0.table" else name): value for name, value in state.items()}
    for named in (state, twice):  # with two dots, as torch's hook has them there
        outer.load_state_dict(dict(named))
        assert torch.equal(holder.table, state["0.table"])
        holder.table = None
    return files


def _checkpointing(rank, world, folder):
    """torch.distributed.checkpoint: saved in parts of two kinds, loaded in others; asynchronously too; torch's own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.utils import find_state_dict_object

    torch, ShardedTensor, factories, specs = _imports()
    grid = specs.GridShardingSpec((2, 2), [f"rank:{r}/cpu" for r in (3, 1, 2, 0)])
    whole = torch.arange(35.0).view(5, 7)
    for k, spec in enumerate((_chunk(specs), grid)):
        saved = {"w": _made_from(whole, spec, ShardedTensor)}
        path = f"{folder}/{k}"
        if k:
            dcp.async_save(saved, checkpoint_id=path).result()
        else:
            dcp.save(saved, checkpoint_id=path)
        for other in (_chunk(specs, 1), grid):
            loaded = {"w": factories.zeros(other, 5, 7)}
            dcp.load(loaded, checkpoint_id=path)
            got = _gathered(loaded["w"], torch, rank)
            assert rank or torch.equal(got, whole)
        theirs = {"w": factories.zeros(_chunk(specs), 5, 7).to_torch()}
        dcp.load(theirs, checkpoint_id=path)
        got = _gathered(ShardedTensor.from_torch(theirs["w"]), torch, rank)
        assert rank or torch.equal(got, whole)
    # torch's lookup of a part: by its offsets, which have to be there.
    w, at = saved["w"], saved["w"].local_shards()[0].metadata.shard_offsets
    assert find_state_dict_object(saved, MetadataIndex("w", at)).data_ptr() == w.local_shards()[0].tensor.data_ptr()
    for offset in (None, (4, 4)):
        with pytest.raises(ValueError, match="no part with these offsets"):
            find_state_dict_object(saved, MetadataIndex("w", offset))
    # Empty parts where others begin; and no element anywhere.
    parts = [specs.Shard.from_tensor_and_offsets(torch.ones(n, 3), [2 * rank, 0], rank) for n in (0, 2)]
    sd = {"w": ShardedTensor.from_local_shards(parts, 8, 3), "e": factories.ones(_chunk(specs), 0, 3)}
    dcp.save(sd, checkpoint_id=f"{folder}/empty")
    loaded = {"w": factories.zeros(_chunk(specs, 1), 8, 3), "e": factories.ones(_chunk(specs), 0, 3)}
    dcp.load(loaded, checkpoint_id=f"{folder}/empty")
    assert loaded["w"].local_tensor().all()
    return True


def _everything(rank, world, folder):
    return {
        "making": _making(rank, world),
        "moving": _moving(rank, world),
        "computing": _computing(rank, world),
        "saving": _saving(rank, world),
        "checkpointing": _checkpointing(rank, world, folder),
        "faults": _faults(rank, world),
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return run_ranks(4, _everything, str(tmp_path_factory.mktemp("checkpoints")), timeout=150)


def test_all_ranks_agree_that_all_is_right(done):
    assert all(answer[what] for answer in done for what in ("making", "moving", "computing", "saving", "checkpointing"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("overlap", "Two boxes hold the same elements"),
        ("hole", "Boxes are missing.*8 elements.*4 in 4 boxes"),
        ("outside", "A box lies outside of its tensor.*rank 3: "),
        ("size", "Ranks differ in the size.*as on rank 0.*on rank 2"),
        ("dtype", "Ranks differ in the properties.*as on rank 0.*int64.*on rank 3"),
        ("owner", "does not agree in its rank.*rank 1"),
        ("missing", "Boxes are missing.*8 elements.*6 in 3 boxes.*rank 3: "),
        ("none", "No rank holds a part"),
        ("kind", "A part is no Shard.*got: +Tensor.*part 0 of rank 1"),
        ("unplaced", "does not agree in its rank.*expected: +1.*got: +no placement.*part 0 of rank 1"),
        ("spec", r"^ShardingError: This is no sharding spec.*got: +\['rank:0/cpu'\].*ChunkShardingSpec\(0, "),
        ("unknown", r"sequence of ints, found: \[None\]; .*ShardedTensor.from_local\(tensor, dim\)"),
    ],
)
def test_every_rank_is_told_what_does_not_fit(done, fault, words):
    for answer in done:
        assert re.search(words, answer["faults"][fault], re.S), answer["faults"][fault]


def test_metadata_that_does_not_fit_is_told_where_it_is(done):
    assert "Boxes are missing" in done[0]["faults"]["metadata"]
    assert "out of shape (8,)" in done[1]["faults"]["gather"]
    for rank in (0, 2, 3):
        assert "RankMismatchError" in done[rank]["faults"]["gather"]


def test_a_file_opens_without_a_process_group(done):
    import torch

    from torchshard import ShardedTensor

    for rank, answer in enumerate(done):
        x = torch.load(io.BytesIO(answer["saving"][1]))["w"]
        assert type(x) is ShardedTensor
        assert x.shape == (5, 4)
        assert x.local_tensor().shape == ((3, 2), (3, 2), (2, 2), (2, 2))[rank]
        assert (x + 1).dtype == torch.float64
        with pytest.raises(ValueError, match="without a process group"):
            x.gather(0, torch.empty(5, 4))


def _alone(rank, world, file):
    torch, *_ = _imports()
    torch.load(io.BytesIO(file))


def test_another_number_of_ranks_is_told(done):
    with pytest.raises(AssertionError, match="expected: rank 1 of 4"):
        run_ranks(1, _alone, done[1]["saving"][0])
