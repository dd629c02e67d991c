"""What is kept of a call: its plan, and none of its tensors, nor dtypes that are the default for a while."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.ranks import fake_ranks
from torchshard import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    fallback,
    implicit_replication,
    init_device_mesh,
    layout_of,
    register_rule,
)
from torchshard._torch import without_fast_paths
from torchshard.debug import CommDebugMode
from torchshard.errors import UnsupportedOperatorError
from torchshard.tensor.calls import dispatch
from torchshard.tensor.calls.dispatch import clear_entries, forget_plans

CALLS = {
    "one operator": lambda x, y, low: torch.add(x, y),
    "one that moves": lambda x, y, low: torch.softmax(x.t() @ y, 0),
    "in place": lambda x, y, low: x.mul_(y),
    "numbers of terms": lambda x, y, low: x.redistribute(placements=[Partial()]) * 2.0,
    "lists": lambda x, y, low: torch._foreach_mul([x, x], 2.0),
    "lists that are moved": lambda x, y, low: torch._foreach_add_([x, x * 1], [y, y * 1]),
    "lists that broadcast": lambda x, y, low: torch._foreach_add_([x, x * 1], [low, low * 1]),
    "severed views": lambda x, y, low: torch._foreach_add_([x[1:3], x[2:4]], 1.0),
    "by a handler": lambda x, y, low: torch.softmax(x, 0),
    "norms": lambda x, y, low: torch._foreach_norm([x, y, low]),
    "written when gathered": lambda x, y, low: x.put_(y.argmax(0), low[0]),
}


@pytest.fixture
def mesh():
    with fake_ranks(2):
        yield init_device_mesh("cpu", (2,))


@pytest.mark.parametrize("call", CALLS)
def test_plans_keep_no_tensors(mesh, call):
    forget_plans()
    x, y = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(dim)]) for dim in (0, 1))
    tensors = [x, y, distribute_tensor(torch.ones(1, 4), mesh, [Shard(1)])]
    CALLS[call](*tensors)
    left = [weakref.ref(each) for each in tensors]
    del x, y, tensors
    gc.collect()
    assert [each() for each in left] == [None] * 3


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=("within", "outside"))
def test_plans_keep_no_default_dtype(mesh, ranks):
    x = distribute_tensor(torch.arange(4), DeviceMesh("cpu", ranks), [Shard(0)])
    calls = {
        "one": lambda: torch.sigmoid(x),
        "complex": lambda: torch.ops.aten.mul.Scalar(x, 1j),
        "lists": lambda: torch._foreach_add([x, x.double()], 1.5)[0],
        "lists that broadcast": lambda: torch._foreach_div([x], [x[:1]])[0],
    }
    for name, call in calls.items():
        found = []
        for dtype in (torch.float32, torch.float64):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                found.append(layout_of(call()).dtype.to_real())
            finally:
                torch.set_default_dtype(before)
        assert found == [torch.float32, torch.float64], name


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=("within", "outside"))
def test_plans_are_kept_where_whole_numbers_become_others(mesh, ranks, monkeypatch):
    """Masks and counts did so at each call: 300 us for the mean of `(guess == target).float()`."""
    x = distribute_tensor(torch.arange(4), DeviceMesh("cpu", ranks), [Shard(0)])
    calls = lambda: (x == 2).float(), lambda: x * 0.5, lambda: torch._foreach_add([x], 1.5)
    for call in calls:
        call()
    monkeypatch.setattr(dispatch, "make_plan", None)
    for call in calls:
        call()


def test_plans_for_plain_tensors_are_kept_and_ask_each_time(mesh, monkeypatch):
    x, plain = distribute_tensor(torch.arange(4), mesh, [Shard(0)], src_data_rank=None), torch.arange(4)
    with implicit_replication():
        x + plain
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "make_plan", None)
            assert (x + plain).to_local().tolist() == [0, 2]
    with pytest.raises(UnsupportedOperatorError, match="plain"):
        x + plain


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_gradient_of_a_loss_that_is_no_mean_asks_nobody(mesh, reduction):
    """It reads no total weight, which was added up for it."""
    scores = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]).requires_grad_()
    targets = distribute_tensor(torch.tensor([0, 1, 2, 0]), mesh, [Shard(0)], src_data_rank=None)
    with CommDebugMode() as counted:
        torch.nn.functional.cross_entropy(scores, targets, reduction=reduction).sum().backward()
    assert counted.get_total_counts() == 0
    assert scores.grad.placements == (Shard(0),)


@torch.library.custom_op("plans_test::of_any_names", mutates_args=())
def of_any_names(
    D: torch.Tensor, list: list[torch.Tensor], type: float, len: list[float], fn: torch.Tensor, *, plan: int
) -> list[torch.Tensor]:
    return [D * item * type * len[0] + fn * plan for item in list]


@of_any_names.register_fake
def _(D, list, type, len, fn, *, plan):
    return [torch.empty_like(item) for item in list]


def test_arguments_of_operators_have_any_names(mesh):
    """As those of generated code, which ran into them: selective_scan(..., D) was refused."""
    x = torch.arange(4.0)
    d = distribute_tensor(x, mesh, [Replicate()])
    with fallback("silent"):
        for number in (2.0, 3.0):  # the first time, and by its plan
            made = of_any_names(d, [d, d + 1], number, [0.5], d, plan=2)
            expected = of_any_names(x, [x, x + 1], number, [0.5], x, plan=2)
            assert [each.to_local().tolist() for each in made] == [each.tolist() for each in expected]


@pytest.mark.parametrize("shape", [(5, 6), (1, 6), (1, 1, 5, 6), (4, 1, 1, 6), (1, 3, 1, 6), (4, 3, 5, 6)])
@pytest.mark.parametrize("dim", [0, 1])
def test_masks_for_many_do_not_gather_attention(mesh, shape, dim):
    query, key = (torch.randn(4, 2 if dim else 3, n, 8) for n in (5, 6))
    shape = tuple(2 if n == 3 and dim else n for n in shape)
    q, k = (distribute_tensor(x, mesh, [Shard(dim)]) for x in (query, key))
    mask = distribute_tensor(torch.randn(shape), mesh, [Replicate()])
    with fallback("error"):
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask)
    assert attended.placements == (Shard(dim),)


def test_plans_for_the_value_of_a_number_are_for_its_type_too(mesh):
    with torch.library._scoped_library("plans_test", "FRAGMENT") as library:
        library.define("times(Tensor x, Scalar by) -> Tensor")
        library.impl("times", lambda x, by: x * by, "CompositeExplicitAutograd")
        library.impl("times", lambda x, by: x * by, "Meta")
        times = torch.ops.plans_test.times
        x = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
        with register_rule(times, lambda x, by: "... -> ...", reads="by"):
            assert [layout_of(times(x, by)).dtype for by in (2, 2.0, 2)] == [torch.int64, torch.float32, torch.int64]


@pytest.mark.parametrize("name", ["cumsum_", "cumprod_"])
def test_in_place_forms_follow_the_rule(mesh, name):
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with fallback("error"):
        assert getattr(x, name)(1).placements == (Shard(0),)


def test_fake_groups_take_a_rank_that_gives_nothing():
    with fake_ranks(8, 5):
        mesh = init_device_mesh("cpu", (8,))
        x = distribute_tensor(torch.ones(9, 4), mesh, [Shard(0)])
        assert x.redistribute(placements=[Shard(1)]).to_local().shape == (9, 0)
        few = distribute_tensor(torch.ones(3, 8), mesh, [Shard(0)])
        assert few.redistribute(placements=[Shard(1)]).to_local().shape == (3, 1)


def test_a_mesh_whose_groups_were_destroyed_is_not_used_again():
    meshes = []
    for groups_before in (3, 0):  # so that the new mesh's groups have other names
        with fake_ranks(4):
            for _ in range(groups_before):
                dist.new_group([0, 1])
            meshes.append(init_device_mesh("cpu", (2, 2)))
            x = DTensor.from_local(torch.ones(4), meshes[-1], [Shard(0), Shard(0)])
            if len(meshes) == 2:  # the first has never sent anything
                x.full_tensor()
            assert x.device_mesh is meshes[-1]


def test_parts_that_are_only_read_are_not_copied(mesh):
    """Masks for many heads keep their strides of 0, and rows the length that kernels ask for."""
    seen = []

    def kernel(x, mask):
        seen.append(mask)
        return x + mask

    with torch.library._scoped_library("plans_test", "FRAGMENT") as library:
        library.define("masked(Tensor x, Tensor mask) -> Tensor")
        library.impl("masked", kernel, "CPU")
        library.impl("masked", torch.add, "Meta")
        x = DTensor.from_local(torch.ones(6, 2, 5), mesh, [Shard(1)])
        rows = DTensor.from_local(torch.arange(40.0).view(5, 8), mesh, [Replicate()])
        mask = rows[:, :4].t().expand(6, 4, 5)
        with register_rule(torch.ops.plans_test.masked, "..., ... -> ..."):
            made = [torch.ops.plans_test.masked(x, mask) for _ in range(2)]  # the first time, and by its plan
    for part, result in zip(seen, made, strict=True):
        assert part.data_ptr() == rows.to_local().data_ptr()
        assert (part.shape, part.stride()) == ((6, 2, 5), (0, 1, 8))
        torch.testing.assert_close(result.to_local(), torch.ones(6, 2, 5) + mask.to_local()[:, :2])


@pytest.mark.parametrize(("dim", "copied"), [(0, False), (1, True)])
def test_parts_that_are_only_read_lie_as_kernels_are_told(mesh, dim, copied):
    """Those of gradients believe a layout that says contiguous: a part with gaps would be read wrong."""
    seen = []
    with torch.library._scoped_library("plans_test", "FRAGMENT") as library:
        library.define("read(Tensor x, Tensor y) -> Tensor")
        library.impl("read", lambda x, y: seen.append(y) or x + y, "CPU")
        library.impl("read", torch.add, "Meta")
        x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(dim)])
        y = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()])
        with register_rule(torch.ops.plans_test.read, "a b, a b -> a b"):
            torch.ops.plans_test.read(x, y)
    assert seen[0].is_contiguous()
    assert (seen[0].data_ptr() != y.to_local().data_ptr()) == copied


def test_results_are_no_parts_of_what_was_read(mesh):
    """Of kernels that return what they are given."""
    with torch.library._scoped_library("plans_test", "FRAGMENT") as library:
        library.define("first(Tensor x, Tensor y) -> Tensor")
        for key in ("CPU", "Meta"):
            library.impl("first", lambda x, y: x, key)
        x = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])
        y = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        with register_rule(torch.ops.plans_test.first, "a b, a b -> a b"):
            for _ in range(2):
                result = torch.ops.plans_test.first(x, y)
                assert result.placements == (Shard(0),)
                result.zero_()
    assert x.to_local().tolist() == [[1.0] * 3] * 4


def test_torch_calls_the_entry_of_an_operator_itself(mesh, monkeypatch):
    """Whatever the operator is called with, and after a rule was changed, values are those of `__torch_dispatch__`."""
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
    seen = []
    method = DTensor.__torch_dispatch__

    def watched(func, types, args=(), kwargs=None):
        seen.append((str(func), len(args), *(kwargs or {})))
        return method(func, types, args, kwargs)

    def calls():
        seen.clear()
        found = [x + x, torch.add(x, x, alpha=2), torch.clamp(x, 1), torch.clamp(x, 1, 2), torch.clamp(x, max=2)]
        return [each.to_local().tolist() for each in found]

    clear_entries()
    monkeypatch.setattr(DTensor, "__torch_dispatch__", staticmethod(watched))
    by_method = calls()
    assert by_method == [[0.0, 2.0], [0.0, 3.0], [1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]
    assert ("aten.add.Tensor", 2) in seen
    assert calls() == by_method
    assert seen == [("aten.add.Tensor", 2, "alpha"), ("aten.clamp.default", 3), ("aten.clamp.default", 3)]
    clear_entries()
    assert calls() == by_method
    assert ("aten.add.Tensor", 2) in seen


def test_without_a_registry_of_torch_entries_go_by_the_method(mesh):
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
    clear_entries()
    with without_fast_paths():
        assert (x + x).to_local().tolist() == [0.0, 2.0]
    assert torch.ops.aten.add.Tensor.__qualname__ not in directly_called()
    clear_entries()
    x + x
    assert torch.ops.aten.add.Tensor.__qualname__ in directly_called()


def directly_called():
    from torch._library.simple_registry import singleton

    return [name for name, known in singleton._data.items() if known.torch_dispatch_rules.find(DTensor)]


def test_operators_of_users_and_functions_that_they_registered_are_left_to_them(mesh):
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
    called = []
    clear_entries()
    with torch.library._scoped_library("aten", "FRAGMENT") as theirs:

        def function(kind, func, types, args=(), kwargs=None):
            called.append(str(func))
            return DTensor.__torch_dispatch__(func, types, args, kwargs)

        torch.library.register_torch_dispatch("aten::erf", DTensor, function, lib=theirs)
        torch.testing.assert_close(torch.erf(x).to_local(), torch.erf(torch.arange(2.0)))
        assert called == ["aten.erf.default"]
    clear_entries()
    torch.testing.assert_close(torch.erf(x).to_local(), torch.erf(torch.arange(2.0)))
    with torch.library._scoped_library("tests_of_plans", "DEF") as ours:
        ours.define("twice(Tensor x) -> Tensor")
        ours.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        rule = register_rule("tests_of_plans::twice", "... -> ...")
        assert torch.ops.tests_of_plans.twice(x).to_local().tolist() == [0.0, 2.0]
        assert not [name for name in directly_called() if "twice" in name]
        rule.remove()
