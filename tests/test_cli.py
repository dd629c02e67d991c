"""The command line: what it prints, its exit codes, and that it stays light."""

import json
import os
import pty
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.checkpoint import sources
from torchshard import __version__, checkpoint
from torchshard.cli import app

ROOT = Path(__file__).resolve().parents[1]


def torchshard(*args, **kwargs):
    """Run the command; returns the finished process."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "torchshard", *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, **kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "lr": 0.5}
    return sources.make(tmp_path_factory.mktemp("cli") / "ck", 1, sources.save, state)


def test_help_and_version():
    done = torchshard("--help")
    assert done.returncode == 0
    assert "inspect" in done.stdout
    assert "convert" in done.stdout
    assert torchshard("--version").stdout == f"torchshard {__version__}\n"


def test_no_command_imports_torch(folder, tmp_path):
    code = """
import sys
from torchshard.cli import main
for args in (["--help"], ["inspect", sys.argv[1]], ["convert", sys.argv[1], sys.argv[2], "--to", "torch", "--verify"]):
    sys.argv[1:] = args
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, None), end.code
    loaded = {"torch", "matplotlib"} & set(sys.modules)
    assert not loaded, (args, loaded)
    sys.argv[1:] = [PATHS[0], PATHS[1]]
print("light", file=sys.stderr)
""".replace("import sys\n", "import sys\nPATHS = sys.argv[1:]\n", 1)
    done = sources.python(code, folder, tmp_path / "out.pt")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("light\n")
    assert (tmp_path / "out.pt").exists()


def test_help_is_light():
    code = "import sys, torchshard.cli; print(sorted({'numpy', 'torch', 'tabulate', 'tqdm'} & set(sys.modules)))"
    assert sources.python(code).stdout == "[]\n"


def test_inspect(folder):
    done = torchshard("inspect", folder)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "model.w  float32" in done.stdout
    assert "1 tensors of 6 elements" in done.stdout
    found = json.loads(torchshard("inspect", folder, "--json").stdout)
    assert found["format"] == "dcp"
    assert [entry["key"] for entry in found["entries"]] == ["model.w", "lr"]


def test_convert(folder, tmp_path):
    done = torchshard("convert", folder, tmp_path / "a.safetensors", "--to", "safetensors", "--max-memory", "2MiB")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {tmp_path / 'a.safetensors'} (safetensors): 1 tensors from 1 pieces")
    assert done.stderr == "torchshard: safetensors holds tensors only; left out: lr\n"  # and no bar: it is piped
    assert safetensors.torch.load_file(tmp_path / "a.safetensors")["model.w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    again = ("convert", folder, tmp_path / "a.safetensors", "--to", "safetensors", "--overwrite", "--no-fsync")
    assert torchshard(*again).returncode == 0
    done = torchshard("convert", folder, tmp_path / "a.pt", "--to", "torch", "--verify")
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["lr"] == 0.5


def test_a_dry_run(folder, tmp_path):
    done = torchshard("convert", folder, tmp_path / "a.pt", "--to", "torch", "--dry-run")
    assert done.returncode == 0
    assert "model.w" in done.stdout
    assert f"would write {tmp_path / 'a.pt'}" in done.stdout
    assert os.listdir(tmp_path) == []


def test_options_of_convert(folder, tmp_path):
    torch.save({"extra": torch.ones(4)}, tmp_path / "extra.pt")
    command = (
        "convert", folder, tmp_path / "extra.pt", tmp_path / "out", "--to", "dcp", "--mesh", "2x2", "--placements",
        "*.w=S(0),S(1)", "--dtype", "*.w=bfloat16", "--exclude", "lr", "--rename", r"model.(\w)=net.\1", "--no-fsync",
        "--resume", "--shard-size", "1MiB",
    )  # fmt: skip
    done = torchshard(*command, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "net.w[0:1, 2:3]  bfloat16  1 x 1  1 x float32  2 B   __1_0.distcp" in done.stdout
    assert os.listdir(tmp_path) == ["extra.pt"]
    assert torchshard(*command).returncode == 0
    with checkpoint.open(tmp_path / "out") as ck:
        assert set(ck) == {"net.w", "extra"}
        assert ck["net.w"].cut == (2, 2)
    wrong = {
        ("--mesh", "2by2"): "shape of a mesh", ("--placements", "S(0)"): "pattern and its value",
        ("--rename", "x"): r"'layers.(\d+)=blocks.\1'", ("--rename", "modle=x"): "no key: rename('modle', 'x')",
        ("--rename", "model=model"): "a key for each rule to change", ("--rename", r"model.(\w)=model.\1"): "no key: ",
        ("--dtype", "int4"): "not cast to this type", ("--shard-size", "much"): "--shard-size",
        ("--dtype", "bfloat16", "--dtype", "float16"): "given twice",
    }  # fmt: skip
    named = {
        ("--mesh", ""): "got:      ''\n  where:    --mesh", ("--placements", "S(0)"): "where:    --placements",
        ("--rename", "x"): "where:    --rename", ("--dtype", ""): "got:      ''",
        ("--dtype", "bfloat16", "--dtype", "float16"): "where:    --dtype, *",
        ("--mesh", "2", "--placements", "*.w=S("): "where:    placements of *.w",
        ("--mesh", "2", "--placements", "*.w=R,R"): "where:    placements of *.w",
    }  # fmt: skip
    for options, message in [*wrong.items(), *named.items()]:
        done = torchshard("convert", folder, tmp_path / "no", "--to", "dcp", *options)
        assert done.returncode == 2, options
        assert done.stderr.startswith("torchshard: "), done.stderr
        assert message in done.stderr


COMPLETED = """
eval "$(_TORCHSHARD_COMPLETE=source_bash torchshard)"
for line in "torchshard con" "torchshard convert --max" "torchshard convert a b --to s"; do
  COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _torchshard_completion torchshard
  echo "${COMPREPLY[@]}"
