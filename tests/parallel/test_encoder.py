"""torch.nn's TransformerEncoder under tensor and sequence parallelism: losses, gradients and steps of one process."""

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks

STEPS, BATCH, TIME, WIDTH = 5, 4, 7, 12


def encoder(norm_first, dropout):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 20, dropout=dropout, activation="gelu", batch_first=True, norm_first=norm_first
    )
    layer.self_attn.dropout = 0.0  # dropout inside of attention kernels is refused
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def tensor_plan():
    from torchshard.parallel import ColwiseParallel, RowwiseParallel

    return {"layers.*.linear1": ColwiseParallel(), "layers.*.linear2": RowwiseParallel()}


def sequence_plan():
    """DTensors split along the sequence; attention, whose packed weights no style cuts, is split along the batch."""
    from torchshard import Replicate, Shard, distribute_module
    from torchshard.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    class ByBatch(ParallelStyle):
        """Replicated parameters, inputs and output split along the batch."""

        def _apply(self, module, device_mesh):
            distribute_module(module, device_mesh)
            return PrepareModuleInputOutput(
                input_layouts=(Shard(1),) * 3,
                desired_input_layouts=(Shard(0),) * 3,
                output_layouts=(Shard(0), None),
                desired_output_layouts=(Shard(1), None),
                use_local_output=False,
            )._apply(module, device_mesh)

    return {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "layers.*.self_attn": ByBatch(),
        "layers.*.norm[12]": SequenceParallel(),
        "layers.*.linear1": ColwiseParallel(use_local_output=False),
        "layers.*.linear2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
    }


def train(rank, world, kind, norm_first):
    from torchshard import DTensor, fallback, init_device_mesh
    from torchshard.parallel import parallelize_module

    dropout = 0.1 if kind == "sequence" else 0.0  # a DTensor draws what one device would have drawn
    plain, model = encoder(norm_first, dropout), encoder(norm_first, dropout)
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(model, mesh, sequence_plan() if kind == "sequence" else tensor_plan())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4) for m in (plain, model)]
    g = torch.Generator().manual_seed(3)
    errors = {}

    def compare(name, got, want):
        full = got.full_tensor() if isinstance(got, DTensor) else got
        errors[name] = (full - want).abs().max().item() / max(1.0, want.abs().max().item())

    with fallback("error"):
        for step in range(STEPS):
            x = torch.randn(BATCH, TIME, WIDTH, generator=g)
            outputs = []
            for m in (plain, model):
                torch.manual_seed(step)
                outputs.append(m(x))
                outputs[-1].square().mean().backward()
            compare(f"output {step}", outputs[1], outputs[0])
            pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
            for (name, p), q in pairs:
                compare(f"gradient {step} {name}", p.grad, q.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():  # where plain modules may take a fused path
            compare("evaluation", model.eval()(x), plain.eval()(x))
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        compare(f"parameter {name}", p, q)
    return max((e, name) for name, e in errors.items())


@pytest.mark.parametrize(
    ("kind", "world", "norm_first"), [("tensor", 2, False), ("sequence", 2, True), ("sequence", 4, False)]
)
def test_training_equals_one_process(kind, world, norm_first):
    for error, name in run_ranks(world, train, kind, norm_first, timeout=200):
        assert error < 2e-5, name
