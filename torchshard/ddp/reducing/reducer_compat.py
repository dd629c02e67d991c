"""What torch's algorithms, pipelining and tests read of torch's own reducer: thin, for their sake only."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from torchshard.ddp.buckets.flat import FlatBucket
from torchshard.ddp.buckets.gradbucket import GradBucket
from torchshard.ddp.buckets.reduction import Hooked, Sum
from torchshard.ddp.exchange import Exchange
from torchshard.ddp.reducing.arrivals import Hooks
from torchshard.ddp.reducing.passes import ForwardPass, Mode
from torchshard.ddp.reducing.usage import Usage
from torchshard.ddp.telling import messages

Future = torch.futures.Future


class ReducerCompatibility:
    """Methods of torch's dist.Reducer, said with ours."""

    hooks: Hooks
    exchange: Exchange
    params: list[torch.nn.Parameter]
    buckets: list[FlatBucket]
    usage: Usage
    reduction: Sum | Hooked
    mode: Mode
    post_backward: list[Any]

    # ------------------------------------------------------------------------------------------ a step

    def before_forward(self, sync: bool) -> None:
        """The reducer's own."""
        raise NotImplementedError

    def after_forward(self, output: object, sync: bool) -> ForwardPass:
        """The reducer's own."""
        raise NotImplementedError

    def remove_hooks(self) -> None:
        """Leave the parameters as they were found."""
        self.hooks.remove()

    def prepare_for_forward(self) -> None:
        """A forward begins whose gradients are to be reduced."""
        self.before_forward(sync=True)

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor] | torch.Tensor) -> None:
        """The next backward from these outputs is to be reduced, even if their forward ran under no_sync.

        Raises:
            RuntimeError: there can be none, as none of them requires a gradient any more.
        """
        given = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if given and not any(x.requires_grad for x in given):
            raise RuntimeError(messages.WEIGHTS_APART)
        self.after_forward(given, sync=True)

    def _rebuild_buckets(self) -> bool:
        """False: buckets are laid out anew at the end of a backward, not before a forward."""
        return False

    def _push_all_rebuilt_params(self) -> None:
        """Nothing: a rank that has joined takes part in laying out by other means."""

    def _autograd_hook(self, index: int) -> None:
        """Nothing: each parameter's own hook reports it, of whatever dtype it is in forward."""

    def _remove_autograd_hooks(self) -> None:
        self.remove_hooks()

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        """Wait for these futures too at the end of the next backward."""
        self.post_backward.extend(futures)

    # ------------------------------------------------------------------------------------------ reduction

    def _run_comm_hook(self, bucket: GradBucket) -> "Future[Any]":
        """What the registered hook, or else the sum over ranks, makes of this bucket."""
        return self.reduction.ask(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> "Future[Any]":
        """The sum over ranks, not divided."""
        return Sum(self.exchange).ask(bucket)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """The buckets as they are laid out now, holding zeros."""
        found = []
        for index, bucket in enumerate(self.buckets):
            flat, last = bucket.zeros(), index == len(self.buckets) - 1
            found.append(GradBucket.make(index, flat, partial(bucket.parts, flat), bucket.parameters, last))
        return found

    def _get_local_used_map(self) -> torch.Tensor:
        """For each parameter, how many ranks used it in the last backward; without find_unused_parameters, 1."""
        used = self.usage.anywhere
        return torch.tensor([used.get(i, 0) for i in range(len(self.params))], dtype=torch.int32, device="cpu")

    # ------------------------------------------------------------------------------------------ settings

    def _set_optimizer_in_backward(self) -> None:
        """Nothing: gradients of parameters that have stepped are dropped by those who step."""

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Nothing: gradients may come in any dtype."""

    def _ddp_graph_static(self) -> bool:
        """Whether each backward so far had gradients for the same parameters."""
        return self.usage.static
