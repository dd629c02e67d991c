"""Operators that work element by element, with broadcasting."""

from typing import Any

from torchshard.layout.layout import Layout
from torchshard.rules.reducing import broadcast_shape
from torchshard.rules.rule import Made, Rule, named, options, table
from torchshard.rules.terms import converts_sums

_LINES = table("""
    add.Tensor sub.Tensor prims::add prims::sub                 | ..., ... -> ...      | lin=0+1
    mul.Tensor prims::mul                                       | ..., ... -> ...      | lin=0,1
    div.Tensor                                                  | ..., ... -> ...      | lin=0 per=other
    div.Scalar                                                  | ... -> ...           | lin=0 per=other
    mul.Scalar neg                                              | ... -> ...           | lin=0
    rad2deg deg2rad zero_                                       | ... -> ...           | lin=0
    _conj_physical conj_physical                                | ... -> ...           | lin=0
    clone alias alias_copy detach detach_copy lift_fresh_copy   | ... -> ...           | moves
    contiguous positive prims::view_of                          | ... -> ...           | moves
    _conj _conj_copy _neg_view _neg_view_copy real imag         | ... -> ...           | lin=0
    complex rsub.Tensor                                         | ..., ... -> ...      | lin=0+1
    view_as_real view_as_real_copy                              | ... -> ... Z         | lin=0
    view_as_complex view_as_complex_copy                        | ... Z -> ...         | lin=0
    rsub.Scalar floor_divide.Scalar                             | ... -> ...           |
    floor_divide floor_divide_.Tensor                           | ..., ... -> ...      |
    prims::div prims::gcd prims::zeta                           | ..., ... -> ...      | # of integers, div cuts off
    prims::bessel_i0e prims::bessel_i1 prims::bessel_i1e        | ... -> ...           |
    prims::bessel_j0 prims::bessel_j1 prims::spherical_bessel_j0 | ... -> ...          |
    prims::erfcx prims::ndtri                                   | ... -> ...           |
    relu exp sigmoid tanh expm1                                 | ... -> ...           | mono
    erf atan asinh sinh exp2 relu6                              | ... -> ...           | mono
    ceil floor round trunc                                      | ... -> ...           | mono
    maximum                                                     | ..., ... -> ...      | max=0+1,0,1 min=0,1
    minimum                                                     | ..., ... -> ...      | min=0+1,0,1 max=0,1
    threshold_backward gelu_backward silu_backward              | ..., ... -> ...      | lin=0
    sigmoid_backward tanh_backward elu_backward mish_backward   | ..., ... -> ...      | lin=0
    leaky_relu_backward hardtanh_backward hardswish_backward    | ..., ... -> ...      | lin=0
    hardsigmoid_backward softplus_backward logit_backward       | ..., ... -> ...      | lin=0
    softshrink_backward hardshrink_backward                     | ..., ... -> ...      | lin=0
    log_sigmoid_forward frexp.Tensor prims::frexp               | ... -> ..., ...      |
    polar                                                       | ..., ... -> ...      |
    fill.Scalar                                                 | ... -> ...           | like
    fill.Tensor                                                 | ...,  -> ...         |
    log_sigmoid_backward                                        | ..., ..., ... -> ... | lin=0
    rrelu_with_noise_backward                                   | ..., ..., ... -> ... | lin=0
    native_dropout_backward                                     | ..., ... -> ...      | lin=0
    hardswish fill_.Scalar                                      | ... -> ...           |
    fill_.Tensor                                                | ..., ... -> ...      |
    bucketize.Tensor                                            | ..., B -> ...        | exact
    masked_fill.Tensor                                          | ..., ..., ... -> ... |
    lerp.Scalar                                                 | ..., ... -> ...      | lin=0+1
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor | ..., ... -> ...      | exact
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar | ... -> ...           | exact
    prims::ne                                                   | ..., ... -> ...      | exact
    abs                                                         | ... -> ...           | exact
    zeros_like ones_like full_like                              | ... -> ...           | like
    empty_like                                                  | ... -> ...           | moves # as to_empty() wants it
""")


def _by_element(*args: Any, out: Layout | None = None, **kwargs: Any) -> str | None:
    """As many operands as there are tensors, broadcast against one another; `out` has the shape that they give."""
    read = [a for a in (*args, *kwargs.values()) if isinstance(a, Layout)]
    if out is not None and tuple(out.shape) != broadcast_shape([a.shape for a in read]):
        return None
    operands = ["..."] * (len(read) + (out is not None))
    return f"{', '.join(operands)} -> ..."


# For all operators that torch itself tags as pointwise; those above have more to say, or no tag.
BY_ELEMENT = Rule(_by_element)


def _to_copy(x: Layout, *, dtype: Any = None, **_: Any) -> str | Made:
    if dtype is None or dtype is x.dtype:
        return Made("... -> ...", options={"moves": True})
    return Made("... -> ...", options={"linear": ((0,),)} if converts_sums(x.dtype, dtype) else {})


def _copy(x: Layout, source: Layout, non_blocking: bool = False) -> str | Made:
    together = ((0, 1),)  # whatever lies in x: terms of one kind take the place of terms of that kind
    options = {"linear": together} if converts_sums(source.dtype, x.dtype) else {}
    return Made(
        "..., ... -> ...",
        options={**options, **({"max": together, "min": together} if source.dtype is x.dtype else {})},
    )


def _masked_fill(x: Layout, mask: Layout, value: float) -> Made:
    return Made("..., ... -> ...", options={"linear": ((0,),)} if value == 0 else {})


RULES = {
    **_LINES,
    **named("_to_copy", Rule(_to_copy)),
    **named("copy_ prims::copy_to", Rule(_copy)),
    **named("masked_fill.Scalar", Rule(_masked_fill, options("reads=value"))),
}
