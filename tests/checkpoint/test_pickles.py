"""Nothing pickled is ever run: hostile pickles stay inert and are refused with the name of what they wanted."""

import builtins
import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.sources import python
from torchshard import checkpoint
from torchshard.checkpoint.formats.dcp import ALLOWED as METADATA
from torchshard.checkpoint.pickles.alike import AlikeMachine
from torchshard.checkpoint.pickles.inert import Global, Record, RefusedGlobal, record
from torchshard.checkpoint.pickles.sharded_values import ALLOWED as SHARDED
from torchshard.checkpoint.pickles.torch_values import ALLOWED
from torchshard.checkpoint.pickles.unpickle import load
from torchshard.errors import CheckpointError


class Calls:
    """Pickles as a call of anything."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


MARK = "/tmp/torchshard-was-here"  # no hostile pickle may ever make it

NAMED = {
    "os.system": pickle.dumps(Calls(os.system, f"touch {MARK}")),
    "os.system in text protocol": f"cposix\nsystem\n(Vtouch {MARK}\ntR.".encode(),
    "eval": pickle.dumps(Calls(eval, f"open({MARK!r}, 'w')")),
    "eval, protocol 2": pickle.dumps(Calls(eval, "1"), protocol=2),
    "exec": pickle.dumps(Calls(exec, "import os")),
    "subprocess": pickle.dumps(Calls(subprocess.Popen, ["touch", MARK])),
    "getattr chain": pickle.dumps(Calls(getattr, Calls(__import__, "os"), "system")),
    "getattr of an allowed class": b"cbuiltins\ngetattr\n(ctorch\nSize\nV__init_subclass__\ntR.",
    "nested reduce": pickle.dumps([Calls(list, [Calls(os.system, f"touch {MARK}")])]),
    "reduce in a key": pickle.dumps({Calls(str, "x"): 1}),
    "apply": b"c__builtin__\napply\n(cos\nsystem\n(Vls\nttR.",
    "import": pickle.dumps(Calls(builtins.__import__, "os")),
    "dotted": b"\x80\x04\x8c\x05torch\x8c\x0bSize.__new__\x93.",
    "copyreg": b"ccopy_reg\n_reconstructor\n(c__builtin__\nobject\nc__builtin__\nobject\nNtR.",
    "functools.partial": pickle.dumps(Calls(__import__("functools").partial, print)),
    "torch's loader": b"ctorch.storage\n_load_from_bytes\n(Vx\ntR.",
    "a sibling of an allowed name": b"ctorch._utils\n_rebuild_wrapper_subclass\n)R.",
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("allowed", [METADATA, ALLOWED, SHARDED], ids=["metadata", "values", "sharded"])
def test_names_that_are_not_allowed(name, allowed):
    with pytest.raises(CheckpointError) as caught:
        load(NAMED[name], allowed, "the file")
    assert "the file" in str(caught.value)
    assert not os.path.exists(MARK)
    if isinstance(caught.value, RefusedGlobal):
        assert caught.value.name in str(caught.value)


def test_a_member_of_torchs_enumeration_may_be_named_through_getattr():
    """As pickles of Python before 3.11.4 do."""
    module = "torch.distributed.checkpoint.metadata"
    program = "cbuiltins\ngetattr\n(c{}\n{}\nVTORCH_CONTIGUOUS_FORMAT\ntR."
    value = load(program.format(module, "_MEM_FORMAT_ENCODING").encode(), METADATA, "x")
    assert repr(value) == f"{module}._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT"
    with pytest.raises(CheckpointError, match="takes an attribute"):
        load(program.format(module, "Metadata").encode(), METADATA, "x")


def test_the_name_is_said():
    with pytest.raises(RefusedGlobal, match=r"posix\.system, which is not plain data and is never run"):
        load(NAMED["os.system"], METADATA, "x")
    with pytest.raises(RefusedGlobal, match=r"builtins\.eval"):
        load(NAMED["eval, protocol 2"], METADATA, "x")
    copy = pickle.loads(pickle.dumps(RefusedGlobal("a.b", "file", "mend it")))
    assert (copy.name, str(copy.where), copy.fix) == ("a.b", "file", "mend it")


def nested_tuples(depth):
    return b"\x80\x04)" + b"\x85" * depth + b"."


def laughs(depth, kind):
    """A container of twice a container of twice a container ..."""
    value = kind([])
    for _ in range(depth):
        value = kind([("a", value), ("b", value)]) if kind is dict else kind([value, value])
    return pickle.dumps(value, protocol=2)[2:-1]


STRANGE = {
    "build on a class": b"\x80\x02ctorch\nSize\n}(V__new__\nVx\nub.",
    "build on a list": b"\x80\x02]}b.",
    "build twice": b"\x80\x02ctorch\ndevice\n)\x81}b}b.",
    "call of text": b"Vx\n)R.",
    "call of a type": b"\x80\x02ctorch\nfloat32\n)R.",
    "call without a tuple": b"\x80\x02ctorch\nSize\n]R.",
    "size of text": b"\x80\x02ctorch\nSize\n(Vabc\ntR.",
    "size of huge numbers": b"\x80\x02ctorch\nSize\n(\x8a\x10" + b"\xff" * 15 + b"\x7f\x85tR.",
    "negative size": b"\x80\x02ctorch\nSize\n(J\xff\xff\xff\xff\x85tR.",
    "append to a tuple": b")K\x01a.",
    "pairs into a list": b"](K\x01K\x02u.",
    "half a pair": b"}(K\x01u.",
    "a list as a key": b"}]K\x01s.",
    "a deep tuple as a key": b"}" + nested_tuples(100_000)[2:-1] + b"Ns.",
    "a tuple of tuples as a key": b"})\x85\x85Ns.",
    "unknown memo": b"\x80\x02j\xff\xff\xff\x7f.",
    "length beyond the end": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f" + b"x.",
    "negative length": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "bytearray beyond the end": b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f" + b"x.",
    "empty": b"",
    "no stop": b"\x80\x02N",
    "stop at once": b".",
    "pop of nothing": b"0.",
    "mark without end": b"(K\x01t" * 2 + b"t.",
    "tuple of nothing": b"\x86.",
    "tuple3 of two": b"NN\x87.",
    "unknown opcode": b"\xff.",
    "persistent id": b"\x80\x02NQ.",
    "text of Python 1": b"S'x'\n.",
    "a parameter of nothing": b"ctorch.nn.parameter\nParameter\n)\x81(K\x01K\x02K\x03tb.",
    "an ordered dict of numbers": b"ccollections\nOrderedDict\n](](K\x01K\x02ee\x85R.",
    "instance": b"(cos\nsystem\no.",
    "inst": b"(ios\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "newobj_ex": b"\x80\x04)}\x92.",
    "buffer": b"\x80\x05\x97.",
    "digits": b"I" + b"9" * 100_000 + b"\n.",
    "float": b"Fnope\n.",
    "not utf-8": b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
    "global without a name": b"cos",
    "global from numbers": b"\x80\x04K\x01K\x02\x93.",
    "global not ascii": b"c\xff\n\xff\n.",
}


@pytest.mark.parametrize("name", STRANGE)
def test_programs_that_make_no_sense(name):
    with pytest.raises(CheckpointError, match=r"damaged|not plain data|not a list of sizes|takes an attribute"):
        load(STRANGE[name], ALLOWED, "the file")


def test_bombs_are_harmless():
    deep = load(nested_tuples(200_000), ALLOWED, "x")
    assert isinstance(deep, tuple)
    del deep
    assert load(b"\x80\x02" + laughs(100, list) + b".", ALLOWED, "x")
    memo = b"\x80\x02N" + b"r\xff\xff\xff\x7f" + b"."  # a memo slot in the billions
    assert load(memo, ALLOWED, "x") is None
    assert load(b"\x80\x04\x95" + b"\xff" * 8 + b"N.", ALLOWED, "x") is None  # a frame longer than the world


def test_a_value_that_is_copied_over_and_over_is_stopped():
    text = b"X" + struct.pack("<I", 2**20) + b"a" * 2**20
    copies = b"(c_codecs\nencode\nq\x01" + text + b"q\x02Vlatin1\nq\x03\x86R" + b"h\x01h\x02h\x03\x86R" * 100 + b"t."
    with pytest.raises(CheckpointError, match="makes far more data than it holds"):
        load(b"\x80\x02" + copies, ALLOWED, "x")


def as_torch_file(path, data):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")


HARMLESS = {
    "lists": laughs(60, list),
    "tuples": laughs(60, tuple),
    "itself": b"]q\x00h\x00a",
    "itself in a tuple": b"]q\x00h\x00\x85a",
}
ENDLESS = {
    "dicts": laughs(60, dict),
    "deep list": b"]" * 5000 + b"a" * 4999,
    "deep dict": b"}Va\n" * 5000 + b"N" + b"s" * 5000,
    "deep tuple": b")" + b"\x85" * 5000,
}


@pytest.mark.parametrize("to", ["torch", "safetensors"])
@pytest.mark.parametrize("name", [*HARMLESS, *ENDLESS])
@pytest.mark.filterwarnings("ignore:safetensors holds tensors only")
def test_containers_that_refer_to_each_other_end_soon(tmp_path, name, to):
    as_torch_file(tmp_path / "a.pt", b"\x80\x02}Vx\n" + {**HARMLESS, **ENDLESS}[name] + b"s.")
    start = time.process_time()
    if name in HARMLESS:
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "out", to=to)
        assert (tmp_path / "out").stat().st_size < 20_000
    else:
        with pytest.raises(CheckpointError, match=r"nested too deep|over and over"):
            checkpoint.convert(tmp_path / "a.pt", tmp_path / "out", to=to)
    assert time.process_time() - start < 5


def test_comparing_containers_that_refer_to_each_other_ends_soon(tmp_path):
    for name in ("x_rank0.pt", "x_rank1.pt"):
        as_torch_file(tmp_path / name, b"\x80\x02}Vx\n" + laughs(60, list) + b"s.")
    start = time.process_time()
    assert not checkpoint.diff(tmp_path / "x_rank0.pt", tmp_path / "x_rank1.pt")
    assert list(checkpoint.open(tmp_path)) == ["x"]
    assert time.process_time() - start < 5


def pairs_of_one_hash(count):
    """The hash of a tuple, backwards: for each first number the second that makes the same."""
    p1, p2, p5, full = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64
    backwards = [pow(prime, -1, full) for prime in (p1, p2)]
    wanted = 123456789 * backwards[0] % full
    wanted = (wanted >> 31 | wanted << 33) % full
    found, first = [], 0
    while len(found) < count:
        first += 1
        lane = (p5 + first * p2) % full
        second = (wanted - (lane << 31 | lane >> 33) % full * p1) * backwards[1] % full
        second -= full * (second >> 63)
        if abs(second) < 2**60:
            found.append((first, second))
    assert len(set(map(hash, found))) == 1
    return found


@pytest.mark.parametrize("kind", ["dict", "set", "call of set", "tuples", "pairs", "complex"])
def test_keys_that_share_one_hash_are_stopped(kind):
    """Each that is added to a dict would be compared with all before."""
    numbers = [b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") for i in range(1, 50_000)]

    def long(number):
        return b"\x8a\x08" + number.to_bytes(8, "little", signed=True)

    def number(i):
        return b"h\0G" + struct.pack(">d", -1000003 * i) + b"G" + struct.pack(">d", i) + b"\x86RN"

    program = {
        "dict": b"}(" + b"N".join(numbers) + b"Nu.",
        "set": b"\x8f(" + b"".join(numbers) + b"\x90.",
        "call of set": b"c__builtin__\nset\n](" + b"".join(numbers) + b"e\x85R.",
        "tuples": b"}(" + b"\x85N".join(numbers) + b"\x85Nu.",
        "pairs": b"}(" + b"".join([b"".join(map(long, pair)) + b"\x86N" for pair in pairs_of_one_hash(20_000)]) + b"u.",
        "complex": b"c__builtin__\ncomplex\nq\0}(" + b"".join(map(number, range(1, 50_000))) + b"u.",
    }[kind]
    start = time.process_time()
    with pytest.raises(CheckpointError, match="share one hash"):
        load(b"\x80\x04" + program, ALLOWED, "x")
    assert time.process_time() - start < 5


def test_a_few_keys_may_share_a_hash():
    numbers = [i * (2**61 - 1) for i in range(100)]
    assert load(pickle.dumps([dict.fromkeys(numbers), set(numbers)] * 3, 2), ALLOWED, "x")[0].keys() == set(numbers)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60))
def test_random_programs(data):
    for allowed in (METADATA, ALLOWED):
        with contextlib.suppress(CheckpointError):
            load(data, allowed, "x")


OPCODES = [
    b"N", b"\x88", b")", b"]", b"}", b"(", b"t", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u", b"l", b"d", b"0",
    b"1", b"2", b"\x94", b"h\x00", b"h\x01", b"q\x00", b"K\x05", b"J\xff\xff\xff\xff", b"Vlatin1\n", b"\x8c\x01a",
    b"\x8f", b"\x90", b"R", b"\x81", b"b", b"Q", b"\x93", b"G" + b"\x7f" * 8, b"C\x01x",
    *[f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n".encode() for name in {**METADATA, **ALLOWED}],
]  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(OPCODES), max_size=40))
def test_random_programs_of_allowed_parts(parts):
    for allowed in (METADATA, ALLOWED):
        with contextlib.suppress(CheckpointError):
            load(b"".join(parts) + b".", allowed, "x", persistent=lambda pid: pid)


def test_deep_pickles_do_not_crash_the_interpreter(tmp_path):
    """In a process of its own, as a crash would take the tests along."""
    code = """
