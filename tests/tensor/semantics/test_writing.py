"""Writing in place, and through views: what eager torch does, on pieces; also where a view has to be moved."""

import pytest
import torch

from tests.ranks import run_ranks
from tests.tensor.programs import VALUES, check, program, put
from torchshard.errors import UnsupportedOperatorError

_WRITES = """
    x[1:3] = 7.0
    x[:, 1:2] = 7.0
    x[:] = 3.0
    x[2] = 7.0
    x[2, 1] = 7.0
    x[-1] = 7.0
    x[::2] = 7.0
    x[2] = put(torch.ones(3))
    x[1:3] = put(torch.ones(2, 3))
    x[1:3] = put(torch.ones(3))
    x[1:3] = torch.tensor(2.0)
    x[x > 3] = 0.0
    z, w = x.abs().sum(), -x.abs().sum(); z[z > 0] = 5.0; w[w > 0] = 5.0; y = z, w, z[z > 9], w[w < 9], w[w > 9]
    x[x > 3] = (x * 0 + 1)[x > 3]
    x[put(torch.tensor([0, 3]))] = 5.0
    x[:, put(torch.tensor([0, 2]))] = 5.0
    x[put(torch.tensor([0, 1])), put(torch.tensor([0, 1, 2]))] = 5.0
    x[..., put(torch.tensor([0, 2]))] += 1.0
    x[:, put(torch.tensor([1]))] = put(torch.ones(5, 1))
    z = put(torch.ones(2, 5, 3)); z[:, put(torch.tensor([1, 4])), :2] = 3.0; x.add_(z[1])
    x.index_put_((put(torch.tensor([0, 3])),), put(torch.ones(2, 3)))
    x.index_fill_(0, put(torch.tensor([0, 3])), 9.0)
    x.index_add_(0, put(torch.tensor([0, 3])), put(torch.ones(2, 3)))
    x.scatter_(0, put(torch.tensor([[0, 1, 2]])), put(torch.ones(1, 3)))
    x.T.add_(1)
    x.mT.mul_(2)
    x.view(-1).zero_()
    x.reshape(-1).mul_(3)
    x.flatten().add_(3)
    x.unsqueeze(1).add_(3)
    x.permute(1, 0).add_(1)
    x.movedim(0, 1).add_(1)
    x.view(1, 5, 3).add_(1)
    x.view(-1)[:].view(5, 3).add_(1)
    a, b = x.chunk(2, 0); a.add_(1); b.mul_(2)
    a, b = x.chunk(2, 1); a.add_(1); b.mul_(2)
    a, b = x.split([2, 3], 0); a.zero_(); b.mul_(2)
    x.unbind(0)[1].add_(1)
    x.select(0, 2).add_(1); x.select(1, 1).mul_(2)
    x.narrow(1, 0, 2).add_(1)
    x[:].add_(1); x[0:5].mul_(2)
    x.diagonal().add_(1)
    x.t()[1].add_(1)
    x[1:4][1].add_(1)
    x[1:4].t().mul_(3)
    x.detach().mul_(2)
    x.data.mul_(2)
    x.data[1:3].zero_()
    x[1:4].data.mul_(2)
    x.add_(put(V))
    x.mul_(put(V))
    x.copy_(put(V) * 2)
    x.exp_()
    x += 1; x -= put(V); x *= 2; x /= 3; x **= 2
    x.clamp_(min=0)
    x.masked_fill_(x > 3, 0.0)
    x.lerp_(put(V), 0.5)
    x.tril_()
    x.addmm_(put(torch.eye(5)), put(V))
    x[1:4].normal_()
    x[1:4].bernoulli_(0.5)
    torch.add(put(V), put(V), out=x)
    torch.mm(put(torch.eye(5)), put(V), out=x)
    y = put(torch.zeros(3)); torch.sum(x, 0, out=y)
    y = put(torch.zeros(3, 5, 2)); torch.matmul(put(torch.arange(45.0).view(3, 5, 3)), put(V[:3, :2]), out=y)
    y = put(torch.zeros(3, 5)); torch.matmul(put(torch.arange(45.0).view(3, 5, 3)), put(V[0]), out=y)
    y = put(torch.zeros(4, 5, 2)); torch.matmul(put(torch.arange(45.0).view(3, 5, 3)), put(V[:3, :2]), out=y[1:])
    x.copy_(put(torch.zeros(15)))
    x.copy_(x.view(15))
    v = x.view(15); torch.add(v, v, out=v); v.add_(1); x.copy_(v)
    z = x.view(1, 5, 3); z.copy_(x.t())
    z = put(torch.arange(30.0).view(2, 1, 15)); v = z[1].view(15); torch.add(v, v, out=v); z[0].copy_(v); y = z
    torch._foreach_mul_([x.t(), x.unsqueeze(0)], 2.0)
    y = put(torch.tensor([[2, 4, 6], [8, 2, 2]])); y //= 2
    put(torch.tensor([2, 4, 6])).add_(1.5)
    put(torch.ones(3)).add_(x)
"""

