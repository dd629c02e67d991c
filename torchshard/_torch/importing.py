"""What Dynamo is to know as soon as there is Dynamo, which takes as long to import as torch itself."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_DYNAMO = "torch._dynamo"


def whole_in_graphs(function: _Function) -> _Function:
    """What torch.compiler.allow_in_graph does with a function, without importing torch._dynamo for it (2.11-2.15).

    Where that is not imported yet, it is told as soon as it has been: before it compiles anything.
    """
    _Later.told.append(function)
    allow = getattr(sys.modules.get(_DYNAMO), "allow_in_graph", None)
    if allow is not None:
        allow(function)
    elif _Later not in sys.meta_path:
        sys.meta_path.insert(0, _Later)
    return function


class _Later:
    """A finder (importlib) that finds torch._dynamo as the others do, and tells it what to know once it is executed."""

    told: ClassVar[list[Callable[..., Any]]] = []

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """None for all other modules: Python goes on with its next finder."""
        if name != _DYNAMO:
            return None
        others = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not cls)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = cls._and_tell(spec.loader.exec_module)  # type: ignore
        return spec

    @classmethod
    def _and_tell(cls, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            for function in cls.told:
                module.allow_in_graph(function)
            sys.meta_path.remove(cls)

        return execute_and_tell
