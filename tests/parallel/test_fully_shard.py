"""FSDP2 on tensor-parallel modules, and every option of torch's functions for state dicts."""

import contextlib
import importlib
import re
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from tests.older import require
from tests.parallel import fsdp_cases as cases
from tests.ranks import run_ranks


def fully(model, mesh, **options):
    from torchshard.parallel.fsdp import fully_shard

    for block in model:
        fully_shard(block, mesh=mesh[cases.fsdp_axes(mesh)], **options)
    return fully_shard(model, mesh=mesh[cases.fsdp_axes(mesh)], **options)


def made(mesh, seed, hidden=(8, 12)):
    model = fully(cases.parallel(mesh, seed=seed, hidden=hidden), mesh)
    return model, cases.adamw(model)


class Renamed(nn.Module):
    """A module whose keys leave out the name of the one inside, and that says so by methods."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(cases.WIDTH, 8)
        self.register_state_dict_post_hook(partial(self._shorten))
        self.register_load_state_dict_pre_hook(self._lengthen)

    def _shorten(self, _module, state, prefix, _):
        for name in ("weight", "bias"):
            state[prefix + name] = state.pop(f"{prefix}inner.{name}")

    def _lengthen(self, _module, state, prefix, *_):
        for name in ("weight", "bias"):
            if prefix + name in state:
                state[f"{prefix}inner.{name}"] = state.pop(prefix + name)

    def renaming(self):
        return {"weight": "inner", "bias": "inner"}

    _fqn_modifiers = renaming  # torch asks by this name where it takes no option

    def forward(self, x):
        return self.inner(x)


def renamed(mesh, seed):
    from torchshard.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model = nn.Sequential(Renamed())
    parallelize_module(model, mesh["tp"], {"0.inner": ColwiseParallel()})
    return fully(model, mesh)


def training_and_options(rank, world, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as dsd
    from torch.distributed.tensor import DTensor

    from torchshard import init_device_mesh
    from torchshard.tensor.interop import from_torch

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, plain_optimizer = cases.trained(cases.plain(hidden=(8, 12)))
    where = cases.place(mesh)
    model, optimizer = cases.trained(*made(mesh, 0), **where)
    options = dsd.StateDictOptions

    state, optimizer_state = dsd.get_state_dict(model, optimizer)
    assert all(type(x) is DTensor for x in state.values())
    cases.assert_same(state, optimizer_state, plain, plain_optimizer)
    cases.assert_same({name: from_torch(x) for name, x in state.items()}, {"state": {}}, plain, None)

    def loads(state, optimizer_state, **fields):
        other, other_optimizer = cases.trained(*made(mesh, 1), **where)
        dsd.set_model_state_dict(other, state, options=options(**fields))
        dsd.set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=options(**fields))
        cases.assert_same(*dsd.get_state_dict(other, other_optimizer), plain, plain_optimizer)
        return other, other_optimizer

    loads(state, optimizer_state)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    other, other_optimizer = made(mesh, 1)
    into = dict(zip(("model", "optimizer"), dsd.get_state_dict(other, other_optimizer), strict=True))
    dcp.load(into, checkpoint_id=folder)
    loads(into["model"], into["optimizer"])

    full = dsd.get_state_dict(model, optimizer, options=options(full_state_dict=True))
    assert not any(isinstance(x, DTensor) for x in full[0].values())
    cases.assert_same(*full, plain, plain_optimizer)
    loads(*full, full_state_dict=True)
    on_cpu = dsd.get_state_dict(model, optimizer, options=options(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        cases.assert_same(*on_cpu, plain, plain_optimizer)
    else:
        assert on_cpu == ({}, {})
    loads(*on_cpu, full_state_dict=True, broadcast_from_rank0=True)
    offloaded = dsd.get_state_dict(model, optimizer, options=options(cpu_offload=True))
    cases.assert_same(*offloaded, plain, plain_optimizer)

    flat = dsd.get_optimizer_state_dict(model, optimizer, options=options(flatten_optimizer_state_dict=True))
    torch.testing.assert_close(
        flat["state.0.up.weight.exp_avg"].full_tensor(), cases.by_name(plain, plain_optimizer)["0.up.weight"]["exp_avg"]
    )
    other, other_optimizer = loads(state, flat, flatten_optimizer_state_dict=True)

    del state["0.up.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        dsd.set_model_state_dict(other, dict(state))
    found = dsd.set_model_state_dict(other, dict(state), options=options(strict=False))
    assert found.missing_keys == ["0.up.weight"]

    other[0].up.weight.requires_grad_(False)
    kept = dsd.get_model_state_dict(other, options=options(ignore_frozen_params=True))
    assert set(plain.state_dict()) - set(kept) == {"0.up.weight"}
    for keep, names in ((True, {"0.up.weight", "0.up.bias"}), (False, {"weight", "bias"})):
        part = dsd.get_model_state_dict(model, submodules={model[0].up}, options=options(keep_submodule_prefixes=keep))
        assert set(part) == names

    source, target = renamed(mesh, 0), renamed(mesh, 1)
    state = dsd.get_model_state_dict(source)
    assert set(state) == {"0.weight", "0.bias"}
    dsd.set_model_state_dict(target, state, options=options(dsd_fqn_modifiers="renaming"))
    torch.testing.assert_close(cases.full(target[0].inner.weight), cases.full(source[0].inner.weight))

    cases.train(model, optimizer, **where)
    cases.train(plain, plain_optimizer)
    cases.assert_same(*dsd.get_state_dict(model, optimizer), plain, plain_optimizer, rtol=1e-4, atol=1e-5)


def test_training_and_every_option_of_state_dicts(tmp_path):
    run_ranks(4, training_and_options, str(tmp_path))


class Tied(nn.Module):
    """Its head reads the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.block = nn.Embedding(12, cases.WIDTH), cases.MLP(7)
        self.head = nn.Linear(cases.WIDTH, 12, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.block(self.tokens(x)))


