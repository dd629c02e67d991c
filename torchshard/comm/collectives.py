"""Collectives on plain tensors with pieces of unequal size, traceable by torch.compile.

Each takes the lengths of all pieces, which every rank knows by arithmetic, so that nothing but data is exchanged.
Pieces that are short travel padded where the collective wants equal ones. Results are contiguous.

Those that redistribution needs come in two forms: `start_all_gather(...)` sends and returns at once, and
`all_gather(...)` is the same with `.wait()`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from torchshard._torch import flatten, is_traced, unflatten
from torchshard.comm.group import Group
from torchshard.comm.living import living, living_in_graphs
from torchshard.comm.nearby import nearby
from torchshard.comm.reducing import only_gloo_reduces, prepare, reduced_bits
from torchshard.comm.transport import Sender, Transport, waited
from torchshard.comm.travelling import (
    CARRIED,
    by_seat,
    carried,
    carried_out,
    cut,
    dense,
    joined,
    numel,
    one_after_another,
    padded,
    uncarried,
    unpadded,
)

SMALL = 16 * 1024
"""Bytes up to which a tensor is sent with others: a link carries them while a collective starts."""

_Result = TypeVar("_Result")


@dataclass(slots=True)
class Started(Generic[_Result]):
    """A collective under way.

    Attributes:
        group: who takes part.
        coming: tensors that the transport fills; not to be read before they have been waited for.
        finish: makes the result of them; touches nothing but this rank's memory.
    """

    group: Group
    coming: Sequence[Tensor]
    finish: Callable[[Sequence[Tensor]], _Result]

    def wait(self) -> _Result:
        """The result, once it is here. To be called once.

        Raises:
            RankMismatchError: a rank is lost; names it.
        """
        return self.finish([waited(x, self.group) for x in self.coming])


def all_gather(x: Tensor, dim: int, lengths: Sequence[int], group: Group) -> Tensor:
    """The pieces of all ranks, joined along `dim`.

    Args:
        x: this rank's piece; contiguous or not.
        dim: along which the pieces follow one another.
        lengths: length of every piece along `dim`, in the order of the line.
        group: who takes part.
    """
    return start_all_gather(x, dim, lengths, group).wait()


def start_all_gather(x: Tensor, dim: int, lengths: Sequence[int], group: Group) -> Started[Tensor]:
    """all_gather, without waiting."""
    x = carried_out(x)
    if x.dtype not in CARRIED:
        return _then_uncarried(start_all_gather(carried(x), dim, lengths, group), x.dtype)
    longest = max(lengths)
    piece = dense(padded(x, dim, longest))
    rows = [piece.shape[0]] * group.size
    coming = _by(group, piece).all_gather(piece)
    if group.seats is None and dim == 0 and min(lengths) == longest:
        return Started(group, (coming,), _first)

    def join(got: Sequence[Tensor]) -> Tensor:
        pieces, seats = got[0].split_with_sizes(rows), group.seats or range(group.size)
        return joined(torch.cat, [unpadded(pieces[seat], dim, n) for seat, n in zip(seats, lengths, strict=True)], dim)

    return Started(group, (coming,), join)


def of_all_ranks(numbers: Sequence[int], device: torch.device, group: Group) -> list[list[int]]:
    """The whole numbers that each rank says, as many on all of them, in the order of the line.

    Args:
        numbers: this rank's.
        device: of the group's tensors.
        group: who takes part.
    """
    mine = torch.tensor([list(numbers)], dtype=torch.int64, device=device)
    said: list[list[int]] = all_gather(mine, 0, [1] * group.size, group).tolist()
    return said


def start_all_to_all(
    x: Tensor, split: int, join: int, sent: Sequence[int], received: Sequence[int], group: Group
) -> Started[Tensor]:
    """Cut `x` along dim `split`, give each rank its block, and join what comes along dim `join`.

    Args:
        x: this rank's part.
        split: dim that is cut.
        join: dim along which blocks are joined.
        sent: length along `split` of the block for each rank.
        received: length along `join` of the block from each rank.
        group: who takes part.
    """
    x = carried_out(x)
    if x.dtype not in CARRIED:
        return _then_uncarried(start_all_to_all(carried(x), split, join, sent, received, group), x.dtype)
    packed, given = cut(x, split, sent, group)
    mine = list(x.shape)
    mine[split] = sent[group.position]
    started = _start_exchange(packed, given, [(*mine[:join], n, *mine[join + 1 :]) for n in received], group)
    return Started(group, started.coming, lambda got: joined(torch.cat, started.finish(got), join))


def all_to_all(x: Tensor, split: int, join: int, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """See start_all_to_all."""
    return start_all_to_all(x, split, join, sent, received, group).wait()


def exchange(blocks: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group) -> list[Tensor]:
    """Give each rank a block, and take one of the given shape from each; blocks may be empty.

    Args:
        blocks: one for each rank, in the order of the line, of one dtype.
        shapes: of what each rank gives to this one.
        group: who takes part.
    """
    return start_exchange(blocks, shapes, group).wait()


def start_exchange(blocks: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group) -> Started[list[Tensor]]:
    """exchange, without waiting."""
    blocks, dtype = [carried_out(b) for b in blocks], blocks[0].dtype
    if dtype not in CARRIED:
        pairs = (2,) if dtype.is_complex else ()
        started = start_exchange([carried(b) for b in blocks], [(*shape, *pairs) for shape in shapes], group)
        return Started(group, started.coming, lambda got: [uncarried(piece, dtype) for piece in started.finish(got)])
    blocks = by_seat(blocks, group)
    return _start_exchange(one_after_another(blocks), [block.numel() for block in blocks], shapes, group)


def _start_exchange(
    packed: Tensor, given: list[int], shapes: Sequence[Sequence[int]], group: Group
) -> Started[list[Tensor]]:
    """start_exchange of blocks that lie one after another, `given` elements for each rank of the process group."""
    taken = [numel(shape) for shape in by_seat(shapes, group)]

    def unpack(got: Sequence[Tensor]) -> list[Tensor]:
        pieces, seats = got[0].split_with_sizes(taken), group.seats or range(group.size)
        return [pieces[seat].view(*shape) for seat, shape in zip(seats, shapes, strict=True)]

    return Started(group, (_by(group, packed).all_to_all(packed, taken, given),), unpack)


def all_reduce(x: Tensor, op: str, group: Group) -> Tensor:
    """The reduction of all ranks' terms, on every rank; `op` is a name of layout/reductions.py."""
    return start_all_reduce(x, op, group).wait()


