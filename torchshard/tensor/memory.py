"""What a DTensor says of memory: the parts of its ranks have some, and it has none of its own."""

from typing import Any, Self

from torch import Tensor

from torchshard._torch import skip_methods
from torchshard.errors import UnsupportedOperatorError
from torchshard.unsupported import unsupported


@skip_methods()
class WithoutMemory:
    """The methods of a tensor that are about its memory, for one that is spread over ranks."""

    __slots__ = ()
    _local_tensor: Tensor

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Refused: torch.Tensor's would make one of no parts."""
        raise TypeError(
            f"{cls.__name__}(...) does not make one; DTensor.from_local(part, mesh, placements) does of a part, "
            "distribute_tensor(whole, mesh, placements) of a whole tensor"
        )

    def data_ptr(self) -> int:
        """Nowhere; also where this rank's part begins within other memory, which torch would take for an address."""
        return 0

    def share_memory_(self) -> Self:
        """Move this rank's part to shared memory."""
        self._local_tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether this rank's part is in shared memory."""
        return bool(self._local_tensor.is_shared())

    def storage(self) -> Any:
        """Refused: a DTensor has no storage of its own."""
        raise no_memory("storage()", "full_tensor().storage()")

    def apply_(self, function: Any) -> Self:
        """Refused: torch would write to where a DTensor has no memory."""
        raise no_memory("apply_()", "full_tensor().apply_(f)")

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise no_memory("__dlpack__()", "full_tensor().__dlpack__()")


def no_memory(what: str, instead: str) -> UnsupportedOperatorError:
    """The refusal of a method that would share memory; `instead` is what to ask a DTensor for."""
    return unsupported(
        f"{what} shares the memory of a tensor, which a DTensor spreads over ranks.",
        expected="a plain tensor",
        got="a DTensor",
        fix=f"x.{instead} for a copy of the whole, x.to_local() for the part of this rank",
    )
