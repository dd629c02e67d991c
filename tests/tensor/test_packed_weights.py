"""Runs that lie behind one another in a dim and are split each: taken apart, joined, saved, loaded and converted."""

import itertools
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from expecttest import assert_expected_inline

from tests.ranks import run_ranks
from torchshard.checkpoint import convert

# Functions of a tensor of three runs in its dim 1; a rank has its piece of each run. What they give, joined or not.
TAKEN_APART = {
    "chunk": lambda x, n: x.chunk(3, 1),
    "split": lambda x, n: x.split(n, -1),
    "split in two": lambda x, n: x.split([n, 2 * n], 1),
    "slices": lambda x, n: (x[:, :n], x[:, n : 2 * n], x[:, -n:]),
    "two of three": lambda x, n: (x[:, n:],),
    "narrow": lambda x, n: (x.narrow(1, n, n),),
    "tensor_split": lambda x, n: x.tensor_split(3, 1),
    "copies": lambda x, n: torch.split_copy(x, n, 1),
    "unsafe": lambda x, n: torch.unsafe_split(x, n, 1),
    "unflatten": lambda x, n: x.unflatten(1, (3, n)).unbind(1),
    "joined anew": lambda x, n: (torch.cat([x[:, n:], x[:, :n]], 1),),
    "joined with others": lambda x, n: (torch.cat([x[:, :n], x, x.new_ones(4, n)], 1),),
    "written to": lambda x, n: (_written(x * 1, n),),
    "a gate": lambda x, n: (F.glu(x[:, n:], 1),),
    "a gate by hand": lambda x, n: (F.silu(x[:, n:].chunk(2, 1)[0]) * x[:, n:].chunk(2, 1)[1],),
}


def _written(x, n):
    x[:, n : 2 * n].mul_(2)
    x.narrow(1, 2 * n, n).zero_()
    return x


def taken_apart(rank, world, mesh_shape):
    from torchshard import Replicate, UnitShard, distribute_tensor, explain, init_device_mesh

    mesh = init_device_mesh("cpu", mesh_shape)
    for (n, unit), (name, fn) in itertools.product([(8, 1), (7, 1), (12, 4), (1, 1)], TAKEN_APART.items()):
        full = torch.randn(4, 3 * n, generator=torch.Generator().manual_seed(0)).requires_grad_()
        placements = [Replicate()] * (mesh.ndim - 1) + [UnitShard(1, unit, runs=3)]
        x = distribute_tensor(full.detach(), mesh, placements).requires_grad_()
        wanted = fn(full, n)
        sum([(w * w).sum() for w in wanted]).backward()
        case = f"{name} of {n} in units of {unit}"
        seen = explain(fn, x, n)
        free = n > unit  # where ranks have nothing, dims that they all have something of are split
        assert not (free and seen.collectives), f"{case}\n{seen}"
        for got, want in zip(seen.result, wanted, strict=True):
            torch.testing.assert_close(got.full_tensor(), want.detach(), msg=lambda m, case=case: f"{case}: {m}")
        total = sum([(y * y).sum() for y in seen.result]).full_tensor()
        backward = explain(total.backward)
        assert not (free and backward.collectives), f"{case}, backward\n{backward}"
        assert x.grad.placements == x.placements or not free, case
        torch.testing.assert_close(x.grad.full_tensor(), full.grad, msg=lambda m, case=case: f"{case}: {m}")


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_taken_apart_and_joined(mesh_shape):
    run_ranks(2 * len(mesh_shape), taken_apart, mesh_shape)


