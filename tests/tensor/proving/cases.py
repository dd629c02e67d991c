"""Operators to be proved against eager torch: name, function of the operands, their shapes, and what is special.

Sizes 5 and 7 are uneven on two and on three ranks; size 1 and 3 leave ranks of a 2x2 mesh empty.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.older import known

aten, prims = torch.ops.aten, torch.ops.prims
AMINMAX = known("gradients of aminmax")


@dataclass(frozen=True)
class Case:
    """One function of some tensors.

    integers: operands that hold small non-negative integers below this bound (and have no gradient).
    positive: operands are made positive.
    grad: whether there is a backward.
    booleans: operands that are masks.
    partial: whether operands may also be Partial.
    """

    name: str
    run: Any
    shapes: tuple[tuple[int, ...], ...]
    integers: dict[int, int] | None = None
    positive: bool = False
    grad: bool = True
    booleans: tuple[int, ...] = ()
    partial: bool = True


def case(name, run, *shapes, **more):
    return Case(name, run, shapes, **more)


def _ends(integers, length):
    """Where groups end, of which the last is whatever is left."""
    ends = integers.sort().values.int()
    return torch.cat([ends[:-1], ends[-1:] * 0 + length])


def _scaled(a, b, *scales):
    a, b = (t.to(torch.float8_e4m3fn) for t in (a, b))
    return torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16)


def _attention(x, *rest):
    attended, shares = torch._native_multi_head_attention(x, x, x, 8, 2, *rest)
    attended = attended.nan_to_num(7)  # where all keys are masked
    return attended if shares is None else attended + shares.nan_to_num(7).exp().sum()


def _encoder_layer(x, qkv, qkv_bias, out, out_bias, norm, norm_bias, up, up_bias, down, *mask):
    weights = norm, norm_bias, norm, norm_bias, up, up_bias, down, norm_bias
    return torch._transformer_encoder_layer_fwd(
        x, 8, 2, qkv, qkv_bias, out, out_bias, False, False, 1e-5, *weights, *mask
    ).nan_to_num(7)


def _with_statistics(normalise):
    """A result that tells of running statistics, which the operator's schema does not say that it writes to."""

    def run(x, mean, var):
        normed = normalise(x, mean, var, momentum=0.3)
        return normed + (mean * var).sum()

    return run


def _unary(names, **more):
    return [case(n, getattr(torch, n, None) or getattr(F, n), (5, 4), **more) for n in names.split()]


def _in_place(op, *others):
    """An in-place operator on a copy of the first operand."""

    def run(a, *rest):
        x = a * 1
        getattr(x, op)(*rest, *others)
        return x

    return run


def _aten(name, *args, **kwargs):
    packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    return lambda *ts: op(*ts, *args, **kwargs)


def _inferred(function):
    """The function in inference mode, where operators that are made of others reach a tensor subclass whole."""

    def run(*tensors):
        with torch.inference_mode():
            return function(*tensors)

    return run


