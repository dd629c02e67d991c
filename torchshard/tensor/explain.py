"""What happens when a function runs on DTensors: operator by operator, who moves where, at what cost, and why.

A run is observed from below autograd, with every plan made anew, so that what is shown is what the first call decides;
kept plans are neither used nor changed.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from torchshard._torch import Inherited, beneath_intercepting, intercepting
from torchshard.layout.cuts import Route, route
from torchshard.layout.layout import Layout
from torchshard.tensor.calls.dispatch import call_of
from torchshard.tensor.calls.plan import make_plan
from torchshard.tensor.dtensor import dtensors_in
from torchshard.tensor.layout import TensorLayout
from torchshard.tensor.observing import observing

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d")
_UNTOUCHED = frozenset({"detach.default", "alias.default"})
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Move:
    """One redistribution.

    Attributes:
        argument: the name of the operator's argument; "" for what it makes on the way.
        source: before.
        target: after.
        route: the steps, with the bytes that a rank receives; None from one mesh to another.
    """

    argument: str
    source: Layout
    target: Layout
    route: Route | None

    @property
    def nbytes(self) -> int:
        """Bytes that a rank receives at most, as the cost model has it; 0 where that is not known."""
        return self.route.nbytes if self.route else 0

    def __str__(self) -> str:
        name = f"{self.argument}: " if self.argument else ""
        steps = self.route.steps if self.route else ()
        done = " ".join(f"{s.kind}({','.join(s.before.mesh.names[a] for a in s.axes)})" for s in steps)
        return f"{name}{done or 'to another mesh'} -> {_placed(self.target)}"


@dataclass(slots=True)
class Row:
    """One operator, or one redistribution that was asked for.

    Attributes:
        operator: its name, such as "mm.default"; "redistribute" for what was asked for.
        inputs: layouts of its DTensors.
        how: "rule", "handler", "list" (foreach), "decomposition", "gathered" or "asked for".
        line: the rule's line.
        moves: what was redistributed for it.
        results: layouts of its results.
        depth: how many operators it is a part of (those of a decomposition or a handler).
    """

    operator: str
    inputs: tuple[Layout, ...]
    depth: int
    how: str = ""
    line: str = ""
    moves: list[Move] = field(default_factory=list)
    results: tuple[Layout, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that a rank receives at most for its moves."""
        return sum(move.nbytes for move in self.moves)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found; as text, a table.

    Attributes:
        rows: operators and redistributions in the order in which they ran.
        collectives: how often each collective was called, by kind.
        result: what the function returned.
    """

    rows: tuple[Row, ...]
    collectives: Counter[str]
    result: Any

    @property
    def nbytes(self) -> int:
        """Bytes that a rank receives at most for all redistributions."""
        return sum(row.nbytes for row in self.rows)

    def __str__(self) -> str:
        meshes = dict.fromkeys(str(x.mesh) for row in self.rows for x in (*row.inputs, *row.results))
        cells = [
            [
                "  " * row.depth + row.operator,
                "\n".join(map(_short, row.inputs)),
                row.line or row.how,
                "\n".join(map(str, row.moves)),
                "\n".join(_size(move.nbytes) if move.route else "?" for move in row.moves),
                "\n".join(map(_short, row.results)),
            ]
            for row in self.rows
            if row.moves or row.operator not in _UNTOUCHED
        ]
        headers = ["operator", "operands", "by", "moved", "bytes", "results"]
        table = tabulate(cells, headers, tablefmt="presto", disable_numparse=True, preserve_whitespace=True)
        count = sum(len(row.moves) for row in self.rows)
        calls = ", ".join(f"{n} {kind}" for kind, n in sorted(self.collectives.items())) or "none"
        return "\n".join(
            [
                *[f"mesh {mesh}" for mesh in meshes],
                table,
                f"redistributions: {count}, received by a rank at most: {_size(self.nbytes)}, collectives: {calls}",
            ]
        )


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run `fn(*args, **kwargs)` and tell what each operator on a DTensor did.

    It runs as it would anyway, on real ranks or on a fake process group of any size (see torch's FakeStore and the
    backend "fake"), where it shows what would be sent without sending it. Every rank has to call it, as collectives are
    called. Backward is shown if `fn` runs it, what `fn` does in other threads is not. Bytes are those of the cost
    model, for the rank that receives most.

    Args:
        fn: a function, or a module.
        args: what it gets.
        kwargs: likewise.

    Returns:
        An Explanation; print it.

    Example:
        >>> print(explain(lambda x, w: torch.relu(x @ w).sum(), x, w))
    """
    watch = _Watch()
    with _watched_by(watch), observing(watch.moved, watch.ran_by):
        result = fn(*args, **kwargs)
    return Explanation(tuple(watch.rows), watch.collectives, result)


