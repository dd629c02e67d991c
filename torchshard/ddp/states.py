"""State dicts of wrapped modules: loaded with or without the names of wrappers, saved without them on request."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from torchshard import _torch
from torchshard.keys import wrappers


def bare_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """The state dict of a module without `module.` and `_orig_mod.`, whatever it is wrapped in.

    Raises:
        ValueError: two entries would get the same key, as the module has parts of its own with such names.

    Example:
        >>> torch.save(bare_state_dict(ddp), "model.pt")                    # doctest: +SKIP
    """
    found: dict[str, Any] = {}
    for key, value in module.state_dict().items():
        if wrappers.bare(key) in found:
            raise ValueError(f"bare_state_dict: {key} and another entry would both be {wrappers.bare(key)}")
        found[wrappers.bare(key)] = value
    return found


@_torch.skip_methods()
class States:
    """The part of the wrapper that saves and loads state dicts."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of torch.nn.Module; in full precision."""
        self._raise_precision_between()  # type: ignore[attr-defined]
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of torch.nn.Module; keys may also lack, or have more of, the names that wrappers put in front.

        Raises:
            RuntimeError: parameters were replaced (assign), so that nothing averages the new ones' gradients.
        """
        meant = wrappers.renamed(state_dict, States.state_dict(self))  # one of the instance may have other names
        given = OrderedDict((meant[key], value) for key, value in state_dict.items())
        _torch.keep_metadata(given, state_dict, meant)
        found = super().load_state_dict(given, strict, assign)  # type: ignore[misc]
        if assign:
            self.reducer.look_at_members()  # type: ignore[attr-defined]
        return found
