"""Process groups in compiled regions: what they say, who they are, and that graphs notice another one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.compiler.regions import Holder, X, agree, follows, same, ways
from tests.interpreters import run_code
from tests.older import require
from tests.ranks import fake_ranks
from torchshard import _torch
from torchshard.compiler import support_groups


@pytest.fixture(scope="module", autouse=True)
def groups():
    """Rank 1 of 4, in two groups."""
    support_groups()
    global FEW, MORE
    with fake_ranks(4, 1):
        FEW, MORE = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
        yield


OF_A_GROUP = {
    "rank and size": lambda x, g: x + 10 * g.rank() + g.size(),
    "get_rank, get_world_size": lambda x, g: x + 10 * dist.get_rank(g) + dist.get_world_size(group=g),
    "ranks": lambda x, g: (x + 1, dist.get_process_group_ranks(g)),
    "name": lambda x, g: (x + 1, g.group_name, g.group_desc),
    "backend": lambda x, g: (x + 1, dist.get_backend(g)),
    "name of the backend, device": lambda x, g: (x + 1, g.name(), g.bound_device_id),
    "tag": lambda x, g: (x + 1, c10d._get_group_tag(g)),
    "membership": lambda x, g: (x + 1, c10d._rank_not_in_group(g)),
    "size by name": lambda x, g: x + c10d._get_group_size_by_name(g.group_name),
    "its name in c10d": lambda x, g: (x + 1, c10d._get_process_group_name(g)),
    "group by name": lambda x, g: (x + 1, c10d._resolve_process_group(g.group_name)),
    "its name again": lambda x, g: (
        x + c10d._resolve_process_group(g.group_name).size(),
        c10d._resolve_group_name_by_ranks_and_tag(dist.get_process_group_ranks(g), c10d._get_group_tag(g)),
    ),
    "translated ranks": lambda x, g: x + 10 * dist.get_global_rank(g, 0) + dist.get_group_rank(g, 1),
    "world or not": lambda x, g: (x + 1, g is dist.group.WORLD, g == dist.group.WORLD, g is not dist.GroupMember.WORLD),
    "member or not": lambda x, g: (x + 1, g == dist.GroupMember.NON_GROUP_MEMBER),
    "identity": lambda x, g: (x + 1, g is FEW, g == FEW, g != FEW),
    "kind": lambda x, g: (x + 1, isinstance(g, dist.ProcessGroup)),
    "hash": lambda x, g: (x + 1, hash(g) == hash(FEW)),
    "key made here": lambda x, g: x + {FEW: 7, MORE: 8}[g],
    "member of a set": lambda x, g: (x + 1, g in {FEW}),
    "returned": lambda x, g: (x + 1, [g]),
}


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_a_group_given_closed_over_or_held(name):
    require(name)
    assert all(agree(function, *args) for function, args in ways(OF_A_GROUP[name], MORE))


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_another_group_is_noticed(name):
    require(name)
    assert follows(OF_A_GROUP[name], FEW, MORE)


def test_a_group_met_twice():
    """As a global and as an argument, in both orders; Dynamo tracks it by where it met it first."""
    assert follows(lambda x, g: (x + FEW.size(), g.size(), MORE.size()), FEW, MORE)
    assert follows(lambda x, g: (x + g.size(), FEW.size(), MORE.size()), FEW, MORE)
    assert follows(lambda x, g: (x + FEW.size(), g is FEW), FEW, dist.GroupMember.NON_GROUP_MEMBER)


OF_THE_WORLD = {
    "rank, size": lambda x: x + 10 * dist.get_rank() + dist.get_world_size(),
    "ranks": lambda x: (x + 1, dist.get_process_group_ranks(None)),
    "default group": lambda x: (x + 1, c10d._get_default_group()),
    "what there is": lambda x: (x + 1, dist.get_pg_count(), dist.is_nccl_available(), dist.get_node_local_rank(0)),
    "group by name": lambda x: x + c10d._resolve_process_group("0").size(),
    "group.WORLD": lambda x: (x + dist.group.WORLD.size(), dist.group.WORLD),
    "GroupMember.WORLD": lambda x: x + dist.GroupMember.WORLD.rank(),
    "initialized": lambda x: (x + 1, dist.is_initialized(), dist.is_available()),
    "name from ranks": lambda x: (x + 1, c10d._resolve_group_name_by_ranks_and_tag([0, 1], "")),
    "a global": lambda x: (x + FEW.size(), FEW),
}

OF_THE_NEXT_WORLD = {
    "rank": lambda x: x + dist.get_rank(),
    "size": lambda x: x + dist.get_world_size(),
    "size of None": lambda x: x + dist.get_world_size(None),
    "size of WORLD": lambda x: x + dist.get_world_size(dist.group.WORLD),
    "ranks": lambda x: (x + 1, dist.get_process_group_ranks(None)),
    "size by name": lambda x: x + c10d._get_group_size_by_name("0"),
    "initialized": lambda x: (x + 1, dist.is_initialized()),
    "either": lambda x: x + (dist.get_world_size() if dist.is_initialized() else 1),
    "backend": lambda x: (x + 1, dist.get_backend()),
    "default group": lambda x: x + c10d._get_default_group().size(),
}


@pytest.mark.parametrize("name", OF_THE_WORLD)
def test_the_world(name):
    require(name)
    assert agree(OF_THE_WORLD[name], X)


def test_the_world_is_another_one_later():
    """Made anew with another rank and size: graphs follow; and they say of none what eager mode says, or fail."""
    script = """
import sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchshard.compiler import support_groups
from tests.compiler.test_groups import OF_THE_NEXT_WORLD, X, same
from tests.older import known

support_groups()
graphs = {n: torch.compile(f, backend="eager", fullgraph=True) for n, f in OF_THE_NEXT_WORLD.items()}
def differ():
    for name, function in OF_THE_NEXT_WORLD.items():
        try:
            want = function(X)
        except (ValueError, RuntimeError, AttributeError):
            want = None
        try:
            got = graphs[name](X)
        except (ValueError, RuntimeError, torch._dynamo.exc.Unsupported):
            got = None
        if not known("no default group") and not dist.is_initialized() and name in ("initialized", "either"):
            continue
        if (want is None) != (got is None) or want is not None and not same(got, want):
            yield name, want, got
for rank, world in ((1, 4), (2, 8)):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    assert not [*differ()], [*differ()]
    dist.destroy_process_group()
    assert not [*differ()], [*differ()]
"""
    run_code(script)


def test_groups_in_containers():
    assert follows(lambda x, groups: x + 10 * groups[0].size() + groups[1].size(), [FEW, MORE], [MORE, FEW])
    assert follows(lambda x, groups: x + groups["a"].size(), {"a": FEW}, {"a": MORE})
    by_group = {FEW: 3, MORE: 4}
    assert follows(lambda x, group: x + by_group[group], FEW, MORE)
    assert follows(lambda x, holder: x + holder.held.size(), Holder(FEW), Holder(MORE))
    assert follows(lambda x, g: (x + 1, c10d._rank_not_in_group(g)), FEW, dist.GroupMember.NON_GROUP_MEMBER)


def test_a_group_swapped_in_a_closure_an_attribute_or_a_global():
    group, holder = FEW, Holder(FEW)

    def function(x):
        return x + 100 * group.size() + 10 * holder.held.size() + CURRENT.size()

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    global CURRENT
    CURRENT = FEW
    assert same(compiled(X), function(X))
    group = MORE
    assert same(compiled(X), function(X))
    holder.held = MORE
    assert same(compiled(X), function(X))
    CURRENT = MORE
    assert same(compiled(X), function(X))


def test_groups_cross_graph_breaks():
    require("graph breaks of groups")

    def function(x, group):
        world, y = dist.group.WORLD, x + group.size()
        torch._dynamo.graph_break()
        return y + group.rank() + world.size(), group, world

    assert same(torch.compile(function, backend="eager")(X, FEW), function(X, FEW))


def test_collectives_over_a_group():
    import torch.distributed._functional_collectives as functional

    def function(x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return functional.all_reduce(x, "sum", group)

    assert follows(function, FEW, MORE)


# A process in which nothing has been added: does a graph notice another group?
_ALONE = """
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchshard.compiler import support_groups

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
few, more, x = dist.new_group([0, 1]), dist.new_group([1, 2, 3]), torch.ones(3)
function = torch.compile(lambda x, g: x + g.size(), backend="eager", fullgraph=True)
function(x, few)
notices = function(x, more)[0] == 4
meets = torch.compile(lambda y: x + y, backend="eager", fullgraph=True)
meets(x)
twice = meets(2 * x)[0] == 3
finds = torch.compile(lambda x: (x, c10d._resolve_process_group("0")), backend="eager", fullgraph=True)
try:
    found = finds(x)[1] is dist.group.WORLD
