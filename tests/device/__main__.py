"""See the package: python -m tests.device [--on cuda|cuda-gloo] [a part of a body's name ...]."""

import sys

import torch

from tests.device.checks import BODIES
from tests.device.gpus import GPU_BODIES
from tests.device.running import KINDS, run_on
from tests.ranks import RankFailed


def main(words: list[str]) -> int:
    """How many checks have failed."""
    kind = words.pop(words.index("--on") + 1) if "--on" in words else "strict"
    words = [word for word in words if word != "--on"]
    if KINDS[kind][0] == "cuda" and not torch.cuda.device_count():
        print("nothing checked: there is no GPU")
        return 0
    if kind == "strict":
        from tests.device.installing import build

        build()
    known = BODIES + (GPU_BODIES if KINDS[kind][0] == "cuda" else [])
    chosen = [body for body in known if not words or any(word in body[1] for word in words)]
    failed = 0
    for world, body, args in chosen or [(2, word, ()) for word in words]:
        try:
            run_on(kind, world, body, *args)
            print(f"right   {body} {args or ''}", flush=True)
        except RankFailed as error:
            failed += 1
            print(f"WRONG   {body} {args or ''}\n{error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
