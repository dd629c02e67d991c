"""The four operators that the pass puts into backward graphs. They find out at run time whose gradients they carry.

    open_bucket     memory for the gradients of some graph inputs, side by side
    product_into    a matrix product, or a batch of them, written or added to its slot
    rows_into       rows written or added to a slot, each where its index says
    launch_bucket   all gradients of the bucket are there: the others are copied in, and the reduction starts

A graph holds no module, no process group and no number of ranks, so that a cached one serves any wrapper. Without a
wrapper at work, the bucket is plain memory and the gradients in it are the local ones.
"""

from collections.abc import Sequence
from functools import partial
from operator import methodcaller

import torch

from torchshard import _torch
from torchshard.compiler.call import Call, current_call

_LARGE = 16384
"""Elements. Gradients from here on are scaled while they are copied; others go together, in two calls for all."""

_address = methodcaller("data_ptr")

_SCHEMAS = (
    "open_bucket(int bucket, int numel, ScalarType dtype, Device device, int[] params) -> Tensor",
    "product_into(Tensor a, Tensor b, bool first, int bucket, int slot, Tensor(a!) out) -> ()",
    "rows_into(Tensor index, Tensor rows, bool first, int bucket, int slot, Tensor(a!) out) -> ()",
    "launch_bucket(Tensor(a!) flat, Tensor(b!) order, Tensor[] views, Tensor[] gradients, int[] slots, int own, "
    "int bucket) -> ()",  # own: so many of the gradients, from the first, are results of the graph; else their slots
)
_library = torch.library.Library("torchshard", "FRAGMENT")
for _schema in _SCHEMAS:
    # Whatever the strides: where inductor thinks that others are needed, it hands over a copy, also of what is written.
    _library.define(_schema, tags=(torch.Tag.flexible_layout,))

OPEN, PRODUCT_INTO, ROWS_INTO, LAUNCH = (
    torch.ops.torchshard.open_bucket.default,
    torch.ops.torchshard.product_into.default,
    torch.ops.torchshard.rows_into.default,
    torch.ops.torchshard.launch_bucket.default,
)


def _open(bucket: int, numel: int, dtype: torch.dtype, device: torch.device, params: Sequence[int]) -> torch.Tensor:
    call = current_call()
    flat = call.open(bucket, params, dtype) if call else None
    if flat is None:
        return torch.empty(numel, dtype=dtype, device=device)
    assert flat.numel() == numel, "graph and reducer place gradients by the same arithmetic"
    return flat


def _fake_open(
    bucket: int, numel: int, dtype: torch.dtype, device: torch.device, params: Sequence[int]
) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _factors(call: Call | None, bucket: int, slot: int) -> tuple[float, float]:
    """Alpha and beta: a gradient is written as alpha times itself plus beta times what lies in its slot."""
    return call.factors(bucket, slot) if call else (1.0, 0.0)


def _product_into(a: torch.Tensor, b: torch.Tensor, first: bool, bucket: int, slot: int, out: torch.Tensor) -> None:
    alpha, beta = _factors(current_call(), bucket, slot)
    beta = beta if first else 1.0
    if alpha == 1.0 and beta == 0.0:
        (torch.mm if out.ndim == 2 else torch.bmm)(a, b, out=out)
    else:
        (torch.addmm if out.ndim == 2 else torch.baddbmm)(out, a, b, beta=beta, alpha=alpha, out=out)


def _rows_into(index: torch.Tensor, rows: torch.Tensor, first: bool, bucket: int, slot: int, out: torch.Tensor) -> None:
    alpha, beta = _factors(current_call(), bucket, slot)
    beta = beta if first else 1.0
    if beta == 0.0:
        out.zero_()
    elif beta != 1.0:
        out.mul_(beta)
    out.index_add_(0, index.reshape(-1), rows.reshape(-1, *out.shape[1:]), alpha=alpha)


def _launch(
    flat: torch.Tensor,
    order: torch.Tensor,
    views: list[torch.Tensor],
    gradients: list[torch.Tensor],
    slots: list[int],
    own: int,
    bucket: int,
) -> None:
    call, start = current_call(), flat.data_ptr()
    end = start + flat.nbytes
    addresses = [*map(_address, views)]
    inside = start <= min(addresses, default=start) and max(addresses, default=start) < end
    if not inside:
        assert all(start <= view.data_ptr() < end or not view.numel() for view in views), "slots lie in their bucket"
    common = call.common_factors(bucket) if call else (1.0, 0.0)
    if common is not None and len(gradients) == len(views) and max(map(torch.Tensor.numel, gradients)) < _LARGE:
        _torch.copy_all([*map(views.__getitem__, slots)], gradients)
        if common != (1.0, 0.0):
            flat.mul_(common[0])
    else:
        _copy_in(call, views, gradients, slots, bucket)
    if call:
        call.launch(bucket, views, partial(_results, views, gradients[:own], slots))


def _results(views: list[torch.Tensor], own: list[torch.Tensor], slots: list[int]) -> list[torch.Tensor]:
    """What the graph returns as the gradient in each slot."""
    returned = dict(zip(slots, own, strict=False))
    return [returned.get(slot, view) for slot, view in enumerate(views)]


def _copy_in(
    call: Call | None, views: list[torch.Tensor], gradients: list[torch.Tensor], slots: list[int], bucket: int
) -> None:
    """Those that were not written to their slots, each as it has to be."""
    together: dict[tuple[float, float], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for slot, gradient in zip(slots, gradients, strict=True):
        alpha, beta = _factors(call, bucket, slot)
        if gradient.numel() >= _LARGE and beta == 0.0:
            torch.mul(gradient, alpha, out=views[slot])
            continue
        places, small = together.setdefault((alpha, beta), ([], []))
        places.append(views[slot])
        small.append(gradient)
    for (alpha, beta), (places, small) in together.items():
        _torch.take_all(places, small, alpha, beta)


def _nothing(*args: object) -> None:
    """For traces: what the operator changes is said in its schema."""


for _name, _run, _fake in (
    ("open_bucket", _open, _fake_open),
    ("product_into", _product_into, _nothing),
    ("rows_into", _rows_into, _nothing),
    ("launch_bucket", _launch, _nothing),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchshard::{_name}", _fake, lib=_library)
