"""Redistribution: every pair of layouts has the same values, gradients included, and moves what the plan says."""

import itertools
import random

import pytest
import torch

from tests.ranks import run_ranks
from tests.tensor.proving.proof import exact, place


def all_pairs(rank, world, mesh_shape, limit):
    from torchshard import Partial, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", mesh_shape)
    kinds = [Replicate(), Shard(0), Shard(1), *[Partial(op) for op in ("sum", "avg", "max", "min", "product")]]
    starts = list(itertools.product(kinds, repeat=mesh.ndim))
    starts = [s for s in starts if len({p.reduce_op for p in s if p.is_partial()}) <= 1]
    ends = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=mesh.ndim))
    pairs = list(itertools.product(starts, ends, [(5, 4), (3, 1), (0, 2), (8, 6)]))
    pairs = random.Random(0).sample(pairs, min(limit, len(pairs)))
    g = torch.Generator().manual_seed(0)
    bad = []
    for start, end, shape in pairs:
        value = exact(shape, g)
        if any(p.is_partial() and p.reduce_op == "product" for p in start):
            value = value.sign() * 2.0
        x = placed_terms(value, mesh, start)
        y = x.redistribute(placements=end)
        if y.placements != tuple(end):
            bad.append(f"{start} {end}: {y.placements}")
        if not torch.equal(y.full_tensor(), value):
            bad.append(f"{start} -> {end} of {shape}: {y.full_tensor()} for {value}")
        if tuple(y.to_local().shape) != tuple(y._spec.local_shape):
            bad.append(f"{start} -> {end} of {shape}: part {y.to_local().shape}")
    return len(pairs), bad


def placed_terms(value, mesh, placements):
    from torchshard import DTensor, Replicate

    if any(p.is_partial() and p.reduce_op == "product" for p in placements):
        first = all(mesh.get_local_rank(a) == 0 for a, p in enumerate(placements) if p.is_partial())
        term = value if first else torch.ones_like(value)
        terms = [p if p.is_partial() else Replicate() for p in placements]
        return DTensor.from_local(term, mesh, terms).redistribute(placements=placements)
    return place(value, mesh, placements)


@pytest.mark.parametrize(("mesh_shape", "limit"), [((2,), 200), ((3,), 200), ((2, 2), 250)])
def test_values_are_those_of_the_full_tensor(mesh_shape, limit):
    world = 4 if len(mesh_shape) == 2 else mesh_shape[0]
    for count, bad in run_ranks(world, all_pairs, mesh_shape, limit):
        assert not bad, bad[:5]
        assert count >= 60


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_values_on_three_axes():
    for _, bad in run_ranks(8, all_pairs, (2, 2, 2), 1000, timeout=1100):
        assert not bad, bad[:5]


def twice_differentiable(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(1.0, 6.0)
    x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Replicate()])
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    half = x.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    half.float().sum().backward()
    return (
        torch.equal(first.full_tensor(), 3 * full**2),
        torch.equal(second.full_tensor(), 6 * full),
        str(half.dtype),
        str(x.grad.dtype),
        x.grad.full_tensor().tolist(),
        x.redistribute(placements=[Shard(0)]) is x,
    )


def test_gradients_any_number_of_times_and_dtypes_on_the_way():
    for found in run_ranks(2, twice_differentiable):
        assert found == (True, True, "torch.bfloat16", "torch.float32", [1.0] * 5, True)


def gradients_where_nothing_changes(rank, world):
    """What comes back for a tensor that stays where it is: its gradient lies as the tensor does."""
    from torchshard import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    full, found = torch.arange(6.0).view(3, 2), {}

    def shown(x):
        return x.grad.placements, x.grad.full_tensor().tolist()

    x = distribute_tensor(full, mesh, [Replicate()]).requires_grad_()
    x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).sum().backward()
    found["terms"] = shown(x)
    x.grad = None
    x.full_tensor(grad_placements=[Partial()]).sum().backward()
    found["terms of the whole"] = shown(x)
    x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Shard(-2)])
    y.backward(distribute_tensor(full, mesh, [Replicate()]))
    found["whole"], found["memory"] = shown(x), y.to_local().data_ptr() == x.to_local().data_ptr()
    x = DTensor.from_local(full, mesh, [Partial()]).detach().requires_grad_()
    x.redistribute(placements=[Partial()]).backward(DTensor.from_local(full, mesh, [Partial()]))
    found["Partial"] = shown(x)

    x = distribute_tensor(full, mesh, [Replicate()]).requires_grad_()
    y = (x * 1).redistribute(placements=[Replicate()])
    y.mul_(2)
    y.to_local(grad_placements=[Partial()]).sum().backward()
    found["written to"] = shown(x)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def region(x):
        return (x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) * 1).sum()

    x = distribute_tensor(full, mesh, [Replicate()]).requires_grad_()
    region(x).backward()
    found["compiled"] = shown(x)
    return found