_REFUSED = """
    x[:1, :1].expand(5, 1).pow_(2)
    x[:2].expand(3, 2, 3).add_(1)
    put(torch.ones(1)).expand(2).mul_(2)
    put(torch.ones(1, 3)).expand(2, 1, 3).transpose(0, 1).exp_()
    x[:1].expand(3, 3).normal_()
    x.expand(2, 5, 3)[:, ::2].mul_(2)
"""

_READS = """
    x.requires_grad_(); x[:, put(torch.tensor([0, 2, 0]))].square().sum().backward(); y = x.grad
    y = x.t(); x.add_(1)
    y = x[1:4]; x.add_(1)
    v = x[1:4]; x.add_(1); y = v * 2
    v = x[1:4]; w = v.t(); x.add_(1); y = w.sum(), v.tolist(), v.to(torch.float64)
    v = x[1:4]; w = x[2:5]; v.zero_(); y = w + 1
    v = x[1:4]; x.view(-1).add_(1); y = v + v
    v = x[1:4]; v.add_(1); x.mul_(2); y = v + 1
    v = x[1:4]; v.add_(1); v.add_(1); x.mul_(2); v.t().add_(1); y = v, v[0]
    v = x[1:4]; w = v[:, 1:]; w.add_(1); x.add_(1); y = w + v[:, 1:]
    y = x[1:4].clone(); x.zero_()
    v = x[1:4]; x.add_(1); y = v.detach(), v.data, torch.cat([v, v])
    v = x.view(-1)[2:9]; x.add_(1); y = v + 1; v.zero_()
    y = x.data = put(V) * 3; y.add_(1)
    v = x.t(); x.data = put(V) * 3; y = v + 1
    v = x[1:3]; x.data.mul_(2); y = v.sum(), v + 1
    v = x.view(-1); x.data.mul_(2); v[0] = 5.0; y = v * 2
    v = x.view(5, 1, 3)[1:4]; w = x.t()[1:, 1:4]; x.data.mul_(2); y = v + 1, w + 1
    w = x.t()[1:, 1:]; getattr(x, "to_local", lambda: x)().mul_(2); y = w + 1
    x.requires_grad_(); v = x[1:3]; x.data.mul_(2); v.square().sum().backward(); y = x.grad
    x.data = put(V)[:2] * 1; y = x.sum(), tuple(x.shape)
    x.data = put(V).double(); y = x.dtype, x + 1
    v = x[1:4]; x.data[2] = 0.0; y = v.shape
    y = torch.where(x[:1, :2] > 3, x[0, :2], put(torch.ones(1, 2))); y = y, y.stride()
    y = torch._foreach_mul([x[:1].expand(4, 3)], 2.0)[0]; y = y, y.stride()
    y = torch.ops.aten._unsafe_view((x * 2)[:, :2], (5, 1, 2)); y = y, y.stride()
    y = torch.ops.aten._unsafe_view((x * 2)[:4].t(), (3, 2, 2)); y = y, y.stride()
    y = [(t, t.stride()) for t in (*(x * 2).unsafe_chunk(2, 1), *(x * 2).t().unsafe_split(2, 1))]
    y = [(t, t.stride()) for t in (x * 2).unsafe_split_with_sizes([2, 1], 1)]
    y = F.conv1d(x[None].transpose(1, 2), x[:2, :, None]); y = y, y.stride()
    z = put(torch.arange(180.0).view(3, 5, 4, 3).sin().permute(0, 3, 1, 2)).requires_grad_(); F.group_norm(z, 1).square().sum().backward(); y = z.grad
    z = put(torch.arange(180.0).view(3, 3, 5, 4)).to(memory_format=torch.channels_last).detach().requires_grad_(); y = F.adaptive_avg_pool2d(z, 1); y.square().sum().backward(); y = y, y.stride(), z.grad
    a, b = x[:2, :3].t(), x[:3, :2].abs(); y = [(z, z.stride()) for z in (torch.copysign(a, b), torch.xlogy(a, b), torch.special.xlog1py(b, a), torch.pow(2.0, a))]
    a, b = x[:2, :3].t(), x[:3, :2].abs(); o = torch.ops.aten; y = [(z, z.stride()) for z in (o.elu_backward(a, 1.0, 1, 1, False, b), o.softplus_backward(a, b, 1, 20), o.hardtanh_backward(a, b, -1, 1), o.hardswish_backward(a, b), o.hardsigmoid_backward(a, b), o.floor_divide(a, b + 1), torch.div(a, b + 1, rounding_mode="floor"))]
    a, b = x[:2, :3].t(), x[:3, :2].abs(); o = torch.ops.aten; y = [(z, z.stride()) for z in (o.mse_loss_backward(b, a, b, 0), o.huber_loss_backward(b, a, b, 0, 1.0), o.smooth_l1_loss_backward(b, a, b, 0, 1.0), o._log_softmax_backward_data(a, a, 1, torch.float32))]
    a, b = x[:2, :3].t().sigmoid(), x[:3, :2].sigmoid(); o = torch.ops.aten; y = [(z, z.stride()) for z in (F.binary_cross_entropy(a, b, reduction="none"), o.binary_cross_entropy_backward(b, a, b, None, 0), F.binary_cross_entropy(a, b))]
    z = put(torch.arange(120.0).view(3, 2, 5, 4)).to(memory_format=torch.channels_last); y = [(t, t.stride()) for t in (z.roll((1, -1), (2, 3)), z.roll(1, 1), z.roll(3, 0), z.roll(2), z.permute(0, 3, 1, 2).roll(1, 2))]
    z = put(torch.arange(40.0).view(1, 2, 5, 4)).to(memory_format=torch.channels_last).requires_grad_(); y = [(t, t.stride(), torch.autograd.grad(t.square().sum(), z)[0].stride()) for t in (*(F.pad(z, (1, 1, 1, 1), mode=how) for how in ("reflect", "replicate")), F.channel_shuffle(z, 2), F.max_unpool2d(z, torch.zeros_like(z, dtype=torch.long), 2))]
    z = put(torch.arange(40.0).view(1, 2, 5, 2, 2)).to(memory_format=torch.channels_last_3d); y = F.pad(z, (1, 1, 1, 1, 1, 1), mode="replicate"); y = y, y.stride()
    y = F.logsigmoid(x[:2, :3].t()); y = y, y.stride()
    y = torch.rand_like(x[:, :2].t()); y = y, y.stride()
    y = torch.rand_like(x[:, :2]); y = y, y.stride()
    y = torch.bernoulli(x.t().sigmoid()); y = y, y.stride()
    z = put(torch.ones(8, 6)); v = z[:, 1:5]; v.normal_(); y = z, v
    y = x.view(5, 1, 3).expand(5, 2, 3).clone(); y = y, y.stride()
    z = put(torch.arange(20.0).view(5, 4)); z[:, :3].copy_(z[:, 1:]); y = z
    z = put(torch.arange(20.0).view(5, 4)); z[:, :-1] = z[:, 1:]; y = z
    z = put(torch.arange(20.0).view(5, 4)); z.index_add_(1, put(torch.tensor([0])), z[:, :1]); y = z
    z = put(torch.arange(20.0).view(5, 4)); z[:, 2:3].add_(z[:, 1:2]); y = z
    v = x[1:4]; torch._foreach_add_([x], 1.0); y = v * 2
    v = x[1:4]; torch._foreach_copy_([x], [put(V) * 3]); y = v, x._version
    v = x[1:4]; w = v[:, 1:]; torch._foreach_mul_([w], 2.0); y = v + 1
    v = x[1:4]; x.data = x.data * 2; x.add_(1); y = v * 1
    v = x[1:4]; x.data = x.data * 2; v.zero_(); y = v + 1
    v = x[1:4]; w = v[:, 1:]; v.data = v.data * 2; v.add_(1); y = w * 1, v
    v = x[1:4]; w = v[:, 1:]; v.data = v.data * 2; x.add_(1); y = w * 1, v
    v = torch.squeeze_copy(x[:1]); v.zero_(); y = x, v
    y = torch.squeeze_copy(x.t()[:, None], 1); y = y, y.stride()
    v = x[1:4]; x.t_(); x.add_(1); y = v * 1
    v = x[1:4]; x.t_(); v.add_(1); y = v * 1
    v = x[1:4]; x.transpose_(0, 1); x[:, 2].mul_(3); y = v * 1
    v = x.view(-1)[2:9]; x.unsqueeze_(0); v.mul_(2); y = v * 1
    x = x[:1]; v = x.expand(2, 3)[:, 1:]; x.squeeze_(0); x.add_(1); y = v * 1
    y = (put(torch.ones(1, 1)).unflatten(0, (1, -1)) / 2).view(torch.uint8); y = y.clone(), y.stride()
    y = (put(torch.ones(1, 2)).unflatten(0, (1, -1)) / 2).view(torch.float64); y = y.clone(), y.stride()
    y = torch.view_as_complex(put(torch.ones(1, 2)).unflatten(0, (1, -1)) / 2); y = y.clone(), y.stride()
    y = torch.view_as_complex(x[:2].t() * 1)
"""

