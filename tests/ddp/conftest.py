import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def fake_group():
    """A group of 8 in which nothing is computed: for plans, messages and shapes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield dist.group.WORLD
    dist.destroy_process_group()