def test_a_gradient_lies_as_its_tensor_does_where_nothing_changes():
    from torchshard import Partial, Replicate, Shard

    twos, own, sums = [[2.0, 2.0]] * 3, [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    for found in run_ranks(2, gradients_where_nothing_changes):
        assert found == {
            "terms": ((Replicate(),), twos),
            "terms of the whole": ((Replicate(),), twos),
            "whole": ((Shard(0),), own),
            "Partial": ((Partial(),), sums),
            "memory": True,
            "written to": ((Replicate(),), [[4.0, 4.0]] * 3),
            "compiled": ((Replicate(),), twos),
        }


def terms_of_a_parameter_that_was_looked_at(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    w = distribute_tensor(torch.ones(2), mesh, [Replicate()]).requires_grad_()
    before = w.full_tensor().tolist()
    with CommDebugMode() as mode:
        (x * w).sum().backward()
    return before, mode.get_total_counts(), w.grad.placements, w.grad.full_tensor().tolist()


def test_full_tensor_leaves_gradients_of_other_uses_where_they_are():
    """A parameter that is printed, say: its gradient is not reduced in every backward from then on."""
    from torchshard import Partial

    for found in run_ranks(2, terms_of_a_parameter_that_was_looked_at):
        assert found == ([1.0, 1.0], 0, (Partial(),), [12.0, 16.0])


def nested_orders(rank, world):
    """A dim cut by both axes, in both nesting orders: torch's placement for the other order goes there and back."""
    from torch.distributed.tensor.placement_types import _StridedShard

    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(8.0)
    plain = distribute_tensor(full, mesh, [Shard(0), Shard(0)])
    strided = distribute_tensor(full, mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    back = strided.redistribute(placements=[Shard(0), Shard(0)])
    return (
        plain.to_local().tolist(),
        strided.to_local().tolist(),
        str(strided.placements),
        torch.equal(back.to_local(), plain.to_local()),
        torch.equal((strided * 1).full_tensor(), full),
        torch.equal(plain.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), full),
    )


def test_nesting_order_is_part_of_the_layout():
    found = run_ranks(4, nested_orders)
    assert [f[0] for f in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [f[1] for f in found] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    for f in found:
        assert "_StridedShard" in f[2]
        assert all(f[3:])


def dtypes_on_the_way(rank, world):
    """What is sent, forward and backward, and what is refused."""
    from tests.tensor.moving.wire import Wire
    from torchshard import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import ShardingError

    mesh = init_device_mesh("cpu", (world,))
    full = torch.linspace(-3, 3, 32, dtype=torch.float64)
    x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    with Wire() as forward:
        y = x.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    term = y.to_local(grad_placements=[Partial()]) * 1
    with Wire() as backward:
        term.backward(torch.ones_like(term))
    grown = DTensor.from_local(torch.full((4,), 1.001, dtype=torch.bfloat16), mesh, [Partial()])
    ones = DTensor.from_local(torch.full((4,), 0.5), mesh, [Partial()])
    try:
        ones.redistribute(placements=[Replicate()], forward_dtype=torch.int32)
        refused = ""
    except ShardingError as error:
        refused = str(error)
    return {
        "dtype": y.dtype is torch.bfloat16 and torch.equal(y.to_local(), full.bfloat16()),
        "sent forward": forward.nbytes == 16 * 2,
        "sent backward": backward.nbytes == 16 * 4,
        "gradient": x.grad.dtype is torch.float64 and torch.equal(x.grad.to_local(), torch.full((16,), 2.0).double()),
        "wider": grown.redistribute(placements=[Replicate()], forward_dtype=torch.float64).to_local().dtype
        is torch.float64,
        "only the dtype": x.redistribute(placements=[Shard(0)], forward_dtype=torch.float32).to_local().dtype
        is torch.float32,
        "refused": "terms of a Partial tensor cannot be converted" in refused and ".to(torch.int32)" in refused,
    }


def test_dtypes_on_the_way():
    for found in run_ranks(2, dtypes_on_the_way):
        assert all(found.values()), found


def in_any_memory_order(rank, world):
    """Pieces whose memory is not in the order of their dims: images with channels last, and other permutations."""
    from torchshard import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    for order in [(0, 2, 3, 1), (3, 1, 0, 2), (1, 0, 2, 3)]:
        value = torch.randn(4, 5, 3, 8).permute(order)
        whole = distribute_tensor(value, mesh, [Replicate()])
        value = whole.to_local()
        for d in range(4):
            assert torch.equal(distribute_tensor(value, mesh, [Shard(d)]).full_tensor(), value)
            split = whole.redistribute(placements=[Shard(d)])
            terms = whole.redistribute(placements=[Partial()])
            for e in range(4):
                assert torch.equal(split.redistribute(placements=[Shard(e)]).full_tensor(), value)
                assert torch.equal(terms.redistribute(placements=[Shard(e)]).full_tensor(), value)


def test_any_memory_order():
    run_ranks(2, in_any_memory_order)
