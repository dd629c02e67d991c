"""Real checkpoints for the tests, written by torch itself, and what torch itself loads from them."""

import argparse
import collections
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.ranks import run_ranks

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


def random_bits(shape, dtype, seed=0):
    """A tensor of random bytes, NaNs and all; bool gets valid bytes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def plain():
    """A nested state dict of ordinary tensors and plain data."""
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(7, 6, generator=g)
    return {
        "model": {
            "weight": weight,
            "transposed": torch.arange(12.0).reshape(3, 4).t(),
            "channels_last": torch.randn(2, 3, 4, 5, generator=g).to(memory_format=torch.channels_last),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 4),
            "param": torch.nn.Parameter(torch.ones(3)),
            **{f"{dtype}".removeprefix("torch."): random_bits((3, 5), dtype) for dtype in DTYPES},
        },
        "optimizer": {
            "state": {"weight": {"step": torch.tensor(4), "exp_avg": weight * 2, "exp_avg_sq": weight**2}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": ["weight", "param"], "fused": None}],
        },
        "pair": (torch.ones(2), 3),
        "list": [torch.zeros(1), {"deep": torch.full((2,), 7.0), "word": "x"}],
        "step": 12,
        "name": "räksmörgås",
        "ordered": collections.OrderedDict(a=1, b=torch.ones(1)),
        "bytes": b"\x00\xff",
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "layout": torch.strided,
        "big": 1 << 90,
        "set": {1, 2},
        5: torch.ones(1),
    }


def save_plain(rank, world, path):
    """What one process saves; with several ranks torch spreads the tensors over them."""
    dcp.save(plain(), checkpoint_id=path)


def save(rank, world, path, state):
    """What one process saves of any state dict."""
    dcp.save(state, checkpoint_id=path)


def library(name):
    """The module whose DTensor is meant: "torch" or "torchshard"."""
    return importlib.import_module("torch.distributed.tensor" if name == "torch" else name)


def save_sharded(rank, world, path, whose="torch"):
    """Rows, columns, both, uneven and empty pieces; on four ranks a 2 x 2 mesh."""
    distribute_tensor = library(whose).distribute_tensor
    shape = (2, 2) if world == 4 else (world,)
    mesh = init_device_mesh("cpu", shape)
    rest = [Replicate()] * (len(shape) - 1)
    full = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)

    def cut(tensor, *placements):
        return distribute_tensor(tensor, mesh, [*placements, *rest][: len(shape)])

    sharded = {
        "rows": cut(full, Shard(0)),
        "columns": cut(full, Shard(1)),
        "middle": cut(torch.arange(3 * 5 * 4).reshape(3, 5, 4), Shard(1)),
        "few": cut(torch.arange(2), Shard(0)),
        "one": cut(torch.ones(1, 3).bfloat16(), Shard(0)),
        "replicated": cut(full, Replicate()),
        "bf16": cut(random_bits((9, 8), torch.bfloat16), Shard(1)),
        "bool": cut(random_bits((5, 3), torch.bool), Shard(0)),
        "nothing": cut(torch.empty(0, 4), Shard(0)),
    }
    if len(shape) == 2:
        sharded["both"] = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
        sharded["twice"] = distribute_tensor(full, mesh, [Shard(0), Shard(0)])
        sharded["inner"] = distribute_tensor(full, mesh, [Replicate(), Shard(1)])
    state = {
        "model": sharded,
        "optimizer": {"state": {k: {"exp_avg": v, "step": torch.tensor(3)} for k, v in sharded.items()}, "lr": 0.5},
        "plain": torch.arange(5),
    }
    dcp.save(state, checkpoint_id=path)
    if world == 2:
        writer = dcp.FileSystemWriter(f"{path}.safetensors", serialization_format=SerializationFormat.SAFETENSORS)
        dcp.save({"model": sharded}, storage_writer=writer)


def save_trained(rank, world, path, whose):
    """A model cut by rows (five on two ranks) after two steps of AdamW; the same, gathered, in `path`.pt."""
    api = library(whose)
    mesh = init_device_mesh("cpu", (world,))
    model = torch.nn.Linear(4, 5)

    def cut(name, module, mesh):
        for key, parameter in list(module.named_parameters()):
            sharded = api.distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(key, torch.nn.Parameter(sharded))

    api.distribute_module(model, mesh, cut)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = api.distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh, [Replicate()])
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    dcp.save(state, checkpoint_id=path)

    def whole(value):
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        return value.full_tensor() if isinstance(value, api.DTensor) else value

    gathered = whole(state)
    if rank == 0:
        torch.save(gathered, f"{path}.pt")


def save_shardedtensor(rank, world, path):
    """torch's older ShardedTensor, rows of unequal length."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    rows = [3, 1][rank]
    local = torch.full((rows, 2), float(rank))
    shard = LocalShard.from_tensor_and_offsets(local, [3 * rank, 0], rank)
    dcp.save({"st": init_from_local_shards([shard], 4, 2)}, checkpoint_id=path)


def save_foreign(rank, world, path):
    """A checkpoint with an object that is not plain data."""
    dcp.save({"w": torch.arange(4.0), "args": argparse.Namespace(lr=1)}, checkpoint_id=path)


def save_large(rank, world, path, mebibytes, dim):
    """A state dict of 16 MiB matrices, each cut along one dim; cheap random bytes."""
    mesh = init_device_mesh("cpu", (world,))
    size = [2048, 2048]
    size[dim] //= world
    local = torch.from_numpy(np.random.default_rng(rank).integers(0, 2**31, size, np.int32)).view(torch.float32)
    placement = [Shard(dim)]
    state = {
        f"layers.{i}.w": DTensor.from_local(local + i, mesh, placement, run_check=False) for i in range(mebibytes // 16)
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False))


def make(path, world, body, *args):
    """Run a body that saves; returns the folder."""
    run_ranks(world, body, str(path), *args)
    return Path(path)


def torch_loads(folder, tmp_path):
    """What torch's own converter makes of a folder."""
    out = tmp_path / "reference.pt"
    dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=False)


def flat(tree, prefix=""):
    """Leaves by dotted name; dicts always, lists and tuples too where they hold tensors or dicts."""

    def deeper(value):
        return isinstance(value, (dict, torch.Tensor)) or (isinstance(value, (list, tuple)) and any(map(deeper, value)))

    out = {}
    if isinstance(tree, dict) or (type(tree) in (list, tuple) and deeper(tree)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            out |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        out[prefix] = tree
    return out


def same_bits(a, b):
    """Same type, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.numel() == 0 or bytes_of(a) == bytes_of(b)


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_tree(ours, theirs):
    """Same nesting, same kinds of containers and tensors, same plain data, tensors bit by bit."""
    if isinstance(theirs, torch.Tensor):
        assert type(ours) is type(theirs)
        assert ours.requires_grad == theirs.requires_grad
        assert same_bits(ours, theirs)
    elif isinstance(theirs, dict):
        assert type(ours) is type(theirs)
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same_tree(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same_tree(a, b)
    else:
        assert type(ours) is type(theirs)
        assert ours == theirs


def python(code, *args, **kwargs):
    """Run code in a fresh interpreter that finds the package; returns the finished process."""
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, **kwargs)
