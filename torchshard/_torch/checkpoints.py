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
    """Whether a writer asks for parts that keeps one for a key in a rank's file: safetensors have a tensor a name."""
    kinds, writer = find("distributed.checkpoint.filesystem.SerializationFormat"), _save().get("storage_writer")
    if kinds is None or getattr(writer, "serialization_format", None) is not kinds.SAFETENSORS:
        return False
    return bool(getattr(writer, "single_file_per_rank", True))


def keeps_one_rank() -> bool:
    """Whether what is pickled goes into a checkpoint of many ranks, which has it of one of them."""
    save = _save()
    return bool(save) and not save.get("no_dist") and bool(save.get("use_collectives", True))


def _save() -> dict[str, Any]:
    """The variables of the save that is under way in this thread; nothing where there is none.

    Only the stack knows (torch.distributed.checkpoint.state_dict_saver._save_state_dict with `storage_writer`,
    `no_dist`, `use_collectives`, 2.11-2.15; without it there is none).
    """
    save = find("distributed.checkpoint.state_dict_saver._save_state_dict")
    frame: FrameType | None = sys._getframe() if save else None
    while frame is not None and frame.f_code is not save.__code__:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals
