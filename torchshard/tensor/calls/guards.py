"""Views that had to be moved: what stands for a view of a tensor, but shares no memory with it.

Eager torch's view sees later writes to its base, and writes to it reach the base. A view of a sharded tensor that has
to be gathered is made of a copy. Such a result is marked (its layout is SEVERED) and keeps a *window*: the moved copy
that it is a view of, and the way between the copy and the base. Before it is read, the copy is fetched again if the
base has changed; after it is written to, the copy is given back. Autograd's version counters, which views share with
their base, tell whether the base has changed: that of the base, and those of local tensors, which users can have.
Inference tensors have none, and `x.data` and deep copies count by themselves: there the copy is fetched at every use.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchshard._torch import (
    base_of,
    in_forward_ad,
    is_traced,
    lie_with_others,
    memory_of,
    portable_constructor,
    storage_uses,
)
from torchshard.errors import UnsupportedOperatorError
from torchshard.layout.placements import Partial
from torchshard.layout.reductions import masking
from torchshard.tensor.dtensor import DTensor, dtensors_in, new
from torchshard.tensor.layout import SEVERED, TensorLayout
from torchshard.tensor.moving.redistribute import redistribute_local
from torchshard.unsupported import unsupported

if TYPE_CHECKING:
    from torchshard.tensor.calls.call import Call

Move = Callable[[Tensor], Tensor]
Give = Callable[[Tensor, Tensor], Any]

_UNKNOWN = -1  # a version that no tensor has


@dataclass(slots=True, eq=False)
class Window:
    """The moved copy that a severed view is a view of.

    Attributes:
        counted: whose versions tell that the base has changed: the base, of which the copy should be a view; its local
            tensor; and, where the base is a view itself, the local tensor of what it is a view of.
        layout: that the base had when the view was taken.
        held: the local tensor that the base had when the view was taken.
        outer: the window of the base, if that is severed itself.
        local: the copy; the local tensors of all views through this window share memory with it.
        fetch: makes the copy from the local tensor of the base.
        give: writes a copy to the local tensor of the base.
        version: of the base when the copy was last like it.
        fetched: how often the copy was made like the base; a window on a view of the copy cannot see it otherwise.
    """

    counted: tuple[Tensor, ...]
    layout: TensorLayout
    held: Tensor
    outer: "Window | None"
    local: Tensor
    fetch: Move
    give: Give
    version: int
    fetched: int = 0

    @classmethod
    def on(cls, base: DTensor, local: Tensor, fetch: Move, give: Give) -> "Window":
        """The window to a copy that is like the base now."""
        outer = base._window if base._spec.marks & SEVERED else None
        root = base_of(base)
        counted = (base, base._local_tensor, *([root._local_tensor] if isinstance(root, DTensor) else []))
        held = base._local_tensor.detach()
        return cls(counted, base._spec, held, outer, local, fetch, give, _version(counted, outer))

    def refresh(self) -> None:
        """Make the copy like the base."""
        if self.outer:
            self.outer.refresh()
        version = _version(self.counted, self.outer)
        if version == _UNKNOWN or version != self.version:
            with torch.inference_mode(self.local.is_inference()):  # elsewhere torch writes to no such tensor
                self.local.copy_(self.fetch(self.held))
            self.version = version
            self.fetched += 1

    def take_apart(self) -> None:
        """Make the copy like the base, before a view is taken apart; there, a trace may be over already.

        Raises:
            UnsupportedOperatorError: it is, and the copy is not like the base.
        """
        try:
            self.refresh()
        except RuntimeError as error:
            if not is_traced(self.local):
                raise
            raise unsupported(
                "A compiled region returns a view that had to be moved, after a write to it or to its base.",
                expected="a view of what is not written to any more",
                got=f"a view of {self.layout}",
                fix="return view.clone()",
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> "Window":
        raise unsupported(
            "A view that had to be moved cannot be copied part by part, as dcp.async_save does.",
            expected="a DTensor of its own",
            got=f"a view of {self.layout}",
            fix="view.clone()",
        )

    def copied(self, memo: dict[int, Any]) -> "Window":
        """For a deep copy: the window to a copy of the base, whose memory others may have that are copied with it."""
        made: Window | None = memo.get(id(self))
        if made is None:
            base: Any = copy.deepcopy(self.counted[0].detach(), memo)
            count_apart(base)
            made = memo[id(self)] = Window.on(base, copy.deepcopy(self.local, memo), self.fetch, self.give)
        return made

    def refuse_unwritable(self) -> None:
        """Raise where the base cannot be made like the copy, as its elements lie on one another."""
        refuse_overlapping(self.layout)
        if self.outer:
            self.outer.refuse_unwritable()

    def write_back(self) -> None:
        """Make the base like the copy."""
        self.give(self.local, self.held)
        # The version moves on when the operator is over, if at all: better fetched once too often.
        self.version = _UNKNOWN
        if self.outer:
            self.outer.write_back()


_counted_apart: "WeakValueDictionary[int, torch.UntypedStorage]" = WeakValueDictionary()
"""Memory of local tensors that other wrappers hold whose versions are not those of the first, by its address."""


def count_apart(x: DTensor) -> None:
    """Another wrapper of the same local tensor is made, as `x.data`, and may write unseen to it and to its views."""
    _counted_apart[memory_of(x._local_tensor)] = x._local_tensor.untyped_storage()


def _version(counted: tuple[Tensor, ...], outer: Window | None) -> int:
    """A number that grows when one of the tensors, or the outer window's copy, changes; _UNKNOWN if nobody counts."""
    if any(x.is_inference() for x in counted) or (_counted_apart and memory_of(counted[1]) in _counted_apart):
        return _UNKNOWN
    return sum([x._version for x in counted]) + (outer.fetched if outer else 0)


