"""Conversions that are killed, fail or meet one another: the source stays, and nothing looks complete that is not."""

import ctypes
import errno
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.interpreters import run_python
from torchshard import checkpoint
from torchshard.checkpoint.moving import destination, journal, runner
from torchshard.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]

# Kills itself before the call of this number among all that change something on the disk.
KILLED = """
import json, os, signal, sys
src, dst, to, at, options = sys.argv[1:]
from torchshard import checkpoint
from torchshard.checkpoint.moving import destination
destination.NOTE_SECONDS = -1  # into the journal at once
count = 0

def counted(name, real):
    def call(*args, **kwargs):
        global count
        count += 1
        if count == int(at):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call

for name in ("mkdir", "write", "pwrite", "ftruncate", "fsync", "rename", "replace", "unlink", "rmdir"):
    # The disk need not be waited for: the system outlives the process.
    setattr(os, name, counted(name, getattr(os, name) if name != "fsync" else lambda fd: None))
destination._reserve = counted("fallocate", destination._reserve)
checkpoint.convert(src, dst, to=to, max_memory=2**21, **json.loads(options))
print(count)
"""

OPTIONS = {
    "torch": "{}",
    "safetensors": '{"shard_size": 1300000, "verify": true}',
    "dcp": '{"mesh": [2], "placements": {"*": "S(0)"}, "overwrite": true}',
}


