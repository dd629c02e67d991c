import json

import expecttest
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchshard.timeline import Span, Timeline

STEP = [
    Span("forward", "forward", 1.0, 1.2),
    Span("backward", "backward", 1.2, 1.6),
    Span("bucket 0", "all_reduce", 1.3, 1.4, "communication"),
    Span("bucket 1", "all_reduce", 1.5, 1.8, "communication"),
]


class Text(expecttest.TestCase):
    def test_bars(self):
        self.assertExpectedInline(
            Timeline(STEP).text(40),
            """\
forward   ##########
backward           #####################
bucket 0                 =====
bucket 1                           ===============
          0                               800.0 ms""",
        )


def test_what_is_exposed_is_what_nothing_hides():
    assert Timeline(STEP).exposed() == pytest.approx(0.2)
    assert Timeline(STEP).seconds == pytest.approx(0.8)


def test_a_trace_holds_every_span():
    events = json.loads(Timeline(STEP).chrome_trace())["traceEvents"]
    spans = [(e["name"], round(e["ts"]), round(e["dur"])) for e in events if e["ph"] == "X"]
    assert ("all_reduce", 300_000, 100_000) in spans
    assert len(spans) == 4


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    Timeline(STEP).picture(tmp_path / "step.png", "one step")
    assert (tmp_path / "step.png").read_bytes()[1:4] == b"PNG"


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="at least one span"):
        Timeline([])
    for start, end in [(1.0, 0.5), (0.0, float("inf")), (float("nan"), 1.0)]:
        with pytest.raises(ValueError, match=f"no earlier, finite end; got {start} to {end}"):
            Timeline([Span("a", "a", start, end)])


@pytest.mark.parametrize("name", ["step.foo", "step"])
def test_a_format_that_cannot_be_drawn_is_named(tmp_path, name):
    pytest.importorskip("matplotlib")
    suffix = (tmp_path / name).suffix
    with pytest.raises(ValueError, match=rf"expected one of .*\.png.*, got '{suffix}'"):
        Timeline(STEP).picture(tmp_path / name)
    assert not list(tmp_path.iterdir())


times = st.floats(0, 1e3)


@given(st.lists(st.tuples(times, times, st.booleans()), min_size=1, max_size=8))
def test_exposed_time_is_no_more_than_all_communication(rows):
    spans = [Span("x", "x", min(a, b), max(a, b), "communication" if talks else "compute") for a, b, talks in rows]
    timeline = Timeline(spans)
    talking = sum(s.end - s.start for s in spans if s.kind == "communication")
    assert -1e-6 <= timeline.exposed() <= talking + 1e-6
    assert len(timeline.text().splitlines()) == 2


def test_no_width():
    for width in (0, -5):
        with pytest.raises(ValueError, match=f"width={width} shows nothing"):
            Timeline([Span("a", "a", 0.0, 1.0)]).text(width)
