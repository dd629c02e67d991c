"""Loading all or nothing: what is wrong is named on every rank, and nothing has changed."""

import pickle
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.ranks import run_ranks
from torchshard.errors import CheckpointError, ShardingError


def state(mesh, seed=0, rows=10, dtype=torch.float32, library=None):
    import torchshard

    library = library or torchshard
    torch.manual_seed(seed)
    weight, bias = torch.randn(rows, 3).to(dtype), torch.randn(5)
    return {
        "model": {"weight": library.distribute_tensor(weight, mesh, [library.Shard(0)] * mesh.ndim), "bias": bias},
        "steps": [seed, torch.tensor(float(seed))],
    }


def change(folder, how):
    """Damage the description of a checkpoint."""
    path = Path(folder) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    how(metadata.state_dict_metadata["model.weight"].chunks)
    path.write_bytes(pickle.dumps(metadata))


def values(tree):
    return [
        (x.full_tensor() if hasattr(x, "full_tensor") else torch.as_tensor(x)).clone()
        for x in (*tree["model"].values(), *tree["steps"])
    ]


def faults(rank, world, folder):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor as theirs

    from torchshard import init_device_mesh
    from torchshard.errors import TorchshardError
    from torchshard.parallel.fsdp import load

    mesh = init_device_mesh("cpu", (2, 2))
    line = init_device_mesh("cpu", (4,))
    source = state(mesh)
    for name in ("good", "hole", "overlap", "file"):
        dcp.save(source, checkpoint_id=f"{folder}/{name}")
    for target in (state(line, 1), state(mesh, 1, library=theirs)):
        load(target, checkpoint_id=f"{folder}/good")
        assert all(map(torch.equal, values(target), values(source)))
        assert target["steps"][0] == 0
    if rank == 0:
        change(f"{folder}/hole", lambda chunks: chunks.pop())
        change(
            f"{folder}/overlap",
            lambda chunks: chunks.append(ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))),
        )
        (Path(folder) / "file" / "__2_0.distcp").unlink()
    dist.barrier()

    said = {}
    cases = {
        "hole": state(line, 1),
        "overlap": state(line, 1),
        "file": state(line, 1),
        "shape": state(line, 1, rows=11),
        "dtype": state(line, 1, dtype=torch.float64),
        "key": {**state(line, 1), "more": torch.zeros(1)},
        "one rank's key": {**state(line, 1), **({"more": torch.zeros(1)} if rank == 2 else {})},
        "one rank's dtype": state(line, 1),
        "one rank's name": {**state(line, 1), **({"model.bias": 1} if rank == 1 else {})},
    }
    if rank == 1:
        cases["one rank's dtype"]["model"]["bias"] = torch.zeros(5, dtype=torch.float64)
    for name, target in cases.items():
        before = values(target)
        try:
            load(target, checkpoint_id=f"{folder}/{name if name in ('hole', 'overlap', 'file') else 'good'}")
        except TorchshardError as error:
            said[name] = f"{type(error).__name__}: {error}".replace(folder, "FOLDER")
        assert all(map(torch.equal, values(target), before)), name
    return said


def test_what_is_wrong_is_named_on_every_rank(tmp_path):
    said = run_ranks(4, faults, str(tmp_path))
    assert all(messages.keys() == said[0].keys() for messages in said)
    for name, message in said[0].items():
        if not name.startswith("one rank"):  # which two ranks are compared is a matter of who came first
            assert all(messages[name] == message for messages in said)
    for messages in said:
        refused = "Two values of a state dict go by the same name."
        assert refused in messages["one rank's name"]
        for name, text in (
            ("one rank's key", "more: torch.float32 [1]"),
            ("one rank's dtype", "bias: torch.float64 [5]"),
        ):
            assert messages[name].startswith("RankMismatchError: ranks ")
            assert text in messages[name]
    assert_expected_inline(
        "\n".join(said[0][name] for name in ("hole", "overlap", "file", "shape", "dtype", "key")),
        """\
CheckpointError: A checkpoint cannot be loaded into this state dict; nothing was changed.
  got:      model.weight: Boxes are missing. expected 30 elements of shape (10, 3), got 24 in 3 boxes
  where:    rank 0, 1, 2, 3
CheckpointError: A checkpoint cannot be loaded into this state dict; nothing was changed.
  got:      model.weight: Two boxes hold the same elements. expected each element once, got Box(offset=(0, 0), size=(3, 3)) and Box(offset=(2, 0), size=(2, 3))
  where:    rank 0, 1, 2, 3
CheckpointError: A checkpoint cannot be loaded into this state dict; nothing was changed.
  got:      [Errno 2] No such file or directory: 'FOLDER/file/__2_0.distcp'
  where:    rank 0, 1, 2, 3
CheckpointError: A checkpoint cannot be loaded into this state dict; nothing was changed.
  got:      model.weight: shape (11, 3) expected, (10, 3) stored
  where:    rank 0, 1, 2, 3
CheckpointError: A checkpoint cannot be loaded into this state dict; nothing was changed.
  got:      model.weight: torch.float64 expected, torch.float32 stored
  where:    rank 0, 1, 2, 3
CheckpointError: A checkpoint cannot be loaded into this state dict; nothing was changed.
  got:      more: not in the checkpoint
  where:    rank 0, 1, 2, 3""",
    )


