"""Operators write to an `out` in its pieces, by the rule of the form that returns its result."""

import torch

from tests.tensor.programs import check, program

PROGRAMS = {
    code: program(code)
    for code in (
        "y = put(V * 2); torch.maximum(x, y, out=y)",
        "y = put(V * 0); torch.add(x, put(V[0]), alpha=2, out=y)",
        "y = put(V * 0); torch.mul(x[:1], put(V), out=y); y += 1",
        "y = put(V * 0); z = y[1:4]; torch.div(x[:3], 2, out=z)",
        "y = put(V * 0); torch.pow(x.abs(), 0.5, out=y[:, :3])",
        "y = put(V * 0); torch.sin(x, out=y.t().contiguous().t())",
        "y = put(V > 0); torch.lt(x, 3, out=y)",
        "y = put(V.double() * 0); torch.exp(x / 10, out=y)",
        "y = put(V.int()); torch.exp(x, out=y)",  # refused
        "y = put(V[:, :1] * 0); torch.add(x, 1, out=y.expand(5, 3))",  # refused
        "torch.clamp(x, put(V[:, :1]), put(V[:, 2:]), out=x)",
        "torch.addcmul(x, x, put(V), value=0.1, out=x)",
        "y = put(V @ V.T); torch.mm(x, put(V.T.contiguous()), out=y)",
        "y = put(V[:, 0].double()); torch.sum(x, 1, out=y); torch.sum(x[:, :2], 1, out=y)",
        "y = put(V[0].clone()); torch.amax(x, 0, out=y)",
        "y = put(V.repeat(1, 2)); torch.cat([x, x + 1], 1, out=y)",
        "y = put(V * 0); torch.cumsum(x, 1, out=y)",
        "y = put(V[:, 0].clone()); [torch.linalg.vector_norm(x, p, 1, out=y).clone() for p in (3, 1)]",
        "y = put(V * 0); torch.ops.aten.relu.out(x, out=y)",
        "y = put(V[:, 0].to(torch.int8)); torch.argmax(x, 1, out=y)",  # refused
        "y = put(V[:, 0].double()); torch.mean(x, 1, out=y)",
        "y = put(V * 0); torch.sort(x, 1, out=(x, put(V.long()))); torch.softmax(x, 0, out=x)",
        "y = put(V[:1] * 0); torch.where(x > 2, x, 0.0, out=y.expand(5, 3))",  # refused
    )
}


def test_they_do_as_with_plain_tensors():
    check(__name__, "PROGRAMS", raises=4)


def rows(put):
    from torchshard import fallback

    with fallback("error"):
        x, y = put(torch.linspace(-1, 1, 15).view(5, 3)), put(torch.linspace(1, -1, 10).view(5, 2))
        torch.mm(x, put(torch.linspace(1, -1, 6).view(3, 2)), out=y)
        pairs = torch.stack([x, x], 2, out=put(torch.zeros(5, 3, 2)))
        twice = torch.cat([pairs, pairs + 1], 2, out=put(torch.zeros(5, 3, 4)))
        sums = torch.sum(x, 1, out=put(torch.zeros(5))), torch.cumsum(twice, 2, out=put(torch.zeros(5, 3, 4)))
        several = [put(torch.zeros(5, n)) for n in (3, 2)], [put(torch.zeros(5, n).long()) for n in (3, 2)]
        first = torch.max(x, 1, out=(put(torch.zeros(5)), put(torch.zeros(5).long())))
        for _ in range(2):
            torch.sort(x, 1, out=(several[0][0], several[1][0]))
            torch.topk(x, 2, 1, out=(several[0][1], several[1][1]))
        others = [torch.mean(x, 1, out=put(torch.zeros(5))), torch.log_softmax(x, 1, out=put(torch.zeros(5, 3)))]
        others += [torch.where(x > 0, x, y[:, :1], out=put(torch.zeros(5, 3)))]
        return y, torch.square(x, out=put(torch.zeros(5, 3))), sums, pairs, twice, several, list(first), others


def split(put):
    from torchshard import fallback

    with fallback("error"):
        x, y = put(torch.linspace(-1, 1, 15).view(5, 3)), put(torch.linspace(1, -1, 15).view(5, 3))
        torch.maximum(x, y, out=y)
        weight = torch.nn.Parameter(put(torch.linspace(-1, 1, 15).view(5, 3)))
        for made in (torch.optim.Adam, torch.optim.Adamax):
            optimizer = made([weight], lr=0.1, foreach=False, **({"amsgrad": True} if made is torch.optim.Adam else {}))
            for _ in range(2):
                optimizer.zero_grad()
                weight.square().sum().backward()
                optimizer.step()
        return y, weight


SPLIT = {"optimizers": split, "operators on rows": rows}


def test_nothing_is_gathered():
    check(__name__, "SPLIT", texts=("R", "S0", "S1"), mesh_shapes=((2,), (4,)))
