"""A checkpoint of any format straight into live tensors: every rank gets, and reads, just its boxes."""

import pytest
import torch

from tests.checkpoint import sources
from tests.ranks import run_ranks
from torchshard import checkpoint
from torchshard.errors import CheckpointError, ShardingError


def load(rank, world, folder):
    import torch.distributed.tensor as upstream
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
    from torch.distributed.device_mesh import init_device_mesh

    import torchshard

    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
    S, R = upstream.Shard, upstream.Replicate
    read = []
    for path in (f"{folder}/a.safetensors", f"{folder}/ck", f"{folder}/a.pt"):
        for api in (upstream, torchshard):
            state = {
                "model": {
                    "rows": api.distribute_tensor(torch.zeros(7, 10), mesh, [S(0), R()]),
                    "both": torch.nn.Parameter(api.distribute_tensor(torch.zeros(7, 10), mesh, [S(0), S(1)])),
                    "twice": api.distribute_tensor(torch.zeros(7, 10).double(), mesh, [S(0), S(0)]),
                    "plain": torch.zeros(10, 7).t(),
                }
            }
            bytes_read = []
            checkpoint.load_into(
                path, state, rename=lambda key: f"model.{key}", progress=lambda *a, b=bytes_read: b.append(a)
            )
            for key, value in state["model"].items():
                if key == "plain":
                    assert torch.equal(value, full)
                else:
                    assert torch.equal(value.full_tensor(), full.to(value.dtype)), (path, api, key)
            read.append(bytes_read[-1])
        rows = [2, 2, 2, 1][rank]
        shard = LocalShard.from_tensor_and_offsets(torch.zeros(rows, 10), [2 * rank, 0], rank)
        sharded = init_from_local_shards([shard], 7, 10)
        checkpoint.load_into(path, {"w": sharded})
        assert torch.equal(shard.tensor, full[2 * rank : 2 * rank + rows])
    for api in (upstream, torchshard):  # parts that are still on their way
        coming = api.distribute_tensor(torch.zeros(7, 10), mesh, [S(0), R()])
        coming = coming.redistribute(placements=[R(), R()], async_op=True)
        assert type(coming._local_tensor) is not torch.Tensor
        checkpoint.load_into(path, {"w": coming})
        assert torch.equal(coming.full_tensor(), full)
    wrong = upstream.DTensor.from_local(torch.zeros(1, 10), mesh, [S(0), R()], shape=(7, 10), stride=(10, 1))
    with pytest.raises(CheckpointError, match="not the box that its layout says"):
        checkpoint.load_into(path, {"w": wrong})
    assert torch.distributed.is_initialized()
    return read


def test_into_tensors_of_a_live_mesh(tmp_path):
    full = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
    torch.save(dict.fromkeys(("w", "rows", "both", "twice", "plain"), full), tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "a.safetensors", to="safetensors")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "ck", to="dcp", mesh=(3,), placements={"*": "S(1)"})
    for rank, read in enumerate(run_ranks(4, load, str(tmp_path))):
        rows, both, twice = [40, 40, 30, 30][rank], [20, 20, 15, 15][rank], [20, 20, 20, 10][rank]
        nbytes = 4 * (rows + both + 70) + 8 * twice
        assert read == [(nbytes, nbytes)] * 6


def test_objects_and_errors(tmp_path):
    torch.save({"model": {"w": torch.arange(4.0)}, "epoch": 3, "list": [torch.ones(2), 5]}, tmp_path / "a.pt")
    w = torch.zeros(4, dtype=torch.bfloat16)
    state = {"model": {"w": w}, "epoch": None, "list": [torch.zeros(2), 0]}
    checkpoint.load_into(tmp_path / "a.pt", state)
    assert state["model"]["w"] is w
    assert w.tolist() == [0, 1, 2, 3]
    assert (state["epoch"], state["list"][1]) == (3, 5)
    wrong = {
        "lacks a key": {"nothing": torch.ones(1)},
        "another shape": {"model": {"w": torch.ones(5)}},
        "another type": {"model": {"w": torch.ones(4, dtype=torch.int64)}},
        "holds no tensor here": {"epoch": torch.ones(1)},
        "holds a tensor here": {"model": {"w": 3}},
    }
    for message, state in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load_into(tmp_path / "a.pt", state)


