"""Loading a checkpoint of any format into live tensors: each rank reads only the boxes that it holds.

torch is imported when this is called, by a process that has it anyway. There is no communication.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchshard.checkpoint import opening
from torchshard.checkpoint.arguments import check_types
from torchshard.checkpoint.editing import Edits, Rename, edited
from torchshard.checkpoint.entries import Entry, Index, ObjectEntry, TensorEntry
from torchshard.checkpoint.live import live
from torchshard.checkpoint.memory import Part, check_shared, stages
from torchshard.checkpoint.moving import casting
from torchshard.checkpoint.moving.comparing import Comparison, whole_pieces
from torchshard.checkpoint.moving.progress import Progress
from torchshard.checkpoint.moving.reading import check_sums, read_box_into
from torchshard.checkpoint.text import printable
from torchshard.checkpoint.trees import as_entry, leaves, spread
from torchshard.errors import CheckpointError, ShardingError, UnsupportedOperatorError
from torchshard.keys.containers import check_nesting, like, places
from torchshard.layout import Box, whole

if TYPE_CHECKING:
    from torch import Tensor


def load_into(
    path: str | os.PathLike[str],
    state_dict: dict[str, Any],
    *,
    rename: Rename | None = None,
    verify: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Fill the tensors of a state dict from a checkpoint of any format, in place.

    Plain tensors are filled whole; of DTensors (torchshard's and torch's), ShardedTensors and tensors that say which
    parts they hold (torch's CheckpointableTensor) each rank reads the boxes that it holds, whatever the boxes of the
    checkpoint are; tensors inside of tuples, too. Other values of the state dict are replaced by those of the
    checkpoint, with torch's own sizes, types and devices. Floating-point values are cast where the types differ. What
    the checkpoint holds beyond the keys of the state dict is not read.

    Args:
        path: anything that `open` opens.
        state_dict: nested dicts and lists, with tensors as leaves.
        rename: gives the name in the state dict of each key of the checkpoint; or KeyRules, which also join, split and
            transpose.
        verify: read all that checksums are stored of, as far as this rank needs a part of it, and compare it before
            anything is loaded. Without, pieces that the rank reads whole are compared as they are read, and those of
            which it reads a part are not.
        progress: called with the bytes read and the bytes in all, on this rank.

    Raises:
        CheckpointError: keys that the checkpoint lacks, other shapes, types that are not cast, tensors on the meta
            device, sparse, expanded or Partial, views that had to be moved, all of them named; nothing is loaded then.
            Or the files are damaged, or written to meanwhile, or hold different values for what is one memory in the
            state dict; some tensors are filled then, unless damage was found by `verify`.

    Example:
        >>> load_into("step_1000", {"model": model.state_dict()})  # doctest: +SKIP
    """
    from torchshard._torch import below_torch_functions

    check_types(rename=rename)
    if not isinstance(state_dict, (Mapping, list)):
        raise CheckpointError(
            "What is to be loaded into is no state dict.",
            expected="nested dicts and lists of tensors",
            got=printable(state_dict),
            fix="model.state_dict()",
        )
    try:
        check_nesting(state_dict)
    except ShardingError as error:
        raise CheckpointError(error.what, expected=error.expected, where="the state dict", fix=error.fix) from None
    with opening.open(path) as checkpoint:
        index = edited(checkpoint.index, Edits(rename=rename))
        wanted = _Places(index, f"{checkpoint.path}")
        parts, objects = below_torch_functions(_matched)(wanted, state_dict, checkpoint.path)
        if verify:
            check_sums([(part.entry, part.box) for part in parts])
        for container, step, made in objects:
            container[step] = made
        wanted.close()
        advance = Progress(progress, sum([part.box.numel * part.entry.itemsize for part in parts]))
        for part in parts:
            for nbytes in _load(part):
                advance(nbytes)
        check_shared(parts, checkpoint.path)
        for files in checkpoint.index.opened:
            files.check_unchanged()