_GRADIENTS = """
    x[:, :2].mul_(2)
    x[1].mul_(2)
    x[1:3] = 0.0
    x[:, 1:] = 0.0
    x[:, 1:] = p[:, :2] * 3
    x[2, 1] = 0.0
    x[p.detach() > 3] = 0.0
    x.T.mul_(3)
    x.view(-1).mul_(3)
    x.view(1, 5, 3).mul_(3)
    x.unsqueeze(0).mul_(3)
    x[1:4][1].mul_(2)
    x.T[1].mul_(2)
    v = x[1:4]; x.mul_(3); x = v * 2
    v = x.t(); x.mul_(3); x = v * 2
    v = x[1:4]; v.mul_(p[1:4]); x = x + 1
    x.relu_()
    x.mul_(p)
    x.exp_()
    x.copy_(p * 2)
    x.zero_()
    x[:, 0].fill_(2.0)
    with torch.no_grad(): x.mul_(2)
    x.data.mul_(2)
    x = x.detach_().requires_grad_() * p
    x = x[:1].expand(4, 3)
    x = x.diagonal()
    y = x.exp(); x.add_(1); x = y
    y = x.exp(); y.add_(1); x = y
    y = x * x; x.add_(1); x = y
    y = x * x; x[:, :1].add_(1); x = y
    y = x * x; x[1:3].add_(1); x = y
    y = x * x; x.T.add_(1); x = y
    y = x * x; x.detach().add_(1); x = y
    p.add_(1)
    p.T.add_(1)
    p[1:3].add_(1)
    y = x * x; torch._foreach_add_([x.detach()], 1.0); x = y
    a, b = x.chunk(2, 1); a.mul_(3)
    x = x[:3] * 1; v = x[1:]; x.t_(); x.mul_(2); x = v * p[:2]
    x = x[:3] * 1; v = x.view(3, 3); v.transpose_(0, 1); v.mul_(p[:3])
    x = x[:3] * 1; v = x[0]; v.unsqueeze_(1); x.mul_(p[:3]); x = v * p[:1]
    v = x[:, :1]; v.squeeze_(1); v.mul_(p[:, 1])
"""


