"""Every pair of forms, both ways, on four real ranks: bit for bit the same tensor."""

import itertools

import pytest

from tests.ranks import by_messages, run_ranks

SHAPES = [(8, 6), (5, 7), (3,), (1, 9), (6, 4, 5)]


def _meshes():
    from torch.distributed.device_mesh import init_device_mesh

    return {
        "flat": init_device_mesh("cpu", (4,), mesh_dim_names=("x",)),
        "grid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        "deep": init_device_mesh("cpu", (1, 2, 2, 1)),
    }


def _whole(shape, dtype, seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(dtype)


def _forms(shape, meshes):
    """Name -> how a whole tensor becomes that form; among them all kinds, uneven and empty parts."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard

    from torchshard import state_dict
    from torchshard.tensor.sharded import specs

    last = len(shape) - 1
    on_mesh = {
        "flat S0": ("flat", [Shard(0)]),
        "flat last": ("flat", [Shard(last)]),
        "grid R,S": ("grid", [Replicate(), Shard(0)]),
        "grid S,S": ("grid", [Shard(last), Shard(0)]),
        "grid S0,S0": ("grid", [Shard(0), Shard(0)]),
        "deep": ("deep", [Replicate(), Shard(0), Shard(last), Replicate()]),
    }
    forms = {}
    for name, (mesh, placements) in on_mesh.items():
        forms[name] = lambda x, m=meshes[mesh], p=placements: state_dict.to_dtensor(x, m, p)
        forms["torch " + name] = lambda x, m=meshes[mesh], p=placements: state_dict.to_torch(
            state_dict.to_dtensor(x, m, p)
        )
    rows = shape[0]
    cuts = sorted({0, min(1, rows), rows // 2, rows})
    boxes = [
        specs.ShardMetadata([a, *[0] * last], [b - a, *shape[1:]], f"rank:{3 - k}/cpu")
        for k, (a, b) in enumerate(itertools.pairwise(cuts))
    ]
    every = {"chunks": {"dim": 0}, "chunks last": {"dim": last}, "boxes": {"spec": specs.EnumerableShardingSpec(boxes)}}
    if len(shape) == 2:
        every["grid spec"] = {"spec": specs.GridShardingSpec((2, 2), [f"rank:{r}/cpu" for r in (2, 0, 3, 1)])}
    for name, options in every.items():
        forms[name] = lambda x, o=options: state_dict.to_sharded_tensor(x, **o)
        forms["torch " + name] = lambda x, o=options: state_dict.to_torch(state_dict.to_sharded_tensor(x, **o))
    forms["whole"] = lambda x: state_dict.to_full(x)
    assert dist.get_world_size() == 4
    return forms


def _parts(x):
    """What a rank holds, of any form, as (offsets, tensor) or just the local tensor."""
    from torchshard.tensor.dtensor import DTensor

    if hasattr(x, "local_shards"):
        return sorted((s.metadata.shard_offsets, s.tensor.tolist()) for s in x.local_shards() if s.tensor.numel())
    if isinstance(x, DTensor) or hasattr(x, "to_local"):
        return (x.to_local().tolist(), [str(p) for p in x.placements])
    return x.tolist()


def _every_pair(rank, world, shapes, dtypes, messages):
    import torch

    if messages:
        by_messages()
    meshes = _meshes()
    count = 0
    for seed, (shape, dtype) in enumerate(zip(shapes, itertools.cycle(dtypes))):
        dtype = getattr(torch, dtype)
        whole = _whole(shape, dtype, seed)
        forms = _forms(shape, meshes)
        made = {name: make(whole.clone()) for name, make in forms.items()}
        for source, target in itertools.product(forms, forms):
            got = forms[target](made[source])
            assert type(got) is type(made[target]), (source, target, type(got))
            assert got.dtype == dtype
            assert got.shape == shape
            assert _parts(got) == _parts(made[target]), (shape, source, target)
            count += 1
    return count


@pytest.mark.parametrize("messages", [False, True])
def test_every_pair_of_forms(messages):
    counts = run_ranks(4, _every_pair, SHAPES[1:2], ["int64"], messages, timeout=200)
    assert len(set(counts)) == 1
    assert counts[0] > 400


@pytest.mark.full
@pytest.mark.parametrize("messages", [False, True])
def test_every_pair_of_forms_shapes_and_dtypes(messages):
    run_ranks(4, _every_pair, SHAPES, ["bfloat16", "int16", "bool", "complex64", "float32"], messages, timeout=280)
