"""See the package: python -m tests.device [--on cuda] [a part of a body's name ...]."""

import sys

import torch

from tests.device.checks import BODIES
from tests.device.running import run_on
from tests.ranks import RankFailed


def main(words: list[str]) -> int:
    """How many checks have failed."""
    kind = words.pop(words.index("--on") + 1) if "--on" in words else "strict"
    words = [word for word in words if word != "--on"]
    if kind == "cuda" and torch.cuda.device_count() < 2:
        print("nothing checked: two GPUs are needed")
        return 0
    if kind == "strict":
        from tests.device.installing import build

        build()
    failed = 0
    for world, body, args in BODIES:
        if words and not any(word in body for word in words):
            continue
        try:
            run_on(kind, world, body, *args)
            print(f"right   {body} {args or ''}", flush=True)
        except RankFailed as error:
            failed += 1
            print(f"WRONG   {body} {args or ''}\n{error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