def test_all_that_does_not_fit_is_named(tmp_path):
    torch.save({"model": {"w": torch.arange(4.0), "b": torch.ones(2)}, "epoch": 3}, tmp_path / "a.pt")
    state = {"model": {"w": torch.zeros(5), "b": torch.zeros(2), "c": torch.zeros(1)}, "epoch": torch.zeros(()), "x": 0}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_into(tmp_path / "a.pt", state)
    assert str(caught.value).replace(f"{tmp_path}/", "") == (
        """\
The checkpoint does not fit the state dict.
  got:      A tensor of the checkpoint has another shape. a.pt: model.w, expected (5,), got (4,)
            The checkpoint lacks a key of the state dict. a.pt, got model.c
            The checkpoint holds no tensor here, unlike the state dict. a.pt: epoch
            The checkpoint lacks a key of the state dict. a.pt, got x
  where:    a.pt
  fix:      Give rename=, or leave the key out of the state dict; inspect shows the keys."""
    )
    assert not state["model"]["b"].any()


def test_a_type_that_is_not_cast_to_is_named_with_its_key(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="not cast to this type") as caught:
        checkpoint.load_into(tmp_path / "a.pt", {"w": torch.ones(3, dtype=torch.float8_e4m3fn)})
    assert caught.value.where == f"{tmp_path / 'a.pt'}: w"


def test_empty_dicts_and_lists_of_lists(tmp_path):
    """torch.distributed.checkpoint keeps no empty dicts, such as the state of SGD without momentum."""
    state = {"state": {}, "groups": [{}, {"lr": 1}], "deep": [[torch.ones(2)], [3]]}
    sources.make(tmp_path / "ck", 1, sources.save, state)
    torch.save(state, tmp_path / "a.pt")
    for name in ("ck", "a.pt"):
        target = {"state": {}, "groups": [{}, {"lr": 0}], "deep": [[torch.zeros(2)], [0]]}
        checkpoint.load_into(tmp_path / name, target)
        assert target["deep"][0][0].tolist() == [1, 1]
        assert (target["state"], target["groups"], target["deep"][1]) == ({}, state["groups"], [3])
    with pytest.raises(CheckpointError, match=r"lacks a key(?s:.*)deep"):
        checkpoint.load_into(tmp_path / "ck", {"deep": {}})


def test_objects_are_torchs_own(tmp_path):
    values = {
        "pair": (torch.arange(3).bfloat16(), 3), "size": torch.Size([2, 3]), "dtype": torch.bfloat16,
        "device": torch.device("cpu"), "layout": torch.strided, "list": [1, (torch.float64, {"x"})],
    }  # fmt: skip
    sources.make(tmp_path / "ck", 1, sources.save, values)
    state = dict.fromkeys(values)
    checkpoint.load_into(tmp_path / "ck", state)
    assert torch.equal(state["pair"][0], values["pair"][0])
    assert type(state["size"]) is torch.Size
    for key in ("size", "dtype", "device", "layout", "list"):
        assert state[key] == values[key], key


def test_nothing_is_loaded_where_an_object_is_refused(tmp_path):
    sources.make(tmp_path / "ck", 1, sources.save_foreign)
    state = {"w": torch.zeros(4), "args": 7}
    with pytest.raises(CheckpointError, match=r"argparse\.Namespace"):
        checkpoint.load_into(tmp_path / "ck", state)
    assert state["args"] == 7
    assert not state["w"].any()


