"""A DTensor as a Python object: copies, pickles, modules, metadata; and the fallbacks of torch's private fast paths."""

import copy
import io
import sys
import warnings

import expecttest
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.ranks import many, run_ranks
from tests.tensor.proving.proof import prove_group


def objects(rank, world):
    from torchshard import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, layout_of

    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(10.0).view(5, 2)
    x = distribute_tensor(full, mesh, [Shard(0)])
    found = {}
    for name, other in (("deepcopy", copy.deepcopy(x)), ("copy", copy.copy(x))):
        found[name] = isinstance(other, DTensor) and torch.equal(other.full_tensor(), full)
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    loaded = torch.load(file)["x"]  # weights_only
    found["torch.load"] = torch.equal(loaded.full_tensor(), full) and loaded.device_mesh == mesh
    file.seek(0)
    loaded = torch.load(file, map_location="meta")["x"]
    found["torch.load to meta"] = (loaded.device.type, loaded.placements) == ("meta", (Shard(0),))
    found["its mesh"] = torch.equal(loaded.device_mesh.mesh, mesh.mesh) and (loaded + 1).shape == full.shape
    file.seek(0)
    with FakeTensorMode():
        loaded = torch.load(file)["x"]
    found["torch.load of no values"] = isinstance(loaded.to_local(), FakeTensor) and loaded.shape == full.shape
    p = torch.nn.Parameter(x)
    found["parameter"] = isinstance(p, DTensor) and isinstance(p, torch.nn.Parameter) and p.placements == (Shard(0),)
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.weight = torch.nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    found["to"] = layer.to(torch.float64).weight.to_local().dtype is torch.float64
    found["to again"] = isinstance(layer.half().weight, DTensor) and layer.weight.placements == (Shard(0),)
    found["zero_grad"] = layer.zero_grad() is None
    found["metadata"] = (tuple(x.shape), x.stride(), x.dtype, x.ndim, x.numel(), x.device.type) == (
        (5, 2), (2, 1), torch.float32, 2, 10, "cpu",
    )  # fmt: skip
    found["tolist"] = (x + 0).full_tensor().tolist() == full.tolist()
    found["item"] = x.sum().item() == 45.0 and DTensor.from_local(torch.ones(()), mesh, [Partial()]).item() == world
    for placement in (Replicate(), Shard(0), Shard(1)):
        y = distribute_tensor(full + 0, mesh, [placement])
        found[f"equal {placement}"] = torch.equal(x, y) and torch.equal(y, x) and torch.equal(x.long(), y)
        y[4, 1] = -1  # on one rank only
        found[f"not equal {placement}"] = not (torch.equal(x, y) or torch.equal(y, x) or torch.equal(x[:4], y))
    found["bool"] = bool((x >= 0).all()) and float(x.max()) == 9.0
    found["boxes"] = [tuple(b.size) for b in layout_of(x).boxes()] == [(3, 2), (2, 2)]
    found["repr"] = repr(x).startswith("DTensor(local_tensor=tensor(") and "S(0)" in repr(x)
    found["hash"] = len({x, x}) == 1
    found["iteration"] = [row.full_tensor().tolist() for row in x] == full.tolist()
    found["len"] = len(x) == 5
    for other in (full, torch.distributed.tensor.distribute_tensor(full, mesh)):
        with pytest.raises(TypeError, match=r"takes a torchshard\.DTensor, not a torch\..*Tensor"):
            layout_of(other)
    return found


def test_a_dtensor_behaves_as_a_tensor():
    for found in run_ranks(2, objects):
        assert all(found.values()), {k: v for k, v in found.items() if not v}


