"""Forward passes, as seen from the backward: which ones it belongs to, and when it begins."""

import dataclasses
import enum
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchshard import _torch
from torchshard.ddp.reducing.traced import Traced

_PLAIN = (int, float, complex, str, bytes, type(None), torch.device, torch.dtype)


class Mode(enum.Enum):
    """What a reducer's hooks do now."""

    IDLE = enum.auto()  # no backward of ours runs
    AROUND = enum.auto()  # one runs that reaches no parameter of ours, but may run others inside that do
    LOCAL = enum.auto()  # a backward that belongs to no_sync runs
    SYNC = enum.auto()  # a backward runs whose gradients are reduced

    @property
    def is_open(self) -> bool:
        """Whether gradients that come now decide what it is to be."""
        return self in (Mode.IDLE, Mode.AROUND)


class ForwardPass:
    """One call of the wrapper; lives as long as the autograd graph of its outputs.

    Attributes:
        sync: whether its gradients are to be reduced (it did not run under no_sync).
        kept: what is to live as long.
    """

    __slots__ = ("__weakref__", "kept", "sync")

    def __init__(self, sync: bool) -> None:
        self.sync = sync
        self.kept: object = None


def watch(
    output: Any,
    forward: ForwardPass,
    begin: "weakref.WeakMethod[Any]",
    traced: Traced | None = None,
) -> bool:
    """Have `begin(forward)` called when a backward reaches an output.

    Returns whether that is certain to happen: False if something in the output may hide a tensor.

    Args:
        output: what the module returned; tensors are looked for in tuples, lists, mappings and dataclasses.
        forward: kept alive by the graph from now on.
        begin: a bound method, weakly, as the graph may outlive its owner.
        traced: is told instead, under compiled autograd.
    """
    reached = functools.partial(_reached, begin, forward)
    hook = traced.prehook(forward.sync, reached) if traced else reached
    nodes, certain = {}, True
    for leaf in (output,) if isinstance(output, torch.Tensor) else _leaves(output):
        if isinstance(leaf, torch.Tensor):
            base = _torch.base_of(leaf)  # writing to a view gives it another node, behind that of its base
            if (node := leaf.grad_fn) is not None:
                nodes[id(node)] = node
            elif leaf.requires_grad:
                certain = False
            if base is not None and (node := base.grad_fn) is not None:
                nodes[id(node)] = node
        else:
            certain = certain and isinstance(leaf, _PLAIN)
    for node in nodes.values():
        node.register_prehook(hook)
    return certain and bool(nodes)


@_torch.skip_frame
def _reached(
    begin: "weakref.WeakMethod[Callable[[ForwardPass], None]]", forward: ForwardPass, _gradients: object
) -> None:
    if act := begin():
        act(forward)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value
