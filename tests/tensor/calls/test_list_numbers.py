"""A number beside a list of tensors becomes a tensor once: the same bits as eager torch's, in fewer operators."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from torchshard import DTensor, Partial, Replicate, Shard, _torch, distribute_tensor, init_device_mesh
from torchshard.errors import UnsupportedOperatorError

NUMBERS = (0.9, -1.5, 3, 0.0, -0.0, 1e-40, 1e300, math.inf, math.nan, 2**62 + 1, 2**53 + 1, True)
BY_ONE = (torch._foreach_add, torch._foreach_mul, torch._foreach_div)


@pytest.fixture(scope="module", autouse=True)
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def lists(dtype, width=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, width, generator=generator).to(dtype) for n in (2, 0, 1, 5)]


def bits(tensors):
    return [
        (t.dtype, t.tolist() if not t.is_floating_point() else t.double().view(torch.int64).tolist()) for t in tensors
    ]


def placed(mesh, tensors):
    return [distribute_tensor(t.clone(), mesh, [Shard(0)]) for t in tensors]


def same(mesh, dtype, call, width=3):
    """The call gives the same bits, or the same error, for lists of DTensors: the first time and with the plan kept."""
    plain = [t.clone() for t in lists(dtype, width)]
    told = None
    try:
        expected = call(plain)
    except RuntimeError as error:
        told = str(error)
    for _ in range(2):
        ours = placed(mesh, lists(dtype, width))
        if told is not None:
            with pytest.raises(RuntimeError) as raised:
                call(ours)
            assert str(raised.value) == told
            continue
        got = call(ours)
        results, wanted = (ours, plain) if expected is None else (got, expected)
        assert bits([t.to_local() for t in results]) == bits(wanted)


@pytest.mark.parametrize("call", [
    lambda xs: torch._foreach_mul(xs, [1.0] * 3),
    lambda xs: torch._foreach_div_(xs, [2.0] * 5),
    lambda xs: torch._foreach_add(xs, []),
    lambda xs: torch._foreach_addcmul(xs, xs, xs, [0.5]),
    lambda xs: torch._foreach_add(xs, xs[:2]),
    lambda xs: torch._foreach_copy_(xs[:2], xs),
    lambda xs: torch._foreach_lerp(xs, xs[:1], 0.5),
    lambda xs: torch._foreach_addcmul(xs, xs, xs, torch.ones(3)),
    lambda xs: torch._foreach_addcdiv_(xs, xs, xs, torch.tensor(0.5)),
    lambda xs: torch._foreach_addcmul_(xs, xs[:3], xs, torch.ones(4)),
])  # fmt: skip
def test_lists_of_other_lengths_are_refused_as_in_eager_torch(mesh, call):
    same(mesh, torch.float32, call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_one_number_and_one_for_each(mesh, dtype):
    for function, number in itertools.product(BY_ONE, NUMBERS):
        in_place = getattr(torch, f"{function.__name__}_")
        for numbers in (number, [number] * 4, [number, 2.0, 1, number], [0.0, 0.0, -0.0, 0.0]):
            same(mesh, dtype, lambda x, f=function, n=numbers: f(x, n))
            same(mesh, dtype, lambda x, f=in_place, n=numbers: f(x, n))
    for name, number in itertools.product(("addcmul", "addcdiv"), (0.5, -0.0, 3, math.nan)):
        for numbers in ([number] * 4, [number, 1.0, 2, 3.0]):
            same(mesh, dtype, lambda x, m=name, n=numbers: getattr(torch, f"_foreach_{m}")(x, x, x, n))
            same(mesh, dtype, lambda x, m=name, n=numbers: getattr(torch, f"_foreach_{m}_")(x, x, x, n))
        for kind in (torch.float64, torch.float32, torch.bfloat16):
            scalars = torch.tensor([number, 0.1, 2, 3.0], dtype=kind)
            same(mesh, dtype, lambda x, m=name, n=scalars: getattr(torch, f"_foreach_{m}")(x, x, x, n))
            same(mesh, dtype, lambda x, m=name, n=scalars: getattr(torch, f"_foreach_{m}_")(x, x, x, n))


def test_overloads_that_are_called_by_name(mesh):
    """Without torch's private bindings, which find the overload by the arguments."""
    with _torch.without_fast_paths():
        for function, numbers in itertools.product(BY_ONE, (0.9, [0.9] * 4, [0.9, 2.0, 1, 0.9])):
            in_place = getattr(torch, f"{function.__name__}_")
            same(mesh, torch.float32, lambda x, f=function, n=numbers: f(x, n), width=2)
            same(mesh, torch.float32, lambda x, f=in_place, n=numbers: f(x, n), width=2)
        for numbers in ([0.5] * 4, [0.5, 1.0, 2, 3.0]):
            same(mesh, torch.float32, lambda x, n=numbers: torch._foreach_addcmul(x, x, x, n), width=2)
            same(mesh, torch.float32, lambda x, n=numbers: torch._foreach_addcdiv_(x, x, x, n), width=2)


