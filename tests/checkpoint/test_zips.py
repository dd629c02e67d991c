"""The zip frame: what is written is read by Python's zipfile, by torch and by ourselves; sizes over 4 GiB too."""

import io
import os
import zipfile
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchshard import checkpoint
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats.dcp_archives import Archives
from torchshard.checkpoint.formats.torch_file import of_tensor
from torchshard.checkpoint.moving.checksums import combine
from torchshard.checkpoint.pickles.write import View, dump
from torchshard.checkpoint.zips import ALIGNMENT, Archive, Stretch, around, frame_size, lay_out
from torchshard.errors import CheckpointError


def assemble(bodies):
    """An archive in memory."""
    records = lay_out([(name, len(body)) for name, body in bodies])
    out = io.BytesIO()
    *some, last = [body for _, body in bodies]
    for record, body in zip(records, some, strict=False):
        out.seek(record.payload)
        out.write(body)
    for offset, data in around(records, [*[None] * len(some), last], [zlib.crc32(body) for _, body in bodies]):
        out.seek(offset)
        out.write(data)
    assert len(out.getvalue()) == records[-1].end + frame_size(records)
    return out.getvalue()


def opened(tmp_path, data, start=0, length=None):
    (tmp_path / "a.zip").write_bytes(data)
    return Archive(Stretch(Files(tmp_path), "a.zip", start, length))


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=6))
def test_zipfile_reads_what_is_written(bodies):
    data = assemble([(f"data/{i}", body) for i, body in enumerate(bodies)])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert [archive.read(f"archive/data/{i}") for i in range(len(bodies))] == bodies


@pytest.mark.parametrize("start", [0, 64, 1000])
def test_payloads_are_aligned_and_found_anywhere_in_a_file(tmp_path, start):
    bodies = [("a", b"1" * 100), ("b/c", b""), ("d", b"\xff")]
    data = b"?" * start + assemble(bodies)
    archive = opened(tmp_path, data + b"tail", start, len(data) - start)
    for name, body in bodies:
        extent = archive.extent(name)
        assert (extent.offset - start) % ALIGNMENT == 0
        assert data[extent.offset :][: extent.nbytes] == body
        assert extent.crc32 == (zlib.crc32(body) or None)
        assert archive.read(name) == body


def test_many_members(tmp_path):
    bodies = [(f"data/{i}", b"") for i in range(70_000)]  # more than 16 bits count
    archive = opened(tmp_path, assemble(bodies))
    assert len(archive.members) == 70_000
    with zipfile.ZipFile(tmp_path / "a.zip") as other:
        assert len(other.namelist()) == 70_000


def zeros_crc(nbytes):
    crc, block, length = 0, zlib.crc32(bytes(2**20)), 2**20
    assert nbytes % length == 0
    count = nbytes // length
    while count:
        if count & 1:
            crc = combine(crc, block, length)
        block, length, count = combine(block, block, length), length * 2, count >> 1
    return crc


def test_tensors_beyond_four_gib(tmp_path):
    """One record over 4 GiB and one that begins after 4 GiB, in a file of holes."""
    large = checkpoint.TensorEntry("uint8", (5 * 2**30,), ())
    small = checkpoint.TensorEntry("float32", (4,), ())
    entries = [large, small]
    views = [View(at, entry.shape[0], 0, entry.shape, (1,)) for at, entry in enumerate(entries)]
    data = dump({"large": large, "small": small}, lambda entry: views[entries.index(entry)])
    records = lay_out([("data.pkl", len(data)), ("data/0", large.nbytes), ("data/1", 16), ("version", 2)])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0]).numpy().tobytes()
    crcs = [zlib.crc32(data), zeros_crc(large.nbytes), zlib.crc32(values), zlib.crc32(b"3\n")]
    with open(tmp_path / "big.pt", "wb") as out:
        for offset, body in [(records[2].payload, values), *around(records, [data, None, None, b"3\n"], crcs)]:
            out.seek(offset)
            out.write(body)
    assert os.stat(tmp_path / "big.pt").st_blocks * 512 < 2**20
    with zipfile.ZipFile(tmp_path / "big.pt") as archive:
        assert archive.getinfo("archive/data/0").file_size == large.nbytes
        assert archive.read("archive/data/1") == values
    loaded = torch.load(tmp_path / "big.pt", weights_only=True, mmap=True)
    assert loaded["large"].shape == (5 * 2**30,)
    assert loaded["small"].tolist() == [1.0, 2.0, 3.0, 4.0]
    ours = checkpoint.open(tmp_path / "big.pt")
    assert ours["small"].numpy().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert ours["large"][-3:].tolist() == [0, 0, 0]


