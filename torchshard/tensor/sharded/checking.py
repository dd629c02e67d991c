"""What must be true of the parts of a ShardedTensor: of this rank's, and of all ranks' together."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchshard._torch import ends_graphs
from torchshard.comm.agreement import Agreement
from torchshard.errors import RankMismatchError, ShardingError
from torchshard.tensor.sharded.specs import Shard, ShardedTensorMetadata, TensorProperties, flat_size, holding_of


def local_metadata(shards: Sequence[Any], size: Sequence[int], rank: int) -> Any:
    """The metadata of this rank's parts alone; None where it has none.

    Raises:
        ShardingError: the parts are no dense tensors of one dtype, or not this rank's.
    """
    for number, shard in enumerate(shards):
        if not isinstance(shard, Shard):
            raise ShardingError(
                "A part is no Shard.",
                expected=f"{Shard.__module__}.{Shard.__name__}, a tensor with its metadata",
                got=type(shard).__name__,
                where=f"part {number} of rank {rank}",
                fix="Shard.from_tensor_and_offsets(tensor, offsets, rank)",
            )
    if not shards:
        return None
    properties = TensorProperties.create_from_tensor(shards[0].tensor)
    if hasattr(properties, "strides"):  # from 2.15 on; those of one part are not those of the others
        properties.strides = None
    made = ShardedTensorMetadata([shard.metadata for shard in shards], torch.Size(size), properties)
    check_own(shards, made, rank)
    return made


def check_own(shards: Sequence[Any], metadata: Any, rank: int) -> None:
    """Check this rank's parts against the metadata of the whole tensor.

    Raises:
        ShardingError: names the part and what does not agree.
    """
    properties = metadata.tensor_properties
    for number, shard in enumerate(shards):
        where = f"part {number} of rank {rank}, {shard.metadata}"
        place = shard.metadata.placement
        checks = [
            ("its rank", rank, place.rank() if place is not None else "no placement"),
            ("its size", list(shard.metadata.shard_sizes), list(shard.tensor.shape)),
            ("its number of dims", len(metadata.size), shard.tensor.ndim),
            ("its dtype", properties.dtype, shard.tensor.dtype),
            ("its memory layout", torch.strided, shard.tensor.layout),
            ("whether it is dense", True, shard.tensor.is_contiguous()),
            ("its device", place.device() if place is not None else None, shard.tensor.device),
        ]
        if torch.is_grad_enabled():  # else parts are given without their history
            checks.append(("whether it requires gradients", properties.requires_grad, shard.tensor.requires_grad))
        for what, expected, got in checks:
            if expected != got:
                raise ShardingError(f"A part does not agree in {what}.", expected=expected, got=got, where=where)
    described = [shard for shard in metadata.shards_metadata if shard.placement.rank() == rank]
    if sorted(map(_key, described)) != sorted(_key(shard.metadata) for shard in shards):
        raise ShardingError(
            "This rank does not hold the parts that the metadata says.",
            expected=described,
            got=[shard.metadata for shard in shards],
            where=f"rank {rank}",
        )


def _key(shard: Any) -> Any:
    return tuple(shard.shard_offsets), tuple(shard.shard_sizes)


def check_whole(metadata: Any, ranks: Sequence[int]) -> None:
    """Check that the parts hold each element once, on ranks of the group.

    Raises:
        ShardingError: names two parts that overlap and their ranks, one outside, or how many elements are missing; or
            ranks that are not in the group.
    """
    for shard in metadata.shards_metadata:
        if shard.placement is None or shard.placement.rank() is None:
            raise ShardingError("A part lies on no rank.", expected="a placement such as rank:0/cpu", got=shard)
    if strangers := {shard.placement.rank() for shard in metadata.shards_metadata} - set(ranks):
        raise ShardingError(
            "Parts lie on ranks that are not in the process group.", expected=f"ranks {list(ranks)}", got=strangers
        )
    holding = holding_of(metadata, ranks)
    for box, owners in holding.owners.items():
        if len(owners) > 1:
            raise ShardingError("Several ranks hold the same part.", expected="one owner", got=owners, where=box)
    try:
        holding.check()
    except ShardingError as error:
        owned = "\n".join(f"rank {owners[0]}: {box}" for box, owners in holding.owners.items())
        raise ShardingError(
            error.what, expected=error.expected, got=error.got, where=f"parts of shape {tuple(metadata.size)}\n{owned}"
        ) from None


@ends_graphs("a graph cannot ask the other ranks")
def of_all(mine: Callable[[], Any], group: dist.ProcessGroup) -> list[Any]:
    """What each rank of a group says of its parts, in the group's order.

    Args:
        mine: what this rank says; where it raises, the others raise RankMismatchError.
        group: the ranks.

    Raises:
        RankMismatchError: a rank does not come, or is lost or refuses; names it.
    """
    said: list[Any] = [None] * group.size()
    agreement = Agreement(group, torch.device("cpu"), "parts of a ShardedTensor")
    with agreement.refusing():
        told = mine()
    agreement.confirm("parts of a ShardedTensor", 0)
    with agreement.waiting_for("parts of a ShardedTensor"):
        dist.all_gather_object(said, told, group=group)
    return said


def global_metadata(
    local_shards: Sequence[Any], global_size: Sequence[Any], group: dist.ProcessGroup, ranks: Sequence[int]
) -> Any:
    """The metadata of all parts of all ranks, each of which calls this.

    Args:
        local_shards: this rank's parts.
        global_size: of the whole tensor, as this rank sees it: numbers or one sequence.
        group: the ranks.
        ranks: their global numbers, in the group's order.

    Raises:
        ShardingError: a rank has a problem, or the parts do not make up the tensor; on every rank.
        RankMismatchError: ranks differ in the size of the tensor or in properties of their parts, or one is lost; names
            them.
    """
    problem: ShardingError | None = None

    def mine() -> tuple[Any, Any, tuple[int, ...]]:
        nonlocal problem
        size = flat_size(global_size)
        try:
            return local_metadata(local_shards, size, dist.get_rank()), None, tuple(size)
        except ShardingError as error:
            problem = error
            return None, error.__reduce__()[1], tuple(size)

    said = of_all(mine, group)
    size = said[0][2]
    for rank, (_, told, _) in zip(ranks, said, strict=True):
        if told is not None:
            _, what, parts = told
            raise problem or ShardingError(what, **{**parts, "where": f"rank {rank}: {parts['where']}"})
    first = None
    for rank, (metadata, _, theirs) in zip(ranks, said, strict=True):
        if theirs != size:
            raise RankMismatchError(
                "Ranks differ in the size of a ShardedTensor.",
                expected=f"{size}, as on rank {ranks[0]}",
                got=f"{theirs} on rank {rank}",
            )
        if metadata is None:
            continue
        if first is None:
            first = rank, metadata.tensor_properties
        if metadata.tensor_properties != first[1]:
            raise RankMismatchError(
                "Ranks differ in the properties of their parts.",
                expected=f"{first[1]}, as on rank {first[0]}",
                got=f"{metadata.tensor_properties} on rank {rank}",
            )
    if first is None:
        raise ShardingError("No rank holds a part.", expected=f"parts of shape {size}", got="none")
    shards = [shard for metadata, _, _ in said if metadata is not None for shard in metadata.shards_metadata]
    made = ShardedTensorMetadata(shards, torch.Size(size), first[1])
    check_whole(made, ranks)
    return made
