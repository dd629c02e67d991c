import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Each test compiles anew."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def fake_group():
    """A group of 8 in which nothing is computed: for plans, messages and traces."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield dist.group.WORLD
    dist.destroy_process_group()
