"""Another state dict from that of a checkpoint: merged, chosen, renamed, cast. Only names and boxes change."""

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchshard.checkpoint.entries import Entry, Index, ObjectEntry, Piece, Place, TensorEntry, common_notes, narrowed
from torchshard.checkpoint.moving import casting
from torchshard.checkpoint.pickles.inert import OrderedDict
from torchshard.checkpoint.regrouping import DROPPED, Regrouped
from torchshard.checkpoint.text import check_matches, printable, said_of
from torchshard.checkpoint.trees import as_step, same
from torchshard.errors import CheckpointError
from torchshard.keys import KeyRules
from torchshard.keys.globs import Globs
from torchshard.keys.rules import Fuse, Split, Transpose
from torchshard.layout import Box, whole

Rename = Callable[[str], str] | KeyRules


@dataclass(frozen=True, slots=True)
class Edits:
    """What is to be changed.

    Args:
        select: globs of keys, one of which a key must match; none means all.
        exclude: globs of keys that are left out.
        dtypes: glob of keys to the type that floating-point tensors are cast to, the first that matches.
        rename: gives the new name of a key, or rules that also join, split and transpose; None keeps all names.
    """

    select: Sequence[str] = ()
    exclude: Sequence[str] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    rename: Rename | None = None

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """The keys that are kept."""
        chosen, left_out = Globs(self.select or ("*",)), Globs(self.exclude)
        return [key for key in keys if chosen.first(key) is not None and left_out.first(key) is None]


def edited(index: Index, edits: Edits) -> Index:
    """The index with the edits made: first chosen, then cast, then renamed; all patterns are of the original names.

    Raises:
        CheckpointError: a pattern that no key matches, a type that is not cast to, or two keys with one new name.
    """
    if edits == Edits():
        return index
    check_matches((*edits.select, *edits.exclude), index.entries)
    for to in edits.dtypes.values():
        casting.check_target(to)
    globs = said_of(index.entries, {glob: glob for glob in edits.dtypes})
    _check_casts(index.entries, globs, edits.dtypes)
    chosen: dict[str, Entry] = {}
    for key in edits.wanted(index.entries):
        entry = index.entries[key]
        target = edits.dtypes[globs[key]] if key in globs else None
        chosen[key] = _cast(key, entry, target) if isinstance(entry, TensorEntry) else entry
    if index.entries and not chosen:
        raise CheckpointError(
            "The patterns leave no key, so that there is nothing to write.",
            expected=f"a key that one of {list(edits.select or ['*'])} matches, and none of {list(edits.exclude)}",
            got=f"{len(index.entries)} keys, all of them left out",
            fix="Give other patterns to select or exclude; inspect shows the keys.",
        )
    entries, olds = (chosen, {}) if edits.rename is None else _renamed(chosen, edits.rename)
    entries = {key: entry if chosen.get(key) is entry else replace(entry, key=key) for key, entry in entries.items()}
    where = f"the state dict of {index.opened[0].root}" if index.opened else "the state dict"

    def leaf(key: str, value: object) -> object:
        entry = entries.get(key, DROPPED)
        # An object of a torch.save file lies in the nested state dict itself.
        lies_there = isinstance(entry, ObjectEntry) and not isinstance(value, ObjectEntry)
        return value if lies_there and entry is chosen.get(key) else entry

    def tree() -> object:
        made = Regrouped(index.tree(), leaf, where)
        for key, entry in entries.items():
            if key not in made.paths:
                made.add(key, entry, olds.get(key))
        return made.made()

    return replace(index, entries=entries, tree=tree)


