"""What torch's class has besides its constructor and forward: thin, none of it torch's own."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from torchshard import _torch
from torchshard.ddp.exchange import Exchange
from torchshard.ddp.reducing.delayed import Delayed
from torchshard.ddp.reducing.observed import ObservedReducer
from torchshard.ddp.telling import messages


class Compatibility:
    """Methods of torch's DistributedDataParallel that are built on its own reducer, overridden one by one.

    Not one of them may reach torch's implementation, which would find another reducer than it expects.
    """

    reducer: ObservedReducer
    _modules: dict[str, torch.nn.Module | None]
    module: torch.nn.Module
    _on_end: Any
    _delayed: Delayed | None
    logger: Any
    _looked_for_optimizers: bool
    _build_reducer: Any
    _check_reducer_finalized: Any
    process_group: dist.ProcessGroup
    device: Any
    forward_sync_buffers: bool
    parameters_to_ignore: set[str]
    _sparse_metadata = False

    # ------------------------------------------------------------------------------------------ provided

    @property
    def broadcast_buffers(self) -> bool:
        """The old name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _remove_autograd_hooks(self) -> None:
        """Take the hooks off the parameters: gradients are no longer reduced."""
        self.reducer.remove_hooks()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Average over another group from now on, with buckets laid out anew; nothing for a rank outside of it.

        Its ranks are taken to hold equal models. Hooks that have a group of their own keep it.
        """
        if isinstance(new_process_group, dist.ProcessGroup):  # new_group gives ranks outside of it a number
            self.process_group = new_process_group
            self._rebuild_reducer(Exchange(self.process_group, self.device), verified=False)

    def _look_at_members(self) -> None:
        """Average parameters that are no longer frozen, too; RuntimeError if that cannot be, or others have come.

        Which they are, all ranks tell each other before it.
        """
        members, module = self.reducer.members, self._modules["module"]
        if members is not None and module is not None and members.module() is not module:
            members.follow(module)
        if not self.reducer.in_backward and (thawed := self.reducer.look_at_members()):
            if self.reducer.may_remember_buckets:
                raise RuntimeError(messages.remembered_text(thawed))
            self._check_reducer_finalized()
            self.reducer.exchange.compare("\n".join(f"is no longer frozen: {name}" for name in thawed))
            self._rebuild_reducer(self.reducer.exchange, verified=True)

    def _rebuild_reducer(self, exchange: Exchange, verified: bool) -> None:
        """A new reducer, of what is to be trained now, with the settings of the one that was."""
        self._on_end()
        before, logger = self.reducer, self.logger
        self._build_reducer(exchange, verified)
        self.reducer.take_over(before)
        self.logger.take_over(logger)
        self._looked_for_optimizers = False
        if self._delayed:
            self._delayed.connect(self.reducer)

    def _check_default_group(self) -> None:
        """Raise RuntimeError unless the process group is the default one, which pickles and copies come back to."""
        if self.process_group != _torch.default_group():
            raise RuntimeError(
                "DDP pickling, unpickling and copying are only supported when using DDP with the default process group"
            )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """In torch, whether outputs are cloned; here they never are: backward is watched without touching outputs."""

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, torch.Tensor]) -> None:
        """Say which rows of embeddings have gradients on any rank, from the next backward on.

        Args:
            global_unique_ids: for names of parameters with sparse gradients, the rows, each once; in the same order on
                all ranks, which is not checked. `.grad` has just these rows afterwards.
        """
        self.reducer.use_rows(global_unique_ids)
        self._sparse_metadata = bool(global_unique_ids)
