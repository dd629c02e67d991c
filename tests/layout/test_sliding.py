"""What windows read along split dims: laws on small numbers, one position at a time."""

import itertools

from torchshard.layout import Mesh, Shard
from torchshard.layout.sliding import Slide, reach


def test_a_rank_reads_what_its_results_are_made_of():
    for n, parts, kernel, stride, padding, dilation in itertools.product(
        (1, 2, 5, 7, 8), (1, 2, 3, 4), (1, 2, 3), (1, 2, 4), (0, 1, 3), (1, 2)
    ):
        results = (n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        if results < 1:
            continue
        slide = Slide(kernel, stride, padding, dilation, results)
        mesh = Mesh((parts,))
        rows = mesh.sharding([Shard(1)])
        for k in range(parts):
            held, read = reach(rows, (3, n), {1: slide}, (k,))
            made = rows.box((3, results), (k,))
            positions = {
                r * stride - padding + step * dilation
                for r in range(made.offset[1], made.stop[1])
                for step in range(kernel)
            }
            assert held == rows.box((3, n), (k,))
            assert (read.box.offset[0], read.size[0]) == (0, 3)
            assert read.size[1] == (max(positions) - min(positions) + 1 if positions else 0)
            if positions:
                assert read.start[1] == min(positions) or not read.box.numel
                inside = {p for p in positions if 0 <= p < n}
                assert inside <= set(range(read.box.offset[1], read.box.stop[1]))
            assert min(read.before[1], read.after[1], read.box.size[1]) >= 0
