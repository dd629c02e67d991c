"""Random operators draw the same tensor for every placement: the one that a single device draws."""

import functools

import torch
import torch.nn.functional as F

from tests.older import known
from tests.ranks import run_ranks
from tests.tensor.programs import VALUES, check, program


def draws():
    """Name -> function of a tensor like a 5x4 one, that draws."""
    return {
        "rand_like": lambda x: torch.rand_like(x),
        "randn_like": lambda x: torch.randn_like(x),
        "randint_like": lambda x: torch.randint_like(x, 0, 9),
        "uniform_": lambda x: x.clone().uniform_(-1, 1),
        "normal_": lambda x: x.clone().normal_(1, 2),
        "exponential_": lambda x: x.clone().exponential_(2.0),
        "random_": lambda x: x.clone().random_(0, 10),
        "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
        "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
        "dropout": lambda x: F.dropout(x, 0.4),
        "kaiming": lambda x: torch.nn.init.kaiming_uniform_(x.clone()),
        "trunc_normal": lambda x: torch.nn.init.trunc_normal_(x.clone()),
    }


@torch.library.custom_op("random_test::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noisy(x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout that has no handler, as attention kernels have it inside."""
    return F.dropout(x, p).clone()


def body(rank, world, mesh_shape):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh, rand, randn

    mesh = init_device_mesh("cpu", mesh_shape)
    full = torch.linspace(-1, 1, 20).view(5, 4)
    kinds = [[Replicate()], [Shard(0)], [Shard(1)]] if mesh.ndim == 1 else [[Shard(0), Shard(1)], [Shard(1), Shard(1)]]
    bad = []
    for placements in kinds:
        x = distribute_tensor(full, mesh, placements)
        for name, draw in draws().items():
            torch.manual_seed(7)
            want = draw(full), torch.rand(2)
            torch.manual_seed(7 + rank)  # ranks that have drifted apart agree on the first one's
            got = draw(x), torch.rand(2)
            if not torch.equal(got[0].full_tensor(), want[0]) or not torch.equal(got[1], want[1]):
                bad.append(f"{name} {placements}: {got} for {want}")
            if got[0].placements != tuple(placements):
                bad.append(f"{name} {placements}: {got[0].placements}")
        for factory, plain in ((rand, torch.rand), (randn, torch.randn)):
            torch.manual_seed(3)
            want = plain(5, 4)
            torch.manual_seed(3)
            if not torch.equal(factory(5, 4, device_mesh=mesh, placements=placements).full_tensor(), want):
                bad.append(f"{factory} {placements}")
        torch.manual_seed(5)
        p, q = x.clone().requires_grad_(), full.clone().requires_grad_()
        F.dropout(q, 0.4).square().sum().backward()
        torch.manual_seed(5)
        F.dropout(p, 0.4).square().sum().backward()
        if not torch.allclose(p.grad.full_tensor(), q.grad):
            bad.append(f"gradient of dropout {placements}")
        for chance in (0.0, 0.4):  # the plan for none serves for some
            torch.manual_seed(5)
            want = noisy(full, chance)
            torch.manual_seed(5 + rank)
            if not torch.equal(noisy(x, chance).full_tensor(), want):
                bad.append(f"dropout of {chance} without a handler {placements}")
    return bad


def test_the_same_tensor_for_every_placement():
    for mesh_shape, world in (((2,), 2), ((3,), 3), ((2, 2), 4)):
        for bad in run_ranks(world, body, mesh_shape):
            assert not bad, bad


def _with_a_generator(draw):
    def run(put):
        generator = torch.Generator().manual_seed(5)
        return draw(put, generator), torch.rand(2, generator=generator), torch.rand(2)

    return run


def _dropped(put):
    x = put(CHANCES).requires_grad_()
    (F.dropout(x, 0.4) * put(VALUES)).sum().backward()
    return x.grad


def _attention(put):
    attention = torch.nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
    for module in (attention, attention.out_proj):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(put(p.detach())))
    x = put(torch.linspace(-1, 1, 40).view(2, 5, 4))
    torch.manual_seed(2)
    return attention(x, x, x)[0], torch.rand(2)


def _reset(make):
    def run(put):
        module = make()
        for name, p in list(module.named_parameters()):
            setattr(module, name, torch.nn.Parameter(put(p.detach())))
        torch.manual_seed(3)
        module.reset_parameters()
        return dict(module.named_parameters()), torch.rand(2)

    return run