def test_compressed_and_encrypted_members_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    archive = Archive(Stretch(Files(tmp_path), "a.zip"))
    with pytest.raises(CheckpointError, match="compressed or encrypted") as caught:
        archive.read("data.pkl")
    assert "a.zip, member data.pkl" in str(caught.value)


def test_members_that_overlap_or_come_twice_are_refused(tmp_path):
    records = lay_out([("a", 10), ("b", 10)])
    twice = [records[0], records[0]]
    for chosen in (twice, [records[0], records[1].__class__(b"archive/b", 10, 20, 64)]):
        out = io.BytesIO()
        for offset, data in around(chosen, [None, None], [0, 0]):
            out.seek(offset)
            out.write(data)
        with pytest.raises(CheckpointError, match=r"out of place|overlaps"):
            opened(tmp_path, out.getvalue())


@given(st.data())
def test_a_cut_archive_is_an_error(tmp_path_factory, data):
    body = assemble([("data.pkl", b"12345"), ("data/0", b"x" * 300)])
    length = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(CheckpointError):
        opened(tmp_path_factory.mktemp("cut"), body[:length])


def test_the_checksum_of_an_only_tensor_goes_where_that_of_one_among_many_would(tmp_path):
    plan = of_tensor("float32", (2, 3))
    values = torch.arange(6.0).reshape(2, 3)
    payload = values.numpy().tobytes()
    for crc in (zlib.crc32(payload), 0xFFFFFFFF, 0):
        assert list(plan.finish([crc])) == list(plan._around([crc]))
    out = io.BytesIO()
    for offset, data in [(plan.payload(0), payload), *plan.finish([zlib.crc32(payload)])]:
        out.seek(offset)
        out.write(data)
    assert len(out.getvalue()) == plan.nbytes
    assert zipfile.ZipFile(out).testzip() is None
    out.seek(0)
    assert torch.equal(torch.load(out, weights_only=True), values)


def outcome(archives, at, size):
    """The place of a box but for the objects that stand for its files, or what is wrong."""
    try:
        place = archives.place("w", size, "float32", at)
    except CheckpointError as error:
        return str(error)
    return place.extent[1:], place.start, place.stride


@pytest.mark.parametrize(("rows", "step"), [(4, 1), (400, 2)])
def test_an_archive_like_another_is_found_to_be_as_if_it_were_gone_through(tmp_path, monkeypatch, rows, step):
    """Each byte of the second archive is changed, and what comes out is what comes out for an archive by itself."""
    first, second = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(rows, 4), first)
    torch.save(torch.ones(rows, 4), second)
    a, b = first.getvalue(), second.getvalue()
    (tmp_path / "x").write_bytes(a + b)
    files, size = Files(tmp_path), (rows, 4)
    places = (("x", 0, len(a)), ("x", len(a), len(b)))
    both, gone_through = Archives(files), []
    monkeypatch.setattr(Archive, "_members", lambda *args, real=Archive._members: gone_through.append(1) or real(*args))
    found = [outcome(both, at, size) for at in places]
    assert len(gone_through) == 1
    assert found == [outcome(Archives(files), at, size) for at in places]
    errors = 0
    with open(tmp_path / "x", "r+b", buffering=0) as file:
        ends = [i for i in range(len(b)) if i < 1000 or i > len(b) - 1200]
        for i in ends[::step]:
            os.pwrite(file.fileno(), bytes([b[i] ^ 255]), len(a) + i)
            here = outcome(both, places[1], size)
            assert here == outcome(Archives(files), places[1], size), i
            errors += isinstance(here, str)
            os.pwrite(file.fileno(), b[i : i + 1], len(a) + i)
            outcome(both, places[0], size)  # is known again
    assert errors > 100
    assert "An archive holds something else" in outcome(both, places[1], (2, 2 * rows))
