"""What runs on each rank's part of a batch, or draws for it, and nothing is gathered: eager's values and gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import run_ranks
from tests.tensor.proving.proof import same


def _recurrent(put, mesh):
    from torchshard import distribute_module, implicit_replication

    for bias, first in ((True, True), (False, False)):
        plain = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True, bias=bias, batch_first=first)
        placed = distribute_module(copy.deepcopy(plain), mesh)
        x = torch.randn(*((5, 3) if first else (3, 5)), 3)
        given = [x.clone().requires_grad_(), put(x, 0 if first else 1).requires_grad_()]
        with implicit_replication():
            (want, (a, b)), (got, (c, d)) = plain(given[0]), placed(given[1])
        for one, other in ((got, want), (c, a), (d, b)):
            same(one, other)
        assert got.placements == given[1].placements
        (want.square().sum() + (a * b).sum()).backward()
        (got.square().sum() + (c * d).sum()).backward()
        same(given[1].grad, given[0].grad)
        for p, q in zip(placed.parameters(), plain.parameters(), strict=True):
            same(p.grad, q.grad)


def _ctc(put, mesh):
    scores, targets = torch.randn(9, 5, 4).log_softmax(2), torch.randint(1, 4, (5, 4))
    times, lengths = torch.tensor([9, 9, 8, 9, 7]), torch.tensor([1, 2, 3, 1, 2])
    for reduction in ("none", "mean"):
        plain, placed = scores.clone().requires_grad_(), put(scores, 1).requires_grad_()
        want = F.ctc_loss(plain, targets, times, lengths, reduction=reduction)
        got = F.ctc_loss(placed, put(targets, 0), put(times, 0), put(lengths, 0), reduction=reduction)
        same(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
        same(placed.grad, plain.grad)
        assert placed.grad.placements == placed.placements


def _draws(put, mesh):
    chances, means, deviations = torch.rand(5, 6), torch.randn(5, 6), torch.rand(6) + 0.5
    placed, shifted, stretched = put(chances, 0), put(means, 0), put(deviations, None)
    for draw in (
        lambda x, m, s: torch.multinomial(x, 1),
        lambda x, m, s: torch.multinomial(x, 4),
        lambda x, m, s: torch.multinomial(x, 1, replacement=True),
        lambda x, m, s: torch.normal(m, s),
        lambda x, m, s: torch.normal(m, 2.0),
        lambda x, m, s: torch.normal(1.0, x),
        lambda x, m, s: torch.distributions.Normal(m, x).sample(),
    ):
        torch.manual_seed(3)
        want = draw(chances, means, deviations), torch.rand(2)
        torch.manual_seed(3 + mesh.get_rank())
        got = draw(placed, shifted, stretched), torch.rand(2)
        same(got[0], want[0])
        assert torch.equal(got[1], want[1]), "the generator is elsewhere"
        assert got[0].placements == placed.placements
    for x in (-chances, chances * 0, chances.where(chances < 0.5, torch.inf)):
        with pytest.raises(RuntimeError, match="probabilit"):
            torch.multinomial(put(x, 0), 1)
    with pytest.raises(RuntimeError, match="std >= 0"):
        torch.normal(shifted, -stretched)


def batches(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, fallback, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))

    def put(x, dim):
        return distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim)])

    torch.manual_seed(0)
    with fallback("error"):
        _recurrent(put, mesh)
        _ctc(put, mesh)
    _draws(put, mesh)


def test_nothing_is_gathered():
    run_ranks(3, batches)