def joined(rank, world):
    """Pieces that all ranks have of several tensors are joined where they lie, if each is as long, or a multiple."""
    from torchshard import Replicate, Shard, distribute_tensor, explain, init_device_mesh, layout_of

    mesh = init_device_mesh("cpu", (world,))
    lengths = {
        "S(0/2)": (7, 7),
        "S(0/3)": (4, 4, 4),
        "R": (4, 0, 4),  # what has no length has no pieces
    }
    for written, parts in lengths.items():
        full = [torch.randn(n, 3).requires_grad_() for n in parts]
        own = [distribute_tensor(t.detach(), mesh, [Shard(0)]).requires_grad_() for t in full]
        seen = explain(torch.cat, own)
        torch.cat(full).pow(3).sum().backward()
        seen.result.pow(3).sum().backward()
        torch.testing.assert_close(seen.result.full_tensor(), torch.cat(full).detach())
        if written != "R":
            assert not seen.collectives, seen
            assert list(map(repr, layout_of(seen.result).placements)) == [written]
        for x, t in zip(own, full, strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), t.grad)
    whole = distribute_tensor(torch.ones(7, 3), mesh, [Replicate()])
    seen = explain(torch.cat, [distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)]), whole])
    assert not seen.collectives, seen
    assert torch.equal(seen.result.full_tensor(), torch.cat([torch.zeros(7, 3), torch.ones(7, 3)]))


def test_joined_where_they_lie():
    run_ranks(2, joined)


def every_second(rank, world):
    """Of neighbours that stay together, one of each is taken where they lie; of others, what is right."""
    from torchshard import Shard, UnitShard, distribute_tensor, explain, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    cuts = Shard(1), UnitShard(1, 2), UnitShard(1, 4), UnitShard(1, 6), UnitShard(1, runs=2)
    sent = {}
    for n, cut, (start, step) in itertools.product((12, 24), cuts, ((0, 2), (1, 2), (3, 4), (2, 3), (2, 2))):
        full = torch.randn(3, n).requires_grad_()
        x = distribute_tensor(full.detach(), mesh, [cut]).requires_grad_()
        seen, want = explain(lambda x, at, by: x[:, at::by], x, start, step), full[:, start::step]
        want.square().sum().backward()
        total = seen.result.square().sum().full_tensor()
        backward, case = explain(total.backward), f"[:, {start}::{step}] of {n} in {cut}"
        written, wanted = x.detach() * 1, full.detach() * 1
        written[:, start::step] += 1
        wanted[:, start::step] += 1
        for got, right in ((seen.result, want.detach()), (x.grad, full.grad), (written, wanted)):
            torch.testing.assert_close(got.full_tensor(), right, msg=lambda m, case=case: f"{case}: {m}")
        sent[n, repr(cut), start, step] = len(seen.collectives) + len(backward.collectives)
        if not sent[n, repr(cut), start, step]:
            assert x.grad.placements == x.placements, case
    return [case for case, count in sent.items() if not count]


def test_every_second_column():
    (first, *others) = run_ranks(4, every_second)
    assert others == [first] * 3
    free = "\n".join(f"{n} in {cut}: [{start}::{step}]" for n, cut, start, step in first)
    assert_expected_inline(
        free,
        """\
12 in Shard(dim=1): [2::3]
12 in UnitShard(dim=1, unit=2): [0::2]
12 in UnitShard(dim=1, unit=2): [1::2]
12 in UnitShard(dim=1, unit=4): [0::2]
12 in UnitShard(dim=1, unit=4): [1::2]
12 in UnitShard(dim=1, unit=4): [3::4]
12 in UnitShard(dim=1, unit=6): [0::2]
12 in UnitShard(dim=1, unit=6): [1::2]
12 in UnitShard(dim=1, unit=6): [2::3]
24 in Shard(dim=1): [0::2]
24 in Shard(dim=1): [1::2]
24 in Shard(dim=1): [2::3]
24 in UnitShard(dim=1, unit=2): [0::2]
24 in UnitShard(dim=1, unit=2): [1::2]
24 in UnitShard(dim=1, unit=2): [2::3]
24 in UnitShard(dim=1, unit=4): [0::2]
24 in UnitShard(dim=1, unit=4): [1::2]
24 in UnitShard(dim=1, unit=4): [3::4]
24 in UnitShard(dim=1, unit=6): [0::2]
24 in UnitShard(dim=1, unit=6): [1::2]
24 in UnitShard(dim=1, unit=6): [2::3]""",
    )


