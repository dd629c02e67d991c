"""All trials of operators on a mesh of real ranks."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """An operator, how many of its samples to try, and how their split dims are cut (see trial.placements)."""

    op: str
    samples: int
    cut: str = ""
    skip: tuple[str, ...] = ()


def run_operator(task: Task, mesh: Any, gathered: list[int], report: Callable[[Any], None]) -> None:
    """On a rank: try an operator; report ("begin", label) before each trial and ("done", ...) after it."""
    from tests.coverage.samples import samples
    from tests.coverage.trial import placements, try_one

    for sample in samples(task.op, task.samples):
        for where in placements(sample, mesh.ndim, task.cut):
            label = f"{sample.number} {_shown(where)} of {[tuple(t.shape) for t in sample.tensors]}"
            if label in task.skip:
                continue
            report(("begin", label))
            outcome = try_one(sample, where, mesh, gathered)
            report(("done", (label, asdict(outcome))))
            if "imeout" in outcome.text or "Connection" in outcome.text:
                raise SystemExit(3)  # the group is of no use any more


def _shown(where: Any) -> str:
    short = lambda p: f"S({p.dim})" if p.is_shard() else f"P({p.reduce_op})" if p.is_partial() else "R"  # noqa: E731
    return " ".join("".join(map(short, ps)) for ps in where)


def sweep_operator(pool: Any, name: str, samples: int, cut: str = "", limit: float = 25.0) -> dict[str, dict[str, Any]]:
    """Label -> outcome of each trial, the worst of all ranks; a trial that broke the ranks counts as "dies"."""
    trials: dict[str, dict[str, Any]] = {}
    for _ in range(6):
        reports, broken = pool.run(Task(name, samples, cut, tuple(trials)), limit)
        begun = None
        for rank_reports in reports:
            for kind, value in rank_reports:
                if kind == "begin":
                    begun = value
                else:
                    label, outcome = value
                    trials[label] = worst(trials.get(label), outcome)
                    begun = None
            if broken and begun is not None:
                trials[begun] = {"forward": "dies", "backward": None, "text": broken, "gathers": 0}
        if not broken:
            break
        pool.stop()
    return trials


_ORDER = ("dies", "wrong", "error", "refused", "right", None)


def worst(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """The worse of what two ranks say of one trial."""
    if one is None:
        return other
    rank = lambda o: (_ORDER.index(o["forward"]), _ORDER.index(o["backward"]))  # noqa: E731
    if one["forward"] != other["forward"]:
        return {
            **min(one, other, key=rank),
            "forward": "wrong" if "wrong" in (one["forward"], other["forward"]) else "error",
        }
    return min(one, other, key=rank)


def verdict(trials: dict[str, dict[str, Any]], side: str) -> str | None:
    """Of an operator: its worst trial."""
    found = [t[side] for t in trials.values() if t[side] is not None]
    return min(found, key=_ORDER.index) if found else None
