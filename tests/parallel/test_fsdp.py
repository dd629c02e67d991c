"""FSDP1 on tensor-parallel modules: training and state dicts against a plain model on one process."""

import copy

import pytest
import torch

from tests.parallel import fsdp_cases as cases
from tests.ranks import run_ranks

MESHES = {
    "fsdp x tp": ((2, 2), ("dp", "tp")),
    "hsdp x tp": ((1, 2, 2), ("rep", "dp", "tp")),
    "hsdp": ((2, 2), ("rep", "dp")),
}


def there_and_back(rank, world, shape, names, library, hidden):
    """Five steps, state dicts out, into another model, five more steps: equal to one process throughout."""
    from torchshard import init_device_mesh
    from torchshard.parallel.fsdp import install

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    ways = [(True, None), (False, None), (True, "SHARD_GRAD_OP" if "rep" not in names else "_HYBRID_SHARD_ZERO2")]
    ways = ways if "tp" in names and library == "ours" else ways[:2]
    for orig, strategy in ways:
        plain, plain_optimizer = cases.trained(cases.plain(hidden=hidden))
        with install():
            made = [cases.wrapped(cases.parallel(mesh, library, seed, hidden), mesh, orig, strategy) for seed in (0, 1)]
        model, optimizer = cases.trained(made[0], **cases.place(mesh))
        state, optimizer_state = cases.sharded(model, optimizer)
        cases.assert_same(state, optimizer_state, plain, plain_optimizer)

        other, other_optimizer = cases.trained(made[1], **cases.place(mesh))
        cases.load_sharded(other, other_optimizer, state, optimizer_state)
        cases.assert_same(*cases.sharded(other, other_optimizer), plain, plain_optimizer)
        cases.trained(other, other_optimizer, **cases.place(mesh))
        cases.trained(plain, plain_optimizer)
        cases.assert_same(*cases.sharded(other, other_optimizer), plain, plain_optimizer, rtol=1e-4, atol=1e-5)


def everywhere(rank, world):
    """One start for all meshes of four ranks, with parameters of this package and, at last, of torch."""
    for mesh in MESHES.values():
        there_and_back(rank, world, *mesh, "ours", (10, 7))
    there_and_back(rank, world, *MESHES["fsdp x tp"], "torch", (10, 6))


def test_training_and_sharded_state_dicts_equal_one_process():
    run_ranks(4, everywhere, timeout=280)


@pytest.mark.full
@pytest.mark.parametrize("library", ["ours", "torch"])
def test_hybrid_sharding_over_tensor_parallelism(library):
    run_ranks(8, there_and_back, (2, 2, 2), ("rep", "dp", "tp"), library, (10, 7 if library == "ours" else 6))


def precision_frozen_summoned(rank, world):
    """Half precision in forward, frozen parameters, and whole parameters for a while: as with torch's own classes."""
    from contextlib import nullcontext

    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    from torchshard import DTensor, init_device_mesh
    from torchshard.parallel.fsdp import install

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for library in ("ours", "torch"):
        with install() if library == "ours" else nullcontext():
            model = cases.wrapped(cases.parallel(mesh, library, hidden=(10, 6)), mesh, mixed_precision=half)
        optimizer = cases.adamw(model)
        dtypes = set()
        up = model[0].up  # FSDP hands unknown names on to the module inside
        up.register_forward_pre_hook(lambda module, _, dtypes=dtypes: dtypes.add(module.weight.dtype))
        cases.train(model, optimizer, **cases.place(mesh))
        assert dtypes == {torch.bfloat16}
        found[library] = {name: x.full_tensor() for name, x in cases.sharded(model, optimizer)[0].items()}
    for name, value in found["ours"].items():
        assert value.dtype is torch.float32, name
        torch.testing.assert_close(value, found["torch"][name], rtol=1e-2, atol=1e-3)

    plain, split = cases.plain(), cases.parallel(mesh)
    for model in (plain, split):
        for name in ("0.up.weight", "1.down.bias"):
            model.get_parameter(name).requires_grad_(False)
    with install():
        model = cases.wrapped(split, mesh)
    optimizer = cases.adamw(model)
    cases.train(model, optimizer, **cases.place(mesh))
    cases.trained(plain)
    cases.assert_same(cases.sharded(model, optimizer)[0], {"state": {}}, plain, None)

    for orig in (True, False):
        with install():
            model = cases.wrapped(cases.parallel(mesh), mesh, orig)
        optimizer = cases.adamw(model)
        want = cases.plain().state_dict()
        with FullyShardedDataParallel.summon_full_params(model, writeback=True), torch.no_grad():
            for name, x in model.named_parameters():
                name = name.replace("_fsdp_wrapped_module.", "")
                assert isinstance(x, DTensor) == ("up" in name or "down" in name), name
                torch.testing.assert_close(cases.full(x), want[name])
                x.mul_(2)
        for name, x in cases.sharded(model, optimizer)[0].items():
            torch.testing.assert_close(x.full_tensor(), 2 * want[name])
        before = [id(p) for p in model.parameters()]
        cases.trained(model, optimizer, **cases.place(mesh))
        assert [id(p) for p in model.parameters()] == before


