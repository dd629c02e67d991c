"""Reading what torch.save wrote before torch 1.6, or writes with _use_new_zipfile_serialization=False.

Five pickles one after another (a magic number, the version, facts about the machine, the object, the numbers of its
storages), then the storages in that order: eight bytes of length in elements, and the elements.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from torchshard.checkpoint.dtypes import DTYPES
from torchshard.checkpoint.entries import Extent
from torchshard.checkpoint.files import Files
from torchshard.checkpoint.pickles.inert import Global
from torchshard.checkpoint.pickles.torch_values import Storage, advice, storage_named
from torchshard.checkpoint.pickles.unpickle import CutOff, load_next
from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError

MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_FIRST_LOOK = 2**20
_LONGEST = 2**28  # bytes of pickles; they hold names and shapes, not values


def read_values(files: Files, name: str, allowed: Mapping[str, Global]) -> object:
    """The object that was saved, with TensorEntries in the places of tensors.

    Raises:
        CheckpointError: damaged, of another version, or holding what is not allowed.
    """
    total, look = files.size(name), _FIRST_LOOK
    while True:
        data = files.read(name, 0, min(look, total))
        try:
            return _Reader(files, name, data, allowed).value()
        except CutOff:
            if look >= min(total, _LONGEST):
                raise
            look *= 8


class _Reader:
    """Goes over the pickles twice: where the storages lie is known only after the last."""

    def __init__(self, files: Files, name: str, data: bytes, allowed: Mapping[str, Global]) -> None:
        self.files, self.name, self.data, self.allowed = files, name, data, allowed
        self.where = files.root / name
        self.dtypes: dict[str, str | None] = {}
        self.extents: dict[str, Extent] = {}

    def value(self) -> object:
        """What the third pickle holds."""
        at = 0
        for expected in (MAGIC, _VERSION):
            found, at = load_next(self.data, at, {}, self.where)
            if found != expected:
                raise CheckpointError(
                    "This pickle is not what torch.save writes.",
                    expected=expected,
                    got=printable(found),
                    where=self.where,
                )
        machine, start = load_next(self.data, at, {}, self.where)
        if not isinstance(machine, dict) or machine.get("little_endian") is not True:
            raise CheckpointError("The file was not written on a little-endian machine.", where=self.where)
        _, at = self.object_at(start)
        names, at = load_next(self.data, at, {}, self.where)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError("The storages are not listed as torch does.", got=printable(names), where=self.where)
        self.find_extents(names, at)
        return self.object_at(start)[0]

    def object_at(self, start: int) -> tuple[object, int]:
        """The saved object, its tensors over the storages that are known."""
        return load_next(self.data, start, self.allowed, self.where, persistent=self.storage, advice=advice)

    def storage(self, pid: object) -> Storage:
        """What a persistent id stands for; before the extents are known, as large as the tensors want."""
        name, dtype = storage_named(pid, self.where)
        if isinstance(pid, tuple) and len(pid) > 5 and pid[5] is not None:
            raise CheckpointError("A view of a storage, as torch before 0.4 saved, is not read.", where=self.where)
        self.dtypes[name] = dtype
        extent = self.extents.get(name)
        nbytes = extent.nbytes if extent else None if self.extents else 2**80
        return Storage(name, dtype, nbytes, partial(self.extents.__getitem__, name), self.where)

    def find_extents(self, names: Sequence[str], at: int) -> None:
        """Go along the storages at the end of the file."""
        for name in names:
            itemsize = DTYPES[self.dtypes.get(name) or "uint8"].itemsize
            count = int.from_bytes(self.files.read(self.name, at, 8), "little")
            extent = Extent(self.files, self.name, at + 8, count * itemsize)
            if extent.offset + extent.nbytes > self.files.size(self.name):
                raise CheckpointError(
                    "A storage is longer than the file.",
                    expected=f"{printable(extent.offset + extent.nbytes)} bytes at least",
                    got=f"{self.files.size(self.name)} bytes",
                    where=f"{self.where}: storage {printable(name)}",
                )
            self.extents[name] = extent
            at = extent.offset + extent.nbytes
