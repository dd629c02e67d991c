"""Reversible rules for the keys of state dicts: pure, no torch."""

from torchshard.keys.key_rules import KeyRules
from torchshard.keys.rules import add_prefix, fuse, rename, split, strip_prefix, transpose

__all__ = ["KeyRules", "add_prefix", "fuse", "rename", "split", "strip_prefix", "transpose"]