def unwritable(rank, world, folder):
    """On rank 1 alone, beside what could be written."""
    import torch.distributed.checkpoint as dcp

    from torchshard import init_device_mesh
    from torchshard.errors import TorchshardError
    from torchshard.parallel.fsdp import load

    mesh = init_device_mesh("cpu", (world,))
    dcp.save(state(mesh), checkpoint_id=folder)
    said = {}
    for name in ("meta", "expanded", "inference", "mapping", "placed"):
        target = state(mesh, 1)
        if rank == 1 and name == "mapping":
            target["steps"] = MappingProxyType({"0": 1, "1": torch.tensor(1.0)})
        elif rank == 1 and name == "placed":
            target["model"]["weight"] = torch.empty_like(target["model"]["weight"], device="meta")
        elif rank == 1:
            with torch.inference_mode(name == "inference"):
                made = {"meta": torch.empty(5, device="meta"), "expanded": torch.ones(1).expand(5)}
                target["model"]["bias"] = made.get(name, torch.ones(5))
        first = target["model"]["weight"]
        before = None if name == "placed" else first.to_local().clone()
        with pytest.raises(TorchshardError) as error:
            load(target, checkpoint_id=folder)
        assert before is None or torch.equal(first.to_local(), before)
        said[name] = f"{type(error.value).__name__}: {error.value}"
    return said


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path):
    said = run_ranks(2, unwritable, str(tmp_path / "saved"))
    where = {"mapping": "steps.0", "placed": "model.weight"}
    for name in said[0]:
        what = "A value of the state dict cannot be replaced."
        assert said[0][name].startswith(f"RankMismatchError: rank 1 takes no part: {what}"), said[0][name]
        assert said[1][name].startswith(f"CheckpointError: {what}"), said[1][name]
        assert all(f"where:    {where.get(name, 'model.bias')}" in messages[name] for messages in said)


def of(n):
    """A state dict that has everything n times, or n of it."""
    return {
        "optimizer": {
            "state": {0: {"step": n, "exp_avg": torch.full((2,), float(n))}},
            "param_groups": [{"betas": (0.1 * n, 0.2 * n), "milestones": [n] * n, "params": [0]}],
        },
        "lists": [[n], [torch.tensor(n), {"name": "x" * n}]],
        "pair": (torch.tensor(n), n),
        "empty": {},
    }


def test_all_values_are_those_of_the_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp

    from torchshard.parallel.fsdp import load

    dcp.save(of(3), checkpoint_id=tmp_path)
    for n in (1, 4):
        target = of(n)
        average = target["optimizer"]["state"][0]["exp_avg"]
        load(target, checkpoint_id=tmp_path)
        assert target == {**of(3), "optimizer": target["optimizer"]}
        kept = target["optimizer"]["state"][0].pop("exp_avg")
        assert kept is average
        assert kept.tolist() == [3.0, 3.0]
        assert target["optimizer"] == {"state": {0: {"step": 3}}, "param_groups": of(3)["optimizer"]["param_groups"]}


def test_values_that_go_by_one_name(tmp_path):
    import torch.distributed.checkpoint as dcp

    from torchshard.parallel.fsdp import load

    dcp.save({"a.b": 1}, checkpoint_id=tmp_path)
    with pytest.raises(ShardingError, match=r"(?s)go by the same name.*a\.b"):
        load({"a": {"b": 0}, "a.b": 0}, checkpoint_id=tmp_path)


