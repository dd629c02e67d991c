"""Reading sets of torch.save files, one of each rank (`model_rank0.pt`, ...), as one checkpoint."""

import copy
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchshard.checkpoint.entries import Index
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats import torch_file
from torchshard.checkpoint.formats.joining import check_ranks, joined
from torchshard.checkpoint.pickles.inert import OrderedDict
from torchshard.errors import CheckpointError

_RANK = re.compile(r"(.*?rank[_-]?)(\d{1,6})(\D*)\Z", re.DOTALL)
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def find(folder: Path) -> list[Path]:
    """The files of a folder that are one of each rank, in the order of ranks; none where there are none.

    Raises:
        CheckpointError: two sets, or a set with a hole.
    """
    sets: dict[tuple[str, str], dict[int, Path]] = {}
    for path in folder.iterdir():
        if path.suffix in SUFFIXES and (match := _RANK.match(path.name)):
            sets.setdefault((match[1], match[3]), {})[int(match[2])] = path
    if len(sets) > 1:
        names = ", ".join(sorted(f"{head}*{tail}" for head, tail in sets))
        raise CheckpointError(
            "The folder holds several sets of files.", got=names, where=folder, fix="Open one by its pattern."
        )
    return ordered([path for files in sets.values() for path in files.values()])


def ordered(paths: Sequence[Path]) -> list[Path]:
    """The paths by rank.

    Raises:
        CheckpointError: a name without a rank, a rank twice or missing.
    """
    ranks: dict[int, Path] = {}
    for path in paths:
        match = _RANK.match(path.name)
        if match is None or int(match[2]) in ranks:
            raise CheckpointError(
                "The files are not one of each rank.", expected="names such as model_rank0.pt", got=path.name
            )
        ranks[int(match[2])] = path
    check_ranks(ranks, paths[0].parent if paths else None)
    return [ranks[rank] for rank in sorted(ranks)]


def read(paths: Sequence[Path]) -> Index:
    """The index of all files together.

    Raises:
        CheckpointError: a file is damaged, or the parts do not make up a tensor.

    Warns:
        UserWarning: names what differs from rank to rank without saying how.
    """
    files = Files(paths[0].parent, found=[path.name for path in paths])
    parts = [torch_file.read_part(files, path.name) for path in paths]
    ranks = {int(_RANK.match(path.name)[2]): part.entries for path, part in zip(paths, parts, strict=True)}  # type: ignore[index]
    sized = {name: size for part in parts for name, size in part.files.items()}
    return joined("torch", ranks, lambda: functools.reduce(_united, [part.tree() for part in parts]), sized, files)


def _united(a: Any, b: Any) -> Any:
    """The nesting of two ranks: what the first has, and what it lacks of the second."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a
    made = copy.copy(a)
    made.update({key: _united(a[key], value) if key in a else value for key, value in b.items()})
    if isinstance(made, OrderedDict) and isinstance(b, OrderedDict):
        made.attributes = _united(made.attributes or {}, b.attributes or {}) or None  # as _metadata
    return made
