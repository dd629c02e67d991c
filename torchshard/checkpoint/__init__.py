"""Checkpoints on disk: opened, looked at, compared, converted and loaded, without running what is pickled in them.

All but `load_into` do without torch and a process group. Names are imported on first use: looking at a checkpoint needs
little of what converting one does.
"""

from typing import TYPE_CHECKING

from torchshard._lazy import lazily

if TYPE_CHECKING:
    from torchshard.checkpoint.comparison import Difference, diff
    from torchshard.checkpoint.conversion import Conversion, convert
    from torchshard.checkpoint.entries import Entry, ObjectEntry, TensorEntry
    from torchshard.checkpoint.loading import load_into
    from torchshard.checkpoint.opening import Checkpoint, Stored, open
    from torchshard.checkpoint.statistics import Statistics
    from torchshard.checkpoint.summary import Inspection, inspect

__all__ = [
    "Checkpoint",
    "Conversion",
    "Difference",
    "Entry",
    "Inspection",
    "ObjectEntry",
    "Statistics",
    "Stored",
    "TensorEntry",
    "convert",
    "diff",
    "inspect",
    "load_into",
    "open",
]

_HOMES = {
    "torchshard.checkpoint.comparison": "Difference diff",
    "torchshard.checkpoint.conversion": "Conversion convert",
    "torchshard.checkpoint.entries": "Entry ObjectEntry TensorEntry",
    "torchshard.checkpoint.loading": "load_into",
    "torchshard.checkpoint.opening": "Checkpoint Stored open",
    "torchshard.checkpoint.statistics": "Statistics",
    "torchshard.checkpoint.summary": "Inspection inspect",
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