def new_view(
    cls: type[Tensor], local: Tensor, layout: TensorLayout, requires_grad: bool, base: Tensor | None = None
) -> DTensor:
    """The wrapper of what an operator that gives views made.

    The view of an inference tensor is one, which autograd does not save; that of a normal tensor is given a version
    counter by autograd, which inference tensors cannot have. The local tensor tells, as the part of a view is a view of
    a part; if it is none, `base` does. In forward AD autograd wants a tangent at the same place in memory as its
    primal, and the place is not to be that of a piece.
    """
    inference = (local if base is None else base).is_inference()
    if inference != torch.is_inference_mode_enabled():
        with torch.inference_mode(inference):
            return new(cls, local, layout, requires_grad)  # type: ignore[return-value]
    make = portable_constructor if in_forward_ad() else new
    made: DTensor = make(cls, local, layout, requires_grad)  # type: ignore[assignment]
    return made if local.__class__ is Tensor else lie_with_others(made, local)


def refresh(x: DTensor) -> None:
    """Bring a severed view up to date with its base; nothing for any other tensor. Every rank must call it."""
    if x._spec.marks & SEVERED:
        x._window.refresh()


def _write_back(x: DTensor) -> None:
    if x._spec.marks & SEVERED:
        x._window.write_back()


def all_of(back: Move) -> Give:
    """The way back from a copy of all that a base holds."""
    return lambda local, held: held.copy_(back(local))


def opened(x: DTensor, moves: tuple[Move, Give] | None) -> tuple[Tensor, Window]:
    """What to take a severed view of: the local tensor, and its window.

    Args:
        x: the base.
        moves: to where the view can be taken, and back; None where `x` is severed itself and need not be moved.
    """
    if moves is None:
        return x._local_tensor, x._window
    with torch.inference_mode(x.is_inference()):
        local = moves[0](x._local_tensor)
    return local, Window.on(x, local, *moves)


def sever(view: DTensor, window: Window) -> DTensor:
    """Mark a result as a view through a window."""
    view._spec = view._spec.marked(view._spec.marks | SEVERED)
    view._window = window
    return view


def copied(view: DTensor, base: DTensor) -> DTensor:
    """Mark a result whose local tensor was reshaped by copying, where eager torch would have made a view."""
    local, shape, held = view._local_tensor, view._local_tensor.shape, base._local_tensor.shape
    return sever(view, Window.on(base, local, lambda t: t.reshape(shape), all_of(lambda t: t.reshape(held))))


def severing(plan: Callable[..., Any], base: int, moves: tuple[Move, Give] | None) -> Callable[..., Any]:
    """A plan whose results are cut off from its argument `base`; `plan` itself takes the moved local tensor there."""

    def run(*args: Any) -> Any:
        local, window = opened(args[base], moves)
        result = plan(*args[:base], local, *args[base + 1 :])
        for view in result if isinstance(result, (list, tuple)) else [result]:
            sever(view, window)
        return result

    return run


