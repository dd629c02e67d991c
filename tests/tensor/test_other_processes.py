"""What another process has saved, whose strings hash otherwise: DTensors, and graphs in AOTAutograd's cache."""

import pytest

from tests.inductor_cache import own_cache
from tests.interpreters import run_code
from tests.older import require
from tests.ranks import fake_ranks

BEGIN = """
import io, os, sys, torch
import torch.distributed as dist
from torchshard import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)
file, first = sys.argv[1], not os.path.exists(sys.argv[1])

def made():
    return distribute_tensor(torch.ones(8, 6), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), [Shard(0)])
"""

# The mesh of what is loaded is, in turn: known before it, by torch's hash as well, and known only after it.
DTENSOR = """
if first:
    x = made()
    {x.device_mesh: hash(x.device_mesh)}
    torch.save(x, file)
elif sys.argv[2] == "mesh first":
    x = made()
    y = torch.load(file)
    assert y.device_mesh is x.device_mesh and (x + y).sum().item() == 96
else:
    y = torch.load(file)
    x = made()
    assert x.device_mesh in {y.device_mesh: 1} and (x + y).sum().item() == 96
"""

MESH = """
if first:
    x = made()
    {x.device_mesh: hash(x.device_mesh)}
    torch.save(x.device_mesh, file)
else:
    x = made()
    y = distribute_tensor(torch.ones(8, 6), torch.load(file, weights_only=False), [Shard(0)])
    assert (x + y).sum().item() == 96
"""

GRAPH = """
w = made().requires_grad_()
torch.compile(lambda w: (w @ w.t()).relu(), fullgraph=True)(w).sum().backward()
torch.optim.SGD([w], 0.1).step()
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
open(file, "w").close()
"""

# Each process says another rule; the last one as a function, which may say anything.
RULES = """
from torchshard import register_rule

@torch.library.custom_op("other_processes_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

twice.register_fake(torch.empty_like)
line = sys.argv[2]
register_rule(twice, line if line else lambda x: "I j -> I j")
x = made()
assert torch.compile(twice, fullgraph=True)(x).placements == twice(x).placements
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""

# A region that makes DTensors: on which mesh, and what the cache may keep. Matrix products leave inductor nothing to compile.
MADE_INSIDE = """
from torchshard import DTensor, register_rule, zeros
from torchshard.compiler import support_caches

assert "torchshard.tensor.gradients.autograd.from_local" in support_caches() and not support_caches()
keys = torch._inductor.config.unsafe_marked_cacheable_functions
with register_rule("mm", "I k, k J -> I J", override=True):
    assert keys != torch._inductor.config.unsafe_marked_cacheable_functions
assert keys == torch._inductor.config.unsafe_marked_cacheable_functions
shape = tuple(map(int, sys.argv[2].split("x")))
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
placements = [Shard(0)] * len(shape)
w = torch.ones(6, 8).requires_grad_()

@torch.compile(fullgraph=True)
def product(x):
    first = zeros(6, 6, device_mesh=mesh, placements=placements) @ distribute_tensor(torch.ones(6, 8), mesh)
    return first, DTensor.from_local(x, mesh, placements) @ DTensor.from_local(w, mesh)

x = torch.ones(6, 6).requires_grad_()
first, second = product(x)
second.sum().backward()
assert second.device_mesh == mesh and second.device_mesh.mesh_dim_names == mesh.mesh_dim_names
torch.testing.assert_close(second.to_local(), torch.full((6, 8), 6.0))
torch.testing.assert_close(x.grad, torch.full((6, 6), 8.0))
counts = torch._dynamo.utils.counters["aot_autograd"]
print(counts["autograd_cache_hit"], counts["autograd_cache_bypass"])
"""

STRIDES = """
from torchshard import DTensor

f = torch.compile(lambda x: x @ x.t(), fullgraph=True)
for local in (torch.randn(4, 6), torch.randn(6, 4).t()):
    torch.compiler.reset()
    x = DTensor.from_local(local, made().device_mesh, [Shard(0)], shape=(4, 6), stride=(6, 1))
    torch.testing.assert_close(f(x).to_local(), local @ local.t())
"""


def run(script, seed, *arguments, **variables):
    return run_code(BEGIN + script, *arguments, seed=seed, **variables)


@pytest.mark.parametrize(("script", "order"), [(DTENSOR, "mesh first"), (DTENSOR, "file first"), (MESH, "")])
def test_what_is_loaded_is_on_the_mesh_of_this_process(script, order, tmp_path):
    for seed in (1, 2):
        run(script, seed, str(tmp_path / "saved"), order)


def test_a_graph_of_another_process_gives_gradients_on_the_mesh_of_this_one(tmp_path):
    require("meshes in graphs")
    file, cache = str(tmp_path / "ran"), own_cache(str(tmp_path / "cache"))
    hits = [run(GRAPH, seed, file, **cache).split() for seed in (1, 2)]
    assert hits == [["0"], ["1"]]


def test_a_graph_of_another_process_is_not_used_with_other_rules(tmp_path):
    require("meshes in graphs")
    file, cache = str(tmp_path / "none"), own_cache(str(tmp_path / "cache"))
    lines = ["i j -> i j", "I j -> I j", "i j -> i j", "", ""]  # inductor has nothing to compile of them
    hits = [run(RULES, 1, file, line, **cache).strip() for line in lines]
    assert hits == ["0", "0", "1", "0", "0"]


def test_a_graph_is_not_used_for_parts_that_lie_in_memory_otherwise(tmp_path):
    run(STRIDES, 1, str(tmp_path / "none"), **own_cache(str(tmp_path / "cache")))


def test_regions_that_make_dtensors_are_kept_for_other_processes(tmp_path):
    require("meshes in graphs")
    file, cache = str(tmp_path / "none"), own_cache(str(tmp_path / "cache"))
    made = [("1", 1), ("1", 2), ("1x1", 1), ("1x1", 2)]
    seen = [run(MADE_INSIDE, seed, file, shape, **cache) for shape, seed in made]
    assert [counts.split() for counts in seen] == [["0", "0"], ["1", "0"], ["0", "0"], ["1", "0"]]


def test_graphs_that_may_need_a_group_of_their_own_stay_with_their_process(monkeypatch):
    """Those of meshes of several axes, unless only one group is over several, and that of all ranks."""
    from torchshard import init_device_mesh, zeros
    from torchshard.tensor.regions import caching

    with fake_ranks(8):
        shapes, keys = [(8,), (4,), (2, 4), (2, 2), (2, 2, 2)], []
        for process in ("this", "another"):
            monkeypatch.setattr(caching, "_this_process", process)
            made = [zeros(8, 8, device_mesh=init_device_mesh("cpu", shape)) for shape in shapes]
            keys.append([x._stable_hash_for_caching() for x in made])
    assert [here == there for here, there in zip(*keys, strict=True)] == [True, True, True, False, False]
