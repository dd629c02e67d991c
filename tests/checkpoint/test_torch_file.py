"""torch.save files: read without torch, and written so that torch loads them."""

import collections
import io
import pickle
import struct
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint import sources
from tests.checkpoint.sources import assert_same_tree, bytes_of, flat
from torchshard import checkpoint
from torchshard.errors import CheckpointError
from torchshard.keys import KeyRules, rename


def again(tmp_path, state, **kwargs):
    """Save, convert to the same format, load."""
    torch.save(state, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", overwrite=True, verify=True, **kwargs)
    return torch.load(tmp_path / "b.pt", weights_only=True)


def test_nested_state_with_plain_data_survives(tmp_path):
    state = sources.plain()
    expected = torch.load(io.BytesIO(saved(state)), weights_only=True)
    assert_same_tree(again(tmp_path, state), expected)


def parameters():
    """Tensors that ask for gradients, parameters, and views of one's memory."""
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    return {
        "weight": weight, "tied": weight, "row": weight.data[1], "alike": torch.nn.Parameter(weight.data),
        "frozen": torch.nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True), "eight": torch.nn.Parameter(torch.ones(2).to(torch.float8_e5m2)),
        "inside": ({1}, [{"deep": torch.nn.Parameter(torch.ones(1))}]), "plain": torch.ones(2),
    }  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
def test_parameters_and_requires_grad_survive(tmp_path, zipped):
    state = parameters()
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", verify=True)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert_same_tree(loaded, state)
    assert loaded["tied"] is loaded["weight"]
    for key in ("row", "alike"):
        assert loaded[key].untyped_storage().data_ptr() == loaded["weight"].untyped_storage().data_ptr()


def test_parameters_stay_so_when_cast_renamed_and_in_parts(tmp_path):
    state = parameters()
    torch.save(state, tmp_path / "a.pt")
    edits = {"dtype": "bfloat16", "select": ["weight", "frozen", "leaf"], "rename": lambda key: f"model.{key}"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", **edits)
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "parts", to="torch", shard_size=20)
        checkpoint.convert(tmp_path / "parts", tmp_path / "c.pt", to="torch")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    expected = {
        "weight": torch.nn.Parameter(state["weight"].data.bfloat16()), "frozen": state["frozen"],
        "leaf": torch.ones(2).bfloat16().requires_grad_(),
    }  # fmt: skip
    assert_same_tree({key.removeprefix("model."): value for key, value in loaded.items()}, expected)
    for key, value in torch.load(tmp_path / "c.pt", weights_only=True).items():
        assert_same_tree(value, state[key] if key in state else flat(state)[key])


def test_what_torch_cannot_load_as_it_was_saved_is_written_without_gradients(tmp_path):
    x = torch.ones(2).to(torch.float8_e5m2).requires_grad_()
    assert_same_tree(again(tmp_path, {"x": x}), {"x": x.detach()})


def test_a_checkpoint_folder_holds_plain_tensors(tmp_path):
    state = {key: value for key, value in parameters().items() if key in ("weight", "leaf")}
    torch.save(state, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "ck", to="dcp")
    checkpoint.convert(tmp_path / "ck", tmp_path / "b.pt", to="torch")
    expected = {key: value.detach() for key, value in state.items()}
    assert_same_tree(torch.load(tmp_path / "b.pt", weights_only=True), expected)
    for archive in (tmp_path / "ck").glob("*.distcp"):
        assert b"_rebuild_parameter" not in archive.read_bytes()


def saved(state):
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def test_a_modules_state_dict_keeps_its_versions(tmp_path):
    state = torch.nn.BatchNorm1d(3).state_dict()
    loaded = again(tmp_path, state)
    assert type(loaded) is collections.OrderedDict
    assert loaded._metadata == state._metadata
    torch.nn.BatchNorm1d(3).load_state_dict(loaded)


