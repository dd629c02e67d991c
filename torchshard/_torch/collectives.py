"""torch's functional collectives, and in place of gloo's all-gather that may end the process another one."""

import functools
from typing import Any

import torch
from torch import Tensor

from torchshard._torch.finding import find_once
from torchshard._torch.groups import asks_gloo

_ALL_GATHER = "_c10d_functional::all_gather_into_tensor"


def functional_collectives() -> Any:
    """The operators `torch.ops._c10d_functional` (2.11-2.15): collectives on a group's name, which compile traces.

    There is no public spelling of them; torch.distributed._functional_collectives wraps their results in a tensor
    subclass that waits lazily, at some 20 us a call.
    """
    _gather_into_memory()
    return torch.ops._c10d_functional


@functools.cache
def _gather_into_memory() -> torch.library.Library | None:
    """Have torch's all-gather of tensors on a CPU, eager and in graphs, be gloo's `_allgather_base`, in this process.

    The one that it takes otherwise (allgather_into_tensor_coalesced) writes, on gloo, to memory that it has freed when
    two are under way (seen with 2.11, 2.13 and 2.15: a rank crashes, after some ten thousand of them, sooner where the
    others come late). Both say the same to the other ranks: those that do not do this may be among them. Where somebody
    else has such a kernel it stays (torch._C._dispatch_has_kernel_for_dispatch_key, 2.11-2.15; else it is replaced).
    """
    registered = find_once("_C._dispatch_has_kernel_for_dispatch_key")
    if registered is not None and registered(_ALL_GATHER, "CPU"):
        return None
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl(_ALL_GATHER.partition("::")[2], _gathered, "CPU")
    return library  # what it registers lives as long


def _gathered(x: Tensor, size: int, group: Any) -> Tensor:
    collectives = torch.ops._c10d_functional
    if x.is_complex():
        return torch.view_as_complex(_gathered(torch.view_as_real(x.resolve_conj()), size, group))
    if x.dim() and asks_gloo(group):
        out = x.new_empty((size * x.shape[0], *x.shape[1:]))
        whole = collectives.all_gather_into_tensor_out(x, size, group, out=out)
    else:
        (whole,) = collectives.all_gather_into_tensor_coalesced([x], size, group)
    return whole  # type: ignore[no-any-return]
