import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from torchshard.buckets import (
    BucketPolicy,
    Gradient,
    MiB,
    plan_buckets,
    plan_table,
    size_text,
)

sizes = st.integers(0, 50)
policies = st.builds(BucketPolicy, sizes, sizes, st.lists(sizes, max_size=3).map(tuple))


@st.composite
def gradients(draw):
    kinds = draw(st.lists(st.sampled_from(["f32", "bf16", "f64"]), max_size=30))
    return [Gradient(i, f"p{i}", draw(st.integers(0, 40)), kind) for i, kind in enumerate(kinds)]


@given(gradients(), policies)
def test_every_gradient_once(ready, policy):
    plan = plan_buckets(ready, policy)
    assert sorted(g.index for b in plan for g in b.gradients) == [g.index for g in ready]
    assert all(len({g.kind for g in b.gradients}) == 1 for b in plan)


@given(gradients(), policies)
def test_ready_order_within_and_between_buckets(ready, policy):
    plan = plan_buckets(ready, policy)
    assert all([g.index for g in b.gradients] == sorted(g.index for g in b.gradients) for b in plan)
    ends = [b.gradients[-1].index for b in plan]
    assert ends == sorted(ends)


@given(gradients(), policies)
def test_a_bucket_is_closed_when_it_holds_its_cap_and_not_later(ready, policy):
    by_kind = {}
    for bucket in plan_buckets(ready, policy):
        by_kind.setdefault(bucket.kind, []).append(bucket)
    for buckets in by_kind.values():
        for number, bucket in enumerate(buckets):
            limit = policy.limit(number)
            assert bucket.nbytes - bucket.gradients[-1].nbytes < max(limit, 1) or len(bucket.gradients) == 1
            assert bucket.nbytes >= limit or number == len(buckets) - 1


@given(gradients(), policies)
def test_a_gradient_named_again_counts_once(ready, policy):
    assert plan_buckets([*ready, *reversed(ready)], policy) == plan_buckets(ready, policy)


def test_the_first_bucket_is_small():
    ready = [Gradient(i, f"p{i}", 1 * MiB) for i in range(60)]
    assert [len(b.gradients) for b in plan_buckets(ready, BucketPolicy())] == [1, 25, 25, 9]


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        ({}, [1 * MiB, 25 * MiB, 25 * MiB]),
        ({"cap": 4}, [4 * MiB, 4 * MiB, 4 * MiB]),
        ({"cap": 4, "first": 0.5}, [MiB // 2, 4 * MiB, 4 * MiB]),
        ({"caps": [1, 2]}, [1 * MiB, 2 * MiB, 2 * MiB]),
        ({"cap": 0}, [0, 0, 0]),
    ],
)
def test_sizes_in_mib(arguments, limits):
    policy = BucketPolicy.from_mb(**arguments)
    assert [policy.limit(k) for k in range(3)] == limits


@pytest.mark.parametrize("arguments", [{"cap": -1}, {"first": -1}, {"caps": [1, -1]}])
def test_a_negative_cap_is_refused_in_a_sentence(arguments):
    with pytest.raises(ValueError, match="cannot hold less than nothing: cap of -1 MiB"):
        BucketPolicy.from_mb(**arguments)


def test_sizes_as_text():
    assert [size_text(n) for n in (0, 1023, 1536, 25 * MiB)] == ["0 B", "1023 B", "1.5 KiB", "25.0 MiB"]


def test_plan_as_text():
    ready = [Gradient(i, f"layer{i}.weight", 3 * MiB, ("float32", "cpu")) for i in range(6)]
    ready.insert(2, Gradient(9, "scale", 8, ("float64", "cpu")))
    assert_expected_inline(
        plan_table(plan_buckets(ready, BucketPolicy(cap=12 * MiB))),
        """\
bucket    parameters                          bytes     kind
--------  ----------------------------------  --------  -----------
0         layer0.weight                       3.0 MiB   float32 cpu
1         scale                               8 B       float64 cpu
2         layer1.weight .. layer4.weight (4)  12.0 MiB  float32 cpu
3         layer5.weight                       3.0 MiB   float32 cpu""",
    )
