"""DTensors between ranks: an operator that communicates, ours beside torch's own, in wall time.

    python -m benchmarks.communication --world 2 --rounds 31 [--messages]

Both sides hold the same numbers in the same placements, their results are compared, and they take turns in one run;
what counts is the ratio of each round, as rank 0 sees it. Ranks are gloo's with one thread each, on one machine, so our
collectives are made in their memory; with --messages they go by gloo, as torch's do.
"""

import argparse
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness import Comparison, compare, geometric_mean, rounds_on_ranks, table, turn
from tests.ranks import run_ranks


@dataclass(frozen=True, slots=True)
class Case:
    """One row: operands cut from `shape` in a placement, and what is done with them."""

    name: str
    shape: tuple[int, ...]
    placement: Callable  # of a library: the operand's placement
    body: Callable  # of a library and the operand: a DTensor


def _to(placement: Callable) -> Callable:
    return lambda library, x: x.redistribute(placements=[placement(library)])


def _norm(library, x):
    return torch.nn.utils.get_total_norm([x] * 8, foreach=True)


def _halves(_, x):
    one, other = x.chunk(2, -1)
    return one * other


def _rows(library):
    return library.Shard(0)


def _columns(library):
    return library.Shard(1)


def _whole(library):
    return library.Replicate()


def _terms(op: str) -> Callable:
    return lambda library: library.Partial(op)


SMALL, LARGE = (32, 256), (512, 2048)
CASES = [
    Case(f"{name}, {shape[0]}x{shape[1]}", shape, placement, body)
    for shape in (SMALL, LARGE)
    for name, placement, body in (
        ("split rows made whole", _rows, _to(_whole)),
        ("split columns made whole", _columns, _to(_whole)),
        ("rows to columns", _rows, _to(_columns)),
        ("Partial sum made whole", _terms("sum"), _to(_whole)),
        ("Partial sum to rows", _terms("sum"), _to(_rows)),
        ("Partial sum to columns", _terms("sum"), _to(_columns)),
        ("Partial max made whole", _terms("max"), _to(_whole)),
        ("softmax of split columns", _columns, lambda _, x: x.softmax(-1)),
        ("values and places of max, columns split", _columns, lambda _, x: x.max(-1).values),
        ("argmax, columns split", _columns, lambda _, x: x.argmax(-1)),
        ("topk(8), columns split", _columns, lambda _, x: x.topk(8).values),
        ("norm of 8 split tensors", _rows, _norm),
        ("x[1:], rows split", _rows, lambda _, x: x[1:]),
        ("x[0], rows split", _rows, lambda _, x: x[0]),
        ("roll, rows split", _rows, lambda _, x: x.roll(1, 0)),
        ("halves, columns split", _columns, _halves),
        ("cat with its first rows", _rows, lambda _, x: torch.cat([x, x[:4]])),
    )
]


def _operand(library, mesh, case, rank):
    """The operand, of numbers that both libraries share."""
    torch.manual_seed(0)
    placement, whole = case.placement(library), torch.randn(case.shape)
    if placement.is_partial():
        return library.DTensor.from_local(whole + rank, mesh, [placement], run_check=False)
    return library.distribute_tensor(whole, mesh, [placement])


def _local(case, library, x):
    """A rank's part of the result, arrived: that of a sum or a maximum once its terms are combined."""
    y = case.body(library, x)
    y = y.redistribute(placements=[library.Replicate()]) if y.placements[0].is_partial() else y
    y = y.to_local()
    return y.wait() if hasattr(y, "wait") else y  # torch's may be under way still


def _compare(rank: int, world: int, rounds: int) -> list[list[tuple[float, float]]]:
    from torch.distributed import tensor as upstream

    import torchshard

    mesh, found = torchshard.init_device_mesh("cpu", (world,)), []
    for case in CASES:
        sides, wholes = [], []
        for library in (torchshard, upstream):
            x = _operand(library, mesh, case, rank)
            sides.append(functools.partial(_local, case, library, x))
            wholes.append(case.body(library, x).full_tensor())
        torch.testing.assert_close(*wholes, rtol=1e-4, atol=1e-4)
        for side in sides:
            turn(side, 5)
        found.append(rounds_on_ranks(*sides, rounds, 0.03))
    return found


def compared(world: int = 2, rounds: int = 31) -> list[Comparison]:
    """All cases on real ranks."""
    found = run_ranks(world, _compare, rounds, timeout=600)[0]
    return [compare(case.name, case_rounds) for case, case_rounds in zip(CASES, found, strict=True)]


def main() -> str:
    """The table, and the geometric mean of its ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--messages", action="store_true", help="our collectives by gloo, too")
    args = parser.parse_args()
    if args.messages:
        os.environ["TORCHSHARD_READ_NEIGHBOURS"] = "0"  # read where ranks are started
    found = compared(args.world, args.rounds)
    way = "by messages" if args.messages else "in memory"
    return "\n".join(
        [
            table(found),
            f"\ngeometric mean of the ratios: {geometric_mean(found):.2f}",
            f"torch {torch.__version__}, {args.world} ranks of one thread each, our collectives {way}",
        ]
    )


if __name__ == "__main__":
    print(main())
