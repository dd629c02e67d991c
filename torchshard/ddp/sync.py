"""Making ranks equal: the check that they hold the same model, and the broadcast of what rank 0 holds."""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from torchshard import _torch
from torchshard.buckets import BucketPolicy, Gradient, plan_buckets
from torchshard.comm.comparing import said_by_all
from torchshard.ddp.composite import parts
from torchshard.ddp.exchange import Exchange
from torchshard.errors import RankMismatchError


def describe(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """A line for each tensor: what has to be equal on all ranks."""
    return [
        f"{kind} {name}: {str(t.dtype).removeprefix('torch.')} of shape {list(t.shape)}, {_lies(t)}"
        for name, t in parts(named)
    ]


def _lies(t: torch.Tensor) -> str:
    return f"strides {list(t.stride())}" if t.layout is torch.strided else str(t.layout)


def verify_equal(lines: Sequence[str], exchange: Exchange) -> None:
    """Raise RankMismatchError, on every rank and with the first difference, unless all ranks give the same lines."""
    group, device = exchange.group, exchange.device
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    digests = [torch.empty_like(mine) for _ in range(group.size())]
    exchange.wait([dist.all_gather(digests, mine, group=group, async_op=True)], "what each rank is to train")
    if all(torch.equal(mine, other) for other in digests):
        return
    every: list[list[str]] = said_by_all(list(lines), device, group)
    others = [rank for rank, theirs in enumerate(every) if theirs != every[0]]
    left, right = _first_difference(every[0], every[others[0]])
    raise RankMismatchError(
        f"DistributedDataParallel: rank {', '.join(map(str, others))} is to train another model than rank 0",
        expected=f"rank 0: {left}",
        got=f"rank {others[0]}: {right}",
        fix="build the same module, with parameters of the same names, shapes and dtypes in the same order, and wrap "
        "it with the same arguments on every rank",
    )


def _first_difference(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    for one, other in zip(a, b, strict=False):
        if one != other:
            return one, other
    end = min(len(a), len(b))
    return (a[end] if end < len(a) else "nothing more", b[end] if end < len(b) else "nothing more")


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    cap: int = 250 << 20,
    wait: Callable[[Sequence[dist.Work]], None] = _wait,
    source: int = 0,
) -> None:
    """Overwrite the tensors with those of one rank, many in one message.

    Args:
        tensors, cap: as for Coalesced.
        group, wait, source: as for its `send`.
    """
    Coalesced(tensors, cap).send(group, wait, source)


class Coalesced:
    """Tensors that one rank sends to all others, many in one message, maybe again and again.

    Args:
        tensors: the same on all ranks, in dtype, device and shape.
        cap: bytes of one message, at least.

    Raises:
        RuntimeError: a tensor is sparse, or expanded, so that it cannot be written to; on all ranks.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], cap: int) -> None:
        tensors = [t for _, t in parts([("", t) for t in tensors])]
        for t in tensors:
            _require_own_memory(t)
        items = [Gradient(i, "", t.nbytes, (t.dtype, t.device)) for i, t in enumerate(tensors) if t.numel()]
        planned = plan_buckets(items, BucketPolicy(cap=cap, first=cap))
        self._messages = [[tensors[g.index] for g in bucket.gradients] for bucket in planned]

    def send(
        self, group: dist.ProcessGroup, wait: Callable[[Sequence[dist.Work]], None] = _wait, source: int = 0
    ) -> None:
        """Overwrite the tensors with those of one rank.

        Args:
            group: whose ranks take part.
            wait: what waits for a message.
            source: the rank within the group whose values count.
        """
        with torch.no_grad():
            for tensors in self._messages:
                chosen = [t.detach() for t in tensors]
                # As it lies in memory, unless its values are conjugated or negated only when they are read.
                if len(chosen) == 1 and chosen[0].is_contiguous() and not (chosen[0].is_conj() or chosen[0].is_neg()):
                    wait([_broadcast(chosen[0], group, source)])
                    continue
                if group.rank() != source:
                    flat = chosen[0].new_empty(sum([t.numel() for t in chosen]))
                    wait([_broadcast(flat, group, source)])
                    _torch.copy_all(chosen, _torch.unflatten(flat, chosen))
                    continue
                with _torch.without_autocast(chosen[0].device):  # a forward may run under it
                    flat = torch.cat([t.reshape(-1) for t in chosen])
                wait([_broadcast(flat, group, source)])


def _require_own_memory(t: torch.Tensor) -> None:
    if t.layout is not torch.strided or t.is_quantized:
        kind = "is quantized" if t.is_quantized else f"has the layout {t.layout}"
        raise RuntimeError(
            f"a parameter or buffer of shape {list(t.shape)} {kind}, which is not broadcast; "
            "leave it out: DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)"
        )
    if 0 in t.stride() and any(step == 0 < n - 1 for step, n in zip(t.stride(), t.shape, strict=True)):
        raise RuntimeError(
            f"a parameter or buffer of shape {list(t.shape)} with strides {list(t.stride())} has more than "
            "one element at the same place in memory, and cannot be made equal to another rank's: clone() it first"
        )


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> dist.Work:
    data = _torch.bytes_of(tensor)  # transports take few dtypes
    work: dist.Work | None = dist.broadcast(data, group=group, group_src=source, async_op=True)
    assert work is not None, "asynchronous collectives return their work"
    return work
