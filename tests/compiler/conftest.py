import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import fake_ranks
from torchshard.compiler import rewrite


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Each test compiles anew."""
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def slots_written(request, monkeypatch):
    """Gradients of the small models in tests are written to their slots, as those of large ones; but for `copied`."""
    if "copied" not in request.keywords:
        monkeypatch.setattr(rewrite, "SMALL", 0)
        monkeypatch.setattr(ranks, "written_from", 0)


@pytest.fixture
def fake_group():
    """A group of 8 in which nothing is computed: for plans, messages and traces."""
    with fake_ranks(8):
        yield dist.group.WORLD
