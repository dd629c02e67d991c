import zlib

from hypothesis import given
from hypothesis import strategies as st

from torchshard.checkpoint.moving.checksums import combine


@given(st.binary(), st.binary())
def test_combine_is_the_checksum_of_both(a, b):
    assert combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_lengths_beyond_four_gib():
    half = 0
    block = zlib.crc32(bytes(2**20))
    for _ in range(5):
        half = combine(half, block, 2**20)
    once = combine(half, half, 5 * 2**20)
    assert combine(0, once, 2**33) == once
    # x ** (8 * 2 ** 33) taken at once and in two steps
    assert combine(combine(1, 0, 2**32), 0, 2**32) == combine(1, 0, 2**33)
