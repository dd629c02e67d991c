"""Graphs of ranks that hold two rows, one or none send alike, forward and backward: one that sends less is waited for."""

from functools import partial

import pytest
import torch
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.every_rank import sent_by_code, sent_by_ranks
from tests.older import require
from torchshard import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

WORLD, F = 3, torch.nn.functional
ALL_REDUCE = ("all_reduce_", (0, 1, 2), torch.float32, [4])


def again(function):
    return lambda x: checkpoint(lambda x: function(x).sin() * x, x, use_reentrant=False)


def written(x, rows):
    x = x * 1
    x[rows] = 0
    return x * 2


ALONG = {  # of x alone, along its split dim
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cat": lambda x: torch.cat([x, x[:1]]),
    "cat of equal parts": lambda x: torch.cat([x, x.sin()]).chunk(2)[1],
    "cumprod": lambda x: x.cumprod(0),
    "cumsum": lambda x: x.cumsum(0),
    "in a checkpoint, batch_norm": again(lambda x: F.batch_norm(x, None, None, training=True)),
    "in a checkpoint, cumprod": again(lambda x: x.cumprod(0)),
    "in a checkpoint, cumsum": again(lambda x: x.cumsum(0)),
    "in a checkpoint, softmax": again(lambda x: x.softmax(0)),
    "diff": lambda x: x.diff(dim=0),
    "flip": lambda x: x.flip(0),
    "layer_norm": lambda x: F.layer_norm(x.mT, x.shape[:1]),
    "log_softmax twice": lambda x: x.log_softmax(0).exp() * x.softmax(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "max": lambda x: x.max(0).values,
    "median": lambda x: x.median(0).values,
    "mm": lambda x: x @ x.mT,
    "norm": lambda x: x.norm(dim=0),
    "one row": lambda x: x[1].exp(),
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "redistribute": lambda x: x.redistribute(placements=[Shard(1)]).exp(),
    "replicate": lambda x: x.redistribute(placements=[Replicate()]).exp(),
    "roll": lambda x: x.roll(1, 0),
    "rows": lambda x: x[1:].exp() * x[:-1],
    "sort": lambda x: x.sort(0).values,
    "split": lambda x: torch.stack([part.exp().sum(0) for part in x.split(1)]),
    "std": lambda x: x.std(0) + x.var(0),
    "tril": lambda x: x.tril(),
    "two softmaxes": lambda x: x.sin().softmax(0).exp() * x.cos().softmax(0),
    "unfold": lambda x: x.unfold(0, 2, 1).exp(),
    "write": lambda x: written(x, slice(0, 1)),
}


def row_program(function, rows, gradients=True):
    def program(rank):
        mesh = init_device_mesh("cpu", (WORLD,))
        x = distribute_tensor(torch.randn(rows, 4), mesh, [Shard(0)], src_data_rank=None)
        return function, (x.requires_grad_(gradients),)

    return program


@pytest.mark.parametrize(
    ("rows", "partition"),
    [(2, min_cut_rematerialization_partition), pytest.param(5, default_partition, marks=pytest.mark.full)],
)
def test_along_a_split_dim(rows, partition):
    require("meshes in graphs")
    differing = {}
    for name, function in ALONG.items():
        first, *others = sent_by_ranks(WORLD, row_program(function, rows), partition)
        if len(first) != 2 or others != [first] * len(others):
            differing[name] = first, *others
    assert not differing


def squares_of_terms(x):
    """What backward sends, it knows before there is a gradient; where nothing is held, it reads nothing of it."""
    y = x.mean(0)
    return y.square().sum() + written(y, 0).square().sum()


def two_checkpoints(x):
    """Of what came, the rank without rows reads nothing; so what came first was moved behind what came second."""
    x = checkpoint(lambda x: x.sin().square(), x, use_reentrant=False)
    return checkpoint(lambda x: x[0].exp() * x, x, use_reentrant=False).square().sum()


def terms_of_rows(x):
    """All ranks but the first send zeros, and need not gather the rows to know them."""

    def of_rows(x):
        whole = x.sin().redistribute(placements=[Replicate()]).exp()
        return whole.redistribute(placements=[Partial()]).square()

    return checkpoint(of_rows, x, use_reentrant=False).square().sum()


def softmax_behind(x):
    """Inductor's softmax is of forward, as what it stands for, and not of what reads the checkpoint in backward."""
    y = checkpoint(lambda x: x.redistribute(placements=[Replicate()]).exp(), x, use_reentrant=False)
    return y.square().mean() + y.softmax(0).square().mean()


def columns_in_a_checkpoint(x):
    """The gradient of layer_norm reads nothing where nothing is held, so nothing was received for it once more."""
    y = checkpoint(lambda x: F.layer_norm(x.mT, x.shape[:1]).square(), x, use_reentrant=False)
    return y[:-1].exp().square().sum() + y.sum()


def read_outside(x):
    """What reads a checkpoint's result runs backward first: it had that made once more, before others on some ranks."""
    y = checkpoint(lambda x: x[0].exp() * x, x, use_reentrant=False)
    z = y[:-1].exp()

    def whole_and_back(x):
        whole = x.sin().redistribute(placements=[Replicate()]).exp()
        return whole.redistribute(placements=[Shard(0)]).square()

    return y.square().mean() + (checkpoint(whole_and_back, z, use_reentrant=False) - z).square().mean()


def received_and_read_outside(x):
    """What was received is read by the gradient of the checkpoint and, but for one rank, by what is behind it."""

    def received(x):
        whole = x.sin().redistribute(placements=[Replicate()])
        return whole.exp() * whole, whole

    y, whole = checkpoint(received, x, use_reentrant=False)
    return y.square().sum() + (whole.redistribute(placements=[Shard(0)]).exp() * x).square().sum()


def term_of_a_checkpoint(x):
    """What the first checkpoint makes is a term: others than the first rank give zero, and need it backward only."""
    y = checkpoint(lambda x: x.square() * x.sin(), x.sum(), use_reentrant=False)
    z = checkpoint(lambda x: x.sum(0) * x, x, use_reentrant=False)
    return y.square().sum() + z.square().sum()


def saves_sines(context, operator, *_args, **_options):
    saved = operator is torch.ops.aten.sin.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def saved_term_of_a_checkpoint(x):
    """The same of what the checkpoint is told to save."""
    saving = partial(create_selective_checkpoint_contexts, saves_sines)
    y = checkpoint(lambda x: x.square().sin(), x.sum(), use_reentrant=False, context_fn=saving)
    z = checkpoint(lambda x: x.sum(0) * x, x, use_reentrant=False)
    return y.square().sum() + z.square().sum()


def split_in_two_checkpoints(x):
    """Torch takes both splits for one, but not their parts, as these are in the memory of a result."""
    y = x.sin().mean(0)
    running = [checkpoint(lambda x: x.cumsum(0).sin() * x, y, use_reentrant=False) for _ in range(2)]
    return running[0].square().sum() + running[1].sum(), y


CODED = ["cat", "cumsum", "in a checkpoint, softmax", "rows", "two softmaxes", "write"]


@pytest.mark.parametrize("name", CODED)
def test_in_the_order_of_the_code(name):
    require("meshes in graphs")
    for gradients in (True, False):
        first, *others = sent_by_code(WORLD, row_program(ALONG[name], 2, gradients))
        assert len(first) == 1 + gradients
        assert any(first)
        assert others == [first] * len(others)


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (squares_of_terms, 5),
        (two_checkpoints, 4),
        (terms_of_rows, 5),
        (softmax_behind, 5),
        (columns_in_a_checkpoint, 1),
        (read_outside, 3),
        (received_and_read_outside, 2),
        (split_in_two_checkpoints, 2),
        (term_of_a_checkpoint, 2),
        (saved_term_of_a_checkpoint, 2),
    ],
)
def test_what_is_zero_or_empty_on_some_ranks(function, rows):
    require("meshes in graphs")
    first, *others = sent_by_code(WORLD, row_program(function, rows))
    assert (len(first), any(first[1])) == (2, True)
    assert others == [first] * len(others)