def tied_uneven_hybrid(rank, world):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from torchshard import Replicate, init_device_mesh
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torchshard.parallel.fsdp import fully_shard, torch_parameters

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("rep", "dp", "tp"))
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()), "block.up": ColwiseParallel(),
        "block.down": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate()),
    }  # fmt: skip
    tokens = torch.randint(0, 12, (4, 3), generator=torch.Generator().manual_seed(0))

    def steps(model, optimizer, at=0, of=1):
        for _ in range(5):
            model(tokens.chunk(of)[at]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: cases.full(x.detach()) for name, x in model.state_dict().items()}

    torch.manual_seed(0)
    plain = Tied()
    want = steps(plain, cases.adamw(plain))
    for how in ("blocks first", "in a list", "converted first", "not FSDP"):
        torch.manual_seed(0)
        model = parallelize_module(Tied(), mesh["tp"], plan)
        if how == "converted first":
            torch_parameters(model)
        if how != "not FSDP":
            fully_shard(model.block, mesh=mesh["rep", "dp"])
            if how == "in a list":
                fully_shard([model.tokens, model.head], mesh=mesh["rep", "dp"])
            fully_shard(model, mesh=mesh["rep", "dp"])
        else:
            torch_parameters(model)
        assert model.head.weight is model.tokens.weight
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-2, foreach=how != "not FSDP"
        )  # plain ones are left there
        found = steps(model, optimizer, **({} if how == "not FSDP" else cases.place(mesh)))
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert all(type(full[name]) is torch.Tensor and torch.equal(full[name], found[name]) for name in want), how
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, msg=lambda m, at=(how, name): f"{at}: {m}")


def test_tied_weights_uneven_lengths_and_hybrid_sharding():
    run_ranks(4, tied_uneven_hybrid)


def tied_apart(rank, world):
    from torchshard import Replicate, init_device_mesh
    from torchshard.errors import ShardingError
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, local_parameters, parallelize_module
    from torchshard.parallel.fsdp import fully_shard, torch_parameters

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    plan = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
    for give in (partial(fully_shard, mesh=mesh["dp"]), torch_parameters, local_parameters):
        model = parallelize_module(Tied(), mesh["tp"], plan)
        give(model.tokens)
        with pytest.raises(ShardingError) as refused:
            give(model.head)
    return str(refused.value)


