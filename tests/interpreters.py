"""Programs run as by `python ARGUMENTS`, forked from a process that has imported torch: most of what starting one takes.

Torch alone, which all of them import, so that what a program forgets to import is missing.
"""

import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_python(arguments: list[str], folder: Path, limit: float) -> tuple[int, str]:
    """Run a script, or a module (-m), with its output in one text.

    Args:
        arguments: as of the interpreter.
        folder: in which it runs.
        limit: seconds; after them it is killed with all that it has started, and the exit code is a signal's.
    """
    server, output = _server(), folder / ".output"
    assert server.stdin is not None
    assert server.stdout is not None
    output.touch()
    timer = threading.Timer(limit, os.killpg, (server.pid, signal.SIGKILL))
    timer.start()
    server.stdin.write(json.dumps([arguments, str(folder), str(output)]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    timer.cancel()
    if not answer:
        answer = str(server.wait())
        _server.cache_clear()
    text = output.read_text()
    output.unlink()
    return int(answer), text


@functools.cache
def _server() -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.interpreters"], env=environment, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def _serve() -> None:
    import torch  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(*json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(arguments: list[str], folder: str, output: str) -> None:
    os.chdir(folder)
    for mine, other in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(output, os.O_WRONLY))):
        os.dup2(other, mine)
    os.dup2(1, 2)
    sys.stdin, sys.path[0] = os.fdopen(0), folder
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
