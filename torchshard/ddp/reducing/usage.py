"""Which parameters get a gradient in a backward: all, as many as come, or those of the first backward."""

from collections.abc import Callable, Collection, Mapping, Sequence, Set

from torchshard import _torch
from torchshard.ddp.buckets.flat import FlatBucket
from torchshard.ddp.exchange import Exchange


class Usage:
    """Every parameter gets a gradient, once in each backward; if one is missing, another backward has to bring it.

    Attributes:
        tolerant: a backward may end without some gradients.
        attentive: no hook may be quiet.
        learning: this backward only counts; everything is reduced at its end.
        uses: how often each gradient grew in the backward that counts.
        repeated: those that grow more than once, with how often.
        left: of these, in the backward that runs, how often they will still grow.
        never: parameters that are known to get no gradient.
        is_static: each backward has to have gradients for the same parameters.
        static: whether each backward so far had them.
        absent: parameters without a gradient in the last backward, where that is known.
        broken: a gradient came that should not, and no forward has been told yet what the backward has left out.
        text: which they are, for ranks to compare.
    """

    text = "each parameter has a gradient in each backward"

    tolerant = attentive = learning = broken = is_static = False
    static = True
    absent: Collection[int] | None = None

    def __init__(self, count: int) -> None:
        self.all = range(count)
        self.uses: dict[int, int] = {}
        self.repeated: Mapping[int, int] = {}
        self.left: dict[int, int] = {}
        self.never: frozenset[int] = frozenset()
        self._anywhere: Mapping[int, int] = dict.fromkeys(self.all, 1)
        self._counts: Callable[[], Sequence[int]] | None = None

    @property
    def anywhere(self) -> Mapping[int, int]:
        """Parameters that were used in the last backward, and by how many ranks.

        What the ranks have said is read here and not before: on an accelerator, reading waits for the whole backward.
        """
        if self._counts is not None:
            self._anywhere = {i: count for i, count in enumerate(self._counts()) if count}
            self._counts = None
        return self._anywhere

    def _ask(self, absent: Collection[int], exchange: Exchange) -> None:
        self._counts = exchange.totals([int(i not in absent) for i in self.all])

    def skipped(self, buckets: Sequence[FlatBucket], touched: Set[int], exchange: Exchange) -> Collection[int]:
        """Numbers of the buckets that are not reduced in this backward, which is over; arguments as for `decide`."""
        return ()

    def decide(self, absent: Collection[int], touched: Collection[int], exchange: Exchange) -> Collection[int]:
        """Parameters that got a gradient on some rank since the last reduction. All ranks call it at the same point.

        Args:
            absent: parameters without a gradient in this backward, here.
            touched: parameters that got one before it, under no_sync or in a backward that was none of the wrapper's.
            exchange: with the other ranks.
        """
        return self.anywhere

    def shadow(self, exchange: Exchange) -> Collection[int]:
        """As `decide`, of a rank that only plays along with the backward of others."""
        return self.decide(self.all, (), exchange)

    def too_often(self, index: int, name: str, rank: int) -> str | None:
        """What to say when a gradient came that should not, if this policy knows better than the reducer."""
        return None

    def reset(self) -> None:
        """Get ready for the next backward."""
        self.left.clear()
        self.broken = False


class ChangingUsage(Usage):
    """find_unused_parameters: any parameter may have no gradient in any backward; ranks tell each other which had.

    Args:
        count: of parameters.
        skips: a bucket without any gradient is not reduced; the user vouches that all ranks have the same ones.
    """

    tolerant = True
    text = "parameters may have no gradient"

    def __init__(self, count: int, skips: bool) -> None:
        super().__init__(count)
        self._skips = skips
        self._skipped: list[int] | None = None  # in the last backward

    def skipped(self, buckets: Sequence[FlatBucket], touched: Set[int], exchange: Exchange) -> Collection[int]:
        """As for Usage; RankMismatchError if they are others on another rank."""
        if not self._skips:
            return ()
        for bucket in buckets:
            bucket.close()
        skipped = [n for n, b in enumerate(buckets) if touched.isdisjoint(b.members) and b.is_empty()]
        if skipped != self._skipped:  # unless all ranks have skipped these before, one after another
            exchange.compare(f"buckets without any gradient, not reduced: {skipped}")
            self._skipped = skipped
        return skipped

    def decide(self, absent: Collection[int], touched: Collection[int], exchange: Exchange) -> Collection[int]:
        """As for Usage."""
        self.static = self.static and self.absent in (None, absent)
        self.absent = absent
        with _torch.recording("torch.distributed.ddp.reducer::search_unused_parameters"):  # as torch's, in profiles
            self._ask(set(absent).difference(touched), exchange)
        return self.anywhere if absent else self.all  # those that have a gradient here are used


class StaticUsage(Usage):
    """static_graph: the first backward shows which gradients come and how often; the others are taken to be alike."""

    tolerant = attentive = learning = is_static = True
    text = "parameters have gradients as in the first backward"

    def decide(self, absent: Collection[int], touched: Collection[int], exchange: Exchange) -> Collection[int]:
        """As for Usage; the ranks talk once, at the end of the first backward."""
        if self.learning:
            self._ask(set(absent).difference(touched), exchange)
            self.never = frozenset(absent) - self.uses.keys()  # one that gave none may yet do so
            self.repeated = {i: n for i, n in self.uses.items() if n > 1}
            self.tolerant = self.attentive = self.learning = False
        return self.anywhere

    def shadow(self, exchange: Exchange) -> Collection[int]:
        """As for Usage; a rank that shadows the first backward takes it that its own will bring each gradient once."""
        if self.learning:
            self._ask(self.all, exchange)
            self.never = frozenset(self.all) - self.anywhere.keys()
            self.uses = dict.fromkeys(self.anywhere, 1)
            self.tolerant = self.attentive = self.learning = False
        return self.anywhere

    def too_often(self, index: int, name: str, rank: int) -> str | None:
        """As for Usage; starts as torch's message does."""
        if self.learning:
            return None
        self.broken = True
        known = f"got {self.uses.get(index, 0)} in the first backward and now more"
        return (
            "Your training graph has changed in this iteration, which static_graph=True rules out: on rank "
            f"{rank} the gradient of the parameter at index {index} with name {name} {known}. Leave static_graph out; "
            "find_unused_parameters=True is for parameters that are used now and then"
        )
