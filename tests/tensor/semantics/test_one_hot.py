"""one_hot makes a plain tensor of the number of classes, which torch itself tells from those of users."""

import torch
import torch.nn.functional as F

from tests.ranks import run_ranks
from tests.tensor.programs import check

CLASSES = torch.tensor([[3, 0, 1, 1, 4], [2, 2, 0, 4, 1]])


def _one_hot(classes, *number):
    return lambda put: F.one_hot(put(classes), *number)


def _chosen(put):
    weight = put(torch.linspace(-1, 1, 15).view(5, 3)).requires_grad_()
    y = F.one_hot(put(CLASSES), 5).float() @ weight
    y.square().mean().backward()
    return y, weight.grad


def _of_no_elements(put):
    return F.one_hot(put(CLASSES)[:0], 3)


def _viewed(put):
    y = F.one_hot(put(CLASSES).t(), 5)
    return y.view(-1, 5), y.stride()


PROGRAMS = {
    "classes in another order": _viewed,
    "as many as there are": _one_hot(CLASSES),
    "told": _one_hot(CLASSES, 5),
    "some left": _one_hot(CLASSES, 7),
    "uneven": _one_hot(CLASSES[:, 1:4], 5),
    "too few": _one_hot(CLASSES, 4),
    "too few on the last rank": _one_hot(torch.arange(5), 4),
    "negative": _one_hot(CLASSES - 1, 5),
    "negative, as many as there are": _one_hot(CLASSES - 1),
    "the smallest number": _one_hot(torch.tensor([0, 1, -(2**63)]), 5),
    "no elements": _of_no_elements,
    "gradients": _chosen,
}


def test_it_does_as_with_plain_tensors():
    check(__name__, "PROGRAMS", raises=5)


def beside(rank, world):
    from torch.distributed.tensor.experimental import implicit_replication

    from torchshard import Shard, distribute_tensor, init_device_mesh
    from torchshard.errors import UnsupportedOperatorError

    x = distribute_tensor(CLASSES, init_device_mesh("cpu", (world,)), [Shard(0)])
    try:
        return x.unsqueeze(-1) == torch.arange(5)
    except UnsupportedOperatorError:
        with implicit_replication():  # torch's own
            assert not (x == torch.tensor([[-1], [7]])).full_tensor().any()
            assert not (x - 5 == torch.tensor(range(1, 6))).full_tensor().any()
            return (x.unsqueeze(-1) == torch.arange(5)).placements


def test_the_same_by_a_users_plain_tensor_is_refused():
    from torchshard import Shard

    assert run_ranks(2, beside) == [(Shard(0),)] * 2
