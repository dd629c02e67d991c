"""Loading a checkpoint of torch.distributed.checkpoint all or nothing, after it has been checked.

torch reads straight into the tensors that it is given. It takes a checkpoint with holes or overlaps, converts types
without a word, and leaves a mixture behind where a rank fails half-way.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
import torch.distributed.tensor as upstream
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import StorageReader

from torchshard._torch import default_group, is_sharded_tensor, reader_for, strided_shard
from torchshard.comm.agreement import Agreement
from torchshard.errors import CheckpointError, ShardingError
from torchshard.keys.containers import places
from torchshard.layout.boxes import Box, check_tiling
from torchshard.state_dict.trees import leaves, not_dense
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.interop import without_history
from torchshard.tensor.layout import overlaps
from torchshard.tensor.owners import ours


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """torch.distributed.checkpoint.load, which changes `state_dict` only when every rank has read all of its part.

    Every rank reads into tensors of its own first, so the memory of its parts is needed twice. To be called by all
    ranks of the group. DTensors of both classes and plain tensors, in any nesting of dicts and lists, are filled; all
    other values are replaced, tuples as a whole, and lists without tensors and dicts.

    torch reads, and so unpickles: only what comes from where you trust (checkpoint.load_into runs nothing).

    Raises:
        RankMismatchError: the ranks have other keys, shapes or dtypes, or one does not answer any more.
        CheckpointError: a key is missing, a shape or a dtype differs, stored pieces overlap or do not make up a tensor,
            or a file cannot be read; on every rank, naming the keys, and the ranks that found it. Or torch has no
            reader for `checkpoint_id`, or a value of the state dict cannot be replaced (on the meta device, expanded).
        ShardingError: two values have the same name when keys are joined by dots; or a DTensor of torch's is split in
            pieces that its placements do not tell.
        NotImplementedError: a ShardedTensor, or an object with a state dict of its own.
    """
    agreement = _agreement(process_group)
    with agreement.refusing() if agreement is not None else nullcontext():
        _refuse_others(state_dict)
        found = list(places(state_dict, _is_tensor))
        found = [place for place in found if not isinstance(place[1][place[2]], Mapping)]  # torch keeps no empty dicts
        lines = sorted([f"{name}: {_described(container[key])}" for name, container, key in found])
        fresh = _fresh(found)
        storage_reader = storage_reader or _reader(checkpoint_id)
    if agreement is not None:
        agreement.confirm("\n".join(lines), 0)
    try:
        state_dict_loader.load(
            fresh,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=_Checking(),
            process_group=process_group,
            no_dist=agreement is None,
        )
    except CheckpointException as error:
        _raise_together(error)
    except RuntimeError as error:
        if agreement is None:
            raise
        agreement.blame("a checkpoint to be read, and left everything as it was", error)
    with torch.no_grad():
        for name, container, key in found:
            if isinstance(x := container[key], Tensor):
                _of_all_stretches(x).copy_(fresh[name])
            else:
                container[key] = fresh[name]


def _agreement(group: dist.ProcessGroup | None) -> Agreement | None:
    """What the ranks of the group agree by; None without process groups."""
    if not dist.is_initialized():
        return None
    group = group or default_group()
    return Agreement(group, torch.device("cpu"), "state dicts to load into")


def _reader(place: str | os.PathLike[str] | None) -> StorageReader | None:
    """The reader that torch takes for a checkpoint; None: torch is to find one."""
    try:
        return cast(StorageReader | None, reader_for(place))
    except RuntimeError as error:
        raise CheckpointError(
            "A checkpoint cannot be opened: torch has no reader for it.",
            expected="a path, or the address of a storage that fsspec knows",
            got=f"checkpoint_id={place!r}",
            fix="storage_reader=, which reads from there",
        ) from error


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _fresh(found: list[tuple[str, Any, Any]]) -> dict[str, Any]:
    """What is read into, by name."""
    fresh: dict[str, Any] = {}
    for name, container, key in found:
        x = container[key]
        if name in fresh:
            raise ShardingError(
                "Two values of a state dict go by the same name.",
                expected="keys and positions that differ when they are joined by dots",
                got=name,
                fix="rename one of the keys",
            )
        _require_room(name, container, x)
        fresh[name] = torch.empty_like(_of_all_stretches(x), requires_grad=False) if isinstance(x, Tensor) else x
    return fresh


def _require_room(name: str, container: Any, x: Any) -> None:
    """Raise CheckpointError where a value that was read could not be written: nothing may be half loaded."""
    got = fix = None
    if not isinstance(x, Tensor):
        if not hasattr(container, "__setitem__"):
            got, fix = f"a {type(x).__name__} in a {type(container).__name__}", "dict(it)"
    elif (local := _local(x)).is_meta:
        got, fix = "a tensor on the meta device", "model.to_empty(device=...) first"
    elif local.is_inference() and not torch.is_inference_mode_enabled():
        got, fix = "a tensor of inference mode", "load within torch.inference_mode()"
    elif not not_dense(local) and overlaps(local.shape, local.stride()):
        got, fix = f"elements that share their memory, strides {local.stride()}", "tensor.contiguous()"
    if got is not None:
        raise CheckpointError(
            "A value of the state dict cannot be replaced.", expected="memory of its own", got=got, where=name, fix=fix
        )


def _local(x: Any) -> Tensor:
    """This rank's part, without a history."""
    part: Any = without_history(x)
    return part.to_local() if isinstance(x, (DTensor, upstream.DTensor)) else part  # type: ignore[no-any-return]


