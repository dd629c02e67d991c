"""Pseudo-inverses of complex matrices, which torch cannot compile right, of plain tensors neither."""

from collections.abc import Callable, Mapping
from typing import Any

from torchshard._torch import is_traced
from torchshard.tensor.dtensor import dtensors_in
from torchshard.unsupported import unsupported


def _pinv(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Refused in a trace: a compiled function runs below a mode at first, where this kernel reads no conjugates."""
    if x.is_complex() and is_traced(next(dtensors_in((x, *args, *kwargs.values())))._local_tensor):
        raise unsupported(
            "Of complex matrices the first call of a compiled function gets a wrong pseudo-inverse from torch.",
            expected="real matrices, or a call that is not traced",
            got=x.dtype,
            where="linalg_pinv",
            fix="call it from a function that torch.compiler.disable leaves alone",
        )
    return NotImplemented


HANDLERS: Mapping[str, Callable[..., Any]] = {"linalg_pinv.atol_rtol_tensor": _pinv}