import sys
from torchshard.checkpoint.pickles.unpickle import load
from torchshard.checkpoint.pickles.torch_values import ALLOWED
from torchshard.errors import CheckpointError
deep = b"\\x80\\x04)" + b"\\x85" * 300_000
value = load(deep + b".", ALLOWED, "x")
del value
for tail in (b"}\\x940h\\x00", b"\\x94}h\\x00Ns.", b"\\x85R."):
    try:
        load(deep + tail, ALLOWED, "x")
    except CheckpointError as error:
        assert len(str(error)) < 1000
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_allowed_names_are_inert():
    """No value of the tables is a class or function that the pickle could reach further from."""
    for table in (METADATA, ALLOWED):
        for name, value in table.items():
            assert type(value) is Global
            assert value.name == name
    assert "os" in sys.modules
    for table in (METADATA, ALLOWED):
        assert not [name for name in table if name.startswith(("os", "posix", "subprocess", "builtins.eval"))]


class Thing:
    """Has attributes, or none, or is built of a tuple."""

    def __init__(self, state):
        self.__dict__.update(state)


class Odd(Thing):
    def __getstate__(self):
        return tuple(self.__dict__.items())

    def __setstate__(self, state):
        self.__dict__.update(state)


def plain(value):
    """With Records as tuples, to be compared."""
    if isinstance(value, Record):
        return value.name, value.args, plain(value.state)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