done
complete -p torchshard
"""


def test_bash_completes_commands_options_and_formats(tmp_path):
    (tmp_path / "torchshard").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{_MAIN}"\n')
    (tmp_path / "torchshard").chmod(0o755)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", COMPLETED], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "convert",
        "--max-memory",
        "safetensors",
        "complete -o default -F _torchshard_completion torchshard",  # paths are completed by bash
    ], done.stderr


_MAIN = "import sys; sys.argv[0] = 'torchshard'; from torchshard.cli import main; main()"


def test_diff_and_its_exit_codes(folder, tmp_path):
    torch.save({"model": {"w": torch.arange(6.0).reshape(2, 3) + 0.5}, "lr": 0.5}, tmp_path / "a.pt")
    done = torchshard("diff", folder, tmp_path / "a.pt")
    assert done.returncode == 1
    assert "model.w  values" in done.stdout
    done = torchshard("diff", folder, tmp_path / "a.pt", "--atol", "1", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"changes": [], "same": 2})
    assert torchshard("diff", folder, tmp_path / "missing").returncode == 2


def test_statistics(folder):
    found = json.loads(torchshard("inspect", folder, "--stats", "--json", "--select", "model.*").stdout)
    assert [entry["stats"] for entry in found["entries"]] == [{"min": 0.0, "max": 5.0, "mean": 2.5, "nan": 0, "inf": 0}]


def broken(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "broken")
    os.truncate(tmp_path / "broken" / "__0_0.distcp", 100)
    return tmp_path / "broken"


def test_what_the_user_can_mend_is_a_sentence(folder, tmp_path):
    out = tmp_path / "out"
    cases = {
        "The file does not exist": ("inspect", tmp_path / "no"),
        "A file is cut off": ("inspect", broken(folder, tmp_path)),
        "This is not a size": ("convert", folder, out, "--to", "torch", "--max-memory", "lots"),
        "max_memory is too little": ("convert", folder, out, "--to", "torch", "--max-memory", "1KiB"),
        "The destination exists": ("convert", folder, __file__, "--to", "torch"),
        "folder of the destination does not exist": ("convert", folder, tmp_path / "x" / "y", "--to", "torch"),
        "is not one of": ("convert", folder, out, "--to", "onnx"),
        "No such option": ("convert", folder, out, "--to", "torch", "--upload"),
        "No such command": ("frobnicate",),
        "Missing option": ("convert", folder, out),
    }
    for message, command in cases.items():
        done = torchshard(*command)
        assert done.returncode == 2, (message, done.stdout)
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    assert not out.exists()


MODEL = """
import torch

def mlp():
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))

def gpt():
    from torchshard.demo.model import GPT, Config
    return GPT(Config()), (torch.zeros(1, 8, dtype=torch.int64),)

