"""Ranks that do not convert the same: every rank is told by name, in time, and what was given in is as it was."""

import os
import re
import time
from collections import UserDict
from datetime import timedelta

import pytest

from tests.ranks import by_messages, meet, run_ranks


def _told(make, kind=Exception):
    start = time.monotonic()
    with pytest.raises(kind) as error:
        make()
    return f"{type(error.value).__name__}: {error.value}", time.monotonic() - start


def _differ(rank, world):
    """Each fault in turn; after it, a conversion in which all agree is done as if nothing had been."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from torchshard import state_dict

    mesh = init_device_mesh("cpu", (world,))
    told = {}
    for fault in (None, *FAULTS):
        if fault in REFUSED:
            told[fault] = _one_refuses(rank, mesh, fault)
        elif fault is not None:
            told[fault] = _one_differs(rank, world, mesh, fault)
        good = state_dict.to_dtensor(torch.arange(7.0), mesh, [Shard(0)])
        assert state_dict.to_full({"w": good})["w"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    return told


def _one_differs(rank, world, mesh, fault):
    """Convert with one rank that does not do as the others."""
    import torch
    from torch.distributed.tensor import Partial, Shard

    from torchshard import DTensor, state_dict
    from torchshard.tensor.sharded.specs import chunks

    odd = rank == 1
    shape = (4 * world, 3)
    sd = {name: state_dict.to_dtensor(torch.ones(shape), mesh, [Shard(0)]) for name in ("a", "b")}
    before = {name: (x._local_tensor, x._local_tensor.clone()) for name, x in sd.items()}
    given = dict(sd)
    if odd and fault == "keys":
        given["c"] = given.pop("b")
    if fault in ("other name", "no tensor"):  # of a tensor that has two
        given["c"] = given["b"]
    if odd and fault == "other name":
        given["d"] = given.pop("c")
    if odd and fault == "no tensor":
        given["c"] = 3
    if odd and fault == "dtype":
        given["b"] = given["b"].to(torch.float64)
    if odd and fault == "shape":
        given["b"] = DTensor.from_local(torch.ones(4, 5), mesh, [Shard(0)], shape=(4 * world, 5), stride=(5, 1))
    if fault == "assumed":  # without a shape, from_local takes all parts to be as large as this one
        given["b"] = DTensor.from_local(torch.ones(5 if odd else 4, 3), mesh, [Shard(0)])
    if fault == "part":  # the tensor has been changed behind its back
        broken = state_dict.to_dtensor(torch.ones(shape), mesh, [Shard(0)])
        if odd:
            broken._local_tensor = torch.ones(2, 3)
        given["b"] = broken
    if fault == "known":  # all ranks have done either before
        others = {"other": sd["b"] + 1}
        state_dict.to_full(others)
        state_dict.to_full(given)
        given = others if odd else given
    if fault == "terms":  # one rank has a sum less to make
        for name in ("s", "t") if odd else ("t",):
            given[name] = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    if fault == "turn":  # of two tensors of one shape, each takes another first
        sd = {"a": state_dict.to_sharded_tensor(sd["a"]), "b": state_dict.to_sharded_tensor(sd["b"], dim=1)}
        return _told(lambda: sd["b" if odd else "a"].reshard(chunks(0, (2, 0), torch.device("cpu"))))
    if fault == "source of values":
        return _told(lambda: state_dict.to_dtensor({"w": torch.ones(shape)}, mesh, [Shard(0)], src_rank=int(odd)))
    if odd and fault == "target":
        told = _told(lambda: state_dict.to_dtensor(given, mesh, [Shard(1)]))
    elif fault == "nothing":  # as torch's broadcast_from_rank0 would take it
        plain = {} if odd else {"w": torch.ones(shape)}
        told = _told(lambda: state_dict.to_dtensor(plain, mesh, [Shard(0)], src_rank=0))
    else:
        told = _told(lambda: state_dict.to_full(given, reduce_partial=True))
    for name, (local, values) in before.items():
        assert sd[name]._local_tensor is local
        assert torch.equal(local, values)
    return told


def _one_refuses(rank, mesh, fault):
    """What only rank 1 finds, or cannot do, while the others wait for it."""
    import torch
    from torch.distributed.tensor import Partial, Shard

    from torchshard import DTensor, ShardedTensor, state_dict
    from torchshard.keys import fuse
    from torchshard.state_dict import targets
    from torchshard.tensor.moving import carrying
    from torchshard.tensor.sharded.specs import chunks

    odd = rank == 1
    whole = torch.arange(12.0).view(6, 2)
    spread = state_dict.to_dtensor(whole, mesh, [Shard(0)])
    cut = state_dict.to_sharded_tensor(spread)
    rules = state_dict.KeyRules([fuse(["a", "b"], "ab")])

    def fails(*_):
        raise MemoryError("no room")

    endless = {"x": whole + 1}
    endless["again"] = [endless]
    walked = {"b": endless} if odd else {}

    class Broken(UserDict):
        def items(self):
            return fails()

    def place(key, x):
        return fails() if odd else [Shard(0)]

    calls = {
        "pattern": lambda: state_dict.to_dtensor(
            {"w": spread, **({"v": whole} if odd else {})}, mesh, {"w": [Shard(1)]}
        ),
        "function": lambda: state_dict.to_dtensor({"w": whole}, mesh, place, src_rank=0),
        "path": lambda: state_dict.to_full({"a": {"w": spread}, "a.w" if odd else "b": 3}),
        "endless": lambda: state_dict.to_full({"w": spread, **walked}),
        "endless, placed": lambda: state_dict.to_dtensor({"w": spread, **walked}, mesh, {"*": [Shard(1)]}),
        "endless, joined": lambda: rules({"a": spread, "b": endless if odd else spread}),
        "no items": lambda: state_dict.to_full({"w": spread, "b": Broken() if odd else {}}),
        "no text": lambda: state_dict.to_dtensor({"0": spread}, mesh, {0 if odd else "0": [Shard(1)]}, strict=False),
        "partial": lambda: state_dict.to_full(DTensor.from_local(whole, mesh, [Partial()]) if odd else spread),
        "room": lambda: state_dict.to_full({"v": spread + 1, "w": spread}),
        "under way": lambda: state_dict.to_full({"v": spread + 1, "w": spread}),
        "dim": lambda: state_dict.to_sharded_tensor(spread, dim=7 if odd else 1),
        "destination": lambda: cut.gather(9 if odd else 0, torch.empty(6, 2) if rank == 0 else None),
        "spec": lambda: cut.reshard(chunks(7 if odd else 1, range(3), whole.device)),
        "strangers": lambda: cut.reshard(chunks(0, (0, 1, 7) if odd else (0, 2), whole.device)),
        "joined": lambda: ShardedTensor.from_local(whole, dim=7 if odd else 0),
        "rules": lambda: rules({"a": spread} if odd else {"a": spread, "b": spread}),
        "joins": lambda: rules({"a": spread, "b": cut if odd else spread}),
        "source": lambda: state_dict.to_dtensor({"w": whole}, mesh, [Shard(0)], src_rank=7 if odd else 0),
        "both": lambda: state_dict.to_sharded_tensor(
            {"w": spread}, dim=1, spec=chunks(1, range(3), whole.device) if odd else None
        ),
        "size": lambda: ShardedTensor.from_local_shards(cut.local_shards(), "6" if odd else 6, 2),
    }
    with pytest.MonkeyPatch.context() as patch:
        if odd and fault == "room":
            patch.setattr(targets.Whole, "room", fails)
        if odd and fault == "under way":
            patch.setattr(carrying, "fetch", fails)
        return _told(calls[fault])


REFUSED = {
    "pattern": "ShardingError: Keys and patterns of placements do not cover one another",
    "function": "MemoryError: no room",
    "path": "ShardingError: Two values of a state dict go by the same name",
    "endless": "ShardingError: Containers are nested too deep",
    "endless, placed": "ShardingError: Containers are nested too deep",
    "endless, joined": "ShardingError: Containers are nested too deep",
    "no items": "MemoryError: no room",
    "no text": "ShardingError: A pattern of placements is no text",
    "partial": "ShardingError: A Partial tensor has no values to convert",
    "room": "MemoryError: no room",
    "under way": "MemoryError: no room",
    "dim": "ShardingError: The sharding spec does not fit the tensor",
    "destination": r"ShardingError: gather\(\) has no such destination",
    "spec": "ShardingError: The sharding spec does not fit the tensor",
    "strangers": "ShardingError: Parts lie on ranks that are not in the process group",
    "joined": "ShardingError: No dim to join along",
    "rules": "ShardingError: Parts of a fused tensor are missing",
    "joins": "UnsupportedOperatorError: A ShardedTensor cannot be joined",
    "source": "ShardingError: The source is no rank",
    "both": "ShardingError: A spec says itself which dim is cut",
    "size": "TypeError: size has to be a sequence of ints",
}
"""By fault: what the rank concerned raises, and the others are told."""

WORDS = {
    "keys": "ranks . and . have different state dicts.*(b: .*c: |c: .*b: )",
    "dtype": "different state dicts.*b: torch.float(32|64).*b: torch.float(64|32)",
    "other name": "different state dicts.*([cd]: the same tensor as b.*){2}",
    "no tensor": "different state dicts.*(c: the same tensor as b.*nothing more|nothing more.*c: the same tensor as b)",
    "shape": r"different state dicts.*b: .*shape \(12, .\)",
    "assumed": r"different state dicts.*b: .*shape \(1[25], 3\)",
    "known": "different state dicts.*(a: .*other: |other: .*a: )",
    "terms": "different state dicts.*(s: .*t: |t: .*s: )",
    "turn": r"different state dicts.*shape \(12, 3\), Box",
    "nothing": "different state dicts.*(w: .*nothing more|nothing more.*w: )",
    "source of values": "different state dicts.*w: .*whole on rank (0.*whole on rank 1|1.*whole on rank 0)",
    "target": "different state dicts.*whole on the ranks|different state dicts.*S\\(1\\)",
}


FAULTS = [*WORDS, *REFUSED, "part"]


@pytest.fixture(scope="module")
def told():
    return run_ranks(3, _differ, timeout=100)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_is_told(told, fault):
    for rank, answers in enumerate(told):
        said, seconds = answers[fault]
        assert seconds < 20
        if fault in REFUSED:
            kind, words = REFUSED[fault].split(": ")
            named = words if kind in ("ShardingError", "UnsupportedOperatorError") else REFUSED[fault]
            expected = REFUSED[fault] if rank == 1 else f"RankMismatchError: rank 1 takes no part: {named}"
            assert re.match(expected, said), said
            continue
        if fault == "part" and rank == 1:
            assert re.search(r"ShardingError: The part at \(1,\) has shape \(2, 3\)", said), said
        elif fault == "part":
            assert re.search(r"RankMismatchError.*The part at \(1,\) has shape", said, re.S), said
        else:
            assert re.search("RankMismatchError.*" + WORDS[fault], said, re.S), said


def _lost(rank, world, store, when):
    """Rank 2 dies before it converts, or while the others wait for its parts."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from torchshard import state_dict
    from torchshard.tensor.moving import carrying

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=10)
    )
    mesh = init_device_mesh("cpu", (world,))
    if when == "while messages are on their way":
        by_messages()
    sd = {f"w{k}": state_dict.to_dtensor(torch.ones(3 * 1024, 1024), mesh, [Shard(0)]) for k in range(4)}
    meet(f"{store}.here", rank, world)
    if rank == 2:
        if when != "before":
            carrying.start = carrying.fetch = lambda *_: os._exit(1)
            state_dict.to_full(sd)
        os._exit(1)
    return _told(lambda: state_dict.to_full(sd))


