"""The six transforms on their own, what install() changes and gives back, and what messages say."""

import gc
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from expecttest import assert_expected_inline

from tests.parallel import fsdp_cases as cases
from tests.ranks import run_ranks

MESHES = [
    ((4, 2), ("dp", "tp"), "dp", "tp"),
    ((2, 4), ("tp", "dp"), "dp", "tp"),
    ((2, 2, 2), ("rep", "dp", "tp"), ("rep", "dp"), "tp"),
    ((2, 2, 2), ("dp", "t0", "t1"), "dp", ("t0", "t1")),
]
SHAPES = [(10, 3), (3, 5), (9,)]


def layouts(shape, axes):
    from torchshard import Replicate, Shard

    found = [[Replicate()] * axes, [Shard(0)] * axes]
    if len(shape) > 1:
        found += [[Shard(1)] * axes, [Shard(0), Shard(1)][-axes:]]
    return found


def transforms(rank, world):
    """Every layout of every shape on every mesh, of both classes: out, in, and equal to the whole."""
    import torch.distributed.tensor as theirs

    import torchshard as ours
    from torchshard.parallel.fsdp import DTensorExtensions
    from torchshard.tensor.interop import from_torch

    count = 0
    for shape, names, fsdp, tp in MESHES:
        mesh = ours.init_device_mesh("cpu", shape, mesh_dim_names=names)
        for size in SHAPES:
            whole = torch.arange(torch.Size(size).numel(), dtype=torch.float64).reshape(size)
            for library in (ours, theirs):
                for placements in layouts(size, mesh[tp].ndim):
                    case = f"{names} {shape}, {size} {placements} of {library.__name__}"
                    x = library.distribute_tensor(whole, mesh[tp], placements)
                    extension = DTensorExtensions(None)
                    part, taken = extension.pre_flatten_transform(x)
                    view = part.clone().requires_grad_()
                    again = extension.post_unflatten_transform(view, taken)
                    assert type(again) is type(x), case
                    again.sum().backward()
                    assert torch.equal(view.grad, torch.ones_like(view)), case
                    assert torch.equal(ours_full(again.detach()), whole), case

                    saved = extension.chunk_dtensor(again.detach(), rank, mesh[fsdp])
                    assert type(saved) is theirs.DTensor, case
                    axis = names.index("dp")
                    assert saved.device_mesh == mesh, case
                    assert saved.placements[axis] == theirs.Shard(0), case
                    assert torch.equal(from_torch(saved).full_tensor(), whole), case
                    back = extension.all_gather_dtensor(saved, mesh)
                    assert torch.equal(back, part), case
                    back = extension.all_gather_dtensor(from_torch(saved), mesh)
                    assert torch.equal(extension.post_unflatten_transform(back, taken).to_local(), part), case
                    other = saved.redistribute(placements=[theirs.Replicate()] * mesh.ndim)
                    back = extension.all_gather_dtensor(other, mesh)
                    assert torch.equal(extension.post_unflatten_transform(back, taken).to_local(), part), case
                    count += 1
            plain = DTensorExtensions(None)
            assert plain.pre_flatten_transform(whole) == (whole, None)
            saved = plain.chunk_dtensor(whole, rank, mesh[fsdp])
            assert torch.equal(from_torch(saved).full_tensor(), whole)
            assert torch.equal(plain.all_gather_dtensor(saved, mesh), whole)
    return count


def ours_full(x):
    from torchshard.parallel.fsdp.chunks import as_ours

    return as_ours(x).full_tensor()


def test_transforms_on_every_mesh():
    assert run_ranks(8, transforms) == [80] * 8