class _Watch:
    """What has been seen so far, and the operators that are running now, the outermost first."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.collectives: Counter[str] = Counter()
        self.running: list[Row] = []
        self.expected: list[tuple[str, TensorLayout, TensorLayout]] = []

    def begin(self, operator: str, inputs: tuple[Layout, ...]) -> Row:
        """An operator runs."""
        row = Row(operator, inputs, len(self.running))
        self.rows.append(row)
        self.running.append(row)
        return row

    def ran_by(self, how: str, line: str, moves: list[tuple[str, TensorLayout, TensorLayout]]) -> None:
        """See observing.py."""
        if not self.running:
            return  # another mode has kept the operator to itself
        self.running[-1].how, self.running[-1].line, self.expected = how, line.strip(), moves

    def moved(self, source: TensorLayout, target: TensorLayout) -> None:
        """See observing.py."""
        way = None
        if source.mesh is target.mesh:
            way = route(source.sharding, target.sharding, source.shape, source.dtype.itemsize)
        if not self.running:
            asked = Row("redistribute", (source,), 0, "asked for", "", [Move("", source, target, way)], (target,))
            self.rows.append(asked)
            return
        found = next((m for m in self.expected if m[1] is source and m[2] is target), None)
        if found is not None:
            self.expected.remove(found)
        self.running[-1].moves.append(Move(found[0] if found else "", source, target, way))


class _Open:
    mode = Inherited[AbstractContextManager[None] | None](None)
    watches = Inherited[tuple[_Watch, ...]](())


_open = _Open()


@contextmanager
def _watched_by(watch: _Watch) -> Iterator[None]:
    """Show it every operator, through one mode for all who watch, as that takes operators from those below it."""
    mode, watches = _open.mode, _open.watches
    _open.watches = (*watches, watch)
    try:
        if mode is not None:
            yield
            return
        _open.mode = mode = intercepting(_run)
        with beneath_intercepting():
            mode.__enter__()
        try:
            yield
        finally:
            with beneath_intercepting(mode):
                mode.__exit__(None, None, None)
            _open.mode = None
    finally:
        _open.watches = watches


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operator: told to all who watch if it works on DTensors, counted if it communicates."""
    mode, watches = _open.mode, _open.watches
    assert mode is not None, "somebody watches"
    inputs = tuple([x._spec for x in dtensors_in([*args, *kwargs.values()])])
    if not inputs:
        if func.namespace in _COLLECTIVES and "wait" not in func.name():
            for watch in watches:
                watch.collectives[func.name().split("::")[1].split(".")[0]] += 1
        return func(*args, **kwargs)
    call = call_of(func, args, kwargs)
    rows = [watch.begin(call.name, inputs) for watch in watches]
    try:
        with mode:
            result, _ = make_plan(call)
    finally:
        for watch in watches:
            watch.running.pop()
    for row in rows:
        row.results = tuple([x._spec for x in dtensors_in([result])])
    return result


def _placed(layout: Layout) -> str:
    return f"({', '.join(map(str, layout.placements))})"


def _short(layout: Layout) -> str:
    """ "f32[64, 32] (S(0), R)" """
    dtype = re.sub(r"^(b?f)loat|^(u?i)nt|^(c)omplex", lambda m: m[m.lastindex or 0], str(layout.dtype).split(".")[-1])
    return f"{dtype}{list(layout.shape)} {_placed(layout)}"


def _size(nbytes: float) -> str:
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.0f} B" if not unit else f"{nbytes:.1f} {_UNITS[unit]}"