def other_ranks(rank, world):
    """A mesh of the first two ranks of three: the third holds nothing, whatever is drawn."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from torchshard import Replicate, Shard, distribute_tensor, fallback

    mesh = DeviceMesh("cpu", [0, 1])
    x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    y = (x * 2).redistribute(placements=[Replicate()])
    with fallback("silent"):
        drawn = torch.multinomial(x, 2), torch.multinomial(x, 7, replacement=True), torch.poisson(x), torch.normal(x, x)
    dist.barrier()
    assert [tuple(z.shape) for z in drawn] == [(2,), (7,), (6,), (6,)]
    assert [bool(z.to_local().numel()) for z in drawn] == [rank < 2] * 4
    return tuple(x.shape), tuple(y.shape), y.to_local().tolist()


def test_a_rank_outside_of_the_mesh_holds_nothing():
    inside, also, outside = run_ranks(3, other_ranks)
    assert inside == also == ((6,), (6,), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0])
    assert outside == ((6,), (6,), [])


def modes(rank, world):
    import torchshard
    from torchshard import Replicate, Shard, distribute_tensor, fallback, implicit_replication, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(1.0, 11.0).view(5, 2)
    x = distribute_tensor(full, mesh, [Shard(0)])
    found = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = [torch.equal(torch.cov(x).full_tensor(), torch.cov(full)) for _ in range(2)]
        distances = [torch.equal(torch.pdist(x).full_tensor(), torch.pdist(full)) for _ in range(2)]
    found["values"] = all(values + distances)
    found["said"] = sorted({str(w.message) for w in caught}), len(caught)
    found["here"] = all(w.filename == __file__ for w in caught)
    with fallback("error"):
        try:
            torch.pdist(x)
        except torchshard.errors.UnsupportedOperatorError as error:
            found["refused"] = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fallback("silent"):
            x.roll(1, 0)
    found["silent"] = len(caught)
    with implicit_replication():
        found["replicated"] = torch.equal((x + full).full_tensor(), full * 2)
    try:
        x + distribute_tensor(full, init_device_mesh("cpu", (1, world)), [Replicate(), Shard(0)])
    except torchshard.errors.ShardingError as error:
        found["meshes"] = str(error)
    try:
        with fallback("loud"):
            pass
    except torchshard.errors.ShardingError as error:
        found["mode"] = str(error)
    return found


class Modes(expecttest.TestCase):
    def test_what_is_said(self):
        found = run_ranks(2, modes)[0]
        assert found.pop("values")
        assert found.pop("here")
        assert found.pop("replicated")
        assert found.pop("silent") == 0
        self.assertExpectedInline(
            "\n".join(f"[{k}] {v}" for k, v in found.items()),
            """\
[said] (["torchshard: _pdist_forward.default gathers its operands on every rank (no rule for these operands; said once). torchshard.register_rule gives it a rule, torchshard.fallback('silent') allows it without a word"], 1)
[refused] _pdist_forward.default has no sharded way to run: no rule for these operands.
  expected: a rule for these operands, as fallback('error') is on
  fix:      redistribute the operands to Replicate(), or allow it with torchshard.fallback('replicate')
[meshes] add.Tensor: the arguments live on different meshes.
  expected: one mesh
  got:      argument self: float32[5, 2] (0=2:S(0))
            argument other: float32[5, 2] (0=1:R, 1=2:S(0))
  fix:      bring both to one: distribute_tensor(other.full_tensor(), mesh, placements)
[mode] No such fallback.
  expected: 'replicate', 'error' or 'silent'
  got:      'loud'""",
        )


def one_element(rank, world):
    """Plain tensors of one element beside DTensors, and of one whose shape alone is asked for."""
    from torchshard import Shard, distribute_tensor, init_device_mesh

    full = torch.arange(1.0, 11.0).view(5, 2)
    x = distribute_tensor(full, init_device_mesh("cpu", (world,)), [Shard(0)])
    one, found = torch.full((1, 1), 2.0, requires_grad=True), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sums = [one.detach() + x, x + one.detach()[0], x + one.detach()[0]]
        (one * x).sum().backward()
        _ = x + torch.tensor(1.0)
    found["values"] = all(torch.equal(y.full_tensor(), full + 2) for y in sums)
    found["gradient"] = type(one.grad), one.grad.tolist()
    found["said"] = [str(w.message).partition(", to be")[0] for w in caught]
    found["here"] = all(w.filename == __file__ for w in caught)
    found["sizes"] = full.is_same_size(x), x.is_same_size(full), x.is_same_size(full[:2])
    return found


def test_a_plain_tensor_of_one_element_is_taken_for_the_same_everywhere():
    takes = "torchshard: {} takes its argument {}, a plain tensor of one element that is no scalar"
    said = [
        takes.format(*names)
        for names in [("add.Tensor", "'self'"), ("add.Tensor", "'other'"), ("mul.Tensor", "'self'")]
    ]
    expected = {
        "values": True,
        "gradient": (torch.Tensor, [[55.0]]),
        "said": said,
        "here": True,
        "sizes": (True, True, False),
    }
    for found in run_ranks(2, one_element):
        assert found == expected, found


def without_fast_paths(rank, world, group, limit):
    from torchshard import _torch

    assert "torchshard.tensor" not in sys.modules
    with _torch.without_fast_paths():  # before the import, at which some are looked up
        from torchshard._torch import dtensors
        from torchshard.tensor import dtensor
        from torchshard.tensor.calls import first_run

        assert dtensor.new is first_run.new is dtensors.portable_constructor
        return prove_group(rank, world, (world,), group, limit)[:2]


@pytest.mark.parametrize("group", ["matrices", pytest.param("views", marks=pytest.mark.full), "networks"])
def test_values_without_private_fast_paths(group):
    for done, complaints in run_ranks(2, without_fast_paths, group, many(4), imported=False):
        assert not complaints, complaints[:3]
        assert done > 10


@pytest.mark.parametrize("arguments", [(), (torch.ones(2),), ((2, 3),), (2, 3)])
def test_the_class_itself_makes_no_tensors(arguments):
    from torchshard import DTensor

    with pytest.raises(TypeError, match=r"DTensor\(\.\.\.\) does not make one; DTensor\.from_local\(part"):
        DTensor(*arguments)
