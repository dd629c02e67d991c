"""Ranks of one machine that read one another's memory."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.ranks import by_messages, run_ranks
from torchshard._torch import device_carried
from torchshard.errors import RankMismatchError

CPU = torch.device("cpu")


def circle():
    from torchshard.comm.circle import circle_of

    return circle_of(tuple(range(dist.get_world_size())), CPU)


def values(rank, shape, dtype=torch.float32):
    """A tensor of its own for each rank."""
    x = torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000 * rank
    return x.to(dtype)


def lent(rank):
    """Parts of all kinds that a rank lends: dense, with gaps, far apart, transposed, expanded, conjugated, long."""
    wide = values(rank, (700, 600))
    return {
        "dense": values(rank, (5, 7), torch.int16),
        "scalar": values(rank, ()),
        "columns": wide[:, 100:400],
        "thin column": wide[:, 3:4],
        "thin column of few": values(rank, (3000, 5))[:, 2],
        "transposed": wide.t(),
        "steps": values(rank, (100_000,))[::3],
        "expanded": values(rank, (1, 3)).expand(400, 3),
        "conjugated": torch.view_as_complex(values(rank, (50, 2))).conj(),
        "rows": wide[5:600],
        "long": values(rank, (5, 2**20), torch.int16),
    }


def given_and_got(rank, world):
    from torchshard.comm import neighbours as readers
    from torchshard.comm.neighbours import fetch, neighbours

    readers._LONGEST = 2**20
    pids = neighbours(circle())
    assert sorted(pids) == list(range(world))
    assert pids[rank] == os.getpid()
    others = [r for r in range(world) if r != rank]
    mine = lent(rank)
    expected = {peer: lent(peer) for peer in others}
    for cut in (False, True):  # into dense memory, and into parts of wider rows
        into = {}
        for peer in others:
            into[peer] = [torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)[..., 1::2] if cut and x.ndim
                          else torch.zeros(x.shape, dtype=x.dtype) for x in mine.values()]  # fmt: skip
        fetch({peer: list(mine.values()) for peer in others}, into, circle(), pids)
        for peer in others:
            for name, x in zip(mine, into[peer], strict=True):
                assert torch.equal(x, expected[peer][name]), (name, cut)


def test_parts_of_all_kinds():
    run_ranks(3, given_and_got, timeout=60)


def nobody_may_read(rank, world):
    from torchshard.comm import neighbours

    if rank == 1:
        by_messages()
    return dict(neighbours.neighbours(circle()))


def a_stranger_has_the_process_id(rank, world):
    from torchshard.comm import neighbours

    if rank == 1:
        os.getpid = os.getppid  # as in a container with processes of its own
    return dict(neighbours.neighbours(circle()))


@pytest.mark.parametrize("case", [nobody_may_read, a_stranger_has_the_process_id])
def test_all_send_messages_if_one_cannot_be_read(case):
    assert run_ranks(3, case, timeout=60) == [{}] * 3


def lost_while_it_is_read(rank, world):
    from torchshard.comm.neighbours import fetch, neighbours

    pids = dict(neighbours(circle()))
    if rank == 0:
        pids[1] = 2**22 + 1  # no process has this id
    part = torch.zeros(8)
    with pytest.raises(RankMismatchError, match="waited in vain"):
        fetch({1 - rank: [part]}, {1 - rank: [part.clone()]}, circle(), pids)


def test_a_rank_whose_memory_is_gone_is_an_error_on_all():
    run_ranks(2, lost_while_it_is_read, timeout=60)


def test_who_holds_another_word_is_not_read():
    from torchshard.comm.lines import machine
    from torchshard.comm.neighbours import _readable

    word = torch.arange(4)
    told = [machine(), os.getpid(), word.data_ptr()]
    assert _readable([*told, 0, 1, 2, 3])
    assert not _readable([*told, 0, 1, 2, 4])  # a process elsewhere that has the same id
    assert not _readable([told[0] + 1, *told[1:], 0, 1, 2, 3])


def test_what_a_group_does_not_carry_travels_on_its_own_device():
    cuda, first = torch.device("cuda"), torch.device("cuda", 1)
    gloo, nccl = dist.ProcessGroupGloo(dist.HashStore(), 0, 1), object()
    for known, bound, backend, of_cpu, of_cuda in [
        ([CPU, cuda], None, nccl, CPU, first),
        ([cuda], None, nccl, cuda, first),
        ([cuda], first, nccl, first, first),
        ([CPU], None, nccl, CPU, CPU),
        ([], None, nccl, CPU, first),
        ([CPU, cuda], None, gloo, CPU, CPU),  # whose messages of GPUs end in an error of the system
    ]:
        group = SimpleNamespace(_device_types=known, bound_device_id=bound, _get_backend=lambda _, its=backend: its)
        assert (device_carried(group, CPU), device_carried(group, first)) == (of_cpu, of_cuda)
