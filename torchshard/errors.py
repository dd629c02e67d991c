"""The exception classes, and the one place where their messages are put together.

Every message says what happened, and then, line by line, what was expected, what was got, where, and which call
mends it.
"""

from typing import Any


class TorchshardError(Exception):
    """Base of all errors of this package; carries the parts of its message as attributes.

    Args:
        what: one sentence, what went wrong.
        expected: what would have been right.
        got: what was found instead.
        where: the operator, argument, axis, file or field concerned.
        fix: what to do; where it is code, it runs.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        got: object = None,
        where: object = None,
        fix: object = None,
    ) -> None:
        self.what, self.expected, self.got, self.where, self.fix = what, expected, got, where, fix
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [("expected", self.expected), ("got", self.got), ("where", self.where), ("fix", self.fix)]
        lines = [f"  {name + ':':<10}{_indented(part)}" for name, part in parts if part is not None]
        return "\n".join([self.what, *lines])

    def __reduce__(self) -> tuple[Any, ...]:
        parts = {"expected": self.expected, "got": self.got, "where": self.where, "fix": self.fix}
        return _rebuild, (type(self), self.what, {name: None if p is None else str(p) for name, p in parts.items()})


def _indented(part: object) -> str:
    return str(part).replace("\n", "\n" + " " * 12)


def _rebuild(kind: type[TorchshardError], what: str, parts: dict[str, str | None]) -> TorchshardError:
    return kind(what, **parts)


class ShardingError(TorchshardError, ValueError):
    """A mesh, a placement or a shape that cannot be as asked for."""


class UnsupportedOperatorError(TorchshardError, RuntimeError):
    """An operator that cannot be run right on these layouts; says the way out.

    No NotImplementedError: torch.nn.utils.parametrize passes over one that a `right_inverse` raises, as if there were
    no inverse, and the weight would silently be another.
    """


class ImplicitRedistributionError(TorchshardError, RuntimeError):
    """An operator would redistribute an argument where that has to be asked for; names both."""


class RankMismatchError(TorchshardError, RuntimeError, ValueError):
    """Ranks that should do the same do not; names the first difference.

    A ValueError as well, which torch raises where ranks are asked what they were given, and a RuntimeError elsewhere.
    """


class CheckpointError(TorchshardError, ValueError):
    """A checkpoint that is missing, damaged, refused or cannot be written; names file and field."""
