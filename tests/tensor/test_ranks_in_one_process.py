"""Ranks that are threads of one process, as in many of torch's tests; and those that LocalTensorMode plays."""

import unittest

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as Part
from torch.testing._internal.common_distributed import MultiThreadedTestCase

from tests.ranks import fake_ranks, run_ranks
from torchshard import (
    DistributedDataParallel,
    DTensor,
    Replicate,
    Shard,
    ShardedTensor,
    distribute_tensor,
    init_device_mesh,
)
from torchshard.errors import ShardingError


class Threads(MultiThreadedTestCase):
    __test__ = False  # run by a rank of its own

    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_values_and_gradients(self):
        x, w = torch.arange(28.0).view(7, 4), torch.arange(20.0).view(4, 5) - 7
        for shape, rows, columns in [((4,), [Shard(0)], [Shard(1)]), ((2, 2), [Shard(0), Shard(1)], [Replicate()] * 2)]:
            mesh = init_device_mesh("cpu", shape)
            a = distribute_tensor(x.clone(), mesh, rows).requires_grad_()
            b = distribute_tensor(w.clone(), mesh, columns).requires_grad_()
            x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
            got, expected = torch.relu(a @ b).mean(0), torch.relu(x @ w).mean(0)
            torch.testing.assert_close(got.full_tensor(), expected)
            got.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(a.grad.full_tensor(), x.grad)
            torch.testing.assert_close(b.grad.full_tensor(), w.grad)
            torch.testing.assert_close(a.redistribute(placements=[Shard(1)] * len(shape)).full_tensor(), x)
            x, w = x.detach(), w.detach()

    def test_parts_in_groups(self):  # ranks of such groups have no store that they know of
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))["columns"].get_group()
        at = dist.get_rank(group)
        x = ShardedTensor.from_local(torch.full((at + 1, 2), float(at)), process_group=group)
        part = Part.from_tensor_and_offsets(torch.ones(2, 2), [2 * at, 0], dist.get_rank())
        y = ShardedTensor.from_local_shards([part], 4, 2, process_group=group)
        assert (x.shape, y.shape) == ((3, 2), (4, 2))
        assert (2 * x + 1).local_tensor().tolist() == [[2.0 * at + 1] * 2] * (at + 1)

    def test_wrapped(self):  # such groups' works are made of futures, and take no time to wait for
        torch.manual_seed(dist.get_rank())
        wrapped = DistributedDataParallel(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.5)
        x = torch.arange(12.0).view(4, 3)
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(x[dist.get_rank() :][:1]).sum().backward()
            torch.testing.assert_close(wrapped.module.weight.grad, x.mean(0, keepdim=True))
            optimizer.step()


def threads(rank, world):
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Threads).run(result)
    return result.testsRun, [text for _, text in [*result.errors, *result.failures]]


def test_ranks_that_are_threads():
    assert run_ranks(1, threads, backend="") == [(3, [])]


def played(rank, world):
    from torch.distributed._local_tensor import LocalTensorMode

    def refused():
        return pytest.raises(ShardingError, match="All ranks are played in one process")

    with fake_ranks(4):
        with LocalTensorMode(4), refused():
            distribute_tensor(torch.ones(8), init_device_mesh("cpu", (4,)), [Shard(0)])
        known = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (4,)), [Shard(0)]).device_mesh
        for make in (distribute_tensor, DTensor.from_local):
            with LocalTensorMode(4), refused():
                make(torch.ones(8), known, [Shard(0)])


def test_ranks_that_are_played_are_refused():
    run_ranks(1, played, backend="")
