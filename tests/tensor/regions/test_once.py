"""In a graph a tensor is brought to a layout once in each pass, on every rank or on none, and as it is then."""

import pytest
import torch
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from tests.every_rank import sent_by_ranks
from tests.older import require
from tests.ranks import run_ranks
from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

WORLD, WIDTH = 3, 6


def products(x, *weights):
    return sum((x @ w).sin() for w in weights)


def transposed(x, w, *_):
    return (x @ w).sin() + (x.mT @ w).sin()


def between(write):
    def program(x, w, *_):
        x, w = x * 1, w.detach()  # which alone its gradient would need
        first = (x @ w).sin()
        write(x)
        return first * (x @ w)

    return program


def parts(x, w, *_):
    return (x[1:] @ w).sin() * (x[:-1] @ w)


def results(x, *_):
    y = x.redistribute(placements=[Replicate()])
    y.mul_(2)
    return y * x.redistribute(placements=[Replicate()]).sin()


def again(x, *weights):
    return checkpoint(products, x, *weights, use_reentrant=False) * (x @ weights[0])


def a_row(x):
    x[0] = 1


CASES = {  # how often x is made whole, forward and backward
    "products": (products, 1, 1),
    "transposed": (transposed, 2, 2),
    "written": (between(lambda x: x.mul_(2)), 2, None),
    "a row written": (between(a_row), 2, None),
    "a view written": (between(lambda x: x.mT.mul_(2)), 2, None),
    "a part written": (between(lambda x: x.detach().to_local().mul_(2)), 2, None),
    "parts": (parts, 2, 2),
    "results written": (results, 1, None),
    "checkpoint": (again, 2, None),
}


def given(mesh, rows):
    torch.manual_seed(0)
    values = [torch.randn(rows, WIDTH), *[torch.randn(WIDTH, 40 * WIDTH) for _ in range(3)]]
    return values, [
        distribute_tensor(x, mesh, [place], src_data_rank=None).requires_grad_()
        for x, place in zip(values, [Shard(0), *[Shard(1)] * 3], strict=True)
    ]


@pytest.mark.parametrize(
    ("rows", "partition"),
    [
        (WIDTH, default_partition),
        pytest.param(5, min_cut_rematerialization_partition, marks=pytest.mark.full),
        (2, min_cut_rematerialization_partition),
    ],
)
def test_ranks_gather_once(rows, partition):
    require("meshes in graphs")
    found, expected = {}, {}
    for name, (function, forward, backward) in CASES.items():
        if name == "transposed" and rows != WIDTH:
            continue

        def program(rank, function=function):
            return function, given(init_device_mesh("cpu", (WORLD,)), rows)[1]

        first, *others = sent_by_ranks(WORLD, program, partition)
        assert others == [first] * len(others), name
        counts = [sum(kind == "all_gather_into_tensor" for kind, *_ in sent) for sent in first]
        found[name], expected[name] = counts, [forward, counts[1] if backward is None else backward]
    assert found == expected


def compare(rank, world):
    mesh, errors = init_device_mesh("cpu", (world,)), {}
    for rows in (WIDTH, 5, 2):
        for name, (function, _, _) in CASES.items():
            if (name == "transposed") != (rows == WIDTH):
                continue
            torch._dynamo.reset()
            values, split = given(mesh, rows)
            for x in values:
                x.requires_grad_()
            eager = [x.detach().requires_grad_() for x in split]
            got = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)(*split)
            want = function(*eager)
            for y in (got, want):
                y.redistribute(placements=[Replicate()]).square().mean().backward()
            pairs = [(got, want), *[(x.grad, y.grad) for x, y in zip(split, eager, strict=True) if y.grad is not None]]
            errors[name, rows] = max((a.full_tensor() - b.full_tensor()).abs().max().item() for a, b in pairs)
    return errors


def test_values_and_gradients():
    for errors in run_ranks(WORLD, compare, timeout=280):
        assert {case: error for case, error in errors.items() if not error < 1e-5} == {}
