"""Operators that work element by element, with broadcasting."""

from typing import Any

from torchshard.layout.layout import Layout
from torchshard.rules.rule import Made, Rule, named, table

_LINES = table("""
    add.Tensor sub.Tensor add_.Tensor sub_.Tensor               | ..., ... -> ...      | lin=0+1
    mul.Tensor mul_.Tensor                                      | ..., ... -> ...      | lin=0,1
    div.Tensor div_.Tensor                                      | ..., ... -> ...      | lin=0
    mul.Scalar mul_.Scalar div.Scalar div_.Scalar neg neg_      | ... -> ...           | lin=0
    clone alias detach lift_fresh contiguous positive           | ... -> ...           | moves
    zero_                                                       | ... -> ...           | lin=0
    relu relu_ exp exp_ sqrt sqrt_ sigmoid sigmoid_ tanh tanh_  | ... -> ...           | mono
    log log_ log2 log10 log1p expm1 erf atan asinh sinh         | ... -> ...           | mono
    ceil floor round trunc                                      | ... -> ...           | mono
    gelu gelu_ silu silu_ mish leaky_relu elu softplus hardtanh hardswish hardsigmoid selu | ... -> ... |
    abs sgn sign rsqrt rsqrt_ sin cos tan asin acos cosh reciprocal reciprocal_ erfc square | ... -> ... |
    add.Scalar add_.Scalar sub.Scalar rsub.Scalar fill_.Scalar  | ... -> ...           |
    pow.Tensor_Scalar pow_.Scalar pow.Scalar                    | ... -> ...           |
    clamp clamp_ clamp_min clamp_max clamp_min_ clamp_max_ nan_to_num | ... -> ...     |
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar | ... -> ...           |
    isnan isinf isfinite logical_not bitwise_not signbit        | ... -> ...           |
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor | ..., ... -> ...      |
    logical_and logical_or logical_xor maximum minimum atan2 fmod.Tensor remainder.Tensor | ..., ... -> ... |
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor     | ..., ... -> ...      |
    pow.Tensor_Tensor fill_.Tensor                              | ..., ... -> ...      |
    threshold_backward gelu_backward silu_backward              | ..., ... -> ...      | lin=0
    sigmoid_backward tanh_backward                              | ..., ... -> ...      | lin=0
    where.self addcmul addcdiv addcmul_ addcdiv_ lerp.Tensor lerp_.Tensor clamp.Tensor | ..., ..., ... -> ... |
    lerp.Scalar lerp_.Scalar                                    | ..., ... -> ...      | lin=0+1
    masked_fill.Scalar masked_fill_.Scalar                      | ..., ... -> ...      |
    masked_fill.Tensor masked_fill_.Tensor                      | ..., ..., ... -> ... |
    zeros_like ones_like empty_like full_like                   | ... -> ...           | like
""")


def _cast_is_linear(source: Any, target: Any) -> bool:
    """Whether converting each term converts the sum: not to integers, and not to fewer bits, where terms may cancel."""
    if target.is_complex or (target.is_floating_point and not source.is_complex):
        return bool(target.itemsize >= source.itemsize and (source.is_floating_point or source.is_complex))
    return False


def _to_copy(x: Layout, *, dtype: Any = None, **_: Any) -> str | Made:
    if dtype is None or dtype is x.dtype:
        return Made("... -> ...", options={"moves": True})
    return Made("... -> ...", options={"linear": ((0,),)} if _cast_is_linear(x.dtype, dtype) else {})


def _copy(x: Layout, source: Layout, non_blocking: bool = False) -> str | Made:
    linear = source.dtype is x.dtype or _cast_is_linear(source.dtype, x.dtype)
    return Made("..., ... -> ...", options={"linear": ((0, 1),)} if linear else {})


RULES = {**_LINES, **named("_to_copy", Rule(_to_copy)), **named("copy_", Rule(_copy))}
