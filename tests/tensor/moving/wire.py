"""What goes over the wire, counted where it is handed to the collectives."""

from torch.utils._python_dispatch import TorchDispatchMode


class Wire(TorchDispatchMode):
    """Notes each collective that runs inside: (kind, bytes that this rank receives by a ring algorithm)."""

    def __init__(self):
        super().__init__()
        self.seen = []

    @property
    def nbytes(self):
        return sum(nbytes for _, nbytes in self.seen)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        kind = func._overloadpacket.__name__
        if func.namespace in ("_c10d_functional", "c10d_functional") and kind not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        ):
            self.seen.append((kind, _received(kind, args, out)))
        return out


def _received(kind, args, out):
    from torch.distributed.distributed_c10d import _resolve_process_group

    x = args[0]
    group = args[-1] if not isinstance(args[-1], str) else _resolve_process_group(args[-1])
    p, item = group.size(), x.element_size()
    if kind == "all_gather_into_tensor":
        return (p - 1) * x.numel() * item
    if kind == "reduce_scatter_tensor":
        return (p - 1) * out.numel() * item
    if kind == "all_reduce":
        return 2 * (p - 1) * -(-x.numel() // p) * item
    if kind == "all_to_all_single":
        return (out.numel() - args[1][group.rank()]) * item
    raise NotImplementedError(kind)
