"""A checkpoint in several files with an index, as Hugging Face names them: model-00001-of-00003.safetensors, ..."""

import json
from collections.abc import Iterator, Mapping, Sequence

from torchshard.checkpoint.entries import TensorEntry
from torchshard.checkpoint.formats.out import OutFile


def parts_of(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Keys in their order, in parts of at most `limit` bytes; a key larger than that has a part of its own."""
    parts: list[list[str]] = [[]]
    room = limit
    for key, nbytes in sizes.items():
        if nbytes > room and parts[-1]:
            parts.append([])
            room = limit
        parts[-1].append(key)
        room -= nbytes
    return parts


def named(stem: str, suffix: str, parts: Sequence[Sequence[str]]) -> Iterator[tuple[str, Sequence[str]]]:
    """Each part with the name of its file."""
    for i, keys in enumerate(parts):
        yield f"{stem}-{i + 1:05}-of-{len(parts):05}{suffix}", keys


def index_file(
    name: str, stem: str, suffix: str, parts: Sequence[Sequence[str]], tensors: Mapping[str, TensorEntry]
) -> OutFile:
    """The index: which file holds which key."""
    weight_map = {key: file for file, keys in named(stem, suffix, parts) for key in keys}
    total = sum([entry.nbytes for entry in tensors.values()])
    body = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()
    return OutFile(name, (), len(body), (body,), lambda crcs: iter([(0, body)]))
