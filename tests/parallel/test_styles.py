"""Styles on single modules: values, gradients and layouts, on real ranks."""

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks


class MLP(nn.Module):
    def __init__(self, width, hidden, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def worst(pairs):
    """Largest difference between DTensors and plain tensors, beside the largest value."""
    errors = []
    for got, want in pairs:
        full = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert full.shape == want.shape
        errors.append((full - want).abs().max().item() / max(1.0, want.abs().max().item()))
    return max(errors)


def mlp(rank, world, hidden, bias):
    import warnings

    warnings.simplefilter("error")
    from torchshard import init_device_mesh
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain = MLP(6, hidden, bias)
    torch.manual_seed(rank)  # the first rank's parameters count
    model = MLP(6, hidden, bias)
    assert parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}) is model
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(5))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = plain(a), model(b)
    assert type(got) is torch.Tensor
    want.square().sum().backward()
    got.square().sum().backward()
    pairs = [(got, want), (b.grad, a.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    return worst(pairs), {name: str(p.placements) for name, p in model.named_parameters()}


def written_to(rank, world):
    """What a style gives after it has summed is the caller's own, to write to, and to differentiate twice."""
    from torch.autograd import forward_ad

    from torchshard import Shard, init_device_mesh
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, pairs = init_device_mesh("cpu", (world,)), []
    for split in (False, True):
        torch.manual_seed(0)
        plain, model = MLP(6, 5), MLP(6, 5)
        model.load_state_dict(plain.state_dict())
        down = RowwiseParallel(output_layouts=Shard(0)) if split else RowwiseParallel()
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": down})
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        want, got = plain(a), model(b)
        mine = slice(2 * rank, 2 * rank + 2) if split else slice(None)
        assert not got._is_view()
        got.add_(1).mul_(2)
        wanted = (want + 1) * 2
        pairs.append((got, wanted[mine]))
        first = torch.autograd.grad(wanted.pow(3).sum(), a, create_graph=True)[0]
        second = torch.autograd.grad(got.pow(3).sum(), b, create_graph=True)[0]
        pairs.append((second, first))
        first.square().sum().backward()
        second.square().sum().backward()
        pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
        with forward_ad.dual_level():
            tangents = [
                forward_ad.unpack_dual(m(forward_ad.make_dual(x, torch.ones_like(x)))).tangent for m in (model, plain)
            ]
        pairs.append((tangents[0], tangents[1][mine]))
    return worst(pairs)


def test_outputs_may_be_written_to():
    assert max(run_ranks(2, written_to)) < 1e-5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden", [8, 5, 1])
def test_colwise_and_rowwise_make_an_mlp(hidden, bias):
    for error, placements in run_ranks(2, mlp, hidden, bias):
        assert error < 1e-5
        assert placements["up.weight"] == "(Shard(dim=0),)"
        assert placements["down.weight"] == "(Shard(dim=1),)"


def embeddings(rank, world, style, max_norm):
    import warnings

    from torchshard import Replicate, init_device_mesh
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain, model = (nn.Embedding(7, 5, padding_idx=2, max_norm=max_norm) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    made = {"col": ColwiseParallel(output_layouts=Replicate()), "row": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh, made[style])
    x = torch.tensor([[0, 2, 6], [6, 6, 1]])
    want, got = plain(x), model(x)
    want.square().sum().backward()
    got.square().sum().backward()
    return worst([(got, want), (model.weight.grad, plain.weight.grad), (model.weight, plain.weight)])


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("style", ["col", "row"])
def test_embeddings(style, max_norm):
    assert max(run_ranks(2, embeddings, style, max_norm)) < 1e-5


def norms(rank, world):
    from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torchshard.parallel import SequenceParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    errors, kinds = [], []
    for frozen in (False, True):
        torch.manual_seed(0)
        plain = nn.LayerNorm(4)
        nn.init.normal_(plain.weight)
        torch.manual_seed(rank)
        model = nn.LayerNorm(4)
        nn.init.normal_(model.weight)  # the first rank's counts, unlike in torch
        if rank == 0:
            model.load_state_dict(plain.state_dict())
        model.bias.requires_grad_(not frozen)
        parallelize_module(model, mesh, SequenceParallel())
        assert model.bias.requires_grad is not frozen
        x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
        want = plain(x)
        want.square().sum().backward()
        wholes = [x.chunk(world, 1)[rank], distribute_tensor(x, mesh, [Replicate()])]
        for given in wholes:
            model.zero_grad()
            got = model(given)
            got.square().sum().backward()
            kinds.append((type(got) is DTensor, got.placements == (Shard(1),)))
            errors += [(got, want), (model.weight.grad, plain.weight.grad)]
    local = parallelize_module(nn.LayerNorm(4), mesh, SequenceParallel(sequence_dim=0, use_local_output=True))
    assert type(local(x)) is torch.Tensor
    with pytest.raises(ValueError, match="expects a tensor as the first positional input"):
        local(input=x)
    return worst(errors), kinds


def test_norms_on_a_part_of_the_sequence():
    for error, kinds in run_ranks(2, norms):
        assert error < 1e-5
        assert all(kind == (True, True) for kind in kinds)


class Pair(nn.Module):
    def forward(self, a, b, *, c=None, d=None):
        self.seen = a, b, c, d
        return a, b


def prepared(rank, world):
    from torchshard import DTensor, Replicate, Shard, init_device_mesh
    from torchshard.parallel import (
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world,))
    x, whole = torch.full((1, 2), float(rank)), torch.tensor([[0.0, 0.0], [1.0, 1.0]])

    module = parallelize_module(
        Pair(),
        mesh,
        PrepareModuleInput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Replicate(), None),
            input_kwarg_layouts={"c": Shard(0)},
            desired_input_kwarg_layouts={"c": Shard(1)},
        ),
    )
    module(x, "b", c=x, d=x)
    a, b, c, d = module.seen
    assert a.placements == (Replicate(),)
    assert torch.equal(a.to_local(), whole)
    assert b == "b"
    assert d is x
    assert c.placements == (Shard(1),)
    assert torch.equal(c.full_tensor(), whole)
    placed = DTensor.from_local(x, mesh, [Shard(0)])
    module(placed, placed, c=placed)  # a DTensor knows its layout
    assert module.seen[0].placements == (Replicate(),)
    assert module.seen[1] is placed
    with pytest.raises(ValueError, match="3 inputs, and input_layouts has 2"):
        module(x, x, x)
    with pytest.raises(AssertionError, match="no tensor: str"):
        module("a", x)

    class Two(nn.Module):
        def forward(self, a, b=None):
            return a, b

    named = [{"b": Shard(0)}, {"b": Replicate()}]
    one = PrepareModuleInput(input_kwarg_layouts=named[0], desired_input_kwarg_layouts=named[1])
    both = PrepareModuleInput(
        input_layouts=(Shard(0), Shard(0)),
        desired_input_layouts=(Replicate(), Replicate()),
        input_kwarg_layouts=named[0],
        desired_input_kwarg_layouts=named[1],
    )
    assert torch.equal(parallelize_module(Two(), mesh, one)(x, b=x)[1].to_local(), whole)
    assert torch.equal(parallelize_module(Two(), mesh, both)(x, x)[1].to_local(), whole)
    with pytest.raises(
        ValueError, match=r"input 1 .* has come by its place, .*: call the module with b=, or tell of it"
    ):
        parallelize_module(Two(), mesh, one)(x, x)  # by torch's style it is left as it is
    strange = {"c": Shard(0)}
    style = PrepareModuleInput(input_kwarg_layouts=strange, desired_input_kwarg_layouts=strange)
    with pytest.raises(ValueError, match="names c, and Two takes a, b"):
        parallelize_module(Two(), mesh, style)

    module = parallelize_module(
        Pair(),
        mesh,
        PrepareModuleInputOutput(
            input_layouts=(Shard(0), Shard(0)),
            desired_input_layouts=(Replicate(), Replicate()),
            use_local_input=True,
            output_layouts=(Replicate(), None),
            desired_output_layouts=(Shard(0), None),
        ),
    )
    one, other = module(x, x)
    assert type(module.seen[0]) is torch.Tensor
    assert torch.equal(module.seen[0], whole)
    assert torch.equal(one, x)
    assert torch.equal(other, whole)

    class One(nn.Module):
        def forward(self, a):
            return a

    style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate(), use_local_output=False)
    got = parallelize_module(One(), mesh, style)(x)
    assert got.placements == (Replicate(),)
    assert torch.equal(got.to_local(), whole)
    a, b = x.clone().requires_grad_(), whole.clone().requires_grad_()
    weights = torch.arange(4.0).view(2, 2)
    (parallelize_module(One(), mesh, style)(a).to_local() * weights).sum().backward()
    (b * weights).sum().backward()
    assert torch.equal(a.grad, b.grad[rank : rank + 1])
    return repr(style)


