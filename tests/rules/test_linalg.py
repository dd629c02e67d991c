"""What stands in for kernels that want more of pieces than the operator does of its operands."""

import pytest
import torch

from tests.older import require
from torchshard.rules.linalg import with_more_columns


@pytest.mark.parametrize("bias", [None, torch.randn(24).bfloat16()], ids=["no bias", "bias"])
@pytest.mark.parametrize("each", [False, True], ids=["one scale", "scales of rows and columns"])
def test_columns_that_are_added_leave_a_scaled_product_as_it_is(each, bias):
    if each:
        require("scales of rows")
    a, b = torch.randn(5, 16).to(torch.float8_e4m3fn), torch.randn(24, 16).to(torch.float8_e4m3fn).t()
    scales = (torch.rand(5, 1), torch.rand(1, 24)) if each else (torch.tensor(2.0), torch.tensor(3.0))
    expected = torch._scaled_mm(a, b, *scales, bias, out_dtype=torch.bfloat16)
    assert torch.equal(with_more_columns(8, torch._scaled_mm, a, b, *scales, bias, out_dtype=torch.bfloat16), expected)