def _renamed(entries: Mapping[str, Entry], rename: Rename) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries by new names, and the old names; of what is made of several the first."""
    if isinstance(rename, KeyRules):
        rules = KeyRules(rename.rules, strict=rename.strict)
        rules.arrays = _Entries()
        renamed: dict[str, Entry] = dict(rules.of_flat(entries))
    else:
        renamed = {}
        for new, (old, *more) in _names(entries, rename).items():
            if more:
                raise CheckpointError("Two keys have the same new name.", got=printable(new), where=printable(more[0]))
            renamed[new] = entries[old]
    olds = {new: sources[0] for new, sources in _names(entries, rename).items()}
    for new, entry in renamed.items():
        old = olds.get(new, new)
        if isinstance(entry, ObjectEntry) and (group := _GROUP.fullmatch(old)) is not None:
            state = f"{group[1]}state.", f"{new.removesuffix(group[2])}state."
            renamed[new] = ObjectEntry(partial(_parameters, entry, old, state, rename), entry.nbytes, old)
    return renamed, olds


def _names(keys: Iterable[str], rename: Rename) -> Mapping[str, Sequence[str]]:
    """New key -> the old keys that become it."""
    if isinstance(rename, KeyRules):
        return KeyRules(rename.rules).renamed(keys)
    found: dict[str, list[str]] = {}
    for key in keys:
        new = rename(key)
        if not isinstance(new, str):
            raise CheckpointError("The new name of a key is no text.", got=printable(new), where=printable(key))
        found.setdefault(new, []).append(key)
    return found


_GROUP = re.compile(r"((?:.*\.)?)(param_groups\.\d+\.param(?:s|_names))", re.DOTALL)  # of an optimizer


def _parameters(entry: ObjectEntry, key: str, state: tuple[str, str], rename: Rename) -> object:
    """Which parameters a group of an optimizer has, by the names that what is kept for them gets."""
    before, after = state
    names: Any = entry.value()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        if isinstance(rename, KeyRules) and any(isinstance(rule, Fuse | Split | Transpose) for rule in rename.rules):
            raise CheckpointError(
                "Parameters that go by numbers cannot be joined, taken apart or transposed.",
                expected="an optimizer's state by names of parameters",
                got=printable(names),
                where=printable(key),
                fix="Leave the optimizer out (exclude), or save what get_optimizer_state_dict of torch makes.",
            )
        return names
    places = {before + name: place for place, name in enumerate(names)}
    sources = _names(places, rename)
    for new in sources:
        if not new.startswith(after):
            raise CheckpointError(
                "A parameter is renamed out of the state of its optimizer.",
                expected=f"{printable(after)}...",
                got=printable(new),
                where=printable(key),
            )
    return [new.removeprefix(after) for new in sorted(sources, key=lambda new: places[sources[new][0]])]


def _check_casts(entries: Mapping[str, Entry], globs: Mapping[str, str], dtypes: Iterable[str]) -> None:
    """Raise CheckpointError if a glob chooses a type for keys of which none can be cast; "*" is for all that can be."""
    floating = {globs[key] for key in globs if getattr(entries[key], "dtype", None) in casting.FLOATING}
    for glob in dtypes:
        if glob not in floating and glob != "*":
            key = next(key for key in globs if globs[key] == glob)
            raise CheckpointError(
                "No floating-point tensor matches this pattern, and only such are cast.",
                got=f"{printable(glob)}, which is for {getattr(entries[key], 'dtype', 'an object')}",
                where=printable(key),
                fix="Leave it out; inspect shows the types.",
            )


def _cast(key: str, entry: TensorEntry, target: str | None) -> TensorEntry:
    if target is None or target == entry.dtype or entry.dtype not in casting.FLOATING:
        return entry
    casting.check(entry.stored_dtype, target, printable(key))
    return replace(entry, dtype=target, stored=entry.stored_dtype)


def merged(indices: Sequence[Index]) -> Index:
    """One index of several checkpoints, which may not have a key in common.

    Raises:
        CheckpointError: names a key that two of them have.

    Warns:
        UserWarning: names the notes, and the metadata of modules, that differ; they are left out.
    """
    if len(indices) == 1:
        return indices[0]
    entries: dict[str, Entry] = {}
    files: dict[str, int] = {}
    places: list[str] = []
    for index in indices:
        root = index.opened[0].root if index.opened else ""
        where = f"{root}/{next(iter(index.files))}" if len(index.files) == 1 else f"{root}"
        places.append(where)
        for key, entry in index.entries.items():
            if key in entries:
                raise _same_key(key, where)
            entries[key] = entry
        files |= {f"{root}/{name}": size for name, size in index.files.items()}

    @functools.cache
    def tree() -> object:
        made: Any = indices[0].tree()
        for index, where in zip(indices[1:], places[1:], strict=True):
            made = _united(made, index.tree(), where)
        return made

    opened = tuple([files for index in indices for files in index.opened])
    formats = " and ".join(dict.fromkeys(index.format for index in indices))
    return Index(formats, entries, tree, files, {}, opened, common_notes(indices))


def _same_key(key: str, where: str) -> CheckpointError:
    return CheckpointError(
        "Two of the checkpoints have the same key.",
        got=printable(key),
        where=where,
        fix="Leave it out of one of them, or convert them one by one.",
    )


def _united(a: Any, b: Any, where: str, path: str = "") -> dict[Any, Any]:
    """A dict of what two hold, of their class, as a Counter that was taken apart; dicts of one name become one."""
    kinds: set[type[dict[Any, Any]]] = {type(a), type(b)}
    kind = kinds.pop() if len(kinds) == 1 else OrderedDict if OrderedDict in kinds else dict
    made = kind(a)
    for key, value in b.items():
        here = a.get(key)
        if isinstance(here, dict) and isinstance(value, dict):
            value = _united(here, value, where, f"{path}{as_step(key)}.")
        elif key in a:
            raise _same_key(f"{path}{as_step(key)}", where)
        made[key] = value
    if isinstance(made, OrderedDict):
        made.attributes = _attributes_of(a, b, path)
    return made


def _attributes_of(a: Any, b: Any, path: str) -> dict[Any, Any] | None:
    """The attributes of two dicts, as the _metadata of modules' state dicts; what differs is left out, and named."""
    ours, theirs = [getattr(tree, "attributes", None) or {} for tree in (a, b)]
    made: dict[Any, Any] = ours | theirs
    apart: list[str] = []
    for key in [key for key in ours if key in theirs and not same(ours[key], theirs[key])]:
        x, y = ours[key], theirs[key]
        if not isinstance(x, dict) or not isinstance(y, dict):
            apart.append(f"{path}{as_step(key)}")
            del made[key]
            continue
        made[key] = OrderedDict(x | y) if isinstance(x, OrderedDict) else x | y
        for name in [name for name in x if name in y and not same(x[name], y[name])]:
            # Of a module, the one counts that holds something of it.
            holds = [any(as_step(k).startswith(f"{as_step(name)}.") for k in tree) for tree in (a, b)]
            if holds[0] != holds[1]:
                made[key][name] = (x if holds[0] else y)[name]
            else:
                apart.append(f"{path}{as_step(key)}: {as_step(name)}")
                del made[key][name]
    if apart:
        warnings.warn(f"metadata that differ are left out: {', '.join(map(printable, apart))}", stacklevel=4)
    return made or None


