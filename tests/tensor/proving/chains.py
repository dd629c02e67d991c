"""Random chains of operators, each on what others have made: DTensors do what plain tensors do.

After every step: values, dtype, shape, strides and whether there is a gradient; after a write those of all tensors, as
any may be a view of another; at the end gradients, and gradients of those.
"""

import functools
import random
import warnings

import torch
import torch.nn.functional as F  # for the chains

OPERATORS = """
    x.relu()
    x.sin()
    x.tanh() * 2
    x.sigmoid()
    x.abs().sqrt()
    x.square()
    -x
    x * 2 + 1
    1 / (x.square() + 1)
    x.double()
    x.float()
    x.to(torch.bfloat16)
    (x * 3).long()
    x > 0
    x.sum(d)
    x.sum()
    x.sum((d, e)) if d != e else x.sum(d)
    x.mean(d, keepdim=True)
    x.mean()
    x.amax(d)
    x.max(d).values
    x.min(d).indices
    x.prod(d)
    x.var(d)
    x.std()
    x.logsumexp(d)
    x.norm(dim=d)
    torch.linalg.vector_norm(x)
    x.softmax(d)
    x.log_softmax(d)
    x.cumsum(d)
    x.cumprod(d)
    x.argmax(d)
    x.argsort(d, stable=True)
    x.sort(d).values
    x.topk(1, d).values
    x.flip(d)
    x.roll(n, d)
    x.roll(n)
    x.transpose(d, e)
    x.movedim(d, e)
    x.unsqueeze(d)
    x.squeeze()
    x.squeeze(d)
    x.flatten()
    x.flatten(0, 1)
    x.flatten(-2)
    x.reshape(-1)
    x.view(-1)
    x.reshape(x.shape[0], -1)
    x.unflatten(d, (1, -1))
    x.unflatten(d, (-1, 2))
    x.select(d, n % x.shape[d])
    x.select(d, -1)
    x.narrow(d, 1, x.shape[d] - 1)
    x.narrow(d, 0, 2)
    x[::2]
    x[..., 1:]
    x[n % x.shape[0]]
    x[:, None]
    x.expand(2, *x.shape)
    x.repeat(2, *[1] * (x.ndim - 1))
    x.repeat_interleave(2, d)
    x.tile(2)
    x.diagonal()
    x.tril()
    x.triu(1)
    x.chunk(2, d)[-1]
    x.split(2, d)[-1]
    x.split([1, x.shape[d] - 1], d)[1]
    x.unbind(d)[n % x.shape[d]]
    x.detach()
    x.clone()
    x.contiguous()
    F.pad(x, (1, 2))
    F.pad(x, (-1, 0))
    x.unfold(d, 2, 1)
    F.layer_norm(x, x.shape[-1:])
    F.gelu(x)
    F.dropout(x, 0.5)
    F.normalize(x, dim=d)
    torch.rand_like(x.float())
    torch.zeros_like(x)
    x.new_ones(x.shape)
    torch.full_like(x, 2)
    x + y
    x - y
    x * y
    x / (y.abs() + 1)
    torch.maximum(x, y)
    torch.where(x > 0, x, y)
    torch.where(y > 0, x, 0.5)
    x @ y
    x @ y.transpose(-1, -2)
    x.transpose(-1, -2) @ y
    F.linear(x, y)
    torch.einsum('...i,...j->...ij', x, y)
    torch.einsum('ij,kj->ik', x, y)
    torch.cat([x, y], d)
    torch.cat([x, x], d)
    torch.stack([x, y], d)
    torch.stack([x, x, y], d)
    torch.outer(x.flatten(), y.flatten())
    x.index_select(d, (y.flatten() * 7).long().abs() % x.shape[d])
    x[(y.flatten() * 7).long().abs() % x.shape[0]]
    x.gather(d, torch.zeros_like(x, dtype=torch.long))
    x.gather(d, x.argsort(d, stable=True))
    x.masked_fill(y > 0, 0.5)
    x[x > 0]
    x[y > 0]
    x.take_along_dim(x.argmax(d, keepdim=True), d)
    F.mse_loss(x, y)
    F.cross_entropy(x, (y.flatten()[: x.shape[0]] * 3).long().abs() % x.shape[1])
    F.cross_entropy(x, x.argmax(-1), reduction='none')
    F.embedding((y * 5).long().abs() % x.shape[0], x)
    torch.lerp(x, y, 0.3)
    torch.addmm(y, x, x.t())
    torch.addcmul(x, y, y, value=0.5)
    x.clamp(-1, 1)
    x.clamp(min=y)
    torch.nan_to_num(x / y)
    x.nonzero()
    torch.count_nonzero(x, d)
    x.any(d)
    (x > y).all()
    torch.isclose(x, y)
    torch.searchsorted(x.sort().values, y)
    x.scatter(d, x.argsort(d, stable=True), y)
    x.scatter_add(d, torch.zeros_like(x, dtype=torch.long), x)
    x.index_add(d, torch.zeros_like(x.select(d, 0).flatten()[:1], dtype=torch.long), x.narrow(d, 0, 1))
    torch.bucketize(x, y.flatten().sort().values)
    x.T
    x.mT
    x.swapaxes(d, e)
    x.view_as(x)
    x.view(*x.shape[::-1])
    torch.atleast_2d(x)
    torch.broadcast_to(x, (3, *x.shape))
    torch.tensordot(x, y, 1)
    torch.kron(x, y)
    torch.diff(x, dim=d)
    torch.cdist(x, y)
    torch.complex(x, x * 2).abs()
    x.median(d).values
    x.kthvalue(1, d).values
    x.unique()
    torch.triu(x)
    x.logcumsumexp(d)
    x.renorm(2, 0, 1.0)
    F.avg_pool1d(x[None], 2) if x.ndim == 2 else F.avg_pool1d(x, 2)
    F.conv1d(x[None, None].flatten(2), x.new_ones(2, 1, 3))
    x.item() if x.numel() == 1 else x.sum()
    x.pow(2).sum(d).sqrt()
    torch.pixel_shuffle(x[None, None].expand(1, 4, *x.shape), 2) if x.ndim == 2 else x
    torch._foreach_add([x, y], 1)[n % 2]
    torch._foreach_mul([x, y], [2.0, 3.0])[n % 2]
    torch._foreach_norm([x, y])[n % 2]
    torch.stack(torch._foreach_norm([x, y]))
    torch.nn.utils.parameters_to_vector([x, y])
    torch.block_diag(x, y)
    torch.vstack([x, y])
    torch.hstack([x, y])
    torch.meshgrid(x.flatten(), y.flatten(), indexing='ij')[n % 2]
    torch.cartesian_prod(x.flatten(), y.flatten())
    torch.rot90(x)
    torch.fliplr(x)
    x.sum_to_size(*[1] * x.ndim)
    x.amin((d, e)) if d != e else x.amin(d)
    torch.aminmax(x, dim=d).max
    torch.var_mean(x, d)[1]
    torch.histc(x.float(), 4)
    torch.logaddexp(x, y)
    torch.hypot(x, y)
    torch.atan2(x, y + 0.3)
    torch.fmod(x, 1.5)
    torch.remainder(x, y.abs() + 1)
    torch.floor_divide(x, 2)
    x.to(torch.int32).bitwise_and(3)
    x ** 2
    2 ** x.clamp(-2, 2)
    x.type_as(y)
    x.mul(y).sum(d).unsqueeze(d).expand_as(x)
    x.t_()
    x.transpose_(d, e)
    x.squeeze_()
    x.unsqueeze_(d)
"""

