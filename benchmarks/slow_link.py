"""Ranks on a network of their own: a loopback interface inside a private namespace, slowed down by the kernel.

All ranks share it: of a rate R, each of W ranks of a ring has R / W to itself. They stand for ranks of several
machines, and so do not read one another's memory.

    python -m benchmarks.slow_link 100 4 tests.compiler.slow:steps     # Mbit/s, ranks, what each of them runs
"""

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

SETUP = "ip link set lo mtu 1500 up && tc qdisc add dev lo root handle 1: tbf rate {rate}mbit burst 256kb latency 200ms"
ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def why_not() -> str:
    """Why this machine cannot do that; empty if it can."""
    try:
        command = ["unshare", "-n", "sh", "-c", SETUP.format(rate=1000)]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no private network namespace: {error}"
    return "" if tried.returncode == 0 else f"no private network namespace: {tried.stderr.strip()}"


def run_on_slow_link(mbits: int, world: int, body: str, *args: object, timeout: float = 240) -> list:
    """What `body`, "module:function" called with rank, world and args, returns on each rank; all of it JSON."""
    inside = [sys.executable, "-m", "benchmarks.slow_link", mbits, world, body, timeout, json.dumps(args)]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "TORCHSHARD_READ_NEIGHBOURS": "0"}
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", f'{SETUP.format(rate=mbits)} && exec "$@"', "sh", *map(str, inside)],
        env=env, capture_output=True, text=True, timeout=timeout + 30, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    from tests.ranks import run_ranks

    _, _, world, where, limit, args = [*sys.argv, "120", "[]"][:6]
    module, _, name = where.partition(":")
    body = getattr(importlib.import_module(module), name)
    print(json.dumps(run_ranks(int(world), body, *json.loads(args), timeout=float(limit))))
