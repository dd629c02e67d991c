"""State dicts of FSDP1 on tensor-parallel modules: full ones, of ShardedTensors, through checkpoints, with torch's own."""

import itertools
import re

import pytest
import torch

from tests.parallel import fsdp_cases as cases
from tests.ranks import run_ranks


def full_config():
    """Arguments for FSDP.state_dict_type: full, and not by way of the CPU, where torch fails on CPU ranks."""
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

    return StateDictType.FULL_STATE_DICT, FullStateDictConfig(False, False), FullOptimStateDictConfig(False, False)


def full_states(rank, world):
    """Full state dicts by FSDP's functions and by torch.distributed.checkpoint.state_dict, out and in."""
    from torch.distributed.checkpoint import state_dict as dsd
    from torch.distributed.fsdp import FullyShardedDataParallel

    from torchshard import init_device_mesh
    from torchshard.parallel.fsdp import install

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, plain_optimizer = cases.trained(cases.plain())
    for orig in (True, False):
        with install():
            made = [cases.wrapped(cases.parallel(mesh, seed=seed), mesh, orig) for seed in (0, 1)]
        model, optimizer = cases.trained(made[0], **cases.place(mesh))
        other, other_optimizer = made[1], cases.adamw(made[1])
        with FullyShardedDataParallel.state_dict_type(model, *full_config()):
            state = model.state_dict()
            optimizer_state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        cases.assert_same(state, optimizer_state, plain, plain_optimizer)
        assert isinstance(state["0.up.weight"], torch.distributed.tensor.DTensor)  # whole along FSDP's axis
        if orig:
            options = dsd.StateDictOptions(full_state_dict=True)
            state = dsd.get_model_state_dict(model, options=options)
            optimizer_state = dsd.get_optimizer_state_dict(model, optimizer, options=options)
            assert {type(x) for x in state.values()} == {torch.Tensor}
            cases.assert_same(state, optimizer_state, plain, plain_optimizer)
            dsd.set_model_state_dict(other, state, options=options)
            dsd.set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=options)
        else:
            with FullyShardedDataParallel.state_dict_type(other, *full_config()):
                other.load_state_dict(state)
                loaded = FullyShardedDataParallel.optim_state_dict_to_load(other, other_optimizer, optimizer_state)
                other_optimizer.load_state_dict(loaded)
        cases.assert_same(*cases.sharded(other, other_optimizer), plain, plain_optimizer)

        cases.train(other, other_optimizer, **cases.place(mesh))
        options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dsd.set_model_state_dict(other, plain.state_dict() if rank == 0 else {}, options=options)
        cases.assert_same(cases.sharded(other, other_optimizer)[0], {"state": {}}, plain, None)


def test_full_state_dicts():
    run_ranks(4, full_states)


def of_sharded_tensors(rank, world, folder):
    """FSDP given a process group: sharded state dicts hold ShardedTensors, nested where a parameter is split."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from torchshard import init_device_mesh
    from torchshard._torch import is_sharded_tensor
    from torchshard.parallel.fsdp import install

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, plain_optimizer = cases.trained(cases.plain())
    for orig in (True, False):
        with install():
            made = [
                FullyShardedDataParallel(
                    cases.parallel(mesh, seed=seed),
                    process_group=mesh.get_group("dp"),
                    use_orig_params=orig,
                    auto_wrap_policy=ModuleWrapPolicy({cases.MLP}),
                    device_id=torch.device("cpu"),
                )
                for seed in (0, 1)
            ]
        model, optimizer = cases.trained(made[0], **cases.place(mesh))
        other, other_optimizer = cases.trained(made[1], **cases.place(mesh))
        state, optimizer_state = cases.sharded(model, optimizer)
        weight = state["0.up.weight"]
        (outer,) = weight.local_shards()
        assert weight.size() == (10, 8)
        assert list(outer.metadata.shard_offsets) == [5 * (rank % 2), 0]
        assert is_sharded_tensor(outer.tensor)
        assert outer.tensor.size() == (5, 8)
        assert not is_sharded_tensor(state["0.norm.weight"].local_shards()[0].tensor)

        dcp.save(state, checkpoint_id=f"{folder}/{orig}")
        into = {name: torch.zeros_like(x) for name, x in plain.state_dict().items()}
        dcp.load(into, checkpoint_id=f"{folder}/{orig}")
        cases.assert_same(into, {"state": {}}, plain, None)
        cases.load_sharded(other, other_optimizer, state, optimizer_state)
        with FullyShardedDataParallel.state_dict_type(other, *full_config()):
            found = other.state_dict(), FullyShardedDataParallel.optim_state_dict(other, other_optimizer)
        cases.assert_same(*found, plain, plain_optimizer)

    # Flat parameters as they are: for torch, the ranks of FSDP must be those of the world.
    with install():
        one, two = [
            FullyShardedDataParallel(cases.plain(seed), use_orig_params=False, device_id=torch.device("cpu"))
            for seed in (0, 1)
        ]
    cases.trained(one, at=rank, of=world)
    for kind in (StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        cases.trained(two, at=rank, of=world)
        with FullyShardedDataParallel.state_dict_type(one, kind):
            state = one.state_dict()
        with FullyShardedDataParallel.state_dict_type(two, kind):
            two.load_state_dict(state)
        with FullyShardedDataParallel.state_dict_type(two, *full_config()):
            cases.assert_same(two.state_dict(), {"state": {}}, plain, None)


def test_state_dicts_of_sharded_tensors(tmp_path):
    run_ranks(4, of_sharded_tensors, str(tmp_path))


def optimizers_of_sharded_tensors(rank, world):
    """ShardedTensors of this package and of torch go into an optimizer; those cut otherwise than by rows are refused."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from torchshard.errors import ShardingError
    from torchshard.parallel.fsdp import install
    from torchshard.state_dict import to_full, to_sharded_tensor, to_torch

    plain, plain_optimizer = cases.trained(cases.plain())
    for orig in (True, False):
        with install():
            one, two = [
                FullyShardedDataParallel(cases.plain(seed), use_orig_params=orig, device_id=torch.device("cpu"))
                for seed in (0, 1)
            ]
        _, optimizer = cases.trained(one, at=rank, of=world)
        _, other_optimizer = cases.trained(two, at=rank, of=world)
        state, optimizer_state = cases.sharded(one, optimizer)
        cases.load_sharded(two, other_optimizer, state, to_sharded_tensor(optimizer_state))
        with FullyShardedDataParallel.state_dict_type(two, *full_config()):
            found = two.state_dict(), FullyShardedDataParallel.optim_state_dict(two, other_optimizer)
        cases.assert_same(*found, plain, plain_optimizer)
        columns = to_sharded_tensor(to_full(optimizer_state), dim=-1)
        for refused in (columns, to_torch(columns)):
            with pytest.raises(ShardingError, match="the rows that FSDP gives it") as error:
                cases.load_sharded(two, other_optimizer, state, refused)
            assert re.match(r"state 'exp_avg.* of .*, a ShardedTensor of shape", str(error.value.where))


