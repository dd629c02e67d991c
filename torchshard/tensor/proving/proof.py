"""One call of an operator in every way that its rule allows, played on all ranks, and what came of it."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import Tensor

from torchshard.errors import ShardingError
from torchshard.layout.layout import Layout, Mesh
from torchshard.layout.placements import Cut, Partial
from torchshard.rules.bind import Bound, bind
from torchshard.rules.lift import Lifted, take
from torchshard.rules.notation import parse
from torchshard.rules.rule import Made, Options, Rule
from torchshard.rules.ways import Way, factors_of, ways
from torchshard.tensor.calls.call import Call
from torchshard.tensor.calls.linearity import for_values
from torchshard.tensor.layout import global_stride
from torchshard.tensor.proving.playing import complaint, has_terms, noise, spread, tolerance

Verdict = Literal["right", "wrong", "not possible"]

_KINDS = tuple(map(Partial, ("sum", "avg", "max", "min")))
_CUTS = (Cut(runs=2), Cut(unit=2))

# Results of which only shape and dtype are known.
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one way to run one call.

    Attributes:
        operator: its name, such as "mm.default".
        call: the operands, such as "float32[5, 4], float32[4, 7]".
        line: the rule's line for them.
        mesh: the mesh that was played.
        ways: in words, one an axis of the mesh.
        verdict: "not possible" where lengths or dtypes do not allow these ways, so that nothing was proved.
        detail: what was wrong, or what is in the way.
    """

    operator: str
    call: str
    line: str
    mesh: tuple[int, ...]
    ways: tuple[str, ...]
    verdict: Verdict
    detail: str = ""

    @property
    def split(self) -> bool:
        """Whether some operand stayed sharded along a factor."""
        return any(" split" in way.split(":")[0] for way in self.ways)

    def __str__(self) -> str:
        played = f" on {'x'.join(map(str, self.mesh))} ranks, {' and '.join(self.ways)}" if self.mesh else ""
        detail = f", {self.detail}" if self.detail else ""
        return f"{self.operator}({self.call}) by {self.line!r}{played}: {self.verdict}{detail}"


@dataclass(frozen=True, slots=True)
class Report:
    """All outcomes of a proof; as text, a table with one row a way."""

    outcomes: tuple[Outcome, ...]

    @property
    def wrong(self) -> tuple[Outcome, ...]:
        """The outcomes that contradict eager torch."""
        return tuple([o for o in self.outcomes if o.verdict == "wrong"])

    @property
    def right(self) -> tuple[Outcome, ...]:
        """The outcomes that equal eager torch."""
        return tuple([o for o in self.outcomes if o.verdict == "right"])

    def raise_if_wrong(self) -> None:
        """Raise ShardingError with the first wrong outcome, if there is one."""
        if self.wrong:
            first = self.wrong[0]
            raise ShardingError(
                f"The rule of {first.operator} is wrong in {len(self.wrong)} of {len(self.wrong + self.right)} trials.",
                expected="what eager torch gives on the full tensors",
                got=first.detail,
                where=f"{first.operator}({first.call}), {first.line!r}\n"
                f"on {'x'.join(map(str, first.mesh))} ranks, {' and '.join(first.ways)}",
                fix="mend the line, or leave an option out: a factor in upper case is never split",
            )

    def __add__(self, other: "Report") -> "Report":
        return Report(self.outcomes + other.outcomes)

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], dict[str, int]] = {}
        for o in self.outcomes:
            way = o.ways[0] if len(o.ways) == 1 else "two ways at once"
            counts = rows.setdefault((o.operator, o.line, way), {})
            counts[o.verdict] = counts.get(o.verdict, 0) + 1
        verdicts = ("right", "wrong", "not possible")
        table = [[*key, *[counts.get(v, 0) for v in verdicts]] for key, counts in rows.items()]
        return tabulate(table, ["operator", "rule", "way", *verdicts], tablefmt="plain")


def proved(
    call: Call, rule: Rule, tensors: Sequence[Tensor], meshes: Sequence[tuple[int, ...]], limit: int
) -> Iterator[Outcome]:
    """The outcomes of one call in every way that a rule allows; none where it has no line for such arguments.

    Raises:
        ShardingError: the rule depends on the value of a number that its options do not name.
    """
    ruled = _ruled(call, rule, tensors)
    _require_named_reads(call, rule, tensors, ruled)
    if ruled is not None:
        yield from _Proof(call, *ruled, tensors).outcomes(meshes, limit)


def _ruled(call: Call, rule: Rule, tensors: Sequence[Tensor]) -> tuple[Made, Options] | None:
    layouts = iter(_layouts(Mesh((1,)), tensors))
    return rule.made(*call.with_values(mapped(call.values, lambda _: next(layouts))))