def _matched(wanted: "_Places", state_dict: Any, path: Path) -> tuple[list[Part], list[tuple[Any, Any, object]]]:
    """What is read into tensors; and what replaces other values, with the container and step of each.

    Raises:
        CheckpointError: says all that does not fit.
    """
    parts: list[Part] = []
    objects: list[tuple[Any, Any, object]] = []
    wrong: list[CheckpointError] = []
    for key, container, step in wanted.of(state_dict):
        value = container[step]
        try:
            entry, where = wanted.entry(key), f"{path}: {printable(key)}"
            if isinstance(entry, ObjectEntry) and not _is_tensor(value):
                objects.append((container, step, live(entry.value(), where)))
            elif isinstance(entry, TensorEntry) and _is_tensor(value):
                parts += _parts(key, _fitting(entry, value, where), value)
            elif entry is not None:
                held = "a tensor" if isinstance(entry, TensorEntry) else "no tensor"
                raise CheckpointError(f"The checkpoint holds {held} here, unlike the state dict.", where=where)
            elif not isinstance(value, Mapping) or key in wanted.inner:  # some formats do not keep empty dicts
                raise CheckpointError(
                    "The checkpoint lacks a key of the state dict.",
                    got=printable(key),
                    where=path,
                    fix="Give rename=, or leave the key out of the state dict; inspect shows the keys.",
                )
        except CheckpointError as error:
            wrong.append(error)
    if wrong:
        raise _joined(wrong, path)
    return parts, objects


class _Places:
    """What is loaded into a state dict, and the entries of the checkpoint by the same names.

    torch.distributed.checkpoint keeps a tuple with tensors as one object, a torch.save file has entries for what it
    holds. Here a tuple of the state dict that holds tensors is gone into, and another is one object, in both.
    """

    def __init__(self, index: Index, where: str) -> None:
        self.where, self.entries, self._tree = where, dict(index.entries), index.tree
        self.inner = {key[:at] for key in self.entries for at, sign in enumerate(key) if sign == "."}
        self._opened: list[tuple[Any, Any, list[Any]]] = []

    def of(self, tree: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
        """Dotted name, container and step of each value; those of tuples are put together again by `close`."""
        for key, container, step in places(tree, _is_tensor, path):
            value = container[step]
            if not isinstance(value, (list, tuple)) or not _holds_tensors(value):
                yield key, container, step
                continue
            entry = self.entries.get(key)
            if isinstance(entry, ObjectEntry):
                self.entries |= {name: as_entry(leaf) for name, leaf in spread(key, entry.value()) if name != key}
            self._opened.append((container, step, items := list(value)))
            yield from self.of(items, f"{key}.")

    def close(self) -> None:
        """Put what was loaded into tuples in their places."""
        for container, step, items in reversed(self._opened):  # inner ones first
            container[step] = like(container[step], items)

    def entry(self, key: str) -> Entry | None:
        """What the checkpoint has under a name."""
        return self.entries.get(key) or self._tuples.get(key)

    @functools.cached_property
    def _tuples(self) -> dict[str, Entry]:
        """Lists and tuples that torch.distributed.checkpoint keeps as one, each as one object."""
        found = leaves(self._tree(), self.where, as_torch=True)
        return {".".join(map(str, path)): as_entry(value) for path, value in found if isinstance(value, (list, tuple))}


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return _is_tensor(value) or (isinstance(value, (list, tuple)) and any(map(_holds_tensors, value)))


def _joined(errors: Sequence[CheckpointError], path: Path) -> CheckpointError:
    """One error that says all; of one alone itself."""
    if len(errors) == 1:
        return errors[0]
    fixes = dict.fromkeys([error.fix for error in errors if error.fix is not None])
    return CheckpointError(
        "The checkpoint does not fit the state dict.",
        got="\n".join(map(_in_a_line, errors)),
        where=path,
        fix="\n".join(map(str, fixes)) or None,
    )


def _in_a_line(error: CheckpointError) -> str:
    facts = [("", error.where), ("expected ", error.expected), ("got ", error.got)]
    return f"{error.what} {', '.join([f'{name}{fact}' for name, fact in facts if fact is not None])}"


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor) or hasattr(value, "local_shards")