except torch._dynamo.exc.Unsupported:
    found = False
added = support_groups()
assert notices != ("guards of ProcessGroup" in added), added
assert found != ("_resolve_process_group" in added), added
assert twice != ("guards of objects met twice" in added), added
{also}
"""


def _run(also=""):
    run_code(_ALONE.format(also=also))


def test_guards_are_added_where_torch_has_none_and_only_there():
    """Fails on a torch that guards groups by itself, unless ours stay away from it."""
    _run("torch._dynamo.reset(); function(x, few); assert function(x, more)[0] == 4")


def test_nothing_is_added_by_an_import():
    require("registered")
    code = "import torchshard.compiler.objects, torchshard.compiler.backend, torch.distributed.tensor\n"
    code += "from torch._library.opaque_object import get_opaque_obj_info\n"
    code += "info = get_opaque_obj_info(torch.distributed.ProcessGroup)\n"
    code += "assert 'torchshard' not in getattr(info.guard_fn, '__module__', ''), info"
    run_code(code)


def test_a_torch_that_needs_nothing_is_left_alone(monkeypatch):
    require("registered")
    import torch._library.opaque_object as registry
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.tensor import TensorVariable

    info = registry.get_opaque_obj_info(dist.ProcessGroup)
    before = info.guard_fn, dict(info.members)
    assert not _torch.guard_instances(dist.ProcessGroup, lambda group: [])
    assert _torch.let_ask(dist.ProcessGroup, ("size", "rank"), ("name",)) == []
    assert (info.guard_fn, info.members) == before
    assert _torch.let_find_groups() == []
    assert _torch.let_ask_the_world() == []
    with _torch.without_fast_paths():  # as where torch has no such function
        assert _torch.let_find_groups() == []
    build = VariableBuilder.__call__
    with monkeypatch.context() as patched:
        patched.setattr("torch._dynamo.guards.make_dupe_guard", lambda first, second: object())
        assert not _torch.guard_every_source((dist.ProcessGroup,), ())  # as where torch relates locals and globals
    assert VariableBuilder.__call__ is build
    get, call = TensorVariable.dynamic_getattr, TensorVariable.call_method
    with monkeypatch.context() as patched:
        patched.delattr(TensorVariable, "dynamic_getattr")  # as where it is asked for elsewhere
        assert _torch.let_ask_results(torch.Tensor, ("device_mesh",)) == []
        patched.delattr(TensorVariable, "call_method")  # the same
        assert _torch.trace_methods(torch.Tensor, {"metadata": lambda x: 1}) == []
        assert not {"dynamic_getattr", "call_method"} & {*vars(TensorVariable)}
    with monkeypatch.context() as patched:
        patched.setattr(TensorVariable, "tp_methods", {"metadata": None}, raising=False)  # as where torch has its own
        assert _torch.trace_methods(torch.Tensor, {"metadata": lambda x: 1}) == []
    monkeypatch.delattr(registry, "get_opaque_obj_info")  # as before 2.13
    assert _torch.let_ask_results(torch.Tensor, ("device_mesh",)) == []
    assert (TensorVariable.dynamic_getattr, TensorVariable.call_method) == (get, call)
    assert not _torch.guard_instances(dist.ProcessGroup, lambda group: [])
    assert _torch.let_ask(dist.ProcessGroup, ("anything",), ()) == []
