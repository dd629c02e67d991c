"""FSDP2 around blocks under selective checkpoints, as torchtitan has them."""

import functools

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.parallel import fsdp_cases as cases
from tests.ranks import run_ranks

KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops._c10d_functional.all_reduce.default}


def keep(context, operator, *args, **options):
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(rank, world):
    from torchshard import init_device_mesh
    from torchshard.debug import CommDebugMode
    from torchshard.parallel.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, plain = cases.parallel(mesh, hidden=(12, 8)), cases.plain(hidden=(12, 8))
    saving = functools.partial(create_selective_checkpoint_contexts, keep)
    for i, block in enumerate(model):
        block.up.bias.requires_grad_(False)
        plain[i].up.bias.requires_grad_(False)
        model[i] = fully_shard(checkpoint_wrapper(block, context_fn=saving), mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    batch = torch.randn(12, cases.WIDTH, generator=torch.Generator().manual_seed(1))
    counts = CommDebugMode()
    for _ in range(2):
        plain(batch).square().mean().backward()
        with counts:
            model(batch.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(cases.full(p.grad), q.grad)
    return counts.get_comm_counts()[torch.ops.c10d_functional.all_reduce]


def test_what_is_kept_is_not_sent_again():
    assert run_ranks(4, checkpointed) == [4] * 4  # one in forward and one in backward for each block
