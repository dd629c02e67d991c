"""State dicts of parallel modules: out, in, through checkpoints, and with parameters that are plain outside of forward."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel import fsdp_cases as cases
from tests.parallel.llama import Config, Llama, loss, plan
from tests.ranks import run_ranks


def models(world, kind="tp", tied=False):
    """A plain Llama, and the same one parallel."""
    from torchshard import init_device_mesh
    from torchshard.parallel import parallelize_module

    torch.manual_seed(0)
    plain, model = Llama(Config(tied=tied)), Llama(Config(tied=tied))
    model.load_state_dict(plain.state_dict())
    return plain, parallelize_module(model, init_device_mesh("cpu", (world,)), plan(kind))


def same(state, plain):
    assert list(state) == list(plain)
    for name, value in state.items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(full, plain[name]), name


def loads_whole(model, want, state):
    """Plain tensors of the whole are refused; what the error says works."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from torchshard.parallel.fsdp import torch_parameters
    from torchshard.state_dict import to_dtensor

    def zeroed():
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()

    whole = StateDictOptions(full_state_dict=True)
    for load in (model.load_state_dict, lambda sd: set_model_state_dict(model, sd, options=whole)):
        zeroed()
        with pytest.raises(RuntimeError, match=r"to_dtensor\(sd, mesh, placements\)"):
            load(dict(want))
    mesh = next(model.parameters()).device_mesh
    model.load_state_dict(to_dtensor(want, mesh, lambda key, _: getattr(state[key], "placements", None)))
    same(model.state_dict(), want)
    torch_parameters(model)
    zeroed()
    set_model_state_dict(model, dict(want), options=whole)
    same(model.state_dict(), want)


def in_and_out(rank, world, folder, local):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    from torchshard import DTensor
    from torchshard.parallel import local_parameters

    plain, model = models(world, tied=local)
    if local:
        local_parameters(model)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    want = plain.state_dict()
    state = model.state_dict()
    assert isinstance(state["output.weight"], DTensor)
    same(state, want)
    same(get_model_state_dict(model), want)

    other = {name: torch.zeros_like(t) for name, t in want.items()}
    saved = copy.deepcopy(state)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    same(model.state_dict(), other)
    model.load_state_dict(saved)
    same(model.state_dict(), want)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    set_model_state_dict(model, saved)
    same(model.state_dict(), want)

    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    same(model.state_dict(), want)
    dcp.load({"model": other}, checkpoint_id=folder)
    same(other, want)
    if not local:
        loads_whole(model, want, state["model"])
    if local:  # also plain ones, of the whole
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(want)
        same(model.state_dict(), want)


@pytest.mark.parametrize("local", [False, True])
def test_state_dicts_load_back(local, tmp_path):
    run_ranks(2, in_and_out, str(tmp_path / "saved"), local)