def test_dtypes_that_differ_and_other_numbers(mesh):
    def mixed(x):
        return torch._foreach_mul([x[0], x[2].double() if isinstance(x[2], torch.Tensor) else x[2]], 0.3)

    same(mesh, torch.float32, mixed)
    same(mesh, torch.float32, lambda x: torch._foreach_add(x, 1 + 2j))
    same(mesh, torch.float32, lambda x: torch._foreach_pow(x, 2.0))
    same(mesh, torch.float32, lambda x: torch._foreach_sub(x, 0.1))
    if hasattr(torch, "_foreach_powsum"):
        same(mesh, torch.float32, lambda x: torch._foreach_powsum(x, 2, dtype=torch.float64))


def test_plain_scalars_in_the_first_list(mesh):
    two, half = torch.tensor(2.0), torch.tensor(0.5, dtype=torch.float64)
    for function in (torch._foreach_mul, torch._foreach_sub, torch._foreach_div, torch._foreach_maximum):
        same(mesh, torch.float32, lambda xs, f=function: f([two, half] * 2, xs))
        same(mesh, torch.float32, lambda xs, f=function: f([two, *xs[1:]], [xs[0], half, *xs[2:]]))
    same(mesh, torch.float32, lambda xs: torch._foreach_addcmul([half] * 4, xs, [x[:1] for x in xs]))
    terms = [DTensor.from_local(torch.ones(3), mesh, [Partial()]) for _ in range(2)]
    made = torch._foreach_mul([two, terms[1]], [terms[0], two])
    assert [x.placements for x in made] == [(Replicate(),), (Partial(),)]


@pytest.mark.parametrize("numbers", [0.9, [0.9] * 4], ids=["one", "one for each"])
@pytest.mark.parametrize("name", ["_foreach_add_", "_foreach_mul_", "_foreach_div_"])
def test_a_number_is_made_a_tensor_once(mesh, name, numbers):
    ours = placed(mesh, lists(torch.float32))
    getattr(torch, name)(ours, numbers)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        getattr(torch, name)(ours, numbers)
    operator = f"aten::{name.removeprefix('_foreach_')}"
    # In torch's own way the number of each item comes as a Python number, which has no shape.
    calls = [event for event in seen.events() if event.name == operator]
    assert len(calls) == 4
    assert all(event.input_shapes[1] == [] for event in calls)
    conversions = [event for event in seen.events() if event.name == "aten::to"]
    assert len(conversions) == 1


def test_a_list_is_not_written_in_part(mesh):
    ours = [DTensor.from_local(torch.ones(3), mesh, [Partial(op)]) for op in ("max", "product")]
    view = ours[1].view(3, 1)  # so that it cannot take over gathered values
    with pytest.raises(UnsupportedOperatorError, match="of which there are views"):
        torch._foreach_add_(ours, 1.0)
    assert [x.to_local().tolist() for x in (*ours, view.view(3))] == [[1.0] * 3] * 3


def test_a_compiled_step_of_lists_whose_lengths_are_dynamic(mesh):
    plain, ours = lists(torch.float32), placed(mesh, lists(torch.float32))
    for tensors in (plain, ours):
        parameters = [torch.nn.Parameter(t) for t in tensors]
        step = torch.optim.NAdam(parameters, foreach=True).step  # numbers as plain scalars, where it is compiled
        if tensors is ours:
            step = torch.compile(step, backend="aot_eager", dynamic=True)
        for _ in range(2):
            for p in parameters:
                p.grad = p.detach().sin()
            step()
    torch.testing.assert_close([t.to_local() for t in ours], plain)


def test_clipping_in_a_region_whose_numbers_are_dynamic(mesh):
    """Rules read the order of a norm, which is a symbol there."""
    clip = torch.compile(torch.nn.utils.clip_grad_norm_, backend="aot_eager", dynamic=True)
    tensors = lists(torch.float32)[:1]
    plain, ours = [[torch.nn.Parameter(t) for t in some] for some in (tensors, placed(mesh, tensors))]
    for order in (2.0, 3.0, math.inf):
        for p in (*plain, *ours):
            p.grad = p.detach() * 2
        expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, order)
        torch.testing.assert_close(clip(ours, 1.0, order).full_tensor(), expected)
        torch.testing.assert_close(ours[0].grad.to_local(), plain[0].grad)


def test_traced_lists_stay_as_they_are(mesh):
    def step(x):
        torch._foreach_mul_(x, 0.5)
        return torch._foreach_add(x, 1.5)

    plain, ours = lists(torch.float32)[:1], placed(mesh, lists(torch.float32)[:1])
    step(placed(mesh, lists(torch.float32)[:1]))  # the plan is there
    made = torch.compile(step, backend="aot_eager", fullgraph=True)(ours)
    assert bits([t.to_local() for t in made]) == bits(step(plain))
    meta = [distribute_tensor(torch.ones(2, 3, device="meta"), mesh, [Shard(0)])]
    torch._foreach_mul_(meta, 0.5)
    assert meta[0].device.type == "meta"
