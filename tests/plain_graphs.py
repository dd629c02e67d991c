"""Graphs of compiled functions as a backend is given them, and what may be in one that costs nothing to run."""

import pathlib

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import torchshard

PACKAGE = pathlib.Path(torchshard.__file__).parent
KINDS = {"aten", "prims", "inductor", "_c10d_functional"}  # c10d's own operators, and torchshard's, are none


def recording(graphs, **options):
    """A backend that runs what AOTAutograd makes, node by node, and keeps the graphs: forward, then backward."""

    def keep(module, _inputs):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep, **options)


def assert_plain(graph):
    """Every value is a plain tensor or a number, every call an operator on those; returns the names of the calls."""
    names = []
    for node in graph.nodes:
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            assert not isinstance(value, torch.Tensor) or type(value) is torch._subclasses.FakeTensor, (node, value)
        assert node.op in ("placeholder", "call_function", "output"), node.format_node()
        if node.op == "call_function" and node.target.__module__ != "_operator":
            assert isinstance(node.target, torch._ops.OpOverload), node.format_node()
            assert node.target.namespace in KINDS, node.format_node()
            names.append(str(node.target))
    return names


def collectives(graph):
    """The collectives of a graph that assert_plain has passed, in order; waiting for them is left out."""
    return [name.split(".")[1] for name in assert_plain(graph) if "c10d" in name and "wait" not in name]


def compiled_frames(monkeypatch):
    """The code objects that Dynamo compiles from now on, as (whether of the package, name)."""
    found, compile_frame = [], torch._dynamo.convert_frame._compile

    def compiling(code, *args, **keywords):
        found.append((PACKAGE in pathlib.Path(code.co_filename).parents, code.co_name))
        return compile_frame(code, *args, **keywords)

    monkeypatch.setattr(torch._dynamo.convert_frame, "_compile", compiling)
    return found