KEYS = st.sampled_from("kl")
THINGS = st.recursive(
    st.integers(0, 3) | st.sampled_from(["a", "b"]) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(lambda kind, state: kind(state), st.sampled_from([Thing, Odd]), st.dictionaries(KEYS, inner))
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(THINGS, max_size=4), st.randoms(use_true_random=False), st.integers(2, 5))
def test_objects_that_are_spelled_alike_are_read_as_if_each_were_read(some, random, protocol):
    """Of some things many, copies of them and the same ones again, in one pickle."""
    chosen = [random.choice(some) for _ in range(20 if some else 0)]
    things = [thing if random.random() < 0.2 else pickle.loads(pickle.dumps(thing)) for thing in chosen]
    data = pickle.dumps({"things": things, "more": [(thing, i) for i, thing in enumerate(things)]}, protocol)
    allowed = {f"{__name__}.{kind.__name__}": record(f"{kind.__name__}") for kind in (Thing, Odd)}
    one, each = load(data, allowed, "x", machine=AlikeMachine), load(data, allowed, "x")
    assert plain(one) == plain(each)


def test_what_is_spelled_alike_is_one_object_and_costs_one_step():
    data = pickle.dumps([Thing({"k": [i % 3, {"l": 5}]}) for i in range(300)], 4)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 4)
    pickler.fast = True  # remembers nothing
    pickler.dump(pickle.loads(data))
    for spelled in (data, file.getvalue()):
        found = load(spelled, {f"{__name__}.Thing": record("T")}, "x", machine=AlikeMachine)
        assert [thing.state["k"][0] for thing in found] == [i % 3 for i in range(300)]
        assert len(set(found)) <= 4  # the first spells the names too