def guarded(plan: Callable[..., Any], cut: Sequence[int], call: "Call") -> Callable[..., Any]:
    """A plan some of whose arguments are severed: they are brought up to date before, and given back after a write.

    Args:
        plan: what to run.
        cut: places of the arguments that are, or hold, severed views.
        call: a call of the operator.

    Raises:
        UnsupportedOperatorError: when called to write to several tensors of one memory, of which one is a severed view;
            but operators on lists go through them item by item then.
    """
    written, call = call.written(), call.without_values()
    given_back = [at for at in cut if at in written]

    def run(*args: Any) -> Any:
        if given_back and _have_common([x for at in written for x in dtensors_in([args[at]])]):
            if max([len(a) for a in args if isinstance(a, (list, tuple))], default=0) < 2:
                raise _common(call.name)
            return call.item_by_item(args)  # gradients of parameters that were joined are views of one tensor
        for at in given_back:
            for x in dtensors_in([args[at]]):
                if x._spec.marks & SEVERED and (window := x._window):
                    window.refuse_unwritable()
        for at in cut:
            for x in dtensors_in([args[at]]):
                refresh(x)
        result = plan(*args)
        for at in given_back:
            for x in dtensors_in([args[at]]):
                _write_back(x)
        return result

    return run


def _common(name: str) -> UnsupportedOperatorError:
    return unsupported(
        f"{name} writes to several tensors of the same memory, and one of them is a view that had to be moved.",
        expected="views that share memory with their base, or one tensor at a time",
        fix="call the operator on copies",
    )


def _have_common(written: Sequence[DTensor]) -> bool:
    """Whether a severed view and another tensor are written to at once, and their values lie in one memory.

    Each copy would be given back whole, and undo what was written to another view of the same base.
    """
    bases = [memory_of(_held(x)) for x in written]
    return any(bases.count(base) > 1 for x, base in zip(written, bases, strict=True) if x._spec.marks & SEVERED)


def _held(x: DTensor) -> Tensor:
    """The local tensor in which the values of `x` are, be it that of its base's base."""
    if not x._spec.marks & SEVERED:
        return x._local_tensor
    window: Window = x._window
    while window.outer:
        window = window.outer
    return window.held


def write_back(x: DTensor, whole: Tensor, target: TensorLayout) -> None:
    """Write to `x` what an operator has made of its gathered values.

    Where its layout holds terms that no value can be turned into (those of norms, say), `x` takes over the gathered
    values and their layout, if nothing else shares its memory.

    Raises:
        UnsupportedOperatorError: something else does.
        RuntimeError: elements of `x` lie on one another, on whatever rank.
    """
    layout = x._spec
    refuse_overlapping(layout)
    refuse_unwritable(x)
    if _without_terms(layout) is None:
        x._local_tensor.copy_(redistribute_local(whole, target, layout))
    else:
        x._local_tensor, x._spec = whole, target


def refuse_unwritable(x: DTensor) -> None:
    """Raise UnsupportedOperatorError where `x` cannot take a new value: there is no way back to the terms of its
    Partial, and they are those of other tensors, too.
    """
    terms = _without_terms(x._spec)
    if terms is None:
        return
    # More than the tensor and the storage object; a view that had to be moved has no memory with its base.
    if x._spec.marks & SEVERED or storage_uses(x._local_tensor.untyped_storage()) > 2:
        raise unsupported(
            "A Partial DTensor of which there are views would be written to.",
            expected=f"terms of a sum, an average, a maximum or a minimum, not of {terms}",
            got=x._spec,
            fix="redistribute it to Replicate() or Shard(dim) first",
        )


def filling(plan: Callable[..., Any] | None, call: "Call") -> Callable[..., Any] | None:
    """The plan of a call that has just been run, if there is one: which remembers it where it has written to a view as
    its `out`, as that call has, so that the base has these values.
    """
    if "out" not in call.names:
        return plan
    at = call.names.index("out")
    _fill(call.values[at])
    if plan is None:
        return None

    def run(*args: Any) -> Any:
        result = plan(*args)
        _fill(args[at])
        return result

    return run


def _fill(view: DTensor) -> None:
    view._filled = None if view.is_inference() else view._version + 1  # which it has when the operator is over


def has_filled(view: DTensor, base: DTensor) -> bool:
    """Whether both are views of one tensor, or one is of the other, and not written to since `view` was an `out`."""
    version = None if view.is_inference() else view._version
    same = base_of(view) is (base if base_of(base) is None else base_of(base))
    return same and getattr(view, "_filled", _UNKNOWN) == version


def refuse_overlapping(layout: TensorLayout) -> None:
    """Raise RuntimeError, as torch does, where elements of a tensor to write to may lie on one another.

    It is expanded, or made of windows (unfold).
    """
    if layout.overlaps:
        raise RuntimeError(
            f"more than one element of the DTensor that is written to may be at one place in memory: its shape is "
            f"{tuple(layout.shape)}, its strides are {layout.stride}; clone() it first"
        )


def _without_terms(layout: TensorLayout) -> Partial | None:
    """The Partial of a layout whose terms cannot be made of a value."""
    partials = [p for p in layout.placements if isinstance(p, Partial)]
    return next((p for p in partials if masking(p.op) is None), None)
