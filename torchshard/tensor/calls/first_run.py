"""The first run of a call on local tensors: its result, and the plan for further calls of its kind."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchshard._torch import (
    is_traced,
    lies_as_device_likes,
    local_callable,
    memory_of,
    reading_conjugates,
    refuses_kind,
    schema,
)
from torchshard.errors import ShardingError
from torchshard.layout.layout import Sharding, contiguous_stride
from torchshard.layout.placements import Partial
from torchshard.layout.reductions import masking
from torchshard.rules.bind import bind as bind_rule
from torchshard.rules.notation import parse
from torchshard.rules.rule import Made
from torchshard.tensor.calls import guards, outside
from torchshard.tensor.calls.call import Call, Operand, lasting, run_on_meta
from torchshard.tensor.calls.codegen import Argument, How, noting_alike, plan_maker
from torchshard.tensor.calls.refusing import reading_first, refusing, telling_whole
from torchshard.tensor.dtensor import DTensor, dtensors_in, new
from torchshard.tensor.layout import SEVERED, TURNED, TensorLayout, dense_stride, global_stride, layout_for
from torchshard.tensor.moving.once import brought
from torchshard.tensor.moving.redistribute import in_memory_order, redistribute_local, redistribute_together
from torchshard.unsupported import unsupported

Plan = Callable[..., Any]

_SAME = "_to_copy.default", "clone.default"
"""Operators whose result is their operand once more, as views are."""


class FirstRun:
    """The first run of a call on local tensors, from which its plan is made."""

    def __init__(
        self,
        call: Call,
        operands: Sequence[Operand],
        made: Made,
        targets: Sequence[TensorLayout],
        shapes_told: bool = False,
    ) -> None:
        self.call, self.operands, self.made, self.targets = call, operands, made, targets
        self.mesh = operands[0].layout.mesh
        self.moves = [not o.layout.sharding.holds_as(t.sharding) for o, t in zip(operands, targets, strict=True)]
        # Whether results should be views of the first operand, and cannot be because that has to be moved.
        self.severs = call.viewed() and (self.moves[0] or bool(operands[0].layout.marks & SEVERED))
        # Whether operands that are moved are only read, so that they may be parts of what is here. In a trace, whose
        # compiler sees that for itself, lengths may be symbols.
        self.traced = is_traced(next(dtensors_in(call.values))._local_tensor)
        self.reading = not (self.traced or call.written() or call.keeps_strides())
        # Whether the result may be a copy, where the global strides allow a view and those of this rank's piece do not;
        # and whether it is one.
        self.may_copy, self.copied = call.name == "view.default" and not self.severs, False
        # torch says it of `x[index]`, too, where only masks have values that decide: those no rule takes.
        self.shapes_vary = torch.Tag.dynamic_output_shape in call.func.tags and not shapes_told

    def finish(
        self, shape_of: Callable[[int, Tensor], tuple[int, ...]], results: Sequence[Sharding] | None
    ) -> tuple[Any, Plan | None]:
        """Run, wrap, and make the plan.

        Args:
            shape_of: global shape of a result, from its number and its local tensor.
            results: sharding of each result; all whole where None.
        """
        call = self.call
        if self.mesh.coordinate is None:
            return outside.first_run(call, self.operands, results)
        arguments, bound = self._arguments(results)
        function = local_callable(call.func)
        if not self.traced and any(o.layout.dtype.is_complex for o in self.operands):
            function = reading_conjugates(function)
        if self.made.local is not None:
            function = partial(self.made.local, function)
        written = call.written()
        if written:
            if (written == (0,) or "out" in call.names) and len(self.operands) > 1:
                function = reading_first(function)
            returns = len(schema(call.func).returns)
            plan = plan_maker(arguments, call.positional, f"argument:{written[0]}" if returns else "none")
            result = plan(self._first(function), new, DTensor, (), **bound)(*call.values)
            return result, plan(function, new, DTensor, (), **bound)
        values, window = list(call.values), None
        if self.severs:
            arguments = self._base_given(arguments, bound)
            base = self.operands[0].at
            values[base], window = guards.opened(values[base], self._there_and_back())
        raw = plan_maker(arguments, call.positional, "raw")
        try:
            local = raw(self._first(function), new, DTensor, (), **bound)(*values)
        except (RuntimeError, ValueError):  # ValueError: a traced view
            if not self.may_copy:
                raise
            local, self.copied = raw(self._first(torch.reshape), new, DTensor, (), **bound)(*values), True
        if not isinstance(local, (Tensor, tuple, list)):
            return local, raw(function, new, DTensor, (), **bound)
        parts = [local] if isinstance(local, Tensor) else list(local)
        if results is not None and any(isinstance(t, Tensor) for t in parts[len(results) :]):
            raise ShardingError(
                f"{call.name}: its rule {self.made.line!r} is wrong: the operator gives more results.",
                expected=f"at most {len(results)}",
                got=len(parts),
                fix="write the dims of each result; a function of the arguments may give another line for each",
            )
        if self.reading and (shared := self._shared(parts)):
            self.reading = False
            arguments, bound = self._arguments(results)
            parts = [t.clone() if k in shared else t for k, t in enumerate(parts)]
            local = parts[0] if isinstance(local, Tensor) else parts
        outs = [self._layout(k, t, shape_of, results) if isinstance(t, Tensor) else None for k, t in enumerate(parts)]
        if not call.keeps_strides() and any(map(_lies_otherwise, parts, outs)):
            function, parts = partial(_ordering, function, outs), _ordered(parts, outs)
        return self._wrapped(local, parts, outs, arguments, bound, function, window)

    def _shared(self, parts: Sequence[Any]) -> set[int]:
        """Which results have the memory of an operand that was moved: of a kernel that returns what it is given."""
        moved = [o for o, moves in zip(self.operands, self.moves, strict=True) if moves and o.item is None]
        read = {memory_of(self.call.values[o.at]._local_tensor) for o in moved if not o.fixed}
        dense = ((k, t) for k, t in enumerate(parts) if isinstance(t, Tensor) and t.layout is torch.strided)
        return {k for k, t in dense if memory_of(t) in read}

    def _first(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return telling_whole(self.call, refusing(self.call, self.operands, self.made, self.targets, function))

    def _arguments(self, results: Sequence[Sharding] | None) -> tuple[tuple[Argument, ...], dict[str, Any]]:
        call, bound = self.call, dict[str, Any]()
        how: list[How] = ["given"] * len(call.names)
        lists: dict[int, dict[int, tuple[TensorLayout, TensorLayout]]] = {}
        ways: dict[str, Hashable] = {}  # by identity, as symbolic layouts have no hash
        for o, target, moves in zip(self.operands, self.targets, self.moves, strict=True):
            name = call.names[o.at]
            if o.item is not None:
                lists.setdefault(o.at, {})[o.item] = o.layout, target
            elif not o.fixed:
                moves = moves or self._is_turned(o)
                how[o.at] = "move" if moves else "local"
                if moves:
                    reading = self.reading and self._takes_part(o, target)
                    ways[name] = id(o.layout), id(target), reading
                    bound[f"move_{name}"] = mover(o.layout, target, reading)
            elif moves:
                how[o.at], ways[name], bound[f"move_{name}"] = "move", id(target), _term_of(target)
        for at, pairs in lists.items():
            still = all(a.sharding is b.sharding and not a.marks & TURNED for a, b in pairs.values())
            how[at] = "locals" if still else "moves"
            if not still:
                bound[f"move_{call.names[at]}"] = list_mover(pairs)
                ways[call.names[at]] = way_of_list(pairs)
        self._constants(how, bound, results)
        return noting_alike(list(map(Argument, call.names, how)), ways), bound

    def _takes_part(self, o: Operand, target: TensorLayout) -> bool:
        """Whether the operator takes a part of what is here: gradients' kernels believe strides of layouts, and read
        what has none of their gaps as if it had none itself.
        """
        return torch.Tag.pointwise in self.call.func.tags or _lies_as_told(o.layout, target)

    def _is_turned(self, o: Operand) -> bool:
        """Whether an operand is read, and does not lie in memory as its strides say."""
        return bool(o.layout.marks & TURNED) and not self.call.viewed() and o.at not in self.call.written()

    def _there_and_back(self) -> tuple[guards.Move, guards.Give] | None:
        """How the first operand gets to where it can be viewed, and back; None where it is there."""
        if not self.moves[0]:
            return None
        source, target = self.operands[0].layout.plain, self.targets[0]
        return local_mover(self.operands[0].layout, target), guards.all_of(local_mover(target, source))

    def _base_given(self, arguments: tuple[Argument, ...], bound: dict[str, Any]) -> tuple[Argument, ...]:
        """The arguments of a plan that is handed the moved first operand."""
        base = self.call.names[self.operands[0].at]
        bound.pop(f"move_{base}", None)
        return tuple([Argument(a.name, "given") if a.name == base else a._replace(alike=None) for a in arguments])

    def _constants(self, how: list[How], bound: dict[str, Any], results: Sequence[Sharding] | None) -> None:
        """Arguments that are sizes of the result become those of this rank's part."""
        made, call = self.made, self.call
        if made.local_size is None or results is None:
            return
        global_size = self._known_size()
        part = layout_for(results[0], global_size, contiguous_stride(global_size), torch.float32).local_shape
        how[made.local_size] = "constant"
        bound[f"constant_{call.names[made.local_size]}"] = part
        if made.local_stride is not None:
            how[made.local_stride] = "constant"
            stride = global_stride(part, call.values[made.local_stride])
            bound[f"constant_{call.names[made.local_stride]}"] = stride

    def _known_size(self) -> tuple[int, ...]:
        rule = bind_rule(parse(self.made.line), [o.layout.shape for o in self.operands], self.made.sizes)
        assert rule is not None, f"{self.call.name}: a rule that was bound before"
        return rule.known_shape(0)

    def _layout(
        self,
        k: int,
        local: Tensor,
        shape_of: Callable[[int, Tensor], tuple[int, ...]],
        results: Sequence[Sharding] | None,
    ) -> TensorLayout:
        """The layout of result k; checked against its local tensor, which a wrong rule would contradict."""
        if local.layout is not torch.strided or local.is_nested:
            kind = "a nested tensor" if local.is_nested else f"a tensor of layout {local.layout}"
            raise unsupported(
                f"{self.call.name} gives {kind}, which a DTensor cannot hold.",
                expected="strided tensors",
                fix="use it on x.to_local(), or on x.full_tensor()"
                + "; nn.TransformerEncoder(..., enable_nested_tensor=False) does without" * local.is_nested,
            )
        sharding = self.mesh.replicated() if results is None else results[k]
        shape = shape_of(k, local)
        last = sharding.part(shape, [n - 1 for n in self.mesh.shape])
        hidden = any(n is not whole and n <= 1 and n < whole for n, whole in zip(last, shape, strict=True))
        hidden = hidden or self.call.keeps_strides() or lies_as_device_likes(self.call.func)
        if self.made.contiguous:
            stride = contiguous_stride(shape)
        elif hidden:
            stride = self._meta_stride(k, shape)
        elif results is None and torch.Tag.dynamic_output_shape in self.call.func.tags:  # of the whole, as it came
            stride = tuple(local.stride())
        else:
            stride = global_stride(shape, local.stride())
        layout = layout_for(sharding, shape, stride, local.dtype)
        if self.mesh.coordinate is not None and tuple(local.shape) != tuple(layout.local_shape):
            raise ShardingError(
                f"{self.call.name}: its rule {self.made.line!r} is wrong: result {k} has another shape.",
                expected=f"{tuple(layout.local_shape)} on this rank, as part of {layout}",
                got=tuple(local.shape),
                fix="mend the rule; torchshard.validate_rule tells where it is wrong",
            )
        unmoved = [o.layout.assumed for o, moves in zip(self.operands, self.moves, strict=True) if not moves]
        first, marks = self.operands[0].layout, 0
        if self.call.viewed():
            marks = first.terms if self.severs else first.terms | first.marks & TURNED
        elif self.call.name in _SAME:
            marks = first.terms
        return layout.marked(marks, frozenset().union(*unmoved))

    def _meta_stride(self, k: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Strides from a run on meta tensors, for autograd formulas branch on them, and `contiguous` and `reshape`.

        A piece of length 0 or 1 does not show them, and they must not depend on the rank. Those of a view have gaps
        that are larger than a piece's.
        """
        try:
            results = run_on_meta(self.call, strides=True)
        except RuntimeError as error:
            if not refuses_kind(error):
                raise
            try:  # the device knows what to do with truth values
                results = run_on_meta(self.call, {torch.bool: torch.uint8}, strides=True)
            except NotImplementedError:
                return contiguous_stride(shape)
        result = results[k] if isinstance(results, (list, tuple)) else results
        return tuple(result.stride())

    def _wrapped(
        self,
        local: Any,
        parts: Sequence[Tensor | None],
        outs: Sequence[TensorLayout | None],
        arguments: tuple[Argument, ...],
        bound: dict[str, Any],
        function: Callable[..., Any],
        window: guards.Window | None,
    ) -> tuple[Any, Plan | None]:
        call = self.call
        base = self.operands[0].at
        is_list = not isinstance(local, Tensor) and len(schema(call.func).returns) == 1
        if isinstance(local, Tensor):
            kind = f"view:{base}" if self.may_copy else "tensor"
        else:
            kind = "list" if is_list else "tuple:" + "".join("0" if out is None else "1" for out in outs)
        extra: dict[str, Any] = {}
        if kind.startswith("view"):
            extra = {"copying": torch.reshape, "severed": guards.copied}
        make: Callable[..., Any] = guards.new_view if call.viewed() else new
        plan = plan_maker(arguments, call.positional, kind)(function, make, DTensor, tuple(outs), **bound, **extra)
        wrapped = [t if out is None else make(DTensor, t, out, False) for t, out in zip(parts, outs, strict=True)]
        if window is not None:
            plan = guards.severing(plan, base, self._there_and_back())
            for view in wrapped:
                if isinstance(view, DTensor):
                    guards.sever(view, window)
        elif self.copied and isinstance(wrapped[0], DTensor):
            guards.copied(wrapped[0], call.values[base])
        result = wrapped[0] if isinstance(local, Tensor) else wrapped if is_list else tuple(wrapped)
        return result, None if self.shapes_vary else lasting(plan, call, [(self.operands, outs)])


def _lies_otherwise(local: Tensor | None, layout: TensorLayout | None) -> bool:
    """Whether a result lies in memory as no piece of its layout does: autograd's formulas see the layout's strides, and
    kernels take their word for those of operands (group_norm's gradient).
    """
    if local is None or layout is None or is_traced(local) or 0 in layout.stride:
        return False
    dense = dense_stride(local.shape, layout.stride)
    return any(n > 1 and a != b for n, a, b in zip(local.shape, local.stride(), dense, strict=True))


def _ordered(parts: Sequence[Any], outs: Sequence[TensorLayout | None]) -> list[Any]:
    """Those that have a layout in the order that it says; the others, numbers and nothing, as they are."""
    return [t if o is None else in_memory_order(t, o) for t, o in zip(parts, outs, strict=True)]


def _ordering(function: Callable[..., Any], outs: Sequence[TensorLayout | None], *args: Any, **kwargs: Any) -> Any:
    """The results of a function of local tensors, in memory as their layouts say."""
    made = function(*args, **kwargs)
    return _ordered([made], outs)[0] if isinstance(made, Tensor) else _ordered(made, outs)


def _term_of(target: TensorLayout) -> Callable[[Any], Any]:
    """A function of a plain scalar that gives this rank's term of it: the scalar, or nothing to be added."""
    at, axes = target.mesh.coordinate, enumerate(target.placements)
    assert at is not None, "a rank outside of the mesh runs nothing"
    elsewhere = any(at[axis] and isinstance(p, Partial) and masking(p.op) == "first" for axis, p in axes)
    return _nothing_of if elsewhere else lambda x: x


def _nothing_of(x: Any) -> Any:
    """Zero, of the type of a number, and of its sign: so that -0.0 stays what it is."""
    return torch.zeros_like(x) if isinstance(x, Tensor) else type(x)() if isinstance(x, bool) else x * 0


def _lies_as_told(source: TensorLayout, target: TensorLayout) -> bool:
    """Whether the part of a local tensor of `source` that `target` has lies without gaps, if those of `source` do."""
    if source.stride != dense_stride(source.shape, source.stride):
        return True
    whole, part = (dense_stride(layout.local_shape, source.stride) for layout in (source, target))
    return all(n <= 1 or a == b for n, a, b in zip(target.local_shape, whole, part, strict=True))


def mover(source: TensorLayout, target: TensorLayout, reading: bool = False) -> Callable[[DTensor], Tensor]:
    """A function of a DTensor that gives its part in another layout; to be read only, if `reading` says so."""
    if source.marks & TURNED:
        return lambda x: in_memory_order(brought(x, source, target), source)
    return lambda x: brought(x, source, target, reading)


def local_mover(source: TensorLayout, target: TensorLayout) -> Callable[[Tensor], Tensor]:
    """A function of a local tensor that brings it to another layout."""
    if source.marks & TURNED:
        return lambda x: in_memory_order(redistribute_local(x, source, target), source)
    return lambda x: redistribute_local(x, source, target)


def way_of_list(pairs: Mapping[int, tuple[TensorLayout, TensorLayout]]) -> Hashable:
    """What tells two of list_mover apart, as long as these layouts are there."""
    return tuple([(k, id(source), id(target)) for k, (source, target) in pairs.items()])


def list_mover(pairs: dict[int, tuple[TensorLayout, TensorLayout]]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function of a list of tensors that gives local tensors to read, each brought to its layout in `pairs`."""
    turned = [(k, source) for k, (source, _) in pairs.items() if source.marks & TURNED]

    def move(items: Sequence[Any]) -> list[Any]:
        found, places = list(items), [k for k in pairs if type(items[k]) is DTensor]
        parts = redistribute_together([items[k]._local_tensor for k in places], [pairs[k] for k in places])
        for k, part in zip(places, parts, strict=True):
            found[k] = part
        for k, source in turned:
            found[k] = in_memory_order(found[k], source)
        return found

    return move
