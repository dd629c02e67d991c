"""Products of matrices, and linear algebra on batches of matrices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchshard.layout.layout import Layout, contiguous_stride
from torchshard.rules.reducing import broadcasting
from torchshard.rules.rule import Made, Rule, named, options, reduces, table
from torchshard.rules.terms import is_whole_number

_LINES = table("""
    mm       | i k, k j -> i j                 | lin=0,1 red=k:sum
    bmm      | b i k, b k j -> b i j           | lin=0,1 red=k:sum
    mv       | i k, k -> i                     | lin=0,1 red=k:sum
    dot vdot | k, k ->                         | lin=0,1 red=k:sum

    _cdist_forward               | ... i K, ... j K -> ... i j                              |
    linalg_cholesky_ex           | ... M N -> ... M N, ...                                  |
    cholesky cholesky_inverse    | ... M N -> ... M N                                       |
    cholesky_solve               | ... M k, ... M N -> ... M k                              | lin=0
    linalg_inv_ex                | ... M N -> ... M N, ...                                  |
    linalg_matrix_exp            | ... M N -> ... M N                                       |
    linalg_pinv.atol_rtol_tensor | ... M N, ..., ... -> ... N M                             |
    linalg_lu_factor_ex          | ... M N -> ... M N, ... K, ...                           |
    linalg_lu                    | ... M N -> ... P Q, ... R K, ... K N                     |
    linalg_ldl_factor_ex         | ... M N -> ... M N, ... K, ...                           |
    linalg_ldl_solve             | ... M N, ... M, ... M k -> ... M k                       |
    linalg_qr                    | ... M N -> ... P K, ... L Q                              |
    triangular_solve             | ... M k, ... M N -> ... M k, ... M N                     |
    geqrf                        | ... M N -> ... M N, ... K                                |
    linalg_householder_product   | ... M N, ... K -> ... M N                                |
    ormqr                        | ... M N, ... K, ... P Q -> ... P Q                       |
    linalg_eig                   | ... M N -> ... M, ... M N                                |
    linalg_eigvals               | ... M N -> ... M                                         |
