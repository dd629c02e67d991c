import pytest

from tests.checkpoint import sources


@pytest.fixture(scope="session")
def dcp_plain(tmp_path_factory):
    """Written by one process."""
    return sources.make(tmp_path_factory.mktemp("plain") / "ck", 1, sources.save_plain)


@pytest.fixture(scope="session")
def dcp_plain2(tmp_path_factory):
    """The same, by two ranks."""
    return sources.make(tmp_path_factory.mktemp("plain2") / "ck", 2, sources.save_plain)


@pytest.fixture(scope="session")
def dcp_two(tmp_path_factory):
    """DTensors on two ranks."""
    return sources.make(tmp_path_factory.mktemp("two") / "ck", 2, sources.save_sharded)


@pytest.fixture(scope="session")
def dcp_three(tmp_path_factory):
    """DTensors on three ranks: all sizes uneven."""
    return sources.make(tmp_path_factory.mktemp("three") / "ck", 3, sources.save_sharded)


@pytest.fixture(scope="session")
def dcp_mesh(tmp_path_factory):
    """DTensors on a 2 x 2 mesh."""
    return sources.make(tmp_path_factory.mktemp("mesh") / "ck", 4, sources.save_sharded)


@pytest.fixture(scope="session")
def ours_two(tmp_path_factory):
    """torchshard's DTensors on two ranks."""
    return sources.make(tmp_path_factory.mktemp("ours_two") / "ck", 2, sources.save_sharded, "torchshard")


@pytest.fixture(scope="session")
def ours_three(tmp_path_factory):
    """torchshard's DTensors on three ranks."""
    return sources.make(tmp_path_factory.mktemp("ours_three") / "ck", 3, sources.save_sharded, "torchshard")


@pytest.fixture(scope="session")
def ours_mesh(tmp_path_factory):
    """torchshard's DTensors on a 2 x 2 mesh."""
    return sources.make(tmp_path_factory.mktemp("ours_mesh") / "ck", 4, sources.save_sharded, "torchshard")


@pytest.fixture(scope="session")
def dcp_st(tmp_path_factory):
    """ShardedTensors on two ranks."""
    return sources.make(tmp_path_factory.mktemp("st") / "ck", 2, sources.save_shardedtensor)


@pytest.fixture(scope="session")
def dcp_foreign(tmp_path_factory):
    """Holds an object of a class of its own."""
    return sources.make(tmp_path_factory.mktemp("foreign") / "ck", 1, sources.save_foreign)
