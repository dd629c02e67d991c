"""In a trace, a tensor is brought to a layout once in each pass: the operators that want it there share what came.

torch's partitioners take two collectives of equal operands for one. Ranks differ in which are equal (of nothing, all
are), and would wait for one another, so here collectives stay apart (see _torch/partitioning.py). What is one tensor is
asked of DTensors, of which every rank has the same.
"""

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from torchshard._torch import in_backward, notes_of_trace, recomputed_region, standing_for, traced_value
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.layout import TensorLayout, dense_stride
from torchshard.tensor.moving.redistribute import redistribute_local


def brought(x: DTensor, source: TensorLayout, target: TensorLayout, reading: bool = False) -> Tensor:
    """redistribute_local of the part of a DTensor, which has the layout `source`.

    In a trace that makes a graph without writes, what has come before of the same tensor is taken again: as it is by
    who only reads it, else a copy.
    """
    local = x._local_tensor
    if type(local) is Tensor or source.sharding is target.sharding:
        return redistribute_local(local, source, target, reading)
    notes = notes_of_trace()
    name = None if notes is None else _name(x, source, target)
    if notes is None or name is None:
        return redistribute_local(local, source, target, reading)
    known = notes.get(name)
    if known is not None and known[0] is traced_value(known[1]._local_tensor):
        came = standing_for(known[2])
        return came if reading else came.clone()
    made = redistribute_local(local, source, target, reading)
    base = _base(x)
    value, kept = traced_value(base._local_tensor), traced_value(made)
    if value is not None and kept is not None:
        notes[name] = value, base, kept  # which stay as long as the trace, so that no other has their names
    return made


def _base(x: DTensor) -> Any:
    return x if x._base is None else x._base


def _name(x: DTensor, source: TensorLayout, target: TensorLayout) -> Hashable | None:
    """What two DTensors have in common whose parts stand for the same, in a graph that is run alike; None: nothing.

    A view is known by its base, where it has all elements of it: by where they lie, which is the same on every rank if
    it is told in numbers.
    """
    base = _base(x)
    if type(base) is not DTensor or base.is_inference():
        return None
    seen: Hashable = None
    if base is not x:
        layouts = source, base._spec
        if not all(type(n) is int for layout in layouts for n in (*layout.shape, *layout.stride)):
            return None
        dense = all(layout.stride == dense_stride(layout.shape, layout.stride) for layout in layouts)
        if not dense or x.numel() != base.numel() or x.dtype is not base.dtype or x.is_complex():
            return None
        seen = source
    moved = source.sharding, target.sharding
    return id(base), base._version, seen, moved, in_backward(), *recomputed_region()
