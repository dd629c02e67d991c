import json
import re
from fractions import Fraction

import numpy as np
import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from torchshard.buckets import BucketPolicy, Gradient, MiB, PlannedBucket, plan_buckets
from torchshard.simulation import (
    Link,
    LinkSpeed,
    Network,
    StepTimes,
    best_link,
    best_policy,
    finish_time,
    simulate_step,
)

links = st.builds(Link, st.floats(1e6, 1e12), st.floats(0, 1e-3))
counts = st.lists(st.integers(1, 10**9), min_size=1, max_size=8)


def buckets(sizes):
    return [PlannedBucket((Gradient(k, f"p{k}", size),)) for k, size in enumerate(sizes)]


def ring_played(begins, nbytes, link):
    """Every rank's clock through the rounds of a ring: in each it sends a part on and receives one from behind."""
    clocks, world = list(begins), len(begins)
    for _ in range(2 * (world - 1)):
        message = link.latency + nbytes / world / link.bandwidth
        clocks = [max(clocks[r], clocks[r - 1]) + message for r in range(world)]
    return max(clocks)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9), st.integers(1, 10**9), links)
def test_a_ring_takes_as_long_as_its_messages_one_by_one(begins, nbytes, link):
    world = len(begins)
    closed = 2 * (world - 1) * link.latency + 2 * (world - 1) / world * nbytes / link.bandwidth
    assert Network(world, link).all_reduce(nbytes) == pytest.approx(closed)
    assert ring_played(begins, nbytes, link) == pytest.approx(max(begins) + closed)


@given(counts, st.integers(1, 100_000), links, st.floats(0, 1), st.floats(0, 1))
def test_a_step_over_a_ring_in_closed_form(sizes, world, link, forward, backward):
    """The end is that of the bucket from which on the wire never rests."""
    plan, times = buckets(sizes), StepTimes(forward, backward)
    lengths = [2 * (world - 1) * (link.latency + size / world / link.bandwidth) for size in sizes]
    arrived = [forward + backward * sum(sizes[: k + 1]) / sum(sizes) for k in range(len(sizes))]
    end = max(arrived[k] + sum(lengths[k:]) for k in range(len(sizes)))
    played = simulate_step(plan, Network(world, link), times)
    assert played.seconds == pytest.approx(max(end, forward + backward))
    assert played.exposed() == pytest.approx(played.seconds - played.compute, abs=1e-9)
    assert played.communication == pytest.approx(sum(lengths))


@given(counts, st.integers(0, 5), st.integers(1, 4), links, links, st.sampled_from(["ring", "tree"]))
def test_nothing_is_faster_than_its_bytes(sizes, doublings, per_node, link, inside, algorithm):
    """Each rank has to send what is not its own share, twice; over the network, that of its share in the node."""
    nodes = 2**doublings
    network = Network(nodes * per_node, link, algorithm, per_node, inside)
    for nbytes in sizes:
        across = 2 * (nodes - 1) / nodes * nbytes / per_node / link.bandwidth
        within = 2 * (per_node - 1) / per_node * nbytes / inside.bandwidth
        assert network.all_reduce(nbytes) >= (across + within) * (1 - 1e-9)
        assert network.all_reduce(2 * nbytes) >= network.all_reduce(nbytes)


def test_rings_and_trees():
    link = Link(10e9, 10e-6)
    ring, tree = (Network(100_000, link, algorithm) for algorithm in ("ring", "tree"))
    assert ring.all_reduce(MiB) == pytest.approx(2.0, rel=1e-2)  # 200,000 messages of 10 us
    assert tree.all_reduce(MiB) == pytest.approx(17 * 20e-6 + 2 * MiB / 10e9)
    nodes = Network(100_000, link, "tree", 8, Link(200e9, 1e-6))
    assert nodes.all_reduce(100 * MiB) < tree.all_reduce(100 * MiB) / 4
    assert Network(1, link).all_reduce(MiB) == 0


def test_gradients_come_when_they_are_known_to_come():
    times = StepTimes(1.0, 2.0, {"p0": 1.9}, slowest=2.0)
    assert times.bucket_times(buckets([1, 1])) == pytest.approx([5.8, 6.0])
    assert StepTimes(1.0, 2.0).bucket_times(buckets([1, 3])) == pytest.approx([1.5, 3.0])


def step(world, layers=24, **network):
    plan = plan_buckets((Gradient(k, f"layer{k}", 4 * MiB) for k in range(layers)), BucketPolicy())
    return simulate_step(plan, Network(world, **network), StepTimes(0.01, 0.02))


