"""One way for all conversions: describe each tensor, say what it becomes, move what is lacking, make the result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import below_torch_functions
from torchshard.comm.circle import circle_of, this_rank, world_size
from torchshard.errors import RankMismatchError, ShardingError
from torchshard.layout.boxes import Box
from torchshard.layout.holding import Holding
from torchshard.state_dict.forms import Form, Memory, form_of, terms_of
from torchshard.state_dict.targets import Target
from torchshard.state_dict.trees import identity, in_order, reached, require_distinct, with_leaves
from torchshard.tensor.interop import without_history
from torchshard.tensor.moving.carrying import Job, carry
from torchshard.tensor.moving.redistribute import check_assumed

Decide = Callable[[str, Tensor, Form], "Target | None"]
"""What the tensor at a path shall become; None where it stays as it is."""


@dataclass(slots=True)
class _Made:
    """A tensor under way: its form, what it becomes, and this rank's parts of that."""

    form: Form
    target: Target
    parts: Sequence[Tensor]


@torch.no_grad()
@below_torch_functions
def convert(
    tree: Any,
    decide: Decide,
    *,
    reduce_partial: bool = False,
    source: int | None = None,
    refusal: Exception | None = None,
    waiting: tuple[tuple[int, ...], str] | None = None,
) -> Any:
    """The same nesting with converted tensors; tensors that are one stay one.

    Args:
        tree: a tensor, or dicts, lists and tuples of anything.
        decide: asked once for each distinct tensor.
        reduce_partial: see `form_of`.
        source: the global rank whose plain tensors count; None where all have the same.
        refusal: why this rank cannot convert, which the others have to know.
        waiting: ranks, ascending, that wait for this one in any case, and the type of their devices.

    Raises:
        ShardingError: a tensor that cannot be converted, or the source is no rank; nothing is moved then on any rank.
        RankMismatchError: ranks do not convert the same, or one is lost.
    """
    if source is not None and not 0 <= source < world_size():
        refusal = refusal or ShardingError("The source is no rank.", expected=f"0 to {world_size() - 1}", got=source)
        source = None
    memory: Memory = {}
    under_way: dict[Any, _Made | None] = {}
    jobs: list[Job] = []
    paths: dict[str, Any] = {}
    told = set() if waiting is None else {waiting}
    try:
        everything = in_order(tree)
        require_distinct(everything)
    except Exception as error:  # the others may wait for what this rank has, nevertheless
        refusal = refusal or error
        everything = reached(tree)
    found = [(path, leaf) for path, leaf in everything if isinstance(leaf, Tensor)]
    if reduce_partial:
        _agree_on_reductions(found)
    distinct: dict[Any, tuple[Tensor, list[str]]] = {}  # each tensor with all its names
    for path, leaf in found:
        paths[path] = key = identity(leaf)
        distinct.setdefault(key, (leaf, []))[1].append(path)
    for key, (leaf, names) in distinct.items():
        under_way[key] = form = None
        try:
            form = form_of(leaf, reduce_partial, memory)
            target = decide(names[0], leaf, form)
            if target is not None:
                under_way[key] = _started(names, form, target, memory, jobs, source)
        except RankMismatchError:
            raise
        except Exception as error:  # the others may wait for this rank, at this tensor or another
            refusal = refusal or _named(names[0], error)
            told |= _holders(leaf, form)
    carry(jobs, refusal, told)
    del jobs
    finished = {key: m.target.finish(m.form, m.parts) if m else None for key, m in under_way.items()}
    asking: dict[Any, Tensor | None] = {}
    for path, leaf in found:
        made = finished[paths[path]] if under_way[paths[path]] else leaf
        key = paths[path] = paths[path], leaf.requires_grad
        if key not in asking:
            asking[key] = made if made is None or made is leaf else _asking(made, leaf.requires_grad)
    return with_leaves(tree, lambda path, leaf: asking[paths[path]] if path in paths else leaf)


def _holders(x: Tensor, form: Form | None) -> set[tuple[tuple[int, ...], str]]:
    """The ranks that hold a tensor, as far as is known, and the type of their devices."""
    if form is not None and form.holding is not None:
        return {(tuple(sorted(form.holding.ranks)), form.device.type)}
    terms = terms_of(x)
    return set() if terms is None else {terms[:2]}


def _named(path: str, error: Exception) -> Exception:
    """The same, with the tensor that it is about."""
    if not path or not isinstance(error, ShardingError):
        return error
    parts = {name: getattr(error, name) for name in ("expected", "got", "where", "fix")}
    return ShardingError(f"{path}: {error.what}", **parts)


def _asking(x: Tensor, requires_grad: bool) -> Tensor:
    """A tensor, or another of the same memory, that asks for gradients or does not."""
    return x if x.requires_grad == requires_grad else without_history(x).requires_grad_(requires_grad)


def _agree_on_reductions(found: Sequence[tuple[str, Tensor]]) -> None:
    """All ranks reduce the same Partial tensors, in the same order: compared before the first of them is."""
    circles: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for path, x in found:
        if (terms := terms_of(x)) is not None:
            ranks, device, text = terms
            circles.setdefault((ranks, device), []).append(f"{path}: {text}")
    for (ranks, device), lines in sorted(circles.items()):
        if this_rank() in ranks:
            circle_of(ranks, torch.device(device)).agree("\n".join(lines))


def _started(
    names: Sequence[str], form: Form, target: Target, memory: Memory, jobs: list[Job], source: int | None
) -> _Made:
    """What a tensor becomes: memory and the job that fills it, or the tensor's own memory where nothing moves."""
    path, *others = names
    goal = target.holding(form, memory)
    held, parts, device = form.holding, form.parts, form.device
    if held is None:
        holders = goal.ranks if source is None else (source,)
        key = "whole", holders, form.shape
        held = memory.get(key) or memory.setdefault(key, Holding.everywhere(form.shape, holders))
        parts = [] if source not in (None, this_rank()) else parts
        device = target.device(form)
    boxes = target.boxes(form)
    own = dict(parts)
    given = form.text if form.holding is not None or source is None else f"{form.text} on rank {source}"
    plan = f"{given}, to {target.text}"
    job = Job(path, plan, form.dtype, held, goal, parts, [], device, form.problem, form.group, others)
    if job.problem is None and (job.moves or form.holding is None):
        job.problem = _without_values(path, form, parts)
    if not job.moves and form.unchecked is not None and form.parts:
        check_assumed(form.parts[0][1], form.unchecked)  # else the ranks compare what they move
    if not job.moves and job.problem is None and all(box in own or not box.numel for box in boxes):
        return _Made(form, target, [own[box].detach() if box in own else target.room(form, box) for box in boxes])
    jobs.append(job)
    job.goals = [(box, target.room(form, box)) for box in boxes] if job.problem is None else []
    return _Made(form, target, [room for _, room in job.goals])


def _without_values(path: str, form: Form, parts: Sequence[tuple[Box, Tensor]]) -> ShardingError | None:
    """What is wrong with a tensor of which this rank has nothing that could be copied."""
    if form.holding is None and not form.parts:
        return ShardingError(
            "Only dense tensors can be cut or sent.",
            expected="elements that lie in memory at strides",
            got=form.text,
            where=path,
            fix="a dense tensor of its values, or None for its placements, which leaves it as it is",
        )
    if any(part.is_meta for _, part in parts):
        return ShardingError(
            "A tensor on the meta device has no values to convert.",
            expected="a tensor with values",
            got=form.text,
            where=path,
            fix="to_dtensor(..., src_rank=) takes them from one rank",
        )
    return None
