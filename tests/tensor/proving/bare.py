"""Calls of ATen operators that neither the cases nor torch's operator database reach: those with rules must be proved."""

import torch

aten = torch.ops.aten


def _floats(*shape):
    g = torch.Generator().manual_seed(len(shape))
    return (torch.randn(shape, generator=g).mul(512).round() * 2 + 1) / 1024


def _integers(below, *shape):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(0))


def calls():
    """(operator, arguments, keyword arguments) of each."""
    x, m, c = _floats(5, 4), _floats(5, 4) > 0, torch.view_as_complex(_floats(5, 4, 2))
    index, rows = _integers(4, 5, 4), torch.tensor([4, 0, 2])
    image, ones = _floats(2, 3, 4, 6), _floats(4)
    yield from [
        (op, (x,), {})
        for op in (
            aten.celu_.default, aten.contiguous.default, aten.deg2rad_.default, aten.rad2deg_.default, aten.gelu_.default,
            aten.hardswish_.default, aten.mish_.default, aten.positive.default, aten.relu6.default, aten.real.default,
            aten.sigmoid_.default, aten.tanh_.default, aten.conj_physical.default, aten.conj_physical_.default,
        )
    ]  # fmt: skip
    yield from [(op, (x, torch.tensor(2.0)), {}) for op in (aten.fill.Tensor, aten.fill_.Tensor)]
    yield from [(op, (x, 2), {}) for op in (aten.floor_divide.Scalar, aten.floor_divide_.Scalar)]
    yield aten.floor_divide_.Tensor, (x, _floats(4)), {}
    yield aten.lerp_.Scalar, (x, _floats(5, 4) * 2, 0.25), {}
    yield aten.masked_fill_.Tensor, (x, m, torch.tensor(2.0)), {}
    yield from [(op, (c,), {}) for op in (aten.imag.default, aten._neg_view.default, aten.conj_physical.default)]
    yield from [(op, (m, [0, 1]), {}) for op in (aten.all.dims, aten.any.dims)]
    yield from [(op, (m,), {}) for op in (aten._is_all_true.default, aten._is_any_true.default)]
    yield aten.count_nonzero.dim_IntList, (m, [0]), {}
    yield aten.reshape.default, (x, [4, 5]), {}
    yield aten.squeeze_copy.dims, (_floats(5, 1, 4), [1]), {}
    yield from [(op, (x, 1, 1), {}) for op in (aten.select_copy.int, aten.slice_copy.Tensor, aten.split_copy.Tensor)]
    yield from [(op, (x,), {}) for op in (aten._neg_view_copy.default, aten.detach_copy.default)]
    yield from [(op, (c,), {}) for op in (aten._conj_copy.default, aten.view_as_real_copy.default)]
    yield aten.view_as_complex_copy.default, (_floats(5, 4, 2),), {}
    yield aten.lift_fresh_copy.default, (x,), {}
    yield aten.view_copy.dtype, (x, torch.int32), {}
    yield aten.unsafe_split_with_sizes.default, (x, [2, 3]), {}
    for op in (aten.channel_shuffle.default, aten.native_channel_shuffle.default):
        yield op, (_floats(5, 4, 2, 2), 2), {}
    for op in (aten.scatter_.src, aten.scatter_add_.default):
        yield op, (x, 1, index, _floats(5, 4)), {}
    for op in (aten.scatter.reduce, aten.scatter_.reduce):
        yield op, (x, 1, index, _floats(5, 4)), {"reduce": "multiply"}
    for op in (aten.scatter.value_reduce, aten.scatter_.value_reduce):
        yield op, (x, 1, index, 2.0), {"reduce": "add"}
    yield aten.scatter_reduce_.two, (x, 1, index, _floats(5, 4), "amax"), {}
    yield aten.index_copy_.default, (x, 0, rows, _floats(3, 4)), {}
    yield aten.index_fill_.int_Scalar, (x, 0, rows, 2.0), {}
    yield aten.index_fill_.int_Tensor, (x, 0, rows, torch.tensor(2.0)), {}
    yield aten.index_put_.default, (x, [rows], _floats(3, 4)), {}
    yield aten.index_reduce_.default, (x, 0, rows, _floats(3, 4), "amin"), {}
    yield aten._unsafe_index.Tensor, (x, [None, rows % 4]), {}
    yield aten._unsafe_index_put.default, (x, [rows], _floats(3, 4)), {}
    yield aten.linalg_eigvals.default, (_floats(5, 3, 3),), {}
    for op in (aten.upsample_nearest2d, aten._upsample_nearest_exact2d):
        yield op.default, (image, [8, 12]), {}
    for op in (aten.upsample_nearest2d_backward, aten._upsample_nearest_exact2d_backward):
        yield op.default, (_floats(2, 3, 8, 12), [8, 12], [2, 3, 4, 6]), {}
    yield aten._upsample_bicubic2d_aa.default, (image, [8, 12], False), {}
    yield aten._upsample_bicubic2d_aa_backward.default, (_floats(2, 3, 8, 12), [8, 12], [2, 3, 4, 6], False), {}
    yield aten.reflection_pad2d.default, (image, [1, 1, 2, 0]), {}
    yield aten.reflection_pad2d_backward.default, (_floats(2, 3, 6, 8), image, [1, 1, 2, 0]), {}
    yield aten.soft_margin_loss_backward.default, (torch.tensor(2.0), x, x.sign(), 1), {}
    yield aten._fused_rms_norm.default, (_floats(5, 3, 4), [4], ones, 1e-5), {}
    bags = aten._embedding_bag.default(x, rows, torch.tensor([0, 2]))
    yield aten._embedding_bag_forward_only.default, (x, rows, torch.tensor([0, 2])), {}
    yield (
        aten._embedding_bag_dense_backward.default,
        (_floats(2, 4), rows, torch.tensor([0, 0, 1]), *bags[2:], 5, False, 0, None),
        {},
    )
    eval_ = (image, image * 2, _floats(3), _floats(3), _floats(3).abs(), None, None, False, 1e-5, [True, True, True])
    yield aten.native_batch_norm_backward.default, eval_, {}
    statistics = (_floats(3), _floats(3) / 2, _floats(3) / 3, _floats(3).abs())
    yield aten.native_batch_norm.default, (image, *statistics, False, 0.1, 1e-5), {}
    yield aten.median.dim, (x, 0), {}
    yield aten.sort.stable, (x,), {"stable": True}
    yield aten.squeeze_copy.dim, (_floats(5, 1, 4), 1), {}
