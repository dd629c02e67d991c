"""The three operators that the pass puts into backward graphs. They find out at run time whose gradients they carry.

    open_bucket     memory for the gradients of some graph inputs, side by side
    mm_into         a matrix product written into its slot
    launch_bucket   all gradients of the bucket are there: the others are copied in, and the reduction starts

A graph holds no module, no process group and no number of ranks, so that a cached one serves any wrapper. Without a
wrapper at work, the bucket is plain memory and the gradients in it are the local ones.
"""

from collections.abc import Sequence

import torch

from torchshard.compiler.call import current_call

_library = torch.library.Library("torchshard", "FRAGMENT")
_library.define(
    "open_bucket(int bucket, int numel, ScalarType dtype, Device device, int[] params) -> Tensor",
)
_library.define("mm_into(Tensor a, Tensor b, int bucket, int slot, Tensor(a!) out) -> ()")
_library.define(
    "launch_bucket(Tensor(a!) flat, Tensor(b!) order, Tensor[] views, Tensor[] gradients, int[] slots, int bucket)"
    " -> ()"
)

OPEN, MM_INTO, LAUNCH = (
    torch.ops.torchshard.open_bucket.default,
    torch.ops.torchshard.mm_into.default,
    torch.ops.torchshard.launch_bucket.default,
)


def _open(bucket: int, numel: int, dtype: torch.dtype, device: torch.device, params: Sequence[int]) -> torch.Tensor:
    call = current_call()
    flat = call.open(bucket, params) if call else None
    if flat is None:
        return torch.empty(numel, dtype=dtype, device=device)
    assert flat.numel() == numel, "graph and reducer place gradients by the same arithmetic"
    return flat


def _fake_open(
    bucket: int, numel: int, dtype: torch.dtype, device: torch.device, params: Sequence[int]
) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _mm_into(a: torch.Tensor, b: torch.Tensor, bucket: int, slot: int, out: torch.Tensor) -> None:
    call = current_call()
    alpha, beta = call.factors(bucket, slot) if call else (1.0, 0.0)
    if alpha == 1.0 and beta == 0.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)


def _launch(
    flat: torch.Tensor,
    order: torch.Tensor,
    views: list[torch.Tensor],
    gradients: list[torch.Tensor],
    slots: list[int],
    bucket: int,
) -> None:
    call = current_call()
    for slot, gradient in zip(slots, gradients, strict=True):
        alpha, beta = call.factors(bucket, slot) if call else (1.0, 0.0)
        if beta == 0.0:
            torch.mul(gradient, alpha, out=views[slot])
        else:
            views[slot].mul_(beta).add_(gradient, alpha=alpha)
    if call:
        call.launch(bucket, views)


def _nothing(*args: object) -> None:
    """For traces: what the operator changes is said in its schema."""


for _name, _run, _fake in (
    ("open_bucket", _open, _fake_open),
    ("mm_into", _mm_into, _nothing),
    ("launch_bucket", _launch, _nothing),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchshard::{_name}", _fake, lib=_library)
