"""What holds for the package as a whole: who touches torch's private names, what loads torch, sizes, docstrings.

Which room imports which is checked by import-linter (`make check`).
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.older import require

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torchshard"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]
BORDER = PACKAGE / "_torch"

# What never imports torch on its own: rooms, and single modules.
WITHOUT_TORCH = ("layout", "checkpoint", "cli", "buckets", "keys", "timeline", "simulation", "errors")

LONGEST = 400

TOLERATED = {
    "_version": "of a tensor: explained in torch's notes on autograd, and there is no other name for it",
    "_distribute_module_applied": "of a module: a mark shared with torch's distribute_module, so that only one runs",
    "_ddp_params_and_buffers_to_ignore": "of a module: a mark that users of torch's wrapper leave",
    "_placed_parts": "of a module: layouts of its parameters, a mark that local_parameters leaves for placed_parameters",
    "_torch_owner": "of a module: what lends its parameters, a mark that torch_parameters leaves for fully_shard",
    "_fields": "of a named tuple: documented by Python",
    "_replace": "of a named tuple: documented by Python",
    "_fp_param": "of a parameter: its full data under mixed precision, under torch's name",
    "_mp_param": "of a parameter: its low data under mixed precision, under torch's name",
    "_low_version": "of a parameter: its version when it got its low data, to know whether that was written to",
    "_in_backward_optimizers": "of a parameter: a mark that torch leaves",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def own_names() -> set[str]:
    """Private names that the package itself defines: functions, classes, variables, slots, attributes of self."""
    found = set()
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets
            ):
                found |= {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    return {name for name in found if is_private(name)}


def private_names(module: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of each use of a private name that is not the package's own."""
    from_torch = set()  # what names of torch are called in this module
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    from_torch.add(alias.asname or "torch")
                    if any(map(is_private, alias.name.split("."))):
                        yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                from_torch.add(alias.asname or alias.name)
                if any(map(is_private, f"{node.module}.{alias.name}".split("."))):
                    yield node.lineno, f"from {node.module} import {alias.name}"
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = ast.unparse(node)
            if node.attr not in own | set(TOLERATED) or chain.split(".")[0] in from_torch:
                yield node.lineno, chain
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr")
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value) and name.value not in own | set(TOLERATED):
                yield node.lineno, ast.unparse(node)


def test_only_one_room_touches_private_names_of_torch():
    own = own_names()
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in FILES
        if BORDER not in path.parents
        for line, text in private_names(tree(path), own)
    ]
    assert not found, "private names of torch belong into torchshard/_torch:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._C import Graph",
        "from torch.utils import _pytree as pytree",
        "from torch.distributed.tensor.placement_types import _StridedShard",
        "import torch\ntorch._C._get_graph()",
        "import torch\ntorch.ops._c10d_functional.all_reduce",
        "import torch.distributed as dist\ndist._get_default_group()",
        "from torch import Tensor\nTensor._make_wrapper_subclass()",
        "def f(x):\n    return x._base",
        "def f(x):\n    return getattr(x, '_typed_storage')",
    ],
)
def test_private_names_are_found(code):
    assert list(private_names(ast.parse(code), own={"_spec"}))


@pytest.mark.parametrize(
    "code", ["import torch\ntorch.ops.aten.mm", "def f(x):\n    return x._spec, x._version, x.__class__"]
)
def test_other_names_are_left_alone(code):
    assert not list(private_names(ast.parse(code), own={"_spec"}))


def modules_without_torch() -> list[str]:
    found = []
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if len(parts) > 1 and parts[1] in WITHOUT_TORCH:
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def loaded_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after running some code."""
    code += "\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    return set(run.stdout.split())


def test_arithmetic_files_and_the_command_line_do_without_torch():
    modules = modules_without_torch()
    assert "torchshard.layout.transitions" in modules
    assert "torch" not in loaded_after("\n".join(f"import {name}" for name in modules))


def test_the_package_itself_loads_nothing_until_asked():
    assert not loaded_after("import torchshard; dir(torchshard); torchshard.__version__") & {"torch", "numpy"}
    assert "torch" in loaded_after("import torchshard; torchshard.Shard")
    assert "torch" in loaded_after("import torchshard; torchshard.compiler.explain; torchshard.parallel.local_map")
    assert "torch" not in loaded_after("import torchshard; torchshard.checkpoint; torchshard.keys")


def test_no_public_name_imports_dynamo_or_inductor_as_long_as_nothing_is_compiled():
    rooms = ("", ".tensor", ".parallel", ".parallel.fsdp", ".ddp", ".state_dict", ".checkpoint", ".compiler")
    code = "\n".join(f"from torchshard{room} import *" for room in rooms)
    assert not loaded_after(code) & {"torch._dynamo", "torch._inductor"}


def test_dynamo_imported_later_knows_which_calls_are_one_node():
    require("meshes in graphs")
    code = """
import sys, torchshard, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = torchshard.init_device_mesh("cpu", (2,))

def f(x):
    return torchshard.DTensor.from_local(x, mesh, [torchshard.Shard(0)]) + 1

assert torchshard.DTensor and "torch._dynamo" not in sys.modules
x = torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2))
assert x.shape == (4,) and not any("torchshard" in repr(finder) for finder in sys.meta_path)
"""
    assert "torch._dynamo" in loaded_after(code)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_file_has_a_docstring_and_is_read_in_one_sitting(path):
    docstring = ast.get_docstring(tree(path))
    assert docstring, f"{path} says nothing of itself"
    assert len(path.read_text().splitlines()) <= LONGEST
