"""Whatever a model is made of and however it is trained: gradients in graphs are those of one process with all batches."""

import pytest

from tests.compiler.programs import play
from tests.compiler.traced import BACKENDS
from tests.ranks import run_ranks


def _play_all(rank, world, how, seeds):
    return [found for seed in seeds if (found := play(rank, world, seed, **BACKENDS[how]()))]


def test_some_programs():
    assert not any(run_ranks(2, _play_all, "traced", range(3), timeout=200))


@pytest.mark.full
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("how", [*BACKENDS])
def test_many_programs(how):
    seeds = range(100, 130) if how == "inductor" else range(100, 200)
    assert not any(run_ranks(2, _play_all, how, seeds, timeout=1500))
