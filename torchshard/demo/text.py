"""Real text to train on: the sources and texts of Python's standard library, or the user's own."""

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchshard.errors import TorchshardError

MIN_BYTES = 100_000
MAX_BYTES = 16 << 20
_SUFFIXES = (".py", ".txt", ".md", ".rst")


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from, and bytes of other files to be judged by (numpy arrays of uint8).

    Attributes:
        entropy: of the single bytes of `held_out`, in bits a byte: the loss of a model that knows how frequent each is.
    """

    train: Any
    held_out: Any
    files: int

    @property
    def entropy(self) -> float:
        """See the class."""
        import numpy as np

        counts = np.bincount(self.held_out, minlength=256)
        total = len(self.held_out)
        shares: list[float] = [n / total for n in counts.tolist() if n]
        return -sum([share * math.log2(share) for share in shares])


def find_text(path: Path | None) -> Corpus:
    """Read the standard library, or what is at `path`: a file, or all texts below a folder.

    Every tenth file is held out; of a single file, its last tenth.

    Raises:
        TorchshardError: nothing there, or too little of it.
    """
    import numpy as np

    root = path or Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise TorchshardError(
            "No text to train on.", expected="a file or a folder", got=f"nothing at {root}", where="--data"
        )
    texts = [file.read_bytes() for file in _files(root)]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        texts = [texts[0][cut:], texts[0][:cut]]
    held_out, train = b"".join(texts[::10]), b"".join([t for k, t in enumerate(texts) if k % 10])
    if len(train) + len(held_out) < MIN_BYTES:
        raise TorchshardError(
            "Too little text to train on.",
            expected=f"at least {MIN_BYTES:,} bytes in files that end in {', '.join(_SUFFIXES)}",
            got=f"{len(train) + len(held_out):,} bytes in {len(texts)} files at {root}",
            where="--data",
            fix="give a larger file or folder, or leave --data out to use Python's standard library",
        )
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), len(texts))


def _files(root: Path) -> list[Path]:
    """Text files in an order that does not depend on the machine, up to MAX_BYTES in all."""
    if root.is_file():
        return [root]
    chosen: list[Path] = []
    total = 0
    for file in sorted(root.rglob("*")):
        parts = file.relative_to(root).parts
        if file.suffix in _SUFFIXES and file.is_file() and not {"site-packages", "test", "tests"} & set(parts):
            total += file.stat().st_size
            if total > MAX_BYTES and chosen:
                break
            chosen.append(file)
    return chosen
