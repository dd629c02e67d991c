"""What holds for a while in a thread holds in the threads that autograd runs its backwards in, as those of a GPU are."""

import sys
import threading

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import fake_ranks
from torchshard import DTensor, _torch, explain, fallback, implicit_replication, init_device_mesh
from torchshard.debug import CommDebugMode
from torchshard.errors import UnsupportedOperatorError

DEPTH = 70  # backwards inside of another; from the 60th on, autograd has other threads for those on the CPU


class Deep(torch.autograd.Function):
    """In its backward, after others inside of it, it calls a function."""

    @staticmethod
    def forward(ctx, x, function, depth):
        ctx.function, ctx.depth = function, depth
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            deep(ctx.function, ctx.depth - 1)
        else:
            ctx.function()
        return grad, None, None


def deep(function, depth=DEPTH):
    with torch.enable_grad():
        Deep.apply(torch.ones((), requires_grad=True), function, depth).backward()


@pytest.fixture
def x():
    with fake_ranks(2):
        yield DTensor.from_local(torch.ones(2, 4), init_device_mesh("cpu", (2,)), [Shard(0)])


def test_contexts_hold_in_the_threads_of_a_backward(x):
    here, threads = threading.current_thread(), []

    def mixed():
        threads.append(threading.current_thread())
        x + torch.ones(4)

    with implicit_replication():
        deep(mixed)
    assert threads
    assert here not in threads
    with pytest.raises(UnsupportedOperatorError, match=r"plain torch\.Tensor among"):
        deep(mixed)
    with fallback("error"), pytest.raises(UnsupportedOperatorError, match="no sharded way"):
        deep(lambda: torch.pdist(x))


def test_what_a_backward_moves_in_its_threads_is_seen(x):
    def gather():
        x.redistribute(placements=[Replicate()])

    with CommDebugMode() as seen:
        deep(gather)
    assert seen.get_total_counts() == 1
    assert [(row.operator, row.how) for row in explain(lambda: deep(gather)).rows] == [("redistribute", "asked for")]


@pytest.mark.parametrize("fast", [True, False])
def test_each_thread_has_its_own(fast):
    def state():
        class State:
            value = _torch.Inherited(0)

        return State()

    if fast:
        made = state()
    else:
        with _torch.without_fast_paths():
            made = state()
    made.value, found = 1, []
    thread = threading.Thread(target=lambda: (found.append(made.value), setattr(made, "value", 2)))
    thread.start()
    thread.join()
    deep(lambda: found.append(made.value))
    assert found == [0, 1 if fast else 0]
    assert made.value == 1
    made.value = 0
    deep(lambda: found.append(made.value))
    assert found[2:] == [0]


def test_what_is_kept_for_other_threads_is_not_given_up_twice():
    """As by torch 2.11, which takes no reference to what it stashes."""

    class Holder:
        value = _torch.Inherited(())

    holder, kept = Holder(), (object(),)
    before = sys.getrefcount(kept)
    for _ in range(5):
        holder.value = kept
        assert holder.value is kept
        holder.value = ()
    assert sys.getrefcount(kept) == before
