import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchshard.errors import ShardingError
from torchshard.layout.pieces import nested_piece
from torchshard.layout.strided import factors_from_order, order_from_factors, split_factors, strided_intervals


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 40), st.data())
def test_a_nesting_order_survives_split_factors_or_is_refused(mesh_shape, n, data):
    order = data.draw(st.permutations(range(len(mesh_shape))))
    try:
        factors = factors_from_order(n, order, mesh_shape)
    except ShardingError:
        assert n % math.prod(mesh_shape)
        assert order_from_factors(n, split_factors(order, mesh_shape), mesh_shape) is None
        return
    back = order_from_factors(n, factors, mesh_shape)
    for place in np.ndindex(*mesh_shape):
        sizes, k = [mesh_shape[a] for a in back], [place[a] for a in back]
        start, length = nested_piece(n, sizes, k)
        assert strided_intervals(n, factors, mesh_shape, place) == ([(start, length)] if length else [])


def test_known_pieces():
    # 7 rows, tp 2 splits first, then fsdp 3: torch gives row 6 to fsdp 2, tp 0; nested pieces give it nothing.
    assert strided_intervals(7, {0: 2, 1: 1}, (3, 2), (2, 0)) == [(6, 1)]
    # 13 rows: no interval at all.
    assert strided_intervals(13, {0: 2, 1: 1}, (3, 2), (2, 0)) == [(6, 1), (11, 1)]
    with pytest.raises(ShardingError, match="no placement for this nesting order"):
        factors_from_order(7, (1, 0), (3, 2))
    assert factors_from_order(12, (1, 0), (3, 2)) == {1: 1, 0: 2}
