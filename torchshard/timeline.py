"""When things happen: spans of time in lanes, as text, as a picture and as a Chrome trace.

forward   ########
backward          ##############
bucket 0              =====
bucket 1                  ========
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        lane: the row that it is drawn in.
        name: what it was.
        start, end: in seconds, from any origin.
        kind: "compute" or "communication"; decides how it is drawn.
    """

    lane: str
    name: str
    start: float
    end: float
    kind: str = "compute"


class Timeline:
    """Spans, moved so that the first one starts at 0.

    Raises:
        ValueError: no spans, or one that ends before it starts, or never.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        found = sorted(spans, key=lambda s: (s.start, s.end))
        if not found:
            raise ValueError("a timeline needs at least one span")
        for s in found:
            if not -math.inf < s.start <= s.end < math.inf:
                raise ValueError(
                    f"{s.name}: expected a finite start and no earlier, finite end; got {s.start} to {s.end}"
                )
        origin = found[0].start
        self.spans = [Span(s.lane, s.name, s.start - origin, s.end - origin, s.kind) for s in found]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(s.end for s in self.spans)

    @property
    def lanes(self) -> list[str]:
        """Lanes, in the order in which they start."""
        return list(dict.fromkeys(s.lane for s in self.spans))

    def exposed(self) -> float:
        """Seconds of communication during which nothing was computed."""
        computing = _union([(s.start, s.end) for s in self.spans if s.kind == "compute"])
        talking = _union([(s.start, s.end) for s in self.spans if s.kind != "compute"])
        hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in talking for c, d in computing)
        return sum(b - a for a, b in talking) - hidden

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 72) -> str:
        """Bars of characters, one row a lane; ValueError for less than one character."""
        if width < 1:
            raise ValueError(f"a timeline of width={width} shows nothing; give 1 or more")
        label = max(len(lane) for lane in self.lanes)
        scale = width / max(self.seconds, 1e-9)
        rows = []
        for lane in self.lanes:
            row = [" "] * width
            for s in self.spans:
                if s.lane == lane:
                    first = min(int(s.start * scale), width - 1)
                    last = max(first + 1, min(round(s.end * scale), width))
                    row[first:last] = ("#" if s.kind == "compute" else "=") * (last - first)
            rows.append(f"{lane:<{label}}  {''.join(row)}".rstrip())
        return "\n".join([*rows, f"{'':<{label}}  0{f'{self.seconds * 1e3:.1f} ms':>{width - 1}}"])

    def chrome_trace(self) -> str:
        """JSON for chrome://tracing and Perfetto."""
        lanes = {lane: k for k, lane in enumerate(self.lanes)}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": k, "args": {"name": lane}} for lane, k in lanes.items()
        ]
        for s in self.spans:
            times = {"ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6}
            events.append({"ph": "X", "name": s.name, "cat": s.kind, "pid": 0, "tid": lanes[s.lane], **times})
        return json.dumps({"traceEvents": events})

    def picture(self, path: str | Path, title: str = "") -> None:
        """Draw with matplotlib (the extra `plot`) into a file whose suffix names the format.

        Raises what check_picture raises.
        """
        check_picture(path)
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.2 + 0.35 * len(self.lanes)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        lanes = {lane: k for k, lane in enumerate(self.lanes)}
        for s in self.spans:
            color = "#4c72b0" if s.kind == "compute" else "#dd8452"
            axes.barh(lanes[s.lane], (s.end - s.start) * 1e3, left=s.start * 1e3, height=0.7, color=color)
        axes.set_yticks(list(lanes.values()), list(lanes))
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.set_title(title)
        figure.savefig(path, dpi=120)


def check_picture(path: str | Path) -> None:
    """Whether a picture can be drawn into such a file, to be asked before there is one.

    Raises:
        ValueError: the suffix names no format that matplotlib writes.
        ImportError: there is no matplotlib.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = [f".{name}" for name in sorted(FigureCanvasBase.get_supported_filetypes())]
    if (suffix := Path(path).suffix).lower() not in known:
        raise ValueError(f"the suffix of {str(path)!r}: expected one of {', '.join(known)}, got {suffix!r}")


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
