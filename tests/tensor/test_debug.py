"""Counting collectives, showing pieces, refusing implicit redistributions; against torch's own on its own tensors."""

import inspect
import itertools
import warnings

import pytest
import torch
import torch.distributed.tensor as upstream
import torch.distributed.tensor.debug as upstream_debug
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.ranks import fake_ranks
from torchshard import DTensor, distribute_module, distribute_tensor, explain, zeros
from torchshard.debug import CommDebugMode, ExplicitRedistributionContext, visualize_sharding
from torchshard.errors import ImplicitRedistributionError

funcol = torch.ops.c10d_functional


@pytest.fixture
def mesh():
    """8 ranks that compute nothing, as 2 x 4."""
    with fake_ranks(8):
        yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def matrices(mesh, cls=DTensor):
    x = cls.from_local(torch.ones(4, 8), mesh, [Shard(0), Replicate()])
    w = cls.from_local(torch.ones(2, 8), mesh, [Replicate(), Shard(0)])
    return x, w


def test_collectives_are_counted(mesh):
    x, w = (
        zeros(8, 8, device_mesh=mesh, placements=[Shard(0), Shard(1)]),
        zeros(8, 8, device_mesh=mesh, placements=[Replicate(), Shard(0)]),
    )
    with CommDebugMode() as mode:
        y = torch.relu(x @ w)  # a sum, scattered
    assert dict(mode.get_comm_counts()) == {funcol.reduce_scatter_tensor: 1}
    with mode:  # counted anew
        y.full_tensor()
    assert dict(mode.get_comm_counts()) == {funcol.all_gather_into_tensor: 1}  # over both axes at once
    assert mode.get_total_counts() == 1
    with mode:
        torch.relu(x).view(torch.int32)
        assert not x.is_pinned()
    assert mode.get_total_counts() == 0


def test_the_order_in_which_modes_are_entered_does_not_matter(mesh):
    x, w = matrices(mesh)

    def counted():
        with CommDebugMode() as mode:
            torch.relu(x @ w)
        return mode

    with CommDebugMode() as around:
        alone = explain(lambda: torch.relu(x @ w))
    explained = explain(counted)
    assert str(explained) == str(alone)
    counts = [dict(mode.get_comm_counts()) for mode in (around, explained.result)]
    assert counts[0] == counts[1] == {funcol.reduce_scatter_tensor: 1}
    with ExplicitRedistributionContext():
        for function in (counted, lambda: torch.relu(x @ w), lambda: explain(counted)):
            with pytest.raises(ImplicitRedistributionError):
                function()
    assert str(explain(counted)) == str(alone)


def test_modules_may_be_called_again(mesh):
    model = distribute_module(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), mesh)
    x = zeros(8, 8, device_mesh=mesh, placements=[Replicate(), Shard(1)]).requires_grad_()
    with CommDebugMode() as mode:
        for _ in range(3):
            model(x).sum().full_tensor().backward()
    assert mode.comm_module_counts["Sequential.1"]["forward"] == {funcol.reduce_scatter_tensor: 3}
    model(x)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("alone", [0, 1])
def test_nothing_is_sent_along_an_axis_of_one_rank(mesh, alone):
    flat = init_device_mesh("cpu", (1, 8) if alone == 0 else (8, 1))
    values = torch.arange(64.0).view(8, 8)
    for other, before, after in itertools.product(
        [Shard(0), Shard(1), Replicate(), Partial()],
        [Shard(0), Shard(1), Replicate(), Partial()],
        [Shard(0), Shard(1), Replicate()],
    ):
        x = DTensor.from_local(values.clone(), flat, [before, other] if alone == 0 else [other, before], run_check=True)
        with CommDebugMode() as mode:
            y = x.redistribute(placements=[after, other] if alone == 0 else [other, after])
        assert mode.get_total_counts() == 0, (before, after, other)
        assert torch.equal(y.to_local(), values)