def run_until(at, src, dst, to, options):
    """The exit code of a process that converts and kills itself at a call, and what it has printed."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "killed.py"
        script.write_text(KILLED)
        return run_python([*map(str, (script, src, dst, to, at, options))], Path(folder), limit=120)


def count_calls(src, dst, to, options):
    """How many calls change something, when a conversion is not killed."""
    code, said = run_until(-1, src, dst, to, options)
    assert code == 0, said
    return int(said.splitlines()[-1])  # behind warnings


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """3 MiB in three tensors and an object."""
    path = tmp_path_factory.mktemp("small") / "a.pt"
    state = {f"w{i}": torch.arange(2**18, dtype=torch.int32).reshape(512, 512) + i for i in range(3)}
    torch.save({**state, "lr": 0.5}, path)
    return path


def contents(path):
    """Every byte below a path."""
    if path.is_file():
        return path.read_bytes()
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def convert(src, dst, to, **kwargs):
    options = json.loads(OPTIONS[to])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint.convert(src, dst, to=to, max_memory=2**21, **(options | kwargs))


def check_after_a_kill(small, dst, to, expected, before, old=None):
    """The source is as it was; the destination missing, as it was, or complete; going on ends with the same bytes."""
    assert small.read_bytes() == before
    assert set(os.listdir(dst.parent)) <= {dst.name, f".{dst.name}.partial"}
    ready = dst.exists() and contents(dst) != old
    assert not ready or contents(dst) == expected
    if old is not None and not dst.exists():  # killed between two renames
        assert contents(dst.parent / f".{dst.name}.partial" / "replaced") == old
    if ready and not (dst.parent / f".{dst.name}.partial" / "journal").exists():
        return  # killed after all was done
    convert(small, dst, to, resume=True, fsync=False)
    assert contents(dst) == expected
    assert os.listdir(dst.parent) == [dst.name]


def sweep(small, tmp_path, to, every):
    before = small.read_bytes()
    convert(small, tmp_path / "expected", to, fsync=False)
    expected, old = contents(tmp_path / "expected"), None

    def begin(folder):
        nonlocal old
        folder.mkdir()
        if "overwrite" in OPTIONS[to]:
            checkpoint.convert(small, folder / "out", to=to, select=["w1"], fsync=False)
            old = contents(folder / "out")

    begin(tmp_path / "whole")
    calls = count_calls(small, tmp_path / "whole" / "out", to, OPTIONS[to])
    assert calls > 15
    # The last calls are those that give the destination its name: all of them, however few of the others.
    for at in sorted(
        {*range(1, calls + 1, every), *range(calls - 9, calls + 1)} if old else range(1, calls + 1, every)
    ):
        begin(tmp_path / str(at))
        code, said = run_until(at, small, tmp_path / str(at) / "out", to, OPTIONS[to])
        assert code == -signal.SIGKILL, (at, said)
        check_after_a_kill(small, tmp_path / str(at) / "out", to, expected, before, old)


@pytest.mark.parametrize("to", OPTIONS)
def test_killed_at_some_transitions(small, tmp_path, to):
    sweep(small, tmp_path, to, 9)


@pytest.mark.full
@pytest.mark.parametrize("to", OPTIONS)
def test_killed_at_every_transition(small, tmp_path, to):
    sweep(small, tmp_path, to, 1)


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.full)])
def test_killed_at_random_moments(small, tmp_path, count):
    before = small.read_bytes()
    convert(small, tmp_path / "expected", "torch", fsync=False)
    expected = (tmp_path / "expected").read_bytes()
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    code = (
        "import sys, time\nfrom torchshard import checkpoint\nprint('ready', flush=True)\n"
        "checkpoint.convert(sys.argv[1], sys.argv[2], to='torch', progress=lambda *_: time.sleep(0.03))"
    )
    chance = random.Random(0)
    for i in range(count):
        folder = tmp_path / f"kill{i}"
        folder.mkdir()
        with subprocess.Popen(
            [sys.executable, "-c", code, small, folder / "out"], env=env, stdout=subprocess.PIPE
        ) as process:
            process.stdout.readline()
            time.sleep(chance.random() * 0.2)
            process.kill()
        check_after_a_kill(small, folder / "out", "torch", expected, before)


def test_what_follows_a_line_that_was_cut_off_is_read(tmp_path):
    """A full disk, or a power cut, in the middle of a note; then what was resumed says that all is done."""
    with open(tmp_path / "journal", "ab+") as file:
        journal.write(file.fileno(), ["print", "0 0 4 7", "0 4 4 9"])
        os.ftruncate(file.fileno(), file.seek(0, os.SEEK_END) - 3)
        journal.write(file.fileno(), [journal.COMMIT])
        assert journal.read(file.fileno(), "print") == ({(0, 0, 4): [7]}, True)


def test_without_resume_a_killed_one_is_begun_anew(small, tmp_path):
    run_until(8, small, tmp_path / "out", "torch", "{}")
    assert os.listdir(tmp_path) == [".out.partial"]
    convert(small, tmp_path / "out", "torch")
    assert os.listdir(tmp_path) == ["out"]


def test_resume_moves_only_what_is_missing(small, tmp_path, monkeypatch):
    options = '{"exclude": ["lr"]}'
    calls = count_calls(small, tmp_path / "other", "safetensors", options)
    run_until(calls // 2, small, tmp_path / "out", "safetensors", options)
    moved = []
    real = runner.write_all
    monkeypatch.setattr(runner, "write_all", lambda fd, data, at: moved.append(len(data)) or real(fd, data, at))
    checkpoint.convert(small, tmp_path / "out", to="safetensors", max_memory=2**21, resume=True, exclude=["lr"])
    assert 0 < sum(moved) < 3 * 2**20
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


@pytest.mark.parametrize("left", ["nothing", "holes", "half"])
def test_resume_trusts_nothing_that_it_does_not_find(small, tmp_path, left):
    """The journal may have reached the disk without the data, as after a power cut."""
    calls = count_calls(small, tmp_path / "other", "safetensors", "{}")
    run_until(calls - 6, small, tmp_path / "out", "safetensors", "{}")
    data = tmp_path / ".out.partial" / "data"
    size = data.stat().st_size
    assert len((data.parent / "journal").read_text().splitlines()) > 2
    if left == "nothing":
        data.write_bytes(b"")
    elif left == "half":
        os.truncate(data, size // 2)
    else:
        data.write_bytes(bytes(size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.convert(small, tmp_path / "out", to="safetensors", max_memory=2**21, resume=True, fsync=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_resume_refuses_another_source_or_other_options(small, tmp_path):
    run_until(12, small, tmp_path / "out", "torch", "{}")
    for kwargs in ({"dtype": "bfloat16", "select": ["w0"]}, {"exclude": ["lr"]}):
        with pytest.raises(CheckpointError, match="of another source or other options"):
            checkpoint.convert(small, tmp_path / "out", to="torch", max_memory=2**21, resume=True, **kwargs)
    assert os.listdir(tmp_path) == [".out.partial"]
    shutil.copy2(small, tmp_path / "a.pt")
    run_until(12, tmp_path / "a.pt", tmp_path / "other", "torch", "{}")
    shutil.copy2(small, tmp_path / "a.pt")  # another file of the same size and time of writing
    with pytest.raises(CheckpointError, match="of another source or other options"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "other", to="torch", max_memory=2**21, resume=True)


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_resume_does_not_take_other_names_for_the_same(small, tmp_path, monkeypatch, to):
    """One that was killed when it had its name, and another whose result differs by a name of equal length."""
    out = tmp_path / "out"
    monkeypatch.setattr(destination.Destination, "_leave", lambda self: None)
    convert(small, out, to, rename=lambda key: f"a.{key}", fsync=False)
    monkeypatch.undo()
    before = contents(out)
    with pytest.raises(CheckpointError, match="other options"):
        convert(small, out, to, rename=lambda key: f"b.{key}", fsync=False, resume=True, overwrite=True)
    assert contents(out) == before
    convert(small, out, to, rename=lambda key: f"b.{key}", fsync=False, overwrite=True)
    assert "b.w1" in checkpoint.open(out)


def test_resume_with_nothing_to_go_on_from_leaves_nothing(small, tmp_path):
    checkpoint.convert(small, tmp_path / "out", to="torch")
    with pytest.raises(CheckpointError, match="The destination exists"):
        checkpoint.convert(small, tmp_path / "out", to="torch", resume=True)
    assert os.listdir(tmp_path) == ["out"]


def test_two_conversions_to_one_destination(small, tmp_path):
    said = []

    def start_another(done, total):
        if not said:
            with pytest.raises(CheckpointError, match="Another conversion writes to this destination") as caught:
                checkpoint.convert(small, tmp_path / "out", to="torch")
            said.append(caught)

    checkpoint.convert(small, tmp_path / "out", to="torch", progress=start_another)
    assert said
    assert os.listdir(tmp_path) == ["out"]


def test_a_failure_cleans_up_unless_it_is_to_be_resumed(small, tmp_path):
    def fail(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(small, tmp_path / "out", to="torch", progress=fail)
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(small, tmp_path / "out", to="torch", progress=fail, resume=True)
    assert os.listdir(tmp_path) == [".out.partial"]
    checkpoint.convert(small, tmp_path / "out", to="torch", resume=True)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("resume", "call"), [(False, "unlink"), (True, "write"), (True, "fsync")])
def test_a_second_interrupt_does_not_keep_the_destination(small, tmp_path, monkeypatch, resume, call):
    """It may come while the first is cleaned up after, which takes long where there is much to remove or to write."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    def fail(done, total):
        patch.setattr(os, call, interrupted)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        checkpoint.convert(small, tmp_path / "out", to="torch", progress=fail, resume=resume)
    checkpoint.convert(small, tmp_path / "out", to="torch", resume=resume)
    assert os.listdir(tmp_path) == ["out"]
    del caught  # till here, as the last traceback is kept in a notebook


