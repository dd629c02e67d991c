"""A rule: a line of notation, and what else is true of the operator. Tables of rules are text, one row each.

    names                 | notation             | options        # comment
    mm                    | i k, k j -> i j      | lin=0,1 red=k:sum

Names are those of ATen without the namespace; `.default` is understood. Options:

    lin=0+1,0      the results are linear in operands 0 and 1 together, and in operand 0 alone: Partial sums and
                   averages of these may pass through, while all other operands are whole, and numbers are finite
    per=a          number argument a divides: linear where it is not zero
    rounds         results of whole numbers are rounded: linear for others only
    moves          only moves elements of operand 0: Partials of every kind pass through
    mono           rises with operand 0, and is defined everywhere: Partial max and min pass through
    max=0+1,0      gives the largest of what it gives of terms whose largest are operands 0 and 1 together, and operand
                   0 alone: Partial max passes through; min= says it of the smallest
    red=k:sum      splitting factor k leaves this Partial in every result that lacks k ("...": any broadcast factor);
                   k:same says that such a result is the same on every rank
    plus=0         operand 0 is added to that sum, so it must count once: it becomes Partial too
    like           only shape, stride and dtype of the operands are read
    unread=k       nothing at all is read of operand k, for these arguments
    full           no rank may hold an empty piece: the kernel would fail or has no identity
    exact          compares what it reads: a Partial is summed whole, in one collective, so that it has the same bits
                   here as in other such operators; pieces of a sum may differ by the order of its terms
    reads=a,b      number arguments whose value, not only type, decides the rule

Where the shape of the arguments decides, a rule is a function instead: it takes the operator's arguments, with a Layout
(which has `shape` and `ndim`) for each tensor, and returns a line, a Made with what the line cannot say, or None where
it knows nothing of such arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torchshard.errors import ShardingError
from torchshard.layout.layout import Layout
from torchshard.layout.placements import Partial, Placement, R
from torchshard.rules.bind import bind
from torchshard.rules.notation import parse


@dataclass(frozen=True, slots=True)
class Options:
    """What the options column says; see the head of this file."""

    linear: tuple[tuple[int, ...], ...] = ()
    moves: bool = False
    mono: bool = False
    max: tuple[tuple[int, ...], ...] = ()
    min: tuple[tuple[int, ...], ...] = ()
    reduces: Mapping[str, Placement] = field(default_factory=dict)
    plus: tuple[int, ...] = ()
    like: bool = False
    unread: tuple[int, ...] = ()
    full: bool = False
    exact: bool = False
    per: tuple[str, ...] = ()
    rounds: bool = False
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """What a rule function returns where a line is not enough.

    Attributes:
        line: the notation.
        sizes: lengths of factors that occur in results only, or only in groups.
        options: changes to the row's options.
        local_size: position of an argument that is the size of the result, to be replaced by its local size.
        local_stride: position of an argument that is the stride of the result, likewise.
        local: what to call on local tensors instead of the operator, which it gets before its arguments.
        contiguous: whether that gives contiguous tensors, so that nothing has to be asked for their strides.
    """

    line: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    local_size: int | None = None
    local_stride: int | None = None
    local: Callable[..., Any] | None = None
    contiguous: bool = False


Builder = Callable[..., "str | Made | None"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: a line or a function that makes it, and options."""

    how: str | Builder
    options: Options = field(default_factory=Options)

    def made(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Made, Options] | None:
        """The line and options for these arguments (layouts in place of tensors); None where the rule has none."""
        made = self._made(args, kwargs)
        if made is None:
            return None
        return made, replace(self.options, **made.options) if made.options else self.options

    def with_out(self) -> "Rule":
        """The rule of the form that writes its one result to an operand `out`, the last one, which has its dims.

        It knows nothing of results that are more than what the operator makes of parts, or whose shape `out` has not.
        """

        def build(*args: Any, out: Any, **kwargs: Any) -> Made | None:
            made = self._made(args, kwargs)
            if made is None or made.local is not None or made.local_size is not None:
                return None
            read = [x for value in (*args, *kwargs.values()) for x in (value if _is_list(value) else [value])]
            bound = bind(parse(made.line), [x.shape for x in read if isinstance(x, Layout)], made.sizes)
            if bound is None or len(bound.results) != 1:
                return None
            if not (bound.tells_shapes() and bound.may_have(0, out.shape)):
                return None
            operands, _, result = made.line.partition("->")
            return replace(made, line=f"{operands.rstrip()}, {result.strip()} -> {result.strip()}")

        return Rule(build, self.options)

    def _made(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Made | None:
        made = self.how if isinstance(self.how, str) else self.how(*args, **kwargs)
        return Made(made) if isinstance(made, str) else made


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def table(text: str) -> dict[str, Rule]:
    """Read rows; each name becomes a key with its overload.

    Raises:
        ShardingError: names the row and the column.
    """
    rules: dict[str, Rule] = {}
    for row in text.splitlines():
        row = row.split("#")[0].strip()
        if not row:
            continue
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) != 3:
            raise ShardingError("A row of rules has three cells.", expected="names | notation | options", got=row)
        names, line, words = cells
        parse(line)
        rules.update(named(names, Rule(line, options(words))))
    return rules


def named(names: str, rule: Rule) -> dict[str, Rule]:
    """The same rule under several names, separated by spaces."""
    return {name if "." in name else name + ".default": rule for name in names.split()}


def options(words: str) -> Options:
    """Read the options column.

    Raises:
        ShardingError: names the word that is no option.
    """
    found: dict[str, Any] = {}
    for word in words.split():
        name, _, value = word.partition("=")
        if name in ("moves", "mono", "like", "full", "exact", "rounds") and not value:
            found[name] = True
        elif name in ("lin", "max", "min") and value:
            groups = tuple([tuple(map(int, group.split("+"))) for group in value.split(",")])
            found["linear" if name == "lin" else name] = groups
        elif name in ("plus", "unread") and value:
            found[name] = tuple(map(int, value.split(",")))
        elif name in ("reads", "per") and value:
            found[name] = tuple(value.split(","))
        elif name == "red" and value:
            found["reduces"] = reduces({f: op for f, _, op in (pair.partition(":") for pair in value.split(","))})
        else:
            raise ShardingError(
                "A rule has an option that does not exist.",
                expected="lin=, per=, rounds, moves, mono, max=, min=, red=, plus=, like, unread=, full, exact, reads=",
                got=repr(word),
            )
    return Options(**found)


def reduces(ops: Mapping[str, str]) -> Mapping[str, Placement]:
    """Factor -> placement of results that lack it, from factor -> name of the reduction, or "same"."""
    return MappingProxyType({factor: R if op == "same" else _partial(factor, op) for factor, op in ops.items()})


def _partial(factor: str, op: str) -> Placement:
    try:
        return Partial(op)
    except ShardingError as error:
        raise ShardingError(
            "Option red= of a rule names, for a factor, a reduction that does not exist.",
            expected=f"a factor and a colon before {error.expected}, or same",
            got=f"red={factor}:{op}" if op else f"red={factor}",
            fix=f"red={factor}:sum" if op else "red=k:sum, where k is the factor",
        ) from None
