"""Under implicit_replication, what torch makes of plain tensors by itself is as with plain tensors alone."""

import warnings

import torch
import torch.nn.functional as F
from torch import distributions, nn
from torch.nn.utils import rnn

from tests.tensor.programs import check

INPUT = torch.linspace(-1, 1, 60).view(3, 5, 4).mul(7).sin()
LENGTHS = [2, 5, 3]


def _implicit(program):
    def run(put):
        from torchshard import fallback, implicit_replication

        with implicit_replication(), fallback("silent"), warnings.catch_warnings():
            warnings.simplefilter("error")
            return program(put)

    return run


def _placed(module, put):
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(put(p.detach())))
    return module


def _recurrent(kind, packed):
    def run(put):
        torch.manual_seed(0)
        model = _placed(kind(4, 6, 2, batch_first=True, bidirectional=True), put)
        x = put(INPUT).requires_grad_()
        taken = rnn.pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False) if packed else x
        y, states = model(taken)
        y, lengths = rnn.pad_packed_sequence(y, batch_first=True) if packed else (y, None)
        sum(t.square().sum() for t in (y, *(states if isinstance(states, tuple) else [states]))).backward()
        return y, lengths, states, x.grad, [p.grad for p in model.parameters()]

    return run


def _packs(put):
    x = put(INPUT).requires_grad_()
    packed = rnn.pack_padded_sequence(x, sorted(LENGTHS, reverse=True), batch_first=True)
    padded, lengths = rnn.pad_packed_sequence(packed, batch_first=True, padding_value=-1.0)
    (padded.square().sum() + packed.data.sum()).backward()
    return packed.data, packed.batch_sizes, padded, lengths, x.grad


def _too_few(put):
    return rnn.pack_padded_sequence(put(INPUT), [5, 3], batch_first=True)


def _cells(put):
    found, x = [], put(INPUT[0]).requires_grad_()
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        torch.manual_seed(0)
        cell = _placed(kind(4, 6), put)
        state = cell(x)
        (state[0] if isinstance(state, tuple) else state).square().sum().backward()
        found += [state, [p.grad for p in cell.parameters()]]
    return found, x.grad


def _bags(put):
    found = []
    for mode in ("sum", "mean", "max"):
        table = put(INPUT.view(15, 4)).requires_grad_()
        y = F.embedding_bag(put(torch.tensor([[1, 14, 3], [0, 7, 7]])), table, mode=mode)
        y.square().sum().backward()
        found += [y, table.grad]
    return found


def _experts(put):
    x, gate = put(INPUT.view(15, 4)).requires_grad_(), put(INPUT[0]).requires_grad_()
    shares, chosen = torch.softmax(x @ gate.t(), -1).topk(2)
    out = torch.zeros_like(x)
    for expert, mask in enumerate(F.one_hot(chosen, 5).permute(2, 1, 0)):
        place, token = torch.where(mask)
        out.index_add_(0, token, (x[token] * (expert + 1)).tanh() * shares[token, place, None])
    out.square().sum().backward()
    return out, x.grad, gate.grad


def _parameters(put):
    x, w = put(INPUT).requires_grad_(), nn.Parameter(torch.ones(4))
    (x * w).square().sum().backward()
    return x.grad, w.grad


def _draws(put):
    logits = put(INPUT[0]).requires_grad_()
    found = []
    for made in (
        distributions.Normal(logits, logits.exp()),
        distributions.Categorical(logits=logits),
        distributions.Bernoulli(logits=logits),
    ):
        drawn = made.rsample() if made.has_rsample else made.sample()
        found += [drawn, made.log_prob(drawn), made.entropy()]
    sum(t.sum() for t in found).backward()
    return found, logits.grad


PROGRAMS = {
    name: _implicit(run)
    for name, run in {
        "LSTM": _recurrent(nn.LSTM, packed=False),
        "LSTM of packed sequences": _recurrent(nn.LSTM, packed=True),
        "GRU": _recurrent(nn.GRU, packed=False),
        "GRU of packed sequences": _recurrent(nn.GRU, packed=True),
        "RNN of packed sequences": _recurrent(nn.RNN, packed=True),
        "cells": _cells,
        "packed and padded": _packs,
        "too few lengths": _too_few,
        "embedding_bag": _bags,
        "one_hot": _experts,
        "a list of rows": lambda put: put(INPUT)[[2, 0]],
        "plain parameters": _parameters,
        "distributions": _draws,
    }.items()
}


def test_what_torch_makes_of_plain_tensors():
    check(__name__, "PROGRAMS", mesh_shapes=((2,),), texts=("R", "S0", "S1"), raises=1)
    check(__name__, "PROGRAMS", mesh_shapes=((2, 2),), texts=("S0 R",), raises=1)
