"""README and docs are true: every block runs, every link leads somewhere.

    ```python    a script of its own, run in a process of its own (tests/interpreters.py); "```python torch>=2.13" where
                 an older torch can't
    ```console   `$ torchshard ...` and `$ python ...` are run; of others it is checked that what they name exists
    ```text      anything else, not run

The blocks of a page run one after another in one empty directory, so that a page can be followed from its top.
"""

import re
import shlex
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.interpreters import run_python

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

LIMIT = 120  # seconds for one block or command

_FENCE = re.compile(r"^```(\w*)(?: torch>=([\d.]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line, language and text of each fenced block that this torch can run."""
    text = page.read_text()
    here = TorchVersion(torch.__version__)
    return [
        (text.count("\n", 0, m.start()) + 1, m[1], m[3]) for m in _FENCE.finditer(text) if m[2] is None or here >= m[2]
    ]


def prose(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))


def run(arguments: list[str], folder: Path, where: str) -> None:
    """Run the interpreter; on failure its output is the message."""
    code, text = run_python(arguments, folder, LIMIT)
    assert code == 0, f"{where} ended with {code}:\n{text}"


def run_command(line: str, folder: Path, where: str) -> None:
    """One `$` line of a console block: run it, or check that what it names exists."""
    program, *arguments = shlex.split(line, comments=True)
    if program == "torchshard":
        run(["-m", "torchshard", *arguments], folder, where)
    elif program == "python":
        run(arguments, folder, where)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {a for a in arguments if "=" not in a} <= set(targets), f"{where}: no such target"
    elif program == "torchrun":
        assert script_exists(arguments, folder), f"{where}: neither a module nor a file that the page made"
    else:
        assert program in ("pip", "git", "cd"), f"{where}: {program} is neither run nor checked"


def script_exists(arguments: list[str], folder: Path) -> bool:
    """Whether torchrun's arguments name a module (-m) or a file."""
    if "-m" in arguments:
        return find_spec(arguments[arguments.index("-m") + 1]) is not None
    return any((folder / a).exists() for a in arguments if a.endswith(".py"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks_run(page, tmp_path):
    for line, language, text in blocks(page):
        where = f"{page.relative_to(ROOT)}:{line}"
        if language == "python":
            script = tmp_path / f"line_{line}.py"
            script.write_text(text)
            run([script.name], tmp_path, where)
        elif language == "console":
            for command in [row[2:] for row in text.splitlines() if row.startswith("$ ")]:
                run_command(command, tmp_path, f"{where} $ {command}")
        else:
            assert language == "text", f"{where}: a block of python, console or text, not {language!r}"


def on_several_ranks(text: str) -> str | None:
    """A script as its page says to change it for torchrun; None for one that makes no group, or starts ranks itself."""
    several = text.replace('("gloo", store=dist.HashStore(), rank=0, world_size=1)', '("gloo")')
    return several if several != text else None


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks_run_under_torchrun(page, tmp_path):
    for line, language, text in blocks(page):
        if language == "python" and (several := on_several_ranks(text)):
            (tmp_path / "train.py").write_text(several)
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            run([*torchrun, "train.py"], tmp_path, f"{page.relative_to(ROOT)}:{line}")


def slugs(page: Path) -> set[str]:
    """What headings are called in links (GitHub's way)."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def links(page: Path) -> list[tuple[str, Path, str]]:
    """Each link to a place in the repository: as written, the file, the heading."""
    found = []
    for link in _LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, heading = link.partition("#")
            found.append((link, (page.parent / path).resolve() if path else page, heading))
    return found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for link, target, heading in links(page):
        assert target.exists(), f"{link}: there is no {target.relative_to(ROOT)}"
        assert not heading or heading in slugs(target), f"{link}: no such heading"


def test_every_page_is_found_from_the_readme():
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            ahead += [target for _, target, _ in links(page)]
    assert set(PAGES) <= reached


def test_the_design_tells_of_each_file():
    """By its name in a table, or by that of the folder inside of a room in which it is."""
    told = "\n".join(page.read_text() for page in (ROOT / "docs" / "design").glob("*.md"))
    names = set(re.findall(r"`(?:[\w.]+/)*(\w+\.py|\w+/)`", told))
    for path in sorted((ROOT / "torchshard").glob("*/**/*.py")):
        room, *inside = path.relative_to(ROOT / "torchshard").parts
        missing = path.name not in names and not (len(inside) > 1 and f"{inside[0]}/" in names)
        assert path.name.startswith("__") or room == "__pycache__" or not missing, f"no page of the design names {path}"


def test_files_that_the_design_names_are_there():
    there = {
        f"/{path.relative_to(ROOT).as_posix()}" for room in ("torchshard", "tests") for path in (ROOT / room).rglob("*")
    }
    for page in (ROOT / "docs" / "design").glob("*.md"):
        for name in re.findall(r"`((?:[\w.]+/)*\w+\.py)`", page.read_text()):
            ends = name.removeprefix("../")
            assert any(path.endswith(f"/{ends}") for path in there), f"{page.name}: there is no {name}"


def test_contributing_fits_on_one_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60


def test_a_block_that_fails_is_found(tmp_path):
    block = tmp_path / "block.py"
    for text, told in (("raise SystemExit(3)", "ended with 3"), ("print(missing)", "NameError: name 'missing'")):
        block.write_text(text)
        with pytest.raises(AssertionError, match=told):
            run([block.name], tmp_path, "a block")
    block.write_text("import time\ntime.sleep(60)")
    assert run_python([block.name], tmp_path, 0.5) == (-signal.SIGKILL, "")
    block.write_text("import os, sys\nprint(sys.argv, __name__, sys.path[0] == os.getcwd())")
    assert run_python([block.name, "x"], tmp_path, LIMIT) == (0, "['block.py', 'x'] __main__ True\n")
    for line in ("make nothing", "torchrun train.py", "rm -rf /"):
        with pytest.raises(AssertionError):
            run_command(line, tmp_path, line)
