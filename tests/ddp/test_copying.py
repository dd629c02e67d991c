"""Parameters of lower precision that are filled while a forward runs: whoever uses one waits for it."""

import copy
import os
import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.ranks import run_ranks
from torchshard import _torch
from torchshard.ddp import copying
from torchshard.ddp.buckets.mixed import MixedPrecision

BFLOAT = _MixedPrecision(param_dtype=torch.bfloat16)


class Late:
    """Copies when it is waited for, not before; until then there are NaNs."""

    def __init__(self):
        self.waited = []

    def __call__(self, targets, sources):
        for t in targets:
            t.fill_(torch.nan)

        def wait():
            self.waited.append(len(targets))
            copying._copy(targets, sources)

        return wait


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        memory = torch.frombuffer(bytearray(weight.untyped_storage()), dtype=weight.dtype)
        return x * 2 * memory.view(weight.shape)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Everywhere(nn.Module):
    """Parameters used in other places than the forward of the module that has them."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.randn(8))
        self.embedding = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.listed = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(3))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.never = nn.Linear(8, 8)
        self.late = nn.Linear(8, 8)
        self.seen = None

    def forward(self, x):
        assert self.late.weight.dtype is torch.bfloat16
        assert isinstance(self.late.bias, nn.Parameter)
        x = self.embedding(x) * self.own + torch.ops.aten.sum.dim_IntList(self.blocks[2].linear2.weight, [1])
        x, _ = self.attention(x, x, x)
        x = self.scripted(x)
        x, _ = self.recurrent(x)
        x = Doubled.apply(x, self.listed[1]) + torch.stack([*self.listed]).sum(0)
        for block in self.blocks:
            x = block(x)
        copied, pickled = copy.deepcopy(self.late.weight), pickle.loads(pickle.dumps(self.late.bias))
        assert type(copied) is type(pickled) is nn.Parameter
        self.seen = [x, F.linear(x, copied, pickled)]
        return F.linear(self.late(x), self.embedding.weight)


@pytest.fixture
def alone(monkeypatch):
    """Small modules too, and whatever was compiled by other tests."""
    monkeypatch.setattr(copying, "_LEAST", 0)
    monkeypatch.setattr("torch._dynamo.eval_frame.cached_backends", {})


@pytest.fixture
def late(monkeypatch, alone):
    copier = Late()
    monkeypatch.setattr(copying, "copier_of", lambda device: copier)
    return copier


def _begun(module):
    precision = MixedPrecision(BFLOAT, module, ())
    precision.lower(gradients=True)
    precision.fill(beside_forward=True)
    return precision


@pytest.mark.parametrize("grad", [True, False])
def test_every_use_waits(late, grad):
    torch.manual_seed(0)
    module, x = Everywhere().eval(), torch.randint(10, (3, 4))
    reference = copy.deepcopy(module).bfloat16()
    with nullcontext() if grad else torch.inference_mode():
        wanted = reference(x)
        precision = _begun(module)
        assert not late.waited
        out = module(x)
        used = len(late.waited)
        precision.settle()
    assert torch.equal(out, wanted)
    assert all(map(torch.equal, module.seen, reference.seen))
    assert 1 < used <= len(late.waited)
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert not any("_piece" in vars(p) for p in module.parameters())
    assert not any(m._forward_pre_hooks for m in module.modules())
    if grad:
        out.sum().backward()
        reference(x).sum().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            if q.is_leaf:  # conversion of a scripted module makes others
                assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)


@torch.jit.script
def _scripted(x, weight):
    return x @ weight


class Own(torch.Tensor):
    """Calls operators of torch for whatever classes, none of which is asked."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


# What reads the parameter of a child whose forward is not called, unseen by __torch_function__.
UNSEEN = {
    "a scripted function": lambda m, x: _scripted(x, m[0].weight),
    "func.grad": lambda m, x: torch.func.grad(lambda w: (x @ w).square().sum())(m[0].weight),
    "func.vjp": lambda m, x: torch.func.vjp(lambda w: x @ w, m[0].weight)[0],
    "func.functionalize": lambda m, x: torch.func.functionalize(lambda w: x @ w)(m[0].weight),
    "functional_call": lambda m, x: torch.func.functional_call(m, {"1.bias": m[0].bias}, x),
    "dlpack": lambda m, x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(m[0].weight)),
    "another class": lambda m, x: torch.matmul(x.as_subclass(Own), m[0].weight).as_subclass(torch.Tensor),
    "all parameters": lambda m, x: _scripted(x, dict(m.named_parameters())["1.weight"]),
    "the table": lambda m, x: _scripted(x, next(iter(m[0]._parameters.values()))),
    "a parameter in its place": lambda m, x: _replaced(m[0], x),
    "padding": lambda m, x: m[2](x[None], src_key_padding_mask=torch.tensor([[False, False, True]])),
}


