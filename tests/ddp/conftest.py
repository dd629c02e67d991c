import pytest
import torch.distributed as dist

from tests import ranks
from tests.ranks import fake_ranks
from torchshard.comm.neighbours import SWITCH


@pytest.fixture(params=["by messages", "in memory"])
def both_ways(request, monkeypatch):
    """Ranks sum everything by their group's all-reduce; everything in one another's memory, also what is small."""
    if request.param == "in memory":
        monkeypatch.setattr(ranks, "told_up_to", 0)
    else:
        monkeypatch.setenv(SWITCH, "0")


@pytest.fixture
def fake_group(request):
    """A group of 8 in which nothing is computed: for plans, messages and shapes. This is rank 0, or the given one."""
    with fake_ranks(8, getattr(request, "param", 0)):
        yield dist.group.WORLD