def _table(text, before="", after=""):
    lines = [line.strip() for line in text.strip().splitlines()]
    return {line: program(";".join(part for part in (before, line, after) if part)) for line in lines}


WRITES = _table(_WRITES)
READS = _table(_READS)
REFUSED = _table(_REFUSED)
GRADIENTS = _table(
    _GRADIENTS,
    "p = put(V).detach().requires_grad_(); x = p * 1.5",
    "(x * x).sum().backward(); y = p.grad, x.detach(); x = p.detach()",
)


@pytest.mark.parametrize(("table", "raises"), [("WRITES", 7), ("REFUSED", 6), ("READS", 1), ("GRADIENTS", 11)])
def test_as_in_eager_torch(table, raises):
    check(__name__, table, raises=raises)


def _read_when_stale(put):
    with torch.inference_mode():
        x = put(VALUES) * 1
        v = x[1:4]
        x.add_(1)
        return (v + 1).tolist()


def _written(put):
    with torch.inference_mode():
        x = put(VALUES) * 1
        x[1:4].add_(1)
        x[:, 1:].t().mul_(2)
        return x.tolist()


def _read_outside(put):
    with torch.inference_mode():
        x = put(VALUES) * 1
        rows, columns = x[1:4], x[:, 1:]
        x.add_(1)
    return rows * 2, columns.tolist(), rows


