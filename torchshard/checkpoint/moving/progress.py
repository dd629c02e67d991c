"""How far a job is, told to whoever has asked."""

from collections.abc import Callable


class Progress:
    """To be called with the bytes of each part that is done.

    Args:
        told: called each time with the bytes done and the bytes in all; None if nobody has asked.
        total: bytes in all.
    """

    def __init__(self, told: Callable[[int, int], object] | None, total: int) -> None:
        self._told, self._done, self._total = told, 0, total

    def __call__(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self._done += nbytes
        if self._told is not None:
            self._told(self._done, self._total)
