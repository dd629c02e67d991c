"""parallelize_module: patterns, warnings, shared parameters, sources, errors."""

import copy
import gc
import warnings
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_in_backward
from torch.distributed.tensor import parallel as theirs

from tests.ranks import fake_ranks, run_ranks
from torchshard import DeviceMesh, DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from torchshard.errors import ShardingError
from torchshard.parallel import (
    ColwiseParallel,
    HeadwiseParallel,
    ParallelStyle,
    ParameterwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    context_parallel,
    local_parameters,
    parallelize_module,
    placed_parameters,
)
from torchshard.parallel.fsdp import torch_parameters


@pytest.fixture
def mesh():
    with fake_ranks(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


@pytest.fixture
def mesh_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Note(ParallelStyle):
    """A style of a user: notes where it was applied."""

    def __init__(self):
        self.seen = []

    def _apply(self, module, device_mesh):
        self.seen.append((module.name, self.src_data_rank))
        return module


def tree():
    """Two layers with a mlp of w1 and w2 each, and a head; each module knows its name."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.ModuleDict({"w1": nn.Linear(4, 8), "w2": nn.Linear(8, 4)})
            self.norm = nn.LayerNorm(4)

    root = nn.Module()
    root.layers, root.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(4, 4)
    for name, module in root.named_modules():
        module.name = name
    return root


def test_patterns_match_level_by_level(mesh):
    style = Note()
    parallelize_module(tree(), mesh, {"layers.*.mlp.w[12]": style, "h?ad": style, "layers.1": style, "": style})
    assert [name for name, _ in style.seen] == [
        "layers.0.mlp.w1", "layers.0.mlp.w2", "layers.1.mlp.w1", "layers.1.mlp.w2", "head", "layers.1", "",
    ]  # fmt: skip
    style = Note()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(tree(), mesh, {"*.mlp": style, "layers.*.w1": style, "layers.0.norm": style})
    assert [str(w.message) for w in caught] == [
        "parallelize_module: the plan's key '*.mlp' matches no submodule of Module; skipped",
        "parallelize_module: the plan's key 'layers.*.w1' matches no submodule of Module; skipped",
    ]
    assert style.seen == [("layers.0.norm", 0)]


def test_modules_that_are_compiled_go_by_the_names_they_had(mesh):
    root, style = tree(), Note()
    root.layers[1] = torch.compile(root.layers[1])
    compiled = torch.compile(root)
    assert parallelize_module(compiled, mesh, {"layers.*.norm": style, "layers.1": style, "": style}) is compiled
    parallelize_module(compiled, mesh, {"_orig_mod.layers.1._orig_mod.mlp.w1": style})
    assert [name for name, _ in style.seen] == ["layers.0.norm", "layers.1.norm", "layers.1", "", "layers.1.mlp.w1"]


def test_the_source_of_data_reaches_the_styles(mesh):
    for source in (0, 2, None):
        style = Note()
        parallelize_module(tree(), mesh, {"": style, "head": style}, src_data_rank=source)
        assert style.seen == [("", source), ("head", source)]


def test_what_is_no_plan(mesh):
    module = tree()
    with pytest.warns(UserWarning, match="there is no plan"):
        assert parallelize_module(module, mesh) is module
    with pytest.raises(TypeError, match=r"not a builtins\.list"):
        parallelize_module(module, mesh, [])
    with pytest.raises(TypeError, match=r"torch\.distributed\.tensor\.parallel\.style\.ColwiseParallel"):
        parallelize_module(module, mesh, {"head": theirs.ColwiseParallel()})
    with pytest.raises(TypeError, match=r"parallelize_plan\[''\]\['head'\] .* make one of it: ColwiseParallel\(\)"):
        parallelize_module(module, mesh, {"head": ColwiseParallel(), "": {"head": ColwiseParallel}})
    assert not isinstance(module.head.weight, DTensor)  # nothing was done before all was looked at
    with pytest.raises(NotImplementedError, match=r"and this is a torch\.nn\.[a-z.]+\.LayerNorm; say Param") as error:
        parallelize_module(module, mesh, {"layers.?.norm": RowwiseParallel()})
    assert error.value.__notes__ == ["  where:    parallelize_plan['layers.?.norm'], at layers.0.norm"]
    with pytest.raises(NotImplementedError, match=r"name its submodules in the plan \(.*norm.*\), or write a P"):
        parallelize_module(module, mesh, {"layers.0": ColwiseParallel()})
    parallelize_module(module, mesh, {"head": ColwiseParallel()})
    with pytest.raises(RuntimeError, match="already been called"):
        parallelize_module(module, mesh, {"head": ColwiseParallel()})
    with pytest.raises(ShardingError, match=r"A mesh is needed"):
        parallelize_module(module, {"head": ColwiseParallel()})
    with pytest.raises(RuntimeError, match=r"No mesh is given, and there is no surrounding .*; give device_mesh="):
        parallelize_module(module, parallelize_plan={"head": ColwiseParallel()})
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    styles = ColwiseParallel(), SequenceParallel(), ParameterwiseParallel({}), PrepareModuleInput(), HeadwiseParallel()
    for style in (*styles, PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Shard(0))):
        head = nn.MultiheadAttention(4, 4) if isinstance(style, HeadwiseParallel) else nn.Linear(4, 4)
        with pytest.raises(ShardingError, match=r'mesh\["tp"\]'):
            parallelize_module(head, grid, style)
    parallelize_module(tree(), grid["tp"], {"head": ColwiseParallel()})
    with pytest.raises(NotImplementedError, match="context_parallel is not supported yet"):
        context_parallel(mesh)


class ExpertsAndColumns(ParallelStyle):
    """A style of a user that takes two axes: experts are cut along one, columns along the other."""

    def _apply(self, module, device_mesh):
        def partition(_, module, mesh):
            module.w = nn.Parameter(distribute_tensor(module.w, mesh, [Shard(0), Shard(2)]))

        def halves(module, inputs, mesh):
            return tuple([DTensor.from_local(x, mesh, (Replicate(), Replicate())) for x in inputs])

        return distribute_module(module, device_mesh, partition, halves, lambda module, y, mesh: y.full_tensor())


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(32.0).view(4, 2, 4))

    def forward(self, x):
        return x @ self.w


def _experts_and_columns(rank, world):
    model = nn.ModuleDict({"experts": Experts()})
    parallelize_module(model, init_device_mesh("cpu", (2, 2)), {"experts": ExpertsAndColumns()})
    w, x = model["experts"].w, torch.ones(3, 2)
    y = model["experts"](x)
    y.square().sum().backward()
    own = Experts()
    expected = own(x)
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(w.grad.full_tensor(), own.w.grad)
    return w.to_local().shape


def test_a_style_of_a_user_may_take_several_axes():
    assert run_ranks(4, _experts_and_columns) == [(2, 2, 2)] * 4


def test_the_surrounding_mesh_is_taken(mesh):
    module = tree()
    with mesh:
        parallelize_module(module, parallelize_plan={"head": ColwiseParallel()})
    assert module.head.weight.placements == (Shard(0),)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


_PLAN = {"head": ColwiseParallel(), "embedding": RowwiseParallel()}


def test_shared_parameters_stay_shared(mesh):
    both = parallelize_module(Tied(), mesh, {"embedding": RowwiseParallel(), "head": ColwiseParallel()})
    assert both.embedding.weight is both.head.weight
    assert len(list(both.parameters())) == 1
    later = parallelize_module(Tied(), mesh, {"embedding": RowwiseParallel()})
    assert later.head.weight is later.embedding.weight
    parallelize_module(later, mesh, {"head": ColwiseParallel()})
    assert later.head.weight is later.embedding.weight
    with pytest.raises(ShardingError, match="placed before, by a style that cuts it otherwise") as raised:
        parallelize_module(Tied(), mesh, {"embedding": ColwiseParallel(), "head": ColwiseParallel()})
    assert (raised.value.where, "parallelize_plan['head']" in "".join(raised.value.__notes__)) == ("weight", True)
    apart = Tied()
    parallelize_module(apart.embedding, mesh, RowwiseParallel())
    for give in (
        lambda: parallelize_module(apart.head, mesh, ColwiseParallel()),
        lambda: distribute_module(apart, mesh),
    ):
        with pytest.raises(ShardingError, match="another has taken its place, from which it would go apart"):
            give()


@pytest.mark.parametrize("give", [partial(parallelize_module, parallelize_plan=_PLAN), distribute_module])
def test_a_call_that_failed_can_be_made_again(give, mesh):
    model = Tied()
    model.head.bias = nn.Parameter(torch.zeros(8))
    hook = model.head.bias.register_hook(lambda g: g)
    with pytest.raises(ShardingError, match="with hooks"):
        give(model, mesh)
    assert model.embedding.weight is model.head.weight
    hook.remove()
    give(model, mesh)
    assert model.embedding.weight is model.head.weight
    assert isinstance(model.head.bias, DTensor)


def test_a_parameter_may_be_taken_again_where_nothing_has_its_place_any_more(mesh):
    weight = nn.Parameter(torch.ones(8, 8))

    def given():
        module = nn.Linear(8, 8, bias=False)
        module.weight = weight
        return parallelize_module(module, mesh, ColwiseParallel())

    given()
    module = given()
    with pytest.raises(ShardingError, match="another has taken its place"):
        given()
    module.weight = weight  # put back
    given()


def test_what_parameters_carry(mesh):
    """Attributes go over to DTensors and on to parts; hooks, which could not, are an error; optimizers are named."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": SequenceParallel()}
    model[0].weight.no_decay = True
    stepping, other = torch.optim.SGD(model.parameters()), torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.warns(UserWarning, match="parallelize_module has replaced 6 parameters of this SGD") as told:
        parallelize_module(model, mesh, plan)
    assert len(told) == 1
    assert told[0].filename == __file__
    del stepping
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody holds a parameter that is no more
        assert model[0].weight.no_decay
        assert local_parameters(model)[0].weight.no_decay
    del other

    hooked = {
        "register_hook": lambda p: p.register_hook(print),
        "post": lambda p: p.register_post_accumulate_grad_hook(print),
        "in backward": lambda p: apply_in_backward(torch.optim.SGD, [p], {"lr": 0.1}),
    }
    for register in hooked.values():
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))
        register(model[1].weight)
        with pytest.raises(
            ShardingError, match=r"(?s)with hooks is to be replaced.*weight of Linear.*local_parameters"
        ):
            parallelize_module(model, mesh, plan)
        with pytest.raises(ShardingError, match="weight of Linear"):
            distribute_module(nn.Sequential(model[1]), mesh)
        model = parallelize_module(nn.Sequential(nn.Linear(4, 8)), mesh, {"0": ColwiseParallel()})
        register(model[0].weight)
        for replace in (local_parameters, torch_parameters):
            with pytest.raises(ShardingError, match="weight of Linear"):
                replace(model)


