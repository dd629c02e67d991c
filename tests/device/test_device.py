"""The checks of this package on the strict device; long, as it has to be compiled first."""

import pytest

from tests.device.checks import BODIES
from tests.device.running import run_on


@pytest.fixture(scope="module")
def _built():
    from tests.device.installing import build

    build()


@pytest.mark.full
@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize(("world", "body", "args"), BODIES, ids=[body for _, body, _ in BODIES])
def test_on_the_strict_device(world, body, args):
    run_on("strict", world, body, *args)
