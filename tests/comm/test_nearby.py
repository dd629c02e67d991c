"""Collectives between ranks of one machine, by words and in memory. Their values: test_collectives.py."""

import functools
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.ranks import by_messages, meet, run_ranks
from tests.watching import Names
from torchshard import DTensor, Partial, Replicate, Shard, init_device_mesh
from torchshard.comm import collectives as C
from torchshard.comm import nearby, reach, words
from torchshard.comm.group import Group
from torchshard.debug import CommDebugMode
from torchshard.errors import RankMismatchError
from torchshard.tensor.moving.pending import Pending


def _group(limit=60, **sizes):
    for name, size in sizes.items():
        setattr(reach, name, size)
    group = dist.new_group(timeout=timedelta(seconds=limit))
    return Group(group.group_name, group.size(), group.rank())


def _who_sends(rank, world, why):
    if why == "memory" and rank == 1:
        by_messages()
    elif why == "the user" and rank == 1:
        os.environ["TORCHSHARD_READ_NEIGHBOURS"] = "0"
    elif why == "two machines":
        words.machine = lambda: rank // 2
    group, x = _group(), torch.ones(3)
    if why == "async":
        with nearby.by_transport():
            sender = nearby.nearby(group, x)
    else:
        sender = nearby.nearby(group, torch.empty(3, device="meta") if why == "device" else x)
    return type(sender).__name__, C.all_reduce(x, "sum", group).tolist()


@pytest.mark.parametrize("why", ["", "memory", "the user", "two machines", "async", "device"])
def test_all_ranks_come_to_one_answer_where_they_cannot(why):
    assert run_ranks(3, _who_sends, why) == [("NoneType" if why else "Nearby", [3.0] * 3)] * 3


def _all_kinds(group):
    rank, x = group.position, torch.arange(4.0).view(2, 2) + group.position
    return [
        C.all_gather(x, 0, [2, 2], group),
        C.all_reduce(x, "sum", group),
        C.reduce_scatter(x, "product", 0, [1, 1], group),
        C.all_to_all(x, 1, 0, [1, 1], [2, 2], group),
        C.broadcast(x, 1, group),
        C.exchange([x[:1], x[:rank]], [(1 - rank, 2), (1, 2)], group)[1],
    ]


def _modes_of_one_rank(rank, world):
    group = _group()
    plain = _all_kinds(group)
    counts, names, outer = CommDebugMode(), Names(), Names()
    if rank == 0:
        with outer, counts, names:
            seen = _all_kinds(group)
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        with Names() as mode:
            with pytest.raises(ZeroDivisionError):
                nearby.Watched(group, None)._call(lambda x, name: 1 / 0, torch.ones(2))
            assert torch.utils._python_dispatch._get_current_dispatch_mode() is mode
    else:
        seen = _all_kinds(group)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    total = counts.get_total_counts() if rank == 0 else None
    collectives = [[n for n in mode.seen if "all_" in n or n[:6] in ("reduce", "broadc")] for mode in (names, outer)]
    return total, collectives


def _kept_by_a_checkpoint(rank, world):
    c10d = torch.ops._c10d_functional
    kinds = {c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.all_reduce.default}

    def keep(context, operator, *args, **options):
        return CheckpointPolicy.MUST_SAVE if operator in kinds else CheckpointPolicy.PREFER_RECOMPUTE

    mesh = init_device_mesh("cpu", (world,))
    x = DTensor.from_local(torch.arange(6.0).view(2, 3) + rank, mesh, [Shard(0)]).requires_grad_()

    def moved(x):
        whole = x.sin().redistribute(placements=[Replicate()])
        part = DTensor.from_local(whole.to_local(), mesh, [Partial()]).redistribute(placements=[Shard(0)])
        return (part.cos() * x).sum().redistribute(placements=[Replicate()]).exp()

    counts = CommDebugMode()
    with counts:
        saving = functools.partial(create_selective_checkpoint_contexts, keep)
        checkpoint(moved, x, use_reentrant=False, context_fn=saving).backward()
    kept, x.grad = x.grad.full_tensor(), None
    moved(x).backward()
    assert torch.equal(x.grad.full_tensor(), kept)
    return counts.get_total_counts()


