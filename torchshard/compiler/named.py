"""Models and inputs that are named in text, for the command line."""

import importlib
import importlib.util
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchshard.compiler.measuring import described, unchanged

_SPEC = re.compile(r"(?:(\w+):)?(\d+(?:,\d+)*)")
_NOT_THEIRS = (__file__, str(importlib.__file__), str(Path(torch.__file__).parent), "<frozen")


def load(name: str, specs: Sequence[str] = ()) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """A model and inputs for its forward.

    The model runs on the inputs once, which changes none of its buffers.

    Args:
        name: "package.module:function" or "file.py:function". The function (a class, too) is called without arguments;
            it returns a module, or a pair of a module and a tuple of inputs.
        specs: of the inputs, if it returns none: sizes such as "8,128", with a dtype in front if it is not float32:
            "int64:8,128". Integers are zeros, others random.

    Raises:
        ValueError: there is no such function, it returns something else, a spec is none, or there are no inputs; or
            an import, the function, the making of an input or the model raised something, which is the cause.
    """
    place, _, path = name.rpartition(":")
    dotted = path if place.endswith(".py") else f"{place}.{path}"
    if not all(part.isidentifier() for part in dotted.split(".")):
        raise ValueError(f"{name!r} does not name a model; give package.module:function or file.py:function")
    with _expecting(f"{name!r} must name what can be imported"):
        found: Any = _file(Path(place)) if place.endswith(".py") else _module(place)
        for part in path.split("."):
            found = getattr(found, part)
    with _expecting(f"{name!r} must make a model without arguments"):
        made = found() if callable(found) and not isinstance(found, torch.nn.Module) else found
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
    if not isinstance(model, torch.nn.Module) or not isinstance(given, tuple):
        raise ValueError(f"{name!r} made {type(made).__name__}; it must make a module, or a module and a tuple")
    inputs = tuple(map(_input, specs)) or given
    if not inputs:
        raise ValueError(f"{name!r} comes without inputs; give --input SIZES, or return a pair of module and inputs")
    with unchanged(model), _expecting(f"{name!r}: {type(model).__name__} must run on {described(inputs)}"):
        model(*inputs)
    return model, inputs


@contextmanager
def _expecting(what: str) -> Iterator[None]:
    """Whatever code of others raises becomes a ValueError: what was expected, what it said, and where in that code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        first, *_ = str(error).splitlines() or [""]
        said = f"{type(error).__name__}: {textwrap.shorten(first, 200, placeholder=' ...')}".rstrip(": ")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THEIRS)]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise ValueError(f"{what}, but got {said}{place}") from error


def _input(spec: str) -> torch.Tensor:
    found = _SPEC.fullmatch(spec.replace(" ", ""))
    dtype = getattr(torch, found[1] or "float32", None) if found else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"input {spec!r} is not known; give sizes such as 8,128 or int64:8,128")
    sizes = [int(size) for size in found[2].split(",")]
    maker = "randn" if dtype.is_floating_point or dtype.is_complex else "zeros"
    with _expecting(f"input {spec!r} must be one that torch.{maker} makes"):
        made: torch.Tensor = getattr(torch, maker)(sizes, dtype=dtype)
    return made


def _module(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    before, module = sys.modules.get(path.stem), importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(path.stem, None)
        if before is not None:
            sys.modules[path.stem] = before
        raise
    return module
