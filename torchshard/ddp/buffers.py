"""Buffers: made equal on all ranks before each forward, or handed to a hook of the user's before or after it."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from torchshard import _torch
from torchshard.ddp.composite import is_composite
from torchshard.ddp.members import Places
from torchshard.ddp.reducing.observed import ObservedReducer
from torchshard.ddp.sync import Coalesced, describe

_nbytes = attrgetter("nbytes")


class Alike:
    """Buffers that are the same ones on all ranks, as long as they stand where they stood.

    Args:
        module: that they are in.
        ignored: names of those that are left out.
        named: the others.
        cap: as for Coalesced.

    Attributes:
        coalesced: what sends them.
        text: what has to be equal on all ranks, a line for each.
    """

    def __init__(
        self, module: torch.nn.Module, ignored: Collection[str], named: Mapping[str, torch.Tensor], cap: int
    ) -> None:
        self.coalesced = Coalesced([*named.values()], cap)
        self.text = "\n".join(describe("buffer", named.items()))
        self._module, self._places = module, Places(module, "_buffers")
        self._buffers = [*named.values()]
        self._settings = {*ignored}, cap
        self._sizes = None if any(map(is_composite, self._buffers)) else [*map(_nbytes, self._buffers)]

    def are_kept(self, module: object, ignored: Collection[str], cap: int) -> bool:
        """Whether they are those of this module, and sent in the same way; the same tensors may have got other data."""
        kept = module is self._module and self._places.are_kept() and self._settings == (ignored, cap)
        return kept and [*map(_nbytes, self._buffers)] == self._sizes


class Buffers:
    """The part of the wrapper that looks after the module's buffers.

    A hook that returns futures has them waited for at the end of the backward that follows.
    """

    reducer: ObservedReducer
    module: torch.nn.Module
    _modules: dict[str, torch.nn.Module | None]
    process_group: dist.ProcessGroup
    parameters_to_ignore: set[str]
    require_forward_param_sync: bool
    forward_sync_buffers: bool
    broadcast_bucket_size: int
    _alike: Alike | None = None

    def _assign_modules_buffers(self) -> None:
        """Look the module's buffers up anew; it may have replaced them."""
        ignored = self.parameters_to_ignore
        self.named_module_buffers = {n: b for n, b in self.module.named_buffers() if n not in ignored}
        self.modules_buffers = list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronizes buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = _torch.AFTER_FORWARD
    ) -> None:
        """Have `hook(state, buffers by name)` called instead of the broadcast; it may return futures to wait for.

        Args:
            state: what the hook is called with first.
            hook: does whatever is to be done to the buffers, in place.
            comm_hook_location: torch's _BufferCommHookLocation: before or after each forward.
        """
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        self.buffer_hook = _torch.buffer_hook(hook, state, comm_hook_location)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Whether buffers are to be synchronized now, before forward."""
        return self.will_sync_module_buffers() and not self._hook_comes_after()

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Whether buffers are to be synchronized now, after forward."""
        return self.will_sync_module_buffers() and self._hook_comes_after()

    def _hook_comes_after(self) -> bool:
        hook = getattr(self, "buffer_hook", None)
        return hook is not None and not _torch.is_before_forward(hook.buffer_comm_hook_location)

    def _sync_buffers(self, authoritative_rank: int = 0) -> None:
        """Synchronize the buffers that the module has now, without a trace in their version counters."""
        how = self._modules["module"], self.parameters_to_ignore, self.broadcast_bucket_size
        if self._alike is None or not self._alike.are_kept(*how):
            self._alike = None
            self._assign_modules_buffers()
        with torch.no_grad(), _torch.preserve_versions(self.modules_buffers):
            self._sync_module_buffers(authoritative_rank)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        """By the hook if there is one, else by broadcast from one rank, once ranks know that theirs are alike."""
        hook = getattr(self, "buffer_hook", None)
        if hook is None:
            if self._alike is None:
                ignored, cap = self.parameters_to_ignore, self.broadcast_bucket_size
                self._alike = Alike(self.module, ignored, self.named_module_buffers, cap)
            self.reducer.exchange.confirm_buffers(self._alike.text)
            self._send(self._alike.coalesced, authoritative_rank)
            return
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None:
            self.reducer._install_post_backward_futures(futures)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Overwrite buffers with those of one rank; hooks may call it.

        Args:
            bufs: the tensors; all that are synchronized if not given.
            bucket_size: bytes of one message, at least.
            authoritative_rank: the rank within the process group whose values count.
        """
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs,
            self.broadcast_bucket_size if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Overwrite tensors with those of one rank."""
        self._send(Coalesced(tensors, buffer_size), authoritative_rank)

    def _send(self, buffers: Coalesced, source: int) -> None:
        wait = functools.partial(self.reducer.exchange.wait, what=f"the buffers of rank {source}")
        buffers.send(self.process_group, wait, source)