def test_a_selective_checkpoint_keeps_what_was_sent():
    assert run_ranks(2, _kept_by_a_checkpoint) == [4, 4]  # three, and the gradient of the second


def test_modes_see_the_collectives_of_torch_and_may_be_on_one_rank_alone():
    kinds = ["all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_to_all_single", "broadcast"]
    kinds.append("all_to_all_single")
    assert run_ranks(2, _modes_of_one_rank) == [(6, [kinds, kinds]), (None, [[], []])]


def _without_fast_paths(rank, world):
    from torchshard._torch import without_fast_paths

    group = _group()
    with without_fast_paths():
        return [x.tolist() for x in _all_kinds(group)]


def _with_them(rank, world):
    return [x.tolist() for x in _all_kinds(_group())]


def test_without_names_of_torch_modes_may_be_there():
    assert run_ranks(2, _without_fast_paths) == run_ranks(2, _with_them)


def _profiled(rank, world):
    group = _group()
    _all_kinds(group)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        _all_kinds(group)
    return sorted(event.name for event in seen.events() if event.name.startswith("gloo:"))


def test_a_profiler_sees_them():
    kinds = ["all_gather", "all_reduce", "all_to_all", "all_to_all", "broadcast", "reduce_scatter"]
    assert run_ranks(2, _profiled) == [[f"gloo:{kind}" for kind in kinds]] * 2


def _different(rank, world, said):
    messages = []
    for mine in (
        lambda group: C.all_reduce(torch.ones(10 + rank), "sum", group),
        lambda group: C.all_reduce(torch.ones(10, dtype=torch.int32 if rank else torch.float32), "sum", group),
        lambda group: C.all_reduce(torch.ones(10), "product" if rank else "sum", group),
    ):
        group = _group(SAID=said, WHOLE=0)
        with pytest.raises(RankMismatchError) as caught:
            mine(group)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("said", [0, 42, 1000])
def test_ranks_that_send_different_tensors_say_so(said):
    longer, other, another = run_ranks(2, _different, said)[0]
    assert "rank 0 and rank 1 all_reduce different tensors" in longer
    assert "10 elements of torch.float32, as on rank 0" in longer
    assert "11 elements of the same dtype" in longer
    for message in (other, another):
        assert "10 elements of another dtype, or for something else" in message
        assert "all_reduce sum 1 of this process group" in message


def _dies(rank, world, said, place):
    group = _group(SAID=said, WHOLE=0)
    assert C.all_reduce(torch.ones(1000), "sum", group)[0] == world
    meet(place, rank, world)
    if rank == 1:
        os._exit(0)
    start, messages = time.monotonic(), []
    for _ in range(2):
        with pytest.raises(RankMismatchError) as caught:
            C.all_reduce(torch.ones(1000), "sum", group)
        messages.append(str(caught.value))
    dist.destroy_process_group()  # without the barrier of the harness
    return messages, time.monotonic() - start < 30


@pytest.mark.parametrize("said", [0, 10_000])
def test_a_rank_that_is_lost_is_named(said, tmp_path):
    found = run_ranks(3, _dies, said, str(tmp_path / "signs"), expect_dead=(1,))
    for messages, soon in (found[0], found[2]):
        assert all("waited in vain for a collective of DTensors" in message for message in messages)
        assert all("no answer within 3 s from rank 1" in message for message in messages)
        assert soon


def _late(rank, world):
    group = _group(limit=2)
    C.all_reduce(torch.ones(3), "sum", group)
    if rank == 1:
        time.sleep(3)
    messages = []
    for _ in range(2):
        with pytest.raises(RankMismatchError) as caught:
            C.all_reduce(torch.ones(3), "sum", group)
        messages.append(str(caught.value))
    return messages


