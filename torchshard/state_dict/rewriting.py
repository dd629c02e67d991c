"""KeyRules for live tensors: plain ones are cut and joined by torch, DTensors where they are, without a full tensor."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.tensor as upstream
from torch import Tensor

from torchshard import keys
from torchshard._torch import ends_graphs
from torchshard.errors import ShardingError
from torchshard.keys.rules import Fuse, Split
from torchshard.layout.boxes import Box
from torchshard.layout.holding import Holding
from torchshard.layout.layout import contiguous_stride
from torchshard.state_dict.forms import mesh_of, require_no_parts
from torchshard.state_dict.trees import reached
from torchshard.tensor.dtensor import DTensor, wrap
from torchshard.tensor.layout import TensorLayout, layout_for
from torchshard.tensor.moving.carrying import Job, by_bytes, carry
from torchshard.tensor.owners import ours
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor
from torchshard.unsupported import unsupported


class _Tensors:
    """Tensors of torch, and DTensors, ours and torch's.

    What DTensors lack is fetched for many in one exchange: when all are known, or one of them is used for another.
    """

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._lacking: dict[int, Tensor] = {}  # by id: results whose memory is not filled yet

    def settle(self) -> None:
        """Fetch what is lacking; every rank does this at the same points, which follow from the rules and the keys."""
        jobs, self._jobs, self._lacking = self._jobs, [], {}
        carry(jobs)

    def refuse(self, error: Exception, waiting: Iterable[tuple[tuple[int, ...], str]]) -> NoReturn:
        """Raise what is wrong on this rank, when the others know that wait for it; see `carry`."""
        carry(self._jobs, error, waiting)
        raise error

    def _ready(self, *used: Tensor) -> None:
        if any(id(x) in self._lacking for x in used):
            self.settle()

    def _placed(self, like: Tensor, parts: Sequence[tuple[DTensor, tuple[int, int]]], made: TensorLayout) -> Tensor:
        job, ours = _job(f"renamed tensor {len(self._jobs)}", parts, made)
        self._jobs.append(job)
        result = _as(like, ours)
        self._lacking[id(result)] = result
        return result

    def ndim(self, x: Any) -> int | None:
        """As of keys.Arrays."""
        return x.ndim if isinstance(x, Tensor) else None

    def kind(self, x: Tensor) -> tuple[Any, tuple[int, ...]]:
        """As of keys.Arrays."""
        return x.dtype, tuple(x.shape)

    def cut(self, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        """As of keys.Arrays; plain results are copies, as parts of a state dict are saved and loaded alone."""
        self._ready(x)
        if (ours := _ours(x)) is None:
            return by_bytes(Tensor.clone, x.narrow(dim, start, length))
        source = ours._spec
        shape = (*source.shape[:dim], length, *source.shape[dim + 1 :])
        made = layout_for(source.sharding, shape, contiguous_stride(shape), source.dtype)
        return self._placed(x, [(ours, (dim, start))], made)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """As of keys.Arrays; DTensors are placed as the first of them is, Partial ones term by term."""
        self._ready(*parts)
        ours = [x for x in map(_ours, parts) if x is not None]
        if len(ours) < len(parts):
            return by_bytes(lambda *given: torch.cat(given, dim), *parts)
        _require_terms_alike([x._spec for x in ours])
        first = ours[0]._spec
        shape = (*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :])
        made = layout_for(first.sharding, shape, contiguous_stride(shape), first.dtype)
        shifted, at = [], 0
        for part in ours:
            shifted.append((part, (dim, -at)))
            at += part.shape[dim]
        return self._placed(parts[0], shifted, made)

    def transpose(self, x: Tensor) -> Tensor:
        """As of keys.Arrays."""
        self._ready(x)
        ours = _ours(x)
        return _as(x, by_bytes(lambda given: given.transpose(-1, -2).contiguous(), x if ours is None else ours))

    def same(self, a: Any, b: Any) -> bool:
        """As of keys.Arrays."""
        self._ready(a, b)
        return torch.equal(a, b) if type(a) is Tensor and type(b) is Tensor else bool(a == b)


class KeyRules(keys.KeyRules):
    """keys.KeyRules for tensors: plain ones, and DTensors, of which each rank fetches only what it lacks, all at once.

    Every rank of a DTensor's mesh applies the rules. The results carry no history.
    """

    @ends_graphs("a graph holds no state dict")
    def __call__(self, sd: Mapping[str, Any]) -> Any:
        """See keys.KeyRules."""
        once = copy.copy(self)  # what it finds out about keys, these rules know too
        once.arrays = tensors = _Tensors()
        with torch.no_grad():
            try:
                made = super(KeyRules, once).__call__(sd)
            except Exception as error:
                moves = any(isinstance(rule, Fuse | Split) for rule in self.rules)
                tensors.refuse(error, _holders(sd) if moves else ())
            tensors.settle()
        return made


def _holders(sd: Any) -> set[tuple[tuple[int, ...], str]]:
    """The ranks of each DTensor's mesh, ascending, and the type of device: they may be waiting for this one."""
    held = [(mesh.ranks, x.device.type) for _, x in reached(sd) if (mesh := mesh_of(x)) is not None]
    return {(tuple(sorted(ranks)), device) for ranks, device in held}


