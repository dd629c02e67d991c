"""Eager tensor parallelism: a training step of a small Llama with our styles beside one with torch's own.

    python -m benchmarks.tensor_parallel --rounds 31 [--messages]

A step is zero_grad, forward, cross entropy over the split vocabulary (loss_parallel), backward and AdamW. "tp" cuts
weights, "sp" also splits the sequence between blocks; "sp, 2 x fully_shard" is the latter under FSDP2 on 2x2 ranks.

Both models hold the same weights, take turns in one run, and their parameters are compared after three steps; what
counts is the ratio of each round. The first table is of gloo ranks with one thread each, in wall time on rank 0. They
are on one machine, so our collectives are made in their memory; with --messages they go by gloo, as torch's do. The
second table has the CPU time of a rank, on a fake group.
"""

import argparse
import copy
import functools
import os

import torch

from benchmarks.harness import Comparison, compare, geometric_mean, interleaved, rounds_on_ranks, table, turn
from tests.parallel.llama import Config, Llama, loss, plan
from tests.ranks import fake_ranks, run_ranks

SIZES = {  # configuration, and the shape of the tokens
    "4 layers of 64, 32 tokens": (Config(256, width=64, layers=4, hidden=128), (2, 16)),
    "4 layers of 256, 256 tokens": (Config(2048, width=256, layers=4, hidden=512), (4, 64)),
}
KINDS = {"tp": (2, "tp"), "sp": (2, "sp"), "sp, 2 x fully_shard": (4, "sp")}  # ranks, and the kind of plan


def _step(model, optimizer, library, tokens, targets):
    optimizer.zero_grad()
    with library.loss_parallel():
        loss(model(tokens), targets).backward()
    optimizer.step()


def _made(plain, library, fully_shard, kind, mesh):
    """The model by one library's styles, and its optimizer."""
    model = library.parallelize_module(copy.deepcopy(plain), mesh["tp"], plan(kind, library))
    if mesh["dp"].size() > 1:
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _sides(world, kind, size):
    """Models by our styles and by torch's, of the same weights, and their steps."""
    from torch.distributed import fsdp
    from torch.distributed.tensor import parallel as upstream

    from torchshard import init_device_mesh, parallel

    torch.manual_seed(0)
    config, (batch, time) = SIZES[size]
    plain = Llama(config)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    tokens, targets = torch.randint(0, config.vocabulary, (2, batch, time)).unbind()
    models, steps = [], []
    for library, fully_shard in ((parallel, parallel.fsdp.fully_shard), (upstream, fsdp.fully_shard)):
        model, optimizer = _made(plain, library, fully_shard, kind, mesh)
        models.append(model)
        steps.append(functools.partial(_step, model, optimizer, library, tokens, targets))
    return models, steps


def _compare(rank, world, kind, size, rounds):
    models, steps = _sides(world, kind, size)
    for step in steps:
        turn(step, 3)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        here = [getattr(x, "to_local", lambda x=x: x)() for x in (p.detach(), q.detach())]
        torch.testing.assert_close(*here, rtol=1e-3, atol=1e-4)
    return rounds_on_ranks(*steps, rounds, 0.2)


def compared(rounds: int = 31) -> list[Comparison]:
    """All kinds, at all sizes."""
    return [
        compare(f"{name}; {size}", run_ranks(world, _compare, kind, size, rounds, timeout=300)[0])
        for name, (world, kind) in KINDS.items()
        for size in SIZES
    ]


def cpu_time(rounds: int) -> list[Comparison]:
    """Of the small model, on a fake group."""
    torch.set_num_threads(1)
    size, found = next(iter(SIZES)), []
    for name, (world, kind) in KINDS.items():
        with fake_ranks(world):
            found.append(interleaved(f"{name}; {size}", *_sides(world, kind, size)[1], rounds=rounds, seconds=0.2))
    return found


def main() -> str:
    """Both tables, and their geometric means."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--messages", action="store_true", help="our collectives by gloo, too")
    args = parser.parse_args()
    if args.messages:
        os.environ["TORCHSHARD_READ_NEIGHBOURS"] = "0"  # read where ranks are started
    rounds, parts = args.rounds, []
    for what, found in (("wall time", compared(rounds)), ("CPU time, a fake group", cpu_time(rounds))):
        parts += [f"{what}\n\n{table(found, 'ms')}\n\ngeometric mean of the ratios: {geometric_mean(found):.2f}\n"]
    way = "by messages" if args.messages else "in memory"
    return "\n".join([*parts, f"torch {torch.__version__}, one thread a rank, our collectives {way}"])


if __name__ == "__main__":
    print(main())
