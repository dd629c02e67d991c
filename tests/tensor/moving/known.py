"""DTensors of known value in any layout, made without the code under test; for tests of redistribution."""

import numpy as np
import torch

from tests.layout.strategies import terms


def made(sharding, shape, seed, dtype=torch.float64):
    """A leaf DTensor of a sharding, Partial or nested as it may be, and the full tensor that it stands for.

    All ranks draw the same terms for all ranks, and each takes its own; a rank outside of the mesh holds nothing.
    """
    from torchshard.layout.layout import contiguous_stride
    from torchshard.tensor.dtensor import wrap
    from torchshard.tensor.layout import layout_for

    integer = not (dtype.is_floating_point or dtype.is_complex)
    parts, full = terms(np.random.default_rng(seed), sharding, shape, integer=integer)
    here = sharding.mesh.coordinate
    part = np.zeros(0) if here is None else parts[sharding.mesh.linear(here)]
    local = torch.from_numpy(np.array(part)).to(dtype)
    layout = layout_for(sharding, tuple(shape), contiguous_stride(shape), dtype)
    x = wrap(local.view(layout.local_shape), layout)
    return x, torch.from_numpy(np.array(full)).to(dtype)


def part_of(full, sharding):
    """What a rank holds of a full tensor in a sharding without Partial."""
    here = sharding.mesh.coordinate
    return full.new_empty(0) if here is None else full[sharding.box(tuple(full.shape), here).slices]
