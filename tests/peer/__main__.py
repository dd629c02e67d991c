"""torch's tests of DistributedDataParallel, with torchshard's class in its place.

python -m tests.peer                       # all that construct the wrapper, as a table
python -m tests.peer -k join -v            # some; what fails, in full
python -m tests.peer --torch               # with torch's own class: what can be expected here
"""

import argparse
import dataclasses
import json
import sys

from tabulate import tabulate

from tests.peer import suite, trial


def main() -> int:
    """Run tests and report; 1 if one did not pass or skip."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", action="append", default=[], help="only tests whose names contain this")
    parser.add_argument("--torch", action="store_true", help="with torch's own class")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a test")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each test, not a table")
    parser.add_argument("-v", action="store_true", help="show tracebacks")
    parser.add_argument("names", nargs="*", help="tests by their full names")
    options = parser.parse_args()
    module = suite.load()
    wrapper = trial.wrapper_class(options.torch)
    found = []
    for name in options.names or suite.names(module):
        if all(part not in name for part in options.k) and options.k:
            continue
        outcome = trial.run(module, name, wrapper, options.limit)
        found.append(outcome)
        if options.json:
            print(json.dumps(dataclasses.asdict(outcome)), flush=True)
        elif options.v and outcome.text:
            print(f"{name} {outcome.verdict}: {outcome.text}\n", flush=True)
    if not options.json:
        rows = [(o.name, o.verdict, o.seconds, o.text.strip().splitlines()[-1][:80] if o.text else "") for o in found]
        print(tabulate(rows, ["test", "", "s", "why"], floatfmt=".1f"))
        counts = [
            f"{n} {verdict}"
            for verdict in ("passes", "skips", "fails", "hangs")
            if (n := sum(o.verdict == verdict for o in found))
        ]
        print(f"\n{len(found)} tests: {', '.join(counts)}")
    return int(any(o.verdict in ("fails", "hangs") for o in found))


if __name__ == "__main__":
    sys.exit(main())