def test_a_step_as_text():
    assert_expected_inline(
        str(step(1024, link=Link(10e9, 5e-6))),
        """\
forward   #########
backward          ##################
bucket 0           ==========
bucket 1                     ==============
bucket 2                                   ==============
bucket 3                                                 ===============
bucket 4                                                               ===========
          0                                                                82.1 ms
1,024 ranks, ring over 10 GB/s: a step of 82.10 ms, of which 52.10 ms are communication that nothing hides (71.26 ms for 96.0 MiB of gradients)""",
    )


def test_many_ranks_and_many_buckets_cost_no_time():
    plan = plan_buckets((Gradient(k, f"layer{k}", 4 * MiB) for k in range(2000)), BucketPolicy(0, 0))
    network = Network(96_000, Link(50e9, 5e-6), "tree", 8, Link(400e9, 1e-6))
    played = simulate_step(plan, network, StepTimes(0.2, 0.4))
    assert len(played.spans) == 2002
    assert played.lanes == ["forward", "backward", "buckets"]
    assert len(str(played).splitlines()) == 5


def test_it_exports_what_a_timeline_exports(tmp_path):
    played = step(8, link=Link(10e9))
    events = json.loads(played.chrome_trace())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"][:3] == ["forward", "backward", "bucket 0: 4.0 MiB"]
    pytest.importorskip("matplotlib")
    played.picture(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[1:4] == b"PNG"


NAN, INF = float("nan"), float("inf")

MISTAKES = [
    (lambda: Link(0), "bandwidth=0: expected more than 0 bytes a second"),
    (lambda: Link("1"), "bandwidth='1': expected more than 0 bytes a second"),
    (lambda: Link(1, -1), "latency=-1: expected a finite number of seconds, 0 or more"),
    (lambda: Link(1, INF), "latency=inf: expected a finite number of seconds, 0 or more"),
    (lambda: LinkSpeed(NAN, 1), "latency=nan: expected a finite number of seconds, 0 or more"),
    (lambda: LinkSpeed(0, 1, work=-1), "work=-1: expected a finite number of seconds, 0 or more"),
    (lambda: LinkSpeed(0, -1), "bandwidth=-1: expected more than 0 bytes a second"),
    (lambda: StepTimes(-1), "forward=-1: expected a finite number of seconds, 0 or more"),
    (lambda: StepTimes(NAN), "forward=nan: expected a finite number of seconds, 0 or more"),
    (lambda: StepTimes(1, INF), "backward=inf: expected a finite number of seconds, 0 or more"),
    (lambda: StepTimes(ready={"a.b": -1}), "ready['a.b']=-1: expected a finite number of seconds, 0 or more"),
    (lambda: StepTimes(slowest=-1), "slowest=-1: expected a finite factor, 1 or more"),
    (lambda: StepTimes(slowest=0.5), "slowest=0.5: expected a finite factor, 1 or more"),
    (lambda: best_policy([], StepTimes(), LinkSpeed(0, 1), each=-1), "each=-1: expected a finite number of seconds"),
    (lambda: Network(0, Link(1)), "world_size=0: expected a whole number of ranks, 1 or more"),
    (lambda: Network(2.5, Link(1)), "world_size=2.5: expected a whole number of ranks, 1 or more"),
    (lambda: Network(True, Link(1)), "world_size=True: expected a whole number of ranks, 1 or more"),
    (lambda: Network(8, Link(1), ranks_per_node=0), "ranks_per_node=0: expected a whole number of ranks, 1 or more"),
    (lambda: Network(2, Link(1), "star"), "algorithm='star' is not known; give one of ring, tree"),
    (lambda: Network(10, Link(1), ranks_per_node=4), "10 ranks are no whole number of nodes of 4"),
    (lambda: Network(8, Link(1), ranks_per_node=4), "need a link inside of the node"),
    (lambda: simulate_step([], Network(2, Link(1))), "the plan is empty"),
    (lambda: simulate_step(buckets([10]), Network(2, Link(1e-320))), "no earlier, finite end; got 0.0 to inf"),
]


@pytest.mark.parametrize(("mistake", "said"), MISTAKES)
def test_mistakes(mistake, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        mistake()


def test_numbers_of_any_real_type_make_sense():
    link = Link(np.float32(4), Fraction(1, 2))
    assert Network(np.int64(2), link).all_reduce(8) == StepTimes(np.float64(3)).forward == 3.0
    assert Network(2, Link(INF)).all_reduce(MiB) == 0  # as if there were no network


EVEN = [Gradient(i, str(i), 1 << 20) for i in range(16)]


def test_finish_time_of_a_pipeline():
    link = LinkSpeed(latency=0.5, bandwidth=float(1 << 20))
    one, each = plan_buckets(EVEN, BucketPolicy(1 << 40, 1 << 40)), plan_buckets(EVEN, BucketPolicy(0, 0))
    assert finish_time(one, StepTimes(backward=8.0), link) == 8.0 + 0.5 + 16
    assert (
        finish_time(each, StepTimes(backward=8.0), link) == 0.5 + 16 * 1.5
    )  # the link is busy from the first gradient on
    assert finish_time(each, StepTimes(backward=80.0), link) == 80.0 + 1.5  # only the last one is waited for
    assert finish_time((), StepTimes(backward=8.0), link) == 8.0


@given(
    seconds=st.floats(1e-4, 10.0),
    latency=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e6, 1e11),
    sizes=st.lists(st.integers(1, 1 << 22), min_size=1, max_size=12),
)
def test_no_other_size_is_clearly_better(seconds, latency, bandwidth, sizes):
    link = LinkSpeed(latency, bandwidth)
    gradients, times = [Gradient(i, str(i), n) for i, n in enumerate(sizes)], StepTimes(backward=seconds)
    found = finish_time(plan_buckets(gradients, best_policy(gradients, times, link)), times, link)
    for cap in (1 << 14, 1 << 18, 1 << 20, 25 << 20):
        for first in (cap, cap // 4):
            other = finish_time(plan_buckets(gradients, BucketPolicy(cap, first)), times, link)
            assert found <= 1.3 * other or cap < 1 << 15


def test_slow_and_fast_links():
    fast, slow = LinkSpeed(1e-3, 1e12), LinkSpeed(1e-4, 1e8)
    assert best_policy(EVEN, StepTimes(backward=1e-4), fast).cap == 16 << 20  # nothing to hide behind: one bucket
    assert best_policy(EVEN, StepTimes(backward=0.2), slow).cap < 4 << 20  # the earlier the link is busy, the better


def test_a_link_that_is_always_busy_begins_early():
    """With a latency that many buckets would pay too often: one gradient at first, then few buckets."""
    link = LinkSpeed(3e-3, 1e8)
    policy = best_policy(EVEN, StepTimes(backward=0.08), link)
    assert (policy.first, policy.cap) == (1 << 20, 4 << 20)
    assert best_policy(EVEN, StepTimes(backward=0.08), link, each=1.0) == BucketPolicy(16 << 20, 16 << 20)


def test_sizes_fit_what_is_ready_when():
    """One bucket for what is ready at once; two, if half of it is there at the beginning."""
    link, late, early = LinkSpeed(1e-2, 1e8), {str(i): 0.1 for i in range(16)}, {str(i): 0.0 for i in range(8)}
    assert best_policy(EVEN, StepTimes(backward=0.1, ready=late), link).cap == 16 << 20
    assert best_policy(EVEN, StepTimes(backward=0.1, ready={**late, **early}), link).cap == 8 << 20


def test_work_for_the_link_makes_backward_longer():
    link = LinkSpeed(latency=0.0, bandwidth=float(1 << 20), work=1.0 / (1 << 20))
    one = plan_buckets(EVEN, BucketPolicy(1 << 40, 1 << 40))
    assert finish_time(one, StepTimes(backward=80.0), link) == 80.0 + 16
    assert finish_time(one, StepTimes(backward=8.0), link) == 8.0 + 16  # done while the link is busy


def test_packing_pays_where_one_waits_for_the_link():
    plain, packed = LinkSpeed(1e-3, 6e7), LinkSpeed(1e-3, 7.5e7, work=2.5e-9, packed=True)
    assert best_link(EVEN, StepTimes(backward=0.08), [plain, packed]) == 1
    assert best_link(EVEN, StepTimes(backward=0.08), [plain]) == 0
    assert best_link(EVEN, StepTimes(backward=2.0), [plain, packed]) == 0  # hidden behind a backward that it disturbs
    assert best_link(EVEN, StepTimes(backward=0.08), [plain, LinkSpeed(1e-3, 6.1e7, packed=True)]) == 0  # hardly
    assert best_link(EVEN, StepTimes(backward=0.08), [plain, packed], each=1.0) == 1  # both take one bucket then
