"""torch's own tests of DistributedDataParallel, found in the installed torch and opened to machines without a GPU.

The suite is a module of torch. Where one of its tests asks for GPUs only because it was written on some, the gate is
opened here, before the module is loaded, and cpu.py gives its GPUs another meaning.
"""

import importlib
import inspect
import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

WORLD = 2
_SUITE = "torch.testing._internal.distributed.distributed_test"


def load() -> Any:
    """The suite's module; its settings are environment variables that it reads when it is loaded."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD), TEMP_DIR=tempfile.gettempdir())
    # As torch runs its suites: no advice after each failure, and pickles of whole objects may be loaded.
    os.environ.update(PYTORCH_PRINT_REPRO_ON_FAILURE="0", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    gates = importlib.import_module("torch.testing._internal.common_distributed")
    gates.skip_if_lt_x_gpu = lambda count, **options: _open
    gates.skip_if_no_gpu = _open
    gates.init_multigpu_helper = lambda world, backend: {rank: [rank] for rank in range(world)}
    return importlib.import_module(_SUITE)


def _open(test: Callable[..., Any]) -> Callable[..., Any]:
    return test


def case_class(suite: Any) -> type:
    """The class that holds the tests, able to run as one of several ranks."""
    return type("Case", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})


def names(suite: Any) -> list[str]:
    """Tests that construct DistributedDataParallel, themselves or through methods that they call; in the suite's order."""
    tests = suite.DistributedTest._DistTestBase
    sources = {name: inspect.getsource(inspect.unwrap(f)) for name, f in inspect.getmembers(tests, inspect.isfunction)}

    def constructs(name: str, seen: frozenset[str] = frozenset()) -> bool:
        if "DistributedDataParallel" in sources[name]:
            return True
        called = set(re.findall(r"self\.(\w+)\(", sources[name])) & sources.keys() - seen - {name}
        return any(constructs(other, seen | {name}) for other in called)

    return [name for name in vars(tests) if name.startswith("test_") and name in sources and constructs(name)]
