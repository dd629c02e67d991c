"""Programs run as by `python ARGUMENTS`, forked from a process that has imported torch: most of what starting one takes.

Torch and what it compiles with alone, which it finds by itself, so that what a program forgets to import is missing.
"""

import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_code(code: str, *arguments: str, seed: int = 0, **variables: str) -> str:
    """Run code that must end well, in an empty folder, and return its output; otherwise as below."""
    with tempfile.TemporaryDirectory() as folder:
        status, text = run_python(["-c", code, *arguments], Path(folder), 200, seed, **variables)
    assert status == 0, text
    return text


def run_python(arguments: list[str], folder: Path, limit: float, seed: int = 0, **variables: str) -> tuple[int, str]:
    """Run a script, a module (-m) or code (-c): its exit code and output, and where it fails what it says of that.

    Args:
        arguments: as of the interpreter.
        folder: in which it runs.
        limit: seconds; after them it is killed with all that it has started, and the exit code is a signal's.
        seed: of the hashes of strings; 0 for hashes of a seed that nobody knows.
        variables: of the environment, to add.
    """
    server, output, errors = _server(seed), folder / ".output", folder / ".errors"
    assert server.stdin is not None
    assert server.stdout is not None
    output.touch()
    errors.touch()
    server.stdin.write(json.dumps([arguments, str(folder), str(output), str(errors), variables]) + "\n")
    server.stdin.flush()
    timer = threading.Timer(limit, os.killpg, (int(server.stdout.readline()), signal.SIGKILL))
    timer.start()
    code = int(server.stdout.readline())
    timer.cancel()
    text = output.read_text() + (errors.read_text() if code else "")
    output.unlink()
    errors.unlink()
    return code, text


@functools.cache
def _server(seed: int) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": str(seed or "random"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.interpreters"], env=environment, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def _serve() -> None:
    import tests.compilers  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if not child:
            os.setpgid(0, 0)  # what is killed when the time is over
            print(os.getpid(), flush=True)
            _become(*json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(arguments: list[str], folder: str, output: str, errors: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    os.chdir(folder)
    for mine, (path, how) in enumerate([(os.devnull, os.O_RDONLY), (output, os.O_WRONLY), (errors, os.O_WRONLY)]):
        os.dup2(os.open(path, how), mine)
    sys.stdin, sys.path[0] = os.fdopen(0), folder
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
