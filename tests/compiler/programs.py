"""Models and training programs drawn by a seed: wrapped and compiled on ranks, beside one process that has all batches."""

import copy
import random
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.compiler.models import eager

WIDTH = 12


def matrix(*lengths: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*lengths) / lengths[-1] ** 0.5)


class Table(nn.Embedding):
    def __init__(self):
        super().__init__(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x[:, 0] * 3).long().abs() % 7)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def attend(m: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return m(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0]


# Kind of a layer -> what holds its parameters, and what it computes with them.
LAYERS: Mapping[str, tuple[Callable[[], nn.Module | nn.Parameter], Callable]] = {
    "linear": (linear, lambda m, x: F.gelu(m(x))),
    "no bias": (lambda: nn.Linear(WIDTH, WIDTH, bias=False), lambda m, x: m(x)),
    "norm": (lambda: nn.LayerNorm(WIDTH), lambda m, x: m(x)),
    "frozen": (lambda: linear().requires_grad_(False), lambda m, x: m(x)),
    "double": (lambda: linear().double(), lambda m, x: m(x.double()).float()),
    "twice": (linear, lambda m, x: m(F.relu(m(x)))),
    "checkpoint": (linear, lambda m, x: checkpoint(lambda t: F.gelu(m(t)), x, use_reentrant=False)),
    "graph break": (linear, lambda m, x: eager(m, x)),
    "convolution": (lambda: nn.Conv1d(1, 3, 3, padding=1), lambda m, x: m(x[:, None]).mean(1)),
    "table": (Table, lambda m, x: m(x)),
    "cell": (lambda: nn.GRUCell(WIDTH, WIDTH), lambda m, x: m(x, torch.tanh(x))),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 3, batch_first=True), attend),
    "scale": (lambda: matrix(WIDTH), lambda w, x: x * w),
    "scalar": (lambda: nn.Parameter(torch.tensor(1.5)), lambda w, x: x * w),
    "permuted": (
        lambda: nn.Parameter(matrix(3, WIDTH, WIDTH).detach().permute(1, 0, 2)),
        lambda w, x: torch.einsum("bi,iko->bko", x, w).sum(1),
    ),
    "heads": (
        lambda: matrix(2, WIDTH, WIDTH // 2),
        lambda w, x: torch.einsum("bi,kio->bko", x, w).reshape(-1, WIDTH),
    ),
    "batched": (
        lambda: matrix(WIDTH, WIDTH),
        lambda w, x: torch.bmm(x[:, None], w.expand(x.shape[0], WIDTH, WIDTH))[:, 0],
    ),
    "tied": (lambda: None, lambda w, x: F.linear(x, w)),
    "tied, transposed": (lambda: None, lambda w, x: x @ w),
}  # fmt: skip


class Model(nn.Module):
    """Some layers, one behind the other, each added to what it is given."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.kinds = [chance.choice([*LAYERS]) for _ in range(chance.randint(2, 5))]
        shared = matrix(WIDTH, WIDTH)
        for at, kind in enumerate(self.kinds):
            setattr(self, f"layer{at}", shared if kind.startswith("tied") else LAYERS[kind][0]())
        self.out = linear()
        self.several = chance.random() < 0.5

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        for at, kind in enumerate(self.kinds):
            x = x + LAYERS[kind][1](getattr(self, f"layer{at}"), x)
        y = self.out(x)
        return {"y": y, "x": x.sum() * 1e-3} if self.several else y


def loss_of(model: nn.Module, seed: int, size: int) -> Tensor:
    x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))
    y = model(x)
    return (y if isinstance(y, Tensor) else y["y"] + y["x"]).square().mean()


STEPS = (
    "plain", "plain", "plain", "another size", "accumulated", "two forwards", "more than the graph", "added to",
    "a hook", "not compiled", "without gradients", "not backward", "torch.autograd.grad",
)  # fmt: skip


def play(rank: int, world: int, seed: int, **compile: object) -> str:
    """One program: where its gradients go wrong, empty if they do not. All ranks play it together."""
    from torchshard.ddp import DistributedDataParallel

    torch._dynamo.reset()
    chance = random.Random(seed)
    torch.manual_seed(seed)
    module = Model(chance)
    reference = copy.deepcopy(module)
    settings = {
        "gradient_as_bucket_view": chance.random() < 0.3,
        "find_unused_parameters": chance.random() < 0.25,
        "bucket_cap_mb": chance.choice([0.0005, 0.001, 25]),
    }
    ddp = DistributedDataParallel(module, **settings)
    compile["dynamic"] = chance.choice([None, None, False, True])
    if chance.random() < 0.7:
        model = torch.compile(ddp, **compile)
    else:
        module.compile(**compile)
        model = ddp
    size, played = 4, [module.kinds, settings, compile["dynamic"], model is ddp]

    for number in range(chance.randint(5, 9)):
        step = chance.choice(STEPS) if number > 1 else "plain"
        played.append(step)
        if step != "added to":
            to_none = chance.random() < 0.7
            for each in (ddp, reference):
                each.zero_grad(set_to_none=to_none)
        if step == "another size":
            size = chance.choice([4, 6, 8])
        if step == "a hook":
            at = chance.randrange(len(list(module.parameters())))
            for each in (module, reference):
                p = list(each.parameters())[at]
                if p.requires_grad:
                    p.register_hook(lambda grad: grad * 2)

        def objective(model, own, rank, step=step, number=number, size=size):
            loss = loss_of(model, 100 * number + rank, size)
            if step == "two forwards":
                loss = loss + loss_of(model, 100 * number + 50 + rank, size + 2)
            if step == "more than the graph":
                loss = loss + sum(p.square().sum() for p in own.parameters() if p.requires_grad) * 0.01
            return loss

        if step == "without gradients":
            with torch.no_grad():
                objective(model, module, rank)
        elif step == "not backward":
            objective(model, module, rank)
        elif step == "torch.autograd.grad":
            torch.autograd.grad(objective(model, module, rank), [p for p in module.parameters() if p.requires_grad])
        elif step == "accumulated":
            with ddp.no_sync():
                objective(model, module, rank + world).backward()
            for other in range(world, 2 * world):
                (objective(reference, reference, other) / world).backward()
        objective(ddp if step == "not compiled" else model, module, rank).backward()
        for other in range(world):
            (objective(reference, reference, other) / world).backward()
        worst = _error(module, reference)
        if not worst < 2e-4:
            return f"seed {seed}: {worst} in the last of {played}"
        _descend(module, reference)
    return ""


def _error(module: nn.Module, reference: nn.Module) -> float:
    pairs = [(p.grad, q.grad) for p, q in zip(module.parameters(), reference.parameters(), strict=True)]
    zero = torch.zeros(())
    both = [(zero if a is None else a, zero if b is None else b) for a, b in pairs]
    return max(float((a - b).abs().max() / (b.abs().max() + 1e-3)) for a, b in both)


@torch.no_grad()
def _descend(module: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        if p.grad is not None:
            p.sub_(p.grad, alpha=0.01)
        q.copy_(p)
