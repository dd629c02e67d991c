"""Pieces of lengths that are no plain numbers."""

from torchshard.layout import pieces


class Length(int):
    """A length that can only be one number, to a trace that cannot record what is computed of it."""


def test_pieces_of_a_length_that_is_known_are_plain_numbers(monkeypatch):
    monkeypatch.setattr(pieces.Symbolic, "number", staticmethod(lambda n: int(n) if type(n) is Length else n))
    monkeypatch.setattr(
        pieces.Symbolic, "unrecorded", staticmethod(lambda function, n, *args: (Length(n), [Length(n)]))
    )
    assert type(pieces.piece(Length(7), 1, 0)[1]) is int
    start, (length,) = pieces.piece(7.0, 1, 0)  # of one that is not known: what comes of it may be
    assert (type(start), type(length)) == (int, int)
