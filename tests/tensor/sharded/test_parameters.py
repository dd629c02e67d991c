"""ShardedTensors as parameters: in modules, optimizers, copies and pickles; and arguments that fit no ShardedTensor."""

import copy
import io
import os
from datetime import timedelta

import pytest

from tests.ranks import meet, run_ranks


def _parameters(rank, world):
    """Rows 2, 2, 1 and none, throughout."""
    import torch
    from torch import nn

    from torchshard import ShardedTensor
    from torchshard.errors import ShardingError, UnsupportedOperatorError
    from torchshard.tensor.sharded import factories, specs

    spec = specs.ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(world)])
    rows = ((0, 2), (2, 4), (4, 5), (5, 5))[rank]

    def made(whole):
        x = factories.zeros(spec, *whole.shape, dtype=whole.dtype)
        x.local_tensor().copy_(whole[slice(*rows)])
        return x

    def refused(call, words, kind=ShardingError):
        with pytest.raises(kind, match=words):
            call()

    # Modules put new values into their parameters, of another dtype or on another device.
    module = nn.Module()
    module.w = nn.Parameter(factories.ones(spec, 5, 3))
    module.double()
    assert (module.w.dtype, module.w.local_tensor().dtype) == (torch.float64, torch.float64)
    assert module.w.data.local_tensor().data_ptr() == module.w.local_tensor().data_ptr()
    empty = torch.empty_like(module.w, device="meta")
    assert str(empty.metadata().shards_metadata[3].placement) == "rank:3/meta"
    module.w = nn.Parameter(empty)
    module.to_empty(device="cpu")
    assert module.w.local_tensor().device.type == "cpu"
    refused(lambda: setattr(module.w, "data", torch.ones(5, 3)), "Not the data of a ShardedTensor")

    # A copy of a parameter, and one from a file, is a parameter; parts say where they lie now.
    parameter = nn.Parameter(made(torch.rand(5, 3)))
    parameter.grad = torch.ones_like(parameter)
    copied = copy.deepcopy(nn.ParameterList([parameter]))[0]
    assert isinstance(copied, nn.Parameter)
    assert torch.equal(copied.local_tensor(), parameter.local_tensor())
    assert copied.grad is not parameter.grad
    assert torch.equal(copied.grad.local_tensor(), parameter.grad.local_tensor())
    refused(lambda: copy.deepcopy(parameter * 2), "Only Tensors created explicitly", RuntimeError)
    file = io.BytesIO()
    torch.save(parameter, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), map_location="meta")
    assert isinstance(loaded, nn.Parameter)
    assert [str(s.placement) for s in loaded.metadata().shards_metadata] == [f"rank:{r}/meta" for r in range(world)]
    assert loaded.local_shards()[0].metadata == loaded.metadata().shards_metadata[rank]

    # Ranks of a smaller group load what they have saved as torch's class has it.
    group = torch.distributed.new_group([0, 1])
    if rank < 2:
        from torch.distributed._shard.api import load_with_process_group

        small = ShardedTensor.from_local(torch.full((2,), rank), process_group=group)
        torch.save(small, file := io.BytesIO())
        alone = torch.load(io.BytesIO(file.getvalue()))
        refused(lambda: alone.gather(0, None), r"load_with_process_group\(group\)")
        with load_with_process_group(group):
            loaded = torch.load(io.BytesIO(file.getvalue()))
        loaded.gather(0, out := torch.zeros(4, dtype=torch.int64) if rank == 0 else None)
        assert rank or out.tolist() == [0, 0, 1, 1]

    # Every optimizer that works element by element.
    whole = torch.rand(5, 3, generator=torch.Generator().manual_seed(1))
    for name in ("SGD", "Adam", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"):
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            if "fused" in options and name not in ("SGD", "Adam"):
                continue
            ours, plain = nn.Parameter(made(whole)), nn.Parameter(whole.clone())
            one, other = (getattr(torch.optim, name)([p], lr=0.1, **options) for p in (ours, plain))
            for _ in range(3):
                ours.grad, plain.grad = ((5 * p.detach()).cos() for p in (ours, plain))
                one.step()
                other.step()
            torch.testing.assert_close(ours.local_tensor(), plain[slice(*rows)], msg=f"{name} {options}")

    # What `x[mask] = number` is, in one torch or another.
    x = made(whole)
    for fill in (lambda y, mask: y.masked_fill(mask, 3.0), lambda y, mask: y.masked_fill_(mask, torch.tensor(4.0))):
        assert torch.equal(fill(x, x > 0.5).local_tensor(), fill(whole.clone(), whole > 0.5)[slice(*rows)])

    # What would mix parts of one tensor with another tensor, or give a number, is refused.
    x, same = made(whole), made(whole)
    refused(lambda: x.sum(), "sum", UnsupportedOperatorError)
    assert torch.equal(x, same)
    refused(lambda: torch.add(x, x, out=torch.zeros(5, 3)), "plain tensor")
    refused(lambda: torch._foreach_add([x], [torch.ones(2, 3)]), "plain tensor")
    refused(lambda: torch._foreach_add([torch.ones(2, 3)], [x]), "plain tensor")
    refused(lambda: x.index_put_((torch.zeros(5, 3, dtype=torch.int64),), torch.tensor(1.0)), "index_put", Exception)
    assert torch.add(x, x, out=same) is same
    assert torch.equal(same.local_tensor(), 2 * x.local_tensor())
    refused(lambda: ShardedTensor.from_local(torch.ones(2, 3), dim=2), "No dim to join along")
    refused(lambda: ShardedTensor.from_local(torch.ones(())), "No dim to join along")
    refused(lambda: x.gather(world, None), "no such destination")
    for other in ("0", group if rank >= 2 else torch.distributed.GroupMember.NON_GROUP_MEMBER):
        words = (
            "This is no process group" if other == "0" else f"This rank is not in the process group(.|\n)*rank {rank}"
        )
        refused(lambda other=other: ShardedTensor.from_local(torch.ones(2), process_group=other), words)
        refused(lambda other=other: factories.ones(spec, 5, process_group=other), words)

    # What asks for memory that is one is told so, or asks this rank's parts.
    assert not x.is_shared()
    module.share_memory()
    assert module.w.is_shared()
    assert module.w.local_tensor().is_shared()
    for call in (x.storage, x.__dlpack__, lambda: x.apply_(abs)):
        refused(call, "shares the memory of a tensor", UnsupportedOperatorError)
    refused(lambda: factories.ones(specs.ChunkShardingSpec(0, ["one/cpu", "two/cpu"]), 4), "lies on no rank")


def test_sharded_tensors_as_parameters():
    run_ranks(4, _parameters)


def _asking(rank, world):
    """What asks for gradients does so as one of torch's own, and cut anew; gradients are ShardedTensors, too."""
    import torch
    from torch import nn

    from torchshard import ShardedTensor, state_dict
    from torchshard.compiler import support_groups
    from torchshard.errors import RankMismatchError, ShardingError
    from torchshard.tensor.sharded import factories, specs

    rows, columns = (specs.ChunkShardingSpec(d, [f"rank:{r}/cpu" for r in range(world)]) for d in (0, 1))

    def asks(x):
        said = x.requires_grad, x.metadata().tensor_properties.requires_grad
        return {*said, *[shard.tensor.requires_grad for shard in x.local_shards()]}

    asked = factories.ones(rows, 4, 2, requires_grad=True)
    made = [asked, factories.ones(rows, 4, 2).requires_grad_(), nn.Parameter(factories.ones(rows, 4, 2)), 2 * asked]
    for x in made:
        address = x.local_tensor().data_ptr()
        for theirs in (x.to_torch(), state_dict.to_torch({"x": x})["x"]):
            assert asks(theirs) == {True}
            assert asks(ShardedTensor.from_torch(theirs)) == {True}
            assert asks(state_dict.from_torch([theirs])[0]) == {True}
            assert theirs.local_shards()[0].tensor.data_ptr() == address
        assert asks(x.detach().to_torch()) == {False}
        again = ShardedTensor.from_shards_and_metadata(x.local_shards(), x.metadata())
        x.reshard(columns).reshard(rows)
        assert x.requires_grad
        moved = ShardedTensor.from_shards_and_metadata(x.local_shards(), x.metadata())
        assert moved.requires_grad == again.requires_grad
    assert asks(asked.requires_grad_(False).to_torch()) == {False}

    # A gradient goes along, so that the next step finds it where it is needed; ranks that have none say so.
    leaf = nn.Parameter(factories.ones(rows, 4, 2))
    optimizer = torch.optim.SGD([leaf], lr=1.0)
    for spec in (columns, rows):
        leaf.grad, before = None, leaf.detach().clone()
        (leaf * leaf).backward(torch.ones_like(leaf))
        gradient = leaf.grad
        leaf.reshard(spec)
        assert leaf.grad is gradient
        assert gradient.sharding_spec() is spec
        optimizer.step()
        assert torch.equal(leaf.detach(), -before.reshard(spec))
    gradient = leaf.grad
    if rank == 0:
        leaf.grad = None
    with pytest.raises(RankMismatchError, match="reshard of the gradient"):
        leaf.reshard(columns)
    assert leaf.sharding_spec() is rows
    assert gradient.sharding_spec() is rows

    x = factories.ones(rows, 4, 2).requires_grad_()
    for wrong, words in (
        (torch.ones(4, 2), "backward: argument 0 is a plain tensor"),
        (columns, "cut in different ways"),
    ):
        gradient = wrong if isinstance(wrong, torch.Tensor) else factories.ones(wrong, 4, 2)
        with pytest.raises(ShardingError, match=words):
            (2 * x).backward(gradient)
    assert x.grad is None
    (2 * x).backward(factories.ones(rows, 4, 2), retain_graph=True)
    assert x.grad.local_tensor().tolist() == [[2.0, 2.0]] * (4 // world)

    # Gradients of parts are those of the tensor, and go on to what the parts were computed from; also where compiled.
    def loss(x):
        return (2 * x).local_tensor().square().sum()

    def loss_of_shards(x):
        return 2 * x.local_shards()[0].tensor.square().sum() * 2

    support_groups()
    compiled = [torch.compile(call, backend="aot_eager", fullgraph=True) for call in (loss, loss_of_shards)]
    for call in (loss, loss_of_shards, *compiled):
        x.grad = None
        call(x).backward()
        assert x.grad.local_tensor().tolist() == [[8.0, 8.0]] * (4 // world)
    assert asks(x) == {True}
    with torch.no_grad():
        x.local_tensor().fill_(3.0)
    assert x.detach().local_tensor().eq(3.0).all()
    for number in (4.0, 5.0):  # what takes the place of a part is the tensor's from then on
        part = x.local_shards()[0]
        part.tensor = torch.full((2, 2), number)
        assert x.local_tensor().eq(number).all()
        assert type(copy.copy(part)) is specs.Shard
    a, b = (torch.full((1, 2), float(n), requires_grad=True) for n in (1, 2))
    parts = [specs.Shard.from_tensor_and_offsets(t * t, [2 * rank + k, 0], rank) for k, t in enumerate((a, b))]
    joined = ShardedTensor.from_local_shards(parts, 4, 2)
    assert joined.requires_grad
    assert not joined.is_leaf
    assert joined.local_shards()[1].tensor.data_ptr() == parts[1].tensor.data_ptr()
    (3 * joined).local_shards()[1].tensor.sum().backward(retain_graph=True)
    assert [t.grad.tolist() for t in (a, b)] == [[[0.0, 0.0]], [[12.0, 12.0]]]
    (3 * joined).backward(torch.ones_like(joined))
    assert [t.grad.tolist() for t in (a, b)] == [[[6.0, 6.0]], [[24.0, 24.0]]]

    class FirstOnly(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x, y: 2 * x)
        backward = staticmethod(lambda ctx, grad: (2 * grad, None))

    used, unused = (torch.ones(1, 2, requires_grad=True) for _ in "xy")
    last = ShardedTensor.from_local_shards([specs.Shard.from_tensor_and_offsets(unused * 1, [rank, 0], rank)], 2, 2)
    for y in (last, last.to(process_group=torch.distributed.new_group()), last.local_shards()[0].tensor):
        FirstOnly.apply(used, y).sum().backward(retain_graph=True)
    assert used.grad.tolist() == [[6.0, 6.0]]
    assert unused.grad is None  # no zeros


def test_gradients_are_asked_for_and_given_alike():
    run_ranks(2, _asking)


def _lost(rank, world, store):
    import torch
    import torch.distributed as dist

    from torchshard import ShardedTensor

    limit = timedelta(seconds=5)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    meet(f"{store}.here", rank, world)
    if rank == 2:
        os._exit(1)
    with pytest.raises(RuntimeError) as error:
        ShardedTensor.from_local(torch.ones(2, 3))
    return f"{type(error.value).__name__}: {error.value}"


def test_a_dead_rank_is_named_by_those_that_make_a_sharded_tensor(tmp_path):
    for said in run_ranks(3, _lost, str(tmp_path / "store"), backend="", expect_dead=(2,))[:2]:
        assert said.startswith("RankMismatchError: rank")
        assert "not rank 2" in said
