"""What torch's modules make of numbers alone, for DTensors alone, is as with plain tensors; users' plain ones are not."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import run_ranks
from tests.tensor.programs import check
from tests.tensor.semantics.test_replicated import INPUT, _placed

BAGS = torch.arange(12).view(4, 3) % 7


def _recurrent(kind, *args, **kwargs):
    def run(put):
        from torchshard import fallback

        torch.manual_seed(0)
        model = _placed(kind(*args, **kwargs).double(), put)
        x = put((INPUT[0] if isinstance(model, nn.RNNCellBase) else INPUT).double()).requires_grad_()
        with fallback("silent"), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = torch.utils._pytree.tree_leaves(model(x))
        sum(t.square().mean() for t in found).backward()
        return found, x.grad, [p.grad for p in model.parameters()]

    return run


def _bags(**kwargs):
    def run(put):
        torch.manual_seed(0)
        model = _placed(nn.EmbeddingBag(10, 4, **kwargs), put)
        y = model(put(BAGS))
        y.square().mean().backward()
        return y, model.weight.grad

    return run


def _zeros_beside(put):
    torch.manual_seed(0)
    model = _placed(nn.MultiheadAttention(4, 2, add_zero_attn=True, batch_first=True).double(), put)
    x = put(INPUT.double()).requires_grad_()
    y, weights = model(x, x, x)
    y.square().mean().backward()
    return y, weights, x.grad


def _quantiles(put):
    x = put(INPUT.double()).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [x.quantile(0.5), x.quantile(0.3, 1, keepdim=True), torch.quantile(x, 0.4, 0, interpolation="nearest")]
    found.append(x.sqrt().nanquantile(0.4, 2))
    sum(t.square().sum() for t in found).backward()
    return found, x.grad


PROGRAMS = {
    "LSTM": _recurrent(nn.LSTM, 4, 6, 2, bidirectional=True, batch_first=True),
    "LSTM without biases": _recurrent(nn.LSTM, 4, 6, bias=False),
    "LSTM with projections": _recurrent(nn.LSTM, 4, 6, proj_size=3),
    "GRU": _recurrent(nn.GRU, 4, 6, 2, batch_first=True),
    "RNN": _recurrent(nn.RNN, 4, 6, nonlinearity="relu"),
    "LSTMCell": _recurrent(nn.LSTMCell, 4, 6),
    "GRUCell": _recurrent(nn.GRUCell, 4, 6),
    "bags": _bags(),
    "largest of bags": _bags(mode="max"),
    "sums of bags": _bags(mode="sum", padding_idx=1),
    "zeros to attend to": _zeros_beside,
    "quantiles for a number": _quantiles,
}


def test_they_do_as_with_plain_tensors():
    check(__name__, "PROGRAMS")


class Started(nn.GRU):
    def forward(self, x, start=None):
        return super().forward(x, self.start if start is None else start)


def refusals(rank, world):
    from torchshard import Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
    from torchshard.errors import UnsupportedOperatorError

    mesh = init_device_mesh("cpu", (world,))
    x, ids = distribute_tensor(INPUT, mesh, [Shard(1)]), distribute_tensor(BAGS, mesh, [Replicate()])
    start = torch.zeros(1, 5, 6)
    gru, lstm, started = (distribute_module(kind(4, 6), mesh) for kind in (nn.GRU, nn.LSTM, Started))
    started.start = start
    bag, attending = distribute_module(nn.EmbeddingBag(10, 4), mesh), nn.MultiheadAttention(4, 2, add_zero_attn=True)
    attending = distribute_module(attending, mesh)
    half = distribute_module(nn.GRU(4, 6), mesh)
    half.bias_hh_l0 = nn.Parameter(torch.zeros(18))
    hooked = distribute_module(nn.GRU(4, 6), mesh)
    hooked.register_forward_pre_hook(lambda module, args: (*args, start))
    after = distribute_module(nn.GRU(4, 6), mesh)
    after.register_forward_hook(lambda module, args, made: made[1] + start)
    calls = {
        "first state": lambda: gru(x, start),
        "first states": lambda: lstm(x, (start, start)),
        "by a subclass": lambda: started(x),
        "forward itself": lambda: gru.forward(x),
        "places": lambda: bag(ids.flatten(), torch.arange(0, 12, 3)),
        "the function": lambda: F.embedding_bag(ids.flatten(), bag.weight, torch.arange(0, 12, 3)),
        "mask": lambda: attending(x, x, x, attn_mask=torch.zeros(3, 3)),
        "quantiles": lambda: x.quantile(torch.tensor([0.3, 0.5])),
        "parameter": lambda: half(x),
        "by a hook": lambda: hooked(x),
        "in a hook": lambda: after(x),
    }
    taken = []
    for name, call in calls.items():
        try:
            call()
            taken.append(name)
        except UnsupportedOperatorError as error:
            taken += [] if "plain torch.Tensor among DTensors" in error.what else [error.what]
    return taken


def test_plain_tensors_of_users_are_refused_there():
    assert run_ranks(2, refusals) == [[]] * 2
