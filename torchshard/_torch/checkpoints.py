"""torch.distributed.checkpoint: which reader it takes for a place."""

import os
from typing import Any

from torchshard._torch.finding import find


def reader_for(place: str | os.PathLike[str] | None) -> Any:
    """The reader that torch takes for a checkpoint, as it chooses one where none is given; None: torch is to choose.

    By torch.distributed.checkpoint._storage_utils._storage_setup (2.11-2.15): a rank that finds none has to say so
    before the others wait for it.

    Raises:
        RuntimeError: torch has no reader for this place.
    """
    choose = find("distributed.checkpoint._storage_utils._storage_setup")
    return None if choose is None else choose(None, place, reader=True)
