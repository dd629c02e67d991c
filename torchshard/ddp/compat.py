"""What torch's class has besides its constructor and forward: thin where it can be right, refused by name where not."""

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchshard import _torch
from torchshard.ddp.reducer import Reducer


def _later(what: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"DistributedDataParallel: {what} is not supported by torchshard yet; {instead}")


class Compatibility:
    """Methods of torch's DistributedDataParallel that are built on its own reducer, overridden one by one.

    Not one of them may reach torch's implementation, which would find another reducer than it expects.
    """

    reducer: Reducer
    module: torch.nn.Module
    process_group: dist.ProcessGroup
    parameters_to_ignore: set[str]
    require_forward_param_sync: bool
    forward_sync_buffers: bool

    # ------------------------------------------------------------------------------------------ provided

    def _remove_autograd_hooks(self) -> None:
        """Take the hooks off the parameters: gradients are no longer reduced."""
        self.reducer.remove_hooks()

    def _assign_modules_buffers(self) -> None:
        """Look the module's buffers up anew; it may have replaced them."""
        ignored = self.parameters_to_ignore
        self.named_module_buffers = {n: b for n, b in self.module.named_buffers() if n not in ignored}
        self.modules_buffers = list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward begins with a broadcast of buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _check_default_group(self) -> None:
        """Raise RuntimeError unless the process group is the default one, which pickles and copies come back to."""
        if self.process_group != _torch.default_group():
            raise RuntimeError(
                "DDP pickling, unpickling and copying are only supported when using DDP with the default process group"
            )

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if the last backward has left gradients of some parameters out."""
        self.reducer.before_forward(sync=True)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """In torch, whether outputs are cloned; here they never are: backward is watched without touching outputs."""

    # ------------------------------------------------------------------------------------------ refused

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Uneven inputs: not yet."""
        _later("join()", "give every rank the same number of batches")

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Uneven inputs: not yet."""
        _later("join_hook(), which Join calls,", "give every rank the same number of batches")

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        _later("_register_buffer_comm_hook()", "use forward_sync_buffers, which broadcasts buffers from rank 0")

    def _set_sparse_metadata(self, global_unique_ids: object) -> NoReturn:
        _later("_set_sparse_metadata()", "make embeddings with sparse=False")

    def _update_process_group(self, new_process_group: object) -> NoReturn:
        _later("_update_process_group()", "wrap the module anew, on the new process group")

    def _get_ddp_logging_data(self) -> NoReturn:
        _later("_get_ddp_logging_data()", "print(ddp.reducer) shows the buckets, ddp.reducer.counters what was done")

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> NoReturn:
        _later("_set_ddp_runtime_logging_sample_rate()", "ddp.reducer.counters counts every backward")
