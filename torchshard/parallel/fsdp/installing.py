"""Having FSDP1 ask this package's extension."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from torchshard._torch import FSDPGradients, fsdp_names
from torchshard.parallel.fsdp import states
from torchshard.parallel.fsdp.buffers import torch_buffers_later
from torchshard.parallel.fsdp.clipping import clip_grad_norm_
from torchshard.parallel.fsdp.extension import DTensorExtensions, is_ours
from torchshard.tensor.dtensor import DTensor
from torchshard.tensor.interop import to_torch


def install() -> "Installed":
    """Have FullyShardedDataParallel take DTensor parameters, of this package and of torch, on any mesh.

    To be called before FSDP is constructed, with `device_mesh=` a slice of a larger mesh, or a process group: then
    sharded state dicts are of torch's ShardedTensors. As a context manager it holds for the FSDP modules constructed
    inside; these go on working afterwards.

        with install():
            model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True)

    Raises:
        RuntimeError: this torch has other private names than the versions known.
    """
    return Installed()


class Installed:
    """An installation, until `remove()` or the end of its with-block; several may be there at once."""

    def __init__(self) -> None:
        if not _installations:
            for home, name, value in fsdp_names(_User()):
                _replaced.append((home, name, getattr(home, name)))
                setattr(home, name, value)
        _installations.append(self)

    def remove(self) -> None:
        """Take it back; once. With the last one torch is as it was; FSDP modules made before go on working."""
        if self in _installations:
            _installations.remove(self)
            if not _installations:
                for home, name, value in _replaced:
                    setattr(home, name, value)
                _replaced.clear()

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


class _User:
    """Who answers FSDP1, see _torch.FSDPUser."""

    def extension(self, device_handle: Any) -> DTensorExtensions:
        return DTensorExtensions(device_handle)

    def wrapped(self, module: nn.Module) -> None:
        torch_buffers_later(module)

    def is_ours(self, taken: Any) -> bool:
        return is_ours(taken)

    def made(self, parameters: Sequence[tuple[nn.Module, str, Any]]) -> None:
        states.hook_up(parameters)

    def clip(self, gradients: FSDPGradients, max_norm: float, norm_type: float) -> Tensor:
        return clip_grad_norm_(gradients, max_norm, norm_type)

    def outward(self, x: Tensor) -> Tensor:
        return to_torch(x) if isinstance(x, DTensor) else x

    def part(self, value: Any, taken: Any, where: str) -> Any:
        return states.part(value, taken, where)


_installations: list[Installed] = []
_replaced: list[tuple[Any, str, Any]] = []  # torch's own, while there is an installation
