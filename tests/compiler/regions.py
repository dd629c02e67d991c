"""A function compiled as one graph, beside itself."""

import torch

X = torch.ones(3)


class Holder(torch.nn.Module):
    """Something with an attribute."""

    def __init__(self, held):
        super().__init__()
        self.held = held


def agree(function, *args):
    """Whether one graph of the function gives what the function gives."""
    return same(torch.compile(function, backend="eager", fullgraph=True)(*args), function(*args))


def follows(function, *each):
    """Whether one compiled function gives what the function gives for one argument after another, and the first again."""
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    return all(same(compiled(X, one), function(X, one)) for one in (*each, each[0]))


def ways(use, value):
    """The ways in which a function comes to a value: it is given it, closes over it, or finds it as an attribute."""
    holder = Holder(value)
    return [(use, (X, value)), (lambda x: use(x, value), (X,)), (lambda x: use(x, holder.held), (X,))]


def same(a, b):
    """Equal in type and value, through containers."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or a == b
