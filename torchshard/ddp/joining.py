"""Uneven inputs: a rank that has no more of them plays the collectives of those that have.

At each forward under `join()` ranks tell each other who takes part and what comes: whether buffers are synchronized,
whether gradients will be reduced. A rank that has joined answers with nothing and then plays the same collectives in
the same order: buffers, buckets full of zeros, the parameters in use, a new layout of buckets.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from torchshard import _torch
from torchshard.ddp import options
from torchshard.ddp.buffers import Buffers
from torchshard.ddp.sync import broadcast_coalesced
from torchshard.errors import RankMismatchError

_HERE, _BUFFERS, _GRADIENTS = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Round:
    """What a forward and its backward will bring, as all ranks know.

    Attributes:
        active: ranks that have inputs.
        buffers: they synchronize buffers.
        gradients: they reduce gradients.
    """

    active: Sequence[int]
    buffers: bool
    gradients: bool


class Joining(Buffers, Joinable):
    """The part of the wrapper that knows of ranks that run out of inputs."""

    device: torch.device
    logger: Any
    require_backward_grad_sync: bool
    _divide_by_initial_world_size = True
    _was_joining = False  # in the last forward
    _whose_buffers = 0  # the rank that gives buffers to all

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for a training loop in which ranks have different numbers of batches.

        A rank that leaves its loop plays the collectives of the others until all are done; then all take over the
        model of the last one. An iteration is one forward of the wrapper, and one backward unless it runs under no_sync
        or no_grad. Where torch's Join has other joinables besides, they take each forward for an iteration of theirs.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks, so that each batch counts the
                same; if False, by the number of ranks that still have inputs.
            enable: False leaves it all out.
            throw_on_early_termination: when the first rank runs out of inputs, raise RuntimeError on all of them.
        """
        return _Join(self, enable, throw_on_early_termination, divide_by_initial_world_size)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What this wrapper does when its rank has joined: for torch's Join, maybe with other joinables.

        Args:
            kwargs: divide_by_initial_world_size, as for `join`; the rest is for others.
        """
        return _Shadow(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Where the collectives of torch's Join take place."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of ranks that join."""
        return self.process_group

    def _begin_round(self) -> None:
        """To be called at each forward: under `join`, tell the others that this rank has inputs."""
        if not _torch.is_joining(self):
            if self._was_joining:
                self._was_joining, self._whose_buffers = False, 0
                self.reducer.rescale(self.process_group.size(), uneven=False)
            return
        for setting in ("skip_all_reduce_unused_params", "_delay_all_reduce_params", "_sparse_metadata"):
            if getattr(self, setting):
                raise NotImplementedError(
                    f"DistributedDataParallel: with {setting.strip('_')} each rank decides what it reduces, and a rank "
                    "without inputs could not follow; leave it out under join()"
                )
        Join.notify_join_context(self)
        mine = _HERE
        if self.will_sync_module_buffers():
            mine |= _BUFFERS
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            mine |= _GRADIENTS
        found = self._tell(mine)
        divisor = self.process_group.size() if self._divide_by_initial_world_size else len(found.active)
        self._was_joining = True
        self.reducer.rescale(divisor, uneven=True)
        self._whose_buffers = max(found.active)

    def _tell(self, mine: int) -> Round:
        """Exchange what this round brings; 0 for a rank that has joined.

        Raises:
            RankMismatchError: ranks that have inputs bring different things; on all ranks.
        """
        said = self.reducer.exchange.of_each_rank(mine)
        if len({*filter(None, said)}) > 1:
            raise RankMismatchError(
                "DistributedDataParallel.join(): in one iteration ranks that have inputs do different things",
                expected="each of them to reduce gradients, and to synchronize buffers, or none",
                got="\n".join(f"rank {rank}: {_words(word)}" for rank, word in enumerate(said) if word),
                fix="enter no_sync(), or no_grad(), in the same iterations on all ranks that still have inputs",
            )
        return Round(
            active=[rank for rank, word in enumerate(said) if word],
            buffers=any(word & _BUFFERS for word in said),
            gradients=any(word & _GRADIENTS for word in said),
        )

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of one that has joined last: the highest of them."""
        rank = self.process_group.rank()
        self._authoritative_rank = max(self.reducer.exchange.of_each_rank(rank if is_last_joiner else -1))
        ignored = self.parameters_to_ignore
        tensors: list[torch.Tensor] = [p for _, p in options.reduced(self.module, ignored)]
        if self.forward_sync_buffers:
            self._assign_modules_buffers()
            tensors += self.modules_buffers
        wait = functools.partial(self.reducer.exchange.wait, what=f"the model of rank {self._authoritative_rank}")
        broadcast_coalesced(tensors, self.process_group, self.broadcast_bucket_size, wait, self._authoritative_rank)


def _words(word: int) -> str:
    return f"{'gradients' if word & _GRADIENTS else 'no gradients'}, {'buffers' if word & _BUFFERS else 'no buffers'}"


class _Join(Join):
    """torch's context for one wrapper; a lost rank is named."""

    def __init__(self, wrapper: "Joining", enable: bool, throws: bool, divide_by_initial_world_size: bool) -> None:
        self.wrapper, self.throws = wrapper, throws
        super().__init__([wrapper], enable, throws, divide_by_initial_world_size=divide_by_initial_world_size)

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        except RankMismatchError:
            raise
        except RuntimeError as error:
            if self.throws and str(error).endswith("exhausted all inputs."):
                raise
            self.wrapper.reducer.exchange.agreement.blame("word from the ranks that still have inputs", error)


class _Shadow(JoinHook):
    """Plays for a rank without inputs what the wrapper does on the others."""

    def __init__(self, wrapper: Joining, divide_by_initial_world_size: bool) -> None:
        self._wrapper = wrapper
        self._own: list[tuple[torch.nn.Parameter, torch.Tensor | None]] | None = None  # gradients put aside
        wrapper._divide_by_initial_world_size = divide_by_initial_world_size
        wrapper.logger._set_uneven_input_join()

    def main_hook(self) -> None:
        """One iteration of the others."""
        wrapper = self._wrapper
        if self._own is None:
            self._put_gradients_aside()
        found = wrapper._tell(0)
        if found.buffers:  # before or after forward: here there is none
            wrapper._sync_buffers(max(found.active))
        wrapper.require_forward_param_sync = found.gradients
        if found.gradients:
            wrapper.reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: this one gets back the gradients that it had."""
        for p, grad in self._own or ():
            p.grad = grad
        self._own = None
        self._wrapper._sync_final_model(is_last_joiner)

    def _put_gradients_aside(self) -> None:
        """Meanwhile those of the others stand in their place, for optimizers that share their work between ranks."""
        self._own = [(p, p.grad) for p in self._wrapper.reducer.params]
        for p, _ in self._own:
            p.grad = None