def _replaced(module, x):
    module.weight = nn.Parameter(module.weight.detach() * 2)
    return _scripted(x, module.weight)


@pytest.mark.parametrize("use", UNSEEN)
def test_uses_that_no_class_sees_wait(late, use):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), encoder).eval(), torch.randn(3, 8).bfloat16()
    reference = copy.deepcopy(module).bfloat16()
    if use == "functional_call":
        module, reference = module[:2], reference[:2]
    with torch.no_grad():
        precision = _begun(module)
        found = UNSEEN[use](module, x)
        copied = copy.deepcopy(module)
        precision.settle()
        assert torch.equal(found, UNSEEN[use](reference, x))
    assert all(map(torch.equal, copied.parameters(), module.parameters()))
    assert {type(m._parameters) for m in [*module.modules(), *copied.modules()]} == {dict}


def test_parts_wait_for_their_own(late):
    module = nn.Sequential(*[nn.Linear(16, 16) for _ in range(16)])
    precision = _begun(module)
    waited = []
    for layer in module:
        layer.register_forward_hook(lambda *_: waited.append(sum(late.waited)))
    module(torch.randn(2, 16, dtype=torch.bfloat16))
    precision.settle()
    assert waited == [2 * (2 + i // 2 * 2) for i in range(16)]  # pieces of two layers, of two parameters each


def test_threads_of_a_forward_wait_each(alone, monkeypatch):
    """All of them that meet a parameter before its values are there."""
    go, met, found = threading.Event(), threading.Barrier(4, timeout=60), []

    def slowly(targets, sources):
        torch._foreach_zero_(targets)
        assert go.wait(60)
        _torch.copy_all(targets, sources)

    monkeypatch.setattr(copying, "_copy", slowly)
    monkeypatch.setattr(copying, "copier_of", lambda device: copying._copy_in_thread)
    module = nn.Linear(8, 8)
    wanted = module.weight.detach().bfloat16()
    precision = _begun(module)

    def use():
        met.wait()
        found.append(module.weight.detach().clone())

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    met.wait()
    threads[0].join(0.2)
    assert not found
    go.set()
    for thread in threads:
        thread.join(60)
    precision.settle()
    assert len(found) == 3
    assert all(torch.equal(weight, wanted) for weight in found)


def test_a_forward_that_fails(late):
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9), nn.Linear(8, 8))
    before = [p.detach().clone() for p in module.parameters()]
    precision = _begun(module)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.randn(2, 8, dtype=torch.bfloat16))
    precision.settle()
    precision.restore()
    assert all(map(torch.equal, module.parameters(), before))
    assert {type(p) for p in module.parameters()} == {nn.Parameter}


def test_a_copy_that_fails(monkeypatch, alone):
    def fail(targets, sources):
        raise MemoryError("no more")

    monkeypatch.setattr(copying, "copier_of", lambda device: copying._copy_in_thread)
    monkeypatch.setattr(copying, "_copy", fail)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    precision = _begun(module)
    with pytest.raises(MemoryError, match="no more"):
        module(torch.randn(2, 8, dtype=torch.bfloat16))
    with pytest.raises(MemoryError, match="no more"):
        precision.settle()
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert not module._forward_pre_hooks


def test_filled_at_once_where_others_look(late):
    module = nn.Linear(8, 8)
    with FlopCounterMode(display=False):
        assert type(_begun(module).settle() or module.weight) is nn.Parameter
    assert not late.waited
    with _torch.without_fast_paths():
        _begun(nn.Linear(8, 8))
    assert not late.waited
    _begun(nn.Linear(8, 8)).settle()
    assert sum(late.waited) == 2


