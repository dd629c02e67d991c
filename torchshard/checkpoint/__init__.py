"""Checkpoints on disk: opened, looked at, compared, converted and loaded, without running what is pickled in them.

All but `load_into` do without torch and a process group.
"""

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
