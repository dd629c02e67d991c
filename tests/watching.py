"""Modes that note what operators run inside of them."""

from torch.utils._python_dispatch import TorchDispatchMode


class Names(TorchDispatchMode):
    """The names of operators, without overloads."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


class Sent(TorchDispatchMode):
    """Collectives by name, with the elements that a rank puts in; of DTensors what they call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # the DTensor first; what it calls comes here again
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.calls.append((func.overloadpacket.__name__, args[0].numel()))
        return func(*args, **kwargs or {})