def _by_matrix_products(q, k, v):
    """Attention as torch composes it where there is no fused kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


POINTWISE = [
    case("add", lambda a, b: a + b, (5, 4), (5, 4)),
    case("add broadcast", lambda a, b: a + b, (5, 4), (4,)),
    case("add broadcast 2", lambda a, b: a + b, (5, 1, 3), (4, 1)),
    case("add alpha", lambda a, b: torch.add(a, b, alpha=2), (5, 4), (5, 4)),
    case("add number", lambda a: a + 1.5, (5, 4)),
    case("prims", lambda a, b: prims.add(a, b) + prims.sub(a, b) + prims.mul(a, b), (5, 4), (5, 4), grad=False),
    *[
        case(f"prims {op}", lambda a, op=op: getattr(prims, op)(a.sigmoid()), (5, 4), grad=False)
        for op in ["bessel_i0e", "bessel_i1", "bessel_j0", "erfcx", "ndtri", "spherical_bessel_j0", "view_of"]
    ],
    *[
        case(f"prims {op}", lambda a, b, op=op: getattr(prims, op)(a.abs() + 1, b.abs()), (5, 4), (5, 4), grad=False)
        for op in ["div", "ne", "zeta"]
    ],
    case(
        "prims of integers", lambda a, b: prims.gcd(a.int(), b.int()) + prims.div(a.int() * 5, b.int() + 3), (5, 4), (5, 4), grad=False
    ),
    *[
        case(f"prims {op} {dims}", lambda a, op=op, dims=dims: getattr(prims, op)(a, dims), (5, 4), grad=False)
        for op in ["sum", "prod"]
        for dims in ([0], [1], [0, 1])
    ],
    case("prims frexp", lambda a: torch.add(*prims.frexp(a)), (5, 4), grad=False),
    case("prims var", lambda a: prims.var(a, [1], 0.0), (5, 4), grad=False),
    case("prims copy_to", lambda a, b: prims.copy_to(a * 1, b), (5, 4), (5, 4), grad=False),
    case("add scalar tensor", lambda a: a + torch.tensor(1.5), (5, 4)),
    case("sub", lambda a, b: a - b, (7, 3), (7, 1)),
    case("rsub", lambda a: 2 - a, (5, 4)),
    case("mul", lambda a, b: a * b, (5, 4), (5, 4)),
    case("mul number", lambda a: a * -2, (5, 4)),
    case("div", lambda a, b: a / (b * b + 1), (5, 4), (5, 4)),
    case("div number", lambda a: a / 3, (5, 4)),
    case("neg", lambda a: -a, (5, 4)),
    case("clone", lambda a: a.clone(), (5, 4)),
    case("pow", lambda a: a**3, (5, 4)),
    case("pow tensor", lambda a, b: a**b, (5, 4), (5, 4), positive=True),
    case("pow base", lambda a: 2**a, (5, 4)),
    case("maximum", torch.maximum, (5, 4), (5, 4)),
    case("minimum", torch.minimum, (5, 4), (4,)),
    case("atan2", torch.atan2, (5, 4), (5, 4)),
    case("hypot", torch.hypot, (5, 4), (5, 4)),
    case("fmod", lambda a, b: torch.fmod(a, b * b + 1), (5, 4), (5, 4)),
    case("remainder", lambda a, b: torch.remainder(a, b * b + 1), (5, 4), (5, 4)),
    case("where", lambda a, b: torch.where(a > 0, a, b), (5, 4), (5, 4)),
    case("where number", lambda a: torch.where(a > 0, a, 0.0), (5, 4)),
    case("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), (5, 4), (5, 4), (4,)),
    case("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c * c + 1, value=0.5), (5, 4), (5, 4), (5, 4)),
    case("lerp", lambda a, b, c: torch.lerp(a, b, c), (5, 4), (5, 4), (5, 4)),
    case("lerp number", lambda a, b: torch.lerp(a, b, 0.3), (5, 4), (5, 4)),
    case("clamp", lambda a: a.clamp(-0.5, 0.5), (5, 4)),
    case("clamp_min", lambda a: a.clamp_min(0.1), (5, 4)),
    case("clamp_max", lambda a: a.clamp_max(0.1), (5, 4)),
    case("clamp tensors", lambda a, b: torch.clamp(a, b, b + 1), (5, 4), (5, 4)),
    case("masked_fill", lambda a, m: a.masked_fill(m, 2.0), (5, 4), (5, 4), booleans=(1,)),
    case("masked_fill with zero", lambda a, m: a.masked_fill(m, 0.0), (5, 4), (5, 4), booleans=(1,)),
    case("masked_fill tensor", lambda a, m, v: a.masked_fill(m, v), (5, 4), (4,), (), booleans=(1,)),
    case("leaky_relu", lambda a: F.leaky_relu(a, 0.1), (5, 4)),
    case("hardtanh", F.hardtanh, (5, 4)),
    case("gelu tanh", lambda a: F.gelu(a, approximate="tanh"), (5, 4)),
    *_unary("relu exp sigmoid tanh atan asinh sinh sin cos tan erf erfc expm1 abs square reciprocal sign"),
    case("rrelu outside of training", F.rrelu, (5, 7)),
    *_unary("gelu silu mish elu softplus hardswish hardsigmoid selu nan_to_num positive cosh"),
    *_unary("sqrt rsqrt log log2 log10 log1p", positive=True),
    *_unary("ceil floor round trunc sgn", grad=False),
    *_unary("isnan isinf isfinite logical_not signbit", grad=False),
    case("asin acos", lambda a: torch.asin(a / 9) + torch.acos(a / 9), (5, 4)),
    case("comparisons", lambda a, b: (a > b) | (a >= b) & (a < b) ^ (a <= b), (5, 4), (5, 4), grad=False),
    case("equalities", lambda a, b: torch.logical_or(torch.logical_and(a == b, a != b), torch.logical_xor(a > b, b > a)), (5, 4), (5, 4), grad=False),
    case("comparisons with numbers", lambda a: (a == 0) | (a != 1) & (a < 2) | (a <= 0.1) | (a > 3) | (a >= 0.2), (5, 4), grad=False),
    case("bitwise", lambda a, b: (a & b) | (a ^ b) + ~a, (5, 4), (5, 4), integers={0: 9, 1: 9}, grad=False),
    case("to double", lambda a: a.double(), (5, 4)),
    case("to half", lambda a: (a * 1.001).half().float(), (5, 4)),
    case("to int", lambda a: (a * 3).to(torch.int32), (5, 4), grad=False),
    *[case(f"{n} whole", _inferred(getattr(torch, n)), (5, 4), grad=False) for n in ("square", "positive", "isfinite", "selu")],
    case("contiguous whole", _inferred(lambda a: a.t().contiguous()), (5, 4), grad=False),
    case("add dtypes", lambda a, b: a + b, (5, 4), (5, 4), integers={1: 9}),
]  # fmt: skip

IN_PLACE = [
    case("add_", _in_place("add_"), (5, 4), (5, 4)),
    case("add_ broadcast", _in_place("add_"), (5, 4), (4,)),
    case("add_ number", _in_place("add_", 2.0), (5, 4)),
    case("sub_", _in_place("sub_"), (5, 4), (5, 4)),
    case("mul_", _in_place("mul_"), (5, 4), (5, 4)),
    case("mul_ number", _in_place("mul_", -2.0), (5, 4)),
    case("div_", lambda a, b: _in_place("div_")(a, b * b + 1), (5, 4), (5, 4)),
    case("div_ number", _in_place("div_", 3.0), (5, 4)),
    case("neg_", _in_place("neg_"), (5, 4)),
    case("zero_", _in_place("zero_"), (5, 4)),
    case("fill_", _in_place("fill_", 3.0), (5, 4)),
    case("relu_", _in_place("relu_"), (5, 4)),
    case("exp_", _in_place("exp_"), (5, 4)),
    case("sqrt_", _in_place("sqrt_"), (5, 4), positive=True),
    case("rsqrt_", _in_place("rsqrt_"), (5, 4), positive=True),
    case("sigmoid_ tanh_", lambda a: _in_place("tanh_")(_in_place("sigmoid_")(a)), (5, 4)),
    case("log_", _in_place("log_"), (5, 4), positive=True),
    case("reciprocal_", _in_place("reciprocal_"), (5, 4), positive=True),
    case("pow_", _in_place("pow_", 2), (5, 4)),
    case("clamp_", _in_place("clamp_", -0.3, 0.3), (5, 4)),
    case("clamp_min_ clamp_max_", lambda a: _in_place("clamp_max_", 0.3)(_in_place("clamp_min_", -0.3)(a)), (5, 4)),
    case("gelu_ silu_", lambda a: F.silu(aten.gelu_(a * 1), inplace=True), (5, 4), grad=False),
    case("addcmul_", lambda a, b, c: (a * 1).addcmul_(b, c, value=0.5), (5, 4), (5, 4), (5, 4)),
    case("addcdiv_", lambda a, b, c: (a * 1).addcdiv_(b, c * c + 1, value=0.5), (5, 4), (5, 4), (5, 4)),
    case("lerp_", lambda a, b, c: (a * 1).lerp_(b, c), (5, 4), (5, 4), (5, 4)),
    case("lerp_ number", lambda a, b: (a * 1).lerp_(b, 0.3), (5, 4), (5, 4)),
    case("masked_fill_", lambda a, m: (a * 1).masked_fill_(m, 2.0), (5, 4), (5, 4), booleans=(1,)),
    case("masked_fill_ with zero", lambda a, m: (a * 1).masked_fill_(m, 0), (5, 4), (5, 4), booleans=(1,)),
    case("masked_fill_ tensor", lambda a, m, v: (a * 1).masked_fill_(m, v), (5, 4), (5, 4), (), booleans=(1,)),
    case("copy_", lambda a, b: (a * 1).copy_(b), (5, 4), (5, 4)),
    case("copy_ broadcast", lambda a, b: (a * 1).copy_(b), (5, 4), (4,)),
    case("copy_ to int", lambda a, b: (a * 3).int().copy_(b * 3), (5, 4), (5, 4), grad=False),
    case("operators with numbers", lambda a: aten.div_.Scalar(aten.mul_.Scalar(aten.add_.Scalar(a * 1, 2), 3), 4), (5, 4)),
    case("fill_ tensor", lambda a, b: (a * 1).fill_(b), (5, 4), ()),
]  # fmt: skip

MATRICES = [
    case("mm", lambda a, b: a @ b, (5, 7), (7, 3)),
    case("mm even", lambda a, b: a @ b, (8, 4), (4, 12)),
    case("mm transposed", lambda a, b: a @ b.t(), (5, 7), (3, 7)),
    case("bmm", torch.bmm, (3, 5, 7), (3, 7, 2)),
    case("matmul", lambda a, b: a @ b, (3, 5, 7), (7, 2)),
    case("matmul 4-D", lambda a, b: a @ b, (2, 3, 5, 7), (2, 3, 7, 2)),
    case("mv", torch.mv, (5, 7), (7,)),
    case("dot", torch.dot, (7,), (7,)),
    case("addmm", torch.addmm, (3,), (5, 7), (7, 3)),
    case("addmm scaled", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (5, 3), (5, 7), (7, 3)),
    case("baddbmm", torch.baddbmm, (3, 5, 2), (3, 5, 7), (3, 7, 2)),
    case("linear", F.linear, (5, 3, 7), (6, 7), (6,)),
    case("linear no bias", F.linear, (5, 3, 7), (6, 7)),
    case("linear 2-D", F.linear, (5, 7), (6, 7), (6,)),
    case("linear vector", F.linear, (7,), (6, 7), (6,)),
    case("cdist of no rows", torch.cdist, (5, 3), (1, 0, 3)),
    case(
        "lu_solve",
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a @ a.mT + 1), b, left=False),
        (3, 3),
        (2, 3),
    ),
    case("einsum", lambda a, b: torch.einsum("bik,bjk->bij", a, b), (2, 5, 4), (2, 3, 4)),
]

REDUCTIONS = [
    case("histc", lambda x: torch.histc(x, 4, -1.0, 1.0), (5, 4), grad=False),
    case("histc of all", lambda x: torch.histc(x, 4), (5, 4), grad=False),
    case("aminmax", lambda x: torch.stack(torch.aminmax(x)), (5, 4), grad=AMINMAX),
    case("aminmax dim", lambda x: torch.cat(torch.aminmax(x, dim=-1, keepdim=True)), (5, 4), grad=AMINMAX),
    case("trace", torch.trace, (5, 7)),
    case("bincount", lambda i, w: torch.bincount(i, w, 3), (7,), (7,), integers={0: 9}, grad=False),
    case("bincount of ones", torch.bincount, (7,), integers={0: 9}, grad=False),
    case("sum", lambda a: a.sum(), (5, 4)),
    case("sum dim", lambda a: a.sum(0), (5, 4)),
    case("sum keep", lambda a: a.sum(1, True), (5, 4)),
    case("sum dims", lambda a: a.sum((0, -1)), (5, 4, 3)),
    case("sum of bools", lambda m: m.sum(0), (5, 4), booleans=(0,), grad=False),
    case("mean", lambda a: a.mean(), (5, 4)),
    case("mean dim", lambda a: a.mean(0), (5, 4)),
    case("mean keep", lambda a: a.mean((0, 1), True), (5, 4, 3)),
    case("mean of one row", lambda a: a.mean(0), (1, 4)),
    case("mean dtype", lambda a: a.mean(0, dtype=torch.float64), (5, 4)),
    case("amax", lambda a: a.amax(0), (5, 4)),
    case("amin", lambda a: a.amin((0, 1), True), (5, 4)),
    case("amax of one row", lambda a: a.amax(0), (1, 4)),
    case("max", lambda a: a.max(), (5, 4)),
    case("min", lambda a: a.min(), (5, 4)),
    case("max dim", lambda a: a.max(1)[0], (5, 4)),
    case("min dim", lambda a: a.min(0, True)[0], (5, 4)),
    case("prod", lambda a: a.prod(), (5, 4), grad=False),
    case("any", lambda m: m.any(), (5, 4), booleans=(0,), grad=False),
    case("any dim", lambda m: m.any(0), (5, 4), booleans=(0,), grad=False),
    case("any dims", lambda m: torch.any(m, (0, 1)), (5, 4), booleans=(0,), grad=False),
    case("all", lambda m: m.all(), (5, 4), booleans=(0,), grad=False),
    case("all dim", lambda m: m.all(1, True), (5, 4), booleans=(0,), grad=False),
    case("all dims", lambda m: torch.all(m, (0, 1)), (5, 4), booleans=(0,), grad=False),
    case("norm", lambda a: torch.linalg.vector_norm(a), (5, 4)),
    case("norm 1", lambda a: torch.linalg.vector_norm(a, 1, 0), (5, 4)),
    case("norm inf", lambda a: torch.linalg.vector_norm(a, float("inf"), 1), (5, 4)),
    case("norm inf of one row", lambda a: torch.linalg.vector_norm(a, float("inf"), 0), (1, 4)),
    case("norm -1 of one row", lambda a: torch.linalg.vector_norm(a, -1, 0), (1, 4)),
    case("norm 3", lambda a: torch.linalg.vector_norm(a, 3, (0, 1), True), (5, 4)),
    case("norm old of all", _aten("norm.Scalar", 3), (5, 4)),
    case("norm old", _aten("norm.ScalarOpt_dim", 2, [0]), (5, 4)),
    case("norm old inf", _aten("norm.ScalarOpt_dim", float("inf"), [1], True), (5, 4)),
    case("norm 0", lambda a: torch.linalg.vector_norm(a, 0, 0), (5, 4), grad=False),
    case("cumsum", lambda a: a.cumsum(0), (5, 4)),
    case("cumprod", lambda a: a.cumprod(1), (5, 4), grad=False),
    case("logcumsumexp", lambda a: a.logcumsumexp(0), (5, 4), grad=False),
    case("sort", lambda a: a.sort(0)[0], (5, 4), grad=False),
    case("argmax", lambda a: a.argmax(0), (5, 4), grad=False),
    case("argmax of all", lambda a: a.argmax(), (5, 4), grad=False),
    case("argmin", lambda a: a.argmin(1, True), (5, 4), grad=False),
    case("argmax of equal ones", lambda i: i.argmax(1), (3, 9), integers={0: 3}, grad=False),
    case("argmin of all equal ones", lambda i: i.argmin(), (5, 4), integers={0: 3}, grad=False),
    case("place of max", lambda i: i.max(0, True)[1], (9, 2), integers={0: 3}, grad=False),
    case("cumsum of integers", lambda i: i.cumsum(1), (3, 5), integers={0: 9}, grad=False),
    case("topk", lambda a: a.topk(2, 0)[0], (5, 4), grad=False),
    case("tril triu", lambda a: a.tril() + a.triu(1) * 2, (3, 5, 4)),
    case("var", lambda a: a.var(0), (5, 4)),
    case("logsumexp", lambda a: a.logsumexp(1), (5, 4)),
]

VIEWS = [
    case("view as integers", lambda x: x.view(torch.int32), (5, 7), grad=False, partial=False),
    case("view as bytes", lambda x: x.view(torch.uint8), (5, 7), grad=False, partial=False),
    case("view flat", lambda a: a.view(20), (5, 4)),
    case("view split", lambda a: a.view(2, 2, 3, 2), (4, 6)),
    case("view regroup", lambda a: a.view(6, 4), (4, 6)),
    case("view -1", lambda a: a.view(-1, 4), (2, 3, 4)),
    case("view merge", lambda a: a.view(8, 3), (2, 4, 3)),
    case("view ones", lambda a: a.view(5, 1, 4), (5, 4)),
    case("view no elements", lambda a: a.view(4, 0), (0, 4)),
    case("view scalar", lambda a: a.view(()), (1, 1)),
    case("reshape transposed", lambda a: a.t().reshape(20), (5, 4)),
    case("reshape whole", _inferred(lambda a: a.reshape(4, 5)), (5, 4), grad=False),
    case("flatten", lambda a: a.flatten(1), (5, 2, 3)),
    case("flatten leading", lambda a: a.flatten(0, 1), (4, 3, 2)),
    case("unflatten", lambda a: a.unflatten(0, (4, 2)), (8, 3)),
    case("heads", lambda a: a.view(3, 5, 4, 2).transpose(1, 2), (3, 5, 8)),
    case("heads back", lambda a: a.transpose(1, 2).reshape(3, 5, 8), (3, 4, 5, 2)),
    case("transpose", lambda a: a.transpose(0, 2), (5, 4, 3)),
    case("permute", lambda a: a.permute(2, 0, 1), (5, 4, 3)),
    case("t", lambda a: a.t(), (5, 4)),
    case("t of a vector", lambda a: a.t(), (5,)),
    case("expand", lambda a: a.expand(3, 5, 4), (5, 1)),
    case("expand -1", lambda a: a.expand(-1, 4), (5, 1)),
    case("unsqueeze", lambda a: a.unsqueeze(1), (5, 4)),
    case("unsqueeze last", lambda a: a.unsqueeze(-1), (5, 4)),
    case("squeeze", lambda a: a.squeeze(1), (5, 1, 4)),
    case("squeeze all", lambda a: a.squeeze(), (1, 5, 1)),
    case("squeeze dims", lambda a: a.squeeze((0, 2)), (1, 5, 1)),
    case("slice", lambda a: a[1:4], (5, 4)),
    case("slice columns", lambda a: a[:, 1:3], (5, 4)),
    case("slice everything", lambda a: a[:, :], (5, 4)),
    case("slice step", lambda a: a[::2], (5, 4)),
    case("select", lambda a: a[2], (5, 4)),
    case("select last", lambda a: a[:, -1], (5, 4)),
    case("split", lambda a: torch.cat(a.split(2, 1)[::-1], 1), (5, 6)),
    case("split uneven", lambda a: a.split([2, 3])[1], (5, 4)),
    case("one of a split", lambda a: a.split(2, 1)[0], (5, 6)),
    case("chunk", lambda a: a.chunk(2, 0)[0], (5, 4)),
    case("unbind", lambda a: torch.stack(a.unbind(1)), (5, 3)),
    case("block_diag", lambda a, b, c: torch.block_diag(a, b, a, c), (5, 4), (3,), ()),
    case("cat", lambda a, b: torch.cat([a, b]), (5, 4), (3, 4)),
    case("cat columns", lambda a, b: torch.cat([a, b], 1), (5, 4), (5, 3)),
    case("stack", lambda a, b: torch.stack([a, b], 1), (5, 4), (5, 4)),
    case("zeros_like", lambda a: torch.zeros_like(a) + torch.ones_like(a) + torch.full_like(a, 2.0), (5, 4), grad=False),
    case("new", lambda a: a.new_zeros(5, 4) + a.new_ones(5, 4) + a.new_full((5, 4), 2.0), (5, 4), grad=False),
    case("new_empty", lambda a: a.new_empty(5, 4).fill_(2.0), (5, 4), grad=False),
    case("new of another shape", lambda a: a.new_zeros(3) + a.new_ones(3), (5, 4), grad=False),
    case("slice_backward", _aten("slice_backward.default", [7, 4], 0, 1, 6, 1), (5, 4)),
    case("slice_backward of all", _aten("slice_backward.default", [5, 4], 0, 0, 2**63 - 1, 1), (5, 4)),
    case("slice_scatter of all", _aten("slice_scatter.default", dim=0, start=0, end=5), (5, 4), (5, 4)),
    case("select_backward", _aten("select_backward.default", [5, 3, 4], 1, 2), (5, 4)),
]  # fmt: skip

NETWORKS = [
    case("softmax", lambda a: torch.softmax(a, 1), (5, 4)),
    case("softmax rows", lambda a: torch.softmax(a, 0), (5, 4)),
    case("softmax of masked rows", _aten("_safe_softmax.default", 1), (5, 4)),
    case("attention of matrix products", _by_matrix_products, (2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
    case("log_softmax", lambda a: F.log_softmax(a, -1), (5, 7)),
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), (5, 3, 6), (6,), (6,)),
    case("layer_norm weight", lambda x, w: F.layer_norm(x, (6,), w), (5, 3, 6), (6,)),
    case("layer_norm bare", lambda x: F.layer_norm(x, (3, 6)), (5, 3, 6)),
    case("batch_norm", _with_statistics(partial(F.batch_norm, training=True)), (4, 3, 5), (3,), (3,), grad=False, positive=True),
    case("instance_norm", _with_statistics(F.instance_norm), (4, 8, 2, 4), (8,), (8,), grad=False, positive=True),
    case("embedding", lambda w, i: F.embedding(i, w), (7, 4), (3, 5), integers={1: 7}),
    case("embedding padding", lambda w, i: F.embedding(i, w, padding_idx=2), (7, 4), (5,), integers={1: 7}),
    case("embedding by frequency", lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), (4, 3), (3, 5), integers={1: 4}),
    case("nll mean", lambda x, t: F.nll_loss(x, t), (5, 4), (5,), integers={1: 4}),
    case("nll sum", lambda x, t: F.nll_loss(x, t, reduction="sum"), (5, 4), (5,), integers={1: 4}),
    case("nll none", lambda x, t: F.nll_loss(x, t, reduction="none"), (5, 4), (5,), integers={1: 4}),
    case("nll ignore", lambda x, t: F.nll_loss(x, t, ignore_index=1), (5, 4), (5,), integers={1: 4}),
    case("nll of images", lambda x, t: F.nll_loss(x, t), (3, 4, 5, 2), (3, 5, 2), integers={1: 4}),
    case("nll of images, each", lambda x, t: F.nll_loss(x, t, reduction="none", ignore_index=1), (3, 4, 5, 2), (3, 5, 2), integers={1: 4}),
    case("nll of images, weight", lambda x, t, w: F.nll_loss(x, t, w.detach() ** 2, reduction="sum"), (3, 4, 5, 2), (3, 5, 2), (4,), integers={1: 4}),
    case("nll weight", lambda x, t, w: F.nll_loss(x, t, w.detach() ** 2), (5, 4), (5,), (4,), integers={1: 4}),
    case("nll one row", lambda x, t: F.nll_loss(x, t), (4,), (), integers={1: 4}),
    case("cross_entropy", lambda x, t: F.cross_entropy(x, t), (7, 4), (7,), integers={1: 4}),
    case("cross_entropy smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (7, 4), (7,), integers={1: 4}),
    case("embedding_bag", lambda w, i, o: F.embedding_bag(i, w, o.sort()[0] * 0), (4, 3), (5,), (2,), integers={1: 4, 2: 1}),
    case("embedding_bag of largest", lambda w, i, o: F.embedding_bag(i, w, o.sort()[0] * 0, mode="max"), (4, 3), (5,), (2,), integers={1: 4, 2: 1}),
    case("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), (5, 3, 4), (5, 1, 1)),
    case("weight_norm last", lambda v, g: torch._weight_norm(v, g, 1), (5, 3), (1, 3)),
    case("mse", F.mse_loss, (5, 4), (5, 4)),
    case("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
    case("attention causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (3, 2, 5, 8), (3, 2, 5, 8), (3, 2, 5, 8)),
    case("attention mask", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), (2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), (5, 6), booleans=(3,)),
    case("solve with one matrix of many", torch.linalg.solve, (2, 1, 3, 3), (4, 3, 2)),
    case("solve a batch", lambda a, b: torch.linalg.solve(a, b, left=False), (3, 3), (4, 2, 3)),
    case("attention mask of a batch", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), (2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), (2, 1, 1, 6), booleans=(3,)),
    *[
        case(f"inference of attention, {name}", run, (3, 5, 8), (24, 8), (24,), (8, 8), (8,), *mask, grad=False, booleans=(5,))
        for name, run, mask in (
            ("shares", lambda x, *w: _attention(x, *w), ()),
            ("shares of heads", lambda x, *w: _attention(x, *w, None, True, False), ()),
            ("no shares", lambda x, *w: _attention(x, *w, None, False), ()),
            ("mask", lambda x, *w: _attention(x, *w, False, True, 0), ((5, 5),)),
            ("padding", lambda x, *w: _attention(x, *w, True, True, 1), ((3, 5),)),
            ("mask for each head", lambda x, *w: _attention(x, *w, False, True, 2), ((3, 2, 5, 5),)),
        )
    ],
    *[
        case(f"inference of a layer, {name}", run, (3, 5, 8), (24, 8), (24,), (8, 8), (8,), (8,), (8,), (6, 8), (6,), (8, 6), *mask, grad=False, booleans=(10,))
        for name, run, mask in (
            ("plain", lambda x, *w: _encoder_layer(x, *w), ()),
            ("mask", lambda x, *w: _encoder_layer(x, *w, 0), ((5, 5),)),
            ("padding", lambda x, *w: _encoder_layer(x, *w, 1), ((3, 5),)),
            ("mask for each head", lambda x, *w: _encoder_layer(x, *w, 2), ((3, 2, 5, 5),)),
        )
    ],
    case("rounded to numbers of a type", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 15), (5, 3)),
    case("rounded by a tensor", lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s.detach().abs()[0], z[0].int(), 0, 15), (5, 3), (1,), (1,), integers={2: 7}),
    case("rounded by a row", lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s.detach().abs(), z.int(), 0, 15), (5, 3), (1,), (1,), integers={2: 7}, grad=False),
    *[
        case(f"rounded by channel {axis}", lambda x, s, z, axis=axis: torch.fake_quantize_per_channel_affine(x, s.detach().abs(), z.int(), axis, 0, 15), (5, 7, 3), (n,), (n,), integers={2: 7})
        for axis, n in enumerate((5, 7, 3))
    ],
    case("rounded by what is learned", lambda x, s, z: torch._fake_quantize_learnable_per_tensor_affine(x, s.abs() + 0.1, z, -8, 7, 0.5), (5, 7), (1,), (1,)),
    case("rounded by what channels learn", lambda x, s, z: torch._fake_quantize_learnable_per_channel_affine(x, s.abs() + 0.1, z, 1, -8, 7, 0.5), (3, 5, 2), (5,), (5,)),
    case("affine grid", lambda t: F.affine_grid(t, (5, 3, 4, 2), align_corners=False), (5, 2, 3)),
    case("affine grid of points", lambda t: F.affine_grid(t, (3, 2, 2, 3, 4), align_corners=True), (3, 3, 4)),
    case("scaled product", lambda a, b, s, t: _scaled(a, b, s[0, 0], t[0, 0]), (5, 16), (16, 16), (5, 1), (1, 16), grad=False),
    *([case("scaled product, row by row", _scaled, (5, 16), (16, 16), (5, 1), (1, 16), grad=False)] if known("scales of rows") else []),
    case("grouped products, rows", lambda a, b, o: torch._grouped_mm(a, b, _ends(o, 7)), (7, 12), (3, 12, 20), (3,), integers={2: 7}, grad=False),
    case("grouped products, columns", lambda a, b, o: torch._grouped_mm(a, b, _ends(o, 12)), (3, 5, 16), (16, 12), (3,), integers={2: 12}, grad=False),
    case("grouped products, sums", lambda a, b, o: torch._grouped_mm(a, b, _ends(o, 12)), (5, 12), (12, 16), (3,), integers={2: 12}, grad=False),
    case("grouped products, batches", lambda a, b: torch._grouped_mm(a, b), (3, 5, 12), (3, 12, 16), grad=False),
    case("grouped products, trained", lambda a, b, o: torch._grouped_mm(a, b, _ends(o, 7)).sin(), (7, 12), (3, 12, 20), (3,), integers={2: 7}),
    case("mlp", lambda x, w, v: F.linear(F.gelu(F.linear(x, w)), v), (5, 7), (6, 7), (7, 6)),
    case("dropout off", lambda a: F.dropout(a, 0.0), (5, 4)),
]  # fmt: skip

GROUPS = {
    "pointwise": POINTWISE,
    "in_place": IN_PLACE,
    "matrices": MATRICES,
    "reductions": REDUCTIONS,
    "views": VIEWS,
    "networks": NETWORKS,
}
