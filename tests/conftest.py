"""How tests run: operators on one thread; property tests on the same examples in every default run, new ones in the full
run, which asks every rank what others ask the ends of a group; `--on`, see tests/device.
"""

import os
import sys

import pytest
from hypothesis import settings

from tests import ranks

# Workers and ranks share few cores: threads of OpenMP that wait for one another by spinning take them from the others.
# Before torch is imported, and for all processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Every rank reads the code of tests, which Python compiles once where it may keep what it has compiled.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Inductor asks in each process, by starting another that imports torch, whether code for this processor can be loaded.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=500)


def pytest_addoption(parser):
    parser.addoption("--on", help="what ranks do is done on a device of this kind: see tests/device")


def pytest_configure(config):
    ranks.all_are_asked = "full or not full" in config.option.markexpr
    settings.load_profile("search" if ranks.all_are_asked else "steady")
    if config.option.on:
        from tests.device.running import put_all_on

        put_all_on(config.option.on)


@pytest.fixture(autouse=True, scope="module")
def _spare_time():
    ranks.spare_time()