def test_backward_is_counted(mesh):
    x = zeros(8, 8, device_mesh=mesh, placements=[Shard(0), Replicate()]).requires_grad_()
    with CommDebugMode() as mode:
        x.redistribute(placements=[Replicate(), Replicate()]).sum().backward()
    assert mode.get_total_counts() == 1
    w = zeros(8, 8, device_mesh=mesh, placements=[Replicate(), Replicate()]).requires_grad_()
    with CommDebugMode() as mode:
        (x @ w).sum().backward()
        w.grad.redistribute(placements=[Replicate(), Replicate()])
    assert dict(mode.get_comm_counts()) == {funcol.all_reduce: 1}


def test_counts_agree_with_explain_and_with_torch(mesh):
    def block(cls):
        x, w = matrices(mesh, cls)
        y = torch.relu((w.t() @ w) @ x.t())
        return y.redistribute(placements=[Replicate(), Replicate()])

    explained = explain(block, DTensor)
    counts = {}
    for cls, mode in (
        (DTensor, CommDebugMode()),
        (upstream.DTensor, CommDebugMode()),
        (upstream.DTensor, upstream_debug.CommDebugMode()),
    ):
        with mode:
            block(cls)
        counts[cls, type(mode)] = dict(mode.get_comm_counts())
    assert counts[upstream.DTensor, CommDebugMode] == counts[upstream.DTensor, upstream_debug.CommDebugMode]
    ours = {str(op).split(".")[-1]: n for op, n in counts[DTensor, CommDebugMode].items()}
    assert ours == dict(explained.collectives)


def test_small_sums_go_together(mesh):
    shapes = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()]] * 10
    parameters = [zeros(8, 8, device_mesh=mesh, placements=p, requires_grad=True) for p in shapes]
    for p in parameters:
        p.grad = torch.ones_like(p)
    with CommDebugMode() as mode:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)  # norms of each kind, over one axis or both
    assert dict(mode.get_comm_counts()) == {funcol.all_reduce: 2}
    logits, target = zeros(8, 8, device_mesh=mesh, placements=[Shard(0)] * 2), torch.arange(8)
    with mode:  # the sum of losses, and that of weights
        torch.nn.functional.cross_entropy(logits, distribute_tensor(target, mesh, [Shard(0)] * 2, src_data_rank=None))
    assert dict(mode.get_comm_counts()) == {funcol.all_reduce: 1}
    split, target = torch.zeros(8, 8).log_softmax(1), distribute_tensor(target, mesh, src_data_rank=None)
    with mode:  # of split classes, too
        torch.nn.functional.nll_loss(distribute_tensor(split, mesh, [Shard(1)] * 2, src_data_rank=None), target)
    assert dict(mode.get_comm_counts()) == {funcol.all_reduce: 1}
    x = zeros(8, 4, device_mesh=mesh, placements=[Shard(0), Replicate()]).requires_grad_()
    mean, variance, weight = (zeros(4, device_mesh=mesh) for _ in range(3))
    with mode:  # counts, means and variances of parts
        y = torch.nn.functional.batch_norm(x, mean, variance, weight.requires_grad_(), weight, training=True)
    assert dict(mode.get_comm_counts()) == {funcol.all_gather_into_tensor: 1}
    with mode:  # two sums a channel
        y.backward(x.detach())
    assert dict(mode.get_comm_counts()) == {funcol.all_reduce: 1}
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)]
    with mode:  # along each axis all floats, and the count of batches
        distribute_module(torch.nn.Sequential(*layers), mesh)
    assert dict(mode.get_comm_counts()) == {funcol.broadcast: 4}
    with mode:  # whether parts are equal
        assert torch.equal(x, x.detach().redistribute(placements=[Shard(0), Replicate()]))
    assert dict(mode.get_comm_counts()) == {funcol.all_reduce: 1}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).relu()


def sharded_block(mesh):
    def partition(name, module, mesh):
        dim = {"first": 0, "second": 1}.get(name)
        if dim is not None:
            weight = distribute_tensor(module.weight, mesh, [Replicate(), Shard(dim)])
            module.weight = torch.nn.Parameter(weight)

    return distribute_module(Block(), mesh, partition)


