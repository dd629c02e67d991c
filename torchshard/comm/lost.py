"""Which ranks are lost: those that leave no sign in a store in which all others do."""

import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from torchshard import _torch
from torchshard.errors import RankMismatchError

NO_LOSS = RankMismatchError, NotImplementedError, torch.OutOfMemoryError
"""Kinds of RuntimeError that tell of something else than a lost rank."""

_LONGEST = 200
_NO_STORE = "nobody can be asked, as the store is gone; its rank has died (rank 0, unless the launcher keeps it)"
_TO_ANSWER = 3.0
"""Seconds in which every rank that waits for a collective sees that it is asked whether it lives."""


def raise_lost(group: dist.ProcessGroup, what: str, error: Exception) -> NoReturn:
    """A collective without an Agreement has failed: raise RankMismatchError with the ranks that do not answer.

    Others hear of it only when their own collective fails: those that still wait are named, too. Where all ranks have
    failed, none is lost, and the error is raised as it is.

    Args:
        group: whose collective it was.
        what: the collective, for the message.
        error: how it has failed.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        raise error
    silent, _ = answers(group, "failed", what, range(group.size()))
    if silent is None:
        raise error
    ranks = dist.get_process_group_ranks(group)
    place = "" if ranks == [*range(len(ranks))] else f" of a group; its ranks 0, 1, ... are {ranks} of the world"
    raise lost(what + place, group.rank(), group.size(), f"{silent}: lost, or still waiting", error, {}) from error


def answers(group: dist.ProcessGroup, place: str, what: str, ranks: Sequence[int]) -> tuple[str | None, dict[int, str]]:
    """Which ranks do not leave a sign in the group's store within some seconds, as this one does; else None.

    And what each of them waits for, if all do. One place serves all Agreements of the group, as ranks that have come
    apart may wait on behalf of different ones. Ranks may ask more than once: what they left the first time is no sign
    the second time.

    Args:
        group: whose collective has failed.
        place: in the store.
        what: this rank waits for.
        ranks: the numbers by which the ranks of the group go.
    """
    rank = ranks[group.rank()]
    silent, waits = set(ranks), dict[int, str]()
    try:
        store: Store = PrefixStore(f"torchshard/{_torch.group_name(group)}/{place}", _torch.group_store(group))
        store = PrefixStore(str(store.add(f"turns/{rank}", 1)), store)
        store.set(f"alive/{rank}", what)
        deadline = time.monotonic() + _TO_ANSWER
        while silent and time.monotonic() < deadline:
            time.sleep(0.02)
            silent = {other for other in silent if not store.check([f"alive/{other}"])}
        if not silent:
            waits |= {other: store.get(f"alive/{other}").decode() for other in ranks}
    except RuntimeError:  # after all have answered, the store may go with a rank
        if silent:
            return _NO_STORE, {}
    if not silent:
        return None, waits
    return f"no answer within {_TO_ANSWER:g} s from rank {', '.join(map(str, sorted(silent)))}", {}


def lost(
    what: str, rank: int, world: int, silent: str | None, error: Exception | None, waits: Mapping[int, str]
) -> RankMismatchError:
    """The error of a rank that waits in vain.

    Args:
        what: for what.
        rank: this one.
        world: how many there are.
        silent: what is said of those that do not answer; None if all do.
        error: how the collective failed.
        waits: what each rank waits for.
    """
    others = [f"rank {other} waits for {short(theirs)}" for other, theirs in waits.items() if theirs != what]
    if silent:
        do = "read the last words of that rank"
    elif others:
        do = "have all ranks run the same steps, in the same order"
    else:
        do = "mend what the transport does not take"
    return RankMismatchError(
        f"rank {rank} waited in vain for {what}",
        expected=f"{world} ranks that take part",
        got=silent or "\n".join(others[:5]) or f"every rank answers; {_said(error)}",
        fix=f"{do}; then start all ranks again, from a checkpoint",
    )


def _said(error: Exception | None) -> str:
    line = first_line(error)
    return f"the transport says: {line}" if line else "a connection between them has failed"


def first_line(error: BaseException | None) -> str:
    """What an error says first."""
    return short(next(iter(str(error or "").splitlines()), ""))


def short(line: str) -> str:
    """A line, cut where it is too long for a message."""
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."
