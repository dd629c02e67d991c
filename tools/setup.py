"""Make the environment that the Makefile runs in; needs nothing but Python's standard library.

Everything is installed through constraints.txt. With another torch than the pinned one, its line is replaced, and what
only torch needs is left to pip (torch before 2.13 refuses the setuptools that later ones take).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def missing() -> list[str]:
    """What this machine lacks, each in a sentence."""
    lacks = []
    if sys.version_info[:2] < (3, 11):  # noqa: UP036
        lacks.append(
            f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}. Set PYTHON=... to another one."
        )
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        lacks.append("Python's headers (Python.h) are missing; on Debian: apt-get install python3-dev.")
    compilers = [c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c]
    if not any(shutil.which(c) for c in compilers):
        lacks.append("A C++ compiler is missing (torch.compile writes C++); on Debian: apt-get install g++.")
    return lacks


def constraints(torch: str) -> str:
    """constraints.txt, with this version of torch."""
    pins = (ROOT / "constraints.txt").read_text()
    if f"torch=={torch}\n" in pins:
        return pins
    return re.sub(r"(?m)^setuptools==.*\n", "", re.sub(r"(?m)^torch==.*$", f"torch=={torch}", pins))


def main() -> None:
    """Make the environment, or say in a sentence why not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--torch", required=True)
    args = parser.parse_args()
    if lacks := missing():
        sys.exit("torchshard cannot be set up on this machine:\n  " + "\n  ".join(lacks))
    python = args.venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", args.venv], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write(constraints(args.torch))
        pins.flush()
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", pins.name]
        # The build backend first: an isolated build would fetch its own, unpinned.
        subprocess.run([*pip, "hatchling", "editables"], check=True)
        subprocess.run([*pip, "--no-build-isolation", "-e", f"{ROOT}[dev,plot]", f"torch=={args.torch}"], check=True)
    (args.venv / ".ready").touch()


if __name__ == "__main__":
    main()
