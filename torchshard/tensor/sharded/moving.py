"""ShardedTensors that move: gathered on one rank, cut in another way, to another device."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard._torch import is_traced, skip_methods
from torchshard.comm.circle import refusing
from torchshard.errors import ShardingError
from torchshard.layout.boxes import Box, whole
from torchshard.layout.holding import Holding, lacking, listed
from torchshard.tensor.moving.carrying import Job, carry
from torchshard.tensor.sharded import checking, specs
from torchshard.tensor.sharded.operators import cut_as
from torchshard.tensor.sharded.sharded_tensor import ShardedTensor, group_of, made
from torchshard.unsupported import unsupported


def held(x: ShardedTensor) -> Holding:
    """Who holds which part of `x`."""
    return specs.holding_of(x._metadata, dist.get_process_group_ranks(group_of(x)))


def parts(x: ShardedTensor) -> list[tuple[Box, Tensor]]:
    """This rank's parts."""
    return [(specs.box_of(shard.metadata, x.shape), shard.tensor.detach()) for shard in x._local_shards]


def _require_values(x: ShardedTensor, what: str) -> None:
    if any(is_traced(shard.tensor) and not shard.tensor.is_meta for shard in x._local_shards):
        raise unsupported(
            f"{what} of a ShardedTensor cannot be compiled: ranks send parts of other sizes.",
            expected="a ShardedTensor that has its values",
            got="one that a compiled region traces",
            fix=f"call {what} outside of the region",
        )


def gather(x: ShardedTensor, dst: int, out: Tensor | None, dtype: torch.dtype | None) -> None:
    """See ShardedTensor.gather."""
    _require_values(x, "gather()")
    group, device = group_of(x), specs.device_here(x._metadata)
    ranks = dist.get_process_group_ranks(group)
    with refusing(ranks, device, group):
        if not 0 <= dst < len(ranks):
            raise ShardingError(
                "gather() has no such destination.", expected=f"a place from 0 to {len(ranks) - 1}", got=dst
            )
    here = dist.get_rank() == ranks[dst]
    problem = None
    if here != (out is not None) or (out is not None and out.shape != x.shape):
        problem = ShardingError(
            "gather() writes to a tensor of the whole size, on one rank.",
            expected=f"out of shape {tuple(x.shape)}" if here else "out=None",
            got="None" if out is None else f"a tensor of shape {tuple(out.shape)}",
            where=f"rank {dist.get_rank()}; dst is place {dst} of the ranks {ranks}",
        )
    goals: list[tuple[Box, Tensor]] = []
    if here and out is not None and problem is None:
        direct = out.dtype == x.dtype and dtype in (None, x.dtype)
        goals = [(whole(x.shape), out.detach() if direct else torch.empty(x.shape, dtype=x.dtype, device=out.device))]
    target = Holding.of(x.shape, [(ranks[dst], whole(x.shape))])
    source = held(x)
    plan = f"{x.dtype} of shape {tuple(x.shape)}, {listed(source)}, gathered on rank {ranks[dst]}"
    carry([Job("gather", plan, x.dtype, source, target, parts(x), goals, device, problem, group)])
    if goals and out is not None and goals[0][1] is not out:
        out.detach().copy_(goals[0][1] if dtype is None else goals[0][1].to(dtype))


def reshard(x: ShardedTensor, spec: Any) -> ShardedTensor:
    """See ShardedTensor.reshard."""
    _require_values(x, "reshard()")
    gradient = x.grad if x.is_leaf else None
    both = {"reshard": x, "reshard of the gradient": gradient}
    cuts = [(t, *_cut(t, spec, name)) for name, t in both.items() if isinstance(t, ShardedTensor)]
    carry([job for *_, job in cuts if job is not None])
    for old, new, _ in cuts:
        old._local_shards, old._metadata, old._sharding_spec = new._local_shards, new._metadata, spec
        old._token = new._token
    return x


def _cut(x: ShardedTensor, spec: Any, name: str) -> tuple[ShardedTensor, Job | None]:
    """A ShardedTensor cut as `spec` says, and what fills it; it shares the memory of `x` where nothing moves."""
    group, device = group_of(x), specs.device_here(x._metadata)
    ranks = dist.get_process_group_ranks(group)
    job = None
    with refusing(ranks, device, group):
        metadata = specs.metadata_of(spec, x.shape, x._metadata.tensor_properties)
        checking.check_whole(metadata, ranks)
        source, target = held(x), specs.holding_of(metadata, ranks)
        mine = [shard for shard in metadata.shards_metadata if shard.placement.rank() == dist.get_rank()]
        boxes = [specs.box_of(s, x.shape) for s in mine]
        moves = lacking(source, target) or lacking(target, source)
        old = {} if moves else dict(parts(x))
        tensors = [old[box] if box in old else _room(x, s) for box, s in zip(boxes, mine, strict=True)]
        if moves:
            plan = f"{x.dtype} of shape {tuple(x.shape)}, {listed(source)}, to {listed(target)}"
            goals = [(box, tensor.detach()) for box, tensor in zip(boxes, tensors, strict=True)]
            job = Job(name, plan, x.dtype, source, target, parts(x), goals, device, None, group)
    asking = metadata.tensor_properties.requires_grad
    shards = [specs.Shard(tensor.requires_grad_(asking), s) for tensor, s in zip(tensors, mine, strict=True)]
    return made(shards, metadata, spec, group), job


def _room(x: ShardedTensor, shard: Any) -> Tensor:
    return torch.empty(shard.shard_sizes, dtype=x.dtype, device=shard.placement.device())


def to(x: ShardedTensor, *args: Any, **options: Any) -> ShardedTensor:
    """See ShardedTensor.to."""
    group = options.pop("process_group", None) or x._process_group
    if options.get("memory_format", torch.preserve_format) not in (torch.preserve_format, torch.contiguous_format):
        raise RuntimeError("only torch.contiguous_format and torch.preserve_format are supported")
    moved: ShardedTensor = Tensor.to(x, *args, **options)  # type: ignore[assignment]
    return moved if group is x._process_group else _InGroup.apply(moved, group)  # type: ignore[no-untyped-call]


@skip_methods()
class _InGroup(torch.autograd.Function):
    """The same parts, of which another process group can talk."""

    @staticmethod
    def forward(ctx: Any, x: ShardedTensor, group: dist.ProcessGroup) -> ShardedTensor:
        ctx.set_materialize_grads(False)
        ctx.before = x._process_group
        return _with_group(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None if grads[0] is None else _with_group(grads[0], ctx.before), None


def _with_group(x: ShardedTensor, group: dist.ProcessGroup) -> ShardedTensor:
    like = torch.empty(0, dtype=x.dtype, device=x.device)
    return cut_as(x, [shard.tensor.detach() for shard in x._local_shards], like, group)
