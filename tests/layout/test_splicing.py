"""Whose rows lie where: laws on small numbers, played on lists of all ranks."""

from hypothesis import given
from hypothesis import strategies as st

from torchshard.layout.pieces import nested_pieces
from torchshard.layout.splicing import Run, splice


@st.composite
def splices(draw):
    """Lengths of tensors, runs of a result, and its length: no place is taken twice, no row lies outside."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    runs, at = [], 0
    for _ in range(draw(st.integers(0, 4))):
        source, step = draw(st.integers(0, len(lengths) - 1)), draw(st.integers(1, 3))
        rows = list(range(lengths[source]))[draw(st.integers(0, 9)) :: step][: draw(st.integers(0, 9))]
        apart = draw(st.integers(1, 3))
        at += draw(st.integers(0, 2))
        runs.append(Run(rows[0] if rows else 0, step, at, apart, len(rows), source))
        at += apart * len(rows)
    return lengths, runs, at + draw(st.integers(0, 3))


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=2)


def whole(lengths, runs, length):
    result = [None] * length
    for run in runs:
        for k in range(run.length):
            result[run.at + k * run.apart] = (run.source, run.start + k * run.step)
    return result


@given(splices(), sizes)
def test_every_rank_gets_its_rows(drawn, sizes):
    lengths, runs, length = drawn
    *held, wanted = [nested_pieces(n, sizes) for n in (*lengths, length)]
    ways = [splice(runs, held, [wanted], k) for k in range(len(wanted))]
    want = whole(*drawn)
    for k, way in enumerate(ways):
        result = [None] * wanted[k][1]
        for giver, there in enumerate(ways):
            assert there.given[k] == way.taken[giver]  # both ends know what is sent, and in what order
            for run in way.taken[giver]:
                for i in range(run.length):
                    row = run.start + i * run.step
                    assert 0 <= row < held[run.source][giver][1]
                    assert result[run.at + i * run.apart] is None
                    result[run.at + i * run.apart] = run.source, held[run.source][giver][0] + row
        assert result == want[wanted[k][0] : sum(wanted[k])]
        apart = any(way.given[j] for way in ways for j in range(len(ways)) if j != way.here)
        assert way.apart == apart


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 4), sizes)
def test_the_way_back(n, start, step, sizes):
    taken = range(n)[start::step]
    runs = [Run(taken.start, step, 0, 1, len(taken))]
    base, view = nested_pieces(n, sizes), nested_pieces(len(taken), sizes)
    for k in range(len(base)):
        there, back = splice(runs, [base], [view], k), splice([r.turned() for r in runs], [view], [base], k)
        assert [[r.turned() for r in way] for way in there.taken] == back.given
        assert [[r.turned() for r in way] for way in there.given] == back.taken