def test_modules(mesh, tmp_path):
    model = sharded_block(mesh)
    x = zeros(8, 8, device_mesh=mesh, placements=[Shard(0), Replicate()])
    with CommDebugMode() as mode:
        model(x)
    assert mode.get_sharding_info() == {
        "Block.first.weight": (Replicate(), Shard(0)),
        "Block.second.weight": (Replicate(), Shard(1)),
    }
    assert set(mode.get_parameter_info()) == {"Block.first", "Block.second"}
    mode.log_comm_debug_tracing_table_to_file(tmp_path / "table.txt", noise_level=0)
    assert_expected_inline(
        (tmp_path / "table.txt").read_text(),
        """\
Global
  FORWARD PASS
    *c10d_functional.reduce_scatter_tensor: 1
    Block
      FORWARD PASS
        *c10d_functional.reduce_scatter_tensor: 1
        Block.first
        Block.second
""",
    )
    mode.log_comm_debug_tracing_table_to_file(tmp_path / "table.txt", noise_level=1)
    assert "aten.mm.default" in (tmp_path / "table.txt").read_text()
    mode.generate_json_dump(str(tmp_path / "log.json"))
    assert "reduce_scatter_tensor" in (tmp_path / "log.json").read_text()


@pytest.mark.parametrize(
    "placements", [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)], [Replicate(), Replicate()]]
)
@pytest.mark.parametrize("shape", [(8, 8), (16,)])
def test_pieces_are_shown_as_torch_shows_them(mesh, capsys, shape, placements):
    if len(shape) == 1 and Shard(1) in placements:
        placements = [Replicate(), Shard(0)]
    visualize_sharding(zeros(*shape, device_mesh=mesh, placements=placements))
    ours = capsys.readouterr().out
    theirs = upstream.zeros(*shape, device_mesh=mesh, placements=placements)
    upstream_debug.visualize_sharding(theirs)
    assert ours == capsys.readouterr().out != ""
    visualize_sharding(theirs)
    assert ours == capsys.readouterr().out


def test_uneven_pieces_are_shown(mesh, capsys):
    visualize_sharding(zeros(5, 3, device_mesh=mesh, placements=[Shard(0), Shard(1)]), header="weight")
    assert_expected_inline(
        capsys.readouterr().out,
        """\
weight
         Col 0-0    Col 1-1    Col 2-2
-------  ---------  ---------  ---------
Row 0-2  cpu:0      cpu:1      cpu:2
Row 3-4  cpu:4      cpu:5      cpu:6
nothing: cpu:3,7
""",
    )
    visualize_sharding(zeros(0, 3, device_mesh=mesh, placements=[Shard(0), Shard(1)]))
    assert capsys.readouterr().out == ""
    visualize_sharding(zeros((), device_mesh=mesh, placements=[Replicate(), Replicate()]))
    assert "cpu:0,1,2,3,4,5,6,7" in capsys.readouterr().out


def test_what_cannot_be_shown(mesh):
    with pytest.raises(RuntimeError, match="1 or 2 dims"):
        visualize_sharding(zeros(2, 2, 2, device_mesh=mesh, placements=[Shard(0), Replicate()]))
    with pytest.raises(NotImplementedError, match="use_rich"):
        visualize_sharding(zeros(2, 2, device_mesh=mesh, placements=[Shard(0), Replicate()]), use_rich=True)


def test_implicit_redistribution_is_refused(mesh):
    x, w = matrices(mesh)
    with ExplicitRedistributionContext(), pytest.raises(ImplicitRedistributionError) as caught:
        torch.flip(w, [0])
    assert_expected_inline(
        str(caught.value),
        """\
flip.default would redistribute its argument 'self', which nobody has asked for.
  expected: (dp=2:R, tp=4:S(1))
  got:      float32[8, 8] (dp=2:R, tp=4:S(0))
  where:    inside of ExplicitRedistributionContext
  fix:      before it, call .redistribute(placements=[Replicate(), Shard(dim=1)])""",
    )
    assert isinstance(caught.value, RuntimeError)
    torch.flip(w, [0])
    with ExplicitRedistributionContext(), pytest.raises(ImplicitRedistributionError):
        torch.flip(w, [0])  # from a kept plan
    with ExplicitRedistributionContext():
        advised = w.redistribute(placements=[Replicate(), Shard(dim=1)])
        assert torch.flip(advised, [0]).placements == (Replicate(), Shard(1))
        assert x.full_tensor().shape == (8, 8)


