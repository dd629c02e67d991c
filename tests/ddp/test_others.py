"""Others at the same parameters: hooks of the user's, a second wrapper, names that are ignored; and who holds whom."""

import contextlib
import copy
import gc
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.models import mlp
from tests.ranks import run_ranks


def _module():
    """Two layers, each with a weight that counts as large and a bias that does not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))


def _clamp(param):
    param.grad = param.grad.clamp(-0.001, 0.001)


def _mask(param):
    param.grad[..., ::2].zero_()


def _step(model, number, rank):
    x = torch.randn(4, 80, generator=torch.Generator().manual_seed(10 * number + rank))
    model(x).square().mean().backward()


def _compare(rank, make, steps=4, between=lambda models, number: None, to_none=True):
    """Steps of both wrappers, made by `make(wrapper)`."""
    from torchshard.ddp import DistributedDataParallel

    models = [make(wrapper) for wrapper in (TorchDDP, DistributedDataParallel)]
    for number in range(steps):
        between(models, number)
        for model in models:
            model.zero_grad(to_none)
            _step(model, number, rank)
        for (n, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=lambda m, n=n, k=number: f"{n}, step {k}: {m}")


def _hooks(rank, world, act, views):
    """Registered before wrapping, after it, and once there are buckets."""

    def register(model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(act)

    for when in range(-1, 3):

        def make(wrapper, when=when):
            module = _module()
            if when < 0:
                register(module)
            return wrapper(module, gradient_as_bucket_view=views)

        def between(models, number, when=when):
            if number == when:
                for model in models:
                    register(model)

        for to_none in (True, False):
            _compare(rank, make, between=between, to_none=to_none)


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("act", [_clamp, _mask])
def test_hooks_of_others_come_first(act, views):
    run_ranks(2, _hooks, act, views, timeout=60)


def _wrapped_twice(rank, world, views):
    def wrap(wrapper, module):
        return wrapper(module, gradient_as_bucket_view=views and wrapper is not TorchDDP)  # which raises then

    def nested(wrapper):
        return wrap(wrapper, nn.Sequential(wrap(wrapper, _module())))

    def partly(wrapper):
        module = _module()
        module[0] = wrap(wrapper, module[0])
        return wrap(wrapper, module)

    for make in (nested, partly):
        _compare(rank, make)


@pytest.mark.parametrize("views", [True, False])
def test_an_average_of_averages_is_the_average(views):
    run_ranks(2, _wrapped_twice, views, timeout=60)


def _over_other_ranks(rank, world):
    """Each of the two would take the gradient as it is, and the last one's average would stand."""
    from torchshard.ddp import DistributedDataParallel

    whole, own = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][rank]
    for wrapper in (DistributedDataParallel, TorchDDP):
        module = _module()
        module[0] = wrapper(module[0], process_group=own)
        with pytest.raises(ValueError, match=r"0\.module\.weight .* the wrapper 0 over the ranks \[[01]\].* \[0, 1\]"):
            DistributedDataParallel(module, process_group=whole)
        names = [f"0.module.{name}" for name, _ in module[0].module.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        DistributedDataParallel(module, process_group=whole)


def test_wrappers_over_other_ranks_do_not_share_parameters():
    run_ranks(2, _over_other_ranks, timeout=60)


def _ignored(rank, world):
    """A weight of two names, of which one is ignored, is reduced by the other."""

    for ignored in ("0.weight", "1.weight"):

        def make(wrapper, ignored=ignored):
            module = _module()
            module[1].weight = module[0].weight
            wrapper._set_params_and_buffers_to_ignore_for_model(module, [ignored])
            return wrapper(module)

        _compare(rank, make)


def test_a_parameter_is_ignored_by_all_its_names():
    run_ranks(2, _ignored, timeout=60)


def _delayed(rank, world):
    """A delayed weight of two names is reduced once."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(80, 80) for _ in range(3)])
    module[2].weight = module[1].weight
    reference = copy.deepcopy(module)
    delayed = [("1.weight", module[1].weight)]
    model = DistributedDataParallel(
        module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[0].bias
    )
    for number in range(3):
        model.zero_grad()
        reference.zero_grad()
        _step(model, number, rank)
        for other in range(world):
            _step(reference, number, other)
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    return model.reducer.names, [(p.grad - q.grad / world).abs().max().item() for p, q in pairs]


def test_a_delayed_parameter_is_reduced_once():
    for names, found in run_ranks(2, _delayed, timeout=60):
        assert not {"1.weight", "2.weight"} & {*names}
        assert max(found) < 1e-6, found


class Nothing(torch.autograd.Function):
    """Gives a weight no gradient, though autograd asks for one."""

    @staticmethod
    def forward(ctx, x, weight, gives):
        ctx.save_for_backward(x)
        ctx.gives, ctx.shape = gives, weight.shape
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient, torch.full(ctx.shape, float(x.sum())) if ctx.gives else None, None


class Expert(nn.Module):
    """A weight whose kernel may have nothing to do."""

    def __init__(self, gives):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weight, self.gives = nn.Linear(80, 80), nn.Parameter(torch.ones(90, 90)), gives

    def forward(self, x):
        return Nothing.apply(self.layer(x), self.weight, self.gives)


def _undefined(rank, world):
    from torchshard.ddp import DistributedDataParallel

    for gives in ((), (0,), (1,)):
        model = DistributedDataParallel(Expert(rank in gives), static_graph=True)
        for number in range(4):
            model.zero_grad()
            _step(model, number, rank)
            grad = model.module.weight.grad
            assert (grad is None) is (not gives)
            if gives:  # by the one rank that has something
                x = torch.randn(4, 80, generator=torch.Generator().manual_seed(10 * number + gives[0]))
                expected = torch.full((90, 90), float(model.module.layer(x).sum()) / world)
                torch.testing.assert_close(grad, expected)


def test_a_static_graph_may_bring_no_gradient():
    run_ranks(2, _undefined, timeout=60)


def _freed(rank, world):
    """By counting references alone, the wrapper and all that belongs to it."""
    from torchshard.ddp import DistributedDataParallel

    found = {}
    for settings in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        for steps in (0, 3):
            gc.collect()
            gc.disable()
            module = mlp(80, 2)
            model = DistributedDataParallel(module, **settings)
            for number in range(steps):
                model.zero_grad()
                _step(model, number, rank)
            held = [weakref.ref(p) for p in module.parameters()]
            held += [weakref.ref(model.reducer)] + [weakref.ref(b) for b in model.reducer.buckets]
            del module, model
            found[str(settings), steps] = [type(o()).__name__ for o in held if o() is not None]
            gc.enable()
    return found


def test_what_is_dropped_is_freed_at_once():
    for found in run_ranks(2, _freed, timeout=60):
        assert {case: left for case, left in found.items() if left} == {}


def _copied(rank, world):
    """A copy of a wrapper has a reducer of its own."""
    from torchshard.ddp import DistributedDataParallel

    model = DistributedDataParallel(_module())
    _step(model, 0, rank)
    other = copy.deepcopy(model)
    del model
    gc.collect()
    for number in range(3):
        other.zero_grad()
        _step(other, number, rank)
    return [p.grad.double().sum().item() for p in other.parameters()]


def test_a_copy_outlives_what_it_was_made_of():
    first, second = run_ranks(2, _copied, timeout=60)
    assert first == second


def _spans(rank, world):
    """What profilers see: one of torch's, and one that observes by itself, which torch does not call running."""
    from torchshard import _torch
    from torchshard.ddp import DistributedDataParallel

    names = {"DistributedDataParallel.forward", "torch.distributed.ddp.reducer::search_unused_parameters"}
    model = DistributedDataParallel(_module(), find_unused_parameters=True)
    _step(model, 0, rank)
    found = []
    for fast in (True, False):
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with contextlib.nullcontext() if fast else _torch.without_fast_paths(), profiler as seen:
            _step(model, 1, rank)
            with contextlib.suppress(RuntimeError):  # a span ends where forward fails
                model(torch.randn(4, 81))
            _step(model, 2, rank)
        of_user = [event.name for event in seen.events() if event.is_user_annotation and event.name in names]
        found.append((sorted({*of_user}), len(of_user)))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        observer = torch.profiler.ExecutionTraceObserver().register_callback(file.name)
        observer.start()
        _step(model, 3, rank)
        observer.stop()
        observer.unregister_callback()
        text = Path(file.name).read_text()
        found.append(sorted(name for name in names if name in text))
    return found


def test_a_profiler_sees_spans_of_the_wrapper():
    names = ["DistributedDataParallel.forward", "torch.distributed.ddp.reducer::search_unused_parameters"]
    assert run_ranks(2, _spans) == [[(names, 5), (names, 5), names]] * 2