def lengths_of_a_graph(rank, world):
    """Graphs of a dim of which every second item is taken, by what is said of its length before."""
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh, counts = init_device_mesh("cpu", (world,)), []
    for mark in (torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        run = torch.compile(lambda x: (x[::2] * 2, x[1::2]), backend=counter, fullgraph=True)
        for rows in (8, 12, 24, 16, 11, 13):  # the last two are gathered, and have a graph of their own
            full = torch.randn(rows, 3).requires_grad_()
            x = distribute_tensor(full.detach(), mesh, [Shard(0)]).requires_grad_()
            mark(x, 0)
            wanted, found = (full[::2] * 2, full[1::2]), [y.full_tensor() for y in run(x)]
            for w, f in zip(wanted, found, strict=True):
                assert torch.equal(w, f), (mark, rows)
            for part in (wanted, found):
                sum([y.square().sum() for y in part]).backward()
            assert torch.equal(x.grad.full_tensor(), full.grad), (mark, rows)
        counts.append(counter.frame_count)
    return counts


def test_every_second_row_of_any_length_in_one_graph():
    assert run_ranks(2, lengths_of_a_graph) == [[2, 2]] * 2


def saved(rank, world, folder):
    from torchshard import Replicate, Shard, UnitShard, checkpoint, distribute_tensor, init_device_mesh, state_dict

    mesh = init_device_mesh("cpu", (world,))
    for rows, unit in ((16, 1), (7, 1), (12, 4), (4, 4)):
        full, path = torch.arange(3 * rows * 2.0).view(3 * rows, 2), os.path.join(folder, f"{rows} {unit}")
        packed = [UnitShard(0, unit, runs=3)]
        x = distribute_tensor(full, mesh, packed)
        dcp.save({"w": x}, checkpoint_id=path)
        for n, placements in enumerate(([Shard(0)], [Replicate()], [Shard(1)], packed, [UnitShard(0, unit)])):
            y = distribute_tensor(torch.zeros_like(full), mesh, placements)
            dcp.load({"w": y}, checkpoint_id=path)
            assert torch.equal(y.full_tensor(), full), placements
            checkpoint.load_into(path, {"w": y.zero_()})
            assert torch.equal(y.full_tensor(), full), placements
            dcp.save({"w": y}, checkpoint_id=f"{path} {n}")
            z = distribute_tensor(torch.zeros_like(full), mesh, packed)
            dcp.load({"w": z}, checkpoint_id=f"{path} {n}")
            assert torch.equal(z.full_tensor(), full), placements
            made = state_dict.to_dtensor({"w": y}, mesh, {"w": packed})["w"]
            assert torch.equal(made.to_local(), x.to_local()), placements
            assert made.placements == x.placements
        assert torch.equal(state_dict.to_full({"w": x})["w"], full)
        same = state_dict.to_dtensor({"w": x}, mesh, {"w": packed})["w"]
        assert same.to_local().data_ptr() == x.to_local().data_ptr()


def test_saved_loaded_and_converted(tmp_path):
    run_ranks(2, saved, str(tmp_path))


def test_checkpoints_are_cut_in_runs(tmp_path):
    full = torch.arange(48.0).view(24, 2)
    torch.save({"w": full}, tmp_path / "full.pt")
    convert(tmp_path / "full.pt", tmp_path / "cut", to="dcp", mesh=(2,), placements={"*": "S(0/3*4)"})
    (entry,) = dcp.FileSystemReader(tmp_path / "cut").read_metadata().state_dict_metadata.values()
    assert sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in entry.chunks) == [
        (k * 8 + at, 4) for k in range(3) for at in (0, 4)
    ]
    read = {"w": torch.zeros_like(full)}
    dcp.load(read, checkpoint_id=str(tmp_path / "cut"))
    assert torch.equal(read["w"], full)
