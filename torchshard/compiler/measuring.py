"""What a model computes, timed here: forward, backward, and when each gradient comes."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torchshard import _torch
from torchshard.simulation import StepTimes


def measure(
    model: torch.nn.Module,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    repeat: int = 5,
    **kwargs: Any,
) -> StepTimes:
    """Run forward and backward a few times, without communication, and take medians.

    Gradients, buffers and random generators are as before afterwards; what the forward does to its inputs, or to
    attributes of other kinds, stays. A gradient counts as there when autograd has
    accumulated it; a compiled model hands over all of them at its end.

    Args:
        model: a module, compiled or not; of a wrapped one, the module inside is run.
        args, kwargs: for its forward.
        loss: makes a scalar of the output; the default sums up all tensors of floating point in it.
        repeat: how often; the first run besides is not counted.

    Raises:
        ValueError: less than one repetition, a model on the meta device, or a loss without a gradient: no output that
            goes into it has one.
    """
    if repeat < 1:
        raise ValueError(f"measure: repeat={repeat} measures nothing; give 1 or more")
    module, wrapper = unwrapped(model)
    if any(p.is_meta for p in module.parameters()):
        raise ValueError("measure: the model lies on the meta device, where nothing is computed; give times instead")
    run, clock = wrapper.module if wrapper else model, _clock(*module.parameters(), args, kwargs)
    with unchanged(module), _arrivals(module, clock) as arrived:
        runs = [_run(run, args, kwargs, loss or _sum, clock, arrived) for _ in range(repeat + 1)][1:]
    ready = {name: statistics.median(run.ready.get(name, run.backward) for run in runs) for name in runs[0].ready}
    return StepTimes(statistics.median(r.forward for r in runs), statistics.median(r.backward for r in runs), ready)


def unwrapped(model: object) -> tuple[torch.nn.Module, torch.nn.parallel.DistributedDataParallel | None]:
    """What is inside of DistributedDataParallel, ours or torch's, and torch.compile, in either order; the wrapper.

    TypeError if it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__}"
        raise TypeError(f"expected a module, as Net() is one of class Net, got {what}")
    outer = _torch.uncompiled(model)
    wrapper = outer if isinstance(outer, torch.nn.parallel.DistributedDataParallel) else None
    return _torch.uncompiled(wrapper.module) if wrapper else outer, wrapper


def _run(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor],
    clock: Callable[[], float],
    arrived: dict[str, float],
) -> StepTimes:
    module.zero_grad(set_to_none=True)
    start = clock()
    output = module(*args, **kwargs)
    value = loss(output)
    if not value.requires_grad:
        raise ValueError(
            f"measure: the loss has no gradient: expected it to depend on an output of {type(module).__name__} with "
            f"requires_grad, got {described(output)}"
        )
    middle = clock()
    arrived.clear()
    value.backward()
    end = clock()
    return StepTimes(middle - start, end - middle, {name: at - middle for name, at in arrived.items()})


def _sum(output: Any) -> torch.Tensor:
    """All tensors of floating point in an output, complex ones as pairs, added up."""
    tensors = [x for x in _torch.leaves_of(output)[0] if isinstance(x, torch.Tensor)]
    real = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    terms = [x.sum().float() for x in real if x.is_floating_point()]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def described(values: Any) -> str:
    """Arguments or an output, for messages: "float32[4, 256] with requires_grad, int"."""
    leaves, _ = _torch.leaves_of(values)
    return ", ".join(map(_kind, leaves)) or "nothing"


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{kind} with requires_grad" if value.requires_grad else kind


def _clock(*values: Any) -> Callable[[], float]:
    """Seconds, once the device of the first of these tensors, if there are any, has done what it was told."""
    leaves, _ = _torch.leaves_of(values)
    device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), torch.device("cpu"))
    if device.type == "cpu":
        return time.perf_counter

    def seconds() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return seconds


@contextmanager
def _arrivals(module: torch.nn.Module, clock: Callable[[], float]) -> Iterator[dict[str, float]]:
    """Name of a parameter -> when its gradient has come last."""
    arrived: dict[str, float] = {}

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def gradient_arrived(_param: torch.Tensor) -> None:
            arrived[name] = clock()

        return gradient_arrived

    handles = [
        p.register_post_accumulate_grad_hook(hook(name)) for name, p in module.named_parameters() if p.requires_grad
    ]
    try:
        yield arrived
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Leave gradients, buffers, weights that a forward shortens (max_norm) and random generators as they were."""
    homes = [(m, n, b) for m in module.modules() for n, b in m.named_buffers(recurse=False, remove_duplicate=False)]
    tables = [m for m in module.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)]
    shortened = [table.weight for table in tables if table.max_norm is not None]
    values = [(x, x.detach().clone()) for x in {id(x): x for x in [*(b for *_, b in homes), *shortened]}.values()]
    gradients = [(p, p.grad) for p in module.parameters()]
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for param, gradient in gradients:
                param.grad = gradient
            for home, name, buffer in homes:
                setattr(home, name, buffer)
            with torch.no_grad():
                for x, before in values:
                    x.copy_(before)
