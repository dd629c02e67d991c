"""Globs that say something of keys: which counts, and what many of them cost."""

import time
from fnmatch import fnmatchcase

from hypothesis import given
from hypothesis import strategies as st

from torchshard.keys.globs import Globs

dotted = st.lists(st.sampled_from(["a", "b", "*", "?", "[a.b]", "[", "]", "", "b*"]), max_size=5).map(".".join)
texts = st.text("ab*?[]!.\n", max_size=4) | dotted


@given(st.lists(texts, max_size=6), st.lists(texts, max_size=6))
def test_the_first_that_fits_counts(patterns, keys):
    globs = Globs(patterns)
    for key in keys:
        assert globs.first(key) == next((pattern for pattern in patterns if fnmatchcase(key, pattern)), None)
    assert globs.idle(iter(keys)) == [
        p for p in dict.fromkeys(patterns) if not any(fnmatchcase(key, p) for key in keys)
    ]


def test_a_thousand_names_cost_a_key_what_one_does():
    names = [f"layers.{k}.weight" for k in range(20_000)]
    start = time.process_time()
    globs = Globs(names)
    assert [globs.first(name) for name in names] == names
    assert not globs.idle(names)
    globs = Globs(f"layers.{k}.*" for k in range(1000))
    assert [globs.first(name) for name in names[:1000:10]] == [f"layers.{k}.*" for k in range(0, 1000, 10)]
    assert time.process_time() - start < 5  # each name tried on each key takes minutes


def test_globs_that_differ_in_a_segment_cost_a_key_what_one_does():
    keys = [f"model.layers.{k % 1000}.attn.{k // 1000}" for k in range(40_000)]
    numbers = range(1000)
    start = time.process_time()
    for globs in (
        [f"model.layers.{k}.*" for k in numbers],
        [f"*.layers.{k}.*.[0-9]*" for k in numbers],
        [f"*l.*.{k}.attn*" for k in numbers],
    ):
        made = Globs(["*.bias", *globs, "*"])
        assert [made.first(key) for key in keys[:2000]] == 2 * globs
        assert len({made.first(key) for key in keys}) == 1000
        assert made.idle(keys) == ["*.bias"]
    assert time.process_time() - start < 5  # each glob tried on each key takes half a minute
