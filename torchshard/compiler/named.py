"""Models and inputs that are named in text, for the command line."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_SPEC = re.compile(r"(?:(\w+):)?(\d+(?:,\d+)*)")


def load(name: str, specs: Sequence[str] = ()) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """A model and inputs for its forward.

    Args:
        name: "package.module:function" or "file.py:function". The function (a class, too) is called without arguments;
            it returns a module, or a pair of a module and a tuple of inputs.
        specs: of the inputs, if it returns none: sizes such as "8,128", with a dtype in front if it is not float32:
            "int64:8,128". Integers are zeros, others random.

    Raises:
        ValueError: there is no such function, it returns something else, a spec is none, or there are no inputs.
    """
    place, colon, path = name.rpartition(":")
    if not colon or not place or not path:
        raise ValueError(f"{name!r} does not name a model; give package.module:function or file.py:function")
    try:
        found: Any = _file(Path(place)) if place.endswith(".py") else _module(place)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, FileNotFoundError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be found: {error}") from error
    made = found() if callable(found) and not isinstance(found, torch.nn.Module) else found
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
    if not isinstance(model, torch.nn.Module) or not isinstance(given, tuple):
        raise ValueError(f"{name!r} made {type(made).__name__}; it must make a module, or a module and a tuple")
    inputs = tuple(map(_input, specs)) or given
    if not inputs:
        raise ValueError(f"{name!r} comes without inputs; give --input SIZES, or return a pair of module and inputs")
    return model, inputs


def _input(spec: str) -> torch.Tensor:
    found = _SPEC.fullmatch(spec.replace(" ", ""))
    dtype = getattr(torch, found[1] or "float32", None) if found else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"input {spec!r} is not known; give sizes such as 8,128 or int64:8,128")
    sizes = [int(size) for size in found[2].split(",")]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(sizes, dtype=dtype)
    return torch.zeros(sizes, dtype=dtype)


def _module(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
