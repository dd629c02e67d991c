"""The only file that touches private names of torch: each with its reason, the versions it was seen in, its fallback.

Every function here is feature-tested when first used. `without_fast_paths()` switches the optional ones off, so that
the fallbacks are tested as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_fast_paths = True


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Run the fallbacks instead of the optional private fast paths (for tests; what was looked up before stays)."""
    global _fast_paths
    _fast_paths = False
    try:
        yield
    finally:
        _fast_paths = True


def functional_collectives() -> Any:
    """The operators `torch.ops._c10d_functional` (2.11-2.15): collectives on a group's name, which compile traces.

    There is no public spelling of them; torch.distributed._functional_collectives wraps their results in a tensor
    subclass that waits lazily, at some 20 us a call.
    """
    return torch.ops._c10d_functional