def test_gathering_handlers_and_lists_are_refused(mesh):
    x, w = matrices(mesh)
    summed = DTensor.from_local(torch.ones(8, 8), mesh, [Partial(), Replicate()])
    with warnings.catch_warnings(), ExplicitRedistributionContext():
        warnings.simplefilter("ignore")
        with pytest.raises(
            ImplicitRedistributionError, match=r"_linalg_svd.default would redistribute its argument 'A'"
        ):
            torch.linalg.svdvals(w)
        with pytest.raises(
            ImplicitRedistributionError, match=r"_foreach_add.List would redistribute its argument 'other'"
        ):
            torch._foreach_add([x], [summed])
        with pytest.raises(ImplicitRedistributionError, match="_local_scalar_dense"):
            summed.sum().item()


def test_strict_refuses_what_costs_nothing(mesh):
    x, _ = matrices(mesh)
    whole = zeros(8, 8, device_mesh=mesh, placements=[Replicate(), Replicate()])
    with ExplicitRedistributionContext():
        x + whole
    with ExplicitRedistributionContext(strict=True), pytest.raises(ImplicitRedistributionError, match="'other'"):
        x + whole


def test_the_innermost_context_decides(mesh):
    _, w = matrices(mesh)
    with ExplicitRedistributionContext():
        with ExplicitRedistributionContext(enable=False):
            torch.flip(w, [0])
        with pytest.raises(ImplicitRedistributionError):
            torch.flip(w, [0])
    outer, inner = ExplicitRedistributionContext(enable=False), ExplicitRedistributionContext()
    with outer, inner, pytest.raises(ImplicitRedistributionError):
        torch.flip(w, [0])

    def explained():
        with ExplicitRedistributionContext():
            torch.flip(w, [0])

    with pytest.raises(ImplicitRedistributionError):
        explain(explained)
    torch.flip(w, [0])


def test_warnings_instead(mesh):
    _, w = matrices(mesh)
    with ExplicitRedistributionContext(mode="warn"), pytest.warns(RuntimeWarning, match="flip.default would"):
        torch.flip(w, [0])
    with pytest.raises(RuntimeError, match="Invalid mode"):
        ExplicitRedistributionContext(mode="ignore")


def test_backward_is_watched_inside(mesh):
    w = zeros(8, 8, device_mesh=mesh, placements=[Replicate(), Shard(0)]).requires_grad_()
    y = torch.softmax(w, 0)
    with ExplicitRedistributionContext(strict=True), pytest.raises(ImplicitRedistributionError):
        y.sum().backward()
    y = torch.softmax(w, 0)
    y.sum().backward()
    assert w.grad.placements is not None


def test_a_mode_is_entered_anew_for_backward(mesh):
    norm = torch.nn.LayerNorm(8, elementwise_affine=False)
    x = zeros(8, 8, device_mesh=mesh, placements=[Replicate(), Shard(1)]).requires_grad_()
    mode = CommDebugMode()
    with mode:
        y = norm(x)
    with mode:
        y.sum().backward()
    assert mode.get_total_counts() > 0
    assert sum(mode.comm_module_counts["Global"]["backward"].values()) == mode.get_total_counts()


def test_signatures_are_those_of_torch():
    def parameters(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    from torch.distributed.tensor._utils import ExplicitRedistributionContext as Upstream

    assert parameters(ExplicitRedistributionContext.__init__) == parameters(Upstream.__init__)
    assert parameters(visualize_sharding) == parameters(upstream_debug.visualize_sharding)
    public = {name for name in vars(upstream_debug.CommDebugMode) if not name.startswith("_")}
    assert {"get_total_counts", "get_comm_counts", "generate_comm_debug_tracing_table"} <= public
    for name in public & set(vars(CommDebugMode)):
        assert parameters(getattr(CommDebugMode, name)) == parameters(getattr(upstream_debug.CommDebugMode, name))
