"""Bodies of tests, which say "cpu" and "gloo", run on a device with its own transport: the strict one, or GPUs."""

import functools
import importlib
import os
import tempfile
from datetime import timedelta
from typing import Any

from tests.ranks import run_ranks

BACKENDS = {"strict": "strict", "cuda": "nccl"}


def run_on(kind: str, world: int, body: str, *args: Any, timeout: float = 240) -> list[Any]:
    """As run_ranks, on devices of a kind; `body` is `module:function`. Each rank has a device of its own.

    Tensors are made there, and meshes of the CPU are meshes of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        return run_ranks(world, _on_device, kind, body, store, *args, timeout=timeout, backend="")


def _on_device(rank: int, world: int, kind: str, body: str, store: str, *args: Any) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if kind == "strict":
        from tests.device.installing import install

        install()
    torch.get_device_module(kind).set_device(rank)
    dist.init_process_group(
        BACKENDS[kind], init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    made = DeviceMesh.__init__

    @functools.wraps(made)
    def on_device(mesh: Any, *given: Any, **options: Any) -> None:
        if given:
            given = (kind, *given[1:])
        else:
            options["device_type"] = kind
        made(mesh, *given, **options)

    DeviceMesh.__init__ = on_device  # type: ignore[method-assign]
    module, name = body.split(":")
    function = getattr(importlib.import_module(module), name)
    with torch.device(kind, rank):
        function(rank, world, *args)
    dist.barrier()
    dist.destroy_process_group()
