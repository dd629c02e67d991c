"""Parameters and buffers that are spread over ranks: taken where they are to be ignored, else refused before any message."""

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks


class Model(nn.Module):
    """A linear layer beside a tensor of some kind, as a parameter or a buffer."""

    def __init__(self, kind, what):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        x = _spread(kind).requires_grad_(what == "parameter")
        if what == "parameter":
            self.spread = nn.Parameter(x)
        else:
            self.register_buffer("spread", x)

    def forward(self, x):
        return self.layer(x)


def _spread(kind):
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor as as_theirs

    from torchshard import Shard, distribute_tensor, init_device_mesh
    from torchshard.tensor.sharded import factories, specs

    spec = specs.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "ShardedTensor": lambda: factories.ones(spec, 5, 3),
        "torch's ShardedTensor": lambda: factories.ones(spec, 5, 3).to_torch(),
        "DTensor": lambda: distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]),
        "torch's DTensor": lambda: as_theirs(torch.ones(5, 3), mesh, [Shard(0)]),
    }[kind]()


KINDS = ["ShardedTensor", "torch's ShardedTensor", "DTensor", "torch's DTensor"]


def _wrapped(rank, world):
    from torchshard import DistributedDataParallel

    said = {}
    for kind in KINDS:
        for what in ("parameter", "buffer"):
            if (kind, what) == ("torch's ShardedTensor", "parameter"):  # torch makes no nn.Parameter of it
                continue
            torch.manual_seed(0)
            model = Model(kind, what)
            with pytest.raises((ValueError, NotImplementedError)) as refused:
                DistributedDataParallel(model)
            said[kind, what] = str(refused.value)
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["spread"])
            kept = model.spread
            wrapped = DistributedDataParallel(model)
            for step in range(2):
                wrapped.zero_grad()
                wrapped(torch.full((2, 4), rank + 1.0)).sum().backward()
                expected = torch.full((3, 4), 2 * (world + 1) / 2)
                torch.testing.assert_close(model.layer.weight.grad, expected, msg=f"{kind} {what} {step}")
            assert model.spread is kept
    return said


def test_what_is_ignored_is_left_alone_and_the_rest_refused_on_every_rank():
    for said in run_ranks(2, _wrapped):
        for (kind, what), text in said.items():
            assert what in text
            assert kind.removeprefix("torch's ") in text
            if "ShardedTensor" in kind:
                assert f"the {what} spread is a ShardedTensor" in text
                assert "_set_params_and_buffers_to_ignore_for_model(module, ['spread'])" in text
