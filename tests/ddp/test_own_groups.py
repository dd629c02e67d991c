"""Process groups of the user's own class, written in Python: known to torch by name, or not known to it at all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_ranks
from torchshard import DistributedDataParallel


def done(result):
    future = torch.futures.Future()
    future.set_result(result)
    return future


class Work(dist.Work):
    """Done, as soon as it is asked."""

    def __init__(self, result):
        super().__init__()
        self.future = done(result)

    def wait(self, timeout):
        return True

    def get_future(self):
        return self.future


class Alone(dist.ProcessGroup):
    """One rank; what it sums is three times as large, so that it shows who has been asked."""

    def allreduce(self, tensors, options):
        for x in tensors:
            x.mul_(3)
        return Work(tensors)

    def broadcast(self, tensors, options):
        return Work(tensors)

    def allgather(self, gathered, tensors, options):
        for to, x in zip(gathered[0], tensors, strict=True):
            to.copy_(x)
        return Work(gathered)

    def getBackendName(self):
        return "alone"


def gradient(model):
    """What three backwards leave, the second of which is not reduced."""
    given = []
    for reduces in (True, False, True):
        if reduces:
            model.zero_grad()
        model.require_backward_grad_sync = reduces
        model(torch.ones(1, 2)).sum().backward()
        given.append(model.module.weight.grad.tolist())
    return given


@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}])
def test_gradients_are_reduced_by_the_group(settings):
    model = DistributedDataParallel(nn.Linear(2, 1), process_group=Alone(0, 1), **settings)
    assert gradient(model) == [[[3.0, 3.0]], [[4.0, 4.0]], [[3.0, 3.0]]]
    assert model._get_ddp_logging_data()["backend_name"] == "alone"


def test_hooks_bring_the_gradients():
    model = DistributedDataParallel(nn.Linear(2, 1), process_group=Alone(0, 1))
    model.register_comm_hook(None, lambda state, bucket: done(2 * bucket.buffer()))
    assert gradient(model) == [[[2.0, 2.0]], [[3.0, 3.0]], [[2.0, 2.0]]]


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x, order):
        for k in order:
            x = self.branches[k](x)
        return x.sum()


def test_buckets_of_one_rank_do_not_depend_on_what_it_has_seen():
    """A hook may reach other processes, as in fault-tolerant training: these began earlier, with other data."""
    found = []
    for first in ((0, 1, 2, 3), (3, 0, 1), (2,)):
        seen = []

        def note(state, bucket, seen=seen):
            seen.append([*map(id, bucket.parameters())])
            return done(bucket.buffer())

        torch.manual_seed(0)
        module, settings = Chosen(), {"bucket_cap_mb": 3e-5, "find_unused_parameters": True}
        model = DistributedDataParallel(module, process_group=Alone(0, 1), **settings)
        model.register_comm_hook(None, note)
        numbers = {id(p): k for k, p in enumerate(module.parameters())}
        for order in (first, (0, 1), (1, 0)):
            seen.clear()
            model(torch.ones(1, 2), order).backward()
            found.append([[numbers[p] for p in members] for members in seen])
    assert len(found[0]) > 1
    assert found == [found[0]] * 9


def test_more_ranks_need_a_store():
    class Pair(Alone):
        def getSize(self):
            return 2

    with pytest.raises(ValueError, match=r"'alone' of 2 ranks has no store.*register_backend"):
        DistributedDataParallel(nn.Linear(2, 1), process_group=Pair(0, 2))


class OnGloo(dist.ProcessGroup):
    """Hands everything on. It does not keep the name that torch gives it."""

    def __init__(self, store, rank, size, limit):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, limit)

    def allreduce(self, *given):
        return self.gloo.allreduce(*given)

    def broadcast(self, *given):
        return self.gloo.broadcast(*given)

    def allgather(self, *given):
        return self.gloo.allgather(*given)

    def all_gather_single(self, *given):  # asked for by torch 2.15
        return self.gloo.all_gather_single(*given)

    def getBackendName(self):
        return "on gloo"


def registered(rank, world, path):
    dist.Backend.register_backend("on_gloo", OnGloo, devices=["cpu"])
    dist.init_process_group("on_gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = DistributedDataParallel(nn.Linear(2, 1))
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    again = nn.Linear(2 + rank, 1)
    with pytest.raises(RuntimeError, match="rank 1"):
        DistributedDataParallel(again)
    return type(dist.group.WORLD).__name__, model.module.weight.grad.tolist()


def test_registered_groups_of_several_ranks(tmp_path):
    assert run_ranks(2, registered, str(tmp_path / "store"), backend="") == [("OnGloo", [[1.5, 1.5]])] * 2
