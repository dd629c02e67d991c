"""Operators of ShardedTensors: those that work element by element, run on this rank's parts without communication.

And, not in compiled regions: those that draw random numbers, whatever the values are, where as for `factories.rand`
every rank draws the whole tensor and keeps its parts; and those that ask something of all elements (comparing.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from torchshard._torch import is_traced, operator_names, reading_conjugates, schema
from torchshard.errors import ShardingError
from torchshard.rules import pointwise
from torchshard.tensor.calls.foreach import handles as on_lists
from torchshard.tensor.sharded import comparing, specs
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor, made
from torchshard.unsupported import unsupported

# By element, but of another shape or meaning where parts are taken one by one.
_OTHERS = {"view_as_real.default", "view_as_complex.default", "bucketize.Tensor"}
_REDUCING = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}  # on lists, but not by element
_ALSO = {"_to_copy.default", "copy_.default", "zero_.default"}
_ALSO |= {f"masked_fill{how}.{kind}" for how in ("", "_") for kind in ("Scalar", "Tensor")}
_RANDOM = torch.Tag.nondeterministic_seeded
_DRAWING = {"uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "bernoulli_"}
_DRAWING |= {"rand_like", "randn_like", "randint_like"}


def run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the operator gives, part by part.

    Raises:
        UnsupportedOperatorError: it is none of those that work element by element.
        ShardingError: the ShardedTensors among the arguments are not cut alike, or a plain tensor is among them.
    """
    found = list(_sharded(args)) + list(_sharded(tuple(kwargs.values())))
    for x in found:
        for shard in x._local_shards:
            if shard.tensor.is_conj() or shard.tensor.is_neg():
                return reading_conjugates(_run)(func, found, args, kwargs)
    result = _run(func, found, args, kwargs)
    if schema(func).is_mutable:
        written = _sharded(_written(func, args, kwargs))
        parts = [shard.tensor for x in written for shard in x._local_shards if shard.tensor.__class__ is Tensor]
        increment_version(parts)  # a compiled region keeps them for its backward, or the user has them
    return result