def test_half_precision_frozen_and_summoned_parameters():
    run_ranks(4, precision_frozen_summoned)


def clipped(rank, world):
    """clip_grad_norm_ finds the norm of one process, on every rank, and scales by it."""
    import math

    from torchshard import init_device_mesh
    from torchshard.parallel.fsdp import install

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    at, batch = cases.place(mesh)["at"], torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    ways = ("ours", True, None), ("ours", False, None), ("torch", True, None), ("ours", False, "NO_SHARD")
    for library, orig, strategy in ways:
        hidden = (10, 7) if library == "ours" else (10, 6)
        with install():
            model = cases.wrapped(cases.parallel(mesh, library, hidden=hidden), mesh, orig, strategy)
        torch.set_default_dtype(torch.bfloat16)  # of which the norms of ranks that have nothing must not be
        nothing = model.clip_grad_norm_(1.0)  # there are none yet
        torch.set_default_dtype(torch.float32)
        assert (nothing, nothing.dtype) == (0, torch.float32)
        plain = cases.plain(hidden=hidden)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, plain))
        for norm_type, limit in ((2.0, 0.5), (1, 100.0), (math.inf, 0.01)):
            plain(batch).square().mean().backward()
            model(batch.chunk(2)[at]).square().mean().backward()
            want = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
            found = model.clip_grad_norm_(limit, norm_type)
            torch.testing.assert_close(found, want, msg=lambda m, at=(library, orig, norm_type): f"{at}: {m}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        if strategy is None:
            state = cases.sharded(model, ours)[0]
            cases.assert_same(state, {"state": {}}, plain, None, rtol=1e-4, atol=1e-5)


def partly_sharded(rank, world):
    """Blocks that FSDP cuts, and one that it does not."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    from torchshard import init_device_mesh
    from torchshard.parallel.fsdp import install

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    at, batch = cases.place(mesh)["at"], torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    plain, model = cases.plain(), cases.parallel(mesh)
    options = {"device_mesh": mesh["dp"], "use_orig_params": False, "device_id": torch.device("cpu")}
    with install():
        model[0] = FullyShardedDataParallel(model[0], sharding_strategy=ShardingStrategy.NO_SHARD, **options)
        model = FullyShardedDataParallel(model, **options)
    plain(batch).square().mean().backward()
    model(batch.chunk(2)[at]).square().mean().backward()
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.testing.assert_close(model.clip_grad_norm_(0.05), want)


def test_the_norm_of_what_is_cut_and_what_is_not():
    run_ranks(4, partly_sharded)


class Unequal(torch.nn.Module):
    """One rank of FSDP holds nothing but a part of the large parameter."""

    def __init__(self):
        super().__init__()
        self.large, self.up = torch.nn.Parameter(torch.ones(4000)), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.up(x) * self.large.sum()


def lopsided(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel

    from torchshard import Replicate, init_device_mesh
    from torchshard.parallel import ColwiseParallel, parallelize_module
    from torchshard.parallel.fsdp import install

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Unequal()
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"up": ColwiseParallel(output_layouts=Replicate())})
    with install():
        model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], device_id=torch.device("cpu"))
    norms = []
    for m in (plain, model):
        m(torch.ones(2, 8)).square().mean().backward()
    norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
    norms.append(model.clip_grad_norm_(0.05))
    torch.testing.assert_close(*norms)


def test_a_rank_that_holds_parts_of_plain_parameters_only():
    run_ranks(4, lopsided)


def test_gradients_are_clipped_by_the_norm_of_all():
    run_ranks(4, clipped)
