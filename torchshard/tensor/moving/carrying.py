"""Tensors taken from one holding to another: the copies that layout/holding.py plans, many tensors in one exchange."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard._torch import ends_graphs
from torchshard.comm.circle import Circle, circle_of, forget, this_rank
from torchshard.comm.neighbours import fetch, neighbours
from torchshard.comm.transfers import LARGE, Transfer, finish, start
from torchshard.errors import RankMismatchError, ShardingError, TorchshardError
from torchshard.layout.boxes import Box
from torchshard.layout.holding import Copy, Holding, lacking, receives, sends

AT_ONCE = 16 * 2**20
"""Bytes of the largest parts of the tensors of a batch, a larger tensor being one alone.

What exists for the journey only takes no more than that, or than the largest tensor.
"""

MOST = 64
"""Batches that are under way at once."""


@dataclass(slots=True)
class Job:
    """One tensor that changes its holding.

    Attributes:
        name: of the tensor; jobs of one call have different names.
        plan: what is done, in words that are the same on every rank.
        dtype: of its elements.
        source: who holds it.
        target: who shall.
        parts: what this rank holds.
        goals: memory for what it shall hold; written by `carry`.
        device: where messages lie while they travel.
        problem: what is wrong with it on this rank; then nothing is moved anywhere.
        group: a process group that may be of all ranks concerned.
        others: what the tensor is called besides.
        moves: whether a rank lacks something.
    """

    name: str
    plan: str
    dtype: torch.dtype
    source: Holding
    target: Holding
    parts: Sequence[tuple[Box, Tensor]]
    goals: Sequence[tuple[Box, Tensor]]
    device: torch.device
    problem: TorchshardError | None = None
    group: dist.ProcessGroup | None = None
    others: Sequence[str] = ()
    moves: bool = field(init=False)

    def __post_init__(self) -> None:
        """Work out whether a rank lacks something; the same on every rank."""
        self.moves = self.source is not self.target and lacking(self.source, self.target)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest part, before or after; the same on every rank."""
        return max(self.source.largest(), self.target.largest()) * self.dtype.itemsize

    @property
    def lines(self) -> list[str]:
        """What ranks compare: the plan, and a line for each other name."""
        return [f"{self.name}: {self.plan}", *[f"{name}: the same tensor as {self.name}" for name in self.others]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that talk about it; none where nothing has to move."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks})) if self.moves else ()


@ends_graphs("what moves between meshes is no part of a graph")
def carry(
    jobs: Sequence[Job],
    refusal: Exception | None = None,
    waiting: Iterable[tuple[tuple[int, ...], str]] = (),
) -> None:
    """Fill the goals of all jobs; every rank concerned calls this with the same jobs.

    Ranks compare what they are about to do before anything moves: where one has other names, shapes, dtypes or targets,
    or a problem of its own, all raise.

    Args:
        jobs: in any order.
        refusal: why this rank cannot do its part of them; raised, when the others know.
        waiting: ranks, ascending, that compare notes also where this one has no job for them, and the type of device:
            they may have, or wait for one that refuses before it has a job.

    Raises:
        RankMismatchError: the ranks are not about to do the same, or one is lost or refuses; names the tensor and the
            ranks.
        TorchshardError: the problem of a job on this rank.
    """
    circles: dict[tuple[tuple[int, ...], str], list[Job]] = {
        (ranks, device): [] for ranks, device in waiting if this_rank() in ranks and len(ranks) > 1
    }
    for job in sorted(jobs, key=lambda job: job.name):
        refusal = refusal or job.problem
        if not job.ranks or dist.get_rank() in job.ranks:
            _as_bytes(job)
            circles.setdefault((job.ranks, job.device.type), []).append(job)
    left = sorted(circles, reverse=True)
    try:
        if refusal is not None:
            raise refusal
        while left:
            ranks, device = left.pop()
            _carry(ranks, device, circles[ranks, device])
    except BaseException as error:  # an interrupt, too
        for ranks, device in reversed(left):  # they wait for this one
            if len(ranks) > 1:
                _circle(ranks, device, circles[ranks, device]).refuse(error)
        raise


def _circle(ranks: tuple[int, ...], device: str, jobs: Sequence[Job]) -> Circle:
    return circle_of(ranks, torch.device(device), next((job.group for job in jobs), None))


def _as_bytes(job: Job) -> None:
    """Move the bytes of a tensor whose elements torch cannot copy."""
    if job.problem is None and not _can_be_copied(job.dtype):
        job.dtype = torch.uint8
        job.parts, job.goals = ([(box, x.view(torch.uint8)) for box, x in held] for held in (job.parts, job.goals))


def by_bytes(change: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`change(*tensors)`, tensors of one dtype that are copied; their bytes are where torch cannot copy elements."""
    dtype = tensors[0].dtype
    if _can_be_copied(dtype):
        return change(*tensors)
    return change(*[x.view(torch.uint8) for x in tensors]).view(dtype)


@cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    """Whether torch copies and joins elements, as it does not those of less than eight bits."""
    x = torch.empty(2, 2, dtype=dtype)
    try:
        torch.cat([x, x], 1)
    except NotImplementedError:
        return dtype.itemsize > 1
    return True


def _carry(ranks: tuple[int, ...], device: str, jobs: Sequence[Job]) -> None:
    """The jobs of one circle: agree, then exchange batch by batch."""
    if not ranks:
        for job in jobs:
            _copy_own(job, dist.get_rank() if dist.is_initialized() else job.target.ranks[0])
        return
    circle = _circle(ranks, device, jobs)
    circle.agree("\n".join([line for job in jobs for line in job.lines]))
    if not jobs:
        return
    try:
        _exchange(jobs, circle)
    except RankMismatchError:
        forget(circle)
        raise
    except BaseException as error:  # of an interrupt, too, messages stay under way, for nobody
        circle.refuse(error, under_way=True)
        raise


def _exchange(jobs: Sequence[Job], circle: Circle) -> None:
    """Each rank gets what it lacks: out of the memory of the others where it can read that, else by messages."""
    if pids := neighbours(circle):
        into: dict[int, list[Tensor]] = {}
        for job in jobs:
            for peer, box in receives(job.source, job.target, circle.rank):
                goal = _view(job.goals, box)
                if peer == circle.rank:
                    goal.copy_(_view(job.parts, box))
                else:
                    into.setdefault(peer, []).append(goal)
        fetch(_sent(jobs, circle.rank), into, circle, pids)
    else:
        _send(jobs, circle)


def _sent(jobs: Sequence[Job], rank: int) -> dict[int, list[Tensor]]:
    """Rank -> the parts for it."""
    out: dict[int, list[Tensor]] = {}
    for job in jobs:
        for peer, box in sends(job.source, job.target, rank):
            out.setdefault(peer, []).append(_view(job.parts, box))
    return out


def _send(jobs: Sequence[Job], circle: Circle) -> None:
    """Batch by batch; the oldest are waited for where what exists for the journey only would take too much memory."""
    device, limit = circle.device, max(AT_ONCE, *[job.nbytes for job in jobs])
    under_way: deque[Transfer] = deque()
    for batch in batches(jobs):
        ahead = sum(job.nbytes for job in batch)
        while under_way and (len(under_way) >= MOST or sum(t.staged for t in under_way) + ahead > limit):
            finish([under_way.popleft()], device, circle)
        under_way.append(_start(batch, circle))
    finish(under_way, device, circle)


def _start(batch: Sequence[Job], circle: Circle) -> Transfer:
    into: dict[int, list[Tensor]] = {}
    joins: list[Callable[[], object]] = []
    landings = 0
    for job in batch:
        copies = receives(job.source, job.target, circle.rank)
        if (dim := _side_by_side(job, copies, circle)) is not None:
            slabs = [_slab(job, copy, circle.rank) for copy in copies]
            joins.append(partial(torch.cat, slabs, dim, out=job.goals[0][1]))
            landings += sum(x.nbytes for x, (peer, _) in zip(slabs, copies, strict=True) if peer != circle.rank)
            goals: Sequence[Tensor] = slabs
        else:
            goals = [_view(job.goals, box) for _, box in copies]
        for goal, (peer, box) in zip(goals, copies, strict=True):
            if peer != circle.rank:
                into.setdefault(peer, []).append(goal)
            elif dim is None:
                goal.copy_(_view(job.parts, box))
    return start(_sent(batch, circle.rank), into, circle.device, circle, joins, landings)


def _side_by_side(job: Job, copies: Sequence[Copy], circle: Circle) -> int | None:
    """The dim along which large parts lie side by side in the rows of the one goal, as columns do; else None.

    Such parts land apart and are joined: row by row, torch.cat takes two thirds of the time that it takes to copy each
    part on its own.
    """
    if len(job.goals) != 1 or any(copy.box.numel * job.dtype.itemsize < LARGE for copy in copies):
        return None
    [(whole, memory)] = job.goals
    cut = {d for copy in copies for d, n in enumerate(copy.box.size) if n != whole.size[d]}
    direct = memory.is_contiguous() and memory.device.type == job.device.type == circle.device.type
    if len(cut) != 1 or math.prod(whole.size[: min(cut)]) == 1 or not direct:
        return None
    return cut.pop()


def _slab(job: Job, copy: Copy, rank: int) -> Tensor:
    """A part for torch.cat: what this rank has itself, or memory for what another sends."""
    if copy.peer == rank:
        return _view(job.parts, copy.box).detach()
    return torch.empty(copy.box.size, dtype=job.dtype, device=job.device)


def batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """The jobs in groups of at most AT_ONCE bytes of their largest parts; the same groups on every rank."""
    batch: list[Job] = []
    size = 0
    for job in jobs:
        if batch and size + job.nbytes > AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += job.nbytes
    yield batch


def _copy_own(job: Job, rank: int) -> None:
    for _, box in receives(job.source, job.target, rank):
        _view(job.goals, box).copy_(_view(job.parts, box))


def _view(held: Sequence[tuple[Box, Tensor]], box: Box) -> Tensor:
    """The part that `box` names, of whichever tensor holds it."""
    for outer, tensor in held:
        if all(o <= b and b + m <= o + n for o, n, b, m in zip(*outer, *box, strict=True)):
            return tensor[box.within(outer)]
    raise ShardingError("A part is not where the tensor's description says.", expected=box, got=[b for b, _ in held])
