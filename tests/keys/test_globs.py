"""Globs that say something of keys: which counts, and what many of them cost."""

import time
from fnmatch import fnmatchcase

from hypothesis import given
from hypothesis import strategies as st

from torchshard.keys.globs import Globs

texts = st.text("ab*?[]!.\n", max_size=4)


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