def test_tied_weights_that_would_go_apart_are_refused():
    assert_expected_inline(
        run_ranks(2, tied_apart)[0],
        """\
A parameter is shared with a module where another has taken its place, from which it would go apart.
  expected: modules that share parameters, in one call
  got:      one of them, after another
  where:    weight of Linear
  fix:      one call for both: for a module that holds them, or fully_shard([module, other]); where they are to be two, give one module nn.Parameter(parameter.detach().clone())""",
    )


def unsayable(rank, world):
    from torchshard import Shard, init_device_mesh
    from torchshard.errors import ShardingError
    from torchshard.parallel.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ShardingError) as caught:
        fully(cases.parallel(mesh, hidden=(7,)), mesh)
    theirs, where = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common"), []
    for dim in (0, 1):  # on a mesh of the parameter's own
        said = theirs.ShardPlacementResult(Shard(dim), theirs.FSDPMeshInfo(mesh["dp"], shard_mesh_dim=0))
        with pytest.raises(ShardingError) as of_its_own:
            fully_shard(
                cases.parallel(mesh, hidden=(7,)),
                mesh=mesh["dp"],
                shard_placement_fn=lambda p, said=said: said if p.ndim == 2 else None,
            )
        where.append(re.search(r"where: +([^,]+)", str(of_its_own.value))[1])
    return str(caught.value), where


def test_lengths_that_torch_could_not_save_are_refused():
    require("meshes of FSDP among others")
    (message, where), *others = run_ranks(6, unsayable)
    assert others == [(message, where)] * 5
    assert where == ["0.up.weight", "0.up.bias"]  # the weight's second dim is not cut by others
    assert_expected_inline(
        message,
        """\
FSDP would cut a parameter in pieces that torch cannot save, having no placements for them.
  expected: a length that 3 x 2 ranks divide
  got:      length 7 of dim 0
  where:    up.weight, float32[7, 8] (tp=2:S(0)), then axis dp of FSDP's mesh (3,)
  fix:      another length, or shard_placement_fn= that gives FSDP another dim, which its ranks divide""",
    )


def by_torch_alone(rank, world):
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard

    from torchshard import init_device_mesh
    from torchshard.errors import UnsupportedOperatorError

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    messages = []
    for function in (fully_shard, replicate):
        model = cases.parallel(mesh["tp"])
        function(model, mesh=mesh["dp"])
        with pytest.raises(UnsupportedOperatorError) as caught:
            model(torch.randn(4, cases.WIDTH))
        messages.append(str(caught.value))
    return messages


def test_torchs_own_functions_on_these_modules_name_the_one_to_call():
    for message in run_ranks(2, by_torch_alone)[0]:
        assert "for a module torchshard.parallel.fsdp.fully_shard in place of torch's" in message


def empty_parts(rank, world):
    from torchshard import init_device_mesh
    from torchshard.errors import ShardingError

    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ShardingError, match="Some ranks hold nothing of a parameter"):
        fully(cases.parallel(mesh, hidden=(5,)), mesh)


def test_parameters_of_which_a_rank_holds_nothing_are_refused():
    run_ranks(4, empty_parts)