def start_all_reduce(x: Tensor, op: str, group: Group) -> Started[Tensor]:
    """all_reduce, without waiting."""
    x = carried_out(x)
    sender = _by(group, x)
    term, name, finish = prepare(x, op, group.size, sender.keeps_nans)
    if only_gloo_reduces(term, name):
        gathered = start_all_gather(term.unsqueeze(0), 0, [1] * group.size, group)
        return Started(group, gathered.coming, lambda got: finish(reduced_bits(gathered.finish(got), name)))
    return Started(group, (sender.all_reduce(dense(term), name),), lambda got: finish(got[0]))


def reduce_scatter(x: Tensor, op: str, dim: int, lengths: Sequence[int], group: Group) -> Tensor:
    """This rank's piece along `dim` of the reduction of all ranks' terms.

    Args:
        x: this rank's term.
        op: a name of layout/reductions.py.
        dim: along which the result is split.
        lengths: of the pieces, in the order of the line.
        group: who takes part.
    """
    return start_reduce_scatter(x, op, dim, lengths, group).wait()


def start_reduce_scatter(x: Tensor, op: str, dim: int, lengths: Sequence[int], group: Group) -> Started[Tensor]:
    """reduce_scatter, without waiting."""
    x = carried_out(x)
    term, name, finish = prepare(x, op, group.size, _by(group, x).keeps_nans)
    if only_gloo_reduces(term, name):
        blocks = term.split_with_sizes(list(lengths), dim)
        given = start_exchange(blocks, [blocks[group.position].shape] * group.size, group)
        return Started(group, given.coming, lambda got: finish(reduced_bits(given.finish(got), name)))
    part = _start_reduce_scatter(term, name, dim, lengths, group)
    return Started(group, part.coming, lambda got: finish(part.finish(got)))


