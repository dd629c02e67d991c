"""context_parallel, which is refused by name until it exists."""

from typing import Any, NoReturn


def context_parallel(*args: Any, **kwargs: Any) -> NoReturn:
    """Attention over a sequence that is split between ranks, as a context; not supported yet.

    Raises:
        NotImplementedError: always; says what to use instead.
    """
    raise NotImplementedError(
        "context_parallel is not supported yet. Keep the sequence whole in attention and split heads instead "
        "(ColwiseParallel on query, key and value, RowwiseParallel on the output), with SequenceParallel around it"
    )