def test_filled_at_once_where_something_is_compiled():
    script = """
import torch
from torch import nn
from torchshard import _torch

nn.Linear(2, 2)(torch.randn(2)).sum().backward()
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # uses Dynamo to leave itself alone
assert "torch._dynamo" in __import__("sys").modules and not _torch.is_watched()
torch.compile(nn.Linear(2, 2), backend="eager")
assert _torch.is_watched()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_compiled_code_that_meets_one_all_the_same(late, monkeypatch):
    """As after torch.compiler.reset(): Dynamo leaves it to Python."""
    monkeypatch.setattr(_torch, "is_watched", lambda: False)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    reference, x = copy.deepcopy(module).bfloat16(), torch.randn(2, 8, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: F.linear(x, module[1].weight) @ module[0].weight, backend="eager")
    for _ in range(3):
        precision = _begun(module)
        assert torch.equal(compiled(x), F.linear(x, reference[1].weight) @ reference[0].weight)
        precision.settle()
        precision.restore()


def test_who_copies(monkeypatch):
    assert 1 <= copying._cores() <= os.cpu_count()
    monkeypatch.setattr(copying, "_cores", lambda: 8)
    cpu, before = torch.device("cpu"), torch.get_num_threads()
    try:
        for threads, ranks, found in ((1, None, True), (8, None, False), (1, "7", True), (2, "4", False)):
            torch.set_num_threads(threads)
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks) if ranks else monkeypatch.delenv("LOCAL_WORLD_SIZE", False)
            assert (copying.copier_of(cpu) is not None) == found
    finally:
        torch.set_num_threads(before)
    assert copying.copier_of(torch.device("meta")) is None


def test_small_modules_are_filled_at_once():
    assert not copying.Filling(nn.Linear(8, 8), [*nn.Linear(8, 8).parameters()])._pieces


class Stream(TorchDispatchMode):
    """A stream on which nothing happens before somebody waits for it; like torch.Stream as far as it is used."""

    current = None

    def __init__(self, device=None):
        super().__init__()
        self.work = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._foreach_copy_, torch.ops.aten.copy_):
            self.work.append(lambda: func(*args, **kwargs or {}))
            return args[0] if func.overloadpacket is torch.ops.aten.copy_ else None
        return func(*args, **kwargs or {})

    def wait_stream(self, other):
        assert other is Stream.current
        self.work.append(lambda: None)

    def record_event(self):
        done = len(self.work)
        return self, done

    def wait_event(self, event):
        stream, done = event
        while stream.work[:done] and done > stream.finished:
            stream.work[stream.finished]()
            stream.finished += 1

    finished = 0


def test_streams(monkeypatch, alone):
    """What is said to streams, on one that is late. No accelerator runs it."""
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(Stream, "current", Stream())
    copier = copying._Stream(torch.device("cpu"))
    monkeypatch.setattr(copying, "copier_of", lambda device: copier)
    torch.manual_seed(0)
    module, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)]), torch.randn(3, 8, dtype=torch.bfloat16)
    reference = copy.deepcopy(module).bfloat16()
    for _ in range(2):
        precision = _begun(module)
        begun = copier._stream.finished
        module[0](x)
        assert begun < copier._stream.finished < len(copier._stream.work)
        assert torch.equal(module(x), reference(x))
        precision.settle()
        precision.restore()
        assert copier._stream.finished == len(copier._stream.work)


def _steps(rank, world):
    from torchshard.ddp import DistributedDataParallel

    copying._LEAST = 0
    threads, grads = set(), {}

    def noted(targets, sources):
        threads.add(threading.current_thread().name)
        _torch.copy_all(targets, sources)

    copying._copy = noted
    for how, copier in (("at once", None), ("beside", copying._copy_in_thread)):
        copying.copier_of = lambda device, copier=copier: copier
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0))
        model = DistributedDataParallel(module, mixed_precision=_MixedPrecision(torch.bfloat16, torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            with model.no_sync() if step == 1 else nullcontext():
                model(torch.randint(10, (3, 4))).sum().backward()
                if step == 4:
                    with pytest.raises(IndexError):
                        model(torch.full((3, 4), 10))
            if step != 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
        with torch.no_grad():
            model(torch.randint(10, (3, 4)))
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        grads[how] = [p.detach() for p in model.parameters()]
    assert all(map(torch.equal, *grads.values()))
    assert {name.startswith("torchshard copies") for name in threads} == {True}
    assert all(map(torch.equal, copy.deepcopy(model).parameters(), model.parameters()))


def test_steps_are_the_same():
    run_ranks(2, _steps)


def _forked(rank, world):
    copying._LEAST = 0
    copying.copier_of = lambda device: copying._copy_in_thread
    module = nn.Linear(8, 8)
    _begun(module).settle()
    if not (child := os.fork()):
        precision = _begun(nn.Linear(8, 8))
        precision.settle()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_process_has_a_thread_of_its_own():
    run_ranks(1, _forked)