def sharded_tensors(rank, world):
    """chunk_tensor and pre_load_state_dict_transform; ShardedTensors, too, are chunked; meshes of two axes."""
    from torchshard import Replicate, Shard, ShardedTensor, distribute_tensor, init_device_mesh
    from torchshard._torch import group_of_theirs, their_sharded_tensor
    from torchshard.errors import ShardingError
    from torchshard.parallel.fsdp import DTensorExtensions
    from torchshard.state_dict import to_sharded_tensor

    extension = DTensorExtensions(None)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "t0", "t1"))
    group = mesh.get_group("dp")
    whole = torch.arange(35.0).reshape(7, 5)
    pair = mesh.get_group("t1")
    mine = whole.tensor_split([2], 1)[pair.rank()].contiguous()
    x = ShardedTensor.from_local(mine, dim=1, process_group=pair)  # torchshard's own, unevenly cut
    saved = extension.chunk_tensor(x, group.rank(), 2, 1, group)
    assert saved.size() == (7, 5)
    (outer,) = saved.local_shards()
    assert (outer.metadata.shard_offsets, outer.metadata.shard_sizes) == ([0, 2 * pair.rank()], list(mine.shape))
    assert torch.equal(extension.pre_load_state_dict_transform(saved)[1][0].tensor, mine.chunk(2)[group.rank()])
    for placements in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)], [Replicate()] * 2):
        x = distribute_tensor(whole, mesh["t0", "t1"], placements)
        saved = extension.chunk_tensor(x, group.rank(), 2, 1, group)
        assert saved.size() == (7, 5)
        inner, shards = extension.pre_load_state_dict_transform(saved)
        rows = x.to_local().chunk(2)[group.rank()]
        assert torch.equal(shards[0].tensor, rows)
        assert tuple(inner.size()) == tuple(x.to_local().shape)
        if inner is not saved:
            (outer,) = saved.local_shards()
            plain = torch.distributed._shard.sharded_tensor.Shard(x.to_local(), outer.metadata)
            whole_part = their_sharded_tensor([plain], saved.metadata(), None, group_of_theirs(saved))
            again = extension.chunk_tensor(whole_part, group.rank(), 2, 1, group)
            assert torch.equal(extension.pre_load_state_dict_transform(again)[1][0].tensor, rows)
            assert again.local_shards()[0].metadata.shard_offsets == outer.metadata.shard_offsets

    elsewhere = torch.device("meta")  # the specs say where the parts have been brought, of other ranks as well
    for tensor in (whole, x, whole_part):
        moved = extension.chunk_tensor(tensor, group.rank(), 2, 1, group, elsewhere)
        while hasattr(moved, "local_shards"):
            (shard,) = moved.local_shards()
            places = [one.placement for one in moved.metadata().shards_metadata]
            assert {place.device().type for place in places} == {"meta"}
            assert shard.metadata.placement in places
            moved = shard.tensor
        assert moved.device == elsewhere

    class Device:
        used: ClassVar = []

        def current_stream(self):
            return "current"

        def stream(self, stream):
            self.used.append(stream)
            return nullcontext()

    extension = DTensorExtensions(Device())
    part, taken = extension.pre_flatten_transform(distribute_tensor(whole, mesh["t1"], [Shard(0)]))
    extension.post_unflatten_transform(part, taken)
    extension.compute_stream = "compute"
    extension.post_unflatten_transform(part, taken)
    assert Device.used == ["current", "compute"]
    assert extension.post_unflatten_transform._torchdynamo_disable
    with pytest.raises(ShardingError, match="parts with elements on every rank"):
        extension.chunk_tensor(distribute_tensor(whole[:1], mesh["t1"], [Shard(0)]), group.rank(), 2, 1, group)
    with pytest.raises(
        ShardingError, match=r"A sharded state dict of ShardedTensors is expected(?s:.*)to_sharded_tensor"
    ) as e:
        extension.pre_load_state_dict_transform(whole)
    assert e.value.got == "Tensor"
    ours = ShardedTensor.from_local(whole.chunk(2)[group.rank()].clone(), process_group=group)
    inner, shards = extension.pre_load_state_dict_transform(ours)  # FSDP reads torch's class
    assert not isinstance(inner, ShardedTensor)
    assert inner.size() == (7, 5)
    assert shards[0].tensor.data_ptr() == ours.local_shards()[0].tensor.data_ptr()
    square = torch.arange(16.0).view(4, 4)  # FSDP would join columns as if they were rows, of as many elements
    by_columns = to_sharded_tensor({"x": square}, dim=1, process_group=group)["x"]
    for columns in (by_columns, by_columns.to_torch()):
        with pytest.raises(ShardingError, match="the rows that FSDP gives it"):
            extension.pre_load_state_dict_transform(columns)


def messages(rank, world):
    from torchshard import DTensor, Partial, Shard, distribute_tensor, init_device_mesh
    from torchshard.parallel.fsdp import DTensorExtensions

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    extension = DTensorExtensions(None)
    x = distribute_tensor(torch.ones(10, 3), mesh["tp"], [Shard(0)])
    _, taken = extension.pre_flatten_transform(x)
    said = []
    for function, *arguments in [
        (extension.pre_flatten_transform, DTensor.from_local(torch.ones(2), mesh["tp"], [Partial()])),
        (extension.pre_flatten_transform, x),
        (extension.post_unflatten_transform, torch.ones(5, 4), taken),
        (extension.chunk_dtensor, distribute_tensor(torch.ones(4), other["b"], [Shard(0)]), 0, mesh["dp"]),
        (extension.chunk_dtensor, torch.ones(()), 0, mesh["dp"]),
        (extension.all_gather_dtensor, distribute_tensor(torch.ones(4), other, [Shard(0), Shard(0)]), mesh),
    ]:
        with pytest.raises(ValueError, match="\\n") as caught:
            function(*arguments)
        said.append(str(caught.value))
    return "\n".join(said)


def chunks_and_messages(rank, world):
    sharded_tensors(rank, world)
    return messages(rank, world)


