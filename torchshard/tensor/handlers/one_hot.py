"""one_hot, which torch makes of `classes == arange(n)` for tensor classes: without asking for classes that are none."""

from typing import Any

from torchshard.tensor.dtensor import DTensor


def require_classes(name: str, classes: Any, numbers: Any = None, *_: Any) -> None:
    """Raise on every rank what one_hot raises for plain tensors.

    Args:
        name: of an operator for which torch itself made a plain tensor.
        classes: its first argument.
        numbers: its second, if there is one.

    Raises:
        RuntimeError: a class below 0, or none of `numbers`.
    """
    if name == "eq.Tensor" and isinstance(classes, DTensor) and isinstance(numbers, DTensor):
        if bool((classes < 0).any()):
            raise RuntimeError("Class values must be non-negative.")
        if bool((classes >= numbers.shape[0]).any()):
            raise RuntimeError("Class values must be smaller than num_classes.")