def test_inputs_and_outputs_are_prepared():
    for text in run_ranks(2, prepared):
        assert text == (
            "PrepareModuleOutput(output_layouts=(Shard(dim=0),), desired_output_layouts=(Replicate(),), "
            "use_local_output=False)"
        )


def test_layouts_that_do_not_go_together():
    from torchshard import Replicate, Shard
    from torchshard.parallel import PrepareModuleInput, PrepareModuleOutput

    with pytest.raises(AssertionError, match="need desired_input_layouts"):
        PrepareModuleInput(input_layouts=Shard(0))
    with pytest.raises(AssertionError, match="same length: 1 and 2"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Replicate())
    with pytest.raises(AssertionError, match=r"names \['c'\], desired_input_kwarg_layouts \[\]"):
        PrepareModuleInput(input_kwarg_layouts={"c": Shard(0)})
    with pytest.raises(AssertionError, match="same length: 2 and 1"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Shard(0), Shard(1)))


class Adapted(nn.Linear):
    """A linear layer with a low-rank one beside it."""

    def __init__(self):
        super().__init__(6, 4)
        self.low, self.high = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return super().forward(x) + self.high(self.low(x))


def more(rank, world):
    """Layers with layers inside; models made on the meta device; copies."""
    import copy

    from torchshard import Replicate, Shard, init_device_mesh
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, local_parameters, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    for style in (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())):
        torch.manual_seed(0)
        plain, model = Adapted(), Adapted()
        model.load_state_dict(plain.state_dict())
        parallelize_module(model, mesh, style)
        assert model.low.weight.placements == (Replicate(),)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
        want, got = plain(x), model(x)
        want.square().sum().backward()
        got.square().sum().backward()
        assert (
            worst(
                [(got, want), *[(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]]
            )
            < 1e-5
        )

    torch.manual_seed(0)
    plain = MLP(6, 8)
    with torch.device("meta"):
        model = MLP(6, 8)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.to_empty(device="cpu")
    assert model.up.weight.placements == (Shard(0),)
    placed = parallelize_module(copy.deepcopy(plain), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.load_state_dict(placed.state_dict())
    torch.testing.assert_close(model(x), plain(x))

    twin = copy.deepcopy(model)
    lent = copy.deepcopy(local_parameters(copy.deepcopy(model)))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for copied in (twin, lent):
        torch.testing.assert_close(copied(x), plain(x))


def test_adapters_meta_and_copies():
    run_ranks(2, more)


def outlived(rank, world):
    """What is said of a module whose process groups were destroyed, once there are others."""
    import torch.distributed as dist

    from torchshard import init_device_mesh
    from torchshard.parallel import SequenceParallel, parallelize_module

    def sequence(names):
        norm = torch.nn.LayerNorm(4)
        return parallelize_module(norm, init_device_mesh("cpu", (1,), mesh_dim_names=names), SequenceParallel())

    x = torch.ones(1, 2, 4)
    module, other = sequence(("a",)), sequence(("b",))
    alike = [m(x).device_mesh.mesh_dim_names for m in (module, other, module)]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    anew = sequence(("a",))
    assert anew(x).device_mesh.mesh_dim_names == ("a",)
    sequence(("b",))
    said = []
    for m in (module, other):
        try:
            m(x)
        except Exception as error:
            said.append(type(error).__name__)
    return alike, said


def test_meshes_that_differ_in_names_only_and_meshes_that_are_gone():
    alike, said = run_ranks(1, outlived)[0]
    assert alike == [("a",), ("b",), ("a",)]
    assert said == ["ShardingError"] * 2


class NormedHeads(nn.Module):
    """Attention that normalises the queries of each head, as Qwen3 does."""

    def __init__(self):
        super().__init__()
        self.query, self.norm, self.out = nn.Linear(6, 20), nn.RMSNorm(4), nn.Linear(20, 6)

    def forward(self, x):
        heads = self.norm(self.query(x).unflatten(-1, (-1, 4)))
        return self.out((heads * heads.sum(1, keepdim=True)).flatten(2))


def normed_heads(rank, world):
    from torchshard import init_device_mesh
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    torch.manual_seed(0)
    plain, model = NormedHeads(), NormedHeads()
    model.load_state_dict(plain.state_dict())
    norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    plan = {"query": ColwiseParallel(), "norm": norm, "out": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    x = torch.randn(2, 3, 6)
    for module in (plain, model):
        module(x).square().sum().backward()
    return worst((p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_norms_of_heads_have_the_gradient_of_all_heads():
    assert max(run_ranks(5, normed_heads)) < 1e-5


def transforms(rank, world):
    from torch.func import functional_call, grad

    from torchshard import DTensor, Replicate, distribute_tensor, init_device_mesh
    from torchshard.errors import UnsupportedOperatorError
    from torchshard.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    model = parallelize_module(nn.Linear(4, 6), mesh, ColwiseParallel())
    weights = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    for x in (torch.ones(3, 4), distribute_tensor(torch.ones(3, 4), mesh, [Replicate()])):

        def loss(weights, x=x):
            y = functional_call(model, weights, (x,))
            return (y.to_local() if isinstance(y, DTensor) else y).square().sum()

        assert [g.shape for g in torch.autograd.grad(loss(weights), [*weights.values()])] == [(6, 4), (6,)]
        with pytest.raises(UnsupportedOperatorError, match=r"torch\.autograd\.grad"):
            grad(loss)(weights)


def test_plans_inside_of_functional_transforms_are_refused():
    run_ranks(1, transforms)
