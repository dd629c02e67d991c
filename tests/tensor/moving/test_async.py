"""redistribute(async_op=True): it returns before the others have come, and nothing else changes."""

import copy
import io
import threading
import time

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from tests.ranks import run_ranks
from torchshard.errors import RankMismatchError
from torchshard.tensor.moving.pending import Pending


def returned_before_the_other_came(rank, world):
    """Rank 1 redistributes only after rank 0 has said that its call has returned."""
    import torch.distributed as dist

    from torchshard import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    store = dist.distributed_c10d._get_default_store()
    full = torch.arange(35.0).view(5, 7)
    ways = [(Shard(0), Replicate()), (Shard(1), Replicate()), (Shard(0), Shard(1)), (Partial("max"), Shard(1))]
    ways += [(Partial("sum"), Replicate()), (Partial("avg"), Shard(0))]
    right = []
    for k, (source, target) in enumerate(ways):
        x = distribute_tensor(full, mesh, [source])
        if rank:
            store.wait([f"returned {k}"])
        y = x.redistribute(placements=[target], async_op=True)
        local = y.to_local()
        still_coming = type(local) is Pending and local.shape == y._spec.local_shape
        if not rank:
            store.set(f"returned {k}", "")
        right.append(still_coming and torch.equal(y.full_tensor(), full) and torch.equal(local, y.to_local()))
        right.append(type(local + 0) is torch.Tensor)
    return right


def test_the_call_does_not_wait():
    for right in run_ranks(2, returned_before_the_other_came):
        assert right == [True] * 12