def _run(func: Any, found: Sequence[ShardedTensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = ".".join(operator_names(func))
    if (
        name in ("new_empty.default", "new_empty_strided.default", "new_zeros.default")
        and tuple(args[1]) == found[0].shape
    ):
        options = {key: value for key, value in kwargs.items() if key in ("dtype", "device")}
        return _whole_new(found[0], torch.zeros_like if "zeros" in name else torch.empty_like, **options)
    if operator_names(func)[0] in _DRAWING and len(found) == 1 and not _in_trace(found[0]):
        return _drawn(func, args, kwargs)
    if name in comparing.EVERY | comparing.SOME and not _in_trace(found[0]):
        return _asked(func, name, found, args, kwargs)
    if not _by_element(func, name) and not _by_mask(name, args):
        raise unsupported(
            f"{name} is not an operator of ShardedTensors.",
            expected="an operator that works element by element, as those of optimizers, or equal, allclose, any, all",
            got=name,
            where=f"a ShardedTensor of shape {tuple(found[0].shape)}",
            fix="torchshard.state_dict.to_dtensor(x, mesh, placements) has the others; x.local_shards() the parts",
        )
    if on_lists(operator_names(func)[0]):
        return _run_lists(func, args, kwargs)
    require_alike(name, found, [*args, *kwargs.values()])
    return _joined(func, args, kwargs, found[0])


def cut_as(
    x: ShardedTensor, tensors: Sequence[Tensor], example: Tensor, group: dist.ProcessGroup | None = None
) -> ShardedTensor:
    """A ShardedTensor cut as `x` is, with other tensors as this rank's parts.

    Args:
        x: cut as the result shall be.
        tensors: this rank's parts.
        example: of the dtype and on the device that they have on all ranks; without elements where this one has none.
        group: the ranks; those of `x` by default.
    """
    properties = replace(x._metadata.tensor_properties, dtype=example.dtype, requires_grad=False, pin_memory=False)
    metadata, spec = replace(x._metadata, tensor_properties=properties), x._sharding_spec
    own = [shard.metadata for shard in x._local_shards]
    if example.device != x.device:
        metadata = specs.on_device(metadata, example.device)
        spec = specs.inferred_spec(metadata)
        own = specs.on_device(replace(metadata, shards_metadata=own), example.device).shards_metadata
    shards = [specs.Shard(tensor, shard) for tensor, shard in zip(tensors, own, strict=True)]
    return made(shards, metadata, spec, group or x._group, example)


def _whole_new(x: ShardedTensor, make: Callable[..., Tensor], **options: Any) -> ShardedTensor:
    """As torch's staging of asynchronous checkpoints asks for a copy: of the whole size, cut alike."""
    tensors = [make(shard.tensor.detach(), **options) for shard in x._local_shards]
    return cut_as(x, tensors, make(_nothing(x), **options))


def _in_trace(x: ShardedTensor) -> bool:
    return x.device.type != "meta" and is_traced(_nothing(x))


def _drawn(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an operator draws for a tensor like its first argument, or into that."""
    x: ShardedTensor = args[0]
    whole = func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args[1:], **kwargs)
    drawn = [whole[specs.box_of(shard.metadata, x.shape).slices] for shard in x._local_shards]
    if not schema(func).is_mutable:
        return cut_as(x, [part.clone(memory_format=torch.contiguous_format) for part in drawn], whole.new_empty(0))
    for shard, part in zip(x._local_shards, drawn, strict=True):
        shard.tensor.copy_(part)
    return x


def _asked(
    func: Any, name: str, found: Sequence[ShardedTensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What an operator says of the whole tensors; as of plain ones, those of other shapes are not equal."""
    if name == "equal.default" and len(found) > 1 and found[0].shape != found[1].shape:
        return False
    require_alike(name, found, [*args, *kwargs.values()])

    def ask(k: int | None) -> Any:
        if k is None:
            return func(*_nothing(args), **_nothing(kwargs))
        return func(*_parts(args, k), **_parts(kwargs, k))

    return comparing.answer(name, found, ask)


def _by_element(func: Any, name: str) -> bool:
    if _RANDOM in func.tags or name in _OTHERS or operator_names(func)[0] in _REDUCING:
        return False
    if not all("Tensor" in str(result.type) for result in schema(func).returns):  # a number, of all elements
        return False
    return torch.Tag.pointwise in func.tags or name in pointwise.RULES or name in _ALSO or on_lists(name)


def _by_mask(name: str, args: Sequence[Any]) -> bool:
    """Whether this is `x[mask] = number`, as the optimizer Rprop has it; newer torch calls masked_fill_."""
    if name != "index_put_.default":
        return False
    return all(isinstance(index, ShardedTensor) and index.dtype == torch.bool for index in args[1])


def _sharded(values: Any) -> Iterator[ShardedTensor]:
    for value in values:
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _sharded(value)


def _parts(values: Any, k: int) -> Any:
    """The arguments with each ShardedTensor replaced by its part number k on this rank."""
    if isinstance(values, ShardedTensor):
        return values._local_shards[k].tensor
    if isinstance(values, (list, tuple)):
        return type(values)(_parts(value, k) for value in values)
    if isinstance(values, Mapping):
        return {key: _parts(value, k) for key, value in values.items()}
    return values


def require_alike(name: str, found: Sequence[ShardedTensor], values: Sequence[Any]) -> None:
    """Check that these ShardedTensors are cut alike, and that no plain tensor is beside them among the values.

    Raises:
        ShardingError: names the operator, and both cuts or the argument.
    """
    first = found[0]
    for other in found[1:]:
        if other._group is not first._group and other._process_group is not first._process_group:
            # This rank's parts of both, unless it was another rank when one of them was made.
            first._group.living(), other._group.living()
        if other._metadata is not first._metadata and not _cut_alike(first, other):
            raise ShardingError(
                f"{name}: ShardedTensors that are cut in different ways.",
                expected=f"shape {tuple(first.shape)} cut as {first._sharding_spec}",
                got=f"shape {tuple(other.shape)} cut as {other._sharding_spec}",
                fix="y.reshard(x.sharding_spec())",
            )
    for position, value in enumerate(values):
        if isinstance(value, Tensor) and not isinstance(value, ShardedTensor) and value.ndim:
            raise ShardingError(
                f"{name}: argument {position} is a plain tensor.",
                expected="a ShardedTensor that is cut alike, a number or a tensor without dims",
                got=f"{type(value).__name__} of shape {tuple(value.shape)}",
                fix="torchshard.state_dict.to_sharded_tensor(value, spec=x.sharding_spec())",
            )


def _cut_alike(a: ShardedTensor, b: ShardedTensor) -> bool:
    def owned(x: ShardedTensor) -> list[Any]:
        shards = x._metadata.shards_metadata
        return [(box, s.placement.rank()) for box, s in zip(specs.boxes_of(x._metadata), shards, strict=True)]

    return a.shape == b.shape and owned(a) == owned(b)


def _joined(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], first: ShardedTensor) -> Any:
    """What the operator gives for each part, as ShardedTensors; its first argument where it writes to that.

    A rank without parts runs it on nothing: so it learns dtypes, and a graph what is written to.
    """
    results = [func(*_parts(args, k), **_parts(kwargs, k)) for k in range(len(first._local_shards))]
    example = results[0] if results else func(*_nothing(args), **_nothing(kwargs))
    if written := _written(func, args, kwargs):
        return written[0] if len(written) == 1 else tuple(written)
    wrapped = _wrapped(first, example, results)
    if schema(func).returns[0].alias_info is not None:
        wrapped._token = first._token
    return wrapped


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that the operator writes to."""
    return [
        args[k] if k < len(args) else kwargs[a.name]
        for k, a in enumerate(schema(func).arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]


def _wrapped(first: ShardedTensor, example: Any, results: Sequence[Any]) -> Any:
    if isinstance(example, (list, tuple)):
        return type(example)(_wrapped(first, one, [r[k] for r in results]) for k, one in enumerate(example))
    return cut_as(first, results, example)


def _nothing(values: Any) -> Any:
    """The arguments with each ShardedTensor replaced by a tensor without elements."""
    if isinstance(values, ShardedTensor):
        return values._empty_part()
    if isinstance(values, (list, tuple)):
        return type(values)(_nothing(value) for value in values)
    if isinstance(values, Mapping):
        return {key: _nothing(value) for key, value in values.items()}
    return values


def _run_lists(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An operator on lists, such as those of optimizers: the parts of all items in one call.

    Items that hold several parts on this rank become several items; plain tensors (step counters) are taken along for
    each part of the item beside them.
    """
    first = next(value for value in args if isinstance(value, (list, tuple)) and any(True for _ in _sharded(value)))
    counts = [len(item._local_shards) if isinstance(item, ShardedTensor) else 1 for item in first]
    for value in args:
        if isinstance(value, (list, tuple)) and len(value) == len(first):
            for pair in zip(first, value, strict=True):
                if any(isinstance(item, ShardedTensor) for item in pair):
                    require_alike(func.name(), list(_sharded(pair)), pair)

    def spread(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim == 1 and len(value) == len(first):  # numbers, one an item
            return value[[k for k, n in enumerate(counts) for _ in range(n)]]
        if not isinstance(value, (list, tuple)) or len(value) != len(first):
            return value
        pairs = zip(value, counts, strict=True)
        return [part for item, n in pairs for part in (_parts(item, k) for k in range(n))]

    result: Any = None
    if any(counts):
        result = func(*map(spread, args), **{key: spread(value) for key, value in kwargs.items()})
    if not schema(func).returns:
        for value in _written(func, args, kwargs):
            increment_version(value)  # which autograd does for single tensors, not for those in lists
        return None
    # What this rank has no part of gets its dtype from the operator on nothing.
    examples = [None] * len(counts) if all(counts) else func(*_nothing(args), **_nothing(kwargs))
    parts, items = iter(result or ()), []
    for item, n, example in zip(first, counts, examples, strict=True):
        mine = [next(parts) for _ in range(n)]
        items.append(cut_as(item, mine, mine[0] if mine else example) if isinstance(item, ShardedTensor) else mine[0])
    return items