def _require_named_reads(call: Call, rule: Rule, tensors: Sequence[Tensor], ruled: tuple[Made, Options] | None) -> None:
    """Raise where a number that reads= does not name decides: a plan would be kept for its other values, too."""
    for at, (name, part, value) in enumerate(zip(call.names, call.parts, call.values, strict=True)):
        if part != "number" or value is None or name in rule.options.reads:
            continue
        for other in (type(value)(0), type(value)(1)):
            asked = _ruled(call.given((*call.values[:at], other, *call.values[at + 1 :])), rule, tensors)
            if _said(asked) != _said(ruled):
                raise ShardingError(
                    f"The rule of {call.name} depends on the value of {name}, and does not say that it reads it.",
                    expected="the same for all values of one type, as a plan is kept for them together",
                    got=f"one line for {name}={value!r}, another one, or other options, for {name}={other!r}",
                    fix=f'reads="{name}"',
                )


def _said(ruled: tuple[Made, Options] | None) -> object:
    return ruled and (ruled[0].line, dict(ruled[0].sizes), ruled[1])


def _layouts(mesh: Mesh, tensors: Sequence[Tensor]) -> list[Layout]:
    return [mesh.replicated().layout(tuple(t.shape), t.stride(), t.dtype) for t in tensors]


class _Proof:
    """One call, a rule bound to it, and what eager torch makes of it."""

    def __init__(self, call: Call, made: Made, options: Options, tensors: Sequence[Tensor]) -> None:
        self.call, self.tensors = call, tensors
        self.made, self.options = made, options
        self.bound = bind(parse(self.made.line), [tuple(t.shape) for t in tensors], self.made.sizes)
        self.written = self._written()
        self.expected = self._run(call.func, tensors)
        known = [t for t in (*tensors, *self.expected) if t is not None]
        unread = call.draws(call.values) or call.name.split(".")[0] in _UNINITIALISED
        self.close = None if unread else tolerance(t.dtype for t in known)
        self.has_room = all(map(_has_room, known))

    def outcomes(self, meshes: Sequence[tuple[int, ...]], limit: int) -> Iterator[Outcome]:
        """What comes of every way on meshes of one axis, and of up to `limit` combinations on those of several."""
        call, line = ", ".join(map(described, self.tensors)), self.made.line
        if self.bound is None:
            detail = "the rule has no line for these shapes"
            yield Outcome(self.call.name, call, line, (), (), "not possible", detail)
            return
        options = for_values(self.call, self.options, self.tensors, self.expected)
        possible = list(ways(self.bound, options, _KINDS, dict.fromkeys(factors_of(self.bound), _CUTS)))
        for shape in meshes:
            mesh = Mesh(shape)
            count = len(possible) ** len(shape)
            trials: Iterable[tuple[Way, ...]] = itertools.product(possible, repeat=len(shape))
            if len(shape) > 1 and count > limit:
                draw = random.Random(count)
                trials = [tuple(draw.choices(possible, k=len(shape))) for _ in range(limit)]
            for chosen in trials:
                verdict, detail = self._played(self.bound, mesh, chosen)
                yield Outcome(self.call.name, call, line, shape, tuple(map(_in_words, chosen)), verdict, detail)

    def _written(self) -> tuple[int, ...]:
        """Which operands the operator writes to."""
        at = [i for i, value in enumerate(self.call.values) for _ in tensors_in([value])]
        return tuple([k for k, i in enumerate(at) if i in self.call.written()])

    def _run(
        self, function: Callable[..., Any], tensors: Sequence[Tensor], constants: Mapping[int, Any] | None = None
    ) -> list[Tensor | None]:
        """The results of a call with these tensors, which are left as they are; without any, what was written to."""
        copies = [t.clone() if k in self.written else t for k, t in enumerate(tensors)]
        given = iter(copies)
        values = mapped(self.call.values, lambda _: next(given))
        for at, value in (constants or {}).items():
            values[at] = value
        args, kwargs = self.call.with_values(values)
        result = function(*args, **kwargs)
        if result is None:
            return [copies[k] for k in self.written]
        return [
            t if isinstance(t, Tensor) else None for t in (result if isinstance(result, (list, tuple)) else [result])
        ]

    def _played(self, bound: Bound, mesh: Mesh, chosen: Sequence[Way]) -> tuple[Verdict, str]:
        """Cut, run on every rank, put together and compare."""
        lifted = take(bound, chosen, _layouts(mesh, self.tensors))
        if lifted is None:
            return "not possible", "the lengths, or a mixture of Partials"
        if (reason := self._in_the_way(lifted)) is not None:
            return "not possible", reason
        if len(lifted.results) != len(self.expected):
            return "wrong", f"the line has {len(lifted.results)} results, the operator {len(self.expected)}"
        generator = torch.Generator("cpu").manual_seed(0)
        shares = [spread(t, s, generator) for t, s in zip(self.tensors, lifted.operands, strict=True)]
        for k in self.options.unread:
            shares[k] = [noise(share, generator) for share in shares[k]]
        ranks: list[list[Tensor | None]] = []
        for rank, coordinate in enumerate(mesh.coordinates()):
            try:
                constants = self._constants(bound, lifted, coordinate)
                ranks.append(self._run(self._local(), [share[rank] for share in shares], constants))
            except Exception as error:
                said = str(error).strip().split("\n")[0]
                return "wrong", f"rank {coordinate} raised {type(error).__name__}: {said}"
        for k, expected in enumerate(self.expected):
            parts = [rank[k] for rank in ranks]
            if (found := self._compared(bound, lifted, k, parts, expected)) is not None:
                return "wrong", f"result {k} as {lifted.results[k]}, {found}"
        return "right", ""

    def _in_the_way(self, lifted: Lifted) -> str | None:
        """Why the sharding, though the rule allows it, cannot be or need not be with these operands."""
        for j, k in enumerate(self.written):
            if j >= len(lifted.results) or lifted.results[j] is not lifted.operands[k]:
                return f"operand {k} is written in place, and the result would be sharded otherwise"
        for tensor, sharding in zip(self.tensors, lifted.operands, strict=True):
            for axis in sharding.partial:
                placement = sharding.placements[axis]
                assert isinstance(placement, Partial), f"axis {axis} of {sharding} is not Partial"
                if not has_terms(tensor.dtype, placement.op):
                    return f"no Partial({placement.op}) of {tensor.dtype}"
                if not self.has_room:
                    return "terms of values that are not finite, or nearly so"
        return None

    def _local(self) -> Callable[..., Any]:
        """What runs on local tensors; a view that local strides do not allow is a copy there."""
        default = torch.reshape if self.call.name == "view.default" else self.call.func
        return default if self.made.local is None else partial(self.made.local, default)

    def _constants(self, bound: Bound, lifted: Lifted, coordinate: tuple[int, ...]) -> dict[int, Any]:
        """Arguments that are sizes of the result: those of this rank's part."""
        made, constants = self.made, dict[int, Any]()
        if made.local_size is not None:
            part = lifted.results[0].part(bound.known_shape(0), coordinate)
            constants[made.local_size] = part
            if made.local_stride is not None:
                constants[made.local_stride] = global_stride(part, self.call.values[made.local_stride])
        return constants

    def _compared(
        self, bound: Bound, lifted: Lifted, k: int, parts: Sequence[Tensor | None], expected: Tensor | None
    ) -> str | None:
        tensors = [p for p in parts if p is not None]
        if expected is None or len(tensors) < len(parts):
            return None if expected is None and not tensors else f"expected {expected}, got {parts}"
        if expected.ndim != len(bound.result_dims(k, expected.ndim)) or any(p.ndim != expected.ndim for p in tensors):
            return f"the line has {len(bound.results[k])} dims, the operator gives {expected.ndim}"
        if (wrong := complaint(tensors, lifted.results[k], expected, self.close)) is not None:
            return wrong
        for rank, part in enumerate(tensors):
            told = bound.result_shape(k, tuple(part.shape))
            if told != tuple(expected.shape):
                return f"rank {rank}: expected the shape {tuple(expected.shape)}, the line tells {told}"
        return None


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values and in lists of them, in order."""
    found: list[Tensor] = []
    mapped(list(values), found.append)
    return found


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nesting of lists, tuples and dicts with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {name: mapped(item, change) for name, item in value.items()}
    return value


def described(value: Any) -> str:
    """An argument in short: dtype and shape of a tensor."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"[{', '.join(map(described, value))}]" if isinstance(value, (list, tuple)) else repr(value)


def _in_words(way: Way) -> str:
    """ "k split: S(1), S(0) -> P(sum)" """
    name = f"{way.factor} split {way.cut}".rstrip() if way.factor else "whole" if not _is_partial(way) else "terms"
    return f"{name}: {', '.join(map(str, way.operands))} -> {', '.join(map(str, way.results))}"


def _is_partial(way: Way) -> bool:
    return any(isinstance(p, Partial) for p in way.operands)


def _has_room(x: Tensor) -> bool:
    """Whether terms of the values can be written without overflow."""
    if not (x.is_floating_point() or x.is_complex()):
        return True
    if x.is_floating_point() and x.itemsize == 1:
        return False  # nothing adds them
    return bool((x.abs() < torch.finfo(x.dtype).max / 64).all())