def test_tied_weights_stay_tied(tmp_path):
    weight = torch.arange(6.0)
    loaded = again(tmp_path, {"a": weight, "b": weight.detach(), "c": weight[:3]})
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert loaded["c"].tolist() == [0.0, 1.0, 2.0]
    assert loaded["a"].data_ptr() == loaded["c"].data_ptr()
    assert (tmp_path / "b.pt").stat().st_size < (tmp_path / "a.pt").stat().st_size + 400


VIEWS = {
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[3:7],
    "columns": lambda x: x[:, 2:5],
    "every third": lambda x: x[::3, 1::2],
    "diagonal": lambda x: x.diagonal(),
    "expanded": lambda x: x[:1].expand(4, 10),
    "expanded inside": lambda x: x[:, 0].unsqueeze(1).expand(20, 3),
    "permuted": lambda x: x.reshape(2, 10, 5, 2).permute(3, 1, 0, 2),
    "one": lambda x: x[4, 4],
    "overlapping": lambda x: x.as_strided((5, 4), (1, 1)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("memory", [2**20, 2**26])
def test_views_are_read_through_their_strides(tmp_path, name, memory):
    view = VIEWS[name](torch.arange(200, dtype=torch.float64).reshape(20, 10))
    torch.save({"v": view}, tmp_path / "v.pt")
    entry = checkpoint.open(tmp_path / "v.pt")["v"]
    assert entry.numpy().tobytes() == bytes_of(view)
    loaded = again(tmp_path, {"v": view}, max_memory=memory)["v"]
    assert bytes_of(loaded) == bytes_of(view)
    assert loaded.is_contiguous()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_views_that_overlap_stay_views_of_one_storage(tmp_path, dtype):
    x = torch.arange(200, dtype=torch.float32).reshape(20, 10)
    apart = {"first": torch.arange(10)[:3], "last": torch.arange(10)[6:]}
    state = {name: view(x) for name, view in VIEWS.items()} | {"x": x, "apart": apart, "inside": ({1}, x[2:5, 1])}
    loaded = again(tmp_path, state, dtype=dtype)
    for name in (*VIEWS, "x"):
        assert torch.equal(loaded[name], state[name].to(loaded[name].dtype)), name
        assert loaded[name].stride() == state[name].stride()
        assert loaded[name].untyped_storage().data_ptr() == loaded["x"].untyped_storage().data_ptr()
    assert loaded["apart"]["last"].untyped_storage().nbytes() == 4 * 8
    if dtype is None:
        assert loaded["inside"][1].untyped_storage().data_ptr() == loaded["x"].untyped_storage().data_ptr()


def test_where_memory_cannot_be_shared_it_is_said_once(tmp_path):
    weight = torch.arange(60.0).reshape(6, 10)
    torch.save({"w": weight, "tied": weight, "rows": weight[3:], "other": torch.ones(2)}, tmp_path / "a.pt")
    for to, shard_size in (("safetensors", None), ("dcp", None), ("torch", 250)):
        with pytest.warns(UserWarning, match="share memory") as caught:
            checkpoint.convert(tmp_path / "a.pt", tmp_path / f"out.{to}", to=to, shard_size=shard_size, verify=True)
        assert [str(w.message) for w in caught] == [
            "Tensors that share memory in the source are written apart: w and tied and rows"
        ]
        with checkpoint.open(tmp_path / f"out.{to}") as ck:
            assert ck["tied"].numpy().tolist() == weight.tolist()
            assert ck["rows"].numpy().tolist() == weight[3:].tolist()


def test_a_large_transposed_tensor_in_little_memory(tmp_path):
    matrix = torch.arange(3_000_000, dtype=torch.int32).reshape(1500, 2000)
    assert torch.equal(again(tmp_path, {"w": matrix.t()}, max_memory=2**20)["w"], matrix.t())


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_strides(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    stride = [data.draw(st.integers(0, 7)) for _ in shape]
    offset = data.draw(st.integers(0, 3))
    view = torch.arange(200, dtype=torch.int16).as_strided(shape, stride, offset)
    path = tmp_path_factory.mktemp("strides") / "v.pt"
    torch.save({"v": view}, path)
    assert checkpoint.open(path)["v"].numpy().tolist() == view.tolist()


def test_lists_and_tuples_that_hold_no_tensor_are_one_entry(tmp_path):
    state = {"a": [1, [2, (3,)]], "b": (1, [torch.ones(1)]), "c": [{"d": 1}], "e": {}, "f": []}
    torch.save(state, tmp_path / "a.pt")
    ck = checkpoint.open(tmp_path / "a.pt")
    assert set(ck) == {"a", "b.0", "b.1.0", "c.0.d", "e", "f"}
    assert ck["a"].value() == [1, [2, (3,)]]
    assert ck.keys() == flat(state).keys() | {"e", "f"}


KEYS = [
    tuple(range(20)), (*range(19), 20), 2**70, 2**70 + 1, 2**1900, 2**1900 + 1, b"x" * 200 + b"1", b"x" * 200 + b"2",
    ("a, b",), ("a", "b"), ("a" * 200, 1), ("a" * 200, 2), (1,), (None, 1.5, True), torch.float16, torch.float32,
    torch.Size([2, 3]), -1.5, True, None, 1j, (2**70, 1), (2**70 + 1, 1), ("'", '"'), (b"a",), (torch.bfloat16, 1),
]  # fmt: skip


def test_keys_that_are_not_text_have_names_of_their_own(tmp_path):
    state = {"x": {key: torch.full((1,), i) for i, key in enumerate(KEYS)}}
    loaded = again(tmp_path, state)
    assert_same_tree(loaded, state)
    with checkpoint.open(tmp_path / "a.pt") as ck:
        assert [ck[key].numpy().tolist() for key in ck] == [[i] for i in range(len(KEYS))]
        assert set(ck) == {f"x.{key}" for key in KEYS}
    torch.save({2**20_000: torch.ones(1), 2**20_000 + 1: torch.ones(2)}, tmp_path / "long.pt")
    assert [entry.shape for entry in checkpoint.open(tmp_path / "long.pt").values()] == [(1,), (2,)]


def test_an_empty_state_dict(tmp_path):
    assert again(tmp_path, {}) == {}
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "c.safetensors", to="safetensors")
    assert len(checkpoint.open(tmp_path / "c.safetensors")) == 0


def refused(tmp_path, state, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(state, tmp_path / "a.pt", **kwargs)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.open(tmp_path / "a.pt")
    assert "a.pt" in str(caught.value)
    return str(caught.value)


class Custom:
    pass


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor", "ignore:.*nested tensors")
def test_what_is_refused_is_named(tmp_path):
    assert "tests.checkpoint.test_torch_file.Custom" in refused(tmp_path, {"a": Custom()})
    assert "collections.defaultdict" in refused(tmp_path, {"a": collections.defaultdict(list)})
    assert "builtins.frozenset" in refused(tmp_path, {"a": frozenset([1])})
    assert "numpy" in refused(tmp_path, {"a": torch.ones(2).numpy()})
    for made, way in (
        (torch.eye(3).to_sparse(), "to_dense()"),
        (torch.nested.nested_tensor([torch.ones(2)]), "unbind()"),
        (torch.nn.Linear(2, 2), "state_dict()"),
        (torch.ones(2).numpy(), "from_numpy"),
    ):
        assert way in refused(tmp_path, {"a": made})
    assert "_rebuild_sparse_tensor" in refused(tmp_path, {"a": torch.eye(3).to_sparse()})
    assert "_rebuild_meta_tensor" in refused(tmp_path, {"a": torch.ones(2, device="meta")})
    assert "conjugated or negated" in refused(tmp_path, {"a": torch.ones(2, dtype=torch.complex64).conj()})
    assert "dequantize()" in refused(tmp_path, {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)})
    assert "tensor.view(torch.uint8)" in refused(tmp_path, {"a": torch.ones(2, dtype=torch.uint8).view(torch.bits8)})
    assert "holds no state dict" in refused(tmp_path, torch.ones(2))
    assert "same dotted name" in refused(tmp_path, {"a.b": 1, "a": {"b": 2}})
    torch.save({"a": {"b": torch.ones(2).untyped_storage()}}, tmp_path / "a.pt")
    for to, key in (("torch", "the key b"), ("dcp", "the key a.b")):
        with pytest.raises(CheckpointError, match=f"(?s)Storage.*{key}"):
            checkpoint.convert(tmp_path / "a.pt", tmp_path / "out", to=to)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_and_other_zips_are_told_apart(tmp_path):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "script.pt")
    with pytest.raises(CheckpointError, match=r"not one that torch\.save made"):
        checkpoint.open(tmp_path / "script.pt")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_numbers_of_half_precision(tmp_path):
    values = torch.tensor([[3 + 4j, 0], [0, -1]], dtype=torch.complex64).to(torch.complex32)
    torch.save({"x": values}, tmp_path / "a.pt")
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp", mesh=(2,), placements={"x": "S(1)"})
    checkpoint.convert(tmp_path / "dcp", tmp_path / "b.pt", to="torch")
    back = torch.load(tmp_path / "b.pt", weights_only=True)["x"]
    assert back.dtype == values.dtype
    assert torch.equal(back.view(torch.float16), values.view(torch.float16))
    (found,) = checkpoint.inspect(tmp_path / "b.pt", stats=True).as_dict()["entries"]
    assert (found["stats"]["max"], found["stats"]["mean"]) == (5.0, 1.5)


def test_the_milestones_of_a_schedule_stay_a_counter(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5])
    state = {"schedule": schedule.state_dict(), "pair": (collections.Counter("aab"), 1)}
    torch.save(state, tmp_path / "a.pt")
    rules = KeyRules([rename("schedule.(.*)", r"plan.\1")])
    checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", rename=rules)
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert_same_tree(back, {"pair": state["pair"], "plan": state["schedule"]})  # although none of it is a tensor
    schedule.load_state_dict(back["plan"])
    checkpoint.convert(tmp_path / "b.pt", tmp_path / "dcp", to="dcp")
    loaded = {"plan": schedule.state_dict() | {"gamma": 0, "milestones": collections.Counter({2: 0, 5: 0})}}
    checkpoint.load_into(tmp_path / "dcp", loaded)
    assert loaded["plan"]["milestones"] == state["schedule"]["milestones"]
    loaded = {"pair": ()}
    checkpoint.load_into(tmp_path / "a.pt", loaded)
    assert_same_tree(loaded["pair"], state["pair"])