def test_what_torch_cannot_be_told_changes_nothing(mesh):
    backwards = DeviceMesh("cpu", [3, 2, 1, 0])
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8))
    parallelize_module(model, backwards, {"0": SequenceParallel(), "1": ColwiseParallel()}, src_data_rank=None)
    with pytest.raises(ShardingError, match="ascend"):
        torch_parameters(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("replace", [local_parameters, torch_parameters])
def test_parameters_are_replaced_all_or_none_and_go_with_their_module(mesh_of_one, replace):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    expected = model(torch.ones(2, 4)).detach()
    parallelize_module(model, mesh_of_one, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    hook = model[1].weight.register_hook(print)
    with pytest.raises(ShardingError, match="weight of Linear"):
        replace(model)
    assert torch.equal(model(torch.ones(2, 4)), expected)
    hook.remove()
    replace(model)
    assert torch.equal(copy.deepcopy(model)(torch.ones(2, 4)), expected)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    gone = weakref.ref(model[0].weight)
    gc.collect()  # the error above, and what its traceback holds
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("replace", [local_parameters, torch_parameters, None])
def test_parameters_that_take_the_places_of_others_have_gradients_of_the_same_dtype(mesh_of_one, replace):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)).to(torch.bfloat16)
    for p in model.parameters():
        p.grad_dtype = torch.float32
    model[1].bias.grad_dtype = None
    parallelize_module(model[:2], mesh_of_one, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    distribute_module(model[2], mesh_of_one)
    if replace:
        replace(model[:2])
    assert [p.grad_dtype for p in model.parameters()] == [*[torch.float32] * 3, None, *[torch.float32] * 2]
    model[:2](torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    found = [p.grad.dtype for p in model[:2].parameters()]
    assert found == [*[torch.float32] * 3, torch.bfloat16]
    assert [p.grad.dtype for p in placed_parameters(model[:2])] == found


def test_styles_as_text():
    texts = [ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1), use_local_output=False), SequenceParallel()]
    assert "\n".join(map(repr, texts)) == (
        "ColwiseParallel(input_layouts=(Replicate(),), output_layouts=(Shard(dim=-1),), use_local_output=True)\n"
        "RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Shard(dim=1),), use_local_output=False)\n"
        "SequenceParallel(sequence_dim=1, use_local_output=False)"
    )


