"""Rules on live tensors: terms of Partial tensors stay apart, and what was found out about keys is known afterwards."""

import re

import pytest

from tests.ranks import run_ranks


def _terms(rank, world, swapped):
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Replicate, Shard

    from torchshard import DTensor, distribute_tensor, state_dict
    from torchshard.errors import ShardingError
    from torchshard.keys import fuse, split, transpose

    # In one order or the other, the rank that would be asked first for a part is one with other terms.
    mesh = DeviceMesh("cpu", torch.arange(world).view(2, 3).t() if swapped else torch.arange(world).view(3, 2))
    line = mesh.get_coordinate()
    shapes = {"q": (4, 3), "k": (5, 3), "v": (6, 3)}
    rules = state_dict.KeyRules([fuse(list("qkv"), "qkv", sizes=(4, 5, 6))])
    whole = {name: torch.arange(float(n * m)).view(n, m) + n for name, (n, m) in shapes.items()}
    joined = torch.cat(list(whole.values()))

    def made(x, placements, there=mesh):
        """Terms i + 1 times `x`, or just `x`: their sum and their largest are known."""
        kept = [Replicate() if p.is_partial() else p for p in placements]
        out = distribute_tensor(x, there, kept)
        times = 1
        for axis, p in enumerate(placements):
            times *= line[axis] + 1 if p.is_partial() else 1
        return DTensor.from_local(out.to_local() * times, there, placements, shape=out.shape, stride=out.stride())

    cases = [
        ([Shard(0), Partial()], 3),
        ([Partial(), Shard(0)], 6),
        ([Partial("max"), Shard(1)], 3),
        ([Partial(), Partial()], 18),
        ([Replicate(), Partial("avg")], 1.5),
    ]
    for placements, times in cases:
        sd = {name: made(x, placements) for name, x in whole.items()}
        for given in (sd, state_dict.to_torch(sd)):
            new = rules(given)
            assert type(new["qkv"]) is type(given["q"])
            assert list(new["qkv"].placements) == placements
            assert torch.equal(new["qkv"].full_tensor(), times * joined), placements
            for name, x in rules.inverse()(new).items():
                assert list(x.placements) == placements
                assert torch.equal(x.full_tensor(), times * whole[name]), (placements, name)
        cut = state_dict.KeyRules([split("qkv", list("qkv"), sizes=(4, 5, 6)), transpose("k")])
        parts = cut({"qkv": made(joined, placements)})
        assert torch.equal(parts["v"].full_tensor(), times * whole["v"]), placements
        assert torch.equal(parts["k"].full_tensor(), times * whole["k"].t()), placements

    # Other splits beside the terms; terms of another kind, or beside values, are refused on every rank alike.
    one = made(whole["q"], [Partial(), Shard(1)])
    others = {"k": made(whole["k"], [Partial(), Replicate()]), "v": made(whole["v"], [Partial(), Shard(0)])}
    assert torch.equal(rules({"q": one, **others})["qkv"].full_tensor(), 6 * joined)
    for placements in ([Replicate(), Replicate()], [Partial("avg"), Shard(0)], [Shard(0), Partial()]):
        for kinds in ({"q": one, "k": made(whole["k"], placements)}, {"q": made(whole["q"], placements), "k": one}):
            kinds = {**kinds, "v": others["v"]}
            sizes = tuple(len(x) for x in kinds.values())
            mixed = state_dict.KeyRules([fuse(list("qkv"), "qkv", sizes=sizes)])
            for sd in (kinds, state_dict.to_torch(kinds)):
                said = "Partial tensor cannot be joined.*made of q, k, v.*reduce_partial=True"
                with pytest.raises(ShardingError, match=re.compile(said, re.S)):
                    mixed(sd)
            sd = state_dict.to_dtensor(kinds, mesh, [Shard(0), Replicate()], reduce_partial=True)
            assert torch.equal(mixed(sd)["qkv"].full_tensor(), torch.cat([x.full_tensor() for x in kinds.values()]))


@pytest.mark.parametrize("swapped", [False, True])
def test_terms_of_partial_tensors_stay_apart(swapped):
    run_ranks(6, _terms, swapped)


def test_rules_for_tensors_know_which_keys_had_a_prefix():
    import torch

    from torchshard.errors import ShardingError
    from torchshard.keys import strip_prefix
    from torchshard.state_dict import KeyRules

    rules = KeyRules([strip_prefix("module.")])
    all_had = {"module.a": torch.ones(2), "module.b": torch.zeros(2)}
    assert list(rules.inverse()(rules(all_had))) == list(all_had)
    some_had = {"module.a": torch.ones(2), "b": torch.zeros(2)}
    new = rules(some_had)
    with pytest.raises(ShardingError, match=re.compile("cannot be known.*inverse\\(of=", re.S)):
        rules.inverse()
    assert list(rules.inverse(of=some_had)(new)) == list(some_had)
