"""The device and its transport, made known to torch in this process."""

import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class _Current:
    """As torch.cuda.device: a device is the current one for a while."""

    core: Any = None

    def __init__(self, device: Any) -> None:
        self._device = device if isinstance(device, int) else torch.device(device).index

    def __enter__(self) -> None:
        self._before = self.core.current_device()
        if self._device is not None and self._device >= 0:
            self.core.set_device(self._device)

    def __exit__(self, *error: object) -> None:
        self.core.set_device(self._before)


def build() -> Any:
    """The extension, compiled where it has not been before."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("device.cpp")
    return load("torchshard_strict", [str(source)], extra_cflags=["-O0", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"])


def install() -> None:
    """`torch.device("strict")`, `torch.strict` and the backend "strict" exist from now on."""
    core = _Current.core = build()
    torch.utils.rename_privateuse1_backend("strict")
    module: Any = types.ModuleType("torch.strict")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 4
    module.current_device, module.device = core.current_device, _Current
    module.set_device = lambda device: core.set_device(
        device if isinstance(device, int) else torch.device(device).index
    )
    # As of a GPU: a generator for each device, of which the operators, being the CPU's, know one.
    module.get_rng_state = lambda device="strict": torch.get_rng_state()
    module.set_rng_state = lambda state, device="strict": torch.set_rng_state(state)
    module.manual_seed = module.manual_seed_all = module.synchronize = lambda *_: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.waits = lambda: core.reads_by_the_host() + core.writes_by_the_host()
    module.Stream, module.Event, module.stream = torch.Stream, torch.Event, lambda stream: stream
    module.current_stream = lambda device=None: torch.accelerator.current_stream(device)
    torch._register_device_module("strict", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("strict", _transport, devices=["strict"])


def _transport(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    return _Current.core.transport(gloo, int(timeout.total_seconds() * 1000))