def test_autograd_notices_that_values_were_replaced(tmp_path):
    torch.save({"w": torch.zeros(3), "m": torch.zeros(2, 3)}, tmp_path / "a.pt")
    for key, w in (("w", torch.ones(3)), ("m", torch.ones(3, 2).t())):
        leaf = w.requires_grad_()
        squares = (leaf * leaf).sum()
        checkpoint.load_into(tmp_path / "a.pt", {key: leaf})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.backward()


def test_into_tensors_of_inference_mode(tmp_path):
    torch.save({"w": torch.arange(3.0)}, tmp_path / "a.pt")
    with torch.inference_mode():
        w = torch.zeros(3)
        checkpoint.load_into(tmp_path / "a.pt", {"w": w})
    assert w.tolist() == [0, 1, 2]


def refused(path, state):
    """What is said of a state dict, of which nothing is loaded."""
    first = torch.zeros(3)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_into(path, {"first": first, **state})
    assert not first.any()
    return str(caught.value)


def test_into_a_single_element_of_many(tmp_path):
    saved = {"a": torch.arange(3, 4), "tied": torch.arange(3, 4)}
    torch.save(saved, tmp_path / "a.pt")
    column = torch.zeros(4, 2, dtype=torch.int64)[:, 1]
    checkpoint.load_into(tmp_path / "a.pt", {"a": column[1:2], "tied": column[1:2]})
    assert column.tolist() == [0, 3, 0, 0]


def test_memory_that_cannot_be_loaded_into(tmp_path):
    torch.save({"first": torch.ones(3), "w": torch.ones(2, 3)}, tmp_path / "a.pt")
    masked = torch.masked.masked_tensor(torch.zeros(2, 3), torch.eye(2, 3) > 0)
    targets = {
        "no memory": torch.zeros(2, 3, device="meta"),
        "not dense": torch.eye(2, 3).to_sparse(),
        "not dense.\n  expected: a tensor of shape (2, 3)\n  got:      MaskedTensor": masked,
        "share their memory": torch.zeros(1, 3).expand(2, 3),
    }
    for message, target in targets.items():
        said = refused(tmp_path / "a.pt", {"w": target})
        assert message in said
        assert "where:    w" in said


def test_memory_that_is_loaded_into_twice_holds_both_values_or_it_is_said(tmp_path):
    """Tied weights from a checkpoint of weights that were not tied, and a buffer beside views of it."""
    w, live = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)
    stored = {"w": w, "same": w, "row": w[1], "left": w[:, :2], "right": w[:, 2], "other": w + 1, "wrong": w[:, 1] + 1}
    torch.save({key: value.clone() for key, value in stored.items()}, tmp_path / "a.pt")
    for kept in (
        {"w": live, "same": live},
        {"row": live[1], "w": live, "right": live[:, 2]},
        {"left": live[:, :2], "right": live[:, 2]},
    ):
        live.zero_()
        checkpoint.load_into(tmp_path / "a.pt", kept)
        assert torch.equal(live, w)
    for refused in ({"w": live, "other": live}, {"w": live, "wrong": live[:, 1]}, {"other": live, "row": live[1]}):
        first, second = refused
        with pytest.raises(CheckpointError, match=f"share memory.*(\n.*)*{first}, {second}"):
            checkpoint.load_into(tmp_path / "a.pt", refused)
    checkpoint.load_into(tmp_path / "a.pt", {"w": torch.zeros(2, 3), "other": torch.zeros(2, 3)})


def test_containers_that_hold_themselves_are_refused(tmp_path):
    from torchshard import state_dict

    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    state = {"w": torch.zeros(2), "list": [torch.zeros(1)]}
    state["list"].append(state)
    with pytest.raises(CheckpointError, match="hold themselves"):
        checkpoint.load_into(tmp_path / "a.pt", state)
    for convert in (state_dict.to_full, state_dict.to_torch, state_dict.to_sharded_tensor):
        with pytest.raises(ShardingError, match="hold themselves"):
            convert(state)