def test_a_file_is_open_until_it_is_on_the_disk(tmp_path, monkeypatch):
    """Of very many files some are closed while threads open others."""
    fsync, given = os.fsync, {"": 1}
    with destination.Destination(tmp_path / "out", given, "", overwrite=False, fsync=True, resume=False) as place:
        monkeypatch.setattr(os, "fsync", lambda fd: (place._opened.cache_clear(), fsync(fd)))
        place.write_notes()


@pytest.mark.parametrize("call", ["pwrite", "replace", "fsync", "open", "mkdir"])
def test_a_full_disk_is_a_sentence(small, tmp_path, monkeypatch, call):
    def full(*args, **kwargs):
        if call == "open" and args[1] == os.O_RDONLY | os.O_CLOEXEC:
            return real(*args, **kwargs)
        raise OSError(28, "No space left on device")

    real = getattr(os, call)
    before = small.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoint.convert(small, tmp_path / "out", to="torch", verify=True)
    assert os.listdir(tmp_path) == []
    assert small.read_bytes() == before


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_full_disk_has_its_room_again(small, tmp_path, monkeypatch, to, held):
    """A removed file takes room as long as anything has it open, be it the traceback that a user keeps."""

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    gc.collect()
    gc.disable()
    try:
        kept = None
        try:
            checkpoint.convert(small, tmp_path / "out", to=to)
        except CheckpointError as error:
            kept = error if held else repr(error)
        assert kept is not None
        numbers = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        opened = [os.readlink(number) for number in numbers if os.path.lexists(number)]
        assert not [name for name in opened if ".out.partial" in name or (not held and str(small) in name)]
    finally:
        gc.enable()


