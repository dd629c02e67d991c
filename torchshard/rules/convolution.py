"""Convolution, pooling, resampling: batch and channels may be split, positions in space must be whole."""

from collections.abc import Sequence
from typing import Any

from torchshard.layout.layout import Layout
from torchshard.rules.reducing import letters
from torchshard.rules.rule import Made, Rule, named, options, reduces, table

# Kernels refuse batches and channels of length 0.
_LINES = table("""
    avg_pool2d _adaptive_avg_pool2d                    | ... H W -> ... P Q                        | lin=0 full rounds
    avg_pool3d _adaptive_avg_pool3d                    | ... D H W -> ... O P Q                    | lin=0 full rounds
    adaptive_max_pool2d max_pool2d_with_indices        | ... H W -> ... P Q, ... P Q               | full
    adaptive_max_pool3d max_pool3d_with_indices        | ... D H W -> ... O P Q, ... O P Q         | full
    avg_pool2d_backward _adaptive_avg_pool2d_backward  | ... P Q, ... H W -> ... H W               | lin=0 full
    avg_pool3d_backward _adaptive_avg_pool3d_backward  | ... O P Q, ... D H W -> ... D H W         | lin=0 full
    adaptive_max_pool2d_backward                       | ... P Q, ... H W, ... P Q -> ... H W      | lin=0 full
    max_pool2d_with_indices_backward                   | ... P Q, ... H W, ... P Q -> ... H W      | lin=0 full
    adaptive_max_pool3d_backward                       | ... O P Q, ... D H W, ... O P Q -> ... D H W | lin=0 full
    max_pool3d_with_indices_backward                   | ... O P Q, ... D H W, ... O P Q -> ... D H W | lin=0 full
    max_unpool2d                                       | ... H W, ... H W -> ... P Q               | full
    max_unpool3d                                       | ... D H W, ... D H W -> ... O P Q         | full
    fractional_max_pool2d                              | n c H W, n c D -> n c P Q, n c P Q        | full
    fractional_max_pool3d                              | n c D H W, n c K -> n c O P Q, n c O P Q  | full
    fractional_max_pool2d_backward                     | n c P Q, n c H W, n c P Q -> n c H W      | lin=0 full
    fractional_max_pool3d_backward                     | n c O P Q, n c D H W, n c O P Q -> n c D H W | lin=0 full
    grid_sampler_2d                                    | n c H W, n P Q K -> n c P Q               | lin=0 full
    grid_sampler_3d                                    | n c D H W, n O P Q K -> n c O P Q         | lin=0 full
    grid_sampler_2d_backward | n c P Q, n c H W, n P Q K -> n c H W, n P Q K              | lin=0 red=c:sum full
    grid_sampler_3d_backward | n c O P Q, n c D H W, n O P Q K -> n c D H W, n O P Q K    | lin=0 red=c:sum full
""")


def positions(ndim: int, letter: str) -> list[str]:
    """Factors for the positions in space, after batch and channels."""
    return [f"{letter}{d}" for d in range(ndim - 2)]


def _kernels(x: Layout, weight: Layout, transposed: bool, groups: int) -> tuple[list[str], list[str], list[str]]:
    """Dims of the input, of the kernels and of the output."""
    into, out = ("c", "o") if groups == 1 else ("C", "O")
    first, second = (into, out) if transposed else (out, into)
    if groups > 1:  # one side of the kernels has the channels of one group only
        second = "K"
    kernel = [first, second, *positions(weight.ndim, "K")]
    return ["n", into, *positions(x.ndim, "X")], kernel, ["n", out, *positions(x.ndim, "Y")]


def _convolution(
    x: Layout, weight: Layout, bias: Layout | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Made:  # fmt: skip
    """The channels that go in are contracted; the bias counts once, not once for every part of them."""
    given, kernel, result = _kernels(x, weight, transposed, groups)
    operands = [given, kernel] if bias is None else [given, kernel, [result[1]]]
    linear = ((0,), (1,)) if bias is None else ((0, 2), (1, 2))
    line = f"{', '.join(map(' '.join, operands))} -> {' '.join(result)}"
    return Made(line, options={"linear": linear})


def _convolution_backward(
    grad: Layout, x: Layout, weight: Layout, bias_sizes: Sequence[int] | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> Made:  # fmt: skip
    given, kernel, result = _kernels(x, weight, transposed, groups)
    line = f"{', '.join(map(' '.join, (result, given, kernel)))} -> {' '.join(given)}, {' '.join(kernel)}, {result[1]}"

    def local(op: Any, grad: Any, x: Any, weight: Any, sizes: Any, *rest: Any) -> Any:
        return op(grad, x, weight, None if sizes is None else [grad.shape[1]], *rest)

    return Made(line, local=local)


def _upsample(x: Layout, *_: Any, **__: Any) -> str:
    return f"{' '.join(['n', 'c', *positions(x.ndim, 'X')])} -> {' '.join(['n', 'c', *positions(x.ndim, 'Y')])}"


def _upsample_backward(grad: Layout, output_size: Any, input_size: Sequence[int], *_: Any, **__: Any) -> Made:
    result = ["n", "c", *positions(grad.ndim, "X")]
    line = f"{' '.join(['n', 'c', *positions(grad.ndim, 'Y')])} -> {' '.join(result)}"
    return Made(line, dict(zip(result[2:], input_size[2:], strict=True)), local_size=2)


def _affine_grid(theta: Layout, size: Sequence[int], *_: Any) -> Made:
    points = [f"Y{d}" for d in range(len(size) - 2)]

    def local(op: Any, theta: Any, size: Sequence[int], *rest: Any) -> Any:
        return op(theta, [theta.shape[0], *size[1:]], *rest)

    return Made(f"n A B -> n {' '.join(points)} A", dict(zip(points, size[2:], strict=True)), local=local)


def _col2im(x: Layout, *_: Any) -> str:
    return "n K L -> n C H W" if x.ndim == 3 else "K L -> C H W"


def _trilinear(
    a: Layout, b: Layout, c: Layout, expand_a: Sequence[int], expand_b: Sequence[int], expand_c: Sequence[int],
    summed: Sequence[int], unroll: int = 1,
) -> Made:  # fmt: skip
    """A product of three tensors with dims of length 1 put in, some dims summed: what bilinear is made of."""
    total = a.ndim + len(expand_a)
    names = letters(total)
    operands = [[f for d, f in enumerate(names) if d not in gone] for gone in (expand_a, expand_b, expand_c)]
    result = [f for d, f in enumerate(names) if d not in summed]
    line = f"{', '.join(map(' '.join, operands))} -> {' '.join(result)}"
    return Made(line, options={"reduces": reduces({names[d]: "sum" for d in summed}), "linear": ((0,), (1,), (2,))})


RESAMPLED = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)


def _backward_of(names: str) -> str:
    return " ".join([f"{name}_backward" for name in names.split()])


RULES = {
    **_LINES,
    **named("convolution", Rule(_convolution, options("red=c:sum plus=2 full"))),
    **named("convolution_backward", Rule(_convolution_backward, options("lin=0 red=n:sum,o:sum,c:same full"))),
    **named(RESAMPLED, Rule(_upsample, options("lin=0 full rounds"))),
    **named(_backward_of(RESAMPLED), Rule(_upsample_backward, options("lin=0 full"))),
    **named("affine_grid_generator", Rule(_affine_grid, options("lin=0 full"))),
    **named("col2im", Rule(_col2im, options("lin=0 full"))),
    **named("_trilinear", Rule(_trilinear)),
}