def sources(rank, world, source):
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(rank)
    own = nn.Linear(4, 4)
    module = nn.Linear(4, 4)
    module.load_state_dict(own.state_dict())
    parallelize_module(module, mesh, ColwiseParallel(), src_data_rank=source)
    torch.manual_seed(rank if source is None else source)
    want = nn.Linear(4, 4).weight.chunk(world)[rank]
    assert torch.equal(module.weight.to_local(), want)
    norm = nn.LayerNorm(4)
    nn.init.constant_(norm.weight, float(rank))
    parallelize_module(norm, mesh, SequenceParallel(), src_data_rank=source)
    assert norm.weight.placements == (Replicate(),)
    return norm.weight.to_local()[0].item()


@pytest.mark.parametrize("source", [0, 1, None])
def test_whose_parameters_count(source):
    assert run_ranks(2, sources, source) == ([0.0, 1.0] if source is None else [float(source)] * 2)


def test_modules_made_in_inference_mode_are_taken(mesh_of_one):
    """Their parameters have no node of autograd that could have hooks."""
    with torch.inference_mode():
        plain, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), torch.rand(3, 4)
        expected = plain(x)
        model = parallelize_module(copy.deepcopy(plain), mesh_of_one, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch.testing.assert_close(model(x), expected)
        whole = distribute_module(plain, mesh_of_one)
        assert isinstance(whole[0].weight, DTensor)