IN_PLACE = """
    x.add_(1)
    x.mul_(2)
    x.add_(y)
    x.mul_(y)
    x.sub_(y, alpha=2)
    x.copy_(y)
    x.zero_()
    x.fill_(3)
    x.clamp_(-1, 1)
    x.masked_fill_(x > 0, 0.5)
    x.masked_fill_(y > 0, 0.25)
    x.relu_()
    x.exp_().clamp_(max=5)
    x.neg_()
    x.select(d, 0).zero_()
    x.narrow(d, 0, 1).mul_(2)
    x[0].add_(1)
    x[..., -1].fill_(2)
    x[::2].mul_(3)
    x.transpose(d, e).add_(1)
    x.diagonal().add_(1)
    x.fill_diagonal_(1)
    x.view(-1).add_(1)
    x.view(-1)[1:].mul_(2)
    x.__setitem__(0, 1.0)
    x.__setitem__(n % x.shape[0], y)
    x.__setitem__((slice(None), 0), 2)
    x.__setitem__(x > 0, 0)
    x.__setitem__(slice(0, 2), y[:2])
    x.index_fill_(d, torch.zeros_like(x.flatten()[:1], dtype=torch.long), 4)
    x.index_add_(d, torch.zeros_like(x.flatten()[:1], dtype=torch.long), y.narrow(d, 0, 1))
    x.index_copy_(d, torch.zeros_like(x.flatten()[:1], dtype=torch.long), y.narrow(d, 0, 1))
    x.scatter_(d, torch.zeros_like(x, dtype=torch.long), 1.5)
    x.scatter_add_(d, torch.zeros_like(x, dtype=torch.long), y)
    x.index_put_(((y.flatten() * 7).long().abs() % x.shape[0],), torch.ones_like(x[0]), accumulate=True)
    x.detach().add_(1)
    x.addcmul_(y, y)
    x.lerp_(y, 0.5)
    x.tril_()
    x.cumsum_(d)
    x.copy_(y.expand_as(x))
    x.uniform_()
    x.normal_()
    x.bernoulli_(0.5)
    x.sigmoid_()
    x.pow_(2)
    x.div_(2)
    x.unbind(d)[0].add_(1)
    x.chunk(2, d)[-1].zero_()
    x.expand(1, *x.shape).add_(1)
    torch.add(y, 1, out=x)
    torch._foreach_add_([x], 1)
    torch._foreach_mul_([x, y], 0.5)
    torch._foreach_copy_([x], [y])
    x.resize_as_(y)
    x.set_(y)
    x.requires_grad_()
    x.detach_()
"""