def _views(x):
    """Some that parts have views for, some that had to be moved."""
    return x.t(), x.detach(), x[1:4], x.view(-1), x.unbind(0)[1], x.split(2)[1], x.as_strided((2, 3), (3, 1))


def _saved(put):
    """Views of an inference tensor are such tensors, which autograd does not save; those of a normal one are none."""
    normal, factor = put(VALUES) * 1, torch.ones((), requires_grad=True)
    with torch.inference_mode():
        inference = put(VALUES) * 1
        views = [*_views(inference), *_views(normal)]
    views += [*_views(inference), *_views(normal)]
    said = []
    for view in views:
        try:
            (view * factor).sum().backward()
        except RuntimeError as error:
            said.append(str(error)[:50])
    return said, [view.is_inference() for view in views], factor.grad


INFERENCE = {"stale": _read_when_stale, "written": _written, "outside": _read_outside, "saved": _saved}


def test_in_inference_mode():
    check(__name__, "INFERENCE")


def _several(put):
    x, y = put(VALUES) * 1, put(VALUES.t().contiguous()).t() * 1  # split otherwise
    torch._foreach_mul_([x, x[1:3], x[:2]], 2.0)
    torch._foreach_mul_([x[1:3], y[:, 1:], y * 1], 2.0)
    torch._foreach_add_([x, y], [y, x])
    torch._foreach_add_([y, x], [x, y])
    torch._foreach_add_([x, y], [y, y])
    torch._foreach_mul_([x, y, x], 0.25)
    torch._foreach_addcmul_([x, x[2:]], [y, y[:3]], [y, y[1:4]], 0.1)
    return x, y


SEVERAL = {"lists": _several}


def test_lists_of_several_views_of_one_tensor():
    check(__name__, "SEVERAL")


def several(rank, world):
    from torchshard import Partial, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    x, p = (put(VALUES, mesh, text) * 1 for text in ("S0", "P"))
    p = p.redistribute(placements=[Partial("max")])
    torch._foreach_mul_([p, x, p], 0.5)
    torch._foreach_add_([x, p], [p, x])
    torch.testing.assert_close(x.full_tensor(), VALUES * 0.75)
    torch.testing.assert_close(p.full_tensor(), VALUES)


def test_lists_with_terms():
    run_ranks(2, several)


def writes_to_parts_of_norms(rank, world):
    """What became of writes to slices along an axis that splits, of norms whose terms lie along another one."""
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh, told = init_device_mesh("cpu", (2, 2)), []
    writes = [
        lambda x: x[1:].mul_(2), lambda x: x.view(-1)[1:].add_(2), lambda x: x[1].zero_(), lambda x: x.view(2, 2)[1].exp_(),
        lambda x: torch._foreach_mul_([x[1:]], 2.0), lambda x: torch._foreach_add_([x[1:], x[:1]], 1.0),
    ]  # fmt: skip
    for placements in ([Shard(1), Shard(0)], [Shard(0), Shard(1)]):
        x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, placements)
        for write in writes:
            norms = x.norm(dim=1)
            with pytest.raises(UnsupportedOperatorError, match="of which there are views"):
                write(norms)
            told.append(torch.equal(norms.full_tensor(), x.norm(dim=1).full_tensor()))
    return told


def test_a_moved_part_of_norms_is_not_written_to():
    assert run_ranks(4, writes_to_parts_of_norms) == [[True] * 12] * 4


def turned_leaves(rank, world):
    """Whether leaves are what they were after a refused turn, and the shape and gradient of one that was turned."""
    from torchshard import init_device_mesh

    mesh, told = init_device_mesh("cpu", (world,)), []
    for text in ("R", "S0"):
        leaf = put(VALUES[:3], mesh, text).detach().requires_grad_()
        row = leaf[0]
        with torch.no_grad(), pytest.raises(UnsupportedOperatorError, match="t_ of a leaf whose views"):
            leaf.t_()
        (row * 2).sum().backward()
        told.append(leaf.grad.full_tensor().tolist())
        leaf = put(VALUES[:2], mesh, text).detach().requires_grad_()
        with torch.no_grad():
            leaf.t_()
        (leaf[0] * 2).sum().backward()
        told.append(leaf.grad.full_tensor().tolist())
    return told


def test_a_leaf_is_turned_before_there_are_views_of_it():
    row, turned = [[2.0] * 3, [0.0] * 3, [0.0] * 3], [[2.0] * 2, [0.0] * 2, [0.0] * 2]
    assert run_ranks(2, turned_leaves) == [[row, turned] * 2] * 2
