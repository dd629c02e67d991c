"""The script that every rank of the demo runs, under torchrun, on one machine or several that share a folder:

torchrun --nproc-per-node=2 -m torchshard.demo.ranks --out demo-output
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchshard.demo.checks import Report
from torchshard.demo.model import GPT, Config, generate, tensor_parallel
from torchshard.demo.text import Corpus, find_text
from torchshard.demo.training import (
    Settings,
    Trained,
    gradient_error,
    held_out_bits,
    step_timeline,
    train,
)


def main() -> int:
    """Run all of it; 0 if every check passed."""
    options = _options()
    device = _join()
    config = Config(options.layers, options.width, options.heads, options.context)
    settings = Settings(config, options.steps, options.batch)
    corpus = find_text(options.data)
    options.out.mkdir(parents=True, exist_ok=True)
    _say(
        f"{dist.get_world_size()} ranks on {device.type} over {dist.get_backend()}; {corpus.files} files, "
        f"{len(corpus.train) / 1e6:.1f} MB to learn from, {len(corpus.held_out) / 1e6:.1f} MB held out"
    )
    report = Report()
    trained = train(corpus, settings, device)
    _check_training(report, trained, corpus, settings, device)
    _check_checkpoint(report, trained, corpus, settings, device, options.out)
    _finish(report, trained, corpus, settings, device, options.out)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if report.passed else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchshard.demo.ranks", description=__doc__)
    parser.add_argument("--data", type=Path, help="file or folder of text; default: Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder to write to")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=16, help="sequences a rank")
    defaults = Config()
    for name in ("layers", "width", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    return parser.parse_args()


def _join() -> torch.device:
    """Join the process group: NCCL where every rank of this machine has a GPU, else gloo."""
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= here:
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _check_training(report: Report, trained: Trained, corpus: Corpus, settings: Settings, device: torch.device) -> None:
    bits = held_out_bits(trained.model, corpus, settings, device)
    report.add("held-out loss, bits/byte (unigram entropy less 1)", bits, corpus.entropy - 1)
    before = trained.wrapper.reducer.counters.in_graph
    error = gradient_error(trained, corpus, settings, device)
    report.add("gradients of one step against a single process, relative", error, 1e-3)
    in_graph = trained.wrapper.reducer.counters.in_graph - before
    count = len(list(trained.model.parameters()))
    report.add(f"parameters not reduced inside the graph (of {count})", count - in_graph, 0)


def _check_checkpoint(
    report: Report, trained: Trained, corpus: Corpus, settings: Settings, device: torch.device, out: Path
) -> None:
    """Save sharded, convert, load in plain torch, and run the same weights tensor-parallel."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict_saver import save

    from torchshard import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sharded: dict[str, Any] = {
        name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in trained.model.state_dict().items()
    }
    if dist.get_rank() == 0:
        shutil.rmtree(out / "checkpoint", ignore_errors=True)
    dist.barrier()
    save(sharded, checkpoint_id=out / "checkpoint")
    if dist.get_rank() == 0:
        arguments = [str(out / "checkpoint"), str(out / "model.safetensors"), "--to", "safetensors", "--overwrite"]
        subprocess.run([sys.executable, "-m", "torchshard", "convert", *arguments], check=True)
    dist.barrier()
    plain = GPT(settings.config).to(device)
    plain.load_state_dict(load_file(out / "model.safetensors"))
    text = torch.frombuffer(bytearray(corpus.held_out[: 8 * settings.config.context]), dtype=torch.uint8)
    tokens = text.long().view(8, -1).to(device)
    with torch.no_grad():
        want, got = trained.model(tokens), plain(tokens)
        report.add("logits of the converted checkpoint in plain torch", float((got - want).abs().max()), 1e-6)
        parallel = tensor_parallel(plain, mesh)
        spread = parallel(distribute_tensor(tokens, mesh)).full_tensor()
        report.add("logits tensor-parallel against plain", float((spread - want).abs().max()), 1e-3)
    cut: list[Any] = [p for p in parallel.parameters() if isinstance(p, DTensor) and p.placements[0].is_shard()]
    held = sum(p.to_local().numel() for p in cut) / sum(p.numel() for p in cut)
    report.add(f"part of the cut weights on each of {mesh.size()} ranks", held, 1.0 / mesh.size() + 0.01)


def _finish(
    report: Report, trained: Trained, corpus: Corpus, settings: Settings, device: torch.device, out: Path
) -> None:
    timeline = step_timeline(trained, corpus, settings, device)
    if dist.get_rank() != 0:
        return
    generator = torch.Generator().manual_seed(2)
    sample = generate(trained.model, b"def ", 240, generator).decode("utf-8", "replace")
    print(f"\nA sample of the model's own:\n\n{sample}\n\nOne step on rank 0:\n\n{timeline}\n")
    try:
        timeline.picture(out / "timeline.png", "one compiled step: computing, and reducing buckets")
        _draw_losses(trained.losses, corpus.entropy, out / "loss.png")
        print(f"pictures: {out / 'loss.png'}, {out / 'timeline.png'}\n")
    except ModuleNotFoundError as error:
        print(f"no pictures: {error}; pip install 'torchshard-distributed[plot]'\n")
    print(f"{report}\n\n{'All checks passed.' if report.passed else 'Some checks FAILED.'}", flush=True)


def _draw_losses(losses: list[float], entropy: float, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(losses, label="training loss")
    axes.axhline(entropy, linestyle="--", color="grey", label="unigram entropy of the held-out files")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
