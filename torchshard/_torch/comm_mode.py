"""torch's CommDebugMode, which counts collectives by module."""

from typing import Any


class _Parents(dict[str, set[str]]):
    """Above which modules one lies; of one that is not known, what is known of all."""

    def __missing__(self, name: str) -> set[str]:
        return {"Global"}


def end_modules_once(tracker: Any) -> None:
    """Have a tracker of torch's CommDebugMode take back the hook that it puts on a module for the end of its forward.

    It puts one there in every forward and remembers the last (_CommModeModuleTracker, 2.11-2.15), so that a module that
    is called twice ends twice: an IndexError, then and in every later forward. Where a mode is entered anew for a
    backward, it has forgotten above which modules those lie that it meets: a KeyError (module_parents_dict, the same).
    Without these names it is left alone.
    """
    if hasattr(tracker, "module_parents_dict"):
        tracker.module_parents_dict = _Parents(tracker.module_parents_dict)
    end = getattr(tracker, "_fw_set_module_hook", None)
    handles = getattr(tracker, "register_forward_hook_handles", None)
    if end is None or handles is None:
        return

    def once(module: Any, given: Any, made: Any) -> None:
        handle = handles.pop(tracker.parent_list[-1], None)
        end(module, given, made)
        if handle is not None:
            handle.remove()

    tracker._fw_set_module_hook = once
