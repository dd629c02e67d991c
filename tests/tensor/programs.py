"""The same small program run on plain tensors and on DTensors: both do the same, or both raise the same.

A program is a function of `put`, which makes a tensor of the given values: a plain one, or a DTensor in some placements.
What it returns (tensors, numbers, and lists, tuples and dicts of them) is compared.
"""

import importlib
import math
import warnings

import torch

VALUES = torch.tensor([[1.0, -2, 3], [4, 5, -6], [7, 8, 9], [10, -11, 12], [13, 14, 15]])  # uneven on 2 and 4 ranks


def placements(text, ndim):
    """Placements written as "S0 P": one an axis; a dim that the tensor lacks is replicated."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def one(word):
        if word == "R" or (word[0] == "S" and int(word[1:]) >= ndim):
            return Replicate()
        return Shard(int(word[1:])) if word[0] == "S" else Partial({"P": "sum", "A": "avg", "M": "max"}[word])

    return [one(word) for word in text.split()]


def put(values, mesh, text):
    """A leaf DTensor of these values; the terms of a Partial one differ from rank to rank."""
    from torch.distributed.tensor import Replicate

    from torchshard import DTensor

    wanted = placements(text, values.ndim)
    if values.dtype is torch.bool or ("A" in text and not values.is_floating_point()):  # these have no such terms
        wanted = [Replicate() if p.is_partial() else p for p in wanted]
    term, seen = values.detach().clone(), 0
    for axis, p in enumerate(wanted):
        if p.is_partial():
            k, parts = mesh.get_local_rank(axis), mesh.size(axis)
            noise = torch.arange(values.numel()).view(values.shape).add(seen + 1).to(values.dtype)
            noise = torch.empty_like(term).copy_(noise)  # all terms lie in memory in one order
            if p.reduce_op == "max":
                term = term if k == 0 else term - noise
            else:
                term = noise if k else term * (parts if p.reduce_op == "avg" else 1) - noise * (parts - 1)
            seen = seen * parts + k + 1
    kept = [p if p.is_partial() else Replicate() for p in wanted]
    return DTensor.from_local(term, mesh, kept).redistribute(placements=wanted).detach()


def play(rank, world, module, table, mesh_shape, texts):
    """On every rank: run every program of a table of `module`.

    Returns:
        Number of runs, complaints, and how many of the programs raise on plain tensors.
    """
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", mesh_shape)
    done, bad, raised = 0, [], 0
    for name, program in getattr(importlib.import_module(module), table).items():
        want = outcome(program, lambda t: t.clone())
        raised += isinstance(want, Exception)
        for text in texts:
            got = outcome(program, lambda t, text=text: put(t, mesh, text))
            complaint = differ(got, want)
            done += 1
            if complaint:
                bad.append(f"{name} [{text}]: {complaint}")
    return done, bad, raised


def outcome(program, make):
    """What a program returns, in plain values; or the class of what it raises."""
    torch.manual_seed(11)
    try:
        return plain(program(make))
    except Exception as error:
        return error


def plain(x):
    """DTensors as full tensors, in any nesting."""
    from torchshard import DTensor

    if isinstance(x, torch.Tensor):
        return (x.full_tensor() if isinstance(x, DTensor) else x).detach()
    if isinstance(x, (list, tuple)):
        return [plain(item) for item in x]
    return {k: plain(v) for k, v in x.items()} if isinstance(x, dict) else x


def differ(got, want):
    """A sentence about the first difference; None where there is none."""
    if isinstance(want, Exception) or isinstance(got, Exception):
        same = isinstance(got, Exception) and type(got) is type(want)
        return None if same else f"{type(got).__name__} {got} for {type(want).__name__} {want}"
    if isinstance(want, torch.Tensor):
        try:
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if want.dtype in (torch.float16, torch.bfloat16) else {}
            torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
        except (AssertionError, TypeError) as error:
            return f"{got} for {want}: {error}"
        return None
    if isinstance(want, list) and isinstance(got, list) and len(got) == len(want):
        return next((c for c in map(differ, got, want) if c), None)
    if isinstance(want, dict) and isinstance(got, dict) and got.keys() == want.keys():
        return next((c for c in (differ(got[k], want[k]) for k in want) if c), None)
    if isinstance(want, float) and isinstance(got, float):
        return None if math.isclose(got, want, rel_tol=1e-5) else f"{got} for {want}"
    return None if type(got) is type(want) and got == want else f"{got!r} for {want!r}"


def program(code, **names):
    """A program written as statements, separated by ";": `x` is a tensor of VALUES, and is part of the result."""
    scope = {"torch": torch, "F": torch.nn.functional, "V": VALUES, **names}
    lines = "\n".join("    " + line.strip() for line in code.split(";"))
    exec(f"def run(put):\n    x, y = put(V), None\n{lines}\n    return x, y", scope)
    return scope["run"]


def check(module, table, mesh_shapes=((2,), (2, 2)), texts=None, raises=0):
    """Assert that no rank complains, on these meshes, and that `raises` programs are there to raise."""
    from tests.ranks import run_ranks

    for shape in mesh_shapes:
        told = texts or {1: ("R", "S0", "S1", "P"), 2: ("S0 S0", "P S1")}[len(shape)]
        for done, bad, raised in run_ranks(math.prod(shape), play, module, table, shape, told):
            assert not bad, f"{len(bad)} of {done}:\n" + "\n".join(bad[:8])
            assert done
            assert raised == raises
