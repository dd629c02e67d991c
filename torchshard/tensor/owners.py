"""Modules whose parameters are DTensors inside of forward and something else outside, and who puts which in place when.

Each module with such parameters has an `Owner`, which knows how they lie, and each at or around one a `_Lender`, whose
hooks have the parameters of all modules below it in place while it runs: it may read them without calling their module.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.tensor as upstream
from torch import Tensor, nn

from torchshard._torch import after_every_forward, skip_methods
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.interop import from_torch, over, without_history
from torchshard.tensor.layout import TensorLayout, layout_for, terms_along
from torchshard.tensor.moving.redistribute import redistribute_local
from torchshard.tensor.regions.caching import one_node
from torchshard.tensor.regions.naming import name_on, named
from torchshard.tensor.replacing import require_replaceable, successor


@dataclass(frozen=True, slots=True)
class Placed:
    """How a parameter lies on its mesh.

    Attributes:
        layout: of the DTensor.
        kind: its class, ours or torch's.
        name: of both, see regions/naming.py.
    """

    layout: TensorLayout
    kind: type[Any]
    name: str

    @classmethod
    def of(cls, x: Tensor) -> "Placed":
        """Of a DTensor of either class."""
        return cls._of(ours(x)._spec, DTensor if isinstance(x, DTensor) else upstream.DTensor)

    @classmethod
    def _of(cls, layout: TensorLayout, kind: type[Tensor]) -> "Placed":
        name = name_on(layout.mesh, (layout, kind), layout, layout.stride, layout.marks, kind.__module__)  # type: ignore[arg-type]
        return cls(layout, kind, name)

    def __reduce__(self) -> Any:
        return Placed._of, (self.layout, self.kind)  # another process has given no names

    def replicated(self, x: Tensor) -> "Placed":
        """For a plain tensor that is the same on all ranks of this mesh."""
        return self._of(layout_for(self.layout.mesh.replicated(), x.shape, x.stride(), x.dtype), self.kind)

    def with_terms(self, axes: Iterable[int]) -> "Placed":
        """The same for a parameter of which somebody else adds the gradients along these axes."""
        return self._of(self.layout.with_marks(terms_along(axes)), self.kind)

    def lent(self, part: Tensor) -> Tensor:
        """The DTensor of a part, of its dtype, through which gradients come back to it."""
        if torch.compiler.is_dynamo_compiling():
            return _lent(part, self.name)
        return over(part, self.layout, self.kind)

    def saved(self, part: Tensor) -> Tensor:
        """The DTensor of a part, with its memory and no history."""
        return self.lent(part.detach())

    def loaded(self, x: Tensor) -> Tensor:
        """The part of what a state dict holds."""
        if isinstance(x, DTensor | upstream.DTensor):
            x = ours(x)
            return redistribute_local(x._local_tensor, x._spec, self.layout)
        if tuple(x.shape) == self.layout.shape:
            return redistribute_local(x, self.layout.to(self.layout.mesh.replicated()), self.layout)
        return x


@one_node
def _lent(part: Tensor, name: str) -> Tensor:
    """See Placed.lent."""
    return over(part, *named(name, part))


def ours(x: Tensor) -> DTensor:
    """A DTensor of either class as one of this package, over the same memory and without history."""
    return x if isinstance(x, DTensor) else from_torch(without_history(x))


@skip_methods()
class Owner:
    """Of a module with parameters that are DTensors while it runs, and something else outside.

    It does not know its module, which has hooks that hold it: the module goes when it is dropped.

    Attributes:
        takes: the classes of DTensors that are replaced.
        placed: how each lies on its mesh, by name.
        _lent: for each module that lends now, the names that it has put in place.
    """

    takes: tuple[type[Tensor], ...] = (DTensor,)

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.placed = {name: Placed.of(p) for name, p in held.items()}
        self._lent: list[list[str]] = []

    @staticmethod
    def outside(x: Any) -> Tensor:
        """What a parameter is outside of forward."""
        raise NotImplementedError

    def inside(self, name: str, parameter: Tensor) -> Tensor | None:
        """What it is inside, differentiable; None where that cannot be told here."""
        raise NotImplementedError

    def move_in(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put what the parameters are outside of forward in their places."""
        for name, parameter in parameters.items():
            module.register_parameter(name, parameter)

    def begin(self) -> None:
        """What is put in place from now on is what the next `put_away` takes away, be it nothing."""
        self._lent.append([])

    def put(self, module: nn.Module) -> bool:
        """Put DTensors in place, until `put_away`; whether all are."""
        own, complete, lent = vars(module), True, self._lent[-1]
        for name in self.placed:
            if name in own:
                continue
            if (x := self.inside(name, getattr(module, name))) is not None:
                own[name] = x  # comes before the parameter, which stays what the module owns
                lent.append(name)
            else:
                complete = False
        return complete

    def put_away(self, module: nn.Module) -> None:
        """Take away what was put there since the last `begin`."""
        for name in self._lent.pop():
            del vars(module)[name]


