"""Ranks that would train different models, or come to different buckets, say so, all of them and soon."""

import contextlib
import copy
import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.models import Stops, mlp, stumble
from tests.ranks import run_ranks
from torchshard.errors import RankMismatchError


def _message(act):
    start = time.monotonic()
    try:
        act()
    except RankMismatchError as error:
        assert time.monotonic() - start < 15
        return str(error)
    return None


class Renamed(nn.Module):
    def __init__(self, name):
        super().__init__()
        setattr(self, name, nn.Linear(8, 8))


def _differ(rank, world):
    from torchshard.ddp import DistributedDataParallel

    odd = rank == world - 1
    wider = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9 if odd else 8))
    cases = {
        "shape": lambda: DistributedDataParallel(wider),
        "dtype": lambda: DistributedDataParallel(mlp(8).double() if odd else mlp(8)),
        "name": lambda: DistributedDataParallel(Renamed("b" if odd else "a")),
        "number": lambda: DistributedDataParallel(mlp(8, 3 if odd else 4)),
        "argument": lambda: DistributedDataParallel(mlp(8), bucket_cap_mb=3 if odd else 4),
        "frozen": lambda: DistributedDataParallel(_frozen(mlp(8)) if odd else mlp(8)),
        "buffer": lambda: DistributedDataParallel(nn.Sequential(mlp(8), _buffer(5 if odd else 4))),
        "delayed": lambda: _delayed(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9 if odd else 8))),
        "none": lambda: DistributedDataParallel(mlp(8)),
    }
    return {name: _message(act) for name, act in cases.items()}


def _delayed(module):
    from torchshard.ddp import DistributedDataParallel

    named = list(module.named_parameters())[2:]
    DistributedDataParallel(module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=module[0].weight)


def _frozen(module):
    module[0].bias.requires_grad_(False)
    return module


def _buffer(size):
    module = nn.Identity()
    module.register_buffer("mask", torch.zeros(size))
    return module


def test_at_construction():
    answers = run_ranks(3, _differ)
    assert answers[0] == answers[1] == answers[2]
    messages = answers[0]
    assert messages["none"] is None
    assert "rank 0: parameter 1.weight: float32 of shape [8, 8]" in messages["shape"]
    assert "rank 2: parameter 1.weight: float32 of shape [9, 8]" in messages["shape"]
    assert "rank 2: parameter 0.weight: float64" in messages["dtype"]
    assert "rank 2: parameter b.weight" in messages["name"]
    assert "rank 0: parameter 6.weight" in messages["number"]
    assert "rank 2: requires a gradient: 0.weight" in messages["number"]
    assert "cap=3145728" in messages["argument"]
    assert "rank 0: requires a gradient: 0.bias" in messages["frozen"]
    assert "rank 2: buffer 1.mask: float32 of shape [5]" in messages["buffer"]
    assert "rank 2: delayed parameter 1.weight: float32 of shape [9, 8]" in messages["delayed"]


def _unchecked(rank, world, what):
    """Without init_sync nothing is compared at first; the first bucket is the last moment to do so."""
    from torchshard.ddp import DistributedDataParallel

    group = dist.new_group(timeout=timedelta(seconds=20))
    odd = rank == world - 1
    if what == "shape":
        module, settings = nn.Linear(8, 9 if odd else 8), {}
    else:
        module, settings = mlp(8), {"bucket_cap_mb": 0 if odd else 1}
    model = DistributedDataParallel(module, process_group=group, init_sync=False, **settings)

    def train():
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()

    return _message(train) or str(model.reducer)


def test_in_the_first_backward_if_never_compared():
    for message in run_ranks(3, _unchecked, "shape"):
        assert "have different buckets" in message
        assert "bias [8]" in message
        assert "bias [9]" in message


def test_buckets_are_those_of_rank_0_if_sizes_were_never_compared():
    plans = run_ranks(3, _unchecked, "caps")
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].count("float32") == 1


