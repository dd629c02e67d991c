"""The sweep over torch's operator database, and docs/coverage.md from what it finds.

python -m tests.coverage                         # everything, then the page (make coverage)
python -m tests.coverage --mesh 2 -v add mm      # some operators, what is not right in full
python -m tests.coverage --mesh "3 in units"     # split dims in units; or "in runs", "2x2 in levels"
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tests.coverage import report
from tests.coverage.pool import Pool, prepare
from tests.coverage.samples import database
from tests.coverage.sweep import sweep_operator, verdict

MESHES = "2", "2x2", "2 in units", "2 in runs", "2x2 in levels"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", action="append", help=f"such as {', '.join(MESHES)}; all of these by default")
    parser.add_argument("--samples", type=int, default=3, help="of an operator, on the first mesh; one on the others")
    parser.add_argument("--keep", help="a JSON file for what was found; taken up again where it exists")
    parser.add_argument("-v", action="store_true", help="show trials that are not right")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    kept = Path(options.keep) if options.keep else None
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    prepare()
    for k, mesh in enumerate(options.mesh or MESHES):
        shape, _, cut = mesh.partition(" in ")
        pool = Pool(tuple(map(int, shape.split("x"))))
        here = found.setdefault(mesh, {})
        for name in options.names or database():
            if name not in here:
                start = time.monotonic()
                here[name] = sweep_operator(pool, name, 1 if k else options.samples, cut)
                _say(mesh, name, here[name], time.monotonic() - start, options.v)
                if kept:
                    kept.write_text(json.dumps(found))
        pool.stop()
    if not options.names and not options.mesh:
        report.PAGE.write_text(report.render(found, options.samples))


def _say(mesh: str, name: str, trials: dict[str, Any], seconds: float, in_full: bool) -> None:
    gathered = sum(1 for t in trials.values() if t["gathers"])
    verdicts = f"{verdict(trials, 'forward')} {verdict(trials, 'backward')}"
    print(f"{mesh} {name}: {verdicts} ({len(trials)} trials, {gathered} gather, {seconds:.1f} s)", flush=True)
    for label, t in trials.items():
        if in_full and (t["forward"] != "right" or t["backward"] not in (None, "right")):
            print("   ", label, t["forward"], t["backward"], t["text"], flush=True)


if __name__ == "__main__":
    main()