def test_one_that_comes_too_late_is_an_error_on_all_then_and_later():
    for messages in run_ranks(2, _late):
        assert all("of 2 ranks: rank" in message for message in messages)
        assert all("destroy the process group" in message for message in messages)


def _interrupted(rank, world, said):
    """The first rank has said a word when it is interrupted, and the second none: each goes on with the next tensor."""
    group = _group(SAID=said, WHOLE=said)
    C.all_reduce(torch.zeros(100), "sum", group)
    if rank == 0:
        hear = words.Words._hear

        def interrupt(*_):
            raise KeyboardInterrupt

        words.Words._hear = interrupt
        with pytest.raises(KeyboardInterrupt):
            C.all_gather(torch.full((100,), 7.0), 0, [100] * world, group)
        words.Words._hear = hear
    dist.barrier()
    for _ in range(2):
        with pytest.raises(RankMismatchError) as caught:
            C.all_gather(torch.full((100,), 8.0), 0, [100] * world, group)
    return str(caught.value)


@pytest.mark.parametrize("said", [0, 10_000])
def test_what_was_said_before_an_interrupt_is_no_answer_to_what_comes_later(said):
    for message in run_ranks(2, _interrupted, said):
        assert "or has been interrupted" in message or "waited in vain" in message


def _forked(rank, world):
    group, (hears, says) = _group(), os.pipe()
    C.all_reduce(torch.ones(3), "sum", group)
    if not (child := os.fork()):
        try:
            C.all_reduce(torch.ones(3), "sum", group)
        except RankMismatchError as error:
            os.write(says, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return os.read(hears, 4096).decode(), C.all_reduce(torch.ones(3), "sum", group).tolist()


def test_a_process_that_was_forked_off_a_rank_says_so():
    for message, later in run_ranks(2, _forked, timeout=60):
        assert "A collective of DTensors needs all ranks, and this process is none: it was forked off one" in message
        assert later == [2.0] * 3


def _independent(rank, world):
    """Results have memory of their own, and what was given stays as it was, whatever its history."""
    group, found = _group(SAID=0, WHOLE=0), []
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    for made in (C.all_reduce(x * 1, "sum", group), *_all_kinds(group)):
        found.append(made.requires_grad)
        made.add_(1)
    assert torch.equal(x, torch.arange(6.0).view(2, 3))
    with torch.inference_mode():
        y = C.all_gather(torch.ones(2, 3), 0, [2, 2], group)
    assert torch.equal(y, torch.ones(4, 3))
    return found


def test_results_have_memory_of_their_own_and_no_history():
    assert run_ranks(2, _independent) == [[False] * 7] * 2


def _of_other_classes(rank, world):
    """One rank's piece is a parameter, or on its way; the other's is a plain tensor, and they go the same way."""
    group, whole, found = _group(), torch.ones(2, 3), []
    for other in (torch.nn.Parameter(whole), Pending.of(whole.clone, (2, 3), (3, 1), whole.dtype, whole.device)):
        mine = other if rank else whole
        made = [
            C.all_gather(mine, 0, [2, 2], group),
            C.all_reduce(mine, "sum", group) / 2,
            C.all_reduce(mine, "max", group),
            C.reduce_scatter(mine, "product", 0, [1, 1], group),
            C.reduce_scatter(mine, "product", 1, [2, 1], group),
            C.all_to_all(mine, 1, 0, [2, 1], [2, 2], group),
            C.exchange([mine, mine], [(2, 3), (2, 3)], group)[0],
            C.broadcast(mine, 1, group),
            C.scatter(mine, 0, [1, 1], 1, group),
        ]
        found += [bool((x == 1).all()) for x in made]
    return found


def test_pieces_of_other_classes_go_the_same_way():
    assert run_ranks(2, _of_other_classes) == [[True] * 18] * 2