def _apart(rank, world, what):
    """One rank runs a forward more than the others, alone is prepared for uneven inputs, or leaves a model out."""
    from torchshard.ddp import DistributedDataParallel

    group = dist.new_group(timeout=timedelta(seconds=3))
    model = DistributedDataParallel(nn.Sequential(mlp(8), nn.BatchNorm1d(8)), process_group=group)
    x = torch.ones(4, 8)
    models = [DistributedDataParallel(nn.Linear(8, 8), process_group=group), model][what != "a model less" :]
    for each in models:
        each(x).sum().backward()
    if rank == 0 and what == "a forward more":
        model(x)

    def steps():
        with model.join() if rank == 0 and what == "join" else contextlib.nullcontext():
            for _ in range(3):
                for each in models[rank == 1 and what == "a model less" :]:
                    each(x).sum().backward()

    return _message(steps)


@pytest.mark.parametrize("what", ["a forward more", "join", "a model less"])
def test_ranks_that_wait_for_different_things_say_for_which(what):
    said = run_ranks(2, _apart, what, timeout=60)
    waited_for = [message.splitlines()[0].partition(" waited in vain for ")[2] for message in said]
    assert all(waited_for)
    for rank, message in enumerate(said):
        assert f"rank {1 - rank} waits for {waited_for[1 - rank]}\n" in message
        assert "have all ranks run the same steps, in the same order" in message


