"""Which tensors of a file overlap: against counting their elements."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchshard import checkpoint
from torchshard.checkpoint.sharing import overlapping

NUMBERS = torch.arange(64)


def blocks(rows, columns):
    """Parts of an 8 x 8 matrix, some transposed, some of one row or column."""
    return NUMBERS.reshape(8, 8)[rows[0] : rows[0] + rows[1], columns[0] : columns[0] + columns[1]]


pair = st.tuples(st.integers(0, 7), st.integers(1, 8))
grid = st.builds(lambda a, b, t: blocks(a, b).t() if t else blocks(a, b), pair, pair, st.booleans())
dims = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=3)
strided = st.builds(lambda d, at: NUMBERS.as_strided([n for n, _ in d], [s for _, s in d], at), dims, st.integers(0, 9))


def joined(views):
    """Positions of views in groups: those that have a number in common, at first or second hand."""
    groups = []
    for at, view in enumerate(views):
        values = set(view.flatten().tolist())
        meeting = [group for group in groups if group[1] & values]
        groups = [group for group in groups if group not in meeting]
        groups.append(([*[i for g in meeting for i in g[0]], at], values.union(*[g[1] for g in meeting])))
    return {frozenset(group) for group, _ in groups if len(group) > 1}


@settings(max_examples=60, deadline=None)
@given(st.lists(grid, min_size=2, max_size=6), st.lists(strided, max_size=2))
def test_groups_are_those_of_common_elements(tmp_path_factory, regular, others):
    path = tmp_path_factory.mktemp("views") / "a.pt"
    for views in (regular, [*regular, *others]):
        torch.save({f"{at}": view for at, view in enumerate(views)}, path)
        with checkpoint.open(path) as ck:
            found = {frozenset(map(int, group)) for group in overlapping(dict(ck))}
        if views is regular:
            assert found == joined(views)
        else:  # what is not of one grid may count as overlapping, and nothing that overlaps is missed
            assert all(any(group <= larger for larger in found) for group in joined(views))


def test_very_many_views_of_one_place_count_as_overlapping(tmp_path):
    torch.save({f"{i}": NUMBERS[i % 40 :: 40] for i in range(1000)}, tmp_path / "a.pt")
    with checkpoint.open(tmp_path / "a.pt") as ck:
        assert len(overlapping(dict(ck))) == 1
