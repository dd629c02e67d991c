"""FSDP1 on tensor-parallel modules: training and state dicts against a plain model on one process."""

import pytest

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


@pytest.mark.parametrize("mesh", MESHES)
def test_training_and_sharded_state_dicts_equal_one_process(mesh):
    run_ranks(4, there_and_back, *MESHES[mesh], "ours", (10, 7))


@pytest.mark.full
@pytest.mark.parametrize("library", ["ours", "torch"])
def test_hybrid_sharding_over_tensor_parallelism(library):
    run_ranks(8, there_and_back, (2, 2, 2), ("rep", "dp", "tp"), library, (10, 7 if library == "ours" else 6))


def test_parameters_of_torchs_class():
    run_ranks(4, there_and_back, *MESHES["fsdp x tp"], "torch", (10, 6))
