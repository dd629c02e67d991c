"""The proof of rules: every way that a rule allows is played on all ranks in one process and compared with eager torch.

No process group is needed. A call is cut as each way says (pieces uneven and empty ones too, Partial terms that only
together make the value), run once a rank on plain tensors, put together, and compared: shape, dtype and values.
Backward is proved by recording: forward and backward run eagerly, and every ATen operator that passes and has a rule is
proved with the arguments that it got.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import intercepting, operator_in
from torchshard.errors import ShardingError
from torchshard.rules.rule import Rule
from torchshard.tensor.calls.call import Call, rule_of
from torchshard.tensor.calls.dispatch import call_of
from torchshard.tensor.proving.proof import Report, described, mapped, proved, tensors_in

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2))

# Autograd's own: nothing happens to the tensor.
_UNTOUCHED = frozenset({"detach.default", "alias.default"})


def validate_rule(
    op: Any,
    samples: Iterable[Sequence[Any]],
    *,
    backward: bool = True,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    strict: bool = True,
) -> Report:
    """Prove the rules of an operator, and of all that its forward and backward call, against eager torch.

    Args:
        op: an operator ("mm", "mylib::scale", torch.ops.mylib.scale, a torch.library.custom_op), or any function.
        samples: for each, the positional arguments, plain tensors among them; a dict at the end holds keyword
            arguments. Choose lengths that two and three ranks cannot halve, and others that they can.
        backward: whether to run backward where the results require a gradient. The tensors of the samples that do
            so are the leaves, or all floating ones where none does.
        meshes: the shapes of mesh to play.
        strict: whether to raise; else the report tells what is wrong, and is empty where there are no rules.

    Returns:
        One outcome for each way, mesh and call.

    Raises:
        TypeError: a sample that is no tuple.
        ShardingError: a way gives something else than eager torch, or no operator with a rule was called.

    Example:
        >>> validate_rule("mm", [(torch.randn(5, 4), torch.randn(4, 6))])
    """
    function = operator_in(torch.ops, op) if isinstance(op, str) else op
    report, seen = Report(()), set[str]()
    for sample in samples:
        if not isinstance(sample, (tuple, list)):
            raise TypeError(
                f"validate_rule: each sample is a tuple of the operator's arguments, not {type(sample).__name__}"
            )
        for call in recorded(function, sample, backward):
            label = f"{call.name}{[described(v) for v in call.values]}"
            if label not in seen and call.name not in _UNTOUCHED:
                seen.add(label)
                args, kwargs = call.with_values(call.values)
                report += check_call(call.func, args, kwargs, meshes=meshes)
    if not strict:
        return report
    if not report.right and not report.wrong:
        raise ShardingError(
            "Nothing was proved: no operator that was called has a rule for these samples.",
            expected="an operator with a rule",
            got=", ".join(sorted({entry.split("[")[0] for entry in seen})) or "no samples",
            fix='torchshard.register_rule(op, "i k, k j -> i j", ...)',
        )
    report.raise_if_wrong()
    return report


def check_call(
    func: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rule: Rule | None = None,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    limit: int = 24,
) -> Report:
    """Play one call of an ATen operator in every way that its rule allows.

    Args:
        func: the operator, an OpOverload.
        args: its positional arguments, plain tensors.
        kwargs: its keyword arguments.
        rule: by default the one that `func` has.
        meshes: the shapes of mesh to play.
        limit: how many combinations of ways are played on a mesh of several axes (drawn, always the same).

    Returns:
        An empty report where there is no rule.
    """
    call = call_of(func, args, kwargs or {})
    rule = rule or rule_of(call.func)
    tensors = tensors_in(call.values)
    if rule is None or not tensors:
        return Report(())
    with torch.no_grad():
        return Report(tuple(proved(call, rule, tensors, meshes, limit)))


def recorded(function: Callable[..., Any], sample: Sequence[Any], backward: bool) -> list[Call]:
    """The ATen calls of forward (and backward) on a sample, each with a copy of its arguments."""
    named: Mapping[str, Any] = sample[-1] if len(sample) and isinstance(sample[-1], dict) else {}
    given = list(sample[: len(sample) - bool(named)])
    calls: list[Call] = []

    def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(call_of(func, *mapped((args, kwargs), lambda t: t.detach().clone())))
        return func(*args, **kwargs)

    marked = any(t.requires_grad for t in tensors_in([given, list(named.values())]))

    def leaf(x: Tensor) -> Tensor:
        wanted = x.requires_grad if marked else x.is_floating_point() or x.is_complex()
        return x.detach().clone().requires_grad_(backward and wanted)

    args, kwargs = mapped((given, dict(named)), leaf)
    with torch.enable_grad(), intercepting(record):
        results = function(*args, **kwargs)
    ends = [t for t in tensors_in([results]) if t.requires_grad]
    generator = torch.Generator("cpu").manual_seed(0)
    grads = [torch.randn(t.shape, generator=generator, device=generator.device).to(t) for t in ends]
    if ends:
        with intercepting(record):
            torch.autograd.backward(ends, grads)
    return calls
