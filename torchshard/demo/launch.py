"""`torchshard demo`: starts ranks.py on every rank through torchrun's launcher."""

import os
import subprocess
import sys
from pathlib import Path

from torchshard.errors import TorchshardError


def launch(data: Path | None, out: Path, ranks: int, steps: int) -> int:
    """Run the demo on `ranks` processes of this machine; returns the exit code, 0 if every check passed."""
    from torchshard.demo.text import find_text

    find_text(data)  # say what is wrong before anything is started
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TorchshardError("Results cannot be written there.", got=error.strerror, where=f"--out {out}") from error
    arguments = ["--out", str(out), "--steps", str(steps)]
    if data is not None:
        arguments += ["--data", str(data)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    return subprocess.run(
        [sys.executable, *launcher, "-m", "torchshard.demo.ranks", *arguments], env=environment, check=False
    ).returncode
