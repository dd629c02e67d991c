"""Gradients that come back to a compiled graph for its results: what AOTAutograd expects, and asks of a DTensor."""

from typing import TYPE_CHECKING

from torch import Tensor

from torchshard._torch import is_traced, skip_methods
from torchshard.layout.layout import Sharding
from torchshard.tensor.layout import TURNED, TensorLayout, layout_for
from torchshard.unsupported import unsupported

if TYPE_CHECKING:
    from torchshard.tensor.dtensor import DTensor


@skip_methods()
class Tangent:
    """What AOTAutograd asks of a DTensor whose gradient, or that as a gradient, is one of a compiled backward."""

    __slots__ = ()
    _spec: TensorLayout

    def __coerce_tangent_metadata__(self: "DTensor") -> "DTensor":  # type: ignore[misc]
        """The layout that AOTAutograd expects of the gradient of a traced result: neither Partial nor TURNED."""
        from torchshard.tensor.gradients import autograd

        dense = self.clone() if self._spec.marks & TURNED else self
        return autograd.redistribute(dense, self._spec.sharding.without_partial())  # type: ignore[arg-type]

    def __coerce_same_metadata_as_tangent__(  # type: ignore[misc]
        self: "DTensor", expected: Sharding, expected_type: type[Tensor] | None = None
    ) -> "DTensor":
        """This gradient in the layout that a compiled backward was made for.

        Raises:
            UnsupportedOperatorError: the graph takes it for zeros in a plain tensor, as AOTAutograd does for an input
                that a region writes to.
        """
        from torchshard.tensor.gradients import autograd

        if expected_type is not None:
            raise unsupported(
                "An input that a compiled region wrote to has a gradient from behind the region.",
                expected="none, as AOTAutograd takes it to have",
                got=f"a DTensor of shape {tuple(self.shape)}",
                fix="return a copy from the region, and go on with that: x.copy_(y).clone()",
            )
        return autograd.redistribute(self, expected)

    @staticmethod
    def __zeros_as_tangent__(whole: Tensor, sharding: Sharding) -> "DTensor":
        """Zeros for a traced result that got no gradient, of zeros in the shape of the whole tensor."""
        from torchshard.tensor import dtensor
        from torchshard.tensor.calls import plain
        from torchshard.tensor.gradients import autograd

        if is_traced(whole):  # compiled autograd, where it is not known that it is zero
            return autograd.redistribute(plain.replica(whole, sharding.mesh), sharding)
        layout = layout_for(sharding, tuple(whole.shape), whole.stride(), whole.dtype)
        return dtensor.wrap(whole.new_zeros(layout.local_shape), layout)
