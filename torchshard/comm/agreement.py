"""Ranks that must issue the same collectives agree on their plans, once for each new plan.

Ranks that hold different plans would hang in a collective or mix up their data. So before a rank follows a plan that
is new to it, it compares notes with the others through the group's store and waits until all have come to the same
plan. A plan that all have agreed to is never compared again: following it costs a dictionary lookup. A rank that
merely builds its plan anew, with the same contents, asks nobody.

A rank may also turn to a new plan while the others go on with an old one. They do not look into the store then, but
get stuck in a collective that the first has not joined; `check`, called while waiting, sees what the first has
published, and declares the disagreement for all. In the same way ranks learn that another one is lost.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from torchshard import _torch
from torchshard.comm.lost import NO_LOSS, answers, first_line, lost, short
from torchshard.errors import RankMismatchError

_ALONE, _BESIDE, _MOST_BESIDE = "copies", -1, 64
_FIX = "run the same model, with the same settings, on every rank"
_GIVEN_UP = 2**32  # more than there are ranks


class Agreement:
    """What the ranks of one group have agreed to, on behalf of one user of the group.

    Args:
        group: the process group; all its ranks make their Agreements in the same order.
        device: of the tensors that the group reduces; its time limit is ours.
        what: of what the plans are, for messages.
        alone: this rank may have made it without the others, as one makes a copy. Such ones count when they are used
            first, which all ranks do in the same order.

    Attributes:
        number: the same on all ranks, and that of no other Agreement of the group; below 0 of those made alone, which
            get it at their first use, and 0 where there is nobody to disagree with.

    Ranks go by their global numbers. Keys in the store carry the group's name and this number, and are deleted when the
    last rank has read them. A group of one rank, or a fake one, has nobody to disagree with and touches no store.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, what: str = "buckets", alone: bool = False
    ) -> None:
        self.ranks, self.what = _torch.group_ranks(group), what
        self.rank, self.world = self.ranks[group.rank()], len(self.ranks)
        self.limit = _torch.group_timeout(group, device).total_seconds()
        self._known: dict[tuple[int, str], int] = {}
        self._place, self._asked, self.number = 0, 0, 0
        self._followed: list[tuple[int, str]] = []
        self._known_beside: set[str] = set()
        self._beside: list[tuple[int, str]] = []  # what was agreed last that is no part of a sequence
        self._failure: RankMismatchError | None = None
        self._verdict: Mapping[str, Any] | None = None
        self._store: Store | None = None
        self._places: tuple[Store, str] | None = None
        self._group = group
        if self.world > 1 and _torch.group_backend(group) != "fake":
            kind = _ALONE if alone else "agreements"
            self._places = _torch.group_store(group), f"torchshard/{_torch.group_name(group)}/{kind}"
            if not alone:
                self._common_store()

    def _common_store(self) -> Store | None:
        """Where the ranks find what they say here; None if there is nobody to disagree with."""
        if self._store is None and self._places is not None:
            store, place = self._places
            number = store.add(f"{place}/{self.rank}", 1)
            self._store = PrefixStore(f"{place}/{number}", store)
            self.number = -number if place.endswith(_ALONE) else number
        return self._store

    def restart(self) -> None:
        """A new sequence of plans begins (a backward)."""
        self._place = 0
        self._followed.clear()

    def adopt(self, text: str, beside: bool = False) -> None:
        """All ranks know by other means that this plan is the same on all of them, when it comes first, or beside."""
        if beside:
            self._known_beside.add(text)
        else:
            self._known.setdefault((0, text), len(self._known) + 1)

    def confirm(self, text: str, position: int) -> None:
        """Return when all ranks follow this plan here; raise RankMismatchError when one follows another.

        Args:
            text: the plan, a line for each of its parts. Equal texts are equal plans.
            position: how many collectives this rank has issued so far, in all.
        """
        if (store := self._common_store()) is None:
            return
        step = (self._place, text)
        if step not in self._known:
            self._compare(store, self._place, text, position, self.what)
            self._known[step] = len(self._known) + 1
        self._place = self._known[step]
        self._followed.append((position, text))

    def confirm_beside(self, what: str, text: str, position: int) -> None:
        """As `confirm`, of what is no part of a sequence of plans.

        Args:
            what: of what the plan is, for messages.
            text, position: as for `confirm`.
        """
        if (store := self._common_store()) is not None:
            if text not in self._known_beside:
                self._compare(store, _BESIDE, text, position, what)
                if len(self._known_beside) == _MOST_BESIDE:  # they may be others in each step; all ranks forget alike
                    self._known_beside.clear()
                self._known_beside.add(text)
            self._beside = [(position, text)]

    def compare(self, text: str, position: int) -> None:
        """As `confirm`, but a plan that all have agreed to before is compared, too; for what is done seldom.

        Without it, ranks that turn to different plans, all of them agreed to earlier, follow them unasked.
        """
        if (store := self._common_store()) is not None:
            self._compare(store, self._place, text, position, self.what)
            self._followed = [(position, text)]

    def check(self, position: int, what: str, error: Exception | None = None) -> None:
        """Called while waiting: raise RankMismatchError if the reason is another plan on some rank, or a lost rank.

        Args:
            position: how many collectives this rank has issued so far; those before are agreed.
            what: is waited for.
            error: how it failed, if it has.
        """
        if self._store is None:
            return
        try:
            verdict = self._heard(self._store)
            if verdict is not None and (error is not None or verdict["position"] < position):
                self._raise_verdict(self._store, verdict)  # else the others have issued, too, what is waited for
            self._look_for_loss(self._store, what, error)
            if verdict is None and self._store.check([f"{self._asked}/first"]):
                self._judge(self._store, position)
        except RankMismatchError:
            raise
        except RuntimeError as broken:  # the store's
            self.blame(what, broken)

    def _judge(self, store: Store, position: int) -> None:
        """Somebody compares a plan: is it at a collective that this rank has issued already?"""
        theirs = json.loads(store.get(f"{self._asked}/first"))
        if theirs["position"] < position:
            agreed = sorted([*self._followed, *self._beside], key=itemgetter(0))
            ours = next((t for at, t in reversed(agreed) if at <= theirs["position"]), "")
            self._disagree(store, self._asked, theirs, ours, position)

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Of a collective that fails within, the ranks that do not answer are named: see `blame`."""
        try:
            yield
        except NO_LOSS:
            raise
        except RuntimeError as error:
            self.blame(what, error)

    def blame(self, what: str, error: Exception | None = None) -> NoReturn:
        """A collective has failed: raise RankMismatchError with the ranks that do not answer.

        Args:
            what: was waited for.
            error: how the collective failed; raised as it is if there is nobody to ask.
        """
        if (store := self._common_store()) is None:
            raise error or RuntimeError(f"{what} failed")
        with contextlib.suppress(RuntimeError):  # the store's
            store.set("lost", "")  # the others look for it while they wait, and answer
        silent, waits = answers(self._group, "lost", what, self.ranks)  # those that wait for another of its users, too
        self.fail(lost(what, self.rank, self.world, silent, error, waits), error)

    def refuse(self, error: BaseException, position: int = 0) -> None:
        """This rank takes no part in what comes next, or is under way: the others raise, when they wait for it.

        Returns when they know, or after some seconds; what it does then is to raise `error`.

        Args:
            error: why.
            position: how many collectives this rank has issued and will see to their end.
        """
        if (store := self._common_store()) is not None:
            what = getattr(error, "what", None) or f"{type(error).__name__}: {first_line(error)}"
            parts = {name: getattr(error, name, None) for name in ("expected", "got", "where", "fix")}
            said = {name: str(part) for name, part in parts.items() if part is not None}
            with contextlib.suppress(RuntimeError):
                self._find(store, self._asked, position, {"what": f"rank {self.rank} takes no part: {what}", **said})

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """What this rank prepares for a plan: where it fails, the others, which wait for this rank, are told why."""
        try:
            yield
        except Exception as error:
            self.refuse(error)
            raise

    def fail(self, failure: RankMismatchError, cause: Exception | None = None) -> NoReturn:
        """Raise this, now and by `raise_failure` later."""
        self._failure = failure
        raise failure from cause

    def raise_failure(self) -> None:
        """Raise again what was raised before: ranks that have come apart do not come together again."""
        if self._failure is not None:
            raise self._failure

    def _heard(self, store: Store) -> Mapping[str, Any] | None:
        """What a rank has found, if any has; it is told at once that this one has read it."""
        if self._verdict is None and store.check(["verdict"]):
            self._verdict = json.loads(store.get("verdict"))
            store.add("seen", 1)
        return self._verdict

    def _look_for_loss(self, store: Store, what: str, error: Exception | None = None) -> None:
        if store.check(["lost"]):
            self.blame(what, error)

    def _compare(self, store: Store, place: int, text: str, position: int, what: str) -> None:
        asked, self._asked = self._asked, self._asked + 1
        if self._verdict is not None:
            self._raise_verdict(store, self._verdict)
        digest = hashlib.sha256(f"{place} {text}".encode()).hexdigest()
        mine = json.dumps({"rank": self.rank, "position": position, "digest": digest, "what": what})
        with self.waiting_for(f"the others to come to its new {what}"):
            first = json.loads(store.compare_set(f"{asked}/first", "", mine))
            if first["rank"] == self.rank:
                store.set(f"{asked}/text", text)
            if first["digest"] != digest:
                self._disagree(store, asked, first, text, position)
            store.set(f"{asked}/came/{self.rank}", "")
            store.add(f"{asked}/count", 1)
            self._wait_for_all(store, asked, position, what)
            if store.add(f"{asked}/left", 1) == self.world:
                for name in ("first", "text", "count", "left", *[f"came/{rank}" for rank in self.ranks]):
                    store.delete_key(f"{asked}/{name}")

    def _wait_for_all(self, store: Store, asked: int, position: int, what: str) -> None:
        deadline, pause = time.monotonic() + self.limit, 0.0002
        while store.add(f"{asked}/count", 0) < self.world:
            if (verdict := self._heard(store)) is not None and verdict["asked"] <= asked:
                self._raise_verdict(store, verdict)  # a later one was found by ranks that saw all come to this plan
            self._look_for_loss(store, f"the others to come to its new {what}")
            if time.monotonic() > deadline:
                self._give_up(store, asked, position, what)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _give_up(self, store: Store, asked: int, position: int, what: str) -> None:
        """The time is over: raise on all ranks, also on those that come later; unless all have come by now."""
        if (count := store.add(f"{asked}/count", -_GIVEN_UP) % _GIVEN_UP) == self.world:
            store.add(f"{asked}/count", _GIVEN_UP)
            return
        late = [rank for rank in self.ranks if not store.check([f"{asked}/came/{rank}"])]
        verdict = {
            "what": f"rank {self.rank} has new {what} and waits in vain for the other ranks to come to them too",
            "expected": f"{self.world} ranks within {self.limit:g} s",
            "got": f"{count}: not rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}",
            "fix": _FIX,
        }
        self._find(store, asked, position, verdict)

    def _disagree(self, store: Store, asked: int, first: Mapping[str, Any], ours: str, position: int) -> NoReturn:
        other: int = first["rank"]
        store.wait([f"{asked}/text"])
        theirs = store.get(f"{asked}/text").decode()
        line, left, right = _first_difference(theirs, ours)
        verdict = {
            "what": f"ranks {min(other, self.rank)} and {max(other, self.rank)} have different {first['what']}",
            "expected": f"rank {other}: {left}",
            "got": f"rank {self.rank}: {right}",
            "where": f"line {line} of the plan",
            "fix": _FIX,
        }
        self._find(store, asked, min(position, first["position"]), verdict)

    def _find(self, store: Store, asked: int, position: int, error: Mapping[str, str]) -> NoReturn:
        """Raise this on all ranks, or what another has found before.

        Args:
            store: where all look for it.
            asked: which comparison it was found in: ranks that are not there yet go on until they are.
            position: how many collectives all ranks concerned had issued.
            error: the parts of a RankMismatchError.
        """
        store.compare_set("verdict", "", json.dumps({"asked": asked, "position": position, "error": error}))
        verdict = self._heard(store)
        assert verdict is not None, "what was found was written"
        self._raise_verdict(store, verdict)

    def _raise_verdict(self, store: Store, verdict: Mapping[str, Any]) -> NoReturn:
        """Raise what was found, when all ranks know it: the store may die with the first rank that leaves."""
        self._failure = RankMismatchError(**verdict["error"])
        deadline = time.monotonic() + min(5.0, self.limit)
        with contextlib.suppress(RuntimeError):  # the store's, which has died
            while store.add("seen", 0) < self.world and time.monotonic() < deadline:
                time.sleep(0.02)
        raise self._failure


def _first_difference(a: str, b: str) -> tuple[int, str, str]:
    """Number of the first line that differs, and that line of either text."""
    left, right = a.splitlines(), b.splitlines()
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return number, short(one), short(other)
    end = min(len(left), len(right))
    first, second = (short(text[end]) if end < len(text) else "nothing more" for text in (left, right))
    return end, first, second