def test_chunks_that_are_sharded_tensors_and_messages_that_name_mesh_axis_and_dim():
    assert_expected_inline(
        run_ranks(4, chunks_and_messages)[0],
        """\
A Partial parameter cannot be flattened: no rank holds its values.
  expected: Shard(dim) or Replicate() on every axis
  got:      float32[2] (tp=2:P(sum))
  where:    axis tp of the mesh (tp=2)
  fix:      redistribute it before FSDP is constructed
FSDP1 flattens a DTensor parameter that a module holds under two names twice, which would untie it.
  expected: each DTensor parameter under one name
  got:      a parameter seen before, float32[10, 3] (tp=2:S(0))
  fix:      torchshard.parallel.fsdp.fully_shard, which keeps parameters tied
A tensor is neither the whole of a parameter nor this rank's part of it.
  expected: shape (10, 3), or (5, 3): split by dim 0 along axis tp
  got:      shape (5, 4)
  where:    mesh (tp=2), this rank at (0,)
The mesh of a DTensor parameter is no part of the mesh that FSDP's was cut out of.
  expected: a slice of the mesh (dp=2, tp=2), as by mesh['tp']
  got:      the mesh (b=2) of the ranks [0, 1]
  where:    this rank is at (0, 0) of the mesh (dp=2, tp=2), ranks [0, 1, 2, 3]
  fix:      make one mesh by init_device_mesh with mesh_dim_names, and give slices of it to both
FSDP cannot split this tensor by rows along its axis.
  expected: a tensor of one dim or more, and an axis among ('dp', 'tp')
  got:      0 dims, axis 'dp'
  where:    dim 0, mesh DeviceMesh((dp=2), 'cpu', stride=(2,)), a slice of (dp=2, tp=2)
A sharded state dict is of another mesh than the module it is loaded into.
  expected: a DTensor on the mesh DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))
  got:      a DTensor on the mesh (a=2, b=2), float32[4] (a=2:S(0), b=2:S(0))
  fix:      save with torch.distributed.checkpoint and load it into the module's own state_dict()""",
    )


def installed(rank, world):
    """What is replaced, by whom it is given back, and that modules made before go on working."""
    from torch.distributed.fsdp import _init_utils, _optim_utils, fully_sharded_data_parallel

    from torchshard import init_device_mesh
    from torchshard.parallel.fsdp import DTensorExtensions, install

    def names():
        return (
            fully_sharded_data_parallel._init_extension,
            _init_utils.FlatParamHandle,
            _optim_utils._shard_orig_param_state,
            _optim_utils._flatten_optim_state,
        )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    before = names()
    with install():
        model = cases.wrapped(cases.parallel(mesh), mesh)
    assert names()[:2] == before[:2]
    assert names()[2] is not before[2]  # as long as there are such modules
    del model  # torch keeps those that have been trained
    gc.collect()
    assert names() == before

    first = install()
    with install():
        first.remove()
        first.remove()
        assert names()[0] is not before[0]
        model = cases.wrapped(cases.parallel(mesh), mesh)
        alone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        assert cases.wrapped(cases.plain(), alone)._fsdp_extension is None
    assert names()[:2] == before[:2]
    assert isinstance(model._fsdp_extension, DTensorExtensions)
    _, optimizer = cases.trained(model, **cases.place(mesh))
    cases.load_sharded(model, optimizer, *cases.sharded(model, optimizer))
    cases.trained(model, optimizer, **cases.place(mesh))
    assert model._fsdp_extension.compute_stream is not None


def test_install_is_taken_back():
    run_ranks(4, installed)


def refused(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    from torchshard import init_device_mesh
    from torchshard.errors import ShardingError
    from torchshard.parallel.fsdp import install

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with install(), pytest.raises(NotImplementedError, match=r"NO_SHARD.*use_orig_params=True"):
        cases.wrapped(cases.parallel(mesh), mesh, strategy="FULL_SHARD")
    model = cases.parallel(mesh, hidden=(8, 8))
    model[1].up.weight = model[0].up.weight
    with install(), pytest.raises(ShardingError, match="under two names"):
        FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=False, device_id=torch.device("cpu"))
    apart = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("rep", "dp", "tp"))
    with install(), pytest.raises(NotImplementedError, match="no gradient between the 2 replicas"):
        FullyShardedDataParallel(
            cases.parallel(apart), device_mesh=apart["rep", "dp"], use_orig_params=False,
            device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )  # fmt: skip


def test_what_fsdp_cannot_do_right_is_refused():
    run_ranks(2, refused)


def test_another_torch_is_refused_by_name(monkeypatch):
    from torch.distributed.fsdp import _init_utils, fully_sharded_data_parallel

    from torchshard.parallel.fsdp import install

    before = fully_sharded_data_parallel._init_extension
    with monkeypatch.context() as patch:
        patch.delattr(_init_utils, "FlatParamHandle")
        with pytest.raises(RuntimeError, match="has no FlatParamHandle in FSDP"):
            install()
    assert fully_sharded_data_parallel._init_extension is before
    with install():
        assert fully_sharded_data_parallel._init_extension is not before
    assert fully_sharded_data_parallel._init_extension is before
