"""Random chains of operators on ShardedTensors: they do what plain tensors do, or every rank refuses."""

import itertools

import torch
import torch.distributed as dist

from tests.tensor.proving.chains import Chain, Over, drawn, played
from tests.tensor.proving.tables import ELEMENTWISE, ELEMENTWISE_IN_PLACE

OPERATORS = f"""{ELEMENTWISE}
    x.to(x.dtype)
    x.to(torch.float64, copy=True)
    x + torch.ones(())
    torch.ones(()) * x
    x + torch.ones(x.shape)
    x.numel() * x
    torch.rand_like(x)
    torch.empty_like(x).fill_(1)
    x.new_zeros(x.shape)
    torch.complex(x, y).abs()
    torch._foreach_norm([x, y])[n % 2]
    torch._foreach_sqrt([x.abs(), y.abs()])[n % 2]
    torch._foreach_lerp([x, y], [y, x], 0.3)[n % 2]
    x.norm()
    x.sum()
    x.sum(d)
    x.max()
    x @ y
    x.t()
    x.view(-1)
    x.reshape(x.shape)
    x[0]
    x[x > 0]
    x.item() if x.numel() == 1 else x
    x.softmax(d)
    x.cumsum(d)
    torch.cat([x, y])
    torch.equal(x, y)
    x.isnan().any()
    F.mse_loss(x, y)
"""

IN_PLACE = f"""{ELEMENTWISE_IN_PLACE}
    x.copy_(torch.ones(()))
    x.__setitem__(y > 0, 0.5)
    x.__setitem__(0, 1.0)
    x.__setitem__(Ellipsis, 2.0)
    x.data.add_(1)
    x.view(-1).add_(1)
    x.cumsum_(0)
    torch._foreach_addcmul_([x], [y], [y], 0.5)
    x.set_(y)
    x.resize_as_(y)
    x.t_()
"""


def play(rank, world, seeds):
    """On every rank: the complaints about the chains of these seeds."""
    return played(ShardedChain(None, seed) for seed in seeds)


class ShardedChain(Chain):
    """Pairs of a plain tensor and a ShardedTensor, all of one shape and cut alike."""

    operators, in_place = OPERATORS, IN_PLACE

    def _begin(self):
        chance = self.chance
        shape = [chance.choice([1, 2, 3, 4, 5, 7]) for _ in range(chance.choice([1, 2, 2, 3]))]
        self.spec = self._cut(shape)
        self.story.append(f"{tuple(shape)}, {self.spec}")
        for _ in range(3):
            self._start(shape, chance.choice(self.dtypes), chance.random() < 0.6)

    def _cut(self, shape):
        """One part on each rank, or some of any lengths on any ranks."""
        from torchshard.tensor.sharded import specs

        chance, world, dim = self.chance, dist.get_world_size(), self.chance.randrange(len(shape))
        if chance.random() < 0.5:
            return specs.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in range(world)])
        edges = sorted({0, shape[dim], *[chance.randrange(shape[dim] + 1) for _ in range(3)]})
        shards = []
        for start, stop in itertools.pairwise(edges):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = start, stop - start
            place = specs.place_of(chance.randrange(world), torch.device("cpu"))
            shards.append(specs.ShardMetadata(offsets, sizes, place))
        return specs.EnumerableShardingSpec(shards)

    def _start(self, shape, dtype, needs_grad):
        from torchshard.state_dict import to_sharded_tensor

        plain = drawn(shape, dtype, self.chance.randrange(10**6))
        split = to_sharded_tensor(plain.clone(), spec=self.spec)
        if needs_grad and (dtype.is_floating_point or dtype.is_complex):
            self.leaves.append((plain.requires_grad_(), split.requires_grad_()))
        self.story.append(f"#{len(self.pairs)}: {dtype} grad={plain.requires_grad}")
        self.pairs.append((plain, split))

    def _placements(self, ndim, partial):
        raise Over  # they are not redistributed

    def _right_or_refused(self, call):
        result, error = None, None
        try:
            result = call()
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as raised:
            error = raised
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, type(error).__name__)
        assert len(set(outcomes)) == 1, f"ranks ended in {outcomes}; here: {error}"

        def again():
            if error is not None:
                raise error
            return result

        return super()._right_or_refused(again)

    def _compare_strides(self, plain, split):
        """Each part has its own."""

    def _whole(self, split):
        from torchshard import ShardedTensor
        from torchshard.state_dict import to_full

        return to_full(split.detach()) if isinstance(split, ShardedTensor) else split

    @staticmethod
    def _gradients(outputs, leaves):
        """For a sum of squares, which has no operator here: its gradients are given."""
        outputs = [y for y in outputs if y is not None and y.requires_grad]
        if not outputs or not leaves:
            return [None] * len(leaves)
        given = [y * (k + 1) for k, y in enumerate(outputs)]
        return torch.autograd.grad(outputs, leaves, given, allow_unused=True, create_graph=True)