def test_a_counter_that_was_taken_apart_is_one_when_it_is_merged_again(tmp_path):
    state = {"milestones": collections.Counter({2: 1, 5: 2, 9: 1}), "x": torch.ones(2)}
    torch.save(state, tmp_path / "a.pt")
    chosen = {"first": ["milestones.2", "x"], "second": ["milestones.5"], "third": ["milestones.9"]}
    for name, keys in chosen.items():
        checkpoint.convert(tmp_path / "a.pt", tmp_path / name, to="torch", select=keys)
    checkpoint.convert([tmp_path / name for name in chosen], tmp_path / "b.pt", to="torch")
    assert_same_tree(torch.load(tmp_path / "b.pt", weights_only=True), state)
    torch.save({"milestones": {5: 2, 9: 1}}, tmp_path / "plain.pt")
    checkpoint.convert([tmp_path / "first", tmp_path / "plain.pt"], tmp_path / "c.pt", to="torch")
    assert_same_tree(torch.load(tmp_path / "c.pt", weights_only=True), state | {"milestones": {2: 1, 5: 2, 9: 1}})


def test_what_python_2_and_torch_before_0_4_wrote(tmp_path):
    def tensor(name):
        storage = b"(U\x07storagectorch\nFloatStorage\nU\x01" + name + b"U\x03cpuK\x06NtQ"
        return b"ctorch._utils\n_rebuild_tensor\n(" + storage + b"K\x00K\x02K\x03\x86K\x03K\x01\x86tR"

    parameter = b"ctorch.nn.parameter\nParameter\n"
    values = {
        b"a": tensor(b"0"),
        b"b": parameter + b")\x81q\x01(" + tensor(b"1") + b"NN\x89\x89tb",
        b"c": parameter + tensor(b"0") + b"\x85R(\x88\x89Ntb",
        b"d": b"h\x01",
    }
    pairs = b"".join([b"](U\x01" + name + value + b"e" for name, value in values.items()])
    head = [b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", b"M\xe9\x03", b"}U\rlittle_endian\x88s"]
    pickles = [*head, b"ccollections\nOrderedDict\n](" + pairs + b"e\x85R", b"](U\x010U\x011e"]
    storages = [struct.pack("<q6f", 6, *range(i, i + 6)) for i in range(2)]
    (tmp_path / "a.pth").write_bytes(b"".join([*[b"\x80\x02" + p + b"." for p in pickles], *storages]))
    checkpoint.convert(tmp_path / "a.pth", tmp_path / "b.pt", to="torch")
    back, wanted = (torch.load(tmp_path / name, weights_only=True) for name in ("b.pt", "a.pth"))
    assert_same_tree(back, wanted)
    assert [(type(x), x.requires_grad) for x in back.values()] == [(type(x), x.requires_grad) for x in wanted.values()]
    assert [x.requires_grad for x in back.values()] == [False, False, True, False]