def test_a_checkpoint_does_not_send_again_what_no_gradient_reads():
    require("meshes in graphs")

    def program(x):
        y = checkpoint(lambda x: x.sin().sum(0).redistribute(placements=[Replicate()]), x, use_reentrant=False)
        return y.square().sum()

    assert all(sent == [[ALL_REDUCE], []] for sent in sent_by_code(WORLD, row_program(program, 2)))


@pytest.mark.parametrize("name", ["cat", "layer_norm"])
def test_backward_code_knows_lengths_of_parts(name):
    """On ranks with two rows these are symbols; on the one with a single row they are numbers."""
    require("meshes in graphs")
    first, *others = sent_by_code(WORLD, row_program(ALONG[name], 5), dynamic=True)
    assert (len(first), any(first)) == (2, True)
    assert others == [first] * len(others)


def square(x):
    return x.unflatten(0, (1, -1))


def product(x):
    return x.flatten(0, 1).amax(1)


@pytest.mark.parametrize(("function", "shape"), [(square, (1, 2, 2)), (product, (2, 5, 2))])
def test_powers_and_products_of_lengths(function, shape):
    require("meshes in graphs")

    def program(rank):
        x = distribute_tensor(torch.randn(shape), init_device_mesh("cpu", (WORLD,)), [Shard(0)], src_data_rank=None)
        return function, (x.requires_grad_(),)

    first, *others = sent_by_ranks(WORLD, program, default_partition, dynamic=True)
    assert len(first) == 2
    assert others == [first] * len(others)


def test_a_length_costs_the_same_as_a_symbol():
    """A rank that holds one row knows that there are two, and how much padding three ranks make of them."""
    require("meshes in graphs")

    def program(rank):
        mesh = init_device_mesh("cpu", (WORLD,))
        x = distribute_tensor(torch.randn(2, 3), mesh, [Shard(0)], src_data_rank=None)
        return lambda x: (x[None] @ x[None].mT).softmax(-1) @ x[None], (x.requires_grad_(),)

    first, *others = sent_by_ranks(WORLD, program, default_partition, dynamic=True)
    assert (len(first), any(first)) == (2, True)
    assert others == [first] * len(others)


def settled_later(x, y):
    """What torch asks of lengths when it traces, and not before, settles that of the result on ranks with elements."""
    z = x * 2
    z.sin()
    y.topk(1, 0)
    return z


def test_a_result_of_a_length_that_its_trace_settles():
    require("meshes in graphs")

    def program(rank):
        mesh = init_device_mesh("cpu", (2, 3))
        x = distribute_tensor(torch.randn(1, 3), mesh, [Shard(0), Partial()], src_data_rank=None).detach()
        y = distribute_tensor(torch.randn(1, 3), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        return settled_later, (x.requires_grad_(), y)

    found = sent_by_ranks(6, program, min_cut_rematerialization_partition, dynamic=True)
    assert {len(graphs) for graphs in found} == {2}
    assert len({len(graph) for graphs in found for graph in graphs[:1]}) == 1
