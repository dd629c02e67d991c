"""Checkpoints on disk: opened, looked at and converted without torch, a process group, or running what is pickled."""

from torchshard.checkpoint.conversion import Conversion, convert
from torchshard.checkpoint.entries import Entry, ObjectEntry, TensorEntry
from torchshard.checkpoint.opening import Checkpoint, open
from torchshard.checkpoint.summary import Inspection, inspect

__all__ = [
    "Checkpoint",
    "Conversion",
    "Entry",
    "Inspection",
    "ObjectEntry",
    "TensorEntry",
    "convert",
    "inspect",
    "open",
]