def _goes_on(rank, world, layer):
    """Layers of equal size, a bucket each; in one step the last rank fails behind some of them, and tries the next."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module, failing, said = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)]), [False], []
    module[layer].register_forward_hook(
        lambda module, args, output: Stops.apply(output, stumble) if failing[0] else output
    )
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0)
    begun = time.monotonic()
    for step in range(6):
        failing[0] = rank == world - 1 and step == 3
        model.zero_grad()
        x = torch.full((2, 8), float(step + 1))
        try:
            model(x).sum().backward()
        except (ValueError, RankMismatchError) as error:
            said.append(f"{type(error).__name__} {error}")
            continue
        failing[0] = False
        expected = torch.autograd.grad(module(x).sum(), [*module.parameters()])
        for param, gradient in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, gradient)
    assert time.monotonic() - begun < 15
    return said


@pytest.mark.parametrize("read", ["1", "0"])
def test_a_rank_that_goes_on_after_an_exception_in_backward_is_named(monkeypatch, read):
    monkeypatch.setenv("TORCHSHARD_READ_NEIGHBOURS", read)
    first, last = run_ranks(2, _goes_on, 1)
    assert last.pop(0) == "ValueError stumbled"
    assert (len(first), len(last)) == (3, 2)
    for message in first + last:
        assert "rank 1: goes on after an exception in backward, with 2 of 4 buckets sent" in message
        assert "rank 0: bucket 0" in message


def _halving(group, bucket):
    """A hook that divides what it has summed; other ranks divide before."""
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / group.size())


def _set_alone(rank, world):
    """One rank is set up otherwise after its wrapper was made."""
    from torchshard.ddp import DistributedDataParallel

    said, x = {}, torch.ones(2, 8)
    sets = {
        "hook": lambda model: model.register_comm_hook(model.process_group, _halving),
        "compressing": lambda model: model.register_comm_hook(model.process_group, default_hooks.bf16_compress_hook),
        "averaging": lambda model: model.register_comm_hook(model.process_group, default_hooks.allreduce_hook),
        "static graph": lambda model: model._set_static_graph(),
        "converted": lambda model: model.double(),
        "buffer": lambda model: model.module[0].register_buffer("mask", torch.zeros(7)),
        "converted buffer": lambda model: setattr(model.module[-1], "mask", torch.zeros(3, dtype=torch.float64)),
    }
    for what, act in sets.items():
        group = dist.new_group(timeout=timedelta(seconds=20))
        module = nn.Sequential(*mlp(8), _buffer(3)) if "buffer" in what else mlp(8)
        model = DistributedDataParallel(module, process_group=group)
        if what != "static graph":
            model(x).sum().backward()
        if rank == (0 if what == "converted buffer" else world - 1):
            act(model)
        given = x.to(next(model.parameters()).dtype)
        said[what] = _message(lambda model=model, x=given: [model(x).sum().backward() for _ in range(3)])
    return said


@pytest.mark.parametrize("read", ["1", "0"])
def test_a_rank_that_reduces_otherwise_is_named_before_anything_is_sent(monkeypatch, read):
    """Sums of what one rank has divided, and another has not, would be wrong without a word."""
    monkeypatch.setenv("TORCHSHARD_READ_NEIGHBOURS", read)
    for said in run_ranks(2, _set_alone, timeout=60):
        plain = "rank 0: each parameter has a gradient in each backward, averaged"
        assert said.pop("averaging") is None
        assert "ranks 0 and 1 have different buffers" in said["buffer"]
        assert "rank 1: buffer 0.mask: float32 of shape [7]" in said.pop("buffer")
        assert "rank 0: buffer 7.mask: float64 of shape [3]" in said["converted buffer"]
        assert "rank 1: buffer 7.mask: float32 of shape [3]" in said.pop("converted buffer")
        assert "rank 1: bucket 0: ('float64', 'cpu')" in said["converted"]
        assert "rank 0: bucket 0: ('float32', 'cpu')" in said.pop("converted")
        for message in said.values():
            assert "have different buckets" in message
            assert plain in message
        assert "rank 1: each parameter has a gradient in each backward, given to a communication hook" in said["hook"]
        assert "averaged in bfloat16" in said["compressing"]
        assert "rank 1: parameters have gradients as in the first backward, averaged" in said["static graph"]


def _copied_alone(rank, world, then):
    """The first rank keeps an average of its own."""
    from torchshard.ddp import DistributedDataParallel

    group = dist.new_group(timeout=timedelta(seconds=20))
    wrapper = DistributedDataParallel(mlp(8))
    if rank == 0:
        with torch.no_grad():
            copy.deepcopy(wrapper)(torch.ones(2, 8))
    if then == "copy":
        other = copy.deepcopy(wrapper)
    elif then == "pickle":
        other = pickle.loads(pickle.dumps(wrapper))
    elif then == "unchecked":
        other = DistributedDataParallel(mlp(8), init_sync=False)
    else:
        other = DistributedDataParallel(mlp(8))
        other._update_process_group(group)
    for model in (wrapper, other):
        for _ in range(3):
            model.zero_grad()
            model(torch.full((2, 8), float(rank))).sum().backward()
    return [p.grad.sum().item() for p in other.parameters()]


@pytest.mark.parametrize("then", ["copy", "pickle", "unchecked", "other group"])
def test_a_copy_on_one_rank_is_its_own_affair(then):
    answers = run_ranks(3, _copied_alone, then, timeout=60)
    assert answers[0] == answers[1] == answers[2]


def _in_turn(rank, world, hook):
    """Two equal models, whose backwards run the other way round on the last rank, in the third step."""
    from torchshard.ddp import DistributedDataParallel

    group = dist.new_group(timeout=timedelta(seconds=20))
    models = [DistributedDataParallel(mlp(8), process_group=group) for _ in range(2)]
    if hook:
        for model in models:
            model.register_comm_hook(group, default_hooks.allreduce_hook)

    def train():
        for step in range(3):
            losses = [model(torch.full((2, 8), 1.0 + k)).sum() for k, model in enumerate(models)]
            for loss in losses[:: -1 if rank == world - 1 and step == 2 else 1]:
                loss.backward()

    return _message(train), _message(train)


@pytest.mark.parametrize("hook", [False, True])
def test_backwards_of_two_models_in_another_order_are_an_error(hook):
    """Equal buckets of theirs would be added without a word, as under torch's wrapper."""
    for first, again in run_ranks(3, _in_turn, hook, timeout=60):
        assert "sum different tensors" in first
        assert "as many for another wrapper" in first
        assert "give each wrapper a process group of its own" in first
        assert again is not None