def _start_reduce_scatter(x: Tensor, name: str, dim: int, lengths: Sequence[int], group: Group) -> Started[Tensor]:
    longest, mine = max(lengths), lengths[group.position]
    if dim == 0 and min(lengths) == longest and group.seats is None:
        return Started(group, (_by(group, x).reduce_scatter(dense(x), name),), _first)
    # The collective splits the first dim: the pieces have to lie one after another in it.
    pieces = [padded(piece, dim, longest) for piece in by_seat(x.split_with_sizes(list(lengths), dim), group)]
    packed = joined(torch.cat, pieces)
    coming = _by(group, packed).reduce_scatter(packed, name)
    return Started(group, (coming,), lambda got: unpadded(got[0], dim, mine).contiguous())


def _first(got: Sequence[Tensor]) -> Tensor:
    return got[0]


def _then_uncarried(started: Started[Tensor], dtype: torch.dtype) -> Started[Tensor]:
    return Started(started.group, started.coming, lambda got: uncarried(started.finish(got), dtype))


def scatter(x: Tensor, dim: int, lengths: Sequence[int], source: int, group: Group) -> Tensor:
    """This rank's piece along `dim` of what the rank at place `source` of the line has.

    Args:
        x: the whole, which counts on one rank only; of the same shape and dtype on all.
        dim: along which it is cut.
        lengths: of the pieces, in the order of the line.
        source: whose values count.
        group: who takes part.
    """
    if x.dtype not in CARRIED:
        return uncarried(scatter(carried(x), dim, lengths, source, group), x.dtype)
    shape = list(x.shape)
    shape[dim] = lengths[group.position]
    given, taken = [0] * group.size, [0] * group.size
    taken[_seat(source, group)], packed = numel(shape), x.new_empty(0)
    if group.position == source:
        packed, given = cut(carried_out(x), dim, lengths, group)
    return waited(_by(group, packed).all_to_all(packed, taken, given), group).view(shape)


def broadcast(x: Tensor, source: int, group: Group) -> Tensor:
    """The tensor of the rank at place `source` of the line, on every rank."""
    if x.dtype not in CARRIED:
        return uncarried(broadcast(carried(x), source, group), x.dtype)
    x = dense(x)
    return waited(_by(group, x).broadcast(x, _seat(source, group)), group)


def broadcast_all(tensors: Sequence[Tensor], source: int, group: Group) -> list[Tensor]:
    """The tensors of the rank at place `source` of the line, on every rank; small ones of a dtype in one message."""
    found, small = list(tensors), dict[torch.dtype, list[int]]()
    for k, x in enumerate(tensors):
        if x.nbytes <= SMALL and not x.dtype.is_complex:
            small.setdefault(x.dtype, []).append(k)
        else:
            found[k] = broadcast(x, source, group)
    for together in small.values():
        small_ones = [dense(tensors[k]) for k in together]
        for k, x in zip(together, unflatten(broadcast(flatten(small_ones), source, group), small_ones), strict=True):
            found[k] = x.clone()  # in memory of its own
    return found


def _by(group: Group, x: Tensor) -> Sender:
    """What sends such a tensor."""
    if (near := nearby(group, x)) is not None:
        return near
    if group.size > 1:
        (living_in_graphs if is_traced(x) else living)(group)
    return Transport(group)


def _seat(place: int, group: Group) -> int:
    """The rank in the process group of the one at a place of the line."""
    return group.seats[place] if group.seats else place
