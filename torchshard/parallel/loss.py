"""loss_parallel: cross entropy of logits whose classes are split between ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchshard.tensor.modes import implicit_replication


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Take plain targets and class weights of a loss to be the same on every rank; for forward and backward.

    That a cross entropy of split classes gathers no logits needs no context here: it holds wherever the logits are a
    DTensor that is split along the classes (by any number of axes, with the batch split by others), for every
    reduction, class weights, `ignore_index` and label smoothing, inside of this context or not. Where targets are
    DTensors, too, the context does nothing. Under torch.compile(fullgraph=True) it stands around the calls.

        with loss_parallel():
            loss = F.cross_entropy(logits, targets)  # logits: Shard(-1); targets: plain, the same on every rank
            loss.backward()
    """
    with implicit_replication():
        yield
