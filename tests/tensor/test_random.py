"""Random operators draw the same tensor for every placement: the one that a single device draws."""

import torch
import torch.nn.functional as F

from tests.ranks import run_ranks


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
    return bad


def test_the_same_tensor_for_every_placement():
    for mesh_shape, world in (((2,), 2), ((3,), 3), ((2, 2), 4)):
        for bad in run_ranks(world, body, mesh_shape):
            assert not bad, bad


def unknown(rank, world):
    from torchshard import Shard, distribute_tensor, init_device_mesh

    x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (world,)), [Shard(0)])
    try:
        return str(torch.multinomial(x, 2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_random_operator_that_is_not_known_is_refused():
    for message in run_ranks(2, unknown):
        assert message.startswith("UnsupportedOperatorError: multinomial.default draws random numbers")