def _of_all_stretches(x: Tensor) -> Tensor:
    """A DTensor of torch's with a strided split as one of ours, over its memory: torch takes a part for one stretch."""
    if isinstance(x, upstream.DTensor) and any(isinstance(p, strided_shard()) for p in x.placements):
        return ours(x)
    return x


def _described(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _refuse_others(state_dict: dict[str, Any]) -> None:
    for name, x in leaves(state_dict):
        if is_sharded_tensor(x) or hasattr(x, "load_state_dict"):
            raise NotImplementedError(
                f"load: {name} is a {type(x).__name__}; give its state_dict(), of DTensors or plain tensors"
            )


class _Checking(DefaultLoadPlanner):
    """Compares what is stored with what is wanted before anything is read."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "a plan without metadata"
        stored = self.metadata.state_dict_metadata
        problems = [text for name, x in self.state_dict.items() for text in _problems(name, x, stored.get(name))]
        if problems:
            raise ValueError("\n".join(problems))
        return super().create_local_plan()


def _problems(name: str, x: Any, stored: Any) -> Iterator[str]:
    if stored is None:
        yield f"{name}: not in the checkpoint"
    elif isinstance(x, Tensor) != isinstance(stored, TensorStorageMetadata):
        yield f"{name}: {_described(x)} expected, {type(stored).__name__} stored"
    elif isinstance(x, Tensor):
        if tuple(stored.size) != tuple(x.shape):
            yield f"{name}: shape {tuple(x.shape)} expected, {tuple(stored.size)} stored"
        if stored.properties.dtype != x.dtype:
            yield f"{name}: {x.dtype} expected, {stored.properties.dtype} stored"
        try:
            check_tiling(stored.size, [Box(tuple(c.offsets), tuple(c.sizes)) for c in stored.chunks])
        except ShardingError as error:
            yield f"{name}: {error.what} expected {error.expected}, got {error.got}"


def _raise_together(error: CheckpointException) -> NoReturn:
    """What ranks have found, as one error that is the same on all of them."""
    found: dict[str, list[int]] = {}
    for rank, (cause, _) in sorted(error.failures.items()):
        # Of a file that is cut off torch's reader may say no more than EOFError().
        said = str(cause) or f"{type(cause).__name__}: a file is cut off or damaged; `torchshard inspect` says which"
        found.setdefault(said, []).append(rank)
    raise CheckpointError(
        "A checkpoint cannot be loaded into this state dict; nothing was changed.",
        got="\n".join(text for text in found),
        where="; ".join(f"rank {', '.join(map(str, ranks))}" for ranks in found.values()),
    ) from error
