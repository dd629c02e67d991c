"""Views that had to be moved: what stands for a view of a tensor but shares no memory with it.

Eager torch's view sees later writes to its base, and writes to it reach the base. A view of a sharded tensor that has
to be gathered is a copy, so neither would happen. Such a result is marked (its layout is SEVERED) and remembers the
version of its base: writing to it is refused, and so is reading it once its base has changed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchshard._torch import storage_uses
from torchshard.errors import UnsupportedOperatorError
from torchshard.layout.placements import Partial
from torchshard.layout.reductions import reduction
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.layout import SEVERED, TensorLayout
from torchshard.tensor.redistribute import redistribute_local


def severed(view: DTensor, base: DTensor) -> DTensor:
    """Mark a result as cut off from `base`, of which it should be a view."""
    view._spec = view._spec.marked(view._spec.marks | SEVERED)
    view._severed_at = None if base.is_inference() else base._version
    return view


def severing(plan: Callable[..., Any], base: int) -> Callable[..., Any]:
    """A plan whose results are cut off from its argument `base`."""

    def run(*args: Any) -> Any:
        result = plan(*args)
        for view in result if isinstance(result, (list, tuple)) else [result]:
            severed(view, args[base])
        return result

    return run


def checked(plan: Callable[..., Any], cut: Sequence[int], name: str) -> Callable[..., Any]:
    """A plan that first makes sure that the bases of its severed arguments have not changed."""

    def run(*args: Any) -> Any:
        for at in cut:
            for x in args[at] if isinstance(args[at], (list, tuple)) else [args[at]]:
                if type(x) is DTensor and x._spec.marks & SEVERED:
                    _check_version(x, name)
        return plan(*args)

    return run


def _check_version(x: DTensor, name: str) -> None:
    if x._severed_at is not None and x._severed_at != x._version:
        raise UnsupportedOperatorError(
            f"{name} reads a view whose base was written to after the view was taken.",
            expected="a view that shares memory with its base, or a base that has not changed",
            got=f"a view that had to be moved to {x._spec.sharding}: it does not see the change",
            fix="take the view again after writing, or .clone() it before",
        )


def refuse_write(x: DTensor, name: str) -> UnsupportedOperatorError:
    """The error for writing to a severed view."""
    return UnsupportedOperatorError(
        f"{name} would write to a view without changing its base.",
        expected="a view that shares memory with its base",
        got=f"a view that had to be moved to {x._spec.sharding}, which is a copy",
        fix="write to a .clone(), or write to the base with an operator on all of it, such as torch.where",
    )


def write_back(x: DTensor, whole: Tensor, target: TensorLayout) -> None:
    """Write to `x` what an operator has made of its gathered values.

    Where its layout holds terms that no value can be turned into (those of norms, say), `x` takes over the gathered
    values and their layout, if nothing else shares its memory.

    Raises:
        UnsupportedOperatorError: something else does.
    """
    layout = x._spec
    terms = [p for p in layout.placements if isinstance(p, Partial)]
    if all(reduction(p.op).mask for p in terms):
        x._local_tensor.copy_(redistribute_local(whole, target, layout))
    elif storage_uses(x._local_tensor.untyped_storage()) == 2:  # the tensor and the storage object
        x._local_tensor, x._spec = whole, target
    else:
        raise UnsupportedOperatorError(
            "A Partial DTensor of which there are views would be written to.",
            expected=f"terms of a sum, an average, a maximum or a minimum, not of {terms[0]}",
            got=layout,
            fix="redistribute it to Replicate() or Shard(dim) first",
        )
