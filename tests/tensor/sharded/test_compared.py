"""ShardedTensors compared: equal, allclose, any and all say the same on every rank, that of the whole tensors."""

import re

from tests.ranks import run_ranks


def _cut(dim=0, ranks=(0, 1, 2)):
    from torchshard.tensor.sharded import specs

    return specs.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def _comparing(rank, world):
    import torch
    import torch.distributed as dist
    from torch import nn

    from torchshard.errors import ShardingError
    from torchshard.tensor.sharded import factories

    def drawn(spec, seed=0, **options):
        torch.manual_seed(seed)
        return factories.rand(spec, 5, 4, **options)

    for spec in (_cut(), _cut(1), _cut(ranks=(1,)), _cut(ranks=(0, 2, 0))):  # a short piece, ranks without a part, two
        x, y = drawn(spec), drawn(spec)
        assert torch.equal(x, y)
        assert torch.allclose(x, y)
        torch.testing.assert_close(x, y)
        with torch.no_grad():
            for shard in y.local_shards()[:1]:
                if rank == spec.placements[0].rank():
                    shard.tensor[0, 0] += 1e-3
        assert not torch.equal(x, y)
        assert not torch.allclose(x, y)
        assert torch.allclose(x, y, atol=1e-2, rtol=0)
        torch.testing.assert_close(x, y, atol=1e-2, rtol=0)
        differ = x != y
        assert (differ.any().item(), differ.all().item(), (~differ).any().item()) == (True, False, True)
        assert type(differ.any()) is torch.Tensor
        assert differ.any().shape == ()
        assert torch.equal(differ.any(), torch.tensor(True))
        hole = drawn(spec).fill_(torch.nan)
        assert not torch.equal(hole, hole.clone())
        assert torch.allclose(hole, hole.clone(), equal_nan=True)
    assert not torch.equal(drawn(_cut()), factories.ones(_cut(), 5, 3))
    assert factories.ones(_cut(), 5, 3, dtype=torch.uint8).all().dtype == torch.uint8  # as of plain tensors
    assert factories.zeros(_cut(), 0, 3).all()
    assert not factories.zeros(_cut(), 0, 3).any()

    texts = []
    try:
        torch.equal(drawn(_cut()), drawn(_cut(1)))
    except ShardingError as error:
        texts.append(str(error))
    try:
        torch.equal(drawn(_cut()), torch.rand(5, 4))
    except ShardingError as error:
        texts.append(str(error))

    pair = dist.new_group([1, 2])
    if rank:
        x = drawn(_cut(ranks=(1, 2)), process_group=pair)
        assert torch.equal(x, x.clone())
    torch.manual_seed(1)
    weight = nn.init.trunc_normal_(factories.empty(_cut(), 5, 4), std=2.0)
    torch.manual_seed(1)
    whole = nn.init.trunc_normal_(torch.empty(5, 4), std=2.0)
    own = weight.local_shards()[0]
    assert torch.equal(own.tensor, whole[own.metadata.shard_offsets[0] :][: own.metadata.shard_sizes[0]])
    return texts


def test_every_rank_is_told_what_holds_of_the_whole():
    every = run_ranks(3, _comparing)
    for one, other in every:
        assert re.search(r"equal.default: ShardedTensors that are cut in different ways", one)
        assert "y.reshard(x.sharding_spec())" in one
        assert "argument 1 is a plain tensor" in other


def _lost(rank, world):
    import torch

    from torchshard.errors import RankMismatchError
    from torchshard.tensor.sharded import factories

    x = factories.ones(_cut(ranks=(0, 1)), 4, 4)
    try:
        torch.equal(x, x) if rank else (x == x).any()
    except RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_ask_other_things_are_told():
    for text in run_ranks(2, _lost):
        assert "equal.default" in text
        assert "any.default" in text