def _ours(x: Tensor) -> DTensor | None:
    """One of ours, or of torch's as ours; None for a plain tensor."""
    if isinstance(x, ShardedTensor):
        raise unsupported(
            "A ShardedTensor cannot be joined, cut or transposed.",
            got=f"shape {tuple(x.shape)}",
            fix="state_dict.to_dtensor(sd, mesh, placements) first",
        )
    if isinstance(x, upstream.DTensor):
        return ours(x)
    if isinstance(x, DTensor):
        return x.detach()  # type: ignore[return-value]
    require_no_parts(x)
    return None


def _as(x: Tensor, made: Tensor) -> Tensor:
    """Of the kind that `x` is."""
    return made.to_torch() if isinstance(x, upstream.DTensor) and isinstance(made, DTensor) else made


def _require_terms_alike(layouts: Sequence[TensorLayout]) -> None:
    """Check that no terms are joined with values, or with terms of another sum.

    Raises:
        ShardingError: the Partial axes of the layouts differ, or their meshes do where there are any.
    """
    kinds = {(x.mesh, *[(axis, x.placements[axis]) for axis in x.sharding.partial]) for x in layouts}
    if len(kinds) > 1 and any(x.sharding.partial for x in layouts):
        raise ShardingError(
            "Terms of a Partial tensor cannot be joined with values, or with terms of another kind.",
            expected="parts that are Partial alike, on one mesh, or not at all",
            got=", ".join(str(x.sharding) for x in layouts),
            fix="state_dict.to_dtensor(sd, mesh, placements, reduce_partial=True), or x.redistribute(placements=...),"
            " first",
        )


def _job(name: str, parts: Sequence[tuple[DTensor, tuple[int, int]]], made: TensorLayout) -> tuple[Job, DTensor]:
    """The DTensor of a layout that is made of others, whose boxes lie elsewhere in it; and what fills its memory.

    A Partial axis is moved along as a dim before the others, split by that axis: so each rank gets its own terms.
    """
    terms = made.sharding.partial
    shape = (*[made.mesh.shape[axis] for axis in terms], *made.shape)
    unsqueezed, here = (None,) * len(terms), dist.get_rank()
    held: list[tuple[int, Box]] = []
    mine: list[tuple[Box, Tensor]] = []
    for x, (dim, by) in parts:
        layout = x._spec
        for rank, box in zip(layout.mesh.ranks, _boxes(layout), strict=True):
            if (moved := _moved(box, dim + len(terms), by, shape)) is None:
                continue
            held.append((rank, moved[0]))
            if rank == here:
                mine.append((moved[0], x.to_local()[unsqueezed][moved[1].within(box)]))
    local = (mine[0][1] if mine else parts[0][0].to_local()).new_empty(made.local_shape)
    wanted = list(zip(made.mesh.ranks, _boxes(made), strict=True))
    goals = [(box, local[unsqueezed]) for rank, box in wanted if rank == here]
    source, target = Holding.of(shape, held), Holding.of(shape, wanted)
    plan = f"{made.dtype} of shape {made.shape}, made of {[x.shape for x, _ in parts]}"
    return Job(name, plan, made.dtype, source, target, mine, goals, local.device), wrap(local, made)


def _boxes(layout: TensorLayout) -> Iterator[Box]:
    """The boxes of all ranks, in a tensor that has a dim before the others for each Partial axis."""
    for at, box in zip(layout.mesh.coordinates(), layout.boxes(), strict=True):
        term = tuple([at[axis] for axis in layout.sharding.partial])
        yield Box(term + box.offset, (1,) * len(term) + box.size)


def _moved(box: Box, dim: int, by: int, shape: Sequence[int]) -> tuple[Box, Box] | None:
    """The part of a box that lies in a tensor of `shape` after a shift by `-by` along `dim`: there, and here."""
    there = Box(tuple([o - by if d == dim else o for d, o in enumerate(box.offset)]), box.size)
    kept = there.meet(Box((0,) * len(shape), tuple(shape)))
    if kept is None:
        return None
    return kept, Box(tuple([o + by if d == dim else o for d, o in enumerate(kept.offset)]), kept.size)