def chosen_parameters(rank, world):
    """Options that name parameters mean those of the module as it was, in all calls."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    from torchshard import Shard, distribute_module, init_device_mesh
    from torchshard.errors import UnsupportedOperatorError
    from torchshard.parallel.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for library, shard in (("ours", fully_shard), ("torch", torch_fully_shard)):
        model = cases.parallel(mesh, library, hidden=(8, 12))
        options = {
            "ignored_params": {model[0].up.weight, model[1].down.bias},
            "shard_placement_fn": {model[0].down.weight: Shard(0), model[1].up.weight: Shard(1)}.get,
        }
        for module in (*model, model):
            shard(module, mesh=mesh["dp"], **options)
        found.append({name: getattr(p, "placements", None) for name, p in model.named_parameters()})
        assert shard.state(model) is model._get_fsdp_state()
        assert shard.state(model[0].up) is None
    assert found[0] == found[1]

    theirs = torch_fully_shard(cases.parallel(mesh), mesh=mesh["dp"])
    with pytest.raises(UnsupportedOperatorError, match=r"fix: .* torchshard\.parallel\.fsdp\.fully_shard in place of"):
        theirs(torch.ones(4, cases.WIDTH))
    with pytest.raises(
        UnsupportedOperatorError,
        match=r"DistributedDataParallel\(module, device_mesh=\.\.\.\) in place.*torch_parameters\(module\)",
    ):
        nn.parallel.DistributedDataParallel(distribute_module(nn.Linear(4, 4), mesh["tp"]), device_mesh=mesh["dp"])


def test_options_that_name_parameters():
    run_ranks(4, chosen_parameters)


def chosen_dtypes(rank, world):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from torchshard import init_device_mesh
    from torchshard.parallel.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, seen = cases.parallel(mesh), []
    chosen = {model[0].up.weight: torch.float32}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, param_dtype_override_fn=chosen.get)
    for module in (*model, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    for block in model:
        block.register_forward_pre_hook(lambda block, _: seen.append((block.up.weight.dtype, block.down.weight.dtype)))
    with contextlib.suppress(RuntimeError):  # dtypes that do not go together
        model(torch.ones(4, cases.WIDTH))
    assert seen[0] == (torch.float32, torch.bfloat16)


def test_a_policy_that_names_parameters():
    require("dtypes of single parameters")
    run_ranks(4, chosen_dtypes)


def compiled(rank, world):
    from torch._dynamo.testing import CompileCounterWithBackend

    from torchshard import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, _ = cases.trained(cases.plain(hidden=(12, 8)), steps=2)
    model, counting = cases.parallel(mesh, hidden=(12, 8)), CompileCounterWithBackend("aot_eager")
    model[1].compile(backend=counting, fullgraph=True)
    fully(model, mesh)
    cases.trained(model, cases.adamw(model), steps=2, **cases.place(mesh))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(cases.full(p.detach()), q.detach())
    return counting.frame_count


def test_a_compiled_block():
    require("meshes in graphs")
    assert run_ranks(4, compiled, timeout=250) == [1] * 4


def evaluated(rank, world, compiled):
    from torchshard import init_device_mesh
    from torchshard.parallel.fsdp import torch_parameters

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    plain, batch = cases.plain(), torch.randn(12, cases.WIDTH, generator=torch.Generator().manual_seed(1))
    want = plain(batch)
    want.square().mean().backward()

    for treat in (partial(fully, mesh=mesh), torch_parameters):
        for train_first in (True, False):
            model = cases.parallel(mesh)
            if compiled:
                model[1].compile(backend="aot_eager", fullgraph=True)
            treat(model)
            if train_first:
                model(batch).square().mean().backward()
            for _ in range(2):
                with torch.inference_mode():
                    torch.testing.assert_close(model(batch), want.detach())
            if train_first:
                model.zero_grad()
                model(batch).square().mean().backward()
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(cases.full(p.grad), q.grad)


@pytest.mark.parametrize("compiled", [False, True])
def test_modules_that_are_trained_are_evaluated_in_inference_mode(compiled):
    if compiled:
        require("meshes in graphs")
    run_ranks(2, evaluated, compiled, timeout=250)


def clipped(rank, world):
    from torchshard import DTensor, init_device_mesh
    from torchshard.parallel import placed_parameters
    from torchshard.parallel.fsdp import torch_parameters

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hidden = (12, 8)
    batch = torch.randn(12, cases.WIDTH, generator=torch.Generator().manual_seed(1))

    for model, part in (
        (made(mesh, 0, hidden)[0], batch.chunk(2)[mesh["dp"].get_local_rank()]),
        (torch_parameters(cases.parallel(mesh, hidden=hidden)), batch),
        (cases.parallel(mesh, hidden=hidden), batch),
    ):
        plain = cases.plain(hidden=hidden)
        plain(batch).square().mean().backward()
        model(part).square().mean().backward()
        placed = placed_parameters(model)
        assert all(isinstance(p, DTensor) for p in placed)  # norms as well, which the plan leaves out
        for limit, norm_type in ((0.1, 2.0), (0.001, float("inf"))):
            want = nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
            got = nn.utils.clip_grad_norm_(placed, limit, norm_type)
            torch.testing.assert_close(cases.full(got), want)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(cases.full(p.grad), q.grad)


def test_gradients_are_clipped_by_the_norm_of_all_meshes():
    run_ranks(4, clipped)
