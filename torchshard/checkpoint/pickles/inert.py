"""What a pickle is made of when nothing of it is run: names, records, a few containers of torch and collections."""

from collections.abc import Callable
from typing import Any

from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError

LAYOUT = "torch.serialization._get_layout"  # what makes a torch.layout of its name
PARAMETER = "torch.nn.parameter.Parameter"
_ALIKE = 100  # keys of one hash


class RefusedGlobal(CheckpointError):
    """A pickle names something that is not on the list of what may be read; `name` is its dotted name."""

    def __init__(self, name: str, where: object, fix: str | None = None) -> None:
        super().__init__(
            f"The pickle needs {printable(name)}, which is not plain data and is never run.", where=where, fix=fix
        )
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return RefusedGlobal, (self.name, str(self.where), self.fix)


class Global:
    """A global name of a pickle: nothing but the name, and what a call of it stands for.

    Args:
        name: dotted, "torch.float32".
        make: makes the inert value of a call from its arguments; None where the name is a value that is not called.
    """

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., object] | None = None) -> None:
        self.name, self.make = name, make

    def __repr__(self) -> str:
        return self.name


class Record:
    """An object of some class, never the class itself: its dotted name, constructor arguments and state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[object, ...]) -> None:
        self.name, self.args = name, args
        self.state: object = None

    def __repr__(self) -> str:
        return f"{self.name}(...)"

    def field(self, name: str) -> Any:
        """An attribute from the state; None where it has none."""
        state = self.state
        if isinstance(state, dict):
            return state.get(name)
        if isinstance(state, tuple) and len(state) == 2:  # instance attributes and slots
            parts = [part for part in state if isinstance(part, dict)]
            return next((part[name] for part in parts if name in part), None)
        return None


class OrderedDict(dict[Any, Any]):
    """collections.OrderedDict in a pickle, with the attributes that were set on it (a module's state dict has some)."""

    __slots__ = ("attributes",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attributes: dict[Any, Any] | None = None


class Counter(dict[Any, Any]):
    """collections.Counter in a pickle: the milestones of torch's MultiStepLR are one."""

    __slots__ = ()


class Size(tuple[int, ...]):
    """torch.Size in a pickle."""

    __slots__ = ()


def record(name: str) -> Global:
    """A class whose objects are read as a Record."""
    return Global(name, lambda *args: Record(name, args))


class Hashes:
    """Keys that can be chosen to share one hash, as each in a dict is compared with all others that have it.

    Those are tuples, complex numbers and integers of more than 60 bits. Others that are no text or bytes, whose hash is
    not known beforehand, share it with a few.
    """

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: dict[int, list[object]] = {}

    def take(self, key: object) -> None:
        """Raise ValueError if too many other keys have the hash of this one."""
        if isinstance(key, (tuple, complex)) or (type(key) is int and not -(2**60) < key < 2**60):
            alike = self.keys.setdefault(hash(key), [])
            if key not in alike:
                alike.append(key)
            if len(alike) > _ALIKE:
                raise ValueError("too many keys of dicts or sets share one hash")
