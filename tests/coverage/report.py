"""What a sweep has found, as docs/coverage.md, and what that page says, read back."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.coverage.samples import IN_PLACE
from tests.coverage.sweep import verdict

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
Trials = Mapping[str, Mapping[str, Any]]

FAMILIES = ("nn_functional", "linalg", "special", "fft", "masked", "signal")

_HEAD = """\
# Coverage

What happens to the operators of torch's own operator database (`torch.testing`'s `op_db`, float32 or the first dtype that an
operator has) on DTensors: made by `make coverage`, from runs on real gloo ranks beside eager torch on the full tensors.
Each operator is tried on up to {samples} of its samples in some ten placements of the operands (whole, split along their
dims, uneven and empty pieces among them, Partial sums, averages, maxima and minima), forward and backward; on other meshes,
and with split dims in units, in runs or at two levels, one sample. Names are the database's.

{counts}

*Right*: every trial equals eager torch, values and gradients. *Refused*: some trial ends in an `UnsupportedOperatorError`,
which names the operator and the way out. No trial may be wrong, crash or hang. A random operator is right if it gives what
a single device with the same seed gives; of uninitialised results, shape and dtype are compared.

`tests/coverage/test_coverage.py` repeats a part of this in every run of the tests: an operator that leaves the list of those
that keep operands sharded, or that is no longer right, fails it.
"""


def keeps(trials: Trials) -> bool:
    """Whether, in some placement with a split operand, nothing was gathered."""
    return any(
        "S(" in label.split(" of ")[0] and t["forward"] == "right" and not t["gathers"] for label, t in trials.items()
    )


def is_right(trials: Trials) -> bool:
    """Whether all trials are, forward and backward."""
    return verdict(trials, "forward") == "right" and verdict(trials, "backward") in ("right", None)


def render(sweeps: Mapping[str, Mapping[str, Trials]], samples: int) -> str:
    """The page, from mesh -> operator -> trials; the first mesh has one axis."""
    first = next(iter(sweeps.values()))
    usable = {name: trials for name, trials in first.items() if trials}
    kept = [n for n, trials in usable.items() if keeps(trials)]
    gathered = [n for n, trials in usable.items() if n not in kept and verdict(trials, "forward") == "right"]
    parts = [
        _HEAD.format(counts=_counts(sweeps), samples=samples),
        f"## Keep a split operand split ({len([n for n in kept if not n.endswith(IN_PLACE)])} operators)\n",
        "In some placement with a split operand, no all-gather brings together as many elements as it has: counted.\n",
        _by_family([n for n in kept if not n.endswith(IN_PLACE)]),
        f"## In-place variants that do ({len([n for n in kept if n.endswith(IN_PLACE)])})\n",
        _by_family([n for n in kept if n.endswith(IN_PLACE)]),
        f"## Right, but gathered in the placements that were tried ({len(gathered)})\n",
        _by_family(gathered),
        "## Refused\n",
        _refused(sweeps),
    ]
    return "\n".join(parts)


def _counts(sweeps: Mapping[str, Mapping[str, Trials]]) -> str:
    lines = [
        "| mesh | | with samples | right | refused | wrong, crashing or hanging | trials |",
        "|---|---|---|---|---|---|---|",
    ]
    for mesh, found in sweeps.items():
        for kind, chosen in (
            ("operators", [n for n in found if not n.endswith(IN_PLACE)]),
            ("in place", [n for n in found if n.endswith(IN_PLACE)]),
        ):
            for side in ("forward", "backward"):
                verdicts = [verdict(found[n], side) for n in chosen]
                known = [v for v in verdicts if v is not None]
                bad = len(known) - known.count("right") - known.count("refused")
                trials = sum(t[side] is not None for n in chosen for t in found[n].values())
                cells = [mesh, f"{kind}, {side}", len(known), known.count("right"), known.count("refused"), bad, trials]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _by_family(names: list[str]) -> str:
    families: dict[str, list[str]] = {}
    for name in names:
        family = next((f for f in FAMILIES if name.startswith(f + "_")), "others")
        families.setdefault(family, []).append(name.removeprefix(family + "_"))
    return "".join(
        [f"- **{family}** ({len(some)}): {', '.join(sorted(some))}\n" for family, some in sorted(families.items())]
    )


def _refused(sweeps: Mapping[str, Mapping[str, Trials]]) -> str:
    lines = ["| operator | | reason |", "|---|---|---|"]
    for name in next(iter(sweeps.values())):
        for side in ("forward", "backward"):
            said = [
                t["text"] for found in sweeps.values() for t in found.get(name, {}).values() if t[side] == "refused"
            ]
            if said:
                reason = said[0].split("\n")[0].removeprefix("UnsupportedOperatorError: ")
                lines.append(f"| {name} | {side} | {reason} |")
    return "\n".join(lines) + "\n"


def listed(heading: str) -> set[str]:
    """The operators that the page lists under a heading that starts so."""
    section = re.search(rf"^## {heading}.*?\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.S | re.M)
    assert section, f"{PAGE} has no section {heading!r}"
    names = set()
    for family, some in re.findall(r"^- \*\*(\w+)\*\* \(\d+\): (.*)$", section.group(1), re.M):
        names |= {name if family == "others" else f"{family}_{name}" for name in some.split(", ")}
    return names


def refused() -> set[str]:
    """The operators that the page says are refused."""
    return set(re.findall(r"^\| (\w\S*) \| (?:forward|backward) \|", PAGE.read_text(), re.M))