def test_a_module_is_no_state_dict(tmp_path):
    model = torch.nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="is no state dict") as caught:
        checkpoint.load_into(tmp_path / "a.pt", model)
    assert caught.value.got == "a Linear"
    assert "state_dict()" in caught.value.fix


def test_into_conjugated_and_negated_views(tmp_path):
    values = torch.randn(4, dtype=torch.complex64)
    torch.save({"conj": values, "neg": values.real.clone()}, tmp_path / "a.pt")
    conj = torch.zeros(4, dtype=torch.complex64).conj()
    neg = torch.zeros(4, dtype=torch.complex64).conj().imag
    checkpoint.load_into(tmp_path / "a.pt", {"conj": conj, "neg": neg})
    assert torch.equal(conj, values)
    assert torch.equal(neg, values.real)


def damaged(path, key, piece=0):
    """One bit of a tensor's data is another in the file."""
    with checkpoint.open(path) as opened:
        place = opened[key].pieces[piece].place()
    file = place.extent.files.root / place.extent.file
    body = bytearray(file.read_bytes())
    body[place.start + place.extent.nbytes - 2] ^= 4
    file.write_bytes(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_what_is_read_whole_is_compared_with_its_checksum(tmp_path, to, dtype):
    """Large enough to be read in several blocks; in memory that is in order and that is not; pieces by columns."""
    state = {"w": torch.arange(5e6).reshape(1000, 5000), "pair": (torch.ones(3), 1)}
    torch.save(state, tmp_path / "a.pt")
    cut = {"mesh": (3,), "placements": {"w": "S(1)"}} if to == "dcp" else {}
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "ck", to=to, **cut)
    for w in (torch.zeros(1000, 5000, dtype=dtype), torch.zeros(5000, 1000, dtype=dtype).t()):
        checkpoint.load_into(tmp_path / "ck", {"w": w})
        assert torch.equal(w, state["w"].to(dtype))
    damaged(tmp_path / "ck", "w", piece=2 if cut else 0)
    for w in (torch.zeros(1000, 5000, dtype=dtype), torch.zeros(5000, 1000, dtype=dtype).t()):
        with pytest.raises(CheckpointError, match=r"data do not match its checksum[^$]*: w"):
            checkpoint.load_into(tmp_path / "ck", {"w": w})
    with checkpoint.open(tmp_path / "ck") as opened:
        assert opened["w"][:2, :3].tolist() == [[0, 1, 2], [5000, 5001, 5002]]
        with pytest.raises(CheckpointError, match="do not match its checksum"):
            opened["w"].numpy()
    for look in (lambda path: checkpoint.inspect(path, stats=True), lambda path: checkpoint.diff(path, path)):
        with pytest.raises(CheckpointError, match="do not match its checksum"):
            look(tmp_path / "ck")


def load_rows(rank, world, path, verify):
    import torchshard

    mesh = torchshard.init_device_mesh("cpu", (world,))
    w = torchshard.distribute_tensor(torch.zeros(6, 4), mesh, [torchshard.Shard(0)])
    try:
        checkpoint.load_into(path, {"w": w}, verify=verify)
    except CheckpointError as error:
        return error.what, w.to_local().tolist()
    return None, w.to_local().tolist()


def test_parts_of_pieces_are_compared_where_that_is_asked_for(tmp_path):
    torch.save({"w": torch.arange(24.0).reshape(6, 4)}, tmp_path / "a.pt")
    assert run_ranks(2, load_rows, str(tmp_path / "a.pt"), True)[1] == (
        None,
        torch.arange(12.0, 24).view(3, 4).tolist(),
    )
    damaged(tmp_path / "a.pt", "w")
    assert [what for what, _ in run_ranks(2, load_rows, str(tmp_path / "a.pt"), False)] == [None, None]
    for what, rows in run_ranks(2, load_rows, str(tmp_path / "a.pt"), True):
        assert "do not match its checksum" in what
        assert rows == torch.zeros(3, 4).tolist()


