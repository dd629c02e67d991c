"""torch.distributed.checkpoint: which reader it takes for a place, and what the writer that asks keeps."""

import os
import sys
from types import FrameType
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


def keeps_one_part() -> bool:
    """Whether a writer asks for parts that keeps one for a key in each rank's file: safetensors have a tensor a name.

    Only the stack knows which writer it is (torch.distributed.checkpoint.state_dict_saver._save_state_dict and its
    `storage_writer`, 2.11-2.15; without them no writer is one).
    """
    save = find("distributed.checkpoint.state_dict_saver._save_state_dict")
    kinds = find("distributed.checkpoint.filesystem.SerializationFormat")
    frame: FrameType | None = sys._getframe() if save and kinds else None
    while frame is not None and frame.f_code is not save.__code__:
        frame = frame.f_back
    if frame is None:
        return False
    writer = frame.f_locals.get("storage_writer")
    chosen = getattr(writer, "serialization_format", None)
    return chosen is kinds.SAFETENSORS and bool(getattr(writer, "single_file_per_rank", True))