OBJECT = b"h\x00)\x81}\x8c\x01k"
BUILT = b"sb"
SPELLED = {
    "one in another": OBJECT * 10_000 + b"N" + BUILT * 10_000,
    "many that are short, and a few that are long": b"("
    + b"".join([OBJECT + b"\x8d" + struct.pack("<Q", 100_000 + i) + b"a" * (100_000 + i) + BUILT for i in range(8)])
    + (OBJECT + b"K\x00" + BUILT + b"".join([OBJECT + b"M" + struct.pack("<H", i) + BUILT for i in range(30)])) * 200
    + b"t",
}


@pytest.mark.parametrize("name", SPELLED)
def test_comparing_what_is_spelled_costs_what_the_pickle_is_long(name):
    data = b"\x80\x04cx\nT\n\x940" + SPELLED[name] + b"."
    tracemalloc.start()
    try:
        start = time.process_time()
        load(data, {"x.T": record("T")}, "x", machine=AlikeMachine)
        assert time.process_time() - start < 10
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("again", [b"q\x00", b"r\x00\x00\x00\x00", b"p0\n"])
def test_where_a_number_is_given_again_nothing_is_taken_for_alike(again):
    thing = b"h\x01)\x81}\x8c\x01kh\x00sb"
    data = b"](\x8c\x01aq\x000cx\nT\nq\x010" + thing + b"\x8c\x01b" + again + b"0" + thing + b"e."
    found = load(data, {"x.T": record("T")}, "x", machine=AlikeMachine)
    assert [thing.state for thing in found] == [{"k": "a"}, {"k": "b"}]
