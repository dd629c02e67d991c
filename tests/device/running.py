"""Bodies of tests, which say "cpu" and "gloo", run on a device with its own transport: the strict one, or GPUs."""

import faulthandler
import functools
import importlib
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests import ranks
from tests.ranks import run_ranks

KINDS = {"strict": ("strict", "strict"), "cuda": ("cuda", "nccl"), "cuda-gloo": ("cuda", "gloo")}
"""Device and transport of each kind. Ranks share GPUs where there are fewer than ranks."""


def run_on(
    kind: str, world: int, body: str | Callable[..., Any], *args: Any, timeout: float = 240, **options: Any
) -> list[Any]:
    """As run_ranks, on devices of a kind; `body` is a function or `module:function`.

    Tensors are made there, and meshes of the CPU are meshes of it.
    """
    if KINDS[kind][0] == "cuda":
        # Ranks are forked from a server, which must not ask CUDA for anything: it is importing inductor that does.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        ranks._context.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.fsdp"])
    if isinstance(body, str):
        module, name = body.split(":")
        body = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        return run_ranks(world, _on_device, kind, body, store, *args, timeout=timeout, backend="", **options)


def _on_device(rank: int, world: int, kind: str, body: Callable[..., Any], store: str, *args: Any) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if kind == "strict":
        from tests.device.installing import install

        install()
    faulthandler.dump_traceback_later(60)  # a wait for a GPU has no limit, and says nothing
    device, transport = KINDS[kind]
    there = torch.get_device_module(device).device_count()
    if there < world and transport == "nccl":
        # It refuses ranks that share a GPU on one host, so each says that it is a host of its own.
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    if device == "cuda":
        torch.backends.cudnn.allow_tf32 = False
    torch.get_device_module(device).set_device(rank % there)
    dist.init_process_group(
        transport, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    made = DeviceMesh.__init__

    @functools.wraps(made)
    def on_device(mesh: Any, device_type: str, ranks: Any = None, *given: Any, **options: Any) -> None:
        ranks = options.pop("mesh", ranks)
        made(mesh, device, ranks.cpu() if isinstance(ranks, torch.Tensor) else ranks, *given, **options)

    class Generator(torch.Generator):
        def __new__(cls, device: Any = torch.device(device, rank % there)) -> Any:  # noqa: B008
            return super().__new__(cls, device)

    DeviceMesh.__init__ = on_device  # type: ignore[assignment, method-assign]
    if device == "cuda":  # the strict one's operators know those of the CPU
        torch.Generator = Generator  # type: ignore[misc]
    with torch.device(device, rank % there):
        result = body(rank, world, *args)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return result


def put_all_on(kind: str) -> None:
    """From now on bodies of tests that import run_ranks run on this kind of device, unless they make their own groups."""

    @functools.wraps(run_ranks)
    def on_device(world: int, body: Callable[..., Any], *args: Any, backend: str = "gloo", **options: Any) -> list[Any]:
        if backend != "gloo":
            return run_ranks(world, body, *args, backend=backend, **options)
        return run_on(kind, world, body, *args, **options)

    ranks.run_ranks = on_device
