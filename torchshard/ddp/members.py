"""Which parameters are averaged: those that are to be trained when a forward begins, of those that were wrapped."""

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from torchshard import _torch
from torchshard.ddp import options
from torchshard.ddp.composite import require_plain
from torchshard.ddp.telling import messages

Named = Sequence[tuple[str, torch.nn.Parameter]]

_requires_grad = attrgetter("requires_grad")
_END = object()  # the same as nothing that stands in a module
_LAST = (_END,)


def names_of(module: torch.nn.Module, ids: Collection[int]) -> set[str]:
    """All names of the parameters with these ids; they are not looked at one by one where none is asked for."""
    return {n for n, p in module.named_parameters(remove_duplicate=False) if id(p) in ids} if ids else set()


class Places:
    """What stands where in a module; whether it still does is asked at each forward, in some 0.1 us for each place.

    Args:
        module: with the modules in it.
        kind: of what is looked at: "_parameters" or "_buffers".
    """

    def __init__(self, module: torch.nn.Module, kind: str = "_parameters") -> None:
        self._modules, self._look = [*module.modules()], attrgetter(kind, "_modules")
        self._tables = [*chain.from_iterable(map(self._look, self._modules))]  # two of each module
        # Those of dictionaries show what is there now. Of others, as scripted modules have, they are asked for anew.
        self._values = [t.values() if type(t) in (dict, OrderedDict) else _Values(t) for t in self._tables]
        self._held = [*chain.from_iterable(self._values), _END]

    def are_kept(self) -> bool:
        """Whether all of them and all modules are where they were, and nothing besides."""
        tables, values = chain.from_iterable(map(self._look, self._modules)), chain.from_iterable(self._values)
        return all(map(is_, tables, self._tables)) and all(map(is_, chain(values, _LAST), self._held))


class _Values:
    """What is in a table now, each time it is gone through."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __iter__(self) -> Iterator[object]:
        return iter(self._table.values())


class Members:
    """Notices when others are trained: frozen ones that no longer are, and new ones, in the place of those or besides.

    Args:
        module: that is wrapped; may go before this does.
        ignored: names of parameters that are not in buckets.
        delayed: those of them that are averaged all the same.
        before: what another one knew, whose place this takes: which parameters were wrapped.

    Attributes:
        trained: the parameters to be averaged in buckets, with their names.
        module: the module, weakly.
    """

    _places: Places | None  # None: to be looked through

    def __init__(
        self,
        module: torch.nn.Module,
        ignored: Collection[str],
        delayed: Sequence[torch.nn.Parameter] = (),
        before: "Members | None" = None,
    ) -> None:
        self.module, self._ignored = weakref.ref(module), ignored
        apart = {id(p) for p in delayed}
        self._delayed = names_of(module, apart)
        present = self._present(module)
        self._wrapped: Named = before._wrapped if before else present
        self._averaged = [(n, p) for n, p in present if p.requires_grad or id(p) in apart]
        self.trained: Named = [(n, p) for n, p in self._averaged if id(p) not in apart]
        self._pins = [weakref.ref(p) for _, p in self._averaged]  # torch swaps no tensor that has one, and says so
        self._note(module, present)

    def _note(self, module: torch.nn.Module, present: Named) -> None:
        averaged = {id(p) for _, p in self._averaged}
        self._places = Places(module)
        self._others = [p for _, p in present if id(p) not in averaged]  # frozen, as it is

    def follow(self, module: torch.nn.Module) -> None:
        """The wrapper holds another module now."""
        self.module, self._places = weakref.ref(module), None

    def look(self) -> list[str]:
        """Names of those that were frozen when they were wrapped, and are to be trained now.

        Raises:
            RuntimeError: parameters that were not there are to be trained.
            ValueError: one that is made of other tensors is to be trained.
        """
        if self._places and self._places.are_kept() and not any(map(_requires_grad, self._others)):
            return []
        module = self.module()
        if module is None or _torch.in_functional_call():
            return []
        present = self._present(module)
        known, averaged = ({id(p) for _, p in named} for named in (self._wrapped, self._averaged))
        trained = [(n, p) for n, p in present if p.requires_grad and isinstance(p, torch.nn.Parameter)]
        if new := [n for n, p in trained if id(p) not in known]:
            here = {id(p) for _, p in present}
            raise RuntimeError(messages.replaced_text([n for n, p in self._averaged if id(p) not in here], new))
        require_plain(trained)
        self._note(module, present)
        return [n for n, p in trained if id(p) not in averaged]

    def _present(self, module: torch.nn.Module) -> Named:
        return options.reduced(module, {*self._ignored} - self._delayed)

    def remove(self) -> None:
        """Leave the parameters as they were found."""
        self._pins.clear()
