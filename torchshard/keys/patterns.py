r"""Patterns of keys that can be turned round: literal text with groups, `layers.(\d+).mlp` to `blocks.\1.ffn`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torchshard.errors import ShardingError

Piece = tuple[str, int]
"""Literal text with 0, or the regular expression of a group with its number."""


@dataclass(frozen=True)
class Pattern:
    """A pattern; made by `of`.

    Attributes:
        text: as it was written.
        pieces: literal text and groups in turn.
        regex: what it means; it fits whole segments between dots.
    """

    text: str
    pieces: tuple[Piece, ...]
    regex: re.Pattern[str]

    @staticmethod
    def of(text: str) -> "Pattern":
        """Read a pattern: all is literal but groups; a backslash makes a parenthesis or a dot literal too.

        Raises:
            ShardingError: groups that are nested or not closed, or a regular expression outside of them.
        """
        pieces, at, literal, groups = [], 0, "", 0
        while at < len(text):
            if text[at] == "(":
                end = text.find(")", at)
                inner = text[at + 1 : end]
                if end < 0 or "(" in inner or inner.startswith("?"):
                    raise _unreadable(text, "groups that are closed, and neither nested nor special")
                groups += 1
                pieces += [(literal, 0), (inner, groups)]
                literal, at = "", end + 1
            elif text[at] == "\\":
                if text[at + 1 : at + 2].isalnum() or at + 1 == len(text):
                    raise _unreadable(text, r"regular expressions in groups only, as in layers.(\d+)")
                literal, at = literal + text[at + 1], at + 2
            else:
                literal, at = literal + text[at], at + 1
        return Pattern.made(text, (*pieces, (literal, 0)))

    @staticmethod
    def made(text: str, pieces: tuple[Piece, ...]) -> "Pattern":
        """The pattern of these pieces."""
        pieces = tuple([piece for piece in pieces if piece != ("", 0)])
        body = "".join([f"({piece})" if group else re.escape(piece) for piece, group in pieces])
        first, last = (pieces[0], pieces[-1]) if pieces else (("", 0), ("", 0))
        before = "" if not first[1] and first[0].startswith(".") else r"(?:^|(?<=\.))"
        after = "" if not last[1] and last[0].endswith(".") else r"(?=\.|$)"
        return Pattern(text, pieces, re.compile(before + body + after))

    def fitting(self, keys: Iterable[str]) -> list[str]:
        """The keys in which it fits somewhere."""
        # Looking for text takes a tenth of what a regular expression takes, and finds most of what does not fit.
        literal = max([piece for piece, group in self.pieces if not group], key=len, default="")
        search = self.regex.search
        return [key for key in keys if literal in key and search(key)]

    def replace(self, key: str, replacement: str) -> str:
        """The key with what fits replaced, everywhere."""
        pieces = template(replacement)
        return self.regex.sub(lambda found: "".join([found[g] if g else piece for piece, g in pieces]), key)

    def turned_round(self, replacement: str) -> tuple["Pattern", str]:
        """The pattern that fits what `replacement` makes, and the replacement that makes the old text of it.

        Raises:
            ShardingError: a group that the replacement has not, or not once.
        """
        groups = {number: piece for piece, number in self.pieces if number}
        pieces = template(replacement)
        used = [number for _, number in pieces if number]
        if sorted(used) != sorted(groups):
            raise ShardingError(
                "A rename that cannot be turned round.",
                expected=f"each of the groups {sorted(groups)} once in the replacement",
                got=used,
                where=f"{self.text!r} to {replacement!r}",
            )
        places = {number: place + 1 for place, number in enumerate(used)}
        turned = [(groups[number], places[number]) if number else (piece, 0) for piece, number in pieces]
        back = "".join([rf"\{places[number]}" if number else _escaped(piece) for piece, number in self.pieces])
        return Pattern.made(replacement, tuple(turned)), back


def template(replacement: str) -> list[Piece]:
    r"""Literal text and the numbers of groups in a replacement; `\\` is a backslash."""
    pieces: list[Piece] = []
    for text, number in re.findall(r"((?:[^\\]|\\\D)+)|\\(\d)", replacement):
        pieces.append((re.sub(r"\\(.)", r"\1", text), 0) if text else ("", int(number)))
    return pieces


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\")


def _unreadable(text: str, expected: str) -> ShardingError:
    return ShardingError("A pattern of keys cannot be read.", expected=expected, got=repr(text))
