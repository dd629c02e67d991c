"""Dynamo asked about a module without a trace of it afterwards."""

import gc
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from torchshard._torch.finding import find


@contextmanager
def no_trace_in_dynamo() -> Iterator[None]:
    """Compile for this context only: without what was compiled before, which is there again afterwards, and untouched.

    Dynamo keeps what it has compiled with the code object of the function, without a way to take single entries out,
    and counts them all towards its limits. So functions that have some get a copy of their code meanwhile, and all code
    that Dynamo meets here is reset in the end. It finds sizes that have changed by a table of those it has seen, which
    is empty meanwhile and not saved (torch._dynamo.convert_frame.input_codes, torch._C._dynamo.eval_frame:
    _debug_get_cache_entry_list, reset_code; torch._dynamo.pgo._CODE_STATE, 2.13-2.15). Without these names all that was
    compiled before is forgotten, and compiled again when it is next called.
    """
    frames, entries = find("_dynamo.convert_frame"), find("_C._dynamo.eval_frame._debug_get_cache_entry_list")
    reset, sizes = find("_C._dynamo.eval_frame.reset_code"), find("_dynamo.pgo")
    known: Any = getattr(frames, "input_codes", None)
    if not (entries and reset and hasattr(known, "seen") and hasattr(sizes, "_CODE_STATE")):
        torch.compiler.reset()
        try:
            yield
        finally:
            torch.compiler.reset()
        return
    here = type(known)()
    old = [code for code in _alive(known) if entries(code)]
    options = {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False}
    kept = set(map(id, old))
    with (
        _copied(_alive(known), kept),
        _instead(vars(frames), "input_codes", here),
        _instead(vars(sizes), "_CODE_STATE", defaultdict(sizes.CodeState)),
        torch._dynamo.config.patch(options),
    ):
        try:
            yield
        finally:
            for code in _alive(here):
                if id(code) not in kept:
                    reset(code)


def _alive(tracker: Any) -> list[CodeType]:
    return [code for code in (reference() for reference in tracker.seen) if code is not None]


@contextmanager
def _copied(codes: list[CodeType], chosen: set[int]) -> Iterator[None]:
    """Let functions run copies of those codes, known by their ids, that are chosen or make functions of chosen ones."""
    copies = {id(code): copy for code in codes if (copy := _copy(code, chosen)) is not code}
    users = gc.get_referrers(*[code for code in codes if id(code) in copies]) if copies else []
    before = [(f, f.__code__) for f in users if isinstance(f, FunctionType) and id(f.__code__) in copies]
    try:
        for function, code in before:
            function.__code__ = copies[id(code)]
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _copy(code: CodeType, chosen: set[int]) -> CodeType:
    """A copy if the code is chosen, or has chosen ones inside; not equal to it, as Dynamo has tables by equality."""
    inside = [_copy(value, chosen) if isinstance(value, CodeType) else value for value in code.co_consts]
    same = all(new is old for new, old in zip(inside, code.co_consts, strict=True))
    return code if same and id(code) not in chosen else code.replace(co_consts=(*inside, object()))


@contextmanager
def as_if_uncompiled(module: torch.nn.Module) -> Iterator[None]:
    """Have a module and all those inside run as if nobody had compiled them.

    Module.compile() puts `_compiled_call_impl` on a module, torch.compile a `forward` on the one that it wraps around
    another, `_orig_mod` (2.11-2.15). Where there are none, nothing is changed.
    """
    with ExitStack() as restored:
        for inner in module.modules():
            wrapped, own = inner._modules.get("_orig_mod"), vars(inner)
            if own.get("_compiled_call_impl"):
                restored.enter_context(_instead(own, "_compiled_call_impl", None))
            if wrapped is not None and "forward" in own:
                restored.enter_context(_instead(own, "forward", wrapped.__call__))
        yield


@contextmanager
def _instead(table: MutableMapping[str, Any], name: str, value: object) -> Iterator[None]:
    """Another value in a table for a while."""
    before = table[name]
    table[name] = value
    try:
        yield
    finally:
        table[name] = before