def needy(width):
    return mlp()

def boom():
    raise RuntimeError("at last")

def largest():
    class Largest(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)
    return Largest(256, 8)

number = 3
"""


def test_plan(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    times = ("--forward", "1", "--backward", "2", "--gbits", "10", "--world-size", "64", "--bucket-cap-mb", "0.25")
    out = ("--trace", tmp_path / "step.json", "--picture", tmp_path / "step.png")
    done = torchshard("plan", tmp_path / "mine.py:mlp", "--input", "4,256", *times, *out)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert rows[0].split() == ["graph", "bucket", "parameters", "bytes", "in", "place", "launched", "after"]
    assert "2.weight, 2.bias, 0.weight" in rows[2]
    assert rows[4] == "530.0 KiB of gradients in graphs, 99 % of them computed in place"
    assert rows[-1].startswith("64 ranks, ring over 1.25 GB/s: a step of 6.37 ms")
    assert len(json.loads((tmp_path / "step.json").read_text())["traceEvents"]) == 8
    assert (tmp_path / "step.png").read_bytes()[1:4] == b"PNG"


def test_plan_with_inputs_of_its_own_and_measured_times(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    done = torchshard("plan", "mine:gpt", "--ranks-per-node", "8", "--world-size", "96000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "96,000 ranks in nodes of 8, ring over 12.5 GB/s: a step of" in done.stdout


PLANNED = ("mine.py:mlp", "--input", "4,256")
with pytest.raises(RuntimeError) as MISFIT:  # which each torch says in its own words
    torch.nn.Linear(256, 512)(torch.ones(4, 255))

MISTAKES = {
    # how a model is named, and what its file and its function do
    "'mlp' does not name a model; give package.module:function or file.py:function": ("mlp",),
    "'..mine:mlp' does not name a model": ("..mine:mlp",),
    "FileNotFoundError: no file nothing.py": ("nothing.py:mlp",),
    "'mine.py:none' must name what can be imported, but got AttributeError": ("mine.py:none",),
    "'no.such:x' must name what can be imported, but got ModuleNotFoundError: No module named 'no'": ("no.such:x",),
    "'syntax.py:x' must name what can be imported, but got SyntaxError: invalid syntax (syntax.py, line 1)": (
        "syntax.py:x",
    ),
    "but got ModuleNotFoundError: No module named 'not_there' (imports.py, line 1)": ("imports.py:x",),
    "but got SystemExit: 3 (exits.py, line 2)": ("exits:x",),
    "'torch.nn:Linear' must make a model without arguments, but got TypeError": ("torch.nn:Linear",),
    "but got TypeError: needy() missing 1": ("mine.py:needy",),
    "but got RuntimeError: at last (mine.py, line 15)": ("mine.py:boom",),
    "made int": ("mine.py:number",),
    # inputs
    "comes without inputs": ("mine.py:mlp",),
    "input 'x' is not known": ("mine.py:mlp", "--input", "x"),
    "input 'float8_e4m3fn:4' must be one that torch.randn makes": ("mine.py:mlp", "--input", "float8_e4m3fn:4"),
    "input 'quint8:4' must be one that torch.zeros makes": ("mine.py:mlp", "--input", "quint8:4"),
    f"Sequential must run on float32[4, 255], but got RuntimeError: {MISFIT.value}": (
        "mine.py:mlp",
        "--input",
        "4,255",
    ),
    "Sequential must run on int64[4, 256], but got RuntimeError": ("mine.py:mlp", "--input", "int64:4,256"),
    "Sequential must run on float32[4, 256], float32[1], but got TypeError": (*PLANNED, "--input", "1"),
    # nothing to reduce
    "an output of ReLU with requires_grad, got float32[2, 2]": ("torch.nn:ReLU", "--input", "2,2"),
    "an output of Largest with requires_grad, got int64[4]": ("mine.py:largest", "--input", "4,256"),
    "no gradient is reduced in a graph": ("torch.nn:ReLU", "--input", "2,2", "--forward", "1", "--backward", "1"),
    "give --forward and --backward, or neither": (*PLANNED, "--forward", "5"),
    # numbers
    "'--forward': expected a finite time, 0 or more; got -5.0": (*PLANNED, "--forward", "-5"),
    "'--backward': expected a finite time, 0 or more; got -5.0": (*PLANNED, "--backward", "-5"),
    "'--forward': expected a finite time, 0 or more; got nan": (*PLANNED, "--forward", "nan"),
    "'--forward': expected a finite time, 0 or more; got inf": (*PLANNED, "--forward", "inf"),
    "'--latency': expected a finite time, 0 or more; got inf": (*PLANNED, "--latency", "inf"),
    "'--gbits': expected more than 0; got 0.0": (*PLANNED, "--gbits", "0"),
    "world_size=0: expected a whole number of ranks, 1 or more": (*PLANNED, "--world-size", "0"),
    "bucket_cap_mb=-1.0 is no size": (*PLANNED, "--bucket-cap-mb", "-1"),
    # files to write: said before there is any work
    "'--trace': expected a file in a folder that can be written to, got none/x.json": ("mlp", "--trace", "none/x.json"),
    "'--picture': expected a file in a folder that": ("mlp", "--picture", "none/x.png"),
    "'.' is a directory": ("mlp", "--trace", "."),
    ".png, .ps, .raw, .rgba, .svg": ("mlp", "--picture", "x.foo"),
}


def test_mistakes_in_plan(tmp_path):
    files = {"mine": MODEL, "syntax": "def x(:", "imports": "import not_there", "exits": "import sys\nsys.exit(3)"}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    code = """
