"""Every pair of forms, both ways, on four real ranks: bit for bit the same tensor."""

import itertools

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

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


def _any_form(draw, shape, meshes):
    """A form of a tensor with dims: how any other becomes it, and what it has to become before it becomes any other.

    On a mesh, in boxes, of either library; along replicated axes of a mesh, a ShardedTensor for each group.
    """
    from torch.distributed.tensor import Replicate, Shard

    from tests.layout.test_holding import boxes_of
    from torchshard import state_dict
    from torchshard.tensor.sharded import specs

    def theirs(make):
        return (lambda x: state_dict.to_torch(make(x))) if draw(st.booleans()) else make

    kind = draw(st.sampled_from(["mesh", "mesh", "as it is", "chunks", "boxes", "whole"]))
    if kind in ("mesh", "as it is"):
        mesh = draw(st.sampled_from(meshes))
        one = st.one_of(st.builds(Shard, st.integers(-len(shape), len(shape) - 1)), st.just(Replicate()))
        here, back = ([draw(one) for _ in range(mesh.ndim)] for _ in range(2))
        if kind == "mesh":
            return theirs(lambda x: state_dict.to_dtensor(x, mesh, here)), lambda x: x
        parts = theirs(lambda x: state_dict.to_sharded_tensor(state_dict.to_dtensor(x, mesh, here)))
        return parts, lambda x: state_dict.to_dtensor(x, mesh, back)
    if kind == "chunks":
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        return theirs(lambda x: state_dict.to_sharded_tensor(x, dim=dim)), lambda x: x
    if kind == "boxes" and all(shape):
        shards = [
            specs.ShardMetadata(list(box.offset), list(box.size), f"rank:{draw(st.integers(0, 3))}/cpu")
            for box in draw(boxes_of(shape))
        ]
        return theirs(lambda x: state_dict.to_sharded_tensor(x, spec=specs.EnumerableShardingSpec(shards))), lambda x: x
    return state_dict.to_full, lambda x: x


def _round_trips(rank, world, sizes, examples):
    """All ranks draw the same: nothing is random but by the test's name."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from torchshard import state_dict

    meshes = [init_device_mesh("cpu", n) for n in sizes]
    types = [torch.float32, torch.int16, torch.bool, torch.complex64, torch.bfloat16, torch.float64, torch.uint8]
    count = 0

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data(), st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), st.sampled_from(types))
    def check(data, shape, dtype):
        nonlocal count
        count += 1
        whole = _whole(shape, dtype, count)
        forms = [_any_form(data.draw, shape, meshes) for _ in range(3)]
        sd = {"w": whole, "same": whole.detach(), "step": 3}
        for form, on in (*forms, forms[0]):
            sd = form(sd)
            assert sd["w"] is sd["same"]
            assert (sd["w"].shape, sd["w"].dtype, sd["step"]) == (shape, dtype, 3)
            assert _parts(sd["w"]) == _parts(form(whole.clone()))
            sd = on(sd)
        assert torch.equal(state_dict.to_full(sd)["w"], whole)

    check()
    return count


@pytest.mark.parametrize("examples", [15, pytest.param(250, marks=pytest.mark.full)])
def test_any_form_becomes_any_other_and_comes_back(examples):
    sizes = (4,), (2, 2), (1, 4, 1), (2, 1, 2), (1, 2, 1, 2)
    counts = run_ranks(4, _round_trips, sizes, examples, timeout=280)
    assert counts == [counts[0]] * 4


@pytest.mark.full
def test_any_form_on_meshes_of_sixteen_ranks():
    counts = run_ranks(16, _round_trips, ((2, 2, 2, 2), (4, 2, 2), (4, 4)), 25, timeout=280)
    assert counts == [counts[0]] * 16
    assert counts[0] >= 25
