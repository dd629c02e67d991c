"""Rounding to the numbers of a quantized type, as training for it does: by element, with a scale and a zero point.

Of channels, each has its own; those that are learned have a gradient that is summed over all other dims.
"""

from torchshard.layout.layout import Layout
from torchshard.rules.reducing import letters
from torchshard.rules.rule import Made, Rule, named, options, reduces, table

_FULL = options("full")  # kernels look for the least zero point, and give back what they got where nothing is rounded

_LINES = table("""
    fake_quantize_per_tensor_affine_cachemask | ... -> ..., ... |
""")


def _of_numbers(x: Layout, *numbers: Layout | int | float) -> Made:
    """Scale and zero point are tensors of one element, as is what says whether anything is rounded."""
    line = _all_of_tensor([x], [n for n in numbers if isinstance(n, Layout)])
    return Made(f"{line} -> ..., ...")


def _learned(x: Layout, scale: Layout, zero: Layout, *_: int | float) -> Made:
    return Made(f"{_all_of_tensor([x], [scale, zero])} -> ...")


def _learned_backward(grad: Layout, x: Layout, scale: Layout, zero: Layout, *_: int | float) -> Made:
    line = f"{_all_of_tensor([grad, x], [scale, zero])} -> ..., 1, 1"
    return Made(line, options={"reduces": reduces({"...": "sum"})})


def _all_of_tensor(tensors: list[Layout], numbers: list[Layout]) -> str:
    return ", ".join([*["..."] * len(tensors), *[" ".join("1" * n.ndim) for n in numbers]])


def _by_channel(tensors: int, results: str) -> Rule:
    """Of so many tensors, and a scale and a zero point for each index of one dim. `results`: x of a tensor, c of a
    number for each channel.
    """

    def build(x: Layout, *rest: Layout | int | float) -> Made | None:
        axis = rest[tensors + 1]
        if not isinstance(axis, int) or not 0 <= axis < x.ndim:
            return None
        names = letters(x.ndim)
        kinds = {"x": " ".join(names), "c": names[axis]}
        operands = ", ".join([kinds[kind] for kind in "x" * tensors + "cc"])
        others = dict.fromkeys([name for name in names if name != names[axis]], "sum")
        options = {"reduces": reduces(others)} if "c" in results else {}
        return Made(f"{operands} -> {', '.join([kinds[kind] for kind in results])}", options=options)

    return Rule(build, _FULL)


RULES = {
    **_LINES,
    **named("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", Rule(_of_numbers)),
    **named("_fake_quantize_learnable_per_tensor_affine", Rule(_learned)),
    **named("_fake_quantize_learnable_per_tensor_affine_backward", Rule(_learned_backward, _FULL)),
    **named("fake_quantize_per_channel_affine_cachemask", _by_channel(1, "xx")),
    **named("_fake_quantize_learnable_per_channel_affine", _by_channel(1, "x")),
    **named("_fake_quantize_learnable_per_channel_affine_backward", _by_channel(2, "xcc")),
}
