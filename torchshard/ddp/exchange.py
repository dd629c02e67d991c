"""What the ranks of a wrapper say to one another beside gradients, in a common order of collectives."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchshard._torch import is_registered
from torchshard.comm.agreement import Agreement
from torchshard.comm.packed import packed_all_reduce_of
from torchshard.comm.summing import all_reduce
from torchshard.comm.waiting import holds_up, wait_for
from torchshard.comm.workers import pause_at_exit


class Exchange:
    """The group of a reducer, the agreement of its ranks on what comes next, and how many collectives there were.

    Every wait raises RankMismatchError where a rank does something else, or does not answer.

    Args:
        group: whose ranks they are.
        device: of the gradients.
        alone: this rank may have made the wrapper without the others, as a copy.

    Attributes:
        issued: collectives of gradients, and of what is asked here; the same number on all ranks at the same point.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, alone: bool = False) -> None:
        self.group, self.device, self.issued = group, device, 0
        self.agreement, self._held_up = Agreement(group, device, alone=alone), holds_up(group, device)
        self._registered = is_registered(group)  # not one of the user's own class, which torch need not know
        pause_at_exit()

    def is_over(self) -> bool:
        """Whether the group has been destroyed."""
        return self._registered and not is_registered(self.group)

    def confirm(self, text: str) -> None:
        """Make sure that all ranks are about to do what `text` says."""
        self.agreement.confirm(text, self.issued)

    def compare(self, text: str) -> None:
        """The same where no rank may take it for granted, because it was so before."""
        self.agreement.compare(text, self.issued)

    def confirm_buffers(self, text: str) -> None:
        """Make sure that all ranks are about to make the same buffers equal."""
        self.agreement.confirm_beside("buffers", text, self.issued)
        self.issued += 1

    def wait(self, works: Iterable[dist.Work], what: str = "the ranks' common knowledge of buckets") -> None:
        """Wait for collectives; `what` they are is for the error."""
        wait_for(works, self.agreement, self.issued, self._held_up, what)

    def all_reduce(self, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> Any:
        """Start to sum a tensor in place, over another group if one is given; the work."""
        return all_reduce(x, group or self.group, self.agreement.number)

    def packed_all_reduce(self, x: torch.Tensor) -> Any:
        """The same with numbers packed on their way."""
        return packed_all_reduce_of(self.group, self.agreement.number)(x)

    def of_each_rank(self, number: int) -> list[int]:
        """What each rank says, in their order."""
        sent = self._sent([number], torch.int32)
        said = sent.new_empty(self.group.size())
        return self._answer(said, dist.all_gather([*said.split(1)], sent, self.group, async_op=True))()

    def totals(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Place by place the sum over the ranks; on an accelerator, whoever reads it waits for all that goes before."""
        sent = self._sent(numbers, torch.int32)
        return self._answer(sent, self.all_reduce(sent))

    def _answer(self, numbers: torch.Tensor, work: Any) -> Callable[[], list[int]]:
        self.issued += 1
        self.wait([work])
        return lambda: [int(n) for n in numbers.tolist()]

    def _sent(self, numbers: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """On the group's device, without waiting for what is under way there."""
        return torch.tensor(numbers, dtype=dtype, device="cpu").to(self.device, non_blocking=True)

    def of_first_rank(self, numbers: Sequence[int]) -> list[int]:
        """The numbers that rank 0 has; others may have another count of them."""
        size = self._sent([len(numbers)], torch.int64)
        self._broadcast(size)
        sent = self._sent(numbers, torch.int64)
        if int(size) != len(numbers):
            sent = sent.new_empty(int(size))
        self._broadcast(sent)
        return [int(n) for n in sent.tolist()]

    def _broadcast(self, tensor: torch.Tensor) -> None:
        work = dist.broadcast(tensor, group=self.group, group_src=0, async_op=True)
        assert work is not None, "asynchronous collectives return their work"
        self.issued += 1
        self.wait([work])
