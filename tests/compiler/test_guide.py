"""Every block of the guide runs as a script of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "compile.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block(number):
    done = subprocess.run([sys.executable, "-c", BLOCKS[number]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