def lent(rank, world):
    from torchshard import DTensor, distribute_module, init_device_mesh
    from torchshard.parallel import ColwiseParallel, local_parameters, parallelize_module, placed_parameters

    plain, model = models(world, "sp")
    assert local_parameters(model) is model
    tokens = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).full_tensor(), plain(tokens))

    class Recomputed(nn.Module):  # runs modules of the model once more, outside of its forward
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *inputs):
            return checkpoint(self.inner, *inputs, use_reentrant=False)

    model.layers[0] = Recomputed(model.layers[0])
    loss(plain(tokens), tokens).backward()
    from torchshard.parallel import loss_parallel

    with loss_parallel():
        loss(model(tokens), tokens).backward()
    for p, q in zip(placed_parameters(model), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    with pytest.raises(IndexError):
        model(torch.full((2, 8), 99))
    assert not any(isinstance(p, DTensor) for p in vars(model.output).values())  # nothing is left behind

    mesh = init_device_mesh("cpu", (world,))
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    local_parameters(parallelize_module(frozen, mesh, ColwiseParallel()))
    assert not frozen.weight.requires_grad
    assert frozen.bias.requires_grad
    assert frozen.weight.shape == (4 // world, 4)
    with pytest.raises(NotImplementedError, match="buffer that is a DTensor"):
        local_parameters(distribute_module(nn.BatchNorm1d(3), mesh))


def test_parameters_are_lent_to_forward():
    run_ranks(2, lent)


class ReadsBelow(nn.Module):
    """Reads parameters of a module below that it does not call, as nn.MultiheadAttention does those of its out_proj."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width))
        self.calls = nn.Linear(width, width)

    def forward(self, x):
        return self.calls(nn.functional.linear(x, self.inner[0].weight, self.inner[0].bias).relu())


class Blocks(nn.Sequential):
    reentrant = None

    def forward(self, x):
        for block in self:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def lent_again(rank, world):
    """Run again in backward, out of the module that was treated, a block has the parameters of modules below it."""
    from torchshard import Replicate, distribute_tensor, init_device_mesh
    from torchshard.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        fsdp,
        local_parameters,
        parallelize_module,
        placed_parameters,
    )

    torch.manual_seed(0)
    mesh, plain, x = init_device_mesh("cpu", (world,)), Blocks(ReadsBelow(6), ReadsBelow(6)), torch.randn(3, 6)
    plain(x).square().sum().backward()
    styles = {"*.inner.0": ColwiseParallel(), "*.calls": RowwiseParallel(use_local_output=False)}
    for lend, reentrant in itertools.product((local_parameters, fsdp.torch_parameters), (False, True)):
        model = Blocks(*(ReadsBelow(6) for _ in plain))
        model.load_state_dict(plain.state_dict())
        model.reentrant = reentrant
        lend(parallelize_module(model, mesh, styles))
        given = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
        model(given).square().sum().backward()
        for p, q in zip(placed_parameters(model), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_parameters_are_lent_to_blocks_that_are_run_again():
    run_ranks(2, lent_again)


def optimizer_states(rank, world, folder):
    """States that were saved on a (2, 2) mesh, of plain parts, are those of one process; on a (1, 4) mesh too."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from torchshard import DistributedDataParallel, init_device_mesh
    from torchshard.parallel import placed_states

    def made(shape, seed):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = DistributedDataParallel(cases.parallel(mesh, seed=seed, hidden=(8, 12)), device_mesh=mesh["dp"])
        return model, placed_states(model.module, cases.adamw(model)), cases.place(mesh)

    plain, want = cases.trained(cases.plain(hidden=(8, 12)))
    model, optimizer, where = made((2, 2), 0)
    cases.train(model, optimizer, **where)
    state, states = get_state_dict(model, optimizer)
    cases.assert_same(state, states, plain, want, rtol=1e-4, atol=1e-5)
    dcp.save({"model": state, "optimizer": states}, checkpoint_id=folder)
    for shape in ((2, 2), (1, 4)):
        model, optimizer, where = made(shape, 1)
        state, states = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=states)
        plain, want = cases.trained(cases.plain(hidden=(8, 12)))
        cases.train(plain, want, steps=2)
        cases.train(model, optimizer, steps=2, **where)
        cases.assert_same(*get_state_dict(model, optimizer), plain, want, rtol=1e-4, atol=1e-5)


def test_states_of_optimizers_of_plain_parts(tmp_path):
    run_ranks(4, optimizer_states, str(tmp_path / "saved"))


class Counting(nn.Module):
    """A linear layer, and buffers of which one is split and one is left out of state dicts."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(cases.WIDTH, cases.WIDTH)
        self.norm = nn.BatchNorm1d(cases.WIDTH)
        self.register_buffer("shift", torch.randn(cases.WIDTH))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x):
        return self.norm(self.inner(x)) * self.scale + self.shift


def buffers(rank, world, folder):
    """Buffers of distribute_module, in every way of torch's functions for state dicts."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as dsd
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    from torchshard import Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
    from torchshard.parallel.fsdp import fully_shard, install, torch_parameters

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(6, cases.WIDTH, generator=torch.Generator().manual_seed(1))

    def cut(_name, module, mesh):
        for key, buffer in module.named_buffers(recurse=False):
            if key == "shift":
                module.register_buffer(key, distribute_tensor(buffer, mesh, [Shard(0)]))

    def made(seed, how):
        model = distribute_module(Counting(seed), mesh["tp"], cut)
        if how == "fully_shard":
            return fully_shard(model, mesh=mesh["dp"])
        if how == "FSDP1":
            with install():
                return FullyShardedDataParallel(model, device_mesh=mesh["dp"], device_id=torch.device("cpu"))
        return torch_parameters(torch_parameters(model))

    for how in ("fully_shard", "torch_parameters", "FSDP1"):
        plain, model = Counting(0), made(0, how)
        plain(x)
        model(distribute_tensor(x, mesh["tp"], [Replicate()]))
        want = plain.state_dict()
        state = dsd.get_model_state_dict(model)
        assert {type(value) for value in state.values()} == {DTensor}
        assert state["shift"].to_local().data_ptr() == model.shift.to_local().data_ptr()
        full = dsd.get_model_state_dict(model, options=dsd.StateDictOptions(full_state_dict=True))
        assert {type(value) for value in full.values()} == {torch.Tensor}
        torch.testing.assert_close(full, dict(want))

        whole = dsd.StateDictOptions(full_state_dict=True)
        first = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dcp.save(state, checkpoint_id=f"{folder}/{how}")
        for given, options in ((state, None), (dict(full), whole), (dict(full) if rank == 0 else {}, first)):
            other = made(1, how)
            dsd.set_model_state_dict(other, given, options=options)
            same(dsd.get_model_state_dict(other), full)
        other = made(1, how)
        into = dsd.get_model_state_dict(other)
        dcp.load(into, checkpoint_id=f"{folder}/{how}")
        dsd.set_model_state_dict(other, into)
        same(dsd.get_model_state_dict(other), full)

    with torch.device("meta"):
        other = distribute_module(Counting(1), mesh["tp"], cut)
    torch_parameters(other).load_state_dict(state, assign=True)
    assert other.shift.placements == (Shard(0),)
    torch.testing.assert_close(other.shift.full_tensor(), want["shift"])


def test_buffers_are_torchs_in_state_dicts(tmp_path):
    run_ranks(4, buffers, str(tmp_path))


class Asking(nn.Module):
    """Modules within another that lends what it has, all but one parameter, so that those within lend, too."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.tail = nn.Linear(4, 4)

    def forward(self, x):
        return self.tail(self.inner(x))


def failing(rank, world):
    from torchshard import Replicate, distribute_module, distribute_tensor, init_device_mesh
    from torchshard.tensor.owners import replace_parameters
    from torchshard.tensor.parts import _LocalOwner

    class Failing(_LocalOwner):
        def inside(self, name, parameter):
            if parameter is module.inner[0].bias:
                if asked:  # for the second time, by the modules within
                    raise RuntimeError("not now")
                asked.append(name)
                return None
            return None if parameter is module.spare else super().inside(name, parameter)

    asked, mesh = [], init_device_mesh("cpu", (world,))
    module = distribute_module(Asking(), mesh)
    replace_parameters([module], Failing)
    x = distribute_tensor(torch.ones(2, 4), mesh, [Replicate()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="not now"):
            module(x)
    assert not any({"weight", "bias"} & vars(each).keys() for each in module.modules())


def refusing(rank, world):
    from torchshard import init_device_mesh
    from torchshard.parallel import ColwiseParallel, local_parameters, parallelize_module

    def refuse(module, inputs):
        raise RuntimeError("not now")

    mesh = init_device_mesh("cpu", (world,))
    module = local_parameters(parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()))
    hook = module.register_forward_pre_hook(refuse, prepend=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="not now"):
            module(torch.ones(2, 4))
        hook.remove()
        module(torch.ones(2, 4)).sum().backward()


def test_a_hook_before_that_raises_leaves_nothing_to_take_back():
    run_ranks(1, refusing)


def test_where_a_parameter_cannot_be_lent_all_are_taken_back():
    run_ranks(1, failing)


def inferring(rank, world, folder):
    import torch.distributed.checkpoint as dcp

    from torchshard import init_device_mesh, state_dict
    from torchshard.parallel import ColwiseParallel, local_parameters, parallelize_module, placed_parameters
    from torchshard.parallel.fsdp import load, torch_parameters

    mesh, x = init_device_mesh("cpu", (1,)), torch.ones(2, 4)
    for treat in (local_parameters, torch_parameters):
        plain = nn.Linear(4, 4)
        before = parallelize_module(copy.deepcopy(plain), mesh, ColwiseParallel())
        trained = treat(parallelize_module(copy.deepcopy(plain), mesh, ColwiseParallel()))
        with torch.inference_mode():
            treat(before)
            torch.testing.assert_close(before(x), plain(x))
            assert torch.equal(placed_parameters(trained)[0].full_tensor(), plain.weight)
        if treat is torch_parameters:
            states = dict(trained.named_parameters())
            dcp.save(states, checkpoint_id=folder)
            with torch.inference_mode():
                assert torch.equal(state_dict.from_torch(states)["weight"].full_tensor(), plain.weight)
                turned = state_dict.KeyRules([state_dict.transpose("weight")])(states)
                assert torch.equal(turned["weight"].full_tensor(), plain.weight.t())
                load(states, checkpoint_id=folder)


def test_parameters_are_replaced_and_read_in_inference_mode(tmp_path):
    """What lies outside as torch's DTensor is a normal tensor, of which torch's class makes no view there."""
    run_ranks(1, inferring, str(tmp_path))