# Called in a traced forward, hooks are traced. Called in front of one, they would be frames of their own to Dynamo,
# compiled anew for each module.


@skip_methods()
class _Lender:
    """Hooks of a module at, or around, one with an owner.

    Where a module further out has put all in place they do nothing: so no attribute changes in a checkpoint in between.

    Attributes:
        own: the owner of the module itself.
        below: those of modules below it.
        all_lent: for each forward of the module that runs, whether it has all in place.
        outer: the `all_lent` of modules around it.
    """

    def __init__(self, own: Owner | None, below: list[tuple[Owner, nn.Module]]) -> None:
        self.own, self.below = own, below
        self.all_lent: list[bool] = []
        self.outer: list[list[bool]] = []

    def lend(self, module: nn.Module, *_inputs: Any) -> None:
        """A forward of the module begins: have DTensors in place."""
        if self._lent_further_out():
            return
        self.all_lent.append(False)
        if self.own is not None:
            self.own.begin()
        for owner, _ in self.below:  # all of them first: where one fails, all are taken back
            owner.begin()
        complete = self.own is None or self.own.put(module)
        for owner, submodule in self.below:
            complete = owner.put(submodule) and complete
        self.all_lent[-1] = complete

    def take_back(self, module: nn.Module, *_: Any) -> None:
        """It is over, or did not begin: a hook before ours has raised."""
        if not self.all_lent or self._lent_further_out():
            return
        self.all_lent.pop()
        if self.own is not None:
            self.own.put_away(module)
        for owner, submodule in self.below:
            owner.put_away(submodule)

    def _lent_further_out(self) -> bool:
        for lent in self.outer:  # noqa: SIM110  # a generator takes three times as long
            if lent and lent[-1]:
                return True
        return False


def replace_parameters(modules: Sequence[nn.Module], kind: type[Owner]) -> None:
    """Make these modules, and all below, that have DTensor parameters owners of that kind; all of them, or none.

    Parameters that they share stay one.

    Raises:
        ShardingError: a parameter has hooks, or cannot be said outside of forward; or it is shared with a module where
            another has taken its place already.
    """
    found: list[tuple[nn.Module, dict[str, Any]]] = []
    for submodule in dict.fromkeys(each for module in modules for each in module.modules()):
        named: Any = submodule.named_parameters(recurse=False, remove_duplicate=False)
        held: dict[str, Any] = {name: p for name, p in named if isinstance(p, kind.takes)}
        if held:
            found.append((submodule, held))
    for submodule, held in found:
        for name, p in held.items():
            require_replaceable(p, submodule, name)
    owners = {submodule: kind(held) for submodule, held in found}
    outside = {id(p): kind.outside(p) for _, held in found for p in held.values()}
    made: dict[int, nn.Parameter] = {}
    for submodule, held in found:  # from here on nothing is refused
        for name, p in held.items():
            if id(p) not in made:
                made[id(p)] = successor(p, outside[id(p)], submodule, name)
        owners[submodule].move_in(submodule, {name: made[id(p)] for name, p in held.items()})
    for module in modules:
        _have_lent(module, owners)


def _have_lent(module: nn.Module, owners: Mapping[nn.Module, Owner]) -> None:
    """Hook up each module that is an owner, or around one: the given one and those below it."""
    lenders: dict[nn.Module, _Lender] = {}
    for around in module.modules():
        below = [(owners[each], each) for each in _below(around) if each in owners]
        if below or around in owners:
            lenders[around] = _Lender(owners.get(around), below)
    for around, lender in lenders.items():
        for each in _below(around):
            if each in lenders:
                lenders[each].outer.append(lender.all_lent)
        around.register_forward_pre_hook(lender.lend, prepend=True)
        after_every_forward(around, lender.take_back)


def _below(module: nn.Module) -> list[nn.Module]:
    return [each for each in module.modules() if each is not module]