def test_an_integer_that_torch_does_not_load_is_refused(tmp_path):
    for bits in (2039, 2040):
        for value in (2**bits - 1, -(2**bits)):
            state = {"seed": value, "w": torch.ones(2)}
            torch.save(state, tmp_path / "a.pt")
            checkpoint.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp", overwrite=True)
            assert not checkpoint.diff(tmp_path / "a.pt", tmp_path / "dcp")
            if bits == 2039:
                checkpoint.convert(tmp_path / "dcp", tmp_path / "b.pt", to="torch", overwrite=True)
                assert torch.load(tmp_path / "b.pt", weights_only=True)["seed"] == value
                continue
            with pytest.raises(CheckpointError, match="weights_only=True") as caught:
                checkpoint.convert(tmp_path / "dcp", tmp_path / "c.pt", to="torch")
            assert "below the key seed" in str(caught.value)


def test_pickle_protocols(tmp_path):
    state = {"w": torch.arange(3), "x": [1, 2.5, None, True, "ü", b"b", (1, 2, 3, 4), 2**70, -7, {3: {"y"}}]}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
        ck = checkpoint.open(tmp_path / "a.pt")
        assert ck["w"].numpy().tolist() == [0, 1, 2]
        assert [ck[f"x.{i}"].value() for i in range(9)] == state["x"][:9]
        assert ck["x.9.3"].value() == {"y"}


# Without dots and digits, so that no two keys have the same dotted name.
words = st.text(st.characters(codec="utf-8", exclude_characters=".(-0123456789"))
plain = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
        st.complex_numbers(allow_nan=False), st.sets(st.integers() | st.text()), st.builds(bytearray, st.binary()),
        st.builds(torch.Size, st.lists(st.integers(0, 2**40), max_size=3)), st.sampled_from(sources.DTYPES),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(words | st.integers() | st.tuples(st.integers(), words), inner, max_size=4),
        st.dictionaries(words, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(words, st.integers(), max_size=3).map(collections.Counter),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(plain)
def test_any_plain_data_survives(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("plain")
    torch.save({"x": [value, value]}, folder / "a.pt")
    checkpoint.convert(folder / "a.pt", folder / "b.pt", to="torch")
    assert_same_tree(torch.load(folder / "b.pt", weights_only=True)["x"], [value, value])
