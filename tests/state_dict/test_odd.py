"""Odd tensors and odd dicts: what is filled in another order, tied, empty, without values, or goes by one name twice."""

import re
from collections import UserDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch

from tests.keys.test_keys import Shared
from tests.ranks import run_ranks

Pair = namedtuple("Pair", "a b")


def _address(x):
    if hasattr(x, "local_shards"):
        return [part.tensor.data_ptr() for part in x.local_shards()]
    return (x.to_local() if hasattr(x, "to_local") else x).data_ptr()


def _odd(rank, world):
    from torch.distributed import tensor as upstream
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.tensor import DeviceMesh, Partial, Replicate, Shard
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    from torchshard import DTensor, ShardedTensor, init_device_mesh, state_dict
    from torchshard.errors import RankMismatchError, ShardingError
    from torchshard.keys import split, transpose
    from torchshard.state_dict.forms import form_of
    from torchshard.tensor.sharded import specs

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(15.0).view(5, 3)
    spread = state_dict.to_dtensor(whole, mesh, [Shard(0)])  # the last rank holds nothing

    def refused(call, words):
        with pytest.raises(ShardingError, match=re.compile(words, re.S)):
            call()

    # Paths: two leaves of one path are told; the order of the dicts does not matter, not even for sums.
    for sd in ({"a": {"b": spread}, "a.b": spread}, {1: spread, "1": spread}, {"a": {"b": 3}, "a.b": spread}):
        refused(lambda sd=sd: state_dict.to_full(sd), "Two values of a state dict go by the same name.*got: *(a.b|1)")
    terms = {name: DTensor.from_local(torch.full((3,), float(k)), mesh, [Partial()]) for k, name in enumerate("abc")}
    if rank == 1:
        terms = dict(reversed(terms.items()))
    sums = state_dict.to_full(terms, reduce_partial=True)
    assert {name: x.tolist() for name, x in sums.items()} == {"a": [0] * 3, "b": [4] * 3, "c": [8] * 3}

    # Ties are seen also by ranks that hold nothing, and by those that name the tied ones in another order.
    two = specs.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    some, others = ShardedTensor(two, 4, 2).zero_(), ShardedTensor(two, 4, 2).fill_(1)
    for x, other in ((spread, 2 * spread), (state_dict.to_torch(spread), spread.clone()), (some, others)):
        sd = {"a": x, "b": x.detach(), "c": other, "d": other.detach()}
        full = state_dict.to_full(sd if rank != 1 else dict(reversed(sd.items())))
        assert full["a"] is full["b"]
        assert full["c"] is full["d"]
        assert full["a"] is not full["c"]
    meta = torch.empty(5, 3, device="meta")
    sd = {"a": whole, "b": whole.detach()} if rank == 2 else {"a": meta, "b": meta.detach()}
    sd = state_dict.to_dtensor(sd, mesh, [Shard(0)], src_rank=2)
    assert sd["a"] is sd["b"]
    assert torch.equal(sd["a"].full_tensor(), whole)

    # With a source, what stays a plain tensor has its values too, on the other ranks of the mesh; else it is refused.
    def given(of, device="meta", **more):
        sd = {"w": whole, "n": torch.tensor(7 + rank), "v": whole + rank, "e": whole[:0], **more}
        return sd if rank == of else {name: torch.empty_like(x, device=device) for name, x in sd.items()}

    some = DeviceMesh("cpu", [1, 2, 3])
    for source, there in ((0, mesh), (3, mesh), (0, some)):
        for device in ("meta", "cpu"):
            sd = given(source, device)
            placements = {"w": [Shard(0)], "*": None}
            made = state_dict.to_dtensor(sd, there, placements, src_rank=source)
            assert {name: type(x) for name, x in made.items() if name != "w"} == dict.fromkeys("nve", torch.Tensor)
            assert made["n"].tolist() == 7 + source
            assert torch.equal(made["v"], whole + source)
            assert made["e"].shape == (0, 3)
            assert {made[name].device.type for name in "nve"} == {"cpu"}
            assert rank != source or _address(made["v"]) == _address(sd["v"])
            assert sd["v"].device.type == device or rank == source
    made = state_dict.to_dtensor(given(1), mesh, [Shard(0)], src_rank=1)
    assert made["n"].tolist() == 8
    eye = torch.eye(3).to_sparse()
    refused(
        lambda: state_dict.to_dtensor({"s": eye}, mesh, {"s": None}, src_rank=0), "Only dense tensors.*sparse_coo.*s"
    )
    with pytest.raises(ShardingError if rank == 2 else RankMismatchError, match="meta device has no values"):
        state_dict.to_dtensor({"n": torch.empty((), device="meta")}, mesh, [Shard(0)], src_rank=2)

    # What torch can neither copy nor compare arrives as well: integers of less than eight bits.
    bits = torch.arange(15, dtype=torch.uint8).view(5, 3)
    rules = state_dict.KeyRules([transpose("turned"), split("cut", ["a", "b"], dim=1, sizes=(2, 3))])
    for dtype in (torch.uint4, torch.int2, torch.float4_e2m1fn_x2):
        x = state_dict.to_dtensor(bits.view(dtype) if rank == 1 else meta.to(dtype), mesh, [Shard(0)], src_rank=1)
        for made in (x, state_dict.to_sharded_tensor(x, dim=1), state_dict.to_dtensor(x, mesh, [Shard(1)])):
            assert torch.equal(state_dict.to_full(made).view(torch.uint8), bits)
        turned = bits.t().view(dtype)
        for x in (turned, state_dict.to_dtensor(turned, mesh, [Shard(1)])):
            made = state_dict.to_full(state_dict.to_sharded_tensor(x))
            assert torch.equal(made.view(torch.uint8), bits.t())
            for given in (x, state_dict.to_torch(x)):
                made = state_dict.to_full(rules({"turned": given, "cut": given}))
                assert torch.equal(made["turned"].view(torch.uint8), bits)
                assert torch.equal(made["a"].view(torch.uint8), bits.t()[:, :2])
                joined = state_dict.to_full(rules.inverse()(rules({"turned": given, "cut": given})))
                assert torch.equal(joined["cut"].view(torch.uint8), bits.t())

    # ShardedTensors that ask for gradients have new metadata whenever asked: each is still taken for itself.
    for trial in range(40):
        memory = {}
        several = [ShardedTensor(two, 2 * k + trial % 3, 2).requires_grad_(bool(trial >> k % 5 & 1)) for k in range(8)]
        assert all(form_of(x, False, memory).holding.shape == x.shape for x in several)

    # A conjugate, a negated view and another part of the same memory are tensors of their own.
    z = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    for placements in ([Shard(0)], [Replicate()]):
        for x in (z, state_dict.to_dtensor(z, mesh, placements)):
            sd = {"z": x, "conj": x.conj(), "imag": x.imag, "neg": x.conj().imag, "real": x.real}
            spread_ = state_dict.to_dtensor(sd, mesh, placements)
            parts = [state_dict.to_torch(spread_), state_dict.to_sharded_tensor(sd)]
            for made in (sd, spread_, *parts, state_dict.from_torch(parts[0]), state_dict.from_torch(sd)):
                full = state_dict.to_full(made)
                assert torch.equal(full["z"], z)
                assert torch.equal(full["conj"], z.conj())
                assert torch.equal(full["imag"], z.imag)
                assert torch.equal(full["neg"], -z.imag)
                assert torch.equal(full["real"], z.real)

    # Tensors that differ only in whether they ask for gradients share memory afterwards too, and still differ.
    w = torch.arange(15.0).view(5, 3).requires_grad_()
    ours = state_dict.to_dtensor({"a": w.detach(), "b": w, "c": w.detach()}, mesh, [Shard(0)])
    asked = [
        ours,
        state_dict.to_full(ours),
        state_dict.to_full(state_dict.to_torch(ours)),
        state_dict.to_dtensor(ours, mesh, [Shard(1)]),
        state_dict.to_torch(ours),
        state_dict.from_torch(state_dict.to_torch(ours)),
        state_dict.to_sharded_tensor(ours),
        state_dict.to_sharded_tensor(ours, dim=1),
        state_dict.to_full(state_dict.to_torch(state_dict.to_sharded_tensor(ours))),
        state_dict.from_torch(state_dict.to_torch(state_dict.to_sharded_tensor(ours, dim=1))),
    ]
    for made in asked:
        assert [made[name].requires_grad for name in "abc"] == [False, True, False]
        assert made["a"] is made["c"]
        assert _address(made["a"]) == _address(made["b"])
        assert torch.equal(state_dict.to_full(made)["b"], w)

    # Along replicated axes each group has its own ShardedTensor; mesh and placements lead back to one DTensor.
    grid = init_device_mesh("cpu", (2, 2))
    for placements in ([Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()]):
        parts = state_dict.to_sharded_tensor(state_dict.to_dtensor(whole, grid, placements))
        for back in ([Shard(1), Shard(0)], [Replicate(), Shard(1)], placements):
            for x in (parts, state_dict.to_torch(parts)):
                assert torch.equal(state_dict.to_full(state_dict.to_dtensor(x, grid, back)), whole)

    # Mappings of other classes are made anew.
    for kind in (Shared, MappingProxyType, UserDict, lambda items: defaultdict(list, items)):
        sd = kind({"w": whole, "inner": kind({"v": whole})})
        made = state_dict.to_dtensor(sd, mesh, [Shard(0)])
        assert type(made) is type(sd) is type(made["inner"])
        assert made["w"] is made["inner"]["v"]
        assert isinstance(made["w"], DTensor)
        assert sd["w"] is sd["inner"]["v"] is whole
        assert getattr(made, "default_factory", list) is list

    # What is as long as there are ranks is made once for all that are alike.
    with pytest.MonkeyPatch.context() as patch:
        made, describe = [], specs.metadata_of
        patch.setattr(specs, "metadata_of", lambda *given: made.append(given) or describe(*given))
        for alike in ({k: whole + k for k in range(9)}, {k: spread + k for k in range(9)}):
            parts = state_dict.to_sharded_tensor({**alike, "other": alike[0].to(torch.int64)})
            assert len(made) == 2
            assert all(torch.equal(state_dict.to_full(parts[k]), whole + k) for k in range(9))
            assert (parts["other"].dtype, parts["other"].metadata().tensor_properties.dtype) == (torch.int64,) * 2
            asking = parts[0].detach().requires_grad_()  # changes nothing of the others
            assert asking.metadata().tensor_properties.requires_grad
            assert not parts[1].metadata().tensor_properties.requires_grad
            made.clear()

    # Without elements, without values, not dense.
    for shape in ((0, 3), (5, 0)):
        x = state_dict.to_dtensor(torch.ones(shape), mesh, [Shard(0)])
        assert state_dict.to_full(state_dict.to_sharded_tensor(x)).shape == shape
    refused(lambda: state_dict.to_dtensor({"w": meta}, mesh, [Shard(0)]), "meta device has no values.*w.*src_rank")
    lost = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [Shard(0)])
    refused(lambda: state_dict.to_full({"w": lost}), "meta device has no values")
    wrapped = LocalShardsWrapper([torch.ones(1, 2)], [(rank, 0)])
    several = upstream.DTensor.from_local(wrapped, upstream.init_device_mesh("cpu", (world,)), [Shard(0)])
    refused(lambda: state_dict.to_full({"t": several}), "LocalShardsWrapper of 1 parts.*from_local_shards")
    placed = [
        specs.Shard.from_tensor_and_offsets(part, list(offsets), rank)
        for part, offsets in zip(wrapped.local_shards(), wrapped.local_offsets(), strict=True)
    ]
    assert state_dict.to_full(ShardedTensor.from_local_shards(placed, several.shape)).eq(1).all()
    sparse = torch.eye(3).to_sparse()
    assert state_dict.to_full({"s": sparse, "w": spread}, cpu_offload=True)["s"] is sparse
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    coming = all_reduce(whole, "max", mesh.get_group())  # a class of its own, until it is here
    assert type(coming) is not torch.Tensor
    assert torch.equal(state_dict.to_full(state_dict.to_dtensor({"c": coming}, mesh, [Shard(0)]))["c"], whole)
    masked = torch.masked.masked_tensor(whole, whole > 3)  # its memory is that of the values without the mask
    assert state_dict.to_full({"m": masked, "w": spread})["m"] is masked
    refused(lambda: state_dict.to_dtensor({"m": masked}, mesh, {"m": None}, src_rank=0), "Only dense tensors.*Masked")
    for name, x in (("sparse_coo", sparse), ("quantized", quantized), ("MaskedTensor", masked)):
        for convert in (lambda sd: state_dict.to_dtensor(sd, mesh, [Shard(0)]), state_dict.to_sharded_tensor):
            refused(lambda x=x, convert=convert: convert({"s": x, "w": spread}), f"Only dense tensors.*{name}.*s")

    # Arguments that do not fit are not passed over.
    pair = state_dict.to_full(Pair(spread, 1), rank0_only=True)
    assert pair is None if rank else pair.b == 1
    refused(lambda: state_dict.to_dtensor(whole, mesh, [Shard(0)], src_rank=world), "The source is no rank")
    refused(lambda: state_dict.to_sharded_tensor(whole, dim=1, spec=two), "dim= or spec=.*both")


