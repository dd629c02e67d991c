"""A view's operator and the one that makes a copy of it, as functionalized programs call it, go by one rule."""

import torch

from torchshard.rules.registry import RULES

OTHERWISE = {"squeeze.default", "squeeze.dim", "squeeze.dims"}  # which strides a copy has depends on its dims


def test_copies_have_the_rules_of_their_views():
    apart = []
    for name, rule in RULES.items():
        packet, _, overload = name.partition(".")
        copying = getattr(torch.ops.aten, f"{packet}_copy", None)
        overload = overload or "default"
        if copying is not None and overload in copying.overloads() and RULES.get(f"{packet}_copy.{overload}") != rule:
            apart.append(name)
    assert set(apart) <= OTHERWISE, apart
