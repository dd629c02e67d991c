"""Which tests of the suite have to pass: the committed lists beside this file.

passing.txt    a name a line: pass with torch's class and with ours
waiting.txt    name: what it waits for; pass with torch's class, not yet with ours
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def passing() -> list[str]:
    """Tests that must pass."""
    return (_HERE / "passing.txt").read_text().split()


def waiting() -> dict[str, str]:
    """Tests that will have to pass, and what is missing."""
    lines = (_HERE / "waiting.txt").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if line)