def like_the_waiting_one(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    ways = [
        ([Shard(0), Shard(1)], [Replicate(), Replicate()]),
        ([Shard(0), Shard(0)], [Shard(1), Shard(0)]),
        ([Replicate(), Shard(1)], [Shard(0), Replicate()]),
    ]
    for source, target in ways:
        for kwargs in ({}, {"forward_dtype": torch.float32, "backward_dtype": torch.float32}):
            results = []
            for later in (False, True):
                x = distribute_tensor(full, mesh, source).requires_grad_()
                y = x.redistribute(placements=target, async_op=later, **kwargs)
                z = (y.sin() * y).sum()
                (first,) = torch.autograd.grad(z, x, create_graph=True)
                (second,) = torch.autograd.grad((first * first).sum(), x)
                results.append([t.full_tensor() for t in (y.detach(), first.detach(), second)])
            found.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return found


def test_values_and_gradients_are_those_of_the_waiting_call():
    for found in run_ranks(4, like_the_waiting_one):
        assert found == [True] * 6


def used_in_every_way(rank, world):
    import torch.distributed._functional_collectives as functional

    from torchshard import DTensor, Replicate, Shard, ShardedTensor, distribute_tensor, init_device_mesh
    from torchshard.state_dict import to_full

    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(6.0).view(2, 3)
    x = distribute_tensor(full, mesh, [Shard(1)])

    def coming():
        return x.redistribute(placements=[Replicate()], async_op=True)

    def of_theirs():
        time.sleep(0.2 * rank)  # what is read too early is not yet the sum
        return functional.all_reduce(full, "sum", mesh)

    def made_of_theirs():
        return DTensor.from_local(of_theirs(), mesh, [Shard(0)])

    def sharded():
        return ShardedTensor.from_local(of_theirs())

    def reloaded(t):
        saved = io.BytesIO()
        torch.save(t, saved)
        saved.seek(0)
        return torch.load(saved)

    written = coming()
    written.add_(1)
    listed = [coming(), coming()]
    torch._foreach_mul_(listed, 2.0)
    compiled = torch.compile(lambda t: t + 1, backend="aot_eager")
    parameter = torch.nn.Parameter(coming())
    parameter.grad = coming()
    torch.optim.SGD([parameter], lr=1.0).step()
    return {
        "in place": torch.equal(written.full_tensor(), full + 1),
        "moved on": torch.equal(coming().redistribute(placements=[Shard(0)], async_op=True).full_tensor(), full),
        "printed": "[0., 1., 2.]" in repr(coming()) and "[0., 1., 2.]" in repr(coming().to_local()),
        "numpy": coming().to_local().numpy().tolist() == full.tolist() == coming().to_local().tolist(),
        "copied": torch.equal(copy.deepcopy(coming()).full_tensor(), full),
        "saved": torch.equal(reloaded(coming().to_local()), full),
        "torch's own, saved": torch.equal(reloaded(made_of_theirs()).to_local(), full * 2),
        "torch's own, distributed": torch.equal(
            reloaded(distribute_tensor(of_theirs(), mesh, [Replicate()], src_data_rank=None)).to_local(), full * 2
        ),
        "torch's own, converted": torch.equal(to_full({"": made_of_theirs()})[""], torch.cat([full * 2] * 2)),
        "torch's own, as numbers": made_of_theirs().numpy(force=True)[3].tolist() == (full * 2)[1].tolist(),
        "torch's own, in no hurry": type(made_of_theirs().to_local()) is Pending,
        "torch's own, sharded": torch.equal(to_full({"": sharded()})[""], torch.cat([full * 2] * 2)),
        "torch's own, sharded and saved": torch.equal(reloaded(sharded()).local_tensor(), full * 2),
        "in a list": all(torch.equal(t.full_tensor(), full * 2) for t in listed),
        "compiled": torch.equal(compiled(coming()).full_tensor(), full + 1),
        "a parameter": torch.equal(parameter.detach().full_tensor(), torch.zeros(2, 3)),
        "nothing to do": x.redistribute(placements=[Shard(1)], async_op=True) is x,
        "thrown away": coming() is not None,
    }


def test_every_use_waits():
    for found in run_ranks(2, used_in_every_way):
        assert all(found.values()), found


def taking(seen):
    """A compiler that notes the types of what comes into graphs: inductor's code reads memory, of whatever class."""

    def compiler(graph, _):
        def run(*args):
            seen.extend(map(type, args))
            return graph(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiler)


def into_regions(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    full, seen = torch.arange(15.0).view(5, 3), []
    x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    compiled = torch.compile(lambda t: t * t, backend=taking(seen), fullgraph=True)

    def moved(t, *placements):
        return t.redistribute(placements=placements, async_op=True)

    found = []
    for _ in range(2):  # the second time the graph is there
        for squared in (
            compiled(moved(x, Shard(1))),
            compiled(moved(x, Replicate()).to_local()),
            moved(compiled(x), Shard(1)),  # its gradient is on its way, too
        ):
            x.grad = None
            squared.sum().backward()
            found.append((x.grad.full_tensor() - 2 * full).abs().max().item())
    part = full.clone().requires_grad_()
    compiled(part).backward(moved(x.detach(), Replicate()).to_local())
    return found, torch.equal(part.grad, 2 * full * full), set(seen)


def test_compiled_regions_take_what_has_come():
    for found, in_plain, types in run_ranks(2, into_regions):
        assert found == [0.0] * 6
        assert in_plain
        assert types == {torch.Tensor}


def test_threads_that_use_one_wait_for_one_another():
    together, sums = threading.Barrier(3), []

    def finish():
        time.sleep(0.3)  # the others come in the meantime
        return torch.ones(2)

    x = Pending.of(finish, (2,), (1,), torch.float32, torch.device("cpu"))

    def use():
        together.wait(30)
        sums.append((x + 1).sum().item())

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == [4.0] * 3


def test_what_has_failed_fails_again_with_the_same_error():
    def fail():
        raise RankMismatchError("rank 1 is lost")

    x = Pending.of(fail, (2,), (1,), torch.float32, torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(RankMismatchError, match="rank 1 is lost"):
            x + 1


def test_an_interrupt_is_no_failure():
    calls = []

    def finish():
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return torch.ones(2)

    x = Pending.of(finish, (2,), (1,), torch.float32, torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        x + 1
    assert (x + 1).tolist() == [2.0, 2.0]
    assert (x + 1).tolist() == [2.0, 2.0]
    assert len(calls) == 2