def test_odd_tensors_and_dicts():
    run_ranks(4, _odd)


def test_patterns_are_found_in_order_and_looked_up_where_they_are_names(monkeypatch):
    from torchshard.keys import globs
    from torchshard.state_dict import conversions

    asked = []
    translate = globs.fnmatch.translate
    monkeypatch.setattr(globs.fnmatch, "translate", lambda pattern: asked.append(pattern) or translate(pattern))
    x = torch.ones(2)
    sd = {f"layers.{k}": x for k in range(100)}
    chosen = conversions._chooser(sd, {key: [key] for key in reversed(sd)}, strict=True)
    assert [chosen(key, x) for key in sd] == [[key] for key in sd]
    assert not asked
    patterns = {"a.b": [1], "a.*": [2], "a.c": [3], "d[12]": [4], "*": None, "z": [5]}
    found = conversions._chooser({}, patterns, strict=False)
    assert [found(key, x) for key in ("a.b", "a.c", "d2", "d[12]", "z")] == [[1], [2], [4], None, None]
    with pytest.raises(ValueError, match=r"no pattern: e; no tensor: d, \[g\]"):
        conversions._chooser({"e": x, "f.0": x, "[g]": x}, {"d": None, "f.*": None, "[[]g]": None, "[g]": None}, True)


def test_plain_tensors_that_say_that_they_hold_parts_are_refused():
    """They are none of a whole, and which ranks hold the rest nobody says."""
    from torchshard import state_dict
    from torchshard.errors import ShardingError
    from torchshard.keys import KeyRules, transpose

    x = torch.zeros(2, 4)
    x.global_shape, x.global_offsets, x.local_offsets, x.local_sizes = (6, 4), ((2, 0),), ((0, 0),), ((2, 4),)
    for convert in (state_dict.to_full, state_dict.to_sharded_tensor, state_dict.KeyRules([transpose("a")])):
        with pytest.raises(ShardingError, match="A plain tensor holds parts of a larger one"):
            convert({"a": x})
    assert KeyRules([]).of_flat({"a": x})["a"] is x