def test_the_file_that_cannot_be_written_is_named(small, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"File too large.*\n  where: .*__0_0\.distcp"):
        checkpoint.convert(small, tmp_path / "out", to="dcp")


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_the_system_will_refuse_in_the_end_is_said_before(small, tmp_path, monkeypatch, dry_run):
    """A folder that is read-only, one that belongs to another, and one that is a mount point."""
    out, folder = tmp_path / "out", tmp_path / "folder"
    checkpoint.convert(small, folder, to="dcp", select=["w1"], fsync=False)
    before = contents(folder)
    for refused, dst in ((tmp_path, out), (folder, folder)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, mode, refused=refused, **_: Path(path) != refused)
            with pytest.raises(CheckpointError, match="folder cannot be written to") as caught:
                checkpoint.convert(small, dst, to="dcp", overwrite=True, dry_run=dry_run)
            assert caught.value.where == refused
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder)
    with pytest.raises(CheckpointError, match="mount point"):
        checkpoint.convert(small, folder, to="dcp", overwrite=True, dry_run=dry_run)
    assert contents(folder) == before
    assert os.listdir(tmp_path) == ["folder"]


def test_a_current_folder_that_was_removed(small, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(CheckpointError, match="No such file or directory"):
        checkpoint.convert(small, "out", to="torch")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_room_is_reserved_where_the_file_system_can(small, tmp_path, monkeypatch, code):
    """All of it before the first byte: a disk that is too full is noticed then; one that cannot is written anyway."""
    asked = []

    def fallocate(fd, mode, start, nbytes):
        asked.append((os.fstat(fd).st_size, mode, start.value, nbytes.value))
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(destination, "_fallocate", fallocate)
    if code == errno.ENOSPC:
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoint.convert(small, tmp_path / "out", to="torch")
        assert os.listdir(tmp_path) == []
        return
    checkpoint.convert(small, tmp_path / "out", to="torch")
    assert asked[0] == (0, 0, 0, os.path.getsize(tmp_path / "out"))
    monkeypatch.undo()
    checkpoint.convert(small, tmp_path / "again", to="torch")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_overwriting_a_folder(small, tmp_path):
    out = tmp_path / "out"
    convert(small, out, "dcp")
    with pytest.raises(CheckpointError, match="destination exists"):
        checkpoint.convert(small, out, to="dcp")
    checkpoint.convert(small, out, to="dcp", overwrite=True, select=["w1"])
    assert list(checkpoint.open(out)) == ["w1"]
    (out / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="holds more than a checkpoint"):
        checkpoint.convert(small, out, to="dcp", overwrite=True)
    assert (out / "thesis.txt").exists()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("stopped", ["before", "after"])
def test_a_folder_that_steps_aside_is_never_lost(small, tmp_path, monkeypatch, stopped, resume):
    """Interrupted between the two renames by which a folder takes the name of another."""
    out, rename = tmp_path / "out", os.rename
    checkpoint.convert(small, out, to="dcp", select=["w1"], fsync=False)
    old = contents(out)

    def interrupted(a, b):
        if Path(a).name != "data":
            return rename(a, b)
        if stopped == "after":
            rename(a, b)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(small, out, "dcp", fsync=False, resume=resume)
    monkeypatch.undo()
    assert (contents(out) == old) == (stopped == "before")
    assert (os.listdir(tmp_path) == ["out"]) == (not resume)
    convert(small, out, "dcp", fsync=False, resume=resume)
    assert list(checkpoint.open(out)) == ["w0", "w1", "w2", "lr"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_name_that_is_taken_while_a_folder_steps_aside(small, tmp_path, monkeypatch):
    """Another program makes a folder there: neither that one nor the old one is lost."""
    out, rename, hidden = tmp_path / "out", os.rename, tmp_path / ".out.partial"
    checkpoint.convert(small, out, to="dcp", select=["w1"], fsync=False)
    old = contents(out)

    def meeting(a, b):
        if Path(a).name == "data":
            out.mkdir()
            (out / "theirs").write_text("theirs")
        rename(a, b)

    monkeypatch.setattr(os, "rename", meeting)
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(small, out, "dcp", fsync=False)
    monkeypatch.undo()
    for _ in range(2):
        assert (out / "theirs").read_text() == "theirs"
        assert contents(hidden / "replaced") == old
        (out / "theirs").rename(tmp_path / "theirs")
        with pytest.raises(CheckpointError, match="stepped aside"):
            convert(small, out, "dcp", fsync=False)
        (tmp_path / "theirs").rename(out / "theirs")
    (hidden / "replaced").rename(tmp_path / "mine")
    (out / "theirs").rename(tmp_path / "theirs")
    convert(small, out, "dcp", fsync=False)
    assert sorted(os.listdir(tmp_path)) == ["mine", "out", "theirs"]


def test_killed_before_what_it_replaced_was_removed(small, tmp_path):
    out = tmp_path / "out"
    checkpoint.convert(small, out, to="dcp", fsync=False)
    hidden = tmp_path / ".out.partial"
    (hidden / "replaced").mkdir(parents=True)
    (hidden / "replaced" / ".metadata").write_bytes(b"old")
    checkpoint.convert(small, out, to="dcp", select=["w1"], fsync=False, overwrite=True)
    assert list(checkpoint.open(out)) == ["w1"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", [".out.partial", ".out.partial/data"])
def test_the_hidden_folder_is_no_source(small, tmp_path, name):
    hidden = tmp_path / ".out.partial"
    hidden.mkdir()
    (hidden / "data").write_bytes(small.read_bytes())
    (hidden / "model_rank0.pt").write_bytes(small.read_bytes())
    before = contents(hidden)
    with pytest.raises(CheckpointError, match="never touched"):
        checkpoint.convert(tmp_path / name, tmp_path / "out", to="torch")
    assert contents(hidden) == before


@pytest.mark.parametrize("name", ["", "journal"])
def test_a_link_in_the_place_of_the_hidden_folder_is_not_followed(small, tmp_path, name):
    (tmp_path / "mine").mkdir()
    for file in ("data", "notes"):
        (tmp_path / "mine" / file).write_text("mine")
    hidden = tmp_path / ".out.pt.partial"
    if name:
        hidden.mkdir()
    (hidden / name).symlink_to(tmp_path / "mine" / ("notes" if name else ""))
    for resume in (False, True):
        with pytest.raises(CheckpointError, match=r"a link in the place|symbolic links"):
            checkpoint.convert(small, tmp_path / "out.pt", to="torch", resume=resume)
    assert [(tmp_path / "mine" / file).read_text() for file in ("data", "notes")] == ["mine", "mine"]
    assert not (tmp_path / "out.pt").exists()


def test_special_files_are_not_replaced(small, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place, dry_run in ((tmp_path / "pipe", False), (tmp_path / "pipe", True), (Path("/dev/null"), True)):
        with pytest.raises(CheckpointError, match="not a regular file"):
            checkpoint.convert(small, place, to="torch", overwrite=True, dry_run=dry_run)
    assert (tmp_path / "pipe").is_fifo()


def test_threads_that_ask_for_a_file_at_once_get_the_same(tmp_path, monkeypatch):
    """Opened once: what is done to the disk, and how often, does not depend on who comes first."""
    opened, real = [], destination._reserve

    def slowly(fd, nbytes):
        opened.append(fd)
        time.sleep(0.1)
        real(fd, nbytes)

    monkeypatch.setattr(destination, "_reserve", slowly)
    with destination.Destination(tmp_path / "out", {"": 8}, "x", overwrite=False, fsync=False, resume=False) as place:
        with ThreadPoolExecutor(4) as pool:
            handles = list(pool.map(place.fd, [""] * 4))
        assert len(opened) == 1
        assert len(set(map(id, handles))) == 1


def test_what_is_written_wrong_is_found_by_verify(small, tmp_path, monkeypatch):
    real = os.pwrite

    def flipped(fd, data, offset):
        if len(data) > 2**16:
            data = bytes([data[0] ^ 1]) + bytes(data[1:])
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", flipped)
    torch.save({"w": torch.ones(2**17)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="not what was read"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "out", to="torch", dtype="float64", verify=True)
    assert os.listdir(tmp_path) == ["a.pt"]