def _forked(put):
    with torch.random.fork_rng():
        inside = F.dropout(put(VALUES), 0.4)
    return inside, F.dropout(put(VALUES), 0.4)


CHANCES = torch.sigmoid(VALUES)
_LINES = """
    y = torch.bernoulli(put(C), 0.3)
    y = torch.bernoulli(put(C), out=put(C))
    y = x.bernoulli_(put(C))
    y = torch.normal(put(C), put(C)), torch.normal(put(C), 1.0), torch.normal(1.0, put(C))
    y = torch.poisson(put(C) * 5)
    y = torch.multinomial(put(C), 2), torch.multinomial(put(C), 7, replacement=True)
    y = F.dropout(x, 0.4, inplace=True)
    y = F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x, 0.5, training=False)
    y = F.dropout1d(x.view(1, 5, 3), 0.4), F.dropout2d(x.view(1, 5, 3, 1), 0.4)
    y = F.alpha_dropout(x, 0.4, training=True), F.feature_alpha_dropout(x, 0.4, training=True)
    y = F.rrelu(x, training=True)
    y = F.gumbel_softmax(x), F.gumbel_softmax(x, hard=True)
    y = torch.nn.init.orthogonal_(x)
    y = torch.nn.init.xavier_normal_(x)
    y = x.cauchy_(), x.log_normal_(), x.geometric_(0.3), x.random_(3, 9)
    y = x.t().normal_(), torch.rand_like(x.t()), F.dropout(x.t(), 0.3)
    y = x[1:4].normal_(), x[:, 1:].uniform_()
    y = put(torch.tensor(1.0)).normal_(), put(torch.ones(0, 3)).normal_()
    y = put(V).bfloat16().normal_(), put(torch.ones(5, 3, dtype=torch.int64)).random_(0, 100)
    y = torch.rand_like(x, dtype=torch.float64), torch.randn_like(x, requires_grad=True)
    y = torch.rand_like(x.t(), memory_format=torch.contiguous_format); y = y, y.stride()
    y = torch.randn_like(x.view(1, 5, 3, 1), dtype=torch.float64, memory_format=torch.channels_last); y = y, y.stride()
    y = torch.randint_like(x, 9, device="meta"); y = y.device, y.shape, y.dtype
"""
PROGRAMS = {
    **{line.strip(): program(f"{line}; y = y, torch.rand(2)", C=CHANCES) for line in _LINES.strip().splitlines()},
    "gradient of dropout": _dropped,
    "attention": _attention,
    "linear": _reset(lambda: torch.nn.Linear(3, 5)),
    "embedding": _reset(lambda: torch.nn.Embedding(5, 3, padding_idx=1)),
    "fork_rng": _forked,
    "generator of normal_": _with_a_generator(lambda put, g: put(VALUES).normal_(generator=g)),
    "generator of bernoulli": _with_a_generator(lambda put, g: torch.bernoulli(put(CHANCES), generator=g)),
    "generator of multinomial": _with_a_generator(lambda put, g: torch.multinomial(put(CHANCES), 2, generator=g)),
}


def test_as_on_a_single_device():
    check(__name__, "PROGRAMS")


def test_what_a_single_device_refuses():
    check(__name__, "REFUSED", mesh_shapes=((2,),), raises=2)


REFUSED = {"chance": lambda put: F.dropout(put(VALUES), 1.5), "sums": lambda put: torch.multinomial(put(-VALUES), 2)}


def _dropped_by_inductor(rank, world):
    from torchshard import Shard, distribute_tensor, init_device_mesh

    torch._inductor.config.fallback_random = torch._inductor.config.force_disable_caches = True
    mesh, x, found = init_device_mesh("cpu", (world,)), torch.randn(1, 2, 10, 4), []
    attention = functools.partial(F.scaled_dot_product_attention, dropout_p=0.3)
    for function in (attention, torch.compile(attention, fullgraph=True)):
        torch.manual_seed(rank)
        q = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        y = function(q, q, q)
        y.square().sum().backward()
        found.append((y.full_tensor(), q.grad.full_tensor()))
    torch.testing.assert_close(*found)
    return hasattr(torch._inductor.scheduler.SchedulerNode.recompute_size_and_body, "__wrapped__")


def test_inductor_reads_what_the_first_rank_has_sent():
    """Its kernels for a CPU lie behind the wait for it."""
    assert run_ranks(2, _dropped_by_inductor) == [not known("renamed reads")] * 2
