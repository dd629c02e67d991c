"""A DTensor as an object of torch: .data and .grad, copies and files, conversions, hooks, checkpointing, transforms."""

import copy
import functools
import io
import pickle
import weakref

import pytest
import torch
from torch.utils import checkpoint

from tests.older import known
from tests.tensor.programs import check, program


def save_and_load(x, **options):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        return 2 * a * grad


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.mark_dirty(a)
        return a.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def selective():
    def policy(context, op, *args, **kwargs):
        saved = op is torch.ops.aten.mm.default
        return checkpoint.CheckpointPolicy.MUST_SAVE if saved else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)


def rows(x, dim):
    """A DTensor moved to pieces of a dim."""
    from torchshard import Shard

    return x if type(x) is torch.Tensor else x.redistribute(placements=[Shard(dim)] * x.device_mesh.ndim)


def random_block(a):
    return F.dropout((a * a).exp().sigmoid(), 0.5)


F = torch.nn.functional

_LEAVES = """
    x.requires_grad_(); d = x.detach(); y = d, d.requires_grad, d.is_leaf, x.data, x.data.requires_grad
    x.requires_grad = True; z = x * 2; y = x.is_leaf, z.is_leaf, z.requires_grad, x.grad is None, z.grad_fn.name()
    p = torch.nn.Parameter(x); p.data = put(V) * 2; (p * p).sum().backward(); y = p.grad, p.is_leaf, p.requires_grad
    p = torch.nn.Parameter(x); p.data.zero_(); p.data[:, 0] = 1.0; y = p
    x.requires_grad_(); x.grad = put(V) * 2; (x * 3).sum().backward(); y = x.grad
    x.requires_grad_(); (x * 3).sum().backward(); a = x.grad; (x * 4).sum().backward(); y = a, a is x.grad
    x.requires_grad_(); (x * 3).sum().backward(); x.grad = None; (x * 3).sum().backward(); y = x.grad
    x.requires_grad_(); z = x * 2; z.retain_grad(); (z * z).sum().backward(); y = z.grad, z.retains_grad
    x.requires_grad_(); z = x * 2; z.sum().backward(); y = z.grad is None
    x.requires_grad_(); g, = torch.autograd.grad((x**3).sum(), x, create_graph=True); y = torch.autograd.grad(g.sum(), x)
    w = put(V).requires_grad_(); x.requires_grad_(); (x * w).sum().backward(inputs=[x]); y = x.grad, w.grad is None
    x.requires_grad_(); (x * 2).backward(put(V)); y = x.grad
    x.requires_grad_(); (x * 2).backward()
    o = torch.optim.SGD([x.requires_grad_()], 0.1); (x * 2).sum().backward(); o.zero_grad(False); y = x.grad * 1; o.zero_grad(); y = y, x.grad is None
    m = torch.nn.Linear(3, 2, False); m.weight = torch.nn.Parameter(x[:2] * 1); m(put(V)).sum().backward(); m.zero_grad(False); y = m.weight.grad * 1; m.zero_grad(); y = y, m.weight.grad is None
    y = torch.autograd.gradcheck(lambda a: a * a, (x.double().requires_grad_(),))
    y = torch.autograd.functional.hvp(lambda a: (a**3).sum(), x, x), torch.autograd.functional.jacobian(lambda a: (a**3).sum(0), x)
    x.requires_grad_(); Square.apply(x).sum().backward(); y = x.grad
    z = Doubled.apply(x.requires_grad_() * 1); z.sum().backward(); y = z, x.grad
    x.tag = 3; y = x.tag, x.requires_grad_().tag, weakref.ref(x)() is x
    x.share_memory_(); y = x.is_shared(), x + 1
"""
_COPIES = """
    x.requires_grad_(); (x * 2).sum().backward(); z = copy.deepcopy(x); z.data.add_(1); y = z, z.requires_grad, z.is_leaf, z.grad, z.grad is x.grad
    copy.deepcopy(x.requires_grad_() * 2)
    p = torch.nn.Parameter(x); p.grad = put(V); q = copy.deepcopy(p); y = q, isinstance(q, torch.nn.Parameter), q.grad
    a, b = copy.deepcopy([x, x]); y = a is b, a is not x
    a, b = copy.deepcopy([x, x.t()]); a.add_(1); y = a, b, x
    a, b = copy.deepcopy([x, x[1:4]]); a.add_(1); y = a * 1, b * 1; b.mul_(2); y = y, a, b, x
    b, a = copy.deepcopy([x[1:4], x]); b.mul_(2); y = a * 1, b * 1; a.add_(1); y = y, a, b, x
    v = x.t()[1:]; x.add_(1); a, b, c, d = copy.deepcopy([v[:, 1:4], x[1:4], x.view(-1)[2:9], v]); y = a * 1, b * 1, c * 1; c.mul_(2); y = y, a * 1, b * 1, d * 1; a.add_(1); y = y, b, c, d, x
    x.tag = [3]; z = copy.deepcopy(x); y = z.tag, z.tag is not x.tag, copy.copy(x).tag is x.tag
    z = copy.copy(x); z.add_(1); y = z, z.requires_grad
    z = copy.copy(x.requires_grad_()); y = z, z.requires_grad, z.is_leaf
    z = copy.deepcopy(x[1:4]); z.add_(1); y = z, copy.deepcopy(x.t()), copy.copy(x[1:4]) * 2
    z = x[1:4]; x.add_(1); y = copy.deepcopy(z), pickle.loads(pickle.dumps(z)) + 1, save_and_load(z)
    z = pickle.loads(pickle.dumps(x.requires_grad_())); y = z, z.requires_grad
    y = save_and_load({"a": x, "b": [x * 2]}), save_and_load(x, weights_only=False), save_and_load(x, map_location="cpu")
    z = save_and_load(torch.nn.Parameter(x)); y = z, isinstance(z, torch.nn.Parameter), z.requires_grad
    z = save_and_load(x); y = z + x, torch.equal(z, x)
"""
_CONVERSIONS = """
    y = x.to(torch.float64), x.double(), x.half(), x.bfloat16(), x.type(torch.float64), x.type_as(x.double())
    y = x.float() is x, x.to(x) is x, x.cpu() is x, x.to("cpu") is x, x.to("cpu", copy=True) is x
    y = x.to("cpu", torch.float64), x.to(put(V).double()), x.type("torch.DoubleTensor"), x.type()
    z = x.to("meta"); y = tuple(z.shape), z.device.type, z.dtype
    y = x.contiguous(), x.t().contiguous(), x.t().is_contiguous(), x.long().float(), (x * 1.5).int()
    y = x.new_zeros(2, 2), x.new_tensor([1.0, 2.0]), x.new_ones(5, 3), x.new_full((2,), 3.0), tuple(x.new_empty(3).shape)
    y = torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), torch.zeros_like(x, dtype=torch.int64)
    y = torch.asarray(x), torch.as_tensor(x)
    z = torch.complex(x, x); y = z, z.real, z.imag, z.conj() * 1, z.abs(), torch.view_as_real(z), z.conj().imag * 1
    x.requires_grad_(); x.double().sum().backward(); y = x.grad, x.grad.dtype
    x = x.requires_grad_() * 1; w = put(torch.ones(3, 3)).requires_grad_(); z = torch.autocast("cpu", torch.bfloat16); z.__enter__(); a = x @ w; b = F.linear(x, w); c = F.softmax(a, -1); z.__exit__(None, None, None); (a.float() + b).sum().backward(); y = a.dtype, a.float(), b.dtype, c.dtype, w.grad.dtype
"""
_HOOKS = """
    x.requires_grad_(); x.register_hook(lambda g: g * 2); z = x * 3; z.register_hook(lambda g: g + 1); z.sum().backward(); y = x.grad
    x.requires_grad_(); h = x.register_hook(lambda g: g * 2); h.remove(); (x * 3).sum().backward(); y = x.grad
    y = []; p = torch.nn.Parameter(x); p.register_post_accumulate_grad_hook(lambda q: y.append(q.grad * 1)); (p * 2).sum().backward()
    y = []; z = x.requires_grad_() * 3; z.grad_fn.register_hook(lambda i, o: y.append([g for g in i if g is not None])); z.sum().backward()
    x.requires_grad_(); z = x * 1; z.eq_(2.0); (torch.sgn(x).sum() + torch.copysign(V.new_tensor(1.0), x).sum() + z.sum()).backward(); y = x.grad, type(x.grad) is type(x)
    x.requires_grad_(); torch.normal(rows(x, 1), 1.0).sum().backward(); y = x.grad * 1, type(x.grad) is type(x); (x * 3).sum().backward(); y = y, x.grad
    x.requires_grad_(); (g,) = torch.autograd.grad(F.max_pool1d(x, 2).square().sum(), x, create_graph=True); (h,) = torch.autograd.grad(torch.sgn(g).sum(), x); y = g, h, type(h) is type(x)
    m = torch.nn.Linear(3, 2, False); m.weight = torch.nn.Parameter(x[:2] * 1); torch.sgn(m.weight).sum().backward(); m.double(); y = m.weight, m.weight.grad * 1
    x.requires_grad_(); rows(x * x, 1).sum().backward(torch.tensor(2.0)); (x * 1).sum().backward(torch.tensor(3.0)); y = x.grad, type(x.grad) is type(x)
    t = torch.zeros(()); x.requires_grad_(); t += rows(x * x, 0).sum(); t.add_(x.mean(), alpha=2); t += x.mean(); t.backward(); y = t, x.grad, type(x.grad) is type(x)
    t = torch.zeros(()); x.requires_grad_(); t += x.sum(); (g,) = torch.autograd.grad((t * t * x).sum(), x, create_graph=True); g.square().sum().backward(); y = g, x.grad, type(x.grad) is type(x)
    m = torch.nn.Linear(3, 2, False); m.weight = torch.nn.Parameter(x[:2] * 1); y = []; m.register_forward_pre_hook(lambda m, a: (a[0] * 2,)); m.register_forward_hook(lambda m, a, o: o + 1); m.register_full_backward_hook(lambda m, i, o: y.append(o[0])); m(put(V).requires_grad_()).sum().backward(); y = y, m.weight.grad
    m = torch.nn.Linear(3, 2, False); m.weight = torch.nn.Parameter(x[:2] * 1); m.register_full_backward_pre_hook(lambda m, o: (o[0] * 2,)); m(put(V)).sum().backward(); y = m.weight.grad
    x.requires_grad_(); h = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t); h.__enter__(); z = (x * x).sum(); h.__exit__(None, None, None); z.backward(); y = x.grad
    x.requires_grad_(); h = torch.autograd.graph.save_on_cpu(); h.__enter__(); z = (x * x).exp().sum(); h.__exit__(None, None, None); z.backward(); y = x.grad
    checkpoint.checkpoint(random_block, x.requires_grad_(), use_reentrant=True).sum().backward(); y = x.grad, torch.rand(2)
    checkpoint.checkpoint(random_block, x.requires_grad_(), use_reentrant=False).sum().backward(); y = x.grad, torch.rand(2)
    checkpoint.checkpoint(torch.sigmoid, x.requires_grad_(), use_reentrant=False, preserve_rng_state=False).sum().backward(); y = x.grad
    m = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Dropout(0.2)); checkpoint.checkpoint_sequential(m, 2, x.requires_grad_(), use_reentrant=False).sum().backward(); y = x.grad, torch.rand(2)
    w = put(torch.ones(3, 3)).requires_grad_(); checkpoint.checkpoint(lambda a, b: (a @ b).sigmoid().exp(), x.requires_grad_(), w, use_reentrant=False, context_fn=selective()).sum().backward(); y = x.grad, w.grad
"""
if known("gradients of nextafter"):
    _HOOKS += """
    x.requires_grad_(); torch.nextafter(put(V), x).sum().backward(); y = x.grad, type(x.grad) is type(x)
"""
_TRANSFORMS = """
    y = torch.func.grad(lambda a: (a * a).sum())(x)
    y, f = torch.func.vjp(lambda a: a * a, x); y = y, f(y)
    y = torch.func.jvp(lambda a: a * a, (x,), (x,))
    y = torch.func.jvp(lambda a: (a.conj() * 2, a.conj().imag * 2, a.conj().abs()), (torch.complex(x, x + 1),), (torch.complex(x, x * 2),))
    y = torch.func.jacrev(lambda a: (a * a).sum(0))(x), torch.func.jacfwd(lambda a: (a * a).sum(0))(x)
    w = put(V[:2]); b = put(V[0, :2]); y = torch.func.jvp(lambda a: a @ w.t(), (x,), (x * 2,)), torch.func.jvp(lambda a: F.linear(a, w, b).relu(), (x,), (x + 1,))
    w = put(V[:2]); b = put(V[0, :2]); y = torch.func.jvp(lambda a, c: F.linear(a, c, b).sigmoid(), (x, w), (x, w * 3)), torch.func.jvp(lambda c: F.linear(x, w, c).square(), (b,), (b * 2,))
    w = put(V[:2] / 9); b = put(V[0, :2]); r = put(V[1]); f = lambda a: F.linear(a.tanh(), w, b).square(); y = torch.func.jacfwd(f)(r), torch.func.hessian(lambda a: f(a).sum())(r), torch.func.jacrev(f)(r)
    w = put(V[:2]); A = torch.autograd.forward_ad; l = A.dual_level(); l.__enter__(); d = A.make_dual(x, x * 2); a = A.unpack_dual(d @ w.t() + w.sum(1)); u = A.unpack_dual(d); l.__exit__(None, None, None); y = list(a), list(u)
    w = put(V[:2]); A = torch.autograd.forward_ad; l = A.dual_level(); l.__enter__(); d = A.make_dual(x, x * 2); a = A.unpack_dual(torch.cat([d, x]) - x.sum(0)); c = A.unpack_dual(torch.where(x > 3, d, x) * x.mean()); l.__exit__(None, None, None); y = list(a), list(c)
    w = x[:2] * 1; m = torch.nn.Linear(3, 2, False); y = torch.func.functional_call(m, {"weight": w}, (x,))
    w = x[:2] * 1; m = torch.nn.Linear(3, 2, False); y = torch.func.grad(lambda w: torch.func.functional_call(m, {"weight": w}, (x,)).square().sum())(w)
    y = torch.vmap(lambda a: a * 2)(x), torch.vmap(lambda a: a.sum())(x), torch.vmap(torch.dot)(x, x)
    y = torch.func.functionalize(lambda a: a.clone().add_(1))(x)
"""


def _table(text):
    names = {"copy": copy, "pickle": pickle, "weakref": weakref, "checkpoint": checkpoint}
    mine = {f.__name__: f for f in (save_and_load, selective, random_block, rows, Square, Doubled)}
    return {line.strip(): program(line, **names, **mine) for line in text.strip().splitlines()}


TABLES = {"LEAVES": _LEAVES, "COPIES": _COPIES, "CONVERSIONS": _CONVERSIONS, "HOOKS": _HOOKS, "TRANSFORMS": _TRANSFORMS}
globals().update({name: _table(text) for name, text in TABLES.items()})


@pytest.mark.parametrize("table", TABLES)
def test_as_in_eager_torch(table):
    raises = table in ("LEAVES", "COPIES")  # one each
    check(__name__, table, mesh_shapes=((2,),), raises=raises)
    check(__name__, table, mesh_shapes=((2, 2),), texts=("P S1",), raises=raises)
