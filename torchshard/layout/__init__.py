"""The arithmetic of layouts: pure, on integers; no torch, no communication."""

from torchshard.layout.boxes import Box, Overlap, check_tiling, overlaps, tiles, whole
from torchshard.layout.layout import Layout, Mesh, Sharding, contiguous_stride
from torchshard.layout.placements import (
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    format_placements,
    parse_placements,
)

__all__ = [
    "Box",
    "Layout",
    "Mesh",
    "Overlap",
    "Partial",
    "Placement",
    "R",
    "Replicate",
    "Shard",
    "Sharding",
    "check_tiling",
    "contiguous_stride",
    "format_placements",
    "overlaps",
    "parse_placements",
    "tiles",
    "whole",
]
