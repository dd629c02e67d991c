"""All claims: `python -m benchmarks` (make bench). Each script compares with torch's own, interleaved in one run.

Every script runs in a process of its own, so that none warms up, or spoils, what another measures.
"""

import subprocess
import sys

SCRIPTS = {
    "imports": "Imports: CPU time of fresh interpreters",
    "dtensor_overhead": "DTensor: CPU time of an operator",
    "communication": "DTensor: operators that communicate, on two ranks",
    "tensor_parallel": "Tensor parallelism: one eager training step of a Llama",
    "ddp_step": "DistributedDataParallel: one eager step",
    "ddp_memory": "DistributedDataParallel: peak memory",
    "ddp_mixed": "DistributedDataParallel: mixed precision, parameters cast beside the forward",
    "ddp_slow_link": "DistributedDataParallel over a slow link, sizes of buckets chosen by it",
    "compile_step": 'torch.compile(backend="torchshard"): one compiled step',
    "compile_time": 'torch.compile(backend="torchshard"): the first step, with empty caches',
    "compiled_tensor": "DTensors in a compiled region: one step of a tensor-parallel MLP beside one written by hand",
    "state_dict": "State dicts: conversions of 1 GiB on four ranks",
    "convert": "torchshard convert: 1 GiB of a sharded checkpoint",
}


def main() -> int:
    """Run them, or those that are named; the exit code is that of the first that failed."""
    for name in sys.argv[1:] or SCRIPTS:
        print(f"\n## {SCRIPTS[name]}\n\n`python -m benchmarks.{name}`\n", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
