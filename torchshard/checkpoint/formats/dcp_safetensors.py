"""Values of torch.distributed.checkpoint that are stored as safetensors: all tensors of a file behind its objects.

That is what `FileSystemWriter(serialization_format=SerializationFormat.SAFETENSORS)` writes; torch itself has nothing
that reads it. The metadata say where the safetensors part of a file begins, the same place for each of its tensors.
"""

from collections.abc import Mapping
from typing import Any

from torchshard.checkpoint.entries import Place, TensorEntry
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.formats import safetensors
from torchshard.checkpoint.formats.hugging_face import saved_offset
from torchshard.checkpoint.formats.json_text import parse
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError
from torchshard.layout import Box


class Blocks:
    """Finds the values in the safetensors parts of files, each read once. Safe for several threads."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._known: dict[tuple[str, int], Mapping[str, tuple[TensorEntry, Any]]] = {}

    def place(self, key: str, box: Box, dtype: str, at: tuple[str, int]) -> Place:
        """Where the elements of a box are.

        Args:
            key: of its tensor.
            box: of the tensor.
            dtype: of its elements.
            at: file, and offset of the part of it that is safetensors.

        Raises:
            CheckpointError: damaged, or it does not hold this box.
        """
        known = self._known.get(at)
        if known is None:
            known = self._known[at] = self._read(*at)
        where = f"{self.files.root / at[0]}: {printable(key)}"
        if key not in known:
            raise CheckpointError("A file lacks a key that the metadata say it holds.", where=where)
        entry, fields = known[key]
        offset = saved_offset(fields, entry, where)
        if (entry.dtype, offset, entry.shape) != (dtype, box.offset, box.size):
            raise CheckpointError(
                "A file holds another piece than the metadata say.",
                expected=f"{dtype} {box}",
                got=f"{entry.dtype} {Box(offset, entry.shape)}",
                where=where,
                fix="Of several pieces of a tensor torch keeps the last in a file of safetensors: save again, in its "
                "own format or with single_file_per_rank=False.",
            )
        return entry.pieces[0].place()

    def _read(self, file: str, start: int) -> Mapping[str, tuple[TensorEntry, Any]]:
        """The tensors by key, and what is said of the place of each in the full one."""
        index = safetensors.read(self.files, file, start)
        field = safetensors.SHARDING
        said = parse(index.metadata.get(field, "{}").encode(), f"field {field}", self.files.root / file)
        return {key: (entry, said.get(key)) for key, entry in index.entries.items() if isinstance(entry, TensorEntry)}
