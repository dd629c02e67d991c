"""State dicts in memory: conversions between the ways to spread a tensor, and reversible renames."""

from typing import TYPE_CHECKING

from torchshard._lazy import lazily

if TYPE_CHECKING:
    from torchshard.keys import add_prefix, fuse, rename, split, strip_prefix, transpose
    from torchshard.state_dict.conversions import from_torch, to_dtensor, to_full, to_sharded_tensor, to_torch
    from torchshard.state_dict.rewriting import KeyRules

__all__ = [
    "KeyRules",
    "add_prefix",
    "from_torch",
    "fuse",
    "rename",
    "split",
    "strip_prefix",
    "to_dtensor",
    "to_full",
    "to_sharded_tensor",
    "to_torch",
    "transpose",
]

_HOMES = {
    "torchshard.keys": "add_prefix fuse rename split strip_prefix transpose",
    "torchshard.state_dict.conversions": "from_torch to_dtensor to_full to_sharded_tensor to_torch",
    "torchshard.state_dict.rewriting": "KeyRules",
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
