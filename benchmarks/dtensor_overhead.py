"""CPU time of one operator on small DTensors that need no communication: ours and torch's, in turns.

    python -m benchmarks.dtensor_overhead

A fake group of 64 ranks as an 8x8 mesh; tensors so small that the time is overhead. One thread.

A second table compares with a floor: a tensor subclass that decides nothing. Its `__torch_dispatch__` calls the local
operator and wraps the result by the fastest ways that torch has, and looks nothing up.
"""

import functools

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Comparison, geometric_mean, interleaved, table
from tests.ranks import fake_ranks
from torchshard._torch import local_callable, no_torch_function, wrapper_constructor

R, S = Replicate(), Shard


def cases(api, mesh, grad):
    """Name -> what to run, with one library."""

    def make(shape, placements, requires_grad=grad):
        x = api.distribute_tensor(torch.randn(*shape), mesh, placements)
        return x.detach().requires_grad_(requires_grad)

    a, b = make((16, 16), [S(0), S(1)]), make((16, 16), [S(0), S(1)])
    x, k = make((16, 16), [S(0), R]), make((16, 16), [R, S(1)])
    h = make((8, 4, 16), [S(0), R])
    w, bias = make((32, 16), [R, S(0)]), make((32,), [R, S(0)])
    w2, bias2 = make((16, 32), [R, S(1)]), make((16,), [R, R])
    ln_w, ln_b = make((16,), [R, R]), make((16,), [R, R])
    embedding, index = make((32, 16), [R, R]), api.distribute_tensor(torch.randint(0, 32, (8, 4)), mesh, [S(0), R])

    def block():
        y = F.linear(F.relu(F.linear(h, w, bias)), w2, bias2)
        if grad:
            y.sum().backward()
        return y

    return {
        "add": lambda: a + b,
        "x + 1.0": lambda: a + 1.0,
        "mm": lambda: x @ k,
        "relu": lambda: torch.relu(a),
        "view": lambda: h.view(32, 16),
        "transpose": lambda: h.transpose(1, 2),
        "softmax": lambda: torch.softmax(x, -1),
        "layer_norm": lambda: F.layer_norm(x, (16,), ln_w, ln_b),
        "linear 3-D": lambda: F.linear(h, w, bias),
        "split": lambda: h.split(8, -1),
        "embedding": lambda: F.embedding(index, embedding),
        "MLP block, forward and backward" if grad else "MLP block": block,
    }


def optimizer(api, mesh):
    """An AdamW step, foreach, over 50 parameters."""
    shapes = [((16, 16), [S(0), R]), ((16,), [R, R])] * 25
    parameters = [
        torch.nn.Parameter(api.distribute_tensor(torch.randn(*shape), mesh, placements)) for shape, placements in shapes
    ]
    for p in parameters:
        p.grad = torch.ones_like(p)
    return torch.optim.AdamW(parameters, foreach=True).step


def transformer_layer(api, mesh):
    """Forward and backward of an encoder layer, batch sharded, weights replicated.

    Attention is composed of matrix products: torch's class has no rule for the backward of the fused one on a CPU.
    """
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    api.distribute_module(layer, mesh)
    x = api.distribute_tensor(torch.randn(8, 4, 16), mesh, [S(0), R])

    def run():
        with sdpa_kernel(SDPBackend.MATH):
            layer(x).sum().backward()

    return run


class Floor(torch.Tensor):
    """Runs the one operator that was set, on local tensors."""

    __slots__ = ("_local_tensor", "_spec")
    __torch_function__ = no_torch_function()
    function = layout = None

    @staticmethod
    def __torch_dispatch__(func, types, args=(), kwargs=None):
        local = Floor.function(*[x._local_tensor if x.__class__ is Floor else x for x in args])
        return new(Floor, local, Floor.layout, False)


new = wrapper_constructor()


def floors(ours, mesh):
    """The cases of one operator whose arguments are the same for all ranks, beside the floor."""
    a, b = (ours.distribute_tensor(torch.randn(16, 16), mesh, [S(0), S(1)]) for _ in range(2))
    x, k = (ours.distribute_tensor(torch.randn(16, 16), mesh, p) for p in ([S(0), R], [R, S(1)]))
    h = ours.distribute_tensor(torch.randn(8, 4, 16), mesh, [S(0), R])
    aten = torch.ops.aten
    for name, operator, function, args in (
        ("add", aten.add.Tensor, lambda p, q: p + q, (a, b)),
        ("x + 1.0", aten.add.Tensor, lambda p: p + 1.0, (a,)),
        ("mm", aten.mm.default, lambda p, q: p @ q, (x, k)),
        ("relu", aten.relu.default, torch.relu, (a,)),
        ("transpose", aten.transpose.int, lambda p: p.transpose(1, 2), (h,)),
        ("softmax", aten._softmax.default, lambda p: torch.softmax(p, -1), (x,)),
    ):
        Floor.function, Floor.layout = local_callable(operator), function(*args)._spec
        bare = [new(Floor, t._local_tensor, t._spec, False) for t in args]
        yield interleaved(name, functools.partial(function, *args), functools.partial(function, *bare))


def compared() -> tuple[list[Comparison], list[Comparison]]:
    """All cases beside torch's, and some beside the floor."""
    import torch.distributed.tensor as upstream

    import torchshard as ours

    torch.set_num_threads(1)
    with fake_ranks(64):
        mesh = init_device_mesh("cpu", (8, 8))
        found = []
        for grad in (False, True):
            mine, theirs = cases(ours, mesh, grad), cases(upstream, mesh, grad)
            label = ", grad" if grad else ""
            found += [interleaved(f"{name}{label}", mine[name], theirs[name]) for name in mine]
        for name, make in (
            ("AdamW foreach, 50 parameters", optimizer),
            ("encoder layer, forward and backward", transformer_layer),
        ):
            found.append(interleaved(name, make(ours, mesh), make(upstream, mesh)))
        return found, list(floors(ours, mesh))


def main() -> str:
    """Both tables, with the geometric means of the ratios."""
    found, floor = compared()
    return (
        f"{table(found)}\n\ngeometric mean of the ratios: {geometric_mean(found):.3f}\n\n"
        f"{table(floor, theirs='floor')}\n\ngeometric mean of the ratios: {geometric_mean(floor):.3f}"
    )


if __name__ == "__main__":
    print(main())
