"""Floating-point numbers in fewer bytes, without loss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchshard.comm.packing import DTYPES, can_pack, pack, unpack

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

dtypes = st.sampled_from(sorted(DTYPES, key=str))


def bits(x):
    return x.view(_BITS[x.element_size()])


def there_and_back(x):
    found = torch.empty_like(x)
    unpack(pack(x), found)
    return torch.equal(bits(found), bits(x))


@given(dtypes, st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
def test_all_bits_come_back(dtype, numbers):
    x = torch.tensor(numbers, dtype=torch.int64).view(dtype)
    assert there_and_back(x)
    assert there_and_back(x[:-1])


@given(dtypes, st.lists(st.floats(), max_size=40))
def test_all_values_come_back(dtype, numbers):
    assert there_and_back(torch.tensor(numbers, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str))
def test_what_is_not_finite_comes_back(dtype):
    info = torch.finfo(dtype)
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, info.max, info.min, info.tiny, -info.smallest_normal])
    assert there_and_back(x.to(dtype))
    assert there_and_back(x.to(dtype).view(3, 3))


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float32, 0.84), (torch.bfloat16, 0.68), (torch.float16, 0.92), (torch.float64, 0.94)],
)
def test_what_lies_around_zero_becomes_smaller(dtype, most):
    """The binary exponent of a normal variable has 2.6 bits of entropy, where float32 has 8."""
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert len(pack(x)) <= most * x.nbytes
    assert len(pack(x * 2**-10)) <= most * x.nbytes


def test_noise_hardly_becomes_larger():
    x = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    assert len(pack(x.view(torch.float32))) <= 1.001 * x.nbytes


@pytest.mark.parametrize(
    ("packed", "into"),
    [
        (pack(torch.ones(5)), torch.empty(6)),
        (pack(torch.ones(5)), torch.empty(4)),
        (pack(torch.ones(5)), torch.empty(5, dtype=torch.float64)),
        (pack(torch.ones(1)), torch.empty(5)),
        (b"", torch.empty(5)),
        (b"", torch.empty(0)),
        (pack(torch.ones(5))[:-2], torch.empty(5)),
    ],
)
def test_other_numbers_are_refused(packed, into):
    with pytest.raises(ValueError, match=r"packed numbers"):
        unpack(packed, into)


def test_what_can_be_packed():
    assert can_pack(torch.ones(3))
    assert not can_pack(torch.ones(3, dtype=torch.int32))
    assert not can_pack(torch.ones(3, dtype=torch.complex64))
    assert not can_pack(torch.ones(4, 4).t()[:, 1:])
    assert not can_pack(torch.ones(3).to_sparse())