""")


def _added(product: str) -> Callable[..., Made]:
    """A product to which a first operand is added that broadcasts to the result.

    Where nothing is summed kernels only multiply that operand by `beta`, and refuse fractions of whole numbers there.
    """
    result = broadcasting(product.split("->")[1].split())

    def build(bias: Layout, *_: Layout, beta: object = 1, **__: object) -> Made:
        line = f"{' '.join(result[len(result) - bias.ndim :])}, {product}"
        return Made(line, options={"full": isinstance(beta, float) and is_whole_number(bias.dtype)})

    return build


def _contiguous_alike(line: str, a: Layout) -> Made:
    """With pieces that are contiguous where the tensor `a` is: torch then factors the transpose, as gradients know."""
    whole = all(n == 1 or s == c for n, s, c in zip(a.shape, a.stride, contiguous_stride(a.shape), strict=True))

    def local(operator: Callable[..., Any], piece: Any, *args: Any, **kwargs: Any) -> Any:
        if piece.is_contiguous() is not whole:
            piece = piece.contiguous() if whole else piece.mT.contiguous().mT
        return operator(piece, *args, **kwargs)

    return Made(line, local=local)


def _det(a: Layout) -> Made:
    return _contiguous_alike("... M N -> ..., ... M N, ... M", a)


def _slogdet(a: Layout) -> Made:
    return _contiguous_alike("... M N -> ..., ..., ... M N, ... M", a)


def _solve(a: Layout, b: Layout, *, left: bool = True, check_errors: bool = False) -> Made:
    """The columns that are solved for may be split: all ranks factor the same matrix. So may a batch of them for which
    there is one matrix.
    """
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    names = [f"g{d}" for d in range(a.ndim - 2 if vector else max(a.ndim, b.ndim) - 2)]
    right = " ".join(broadcasting(names[len(names) - b.ndim + (1 if vector else 2) :]))
    of_a = ["1" if n == 1 else f for f, n in zip(names[len(names) - a.ndim + 2 :], a.shape, strict=False)]
    columns = "N" if vector else "N k" if left else "k N"
    batch, matrices = " ".join(names), " ".join(of_a)
    line = f"{matrices} M N, {right} {columns} -> {batch} {columns}, {matrices} M N, {matrices} M, {matrices}"
    made = _contiguous_alike(line, a)

    def local(operator: Callable[..., Any], piece: Any, columns: Any, **options: Any) -> Any:
        assert made.local is not None, "see there"
        if not vector:  # torch may take a matrix for a batch of vectors, if there are as many matrices in the piece
            columns = columns[(None,) * (piece.ndim - columns.ndim)]
        return made.local(operator, piece, columns, **options)

    return replace(made, local=local, options={"reduces": reduces({f: "same" for f in ("k", *names) if f not in of_a})})


def _solve_triangular(a: Layout, b: Layout, *, upper: bool, left: bool = True, unitriangular: bool = False) -> str:
    right = "... N k" if left else "... k N"
    return f"... M N, {right} -> {right}"


def _lu_solve(lu: Layout, pivots: Layout, b: Layout, *, left: bool = True, adjoint: bool = False) -> str:
    right = "... M k" if left else "... k M"
    return f"... M N, ... M, {right} -> {right}"


def _cdist_backward(grad: Layout, a: Layout, b: Layout, *_: Any) -> Made | None:
    """Where there is nothing to do, torch forgets a batch that `a` lacks: of the whole, and of a piece."""
    if 0 in (*grad.shape, *a.shape):
        return None

    def local(operator: Callable[..., Any], grad: Any, a: Any, *rest: Any) -> Any:
        return operator(grad, a.expand(*grad.shape[:-2], *a.shape[-2:]), *rest)

    return Made("... i j, ... i K, ... j K, ... i j -> ... i K", local=local, contiguous=True)


def _eigh(x: Layout, uplo: str = "L", compute_v: bool = True) -> str:
    return f"... M N -> ... N, {'... M N' if compute_v else 'Z'}"


def _svd(x: Layout, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> str:
    return "... M N -> ... P Q, ... K, ... R S" if compute_uv else "... M N -> Z, ... K, Z"


def _lu_unpack(lu: Layout, pivots: Layout, unpack_data: bool = True, unpack_pivots: bool = True) -> str:
    permutation = "... P Q" if unpack_pivots else "Z"
    return f"... M N, ... K -> {permutation}, {'... R S, ... T U' if unpack_data else 'Z, Z'}"


def _cross(a: Layout, b: Layout, *, dim: int = -1) -> str:
    names = ["D" if k == dim % a.ndim else f"d{k}" for k in range(a.ndim)]
    operand = " ".join(broadcasting(names))
    return f"{operand}, {operand} -> {' '.join(names)}"


# The bias counts once, not once for every shard of k.
_ADDED = "lin=0+1,0+2 plus=0 red=k:sum"


def _grouped_mm(a: Layout, b: Layout, offs: Layout | None = None, bias: Any = None, *_: Any, **__: Any) -> Made | None:
    """Products of matrices of which one dim is cut in groups, as experts have them: groups are whole."""
    if bias is not None:
        return None
    lines = {
        (2, 3): "T k, E k n, E -> T n",
        (3, 2): "E m k, k T, E -> m T",
        (2, 2): "m T, T n, E -> E m n",
        (3, 3): "e m k, e k n -> e m n",
    }
    gone = reduces({} if a.ndim == b.ndim == 2 else {"k": "sum"})
    return Made(lines[a.ndim, b.ndim], options={"reduces": gone}, local=_on_aligned, contiguous=True)


def _on_aligned(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel refuses rows that do not start at multiples of 16 bytes, as those of pieces may."""
    a, b, *rest = args
    return op(_aligned(a), _aligned(b), *rest, **kwargs).contiguous()


