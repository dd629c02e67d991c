"""The demo itself, on a text that is quickly learned: under the launcher of the command line, and on two nodes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["--layers", "1", "--width", "64", "--heads", "2", "--context", "64", "--batch", "8"]


@pytest.fixture
def text(tmp_path):
    """Numbers in words: little to learn."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    for k in range(10):
        lines = [" ".join(words[int(d)] for d in str(n)) for n in range(1000 * k, 1000 * (k + 1))]
        (tmp_path / f"numbers{k}.txt").write_text("\n".join(lines))
    return tmp_path


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def test_two_nodes_of_one_rank(text, tmp_path):
    """Two launchers, as on two machines that share a folder."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    out = tmp_path / "out"
    nodes = []
    for rank in range(2):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}",
            "--master-addr=localhost", f"--master-port={port}",
            "-m", "torchshard.demo.ranks", "--data", str(text), "--out", str(out), "--steps", "50", *SMALL,
        ]  # fmt: skip
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        nodes.append(subprocess.Popen(command, env=environment(), text=True, **pipes))
    try:
        said = [node.communicate(timeout=280)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    assert "All checks passed." in said[0]
    assert "FAILED" not in said[0]
    assert {"checkpoint", "model.safetensors", "loss.png", "timeline.png"} <= {file.name for file in out.iterdir()}


def command_line(*arguments):
    command = [sys.executable, "-m", "torchshard", "demo", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)


def test_a_check_that_fails_fails_the_demo(text, tmp_path):
    done = command_line("--data", str(text), "--out", str(tmp_path / "out"), "--steps", "1", "--ranks", "1")
    assert done.returncode == 1, done.stderr
    assert "held-out loss" in done.stdout
    assert "Some checks FAILED." in done.stdout


def test_bad_data_gets_a_sentence(tmp_path):
    (tmp_path / "short.txt").write_text("too little")
    for path, what in ((tmp_path / "none", "No text to train on."), (tmp_path, "Too little text to train on.")):
        done = command_line("--data", str(path))
        assert done.returncode == 2
        assert what in done.stderr
        assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_made_gets_a_sentence(text, tmp_path):
    (tmp_path / "file").write_text("")
    done = command_line("--data", str(text), "--out", str(tmp_path / "file" / "out"), "--steps", "1")
    assert done.returncode == 2
    assert "Results cannot be written there." in done.stderr
    assert "Not a directory" in done.stderr
    assert "Traceback" not in done.stderr
