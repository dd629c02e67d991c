"""Training data parallel in a compiled graph, and what is measured of it."""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.demo.model import GPT, Config, loss
from torchshard.demo.text import Corpus
from torchshard.timeline import Span, Timeline

BITS = 1 / math.log(2)  # a nat


@dataclass(frozen=True)
class Settings:
    """How to train; `batch` is that of one rank, in sequences."""

    config: Config
    steps: int
    batch: int = 16
    rate: float = 5e-3
    warmup: int = 20


@dataclass
class Trained:
    """The model (the same on every rank), its losses in bits a byte, and its wrapper."""

    model: GPT
    wrapper: Any
    compiled: Any
    losses: list[float] = field(default_factory=list)


class Batches:
    """Sequences drawn from a text: the same global batch on every rank, of which each takes its part."""

    def __init__(self, text: Any, settings: Settings, device: torch.device) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.settings, self.device = settings, device
        self.generator = torch.Generator().manual_seed(1)

    def whole(self) -> tuple[Tensor, Tensor]:
        """The next global batch: bytes, and the bytes that follow them; each [ranks * batch, context]."""
        length = self.settings.config.context
        count = self.settings.batch * dist.get_world_size()
        starts = torch.randint(len(self.text) - length - 1, (count,), generator=self.generator)
        windows = torch.stack([self.text[s : s + length + 1] for s in starts.tolist()]).long().to(self.device)
        return windows[:, :-1], windows[:, 1:]

    def mine(self) -> tuple[Tensor, Tensor]:
        """This rank's part of the next global batch."""
        inputs, targets = self.whole()
        rank, n = dist.get_rank(), self.settings.batch
        return inputs[rank * n : (rank + 1) * n], targets[rank * n : (rank + 1) * n]


def train(corpus: Corpus, settings: Settings, device: torch.device) -> Trained:
    """Train with AdamW through DistributedDataParallel and torch.compile(backend="torchshard")."""
    from tqdm import tqdm

    from torchshard import DistributedDataParallel

    torch.manual_seed(0)
    model = GPT(settings.config).to(device)
    wrapper = DistributedDataParallel(model, bucket_cap_mb=0.5)
    compiled = torch.compile(wrapper, backend="torchshard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    trained, batches = Trained(model, wrapper, compiled), Batches(corpus.train, settings, device)
    with tqdm(total=settings.steps, desc="training", unit="step", disable=dist.get_rank() != 0) as bar:
        for _ in range(settings.steps):
            inputs, targets = batches.mine()
            value = loss(compiled(inputs), targets)
            value.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            mean = value.detach().clone()
            dist.all_reduce(mean)
            trained.losses.append(float(mean) / dist.get_world_size() * BITS)
            bar.set_postfix_str(f"{trained.losses[-1]:.2f} bits/byte", refresh=False)
            bar.update()
    return trained


def _rate(step: int, settings: Settings) -> float:
    """Part of the learning rate: a linear rise, then a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / settings.warmup)
    return rise * (0.55 + 0.45 * math.cos(math.pi * step / max(1, settings.steps)))


@torch.no_grad()
def held_out_bits(model: GPT, corpus: Corpus, settings: Settings, device: torch.device) -> float:
    """Mean loss in bits a byte on sequences spread evenly over the held-out files."""
    length, count, ranks = settings.config.context, 128, dist.get_world_size()
    text = torch.frombuffer(bytearray(corpus.held_out), dtype=torch.uint8)
    starts = torch.linspace(0, len(text) - length - 1, count).long()[dist.get_rank() :: ranks]
    windows = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long().to(device)
    total = loss(model(windows[:, :-1]), windows[:, 1:]) * len(starts)
    dist.all_reduce(total)
    return float(total) / count * BITS


def gradient_error(trained: Trained, corpus: Corpus, settings: Settings, device: torch.device) -> float:
    """One step's gradients against those of a single process on the same global batch: the largest difference, as a
    part of the largest gradient of the parameter (or of a hundredth of the largest of all, if that is more).
    """
    import copy

    inputs, targets = Batches(corpus.held_out, settings, device).whole()
    rank, n = dist.get_rank(), settings.batch
    alone = copy.deepcopy(trained.model)
    loss(alone(inputs), targets).backward()
    mine = slice(rank * n, (rank + 1) * n)
    loss(trained.compiled(inputs[mine]), targets[mine]).backward()
    pairs = [(p.grad, q.grad) for p, q in zip(trained.model.parameters(), alone.parameters(), strict=True)]
    largest = max(float(want.abs().max()) for _, want in pairs if want is not None)
    errors = []
    for got, want in pairs:
        if got is None or want is None:
            return math.inf
        errors.append(float((got - want).abs().max()) / max(float(want.abs().max()), largest / 100))
    trained.wrapper.zero_grad()
    worst = torch.tensor(max(errors), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def step_timeline(trained: Trained, corpus: Corpus, settings: Settings, device: torch.device) -> Timeline:
    """One step as torch.profiler sees it: forward, backward, and each bucket's all-reduce."""
    batches = Batches(corpus.held_out, settings, device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=activities) as profile:
            inputs, targets = batches.mine()
            with torch.profiler.record_function("forward"):
                value = loss(trained.compiled(inputs), targets)
            with torch.profiler.record_function("backward"):
                value.backward()
    trained.wrapper.zero_grad()
    spans, buckets = [], 0
    for event in sorted(profile.events() or [], key=lambda e: e.time_range.start):
        times = event.time_range.start / 1e6, event.time_range.end / 1e6
        if event.name in ("forward", "backward"):
            spans.append(Span(event.name, event.name, *times))
        elif event.name.startswith(("gloo:all_reduce", "nccl:all_reduce", "ncclDevKernel_AllReduce")):
            spans.append(Span(f"bucket {buckets}", event.name, *times, "communication"))
            buckets += 1
    return Timeline(spans)