def runs(rank, world, folder):
    """Of a weight that is split in runs a rank has several stretches, which torch would read as one."""
    import torch.distributed.checkpoint as dcp

    from torchshard import DTensor, Shard, init_device_mesh
    from torchshard.parallel import ColwiseParallel, parallelize_module
    from torchshard.parallel.fsdp import fully_shard, load
    from torchshard.state_dict import from_torch

    mesh, plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), torch.nn.Linear(4, 12, bias=False)
    want = torch.arange(48.0).view(12, 4)
    model = parallelize_module(plain, mesh["tp"], ColwiseParallel(runs=3))
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1))
    dcp.save({"weight": want}, checkpoint_id=f"{folder}/whole")
    state = model.state_dict()
    load(state, checkpoint_id=f"{folder}/whole")
    assert torch.equal(DTensor.from_torch(model.weight.detach()).full_tensor(), want)
    dcp.save(from_torch(state), checkpoint_id=f"{folder}/runs")
    state = {"weight": torch.zeros(12, 4)}
    load(state, checkpoint_id=f"{folder}/runs")
    assert torch.equal(state["weight"], want)


def test_weights_that_are_split_in_runs(tmp_path):
    run_ranks(4, runs, str(tmp_path))


def dead(rank, world, folder):
    import os

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from torchshard import init_device_mesh
    from torchshard.errors import RankMismatchError
    from torchshard.parallel.fsdp import load, loading

    mesh = init_device_mesh("cpu", (3,))
    dcp.save(state(mesh), checkpoint_id=folder)
    target = state(mesh, 1)
    before = target["model"]["weight"].to_local().clone()
    if rank == 2:  # it dies after all have agreed, while they read
        loading._problems = lambda *_: os._exit(1)
    try:
        load(target, checkpoint_id=folder)
    except RankMismatchError as error:
        assert torch.equal(target["model"]["weight"].to_local(), before)
        answer = str(error)
    dist.destroy_process_group()
    return answer


def test_a_rank_that_dies_is_named(tmp_path):
    first, second, _ = run_ranks(3, dead, str(tmp_path), expect_dead=(2,))
    for message in (first, second):
        assert "rank 2" in message
        assert "left everything as it was" in message


def unreadable(rank, world, folder):
    """Where torch finds no reader: on all ranks, and on one alone."""
    import torch.distributed.checkpoint as dcp

    from torchshard import init_device_mesh
    from torchshard.errors import TorchshardError
    from torchshard.parallel.fsdp import load

    mesh = init_device_mesh("cpu", (2,))
    dcp.save(state(mesh), checkpoint_id=folder)
    said = []
    for place in ("abc://abc.abc", None, "abc://abc.abc" if rank == 1 else folder):
        target = state(mesh, 1)
        before = values(target)
        with pytest.raises(TorchshardError) as error:
            load(target, checkpoint_id=place)
        assert all(map(torch.equal, values(target), before))
        said.append(f"{type(error.value).__name__}: {error.value}")
    load(state(mesh, 1), checkpoint_id=folder)  # nobody has come apart
    return said


def test_where_torch_finds_no_reader(tmp_path):
    first, second = run_ranks(2, unreadable, str(tmp_path))
    assert first[:2] == second[:2]
    assert first[2].startswith("RankMismatchError: rank 1 takes no part: A checkpoint cannot be opened:")
    assert second[2] == second[0]
    assert_expected_inline(
        "\n".join(first[:2]),
        """\
CheckpointError: A checkpoint cannot be opened: torch has no reader for it.
  expected: a path, or the address of a storage that fsspec knows
  got:      checkpoint_id='abc://abc.abc'
  fix:      storage_reader=, which reads from there
CheckpointError: A checkpoint cannot be opened: torch has no reader for it.
  expected: a path, or the address of a storage that fsspec knows
  got:      checkpoint_id=None
  fix:      storage_reader=, which reads from there""",
    )


def test_an_error_without_a_text_is_told_by_its_class():
    """As torch's reader raises it for a file that is cut off: what was got was an empty line."""
    from torch.distributed.checkpoint.api import CheckpointException

    from torchshard.parallel.fsdp import loading

    with pytest.raises(CheckpointError, match="EOFError: a file is cut off or damaged"):
        loading._raise_together(CheckpointException("read", {0: (EOFError(), None), 1: (EOFError(), None)}))