def _scaled_mm(
    a: Layout, b: Layout, scale_a: Layout, scale_b: Layout, bias: Layout | None = None, result: Layout | None = None,
    *_: Any, **__: Any,
) -> Made | None:  # fmt: skip
    """A product of scaled numbers of 8 bits: one scale for all, or one a row and a column; what is summed is whole."""
    one = all(n == 1 for n in (*scale_a.shape, *scale_b.shape))
    if not one and (scale_a.shape != (a.shape[0], 1) or scale_b.shape != (1, b.shape[1])):
        return None
    scales = [" ".join("1" * s.ndim) for s in (scale_a, scale_b)] if one else ["i 1", "1 j"]
    more = ["j"] * (bias is not None) + ([] if result is None else [" ".join("1" * result.ndim)])
    return Made(f"{', '.join(['i K, K j', *scales, *more])} -> i j", local=_on_tiles)


def _on_tiles(op: Any, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Any:
    """CUDA's kernel takes columns by 16 only, which those of a piece may not be."""
    if b.is_cuda and (lacking := -b.shape[1] % 16):
        return with_more_columns(lacking, op, a, b, *args, **kwargs)
    return op(a, b, *args, **kwargs)


def with_more_columns(
    more: int, op: Any, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any = None, *rest: Any, **kw: Any
) -> Any:
    """The same product with columns of zeros added to `b` that the result lacks again."""
    columns = b.shape[1]
    rows = b.new_empty(columns + more, b.shape[0])  # the kernel wants those of `b` one after another
    rows.view(torch.uint8).zero_()[:columns] = b.t().view(torch.uint8)
    if scale_b.numel() > 1:
        scale_b = pad(scale_b, (0, more), value=1)
    bias = bias if bias is None else pad(bias, (0, more))
    return op(a, rows.t(), scale_a, scale_b, bias, *rest, **kw)[:, :columns].contiguous()


def _aligned(x: Any) -> Any:
    step = max(16 // x.element_size(), 1)
    if any(x.stride(one) == 1 and x.stride(other) % step == 0 for one, other in ((-1, -2), (-2, -1))):
        return x
    return rows_apart(x, step)


def rows_apart(x: Tensor, step: int) -> Tensor:
    """The same numbers, one after another in rows that start at multiples of `step`; a copy where they do not."""
    *starts, within = x.stride()
    if within == 1 and not any(stride % step for stride in starts):
        return x
    length = -(-x.shape[-1] // step) * step
    return x.new_zeros(*x.shape[:-1], length)[..., : x.shape[-1]].copy_(x)


RULES = {
    **_LINES,
    **named("addmm", Rule(_added("i k, k j -> i j"), options(_ADDED))),
    **named("addmv", Rule(_added("i k, k -> i"), options(_ADDED))),
    **named("addr", Rule(_added("i, j -> i j"), options("lin=0+1,0+2"))),
    **named("baddbmm", Rule(_added("b i k, b k j -> b i j"), options(_ADDED))),
    **named("addbmm", Rule(_added("b i k, b k j -> i j"), options(f"{_ADDED},b:sum"))),
    **named("_grouped_mm", Rule(_grouped_mm, options("lin=0,1 full"))),
    **named("_scaled_mm", Rule(_scaled_mm)),
    **named("_linalg_det", Rule(_det)),
    **named("_linalg_slogdet", Rule(_slogdet)),
    **named("_linalg_solve_ex", Rule(_solve)),
    **named("linalg_solve_triangular", Rule(_solve_triangular, options("lin=1"))),
    **named("linalg_lu_solve", Rule(_lu_solve)),
    **named("_cdist_backward", Rule(_cdist_backward, options("lin=0 red=j:sum"))),
    **named("lu_unpack", Rule(_lu_unpack)),
    **named("_linalg_eigh", Rule(_eigh)),
    **named("_linalg_svd", Rule(_svd)),
    **named("linalg_cross", Rule(_cross, options("lin=0,1"))),
}
