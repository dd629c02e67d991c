"""Mixed precision: the forward of the wrapper, its parameters cast beside it or before it.

    python -m benchmarks.ddp_mixed --rounds 31

One rank with one thread, on a machine with a core more; torch's own mixed precision needs an accelerator. Both sides
take turns in one run on the same wrapper; what counts is the ratio of each round, in wall time.
"""

import argparse
from unittest import mock

import torch
from torch.nn.parallel.distributed import _MixedPrecision

from benchmarks.harness import compare, rounds_on_ranks, table
from tests.models import GPT, GPTConfig, mlp
from tests.ranks import run_ranks


def _cases():
    return {
        "MLP, 8 x 1024, batch 16": (mlp(1024, 8), torch.randn(16, 1024)),
        "MLP, 8 x 1024, batch 64": (mlp(1024, 8), torch.randn(64, 1024)),
        "GPT, 4 layers of 256": (GPT(GPTConfig(layers=4, width=256, heads=4, context=128)), torch.zeros(4, 128).long()),
    }


def _compare(rank, world, case, rounds):
    from torchshard.ddp import DistributedDataParallel, copying

    torch.set_num_threads(1)
    module, x = _cases()[case]
    model = DistributedDataParallel(module, mixed_precision=_MixedPrecision(torch.bfloat16, torch.float32))

    def forward(copier):
        with mock.patch.object(copying, "copier_of", return_value=copier), torch.no_grad():
            return model(x)

    def beside():
        return forward(copying._copy_in_thread)

    def before():
        return forward(None)

    for side in (beside, before) * 3:
        found = side()
    assert torch.equal(beside(), found)
    return compare(case, rounds_on_ranks(beside, before, rounds, seconds=0.2))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    found = [run_ranks(1, _compare, case, options.rounds, timeout=300)[0] for case in _cases()]
    print(table(found, "ms", "cast before"))
    print(f"\ntorch {torch.__version__}, one rank, one thread")


if __name__ == "__main__":
    main()