@pytest.mark.parametrize("form", ["dcp", "torch", "legacy"])
def test_tuples_with_tensors(tmp_path, form):
    """One object in a folder, entries of their own in a file: tensors are filled in place, or all is made anew."""
    w = torch.arange(3.0)
    state = {"pair": (w, 5), "groups": [{"deep": (1, [(w + 1,), 2], {"x": w + 2})}], "betas": (0.5, 0.75)}
    if form == "dcp":
        sources.make(tmp_path / "ck", 1, sources.save, state)
    else:
        torch.save(state, tmp_path / "ck", _use_new_zipfile_serialization=form == "torch")
    a, b, c = (torch.zeros(3, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16))
    target = {"pair": (a, 0), "groups": [{"deep": (0, [(b,), 0], {"x": c})}], "betas": None}
    checkpoint.load_into(tmp_path / "ck", target)
    assert target["pair"][0] is a
    assert target["groups"][0]["deep"][1][0][0] is b
    assert target["groups"][0]["deep"][2]["x"] is c
    assert (a.tolist(), target["pair"][1]) == ([0, 1, 2], 5)
    assert (b.tolist(), c.tolist(), target["betas"]) == ([1, 2, 3], [2, 3, 4], (0.5, 0.75))
    assert target["groups"][0]["deep"][0] == 1
    assert target["groups"][0]["deep"][1][1] == 2
    empty = {"pair": None, "groups": [{"deep": None}]}
    checkpoint.load_into(tmp_path / "ck", empty)
    sources.assert_same_tree(empty["pair"], state["pair"])
    sources.assert_same_tree(empty["groups"][0]["deep"][2], {"x": w + 2})
    for wrong in ((torch.zeros(4), 0), (torch.zeros(3), 0, torch.zeros(1)), (5, torch.zeros(3))):
        with pytest.raises(CheckpointError, match=r"another shape|lacks a key|unlike the state dict"):
            checkpoint.load_into(tmp_path / "ck", {"pair": wrong})


def with_parts(x, shape, there, here, sizes):
    x.global_shape, x.global_offsets, x.local_offsets, x.local_sizes = shape, there, here, sizes
    return x


def test_into_tensors_that_say_which_parts_they_hold(tmp_path):
    """The four attributes of torch's CheckpointableTensor; in older versions of torch, too."""
    whole = torch.arange(24.0).view(6, 4)
    torch.save({"w": whole, "v": whole}, tmp_path / "a.pt")
    padded = with_parts(torch.full((4, 4), -1.0), (6, 4), ((4, 0), (1, 0)), ((0, 0), (2, 0)), ((2, 4), (1, 4)))
    none = with_parts(torch.zeros(0, 4), (6, 4), (), (), ())
    checkpoint.load_into(tmp_path / "a.pt", {"w": padded, "v": none})
    assert torch.equal(padded, torch.cat([whole[4:], whole[1:2], torch.full((1, 4), -1.0)]))

    other = with_parts(torch.zeros(2, 4), (5, 4), ((0, 0),), ((0, 0),), ((2, 4),))
    assert "another shape" in refused(tmp_path / "a.pt", {"w": other, "v": whole.clone()})
    for there, here, sizes in (
        (((5, 0),), ((0, 0),), ((2, 4),)),
        (((0, 0),), ((1, 0),), ((2, 4),)),
        (((0, 0),), (), ((2, 4),)),
        (((0,),), ((0, 0),), ((2, 4),)),
    ):
        wrong = with_parts(torch.zeros(2, 4), (6, 4), there, here, sizes)
        assert "parts which it cannot hold" in refused(tmp_path / "a.pt", {"w": wrong, "v": whole.clone()})