import contextlib, io, json, sys
from torchshard.cli import main
said = {}
for message, command in json.loads(sys.argv[1]).items():  # in one interpreter: each imports torch
    sys.argv[1:] = ["plan", *command]
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
    said[message] = code, out.getvalue(), err.getvalue()
print(json.dumps(said))
"""
    done = sources.python(code, json.dumps(MISTAKES), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for message, (code, out, err) in json.loads(done.stdout).items():
        assert (code, out) == (2, ""), (message, err)
        sentence = " ".join(err.replace("│", " ").split())
        assert message in sentence, err
        assert "Traceback" not in err
    assert not list(tmp_path.glob("x.*"))


def test_a_bug_in_plan_has_its_traceback(tmp_path, monkeypatch):
    def broken(*_args, **_kwargs):
        raise AssertionError("a bug")

    (tmp_path / "mine.py").write_text(MODEL)
    monkeypatch.setattr("torchshard.compiler.explain", broken)
    with pytest.raises(AssertionError, match="a bug"):
        app(["plan", str(tmp_path / "mine.py:mlp"), "--input", "4,256"])


@pytest.mark.parametrize("command", [["inspect", "{}"], ["inspect", "{}", "--json"], ["--version"]])
def test_an_output_that_is_full(folder, command):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "torchshard", *(word.format(folder) for word in command)],
            env=env,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (
        2, b"torchshard: The output cannot be written: No space left on device.\n",
    )  # fmt: skip


@pytest.mark.parametrize("stream", ["2> /dev/full", "2>&-", "<&- >&- 2>&-"])
def test_notes_that_nobody_can_read(folder, tmp_path, stream):
    """The work is done, and its exit code is told, be stderr full or closed."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = f"exec {sys.executable} -m torchshard"
    convert = f"{command} convert {folder} {tmp_path / 'w.safetensors'} --to safetensors {stream}"  # leaves lr out
    done = subprocess.run(convert, shell=True, env=env, stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 0
    assert list(safetensors.torch.load_file(tmp_path / "w.safetensors")) == ["model.w"]
    inspect = f"{command} inspect {tmp_path / 'none'} {stream}"
    assert subprocess.run(inspect, shell=True, env=env, timeout=60).returncode == 2


def test_a_trace_that_cannot_be_written(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "full.json").symlink_to("/dev/full")
    done = torchshard("plan", tmp_path / "mine.py:mlp", "--input", "4,256", "--trace", tmp_path / "full.json")
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_output_that_nobody_reads(folder):
    """It is not said that a checkpoint differs from itself."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torchshard", "diff", folder, folder]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=writer, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_bar_on_a_terminal(folder, tmp_path):
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (25, 100))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torchshard", "convert", str(folder), str(tmp_path / "a.pt"), "--to", "torch"]
    done = subprocess.run(command, env=env, stderr=follower, stdout=subprocess.PIPE, timeout=60)
    shown = os.read(leader, 100_000).decode()
    os.close(follower)
    os.close(leader)
    assert done.returncode == 0
    assert "a.pt:" in shown
    assert "B/s" in shown
