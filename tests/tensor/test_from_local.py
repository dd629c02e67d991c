"""Where DTensors begin and end: from_local, to_local, full_tensor, and their gradients."""

import expecttest
import pytest
import torch

from tests.ranks import fake_ranks, run_ranks
from tests.saying import said


def uneven(rank, world):
    from torchshard import DTensor, Partial, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(7 * world, dtype=torch.float32).view(7, world)
    mine = whole.chunk(world)[rank]
    asked = DTensor.from_local(mine, mesh, [Shard(0)], run_check=True)
    told = DTensor.from_local(mine, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    column = DTensor.from_local(whole[:, rank : rank + 1], mesh, [Shard(-1)])
    term = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    same = DTensor.from_local(torch.full((3,), float(rank)), mesh, [Replicate()], run_check=True)
    return (
        [torch.equal(x.full_tensor(), whole) for x in (asked, told, column)],
        torch.equal(term.full_tensor(), whole * (world * (world + 1) // 2)),
        same.full_tensor().tolist(),
        (tuple(asked.shape), asked.stride(), asked.placements == (Shard(0),), asked.to_local().data_ptr() == mine.data_ptr()),
    )  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
def test_parts_of_one_tensor(world):
    for equal, summed, same, (shape, stride, placed, shared) in run_ranks(world, uneven):
        assert all(equal)
        assert summed
        assert same == [0.0, 0.0, 0.0]
        assert (shape, stride, placed, shared) == ((7, world), (world, 1), True, True)


def unequal_parts(rank, world, how):
    from torchshard import DTensor, Shard, init_device_mesh
    from torchshard.errors import RankMismatchError, ShardingError

    mesh = init_device_mesh("cpu", (world,))
    mine = torch.ones(2 + rank, 3)
    try:
        if how == "checked":
            return DTensor.from_local(mine, mesh, [Shard(0)], run_check=True)
        x = DTensor.from_local(mine, mesh, [Shard(0)]) * 2
        return x.full_tensor()
    except (RankMismatchError, ShardingError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(("how", "name"), [("checked", "ShardingError"), ("later", "RankMismatchError")])
def test_parts_that_are_no_chunks_are_refused_on_every_rank(how, name):
    for kind, message in run_ranks(2, unequal_parts, how):
        assert kind == name
        assert "from_local" in message


def gradients(rank, world):
    from torchshard import DTensor, Partial, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    weights = torch.arange(1.0, 6.0)
    found = {}
    for name, placement, local in (
        ("S", Shard(0), torch.ones(5).chunk(world)[rank].clone()),
        ("R", Replicate(), torch.ones(5)),
        ("P", Partial(), torch.ones(5)),
        ("A", Partial("avg"), torch.ones(5)),
    ):
        local.requires_grad_()
        x = DTensor.from_local(local, mesh, [placement], shape=(5,), stride=(1,))
        (x.full_tensor() * weights).sum().backward()
        found[name] = local.grad.tolist()
    z = DTensor.from_local(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    (z.to_local() * (rank + 1)).sum().backward()
    found["to_local"] = z.grad.full_tensor().tolist()
    return found


def test_gradients_of_parts_and_terms():
    for rank, found in enumerate(run_ranks(2, gradients)):
        whole = [1.0, 2.0, 3.0, 4.0, 5.0]
        assert found["S"] == (whole[:3], whole[3:])[rank]
        assert found["R"] == found["P"] == whole
        assert found["A"] == [g / 2 for g in whole]
        assert found["to_local"] == [1.0] * 4 + [2.0] * 4


def refusals(rank, world):
    import torch.distributed.tensor as upstream
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    from torchshard import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    x = torch.ones(4, 3)
    wrapped = LocalShardsWrapper([torch.ones(4, 3)], [(4 * rank, 0)])
    torchs = upstream.distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])  # the second rank has nothing of it
    calls = {
        "placement": lambda: distribute_tensor(x, mesh, ["Shard(0)"]),
        "number": lambda: distribute_tensor(x, mesh, [Shard(0), Replicate()]),
        "none": lambda: distribute_tensor(x, mesh, []),
        "dim": lambda: distribute_tensor(x, mesh, [Shard(2)]),
        "mesh": lambda: distribute_tensor(x, "cpu", [Shard(0)]),
        "the wrong way round": lambda: distribute_tensor(mesh, x.detach(), [Shard(0)]),
        "list": lambda: distribute_tensor([1.0, 2.0], mesh, [Shard(0)]),
        "shape": lambda: DTensor.from_local(x, mesh, [Shard(0)], shape=(9, 3), stride=(3, 1)),
        "half": lambda: DTensor.from_local(x, mesh, [Shard(0)], shape=(8, 3)),
        "twice": lambda: DTensor.from_local(distribute_tensor(x, mesh), mesh, [Shard(0)]),
        "leaf": lambda: distribute_tensor(x.requires_grad_() * 2, mesh, [Shard(0)]),
        "max": lambda: DTensor.from_local(x.requires_grad_(), mesh, [Partial("max")]).full_tensor().sum().backward(),
        "no placements": lambda: distribute_tensor(x.detach(), mesh).redistribute(),
        "plain": lambda: distribute_tensor(x.detach(), mesh) + torch.ones(4, 3),
        "sparse": lambda: distribute_tensor(x.detach().to_sparse(), mesh, [Shard(0)]),
        "quantized": lambda: distribute_tensor(torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8), mesh),
        "nested": lambda: DTensor.from_local(
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), mesh, [Shard(0)]
        ),
        "wrapped": lambda: DTensor.from_torch(upstream.DTensor.from_local(wrapped, mesh, [Shard(0)])),
        "torch's": lambda: distribute_tensor(torchs, mesh, [Shard(0)]),
        "torch's part": lambda: DTensor.from_local(torchs, mesh, [Shard(0)]),
        "factory": lambda: __import__("torchshard").zeros(4, device_mesh=mesh, placements=[Partial()]),
        "factory of none": lambda: __import__("torchshard").zeros(4, device_mesh=mesh, placements=[]),
    }
    return said(calls)


class Sentences(expecttest.TestCase):
    def test_bad_input_gets_a_sentence(self):
        found = run_ranks(2, refusals)[0]
        shown = "\n".join(f"[{name}] {message}" for name, message in found.items())
        self.assertExpectedInline(
            shown,
            """\
[placement] ShardingError: A placement of a kind that is not known here.
  expected: Shard(dim), UnitShard(dim, unit), Replicate() or Partial(op)
  got:      str: 'Shard(0)'
  where:    axis 0 of the mesh (0=2)
[number] ShardingError: Placements are a list with one for each axis of the mesh.
  expected: 1 placements for the mesh (0=2)
  got:      [Shard(dim=0), Replicate()]
  fix:      [Replicate()], with Shard(dim) or Partial() where it applies
[none] ShardingError: Placements are a list with one for each axis of the mesh.
  expected: 1 placements for the mesh (0=2)
  got:      []
  fix:      [Replicate()], with Shard(dim) or Partial() where it applies
[dim] ShardingError: Shard(2) on a tensor of 2 dims.
  expected: a dim from -2 to 1
  got:      S(2)
  where:    axis 0 of the mesh (0=2)
[mesh] ShardingError: A mesh is needed.
  expected: a torch.distributed.DeviceMesh
  got:      str: 'cpu'
  fix:      init_device_mesh('cpu', (world_size,))
[the wrong way round] ShardingError: A mesh is needed.
  expected: a torch.distributed.DeviceMesh
  got:      Tensor: tensor([[1., ...[1., 1., 1.]])
  fix:      init_device_mesh('cpu', (world_size,))
[list] ShardingError: A DTensor is made of a tensor.
  expected: a torch.Tensor
  got:      list: [1.0, 2.0]
  where:    distribute_tensor
  fix:      torch.tensor(it), or torch.from_numpy(it) of an array
[shape] ShardingError: A local tensor does not have the shape of this rank's part.
  expected: (5, 3), the part of (9, 3) at (0,)
  got:      (4, 3)
  where:    (0=2:S(0))
  fix:      pass the piece that torch.chunk would give this rank
[half] RuntimeError: from_local takes shape and stride together; got shape=(8, 3), stride=None; that of a contiguous tensor is (3, 1)
[twice] RuntimeError: from_local takes a plain torch.Tensor, and this is a DTensor; use redistribute
[leaf] RuntimeError: distribute_tensor takes a leaf tensor; use DTensor.from_local for results of operators
[max] UnsupportedOperatorError: No gradient passes from a Partial('max') DTensor to the local tensor that it was made of.
  expected: Shard, Replicate, Partial('sum') or Partial('avg') where gradients are wanted
  got:      (0=2:P(max))
  fix:      reduce before from_local, or detach the local tensor
[no placements] RuntimeError: redistribute needs placements, for example redistribute(placements=[Replicate()])
[plain] UnsupportedOperatorError: add.Tensor: the argument 'other' is a plain torch.Tensor among DTensors.
  expected: DTensors only, or scalars
  got:      Tensor of shape (4, 3)
  fix:      distribute_tensor(it, mesh, placements) or DTensor.from_local(it, mesh, placements); or, if it is the same on every rank, as what torch and modules make of numbers alone is, with torchshard.implicit_replication(): ...
[sparse] ShardingError: A DTensor holds dense tensors only.
  expected: a tensor with layout torch.strided that is not quantized
  got:      a tensor of layout torch.sparse_coo
  where:    distribute_tensor
  fix:      x.to_dense()
[quantized] ShardingError: A DTensor holds dense tensors only.
  expected: a tensor with layout torch.strided that is not quantized
  got:      a quantized tensor of torch.qint8
  where:    distribute_tensor
  fix:      x.dequantize()
[nested] ShardingError: A DTensor holds dense tensors only.
  expected: a tensor with layout torch.strided that is not quantized
  got:      a nested tensor
  where:    from_local
  fix:      x.to_padded_tensor(0.0)
[wrapped] ShardingError: A tensor that wraps several parts of a larger one is no part of a DTensor.
  expected: one plain torch.Tensor
  got:      LocalShardsWrapper of 1 parts
  where:    from_local
  fix:      torchshard.ShardedTensor.from_local_shards of its parts and their offsets; or dcp.save the tensor, and convert the checkpoint
[torch's] ShardingError: A DTensor is made of plain tensors.
  expected: a plain torch.Tensor
  got:      one of torch's own DTensors, of shape (1, 3) and placements (Shard(dim=0),)
  where:    distribute_tensor
  fix:      DTensor.from_torch(it), which shares its memory, and redistribute(placements=...) for others
[torch's part] ShardingError: A DTensor is made of plain tensors.
  expected: a plain torch.Tensor
  got:      one of torch's own DTensors, of shape (1, 3) and placements (Shard(dim=0),)
  where:    from_local
  fix:      DTensor.from_torch(it), which shares its memory, and redistribute(placements=...) for others
[factory] ShardingError: A factory does not make Partial tensors.
  expected: Shard(dim) or Replicate()
  got:      (0=2:P(sum))
  fix:      DTensor.from_local(term, mesh, [Partial()])
[factory of none] ShardingError: Placements are a list with one for each axis of the mesh.
  expected: 1 placements for the mesh (0=2)
  got:      []
  fix:      [Replicate()], with Shard(dim) or Partial() where it applies""",
        )


def turned(rank, world, how):
    """A piece that lies in memory by rows on the first rank, and by columns on the others."""
    from torchshard import DTensor, Partial, Replicate, Shard, init_device_mesh
    from torchshard.errors import RankMismatchError, ShardingError

    mesh = init_device_mesh("cpu", (world,))
    rows = torch.arange(6.0).view(2, 3) + rank
    mine = rows if rank == 0 else rows.t().contiguous().t()
    placement = {"R": Replicate(), "P": Partial()}.get(how[0], Shard(0))
    try:
        match how:
            case "S by rows" | "P by rows":
                x = DTensor.from_local(mine.contiguous(), mesh, [placement])
            case "S told" | "P told":
                shape = (2 * world, 3) if how[0] == "S" else (2, 3)
                x = DTensor.from_local(mine, mesh, [placement], shape=shape, stride=(3, 1))
            case "S asked" | "P asked" | "R asked":
                x = DTensor.from_local(mine, mesh, [placement], run_check=True)
            case "S" | "P":
                x = DTensor.from_local(mine, mesh, [placement]) * 2
        return x.stride(), x.to_local().stride(), x.full_tensor().tolist()
    except (RankMismatchError, ShardingError) as error:
        return type(error).__name__


def test_a_mismatch_that_torch_calls_a_value_error_is_one():
    from torchshard.errors import RankMismatchError

    assert issubclass(RankMismatchError, ValueError)
    assert issubclass(RankMismatchError, RuntimeError)


@pytest.mark.parametrize("how", ["S", "P"])
def test_pieces_that_lie_in_memory_in_different_orders_are_refused_on_every_rank(how):
    assert run_ranks(2, turned, how, timeout=30) == ["RankMismatchError"] * 2


@pytest.mark.parametrize("how", ["S by rows", "P by rows", "S told", "P told", "S asked", "P asked", "R asked"])
def test_strides_that_are_told_or_asked_for_are_those_of_every_rank(how):
    rows = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    more = [[x + 1 for x in row] for row in rows]
    whole = {
        "S": rows + more,
        "P": [[x + y for x, y in zip(*pair, strict=True)] for pair in zip(rows, more, strict=True)],
    }
    for strides, part, values in run_ranks(2, turned, how, timeout=30):
        assert strides == (3, 1)
        assert part == (3, 1) or how.endswith(("told", "asked"))
        assert values == whole.get(how[0], rows)


def turned_without_steps(rank, world, shape):
    """Terms of which nothing lies in another order, whatever their strides say: no elements, or one along a dim."""
    from torchshard import DTensor, Partial, init_device_mesh

    turned = torch.ones(shape) if rank else torch.ones((*shape[:-2], shape[-1], shape[-2])).mT
    x = DTensor.from_local(turned, init_device_mesh("cpu", (world,)), [Partial()])
    return turned.stride(), x.full_tensor().shape, (x @ x.mT).sum().item()


@pytest.mark.parametrize(("shape", "total"), [((3, 1), 36.0), ((0, 2, 2), 0.0), ((3, 0), 0.0)])
def test_strides_of_dims_that_do_not_step_may_differ_between_ranks(shape, total):
    ranks = run_ranks(2, turned_without_steps, shape, timeout=30)
    assert ranks[0][0] != ranks[1][0]
    assert [r[1:] for r in ranks] == [(shape, total)] * 2


def turned_part(rank, world):
    """Operators on parts that lie in memory by columns, of a tensor that lies by rows."""
    from torchshard import DTensor, Shard, init_device_mesh

    mesh, whole = init_device_mesh("cpu", (world,)), torch.arange(24.0).view(4, 6)
    part = whole.chunk(world)[rank].t().contiguous().t() if rank else whole.chunk(world)[rank].clone()
    x = DTensor.from_local(part, mesh, [Shard(0)], shape=(4, 6), stride=(6, 1))
    by_rows = DTensor.from_local(part.contiguous(), mesh, [Shard(0)], shape=(4, 6), stride=(6, 1))
    calls = [
        lambda a: a * 2,
        lambda a: torch.cat([a, a]),
        lambda a: a.clone(),
        lambda a: a[:, 1:].t().clone(),
        lambda a: torch.nn.functional.group_norm(a.view(4, 2, 3), 2),
        lambda a: a.view(24) + 1,
    ]
    bad = []
    for k, call in enumerate(calls):
        want = call(whole)
        for a in (x, by_rows, x):  # a plan for the one is none for the other
            got = call(a)
            part_of = got.to_local()
            dense = all(p == q for n, p, q in zip(part_of.shape, part_of.stride(), want.stride(), strict=True) if n > 1)
            if (
                got.stride() != want.stride()
                or not torch.allclose(got.full_tensor(), want)
                or (got.ndim < 2 and not dense)
            ):
                bad.append((k, got.stride(), part_of.stride()))
    x.mul_(2)
    return bad, torch.equal(part, whole.chunk(world)[rank] * 2)


def test_a_part_that_does_not_lie_as_it_was_told_to_is_read_in_order_and_written_to():
    assert run_ranks(2, turned_part, timeout=60) == [([], True)] * 2


def other_kinds(rank, world, how):
    from torchshard import DTensor, Partial, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    mine = {
        "dtype": torch.ones(2, dtype=(torch.float32, torch.float64)[rank]),
        "dims": torch.ones((2,) * (rank + 1)),
        "sizes": torch.ones(2 + rank),
        "gradients": torch.ones(2, requires_grad=rank > 0),
    }[how.removesuffix(", asked")]
    return said(
        {"": lambda: DTensor.from_local(mine, mesh, [Partial()], run_check=how.endswith("asked")).full_tensor()}
    )[""].split(":")[0]


@pytest.mark.parametrize("how", ["dtype", "dims", "sizes", "dtype, asked", "dims, asked", "gradients, asked"])
def test_terms_of_other_kinds_are_refused_on_every_rank(how):
    assert run_ranks(2, other_kinds, how, timeout=30) == ["RankMismatchError"] * 2


def gradient_of_a_row(rank, world):
    """Two rows on the first rank and one on the last, whose gradients lie in memory by columns, if one can tell."""
    from torchshard import Shard, distribute_tensor, init_device_mesh

    x = distribute_tensor(torch.ones(3, 4), init_device_mesh("cpu", (world,)), [Shard(0)]).requires_grad_()
    seen, y = [], x * 1
    y.register_hook(lambda g: seen.append((g.stride(), g.to_local().is_contiguous())))
    (y.to_local().t().contiguous() @ torch.ones(y.to_local().shape[0], 2)).sum().backward()
    return seen, x.grad.full_tensor().tolist()


def test_gradients_of_pieces_have_the_same_strides_on_every_rank():
    assert run_ranks(2, gradient_of_a_row, timeout=30) == [([((4, 1), True)], [[2.0] * 4] * 3)] * 2


def made_of_unequal_parts(rank, world, how):
    from torchshard import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    longer = DTensor.from_local(torch.arange(2.0 + 2 * rank), mesh, [Shard(0)])
    rows = torch.ones(2, 3) if rank == 0 else torch.ones(3, 2).t()
    turned = DTensor.from_local(rows, mesh, [Shard(0)])

    def seen_through_a_view():
        flat = turned.reshape(-1)  # a view on rank 0, a copy on rank 1
        turned.mul_(2)
        return flat.full_tensor()

    calls = {
        "mean": lambda: longer.mean().item(),
        "sum": lambda: (longer * 2).sum().full_tensor(),
        "view": seen_through_a_view,
    }
    return said({how: calls[how]})[how].split(":")[0]


@pytest.mark.parametrize("how", ["mean", "sum", "view"])
def test_results_of_parts_that_do_not_belong_together_are_refused_on_every_rank(how):
    assert run_ranks(2, made_of_unequal_parts, how, timeout=30) == ["RankMismatchError"] * 2


def outside(rank, world):
    """A number on a mesh of the first rank alone: there, and where nothing of it is."""
    from torch.distributed.device_mesh import DeviceMesh

    from torchshard import DTensor, Replicate

    mesh = DeviceMesh("cpu", [0])
    told = {"shape": (), "stride": ()}
    x = DTensor.from_local(torch.tensor(2.0) if rank == 0 else torch.empty(0), mesh, [Replicate()], **told)
    x.requires_grad_()
    y = x * 3
    y.to_local().sum().backward()
    return y.shape, None if rank else x.grad.item()


def test_a_rank_outside_of_the_mesh_of_a_number():
    assert run_ranks(2, outside, timeout=30) == [((), 3.0), ((), None)]


def many_together(rank, world):
    """How often norms of many gradients are compared and reduced; then one of them is of another size here."""
    from torchshard import DTensor, Shard, init_device_mesh
    from torchshard.comm.words import words_of
    from torchshard.debug import CommDebugMode
    from torchshard.errors import RankMismatchError

    mesh = init_device_mesh("cpu", (world,))
    words, compared = words_of(mesh.get_group(), torch.device("cpu")), []
    same = words.same
    words.same = lambda number: compared.append(number) or same(number)
    weights = [torch.nn.Parameter(DTensor.from_local(torch.ones(2, n), mesh, [Shard(0)])) for n in (1, 2, 3, 4)]
    for w in weights:
        w.grad = DTensor.from_local(torch.full(w.to_local().shape, 0.5), mesh, [Shard(0)])
    with CommDebugMode() as mode:
        total = torch.nn.utils.clip_grad_norm_(weights, 1e9)
    sent = {function.__name__: n for function, n in mode.get_comm_counts().items()} | {"compared": len(compared)}
    gradients = [w.grad for w in weights]
    gradients[2] = DTensor.from_local(torch.ones(2 + rank, 3), mesh, [Shard(0)])
    with pytest.raises(RankMismatchError) as refused:
        torch.nn.utils.get_total_norm(gradients)
    return round(total.item(), 4), sent, str(refused.value)


def test_many_tensors_are_compared_by_one_exchange():
    for total, sent, refused in run_ranks(2, many_together, timeout=30):
        assert total == round(10**0.5, 4)
        assert sent == {"compared": 1, "all_reduce": 1}
        assert "rank 0: (2, 3) of" in refused
        assert "rank 1: (3, 3) of" in refused


class Sequential:
    """A sequence of a user, which is no list."""

    def __init__(self, *items):
        self.items = items

    def __getitem__(self, k):
        return self.items[k]

    def __len__(self):
        return len(self.items)


def test_placements_are_any_sequence():

    from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, zeros
    from torchshard.errors import ShardingError

    with fake_ranks(4):
        mesh, rows = init_device_mesh("cpu", (2, 2)), Sequential(Shard(0), Replicate())
        for x in (
            DTensor.from_local(torch.ones(2, 3), mesh, rows, grad_placements=rows),
            distribute_tensor(torch.ones(4, 3), mesh, rows),
            zeros(4, 3, device_mesh=mesh, placements=rows),
            zeros(4, 3, device_mesh=mesh, placements=[Shard(1), Replicate()]).redistribute(placements=rows),
        ):
            assert x.placements == (Shard(0), Replicate())
            x.detach().requires_grad_().to_local(grad_placements=rows).sum().backward()
        for wrong in (Sequential(Shard(0)), Shard(0), "SR", {0: Shard(0), 1: Replicate()}, {Shard(0), Replicate()}):
            with pytest.raises(ShardingError, match=r"Placements are a list|placement"):
                DTensor.from_local(torch.ones(2, 3), mesh, wrong)


class FirstOnly(torch.autograd.Function):
    """A function whose second argument has no gradient."""

    @staticmethod
    def forward(ctx, x, y):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


UNUSED = {
    "from_local": lambda part: part(),
    "Partial": lambda part: part("Partial"),
    "redistribute": lambda part: part().redistribute(placements=[part.whole]),
    "redistributed in bfloat16": lambda part: part().redistribute(
        placements=[part.whole], forward_dtype=torch.bfloat16
    ),
    "to_local": lambda part: part().to_local(),
    "full_tensor": lambda part: part().full_tensor(),
    "operators": lambda part: (part() * 2).sum(0),
    "gathered": lambda part: part().view(-1)[1:],
    "a number": lambda part: part().sum(),
}


def without_gradient(rank, world, dtensors):
    """For each way to a second argument that has no gradient: that of its source, and that of the first argument."""
    from torchshard import DTensor, Partial, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for name, way in UNUSED.items():
        x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)

        def part(kind="Shard", y=y):
            return DTensor.from_local(y, mesh, [Partial() if kind == "Partial" else Shard(0)])

        part.whole = Replicate()
        first = DTensor.from_local(x, mesh, [Replicate()]) if dtensors else x * 1
        FirstOnly.apply(first, way(part)).sum().backward()
        found[name] = y.grad, torch.equal(x.grad, torch.full((4, 3), 2.0))
    return found


@pytest.mark.parametrize("dtensors", [True, False])
def test_what_has_no_gradient_hands_none_on(dtensors):
    for found in run_ranks(2, without_gradient, dtensors):
        assert found == dict.fromkeys(UNUSED, (None, True))