def _fitting(entry: TensorEntry, tensor: Any, where: str) -> TensorEntry:
    """The entry, cast to the type of the tensor."""
    said = _declared(tensor, where)
    shape = tuple(tensor.shape) if said is None else said[0]
    if entry.shape != shape:
        raise CheckpointError(
            "A tensor of the checkpoint has another shape.", expected=shape, got=entry.shape, where=where
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype == entry.dtype:
        return entry
    if not {dtype, entry.dtype} <= set(casting.FLOATING):
        raise CheckpointError(
            "A tensor of the checkpoint has another type.", expected=dtype, got=entry.dtype, where=where
        )
    casting.check(entry.stored_dtype, dtype, where)
    return replace(entry, dtype=dtype, stored=entry.stored_dtype)


def _parts(key: str, entry: TensorEntry, tensor: Any) -> list[Part]:
    """What this rank holds of a tensor."""
    import torch
    import torch.distributed.tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from torchshard._torch import waited
    from torchshard.tensor.moving.pending import arrived

    if hasattr(tensor, "local_shards"):  # a ShardedTensor of either library
        shards = [(shard.tensor, shard.metadata) for shard in tensor.local_shards()]
        held = [(Box(tuple(m.shard_offsets), tuple(m.shard_sizes)), local) for local, m in shards]
    elif isinstance(tensor, torch.distributed.tensor.DTensor):
        held = _of_torch(tensor)
    elif hasattr(tensor, "__create_chunk_list__"):  # torchshard's DTensor
        try:
            chunks = tensor.__create_chunk_list__()
        except UnsupportedOperatorError as error:  # it is Partial, say
            told = {"expected": error.expected, "got": error.got, "fix": error.fix}
            raise CheckpointError(error.what, where=printable(key), **told) from None
        found = [tensor.__get_tensor_shard__(MetadataIndex(key, c.offsets)) for c in chunks]
        held = [(Box(tuple(c.offsets), tuple(c.sizes)), local) for c, local in zip(chunks, found, strict=True)]
    elif said := _declared(tensor, printable(key)):
        held = said[1]
    else:
        held = [(whole(entry.shape), tensor)]
    held = [(box, arrived(waited(local))) for box, local in held]
    for box, local in held:
        _check_room(local, box, printable(key))
    return [Part(key, entry, box, local.detach()) for box, local in held if box.numel]


def _declared(tensor: Any, where: str) -> "tuple[tuple[int, ...], list[tuple[Box, Tensor]]] | None":
    """What a plain tensor says that it holds of a larger one."""
    from torchshard.tensor.declared import declared

    try:
        return declared(tensor)
    except ShardingError as error:
        raise CheckpointError(error.what, expected=error.expected, got=error.got, where=where) from None


def _check_room(local: "Tensor", box: Box, where: str) -> None:
    """Raise CheckpointError unless each element of the box has memory of its own in the tensor."""
    import torch

    from torchshard.tensor.layout import is_made_of_others, overlaps

    what = fix = None
    got: object = None
    if local.is_meta:
        what, got = "A tensor of the state dict has no memory to load into.", "one on the meta device"
        fix = "model.to_empty(device=...) first"
    elif local.layout != torch.strided or is_made_of_others(local):
        what = "A tensor of the state dict is not dense."
        got = type(local).__name__ if local.layout == torch.strided else local.layout
    elif tuple(local.shape) != box.size:
        what, got = "The local part of a tensor is not the box that its layout says it is.", tuple(local.shape)
    elif overlaps(local.shape, local.stride()):
        what, got = "Elements of a tensor of the state dict share their memory.", f"strides {local.stride()}"
        fix = "tensor.contiguous()"
    if what is not None:
        raise CheckpointError(what, expected=f"a tensor of shape {box.size}", got=got, where=where, fix=fix)


def _of_torch(tensor: Any) -> "list[tuple[Box, Tensor]]":
    """The boxes that this rank holds of a DTensor of torch."""
    from torchshard.layout.cuts import boxes_at
    from torchshard.tensor.interop import require_ascending
    from torchshard.tensor.mesh import bind
    from torchshard.tensor.torch_placements import from_torch, placements_of

    mesh = bind(tensor.device_mesh)
    sharding = from_torch(placements_of(tensor), mesh, tensor.shape)
    require_ascending(sharding, mesh)
    if sharding.partial:
        raise CheckpointError("A Partial tensor cannot be loaded into: no rank holds its values.", got=sharding)
    if mesh.coordinate is None:
        return []
    local = tensor.to_local()
    return [(box, local[at.slices]) for box, at in boxes_at(sharding, tuple(tensor.shape), mesh.coordinate)]


def _load(part: Part) -> Iterator[int]:
    """Read a part into its memory; yields the bytes of each step."""
    import torch

    from torchshard._torch import bytes_of

    _, entry, box, local = part
    comparison = Comparison(entry, whole_pieces(entry, box))
    if local.device.type == "cpu" and local.is_contiguous() and not local.is_conj() and not local.is_neg():
        if not local.is_inference():
            torch.autograd.graph.increment_version(local)  # as NumPy's writes are not counted
        flat = bytes_of(local).numpy().data
        for block, start in stages(box, entry.itemsize):
            nbytes = block.numel * entry.itemsize
            read_box_into(entry, block, flat[start : start + nbytes], comparison)
            yield nbytes
        return
    for block, _ in stages(box, entry.itemsize):
        nbytes = block.numel * entry.itemsize
        stage = bytearray(nbytes)
        read_box_into(entry, block, memoryview(stage), comparison)
        values = torch.frombuffer(stage, dtype=local.dtype).view(block.size)
        local[block.within(box)].copy_(values)
        yield nbytes
