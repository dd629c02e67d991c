"""Gradients that come back to a compiled graph for its results: what AOTAutograd expects, and asks of a DTensor."""

from typing import TYPE_CHECKING

from torch import Tensor

from torchshard._torch import is_traced, skip_methods
from torchshard.layout.layout import Sharding
from torchshard.tensor.layout import TURNED, TensorLayout, layout_for

if TYPE_CHECKING:
    from torchshard.tensor.dtensor import DTensor


@skip_methods()
class Tangent:
    """What AOTAutograd asks of a DTensor whose gradient, or that as a gradient, is one of a compiled backward."""

    __slots__ = ()
    _spec: TensorLayout

    def __coerce_tangent_metadata__(self: "DTensor") -> "DTensor":  # type: ignore[misc]
        """The layout that AOTAutograd expects of the gradient of a traced result: neither Partial nor TURNED."""
        from torchshard.tensor import autograd

        dense = self.clone() if self._spec.marks & TURNED else self
        return autograd.redistribute(dense, self._spec.sharding.without_partial())  # type: ignore[arg-type]

    def __coerce_same_metadata_as_tangent__(  # type: ignore[misc]
        self: "DTensor", expected: Sharding, expected_type: type[Tensor] | None = None
    ) -> "DTensor":
        """This gradient in the layout that a compiled backward was made for: see autograd.py."""
        from torchshard.tensor import autograd

        return autograd.as_traced(self, expected, expected_type)

    @staticmethod
    def __zeros_as_tangent__(whole: Tensor, sharding: Sharding) -> "DTensor":
        """Zeros for a traced result that got no gradient, of zeros in the shape of the whole tensor."""
        from torchshard.tensor import autograd, call, dtensor

        if is_traced(whole):  # compiled autograd, where it is not known that it is zero
            return autograd.redistribute(call.replica(whole, sharding.mesh), sharding)
        layout = layout_for(sharding, tuple(whole.shape), whole.stride(), whole.dtype)
        return dtensor.wrap(whole.new_zeros(layout.local_shape), layout)
