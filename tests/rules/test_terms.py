"""Which linear operators may work on terms, by dtype."""

import torch

from torchshard.rules.rule import options
from torchshard.rules.terms import converts_sums, narrowed


def test_conversions_of_sums():
    yes = [
        (torch.int8, torch.int8),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.complex64),
        (torch.complex64, torch.float32),
    ]
    no = [
        (torch.int8, torch.int64),
        (torch.uint8, torch.float32),
        (torch.bool, torch.int64),
        (torch.float32, torch.int64),
        (torch.float64, torch.float32),
        (torch.complex128, torch.float32),
    ]
    assert [converts_sums(*pair) for pair in yes + no] == [True] * len(yes) + [False] * len(no)


def test_groups_that_stay():
    both = options("lin=0+1,0")
    assert narrowed(both, {0: torch.float32, 1: torch.float32}, [torch.float32]) is both
    assert narrowed(both, {0: torch.float32, 1: torch.int32}, [torch.float32]).linear == ((0,),)
    assert narrowed(both, {0: torch.int32}, [torch.int64]).linear == ()
    rounding = options("lin=0 rounds")
    assert narrowed(rounding, {0: torch.int32}, [torch.int32]).linear == ()
    assert narrowed(rounding, {0: torch.float32}, [torch.float32]) is rounding
