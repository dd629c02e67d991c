"""docs/coverage.md is true: a part of the sweep is run again."""

import pytest

from tests.coverage import report
from tests.coverage.pool import Pool
from tests.coverage.samples import database
from tests.coverage.sweep import sweep_operator

STEP = 24  # one in so many operators is tried in the default run


def _sweep(names, mesh, samples, cut=""):
    pool = Pool(mesh)
    try:
        return {name: sweep_operator(pool, name, samples, cut) for name in names}
    finally:
        pool.stop()


def _complaints(found):
    kept = report.listed("Keep a split operand split") | report.listed("In-place variants that do")
    refused = report.refused()
    for name, trials in found.items():
        if trials and name not in refused and not report.is_right(trials):
            bad = [(label, t["text"]) for label, t in trials.items() if "right" not in (t["forward"], t["backward"])]
            yield f"{name} is not right any more: {bad[:1]}"
        if name in kept and not report.keeps(trials):
            yield f"{name} gathers a split operand in every placement"


def test_some_operators_do_as_the_page_says():
    names = sorted(database())[::STEP]
    assert list(_complaints(_sweep(names, (2,), 3))) == []


# By handlers, which the proof of rules does not reach.
HANDLED = [
    "as_strided", "dist", "gather", "multinomial", "nn_functional_avg_pool2d", "nn_functional_batch_norm",
    "nn_functional_conv2d", "nn_functional_conv_transpose1d", "nn_functional_ctc_loss", "nn_functional_instance_norm",
    "nn_functional_max_pool1d", "normal", "std",
]  # fmt: skip
# Their gradients ask which elements equal the result; an average of three terms, written to, holds it but for a rounding.
EQUAL_BUT_FOR_A_ROUNDING = {f"{kind}_reduce_{op}(in-place)" for kind in ("index", "scatter") for op in ("amax", "amin")}


@pytest.mark.parametrize("cut", ["units", "runs"])
def test_dims_that_are_not_split_in_blocks(cut):
    found = _sweep(HANDLED, (2,), 1, cut)
    assert [name for name, trials in found.items() if not report.is_right(trials)] == []


def test_what_gathers_is_seen_to():
    names = ["block_diag", "mm", "bincount", "argmax", "min_reduction_with_dim", "cumsum"]
    assert [report.keeps(trials) for trials in _sweep(names, (2,), 2).values()] == [False] + [True] * 5


def test_the_page_keeps_what_was_reached():
    assert len(report.listed("Keep a split operand split")) >= 618


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(1, STEP, 4))
def test_all_operators_do_as_the_page_says(start):
    names = [name for k in range(start, min(start + 4, STEP)) for name in sorted(database())[k::STEP]]
    assert list(_complaints(_sweep(names, (2,), 3))) == []


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cut", ["units", "runs"])
def test_no_operator_is_wrong_where_dims_are_not_split_in_blocks(cut):
    names = set(database()) - report.refused() - EQUAL_BUT_FOR_A_ROUNDING
    found = _sweep(sorted(names), (3,), 1, cut)
    assert [name for name, trials in found.items() if trials and not report.is_right(trials)] == []