def test_optimizer_states_of_sharded_tensors():
    run_ranks(2, optimizers_of_sharded_tensors)


def made_for(library, shape, names, seed, hidden):
    """A model and its optimizer under FSDP; library "torch" is torch's classes and torch's own extension."""
    from contextlib import nullcontext

    from torchshard import init_device_mesh
    from torchshard.parallel.fsdp import install

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with install() if library == "ours" else nullcontext():
        model = cases.wrapped(cases.parallel(mesh, library, seed, hidden), mesh)
    return model, cases.adamw(model), cases.place(mesh)


def save(rank, world, folder, library, shape, names, hidden):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer, where = made_for(library, shape, names, 0, hidden)
    cases.train(model, optimizer, **where)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(rank, world, folder, library, shape, names, hidden):
    """Loaded into a model with other values; the optimizer goes on as it would have."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    plain, plain_optimizer = cases.trained(cases.plain(hidden=hidden))
    model, optimizer, where = made_for(library, shape, names, 1, hidden)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    if library == "torch" and "tp" in names:  # torch's extension loads wrong optimizer states there
        cases.assert_same(get_state_dict(model, optimizer)[0], {"state": {}}, plain, None)
        return
    cases.assert_same(*get_state_dict(model, optimizer), plain, plain_optimizer)
    cases.train(model, optimizer, **where)
    cases.train(plain, plain_optimizer)
    cases.assert_same(get_state_dict(model, optimizer)[0], {"state": {}}, plain, None, rtol=1e-4, atol=1e-5)


def several(rank, world, steps):
    """Some savings and loadings, one after another."""
    for how, *arguments in steps:
        how(rank, world, *arguments)


FSDP_TP = ((2, 2), ("dp", "tp"))
EVEN, UNEVEN = (10, 6), (10, 7)
CHAINS = {
    "pure FSDP on 3 ranks": [("ours", *FSDP_TP, UNEVEN), ("torch", (3,), ("dp",), UNEVEN), ("ours", *FSDP_TP, UNEVEN)],
    "torch's extension": [("ours", *FSDP_TP, EVEN), ("torch", *FSDP_TP, EVEN), ("ours", *FSDP_TP, EVEN)],
    "pure FSDP on 4 and 1 ranks": [
        ("ours", *FSDP_TP, UNEVEN), ("torch", (4,), ("dp",), UNEVEN), ("torch", (1,), ("dp",), UNEVEN),
        ("ours", *FSDP_TP, UNEVEN),
    ],
    "another mesh": [
        ("ours", *FSDP_TP, UNEVEN), ("ours", (1, 2, 1), ("rep", "dp", "tp"), UNEVEN), ("ours", (2, 2), ("tp", "dp"), UNEVEN),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "chain", [pytest.param(name, marks=[pytest.mark.full] if at > 1 else []) for at, name in enumerate(CHAINS)]
)
def test_checkpoints_are_loaded_elsewhere(tmp_path, chain):
    steps = []
    for at, pair in enumerate(itertools.pairwise(CHAINS[chain])):
        for how, setup in zip((save, load), pair, strict=True):
            steps.append((how, str(tmp_path / str(at)), *setup))
    for world, together in itertools.groupby(steps, lambda step: torch.Size(step[3]).numel()):
        run_ranks(world, several, list(together))