@pytest.mark.parametrize("when", ["before", "while memory is read", "while messages are on their way"])
def test_a_dead_rank_is_named_in_time(when, tmp_path):
    found = run_ranks(3, _lost, str(tmp_path / "store"), when, backend="", timeout=60, expect_dead=(2,))
    for rank in (0, 1):
        said, seconds = found[rank]
        assert seconds < 45  # the group's limit is 10
        assert said.startswith("RankMismatchError")
        if when != "before":
            assert "no answer within 3 s from rank 2" in said
        else:
            assert re.search("waits in vain.*ranks? 2", said, re.S), said


def _apart(rank, world, store):
    """The source of values is no rank of the mesh, and converts nothing: as that of another pipeline stage."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    from torchshard import state_dict

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=5)
    )
    mesh = DeviceMesh("cpu", [0, 1])
    said = None
    if rank < 2:
        said, _ = _told(lambda: state_dict.to_dtensor({"w": torch.ones(4)}, mesh, [Shard(0)], src_rank=3))
    meet(f"{store}.done", rank, world)
    return said


def test_a_rank_that_does_not_come_to_a_group_is_named(tmp_path):
    for said in run_ranks(4, _apart, str(tmp_path / "store"), backend="", timeout=60)[:2]:
        assert re.match(r"RankMismatchError: rank [01] waits in vain.*\[0, 1, 3\].*not rank 3\n", said, re.S)


def _interrupted(rank, world, by_message):
    import torch

    from torchshard import Shard, distribute_tensor, init_device_mesh
    from torchshard.comm import neighbours, transfers
    from torchshard.state_dict import to_full
    from torchshard.tensor.moving import carrying

    if by_message:
        by_messages()
    mesh = init_device_mesh("cpu", (world,))
    first, second = torch.arange(40.0).view(10, 4), torch.arange(28.0).view(4, 7)
    x, y = (distribute_tensor(value, mesh, [Shard(0)]) for value in (first, second))
    to_full({"z": distribute_tensor(second, mesh, [Shard(1)])})

    def interrupt(*_):
        raise KeyboardInterrupt

    for module in (neighbours, carrying):
        setattr(module, "start" if rank else "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        to_full({"x": x})
    for module in (neighbours, carrying):
        module.start, module.finish = transfers.start, transfers.finish
    found = to_full({"y": y, "x": x})
    return torch.equal(found["x"], first) and torch.equal(found["y"], second)


@pytest.mark.parametrize("by_message", [False, True])
def test_what_was_under_way_at_an_interrupt_is_no_part_of_the_next_exchange(by_message):
    """One rank had sent already, the other one had not."""
    assert run_ranks(2, _interrupted, by_message) == [True] * 2


def _of_two_circles(rank, world):
    import torch

    from torchshard import DeviceMesh, Shard, distribute_tensor
    from torchshard.state_dict import to_full
    from torchshard.tensor.moving import carrying

    full = torch.arange(24.0).view(6, 4)
    given = {name: distribute_tensor(full, DeviceMesh("cpu", ranks), [Shard(0)]) for name, ranks in _CIRCLES.items()}
    to_full(given)

    def interrupt(*_):
        raise KeyboardInterrupt

    if rank == 1:
        carrying._exchange = interrupt
    return _told(lambda: to_full(given), BaseException)


_CIRCLES = {"x": [0, 1], "y": [1, 2]}


def test_ranks_that_wait_for_one_that_was_interrupted_elsewhere_are_told():
    said = [text for text, _ in run_ranks(3, _of_two_circles, timeout=60)]
    assert said[1] == "KeyboardInterrupt: "
    assert any("rank 1 takes no part: KeyboardInterrupt" in said[rank] for rank in (0, 2)), said
    assert all(said[rank].startswith("RankMismatchError") for rank in (0, 2)), said
