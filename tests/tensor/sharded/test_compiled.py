"""ShardedTensors in compiled regions on real ranks: values, gradients and optimizers, as on a single process."""

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

OPTIMIZERS = {"sgd": (torch.optim.SGD, {"momentum": 0.9}), "adamw": (torch.optim.AdamW, {})}


def in_two(x, written):
    """Two graphs, of which the second takes what is no leaf; `written` gets a history."""
    y = x * 2
    torch._dynamo.graph_break()
    written.add_(x)
    return y.sin()


def compare(rank, world, backend):
    from torchshard.state_dict import to_full, to_sharded_tensor
    from torchshard.tensor.sharded import specs

    first, second = "rank:0/cpu", "rank:1/cpu"
    cuts = {"several on a rank": (0, [first, first, second]), "none on a rank": (0, [first, first])}
    if backend != "inductor":  # which takes its time
        cuts |= {"uneven rows": (0, [first, second]), "uneven columns": (1, [first, second])}
    errors = {}
    for name, (dim, places) in cuts.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        whole, spec = torch.randn(5, 3), specs.ChunkShardingSpec(dim, places)
        compiled = {"fullgraph": True, "backend": backend}

        def error(x, expected):
            return (to_full(x.detach()) - expected.detach()).abs().max().item()

        x = to_sharded_tensor(whole, spec=spec)
        y = torch.compile(lambda x: (x * 2 + 1).relu_().sin(), **compiled)(x)
        found = [error(y, (whole * 2 + 1).relu().sin())]
        leaf, ones = x.clone().requires_grad_(), to_sharded_tensor(torch.ones(5, 3), spec=spec)
        used, _ = torch.compile(lambda a, b: ((a * b).relu(), a * 2), **compiled)(leaf, x)
        used.backward(ones)
        found.append(error(leaf.grad, whole * (whole * whole > 0)))
        if backend != "inductor":
            leaf.grad, written = None, x.clone()
            (torch.compile(in_two, backend=backend)(leaf, written) + written).backward(ones)
            found.append(error(leaf.grad, 2 * (whole * 2).cos() + 1))
        for make, options in OPTIMIZERS.values():
            ours, plain = nn.Parameter(x.clone()), nn.Parameter(whole.clone())
            one, other = make([ours], lr=0.1, foreach=True, **options), make([plain], lr=0.1, **options)
            step = torch.compile(one.step, backend=backend)
            for _ in range(3):
                ours.grad, plain.grad = (ours.detach() * 0.5).cos(), (plain.detach() * 0.5).cos()
                step()
                other.step()
            found.append(error(ours, plain))
        errors[name] = max(found)
    return errors


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_values_gradients_and_optimizers(backend):
    for errors in run_ranks(2, compare, backend, timeout=250):
        assert max(errors.values()) < 1e-5, errors