def play(rank, world, mesh_shape, seeds):
    """On every rank: the complaints about the chains of these seeds."""
    from torchshard import init_device_mesh

    mesh = init_device_mesh("cpu", mesh_shape)
    return played(Chain(mesh, seed) for seed in seeds)


def played(chains):
    """The complaints about some chains, each with its story."""
    warnings.filterwarnings("ignore")
    return [told + "\n  " + "\n  ".join(chain.story) for chain in chains if (told := chain.run())]


def drawn_placements(chance, ndim, axes, partial=True):
    """Placements for a tensor of so many dims, one an axis."""
    from torchshard import Partial, Replicate, Shard

    op = chance.choice(["sum", "avg", "max", "min"])  # there may be no two in one tensor

    def one():
        kind, dim = chance.random(), chance.randrange(max(ndim, 1))
        if ndim and kind < 0.6:
            return Shard(dim)
        return Partial(op) if partial and kind > 0.8 else Replicate()

    return [one() for _ in range(axes)]


class Over(Exception):
    """The chain cannot go on: plain tensors have come to an end of their own, or a write was refused."""


class Chain:
    """Pairs of a plain tensor and a DTensor, of which each step makes another, or to which it writes."""

    operators, in_place = OPERATORS, IN_PLACE

    def __init__(self, mesh, seed):
        self.mesh, self.chance = mesh, random.Random(seed)
        self.story, self.pairs, self.leaves = [f"seed {seed}"], [], []

    def run(self):
        """What went wrong, or None."""
        try:
            self._begin()
            for _ in range(14):
                self._step()
            self._backward()
        except Over:
            pass
        except AssertionError as wrong:
            return str(wrong)
        return None

    def _begin(self):
        chance = self.chance
        for _ in range(2):
            shape = [chance.choice([1, 2, 3, 4, 5, 7, 8]) for _ in range(chance.choice([1, 2, 2, 2, 3]))]
            self._start(shape, chance.choice([torch.float32] * 5 + [torch.float64, torch.int64]), chance.random() < 0.6)
        if chance.random() < 0.5:
            self._start(self.pairs[0][0].shape, self.pairs[0][0].dtype, False)

    def _start(self, shape, dtype, needs_grad):
        from torchshard import Replicate, distribute_tensor

        values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(self.chance.randrange(10**6)))
        values = ((values * 3).round() / 2 if self.chance.random() < 0.5 else values).to(dtype)
        placements = self._placements(values.ndim, partial=dtype.is_floating_point)
        split = distribute_tensor(values, self.mesh, [Replicate() if p.is_partial() else p for p in placements])
        split = split.redistribute(placements=placements).detach()
        plain = split.full_tensor().clone()
        if needs_grad and dtype.is_floating_point:
            self.leaves.append((plain.requires_grad_(), split.requires_grad_()))
        self.story.append(f"#{len(self.pairs)}: {tuple(shape)} {dtype} {placements} grad={plain.requires_grad}")
        self.pairs.append((plain, split))

    def _placements(self, ndim, partial):
        return drawn_placements(self.chance, ndim, self.mesh.ndim, partial)

    def _step(self):
        chance, pairs = self.chance, self.pairs
        at = chance.choice([chance.randrange(len(pairs)), len(pairs) - 1])
        alike = [k for k, (plain, _) in enumerate(pairs) if plain.shape == pairs[at][0].shape]
        other = chance.choice([chance.randrange(len(pairs)), chance.choice(alike)])
        kind, seed = chance.random(), chance.randrange(10**6)
        if kind < 0.12:
            placements = self._placements(pairs[at][0].ndim, partial=False)
            self.story.append(f"#{len(pairs)}: #{at} as {placements}")
            self._add(pairs[at][0].clone(), pairs[at][1].redistribute(placements=placements).clone())
            return
        dims = max(pairs[at][0].ndim, 1)
        names = {"d": chance.randrange(dims), "e": chance.randrange(dims), "n": chance.randrange(5)}
        code, text = chance.choice(_compiled(self.in_place if kind < 0.37 else self.operators))
        recorded = kind > 0.37 or chance.random() < 0.5

        def call(which):
            torch.manual_seed(seed)
            tensors = {"x": pairs[at][which], "y": pairs[other][which]}
            with torch.set_grad_enabled(recorded):
                return eval(code, {"torch": torch, "F": F, **tensors, **names})

        versions = [plain._version for plain, _ in pairs]
        try:
            plain = call(0)
        except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
            if versions != [plain._version for plain, _ in pairs]:  # something was written
                raise Over from error
            return
        self.story.append(f"#{len(pairs)}: {text} x=#{at} y=#{other} {names}{'' if recorded else ' no_grad'}")
        writes = versions != [plain._version for plain, _ in pairs]
        try:
            split = self._right_or_refused(lambda: call(1))
        except Over:
            if writes:
                raise
            return
        if writes:
            self._compare_all()
        if plain is not pairs[at][0]:
            self._add(plain, split)

    def _right_or_refused(self, call):
        from torchshard.errors import TorchshardError

        try:
            return call()
        except TorchshardError as error:
            self.story.append("    refused")
            raise Over from error
        except Exception as error:
            # Some kernels take no notice of elements that lie on one another, others refuse to write to them.
            if "single memory location" in str(error) or "be at one place in memory" in str(error):
                raise Over from error
            raise AssertionError(f"{type(error).__name__}: {error}") from error

    def _add(self, plain, split):
        self._compare(plain, split)
        if isinstance(plain, torch.Tensor) and plain.numel() < 3000 and len(self.pairs) < 9 and _tame(plain):
            self.pairs.append((plain, split))

    def _compare_all(self):
        for plain, split in self.pairs:
            self._compare(plain, split)
            if not _tame(plain):
                raise Over

    def _compare(self, plain, split):
        """Assert that a DTensor is what the plain tensor is."""
        if not isinstance(plain, torch.Tensor):
            return
        try:
            wanted = {name: getattr(plain, name) for name in ("shape", "dtype", "requires_grad", "is_leaf")}
        except RuntimeError as error:  # a view that a write has made meaningless
            raise Over from error
        got = {name: getattr(split, name) for name in wanted}
        assert got == wanted, f"{got} for {wanted}"
        self._compare_strides(plain, split)
        values = self._whole(split).detach()
        limit = 5e-2 if plain.dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(values, plain.detach(), rtol=limit, atol=limit, equal_nan=True)

    def _compare_strides(self, plain, split):
        strides = [pair for *pair, n in zip(split.stride(), plain.stride(), plain.shape, strict=True) if n > 1]
        assert plain.numel() < 2 or all(a == b for a, b in strides), f"strides {split.stride()} for {plain.stride()}"

    def _whole(self, split):
        from torchshard import DTensor

        return split.full_tensor() if isinstance(split, DTensor) else split

    def _backward(self):
        plains, splits = ([pair[k] for pair in self.pairs if pair[0].requires_grad] for k in (0, 1))
        for name in ("gradients", "gradients of gradients"):
            self.story.append(name)
            try:
                plains = self._gradients(plains, [plain for plain, _ in self.leaves])
            except RuntimeError as error:  # something that was saved has been written to
                raise Over from error
            splits = self._right_or_refused(lambda of=splits: self._gradients(of, [split for _, split in self.leaves]))
            assert [g is None for g in plains] == [g is None for g in splits]
            for plain, split in zip(plains, splits, strict=True):
                if plain is not None and plain.isfinite().all():
                    whole = self._whole(split).double()
                    size = max(float(plain.detach().abs().max()), 1.0) if plain.numel() else 1.0
                    limit = 5e-2 if any("bfloat16" in line for line in self.story) else 1e-3
                    torch.testing.assert_close(whole.detach(), plain.detach().double(), rtol=0, atol=limit * size)

    @staticmethod
    def _gradients(outputs, leaves):
        """Of the leaves, for a sum of squares; None for those that the outputs do not depend on."""
        outputs = [y for y in outputs if y is not None and y.requires_grad]
        if not outputs or not leaves:
            return [None] * len(leaves)
        loss = sum((y.double() * (k + 1)).square().mean() for k, y in enumerate(outputs))
        return torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=True)


@functools.cache
def _compiled(table):
    return [(compile(line.strip(), line.strip(), "eval"), line.strip()) for line in table.strip().splitlines()]


def _tame(plain):
    return bool(plain.isfinite().all()) and float(plain.detach().double().abs().sum()) < 1e5