# --- tensors made of others, without reading them ----------------------------------------------------------------


class _Entries:
    """What KeyRules do to tensors that are not read."""

    def ndim(self, x: Any) -> int | None:
        """Number of dims; None for an object."""
        return len(x.shape) if isinstance(x, TensorEntry) else None

    def kind(self, x: TensorEntry) -> tuple[Any, tuple[int, ...]]:
        """Dtype, in the tensor and where it is stored, and shape."""
        return (x.dtype, x.stored_dtype), x.shape

    def cut(self, x: TensorEntry, dim: int, start: int, length: int) -> TensorEntry:
        """Part of a tensor."""
        box = whole(x.shape)
        offset = (*box.offset[:dim], start, *box.offset[dim + 1 :])
        return part(x, Box(offset, (*x.shape[:dim], length, *x.shape[dim + 1 :])))

    def join(self, parts: Sequence[TensorEntry], dim: int) -> TensorEntry:
        """Tensors joined."""
        return concatenated(parts, dim)

    def transpose(self, x: TensorEntry) -> TensorEntry:
        """The last two dims exchanged."""
        *first, rows, columns = range(len(x.shape))
        return permuted(x, (*first, columns, rows))

    def same(self, a: object, b: object) -> bool:
        """Whether two values are known to be equal."""
        return a is b


def concatenated(entries: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """The tensors one after another along a dim."""
    first, at, pieces = entries[0], 0, list[Piece]()
    for entry in entries:
        rest = [(a, b) for d, (a, b) in enumerate(zip(entry.shape, first.shape, strict=True)) if d != dim]
        if entry.dtype != first.dtype or entry.stored_dtype != first.stored_dtype or any(a != b for a, b in rest):
            raise CheckpointError(
                "Tensors that are joined differ in type or shape.",
                expected=f"{first.dtype} {first.shape}",
                got=f"{entry.dtype} {entry.shape}",
                where=printable(entry.key),
            )
        for piece in entry.pieces:
            offset = tuple([o + at * (d == dim) for d, o in enumerate(piece.box.offset)])
            pieces.append(Piece(Box(offset, piece.box.size), piece.place))
        at += entry.shape[dim]
    shape = (*first.shape[:dim], at, *first.shape[dim + 1 :])
    return replace(first, shape=shape, pieces=tuple(pieces), sharding=None)


def part(entry: TensorEntry, box: Box) -> TensorEntry:
    """The tensor that a box of another is."""
    itemsize = entry.itemsize_stored
    pieces = []
    for piece in entry.pieces:
        if (common := piece.box.meet(box)) is not None:
            at = tuple([a - b for a, b in zip(common.offset, box.offset, strict=True)])
            pieces.append(narrowed(piece, common, at, itemsize))
    return replace(entry, shape=box.size, pieces=tuple(pieces), sharding=None)


def permuted(entry: TensorEntry, dims: Sequence[int]) -> TensorEntry:
    """The tensor with its dims in another order."""

    def turned(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([values[d] for d in dims])

    def find(piece: Piece) -> Place:
        place = piece.place()
        return Place(place.extent, place.start, turned(place.stride))

    pieces = tuple(
        [Piece(Box(turned(p.box.offset), turned(p.box.size)), lambda p=p: find(p)) for p in entry.pieces]  # type: ignore[misc]
    )
    return replace(entry, shape=turned(entry.shape), pieces=pieces, sharding=None)
