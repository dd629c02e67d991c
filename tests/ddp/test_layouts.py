import torch
from hypothesis import given
from hypothesis import strategies as st

from torchshard.buckets import BucketPolicy, Gradient, PlannedBucket
from torchshard.ddp.buckets.layouts import LaidBucket, decode, encode, is_milestone, lay_out
from torchshard.ddp.telling.messages import plan_text

COUNT = 8
GRADIENTS = [Gradient(i, f"p{i}", 4 * (i + 1), "f32") for i in range(COUNT)]

numbers = st.integers(0, COUNT - 1)
events = st.lists(st.one_of(numbers, st.lists(numbers, min_size=1, max_size=4, unique=True).map(tuple)), max_size=12)
policies = st.builds(BucketPolicy, st.integers(0, 40), st.integers(0, 40))


@given(events, st.sets(numbers), policies, st.booleans())
def test_every_parameter_has_one_place(seen, shared, policy, joins):
    layout = lay_out(seen, GRADIENTS, shared, policy, joins)
    assert sorted(i for bucket in layout for i in bucket.members) == list(range(COUNT))
    for bucket in layout:
        if bucket.segments:
            assert set(bucket.members) <= {i for slots in bucket.segments for i in slots}
            assert not shared & set(bucket.members)


@given(events, st.sets(numbers), policies, st.booleans())
def test_a_layout_survives_the_wire(seen, shared, policy, joins):
    layout = lay_out(seen, GRADIENTS, shared, policy, joins)
    assert decode(encode(layout)) == layout


def test_graphs_and_hooks_in_the_order_of_completion():
    everything = BucketPolicy(cap=0, first=0)
    layout = lay_out([7, (6, 5), (4, 3), 2, 6], GRADIENTS, {3}, everything)
    hooks = [LaidBucket((i,)) for i in (7, 2, 3, 1, 0)]
    assert layout == (hooks[0], LaidBucket((6, 5), ((6, 5),)), LaidBucket((4,), ((4, 3),)), *hooks[1:])


def test_small_segments_of_graphs_are_joined():
    layout = lay_out([(0, 1), 7, (2,), (3, 4)], GRADIENTS, {2}, BucketPolicy(cap=1 << 20), joins=True)
    assert layout == (LaidBucket((0, 1, 3, 4), ((0, 1), (3, 4))), LaidBucket((7, 6, 5, 2)))


def test_a_parameter_of_two_graphs_belongs_to_hooks():
    layout = lay_out([(0, 1), (1, 2), *range(COUNT)], GRADIENTS, (), BucketPolicy())
    assert layout[:2] == (LaidBucket((0,), ((0, 1),)), LaidBucket((2,), ((1, 2),)))
    assert layout[2].members == (1, 3, 4, 5, 6, 7)


def test_milestones_become_rare():
    assert [n for n in range(1, 300) if is_milestone(n)] == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


def test_ranks_on_devices_of_their_own_compare_equal_plans():
    def text(*devices):
        kinds = [("float32", device) for device in devices]
        plan = [PlannedBucket((Gradient(i, f"p{i}", 8, kind),)) for i, kind in enumerate(kinds)]
        return plan_text(plan, [torch.empty(2)] * len(plan), "averaged")

    assert text("cuda:0") == text("cuda:3")
    assert text("cuda:0", "cuda:1", "cpu") == text("cuda:2", "cuda:3", "cpu")
    assert text("cuda:0", "cuda:1") != text("cuda:0", "cuda:0")
    assert text("cuda:0") != text("cpu")
