"""Sparse gradients of embeddings, beside dense ones of several dtypes."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.older import known
from tests.ranks import run_ranks


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.bag = nn.Embedding(20, 8, sparse=True), nn.EmbeddingBag(9, 8, sparse=True, mode="sum")
        self.other, self.out = nn.Embedding(5, 8), nn.Linear(8, 700)

    def forward(self, x, use_bag=True):
        h = self.table(x) + self.other(x % 5)
        if use_bag:
            h = h + self.bag((x % 9).view(-1, 1)).view_as(h)
        return self.out(h)


def _sparse(rank, world):
    from torchshard.ddp import DistributedDataParallel

    for views, unused in ((False, False), (True, True)):
        torch.manual_seed(0)
        settings = {"gradient_as_bucket_view": views}
        models = [
            TorchDDP(Words(), **settings),
            DistributedDataParallel(Words(), find_unused_parameters=unused, **settings),
        ]
        models[1].module.load_state_dict(models[0].module.state_dict())
        for step in range(4):
            x = torch.randint(0, 20, (3,), generator=torch.Generator().manual_seed(step * 10 + rank))
            for model in models:
                with model.no_sync() if step == 2 else contextlib.nullcontext():
                    model(x).square().mean().backward()
            for (n, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                assert p.grad.is_sparse == q.grad.is_sparse == (n in ("module.table.weight", "module.bag.weight"))
                torch.testing.assert_close(q.grad.to_dense(), p.grad.to_dense(), rtol=1e-6, atol=1e-7)
            if step != 2:
                for model in models:
                    model.zero_grad()
    return [b.params for b in models[1].reducer.plan]


def _unused(rank, world):
    """Torch's reducer does not let a sparse gradient be missing; ours does, on some ranks or on all."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(Words(), find_unused_parameters=True)
    reference, x = copy.deepcopy(model.module), torch.randint(0, 20, (world, 3))
    for step in range(4):
        use = [(True, True), (True, False), (False, False), (False, True)][step]
        model.zero_grad()
        reference.zero_grad()
        model(x[rank], use[rank]).square().mean().backward()
        for r in range(world):
            (reference(x[r], use[r]).square().mean() / world).backward()
        for (n, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{step} {n}"
            if p.grad is not None:
                torch.testing.assert_close(q.grad.to_dense(), p.grad.to_dense())


def _both(rank, world):
    """A table that gets a sparse and a dense gradient at once, which makes a dense one."""
    from torchshard.ddp import DistributedDataParallel

    module = nn.Embedding(4, 4, sparse=True)
    module.forward = lambda x: nn.functional.embedding(x, module.weight, sparse=True) @ module.weight
    model = DistributedDataParallel(module)
    with pytest.raises(RuntimeError, match="Expected variable to have sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()


def _hooked(rank, world):
    """A hook gets the sparse gradient as its buffer."""
    import torch.distributed as dist

    from torchshard.ddp import DistributedDataParallel

    def hook(state, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0] / world)

    torch.manual_seed(0)
    grads = []
    for registered in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Words())
        if registered:
            model.register_comm_hook(None, hook)
        for _ in range(2):
            model.zero_grad()
            model(torch.tensor([1, 2 + rank])).square().mean().backward()
        grads.append([p.grad.to_dense() for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1])


def _rows_known(rank, world):
    """With the rows of all ranks told beforehand, the same gradients, in just these rows."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(Words(), find_unused_parameters=True)
    plain = DistributedDataParallel(copy.deepcopy(model.module), find_unused_parameters=True)
    for step in range(4):
        x = torch.arange(4)[:, None] * 3 + step  # rows of each rank; what rank 1 has, on rank 0 nobody needs
        x = x[: 2 + rank, 0]
        every = [torch.empty(2 + r, dtype=torch.int64) for r in range(world)]
        for r in range(world):
            every[r].copy_(x) if r == rank else None
            torch.distributed.broadcast(every[r], r)
        ids = torch.cat(every).unique()
        model._set_sparse_metadata({"table.weight": ids, "bag.weight": (ids % 9).unique()})
        for m in (model, plain):
            m.zero_grad()
            m(x, step != 2 or rank == 0).square().mean().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad.to_dense(), p.grad.to_dense())
        assert model.module.table.weight.grad.coalesce().indices()[0].tolist() == ids.tolist()
    model.zero_grad()
    model._set_sparse_metadata({"table.weight": torch.tensor([0])})
    with pytest.raises(ValueError, match=r"rows \[7.*none of the 1 ids"):
        model(torch.tensor([7])).sum().backward()
    with pytest.raises(ValueError, match=r"out\.bias is no parameter with sparse gradients; these are table\.weight"):
        model._set_sparse_metadata({"out.bias": torch.tensor([0])})
    with pytest.raises(NotImplementedError, match="sparse_metadata"), model.join():
        model(torch.tensor([7]))


def _uneven(rank, world):
    """A rank without inputs has no rows: it makes them where the parameters are, and torch does not warn of it."""
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(Words())
    with warnings.catch_warnings(record=True) as caught, torch.device("meta"), model.join():
        for step in range(1 + rank):
            model.zero_grad()
            model(torch.full((3,), step + rank, device="cpu")).sum().backward()
    assert not caught or not known("unchecked invariants")  # it warns where one says not to check, too
    return model.module.table.weight.grad.coalesce().indices().tolist()


def _all(rank, world):
    assert _uneven(rank, world) == [[[0, 1]], [[2]]][rank]
    _rows_known(rank, world)
    plan = _sparse(rank, world)
    _unused(rank, world)
    _both(rank, world)
    _hooked(rank, world)
    return plan


def test_sparse_gradients():
    plan = run_ranks(2, _all)[0]
    assert ("table.weight",) in plan
    assert ("bag.weight",) in plan
