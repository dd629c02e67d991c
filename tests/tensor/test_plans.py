"""What is kept of a call: its plan, and none of its tensors, nor dtypes that are the default for a while."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchshard import DeviceMesh, DTensor, Partial, Shard, distribute_tensor, init_device_mesh, layout_of
from torchshard.tensor.dispatch import forget_plans

CALLS = {
    "one operator": lambda x, y, low: torch.add(x, y),
    "one that moves": lambda x, y, low: torch.softmax(x.t() @ y, 0),
    "in place": lambda x, y, low: x.mul_(y),
    "numbers of terms": lambda x, y, low: x.redistribute(placements=[Partial()]) * 2.0,
    "lists": lambda x, y, low: torch._foreach_mul([x, x], 2.0),
    "lists that are moved": lambda x, y, low: torch._foreach_add_([x, x * 1], [y, y * 1]),
    "lists that broadcast": lambda x, y, low: torch._foreach_add_([x, x * 1], [low, low * 1]),
    "severed views": lambda x, y, low: torch._foreach_add_([x[1:3], x[2:4]], 1.0),
}


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("call", CALLS)
def test_plans_keep_no_tensors(mesh, call):
    forget_plans()
    x, y = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(dim)]) for dim in (0, 1))
    tensors = [x, y, distribute_tensor(torch.ones(1, 4), mesh, [Shard(1)])]
    CALLS[call](*tensors)
    left = [weakref.ref(each) for each in tensors]
    del x, y, tensors
    gc.collect()
    assert [each() for each in left] == [None] * 3


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=("within", "outside"))
def test_plans_keep_no_default_dtype(mesh, ranks):
    x = distribute_tensor(torch.arange(4), DeviceMesh("cpu", ranks), [Shard(0)])
    calls = {
        "one": lambda: torch.sigmoid(x),
        "complex": lambda: torch.ops.aten.mul.Scalar(x, 1j),
        "lists": lambda: torch._foreach_add([x, x.double()], 1.5)[0],
        "lists that broadcast": lambda: torch._foreach_div([x], [x[:1]])[0],
    }
    for name, call in calls.items():
        found = []
        for dtype in (torch.float32, torch.float64):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                found.append(layout_of(call()).dtype.to_real())
            finally:
                torch.set_default_dtype(before)
        assert found == [torch.float32, torch.float64], name


def test_a_mesh_whose_groups_were_destroyed_is_not_used_again():
    meshes = []
    for groups_before in (3, 0):  # so that the new mesh's groups have other names
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        for _ in range(groups_before):
            dist.new_group([0, 1])
        meshes.append(init_device_mesh("cpu", (2, 2)))
        x = DTensor.from_local(torch.ones(4), meshes[-1], [Shard(0), Shard(0)])
        if len(meshes) == 2:  # the first has never sent anything
            x.full_tensor()
        assert x.device_mesh is meshes[-1]
        dist.destroy_process_group()
