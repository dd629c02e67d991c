"""A Llama under tensor, sequence and data parallelism: loss, gradients and five AdamW steps of a single process."""

import pytest
import torch

from tests.older import require
from tests.parallel.llama import Config, Llama, in_heads, loss, plan
from tests.ranks import run_ranks

STEPS, BATCH = 5, 4


def batches(config, time):
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, config.vocabulary, (STEPS, 2, BATCH, time), generator=g)


def optimizer_of(model, foreach=False):
    # A smaller eps would have Adam take the sign of a gradient that is only rounding for a signal.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, foreach=foreach)


def relative(got, want):
    full = got.full_tensor() if hasattr(got, "full_tensor") else got
    assert full.shape == want.shape
    return (full - want).abs().max().item() / max(1.0, want.abs().max().item())


def train(rank, world, kind, tied, time, heads=None):
    from torchshard import fallback, implicit_replication, init_device_mesh
    from torchshard.parallel import loss_parallel, parallelize_module

    config = Config(tied=tied, **heads or {})
    torch.manual_seed(0)
    plain, model = Llama(config), Llama(config)
    model.load_state_dict(plain.state_dict())
    styles = in_heads(plan(kind), config) if heads else plan(kind)
    parallelize_module(model, init_device_mesh("cpu", (world,)), styles)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    ours, theirs = optimizer_of(model, foreach=world == 2), optimizer_of(plain)
    errors = {}
    with fallback("error"):
        for step, (x, y) in enumerate(batches(config, time)):
            want = loss(plain(x), y)
            want.backward()
            with loss_parallel():
                got = loss(model(x), y)
                got.backward()
            errors[f"loss {step}"] = relative(got, want)
            for name, p, q in zip(names, model.parameters(), plain.parameters(), strict=True):
                errors[f"gradient {step} {name}"] = relative(p.grad, q.grad)
            with implicit_replication():  # "tp" leaves norms plain, and lists hold them beside DTensors
                norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, plain)]
                errors[f"norm {step}"] = relative(*norms)
                for optimizer in (ours, theirs):
                    optimizer.step()
                    optimizer.zero_grad()
    for name, p, q in zip(names, model.parameters(), plain.parameters(), strict=True):
        errors[f"parameter {name}"] = relative(p, q)
    return max((e, name) for name, e in errors.items())


@pytest.mark.parametrize(
    ("kind", "world", "tied", "time"),
    [
        ("tp", 2, False, 7),
        ("sp", 2, True, 8),
        ("dtensor", 2, False, 7),
        ("tp", 4, True, 6),
        ("sp", 4, False, 8),
        ("dtensor", 4, True, 7),
    ],
)
def test_training_equals_one_process(kind, world, tied, time):
    for error, name in run_ranks(world, train, kind, tied, time, timeout=200):
        assert error < 2e-5, name


@pytest.mark.parametrize(("kind", "world"), [("tp", 2), ("sp", 2), ("dtensor", 2), ("tp", 4)])
def test_heads_that_ranks_do_not_divide(kind, world):
    """2 and 1 of the 3 heads of keys, with 4 and 2 of the 6 of queries; on four ranks one has none."""
    if world > 3:
        require("attention without heads")
    heads = {"width": 36, "heads": 6, "kv_heads": 3}
    for error, name in run_ranks(world, train, kind, False, 8, heads, timeout=200):
        assert error < 2e-5, name


def between_heads(rank, world):
    """A step on DTensors sends what the plan asks for: nothing more to have whole heads."""
    from torchshard import explain, init_device_mesh
    from torchshard.parallel import loss_parallel, parallelize_module

    config = Config(width=36, heads=6, kv_heads=3)
    x, y = batches(config, 8)[0]
    torch.manual_seed(0)
    model = Llama(config)
    parallelize_module(model, init_device_mesh("cpu", (world,)), in_heads(plan("dtensor"), config))

    def step():
        with loss_parallel():
            loss(model(x), y).backward()

    step()
    return dict(explain(step).collectives)


def test_whole_heads_are_not_sent():
    # As with heads that divide; one gather and one reduction are of the loss.
    asked = {"all_gather_into_tensor": 11, "reduce_scatter_tensor": 10, "all_reduce": 1}
    assert run_ranks(2, between_heads) == [asked, asked]


def train_on_grid(rank, world, kind, tied):
    """Batches split over one axis by DistributedDataParallel, weights over the other by a plan."""
    from torchshard import DistributedDataParallel, fallback, init_device_mesh
    from torchshard.parallel import local_parameters, loss_parallel, parallelize_module, placed_parameters

    config = Config(tied=tied)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain, model = Llama(config), Llama(config)
    model.load_state_dict(plain.state_dict())
    parallelize_module(model, mesh["tp"], plan(kind))
    wrapped = DistributedDataParallel(local_parameters(model), process_group=mesh["dp"].get_group())
    names = [name for name, _ in plain.named_parameters()]
    ours, theirs = optimizer_of(model), optimizer_of(plain)
    place = mesh.get_local_rank("dp")
    errors = {}
    with fallback("error"):
        for step, (x, y) in enumerate(batches(config, 8)):
            want = loss(plain(x), y)
            want.backward()
            mine = slice(place * BATCH // 2, (place + 1) * BATCH // 2)
            with loss_parallel():
                loss(wrapped(x[mine]), y[mine]).backward()
            placed = placed_parameters(model)
            for name, p, q in zip(names, placed, plain.parameters(), strict=True):
                errors[f"gradient {step} {name}"] = relative(p.grad, q.grad)
            norms = [torch.nn.utils.clip_grad_norm_(ps, 0.5) for ps in (placed, plain.parameters())]
            errors[f"norm {step}"] = relative(*norms)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    state = model.state_dict()
    for name, q in plain.named_parameters():
        errors[f"parameter {name}"] = relative(state[name], q)
    return max((e, name) for name, e in errors.items())


@pytest.mark.parametrize(("kind", "tied"), [("tp", True), ("sp", False), ("dtensor", False)])
def test_with_data_parallel(kind, tied):
    for error, name in run_ranks(4, train_on_grid, kind, tied, timeout=200):
        assert error < 2e-5, name
