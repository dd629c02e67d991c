"""Public names that are imported on first use (PEP 562), so that opening a checkpoint does not import torch."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazily(
    package: str, homes: Mapping[str, str], rooms: str = ""
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Args:
        package: its `__name__`.
        homes: module -> names that live there, separated by spaces.
        rooms: packages inside of it that are found without an import of their own, separated by spaces.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}
    inside = rooms.split()

    def find(name: str) -> object:
        if name in inside:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *home, *inside})
