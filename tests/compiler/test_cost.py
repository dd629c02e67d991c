"""What a compiled step costs in the interpreter, in calls of Python functions of the package."""

import pytest

from tests.ddp.test_cost import count
from tests.ranks import run_ranks


def test_with_hooks_after_the_graph():
    [(calls, more, common)] = run_ranks(1, count, "inductor")
    assert calls <= 150, common
    assert not more


@pytest.mark.copied
def test_with_gradients_reduced_in_the_graph():
    [(calls, more, common)] = run_ranks(1, count, "torchshard")
    assert calls <= 205, common
    assert more.keys() <= {"ddp/reducing/arrivals.py: _arriving.<locals>.gradient_arrived"}
