"""Rules that users add: one line of notation for an operator of their own."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from torchshard._torch import decomposition, one_operator, schema
from torchshard.errors import ShardingError
from torchshard.rules import registry
from torchshard.rules.notation import Signature, factors, parse
from torchshard.rules.rule import Made, Options, Rule
from torchshard.rules.rule import options as read_options
from torchshard.tensor import handlers
from torchshard.tensor.calls import dispatch, foreach
from torchshard.tensor.calls.call import operator_name
from torchshard.tensor.proving.proof import Report
from torchshard.tensor.proving.validate import check_call, recorded
from torchshard.tensor.regions import caching


class RegisteredRule:
    """A rule that was registered; `remove()`, or the end of a `with` block, takes it back.

    Attributes:
        name: of the operator, as errors and tables have it.
        rule: the line and its options.
    """

    def __init__(self, name: str, rule: Rule) -> None:
        self.name, self.rule = name, rule

    def remove(self) -> None:
        """Take the rule back; what the operator had before counts again."""
        registry.remove(self.name, self.rule)
        _made_anew()

    def __enter__(self) -> "RegisteredRule":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"RegisteredRule({self.name}, {self.rule.how!r})"


def register_rule(
    op: Any,
    notation: str | Callable[..., str | Made],
    *,
    lin: str | int | None = None,
    red: str | Mapping[str, str] | None = None,
    plus: str | int | None = None,
    moves: bool = False,
    mono: bool = False,
    like: bool = False,
    full: bool = False,
    reads: str | None = None,
    samples: Iterable[Sequence[Any]] | None = None,
    override: bool = False,
) -> RegisteredRule:
    """Say what an operator does to layouts, in this process; every rank has to say the same.

    Graphs that torch.compile has made before, in this process, are dropped, here and by `remove()`.

    Args:
        op: an operator: torch.ops.mylib.scale, "mylib::scale", or what torch.library.custom_op returned. Its backward
            is another operator, with a rule of its own.
        notation: a line such as "i k, k j -> i j": the operator's tensors left of the arrow, its results right of it,
            a name for each dim; upper case where a dim must be whole. Or a function of the arguments that returns it.
        lin: numbers of operands in which the results are linear, so that these may stay Partial sums or averages while
            the others are whole: "0,1" for each by itself (a product), "0+1" for both together (a sum).
        red: for a dim that no result has, how the results of ranks that each have some of it combine: "k:sum" makes
            them Partial("sum"); several as "k:sum,j:sum" or {"k": "sum"}. A dim that is left out is never split.
        plus: numbers of operands that are added to such a sum, as the bias of addmm: they count once, not once a rank.
        moves: the operator only rearranges elements of operand 0, so that a Partial of any kind may stay one (flip).
        mono: it is elementwise and never falls where operand 0 rises, so that Partial max and min may stay so (exp).
        like: it reads only shape, stride and dtype of its operands, so that nothing is moved (zeros_like).
        full: no rank may hold an empty piece, as where the kernel fails on one.
        reads: names of number arguments, with commas between, on whose values a notation that is a function depends;
            by default a plan is kept for all values of one type.
        samples: as for validate_rule; the rule is proved on them before it counts.
        override: allow an operator that has a rule already.

    Returns:
        A handle; `remove()` takes the rule back, and so does the end of `with register_rule(...):`.

    Raises:
        ShardingError: the line cannot be read (says in which column), does not fit the operator, contradicts eager
            torch on a sample, or the operator has a rule already.
    """
    func = one_operator(op)
    name = operator_name(func)
    gone = ",".join(f"{f}:{r}" for f, r in red.items()) if isinstance(red, Mapping) else red
    words = {"lin": lin, "red": gone, "plus": plus, "reads": reads}
    flags = {"moves": moves, "mono": mono, "like": like, "full": full}
    text = [f"{k}={v}" for k, v in words.items() if v is not None] + [k for k, on in flags.items() if on]
    rule = Rule(notation, read_options(" ".join(text)))
    _require_free(func, name, override)
    if isinstance(notation, str):
        _require_fit(func, name, notation, rule.options)
    if samples is not None:
        _require_proof(func, name, rule, samples)
    registry.add(name, rule)
    _made_anew()
    return RegisteredRule(name, rule)


def _made_anew() -> None:
    """Have everything that was made by other rules made anew: plans, and graphs, which nothing else would check."""
    dispatch.clear_entries()
    if "torch._dynamo" in sys.modules:  # without which nothing is compiled
        torch.compiler.reset()
        caching.renew()


def _require_free(func: Any, name: str, override: bool) -> None:
    """Raise unless a rule for the operator would be used, and replaces none by accident."""
    if handlers.find(name) is not None or foreach.handles(name):
        raise ShardingError(
            f"{name} communicates inside, or works on lists: torchshard runs it without a rule.",
            expected="an operator that rules decide about",
            fix="wrap it in an operator of your own with torch.library.custom_op, and give that one a rule",
        )
    if decomposition(func) is not None:
        raise ShardingError(
            f"{name} is made of other operators before a DTensor sees it, so a rule for it would never be used.",
            expected="an operator that reaches a tensor subclass whole",
            fix="register rules for the operators that it is made of",
        )
    if not all("Tensor" in str(r.type) for r in schema(func).returns):
        raise ShardingError(
            f"{name} gives what is no tensor, and a rank would give that of its piece.",
            expected="an operator of which all results are tensors",
            got=f"-> {', '.join([str(r.type) for r in schema(func).returns])}",
            fix="have it give a tensor instead; without a rule it runs gathered, and all ranks give the same",
        )
    found = registry.find(name)
    if found is not None and not override:
        raise ShardingError(
            f"{name} has a rule already.",
            expected="an operator without one",
            got=found.how if isinstance(found.how, str) else "a function of its arguments",
            fix="register_rule(..., override=True)",
        )


def _require_fit(func: Any, name: str, line: str, options: Options) -> None:
    """Raise unless the line has the operator's tensors and results, and the options name what is there."""

    def unfit(expected: str, got: object, fix: str) -> ShardingError:
        return ShardingError(f"The line {line!r} does not fit {name}.", expected=expected, got=got, fix=fix)

    signature = parse(line)
    given, made = len(signature.operands), len(signature.results)
    kinds = [str(a.type) for a in schema(func).arguments if "Tensor" in str(a.type)]
    least, most = len([k for k in kinds if "Optional" not in k]), len(kinds)
    if not any("List" in k for k in kinds) and not least <= given <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        raise unfit(
            f"{count} operands", given, "left of '->' write the dims of each tensor argument, with commas between"
        )
    returns = [str(r.type) for r in schema(func).returns]
    if not any("List" in r for r in returns) and made != len(returns):
        raise unfit(f"{len(returns)} results", made, "right of '->' write the dims of each result, with commas between")
    named = {*options.plus, *[k for group in options.linear for k in group]}
    if max(named, default=0) >= given:
        raise unfit(f"operands from 0 to {given - 1} in lin= and plus=", sorted(named), "count operands from 0")
    unknown = [f for f in options.reduces if f not in _factors(signature)]
    if unknown:
        raise unfit("factors of the operands in red=", ", ".join(unknown), "red=k:sum, with k a dim that no result has")


def _factors(signature: Signature) -> set[str]:
    return {factor for dims in signature.operands for dim in dims for factor in factors(dim)}


def _require_proof(func: Any, name: str, rule: Rule, samples: Iterable[Sequence[Any]]) -> None:
    """Raise unless the rule is right on all samples, and proved on one."""
    report = Report(())
    for sample in samples:
        for call in recorded(func, sample, backward=False):
            if call.func is func:
                args, kwargs = call.with_values(call.values)
                report += check_call(func, args, kwargs, rule=rule)
    report.raise_if_wrong()
    if not report.right:
        raise ShardingError(
            f"The rule of {name} was proved on no sample.",
            expected="a line that fits the shapes of the samples",
            got=report.outcomes[0] if report.outcomes else "no samples with tensors",
            fix="samples=[(torch.randn(5, 4), ...)], with a length for each dim of the line",
        )
