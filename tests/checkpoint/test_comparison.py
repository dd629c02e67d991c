"""`diff` and the statistics of `inspect`."""

import json
import math

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline

from tests.checkpoint import sources
from torchshard import checkpoint
from torchshard.errors import CheckpointError


def saved(path, **state):
    torch.save(state, path)
    return path


def test_a_table_of_differences(tmp_path):
    same = torch.ones(3)
    a = saved(
        tmp_path / "a.pt", same=same, shape=torch.ones(2), kind=torch.ones(2), value=torch.ones(4), gone=1, lr=0.5
    )
    changed = torch.tensor([1.0, 1.5, 1.0, math.nan])
    b = saved(tmp_path / "b.pt", same=same, shape=torch.ones(3), kind=torch.ones(2).half(), value=changed, lr=0.25)
    found = checkpoint.diff(a, b)
    assert found
    assert_expected_inline(
        "\n".join(line.rstrip() for line in str(found).splitlines()),
        """\
key    differs in  A          B          elements  largest
-----  ----------  ---------  ---------  --------  -------
shape  shape       float32 2  float32 3
kind   type        float32 2  float16 2
value  values      float32 4  float32 4  2         nan
gone   only in A   object
lr     object      0.5        0.25

1 keys are the same, 5 differ""",
    )
    json.dumps(found.as_dict())


def test_tolerances_and_bits(tmp_path):
    a = saved(tmp_path / "a.pt", w=torch.tensor([1.0, math.nan, 0.0, math.inf]))
    b = saved(tmp_path / "b.pt", w=torch.tensor([1.001, math.nan, -0.0, math.inf]))
    assert checkpoint.diff(a, b).changes[0].different == 2
    assert checkpoint.diff(a, b, atol=1e-6).changes[0].different == 1
    assert not checkpoint.diff(a, b, rtol=0.01)
    assert not checkpoint.diff(a, b, values=False)
    with pytest.raises(CheckpointError, match="tolerance"):
        checkpoint.diff(a, b, rtol=-1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_tolerances_of_whole_numbers_are_exact(tmp_path, dtype):
    ends = [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    a = saved(tmp_path / "a.pt", w=torch.tensor([2**53, 2**62, *ends], dtype=dtype))
    b = saved(tmp_path / "b.pt", w=torch.tensor([2**53 + 1, 2**62 - 3, *ends], dtype=dtype))
    found = {atol: checkpoint.diff(a, b, atol=atol).changes for atol in (0.5, 1, 2.9, 3, 2**70)}
    assert [(c[0].different, c[0].largest) if c else None for c in found.values()] == [
        (2, 3.0), (1, 3.0), (1, 3.0), None, None,
    ]  # fmt: skip
    assert not checkpoint.diff(a, b, rtol=1e-15)
    far = saved(tmp_path / "far.pt", w=torch.tensor([0, 0, *reversed(ends)], dtype=dtype))
    assert checkpoint.diff(a, far).changes[0].largest == float(2**64 - 1)


def test_formats_do_not_matter(dcp_two, tmp_path):
    checkpoint.convert(dcp_two, tmp_path / "a.pt", to="torch")
    assert not checkpoint.diff(dcp_two, tmp_path / "a.pt")
    assert checkpoint.diff(tmp_path / "a.pt", dcp_two).same == len(checkpoint.open(dcp_two))


@pytest.mark.parametrize("dtype", sources.DTYPES, ids=str)
def test_statistics(tmp_path, dtype):
    tensor = sources.random_bits((3000,), dtype, seed=7)
    found = checkpoint.inspect(saved(tmp_path / "a.pt", w=tensor), stats=True).rows[0].statistics
    values = tensor.abs() if dtype.is_complex else tensor
    values = values.double().numpy() if dtype.itemsize < 8 or dtype.is_floating_point else values.numpy()
    if dtype == torch.complex64:
        values = np.abs(tensor.numpy())
    good = values[~np.isnan(values)]
    assert found.nan == len(values) - len(good)
    assert found.inf == int(np.isinf(good).sum())
    assert (found.smallest, found.largest) == (good.min(), good.max())
    with np.errstate(all="ignore"):
        mean = good.astype(np.float64).mean()
    assert found.mean == pytest.approx(mean, rel=1e-9, nan_ok=True)


def test_statistics_of_nothing(tmp_path):
    path = saved(tmp_path / "a.pt", empty=torch.ones(0), nan=torch.full((2,), math.nan), lr=0.5)
    found = checkpoint.inspect(path, stats=True)
    assert found.rows[0].statistics == (None, None, None, 0, 0)
    assert found.rows[1].statistics == (None, None, None, 2, 0)
    assert "NaN" in str(found)
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_checkpoint_is_the_same_as_itself_in_every_format(dcp_plain, tmp_path):
    """Also where one keeps a tuple with tensors as one object, and devices are no objects that compare."""
    checkpoint.convert(dcp_plain, tmp_path / "a.pt", to="torch")
    for other in (dcp_plain, tmp_path / "a.pt"):
        assert str(checkpoint.diff(dcp_plain, other)).endswith("keys are the same, 0 differ")


def test_plain_data_that_differ_deep_inside(tmp_path):
    values = [1, {"x": (1, [2, None], torch.device("cpu"), math.nan)}]
    for name, value in {"number": 3, "kind": 2.0}.items():
        other = [1, {"x": (1, [value, None], torch.device("cpu"), math.nan)}]
        a, b = saved(tmp_path / "a.pt", v=(values,)), saved(tmp_path / f"{name}.pt", v=(other,))
        assert not checkpoint.diff(a, a)
        assert checkpoint.diff(a, b)


def test_progress_comes_with_each_block(tmp_path):
    path = saved(tmp_path / "a.pt", w=torch.zeros(3 * 2**20), other=torch.zeros(5))
    for work in (
        lambda **kw: checkpoint.diff(path, path, **kw),
        lambda **kw: checkpoint.inspect(path, stats=True, **kw),
    ):
        seen = []
        work(progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert [done for done, _ in seen] == [4 * 2**20, 8 * 2**20, 12 * 2**20, 12 * 2**20 + 20]
        assert {total for _, total in seen} == {12 * 2**20 + 20}
