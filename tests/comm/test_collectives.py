import contextlib
import functools
import itertools
import math
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.interpreters import run_python
from tests.ranks import by_messages, run_ranks
from tests.watching import Names
from torchshard.comm import collectives as C
from torchshard.comm import reach
from torchshard.comm.group import Group
from torchshard.comm.reducing import only_gloo_reduces, prepare
from torchshard.comm.travelling import cut
from torchshard.errors import UnsupportedOperatorError
from torchshard.layout.pieces import piece

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip
SIZES = [0, 1, 2, 3, 4, 5, 7]
WAYS = ["said", "read", "read whole", "transport"]
"""How ranks of one machine, and others, send: with words, in one another's memory, by gloo."""


def _group(rank, world, way="said"):
    import torch.distributed as dist

    if way == "transport":
        by_messages()
    elif way != "said":
        reach.SAID, reach.WHOLE = 0, 0 if way == "read" else 2**20
    return Group(dist.new_group().group_name, world, rank)


def _every_way(body):
    """What ranks find, way by way."""

    @functools.wraps(body)
    def run(rank, world, *args):
        return [body(rank, world, _group(rank, world, way), *args) for way in WAYS]

    return run


def _lengths(n, world):
    return [piece(n, world, k)[1] for k in range(world)]


def _full(shape, dtype):
    return (torch.arange(math.prod(shape)) % 5).reshape(shape).to(dtype)


@_every_way
def _moves(rank, world, group):
    done = 0
    for dtype in DTYPES:
        for n in SIZES:
            for dim, other in ((0, 1), (1, 0), (2, 1)):
                shape = [3, 4, 2]
                shape[dim] = n
                full, lengths = _full(shape, dtype), _lengths(n, world)
                parts = full.split(lengths, dim)
                _same(C.all_gather(parts[rank].clone(), dim, lengths, group), full)
                # From pieces of `dim` to pieces of `other`.
                cut = _lengths(shape[other], world)
                _same(C.all_to_all(parts[rank].clone(), other, dim, cut, lengths, group), full.split(cut, other)[rank])
                _same(C.broadcast(full if rank == world - 1 else torch.zeros_like(full), world - 1, group), full)
                done += 1
    turned = torch.arange(12, dtype=torch.uint8).view(4, 3).t()  # torch cannot copy elements of four bits
    _same(C.broadcast(turned.view(torch.uint4), 0, group).view(torch.uint8), turned)
    return done


def _same(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    assert torch.equal(
        got.view(torch.uint8) if got.itemsize == 1 else got,
        want.contiguous().view(torch.uint8) if got.itemsize == 1 else want,
    )


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_pieces_of_every_length_and_type_are_gathered_exchanged_and_broadcast(world):
    assert run_ranks(world, _moves) == [[len(DTYPES) * len(SIZES) * 3] * len(WAYS)] * world


@_every_way
def _reduces(rank, world, group, gloo):
    if not gloo:
        C.only_gloo_reduces = lambda term, op: op in ("band", "bor", "bxor")
    for op, dtypes, by in [
        ("sum", [torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.complex64], lambda t: t.sum(0)),
        ("avg", [torch.float32, torch.float64], lambda t: t.mean(0)),
        ("max", [torch.float32, torch.float16, torch.int32, torch.bool], lambda t: t.amax(0)),
        ("min", [torch.float32, torch.int16, torch.bool], lambda t: t.amin(0)),
        ("product", [torch.float32, torch.int64], lambda t: t.prod(0)),
        (
            "band",
            [torch.int32, torch.bool],
            lambda t: _fold(t, torch.bitwise_and),
        ),
        ("bor", [torch.int32, torch.bool], lambda t: _fold(t, torch.bitwise_or)),
        ("bxor", [torch.int32], lambda t: _fold(t, torch.bitwise_xor)),
        ("norm(2.0)", [torch.float32], lambda t: torch.linalg.vector_norm(t, 2, 0)),
        ("norm(inf)", [torch.float32], lambda t: torch.linalg.vector_norm(t, math.inf, 0)),
    ]:
        for dtype in dtypes:
            for n in SIZES:
                for dim in (0, 1):
                    shape = [3, 4]
                    shape[dim] = n
                    terms = torch.stack([(_full(shape, torch.int64) * (k + 1) % 5).to(dtype) for k in range(world)])
                    want = by(terms).to(dtype)
                    torch.testing.assert_close(C.all_reduce(terms[rank], op, group), want)
                    lengths = _lengths(n, world)
                    torch.testing.assert_close(
                        C.reduce_scatter(terms[rank], op, dim, lengths, group), want.split(lengths, dim)[rank]
                    )
    return True


def _fold(terms, by):
    total = terms[0]
    for t in terms[1:]:
        total = by(total, t)
    return total


@pytest.mark.parametrize(("world", "gloo"), [pytest.param(2, True, marks=pytest.mark.full), (3, False), (3, True)])
def test_reductions(world, gloo):
    assert run_ranks(world, _reduces, gloo) == [[True] * len(WAYS)] * world


def test_bits_are_reduced_by_gloo_alone():
    for device, known in (("cpu", True), ("meta", False)):
        x = torch.empty(2, dtype=torch.int32, device=device)
        assert only_gloo_reduces(x, "bxor") is not known
        assert not only_gloo_reduces(x, "max")


@_every_way
def _nan(rank, world, group):
    found = []
    for where in range(world):
        x = torch.tensor([1.0, 2.0, float(rank), -math.inf])
        if rank == where:
            x[1] = math.nan
        found.append((C.all_reduce(x, "max", group), C.all_reduce(x, "min", group)))
    return [[t.tolist() for t in pair] for pair in found]


def test_a_nan_of_any_rank_survives_max_and_min():
    for answer in itertools.chain(*run_ranks(2, _nan)):
        for largest, smallest in answer:
            assert math.isnan(largest[1])
            assert math.isnan(smallest[1])
            assert (largest[2], smallest[2], largest[3]) == (1.0, 0.0, -math.inf)


@_every_way
def _seats(rank, world, group):
    # A line that runs through the ranks backwards.
    group = Group(group.name, world, world - 1 - rank, tuple(reversed(range(world))))
    full, lengths = torch.arange(7.0), _lengths(7, world)
    mine = full.split(lengths)[group.position]
    assert torch.equal(C.all_gather(mine, 0, lengths, group), full)
    assert torch.equal(C.reduce_scatter(full, "sum", 0, lengths, group), mine * world)
    table = torch.arange(12.0).view(4, 3)
    rows, columns = _lengths(4, world), _lengths(3, world)
    got = C.all_to_all(table.split(rows)[group.position], 1, 0, columns, rows, group)
    assert torch.equal(got, table.split(columns, 1)[group.position])
    return True


def test_a_line_need_not_follow_the_ranks_of_its_group():
    assert run_ranks(3, _seats) == [[True] * len(WAYS)] * 3


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.int64, "avg"),
        (torch.int16, "avg"),
        (torch.complex64, "max"),
        (torch.complex32, "product"),
        (torch.bool, "sum"),
        (torch.float32, "band"),
        (torch.float8_e4m3fn, "bxor"),
        (torch.int64, "norm(2.0)"),
        (torch.uint64, "max"),
    ],
)
def test_reductions_without_a_meaning_are_refused(dtype, op):
    with pytest.raises(UnsupportedOperatorError, match=f"of {dtype} cannot be reduced"):
        prepare(torch.zeros(2, dtype=dtype), op, 2)


@pytest.mark.parametrize("op", ["max", "min", "norm(inf)", "norm(-inf)"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_extremes_of_all_bits(dtype, op):
    """One term of integers each: NaNs of both signs, infinities, zeros and numbers that are not normal among them."""
    torch.manual_seed(0)
    as_wide = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize]
    info = torch.iinfo(as_wide)
    terms = torch.randint(info.min, info.max, (3, 500), dtype=as_wide).view(dtype)
    edges = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.0, -1.0]
    every = torch.tensor(list(itertools.product(edges, repeat=3))).t().to(dtype)
    terms = torch.cat([terms, every], 1)
    said = [prepare(term, op, 3) for term in terms]
    assert not any(term.is_floating_point() for term, _, _ in said)
    (name,) = {name for _, name, _ in said}
    summed = getattr(torch.stack([term for term, _, _ in said]), f"a{name}")(0)
    wide = terms.to(torch.float64)
    want = getattr(wide.abs() if op.startswith("norm") else wide, f"a{name}")(0)
    for _, _, finish in said:
        torch.testing.assert_close(finish(summed).to(torch.float64), want, rtol=0, atol=0, equal_nan=True)


@_every_way
def _half(rank, world, group):
    """Averages and norms whose sums are out of the range of the terms, or below it."""
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        for op, value in [
            ("avg", 60000.0),
            ("norm(2.0)", 300.0),
            ("norm(2.0)", 1e-4),
            ("norm(3.0)", 60.0),
            ("avg", 1.0078125),
        ]:
            x = torch.full((2, 3), value, dtype=dtype)
            order = {"norm(2.0)": 2, "norm(3.0)": 3}.get(op)
            terms = torch.stack([x] * world)
            want = terms.mean(0) if order is None else torch.linalg.vector_norm(terms, order, 0)
            lengths = _lengths(2, world)
            mine = want.split(lengths)[group.position]
            got = C.all_reduce(x, op, group), C.reduce_scatter(x, op, 0, lengths, group)
            found.append(all(a.dtype is dtype and torch.equal(a, b) for a, b in zip(got, (want, mine), strict=True)))
    for dtype in (torch.uint16, torch.uint32):
        x = torch.tensor([1, 2, 65535], dtype=dtype)
        found += [
            C.all_reduce(x, "sum", group).equal((x.to(torch.int64) * world).to(dtype)),
            C.all_reduce(x, "max", group).equal(x),
        ]
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_averages_and_norms_of_narrow_types_are_those_of_eager_torch(world):
    for found in itertools.chain(*run_ranks(world, _half)):
        assert found == [True] * 14


class _Beneath(TorchDispatchMode):
    """Collectives run where operators of DTensors do: there torch no longer carries out what it has put off."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(*args)


def _beneath(run, x):
    with _Beneath(run):
        return torch.ops.aten.alias(x)


def _moves_and_sums(rank, plain, group):
    """Functions of a tensor of 3 x 2 that is the same on both ranks, and what they give."""
    pieces, mine = plain.split([2, 1]), slice(0, 2) if rank == 0 else slice(2, 3)
    return [
        (lambda x: C.all_gather(x, 0, [3, 3], group), torch.cat([plain] * 2)),
        (lambda x: C.all_gather(x[mine], 0, [2, 1], group), plain),
        (lambda x: C.all_reduce(x, "sum", group), plain * 2),
        (lambda x: C.all_reduce(x, "norm(1.0)", group), plain.abs() * 2),
        (lambda x: C.broadcast(x, 0, group), plain),
        (lambda x: C.scatter(x, 0, [2, 1], 0, group), pieces[rank]),
        (lambda x: C.reduce_scatter(x[:2], "sum", 0, [1, 1], group), plain[rank : rank + 1] * 2),
        (lambda x: C.reduce_scatter(x, "sum", 0, [2, 1], group), pieces[rank] * 2),
        (lambda x: C.exchange([x[:1], x[1:2]], [(1, 2)] * 2, group)[rank], plain[rank : rank + 1]),
        (lambda x: C.all_to_all(x[mine], 1, 0, [1, 1], [2, 1], group), plain[:, rank : rank + 1]),
    ]


@_every_way
def _put_off(rank, world, group):
    """Conjugated and negated tensors whose bits are still those of before."""
    source = torch.tensor([[1 + 2j, 3 - 1j], [0 + 1j, 2 + 0j], [4 - 3j, 1 + 1j]])
    for x in (source.conj(), source.conj().imag):
        assert x.is_conj() or x.is_neg()
        for at, (run, want) in enumerate(_moves_and_sums(rank, x.resolve_conj().resolve_neg().clone(), group)):
            assert torch.equal(run(x), want), at
            assert torch.equal(_beneath(run, x), want), f"{at}, beneath an operator"
    imag = source.conj().imag
    assert torch.equal(_beneath(lambda x: C.all_reduce(x, "max", group), imag), imag)
    return True


def test_what_torch_has_put_off_is_carried_out():
    assert run_ranks(2, _put_off) == [[True] * len(WAYS)] * 2


def test_pieces_along_the_first_dim_are_sent_where_they_lie():
    x, lengths, group = torch.arange(15.0).view(5, 3), [2, 2, 1], Group("", 3, 0)
    assert cut(x, 0, lengths, group)[0].data_ptr() == x.data_ptr()
    for dim, at, places in ((0, group, (0, 1, 2)), (0, Group("", 3, 0, (1, 2, 0)), (2, 0, 1)), (1, group, (0, 1, 2))):
        pieces = x.split([2, 2, 1] if dim == 0 else [1, 1, 1], dim)
        sent, counts = cut(x, dim, [piece.shape[dim] for piece in pieces], at)
        assert torch.equal(sent, torch.cat([pieces[k].reshape(-1) for k in places]))
        assert counts == [pieces[k].numel() for k in places]


def _joined(pieces, group):
    """All of them under way at once, the last waited for first."""
    started = [C.start_all_gather(piece, 0, [2] * group.size, group) for piece in pieces]
    return [each.wait() for each in reversed(started)][::-1]


def _joined_in_a_graph(pieces, group):
    """The same, as the graphs of DTensors and of others say it."""
    collectives = torch.ops._c10d_functional
    sent = [collectives.all_gather_into_tensor(piece, group.size, group.name) for piece in pieces]
    return [collectives.wait_tensor(each) for each in reversed(sent)][::-1]


def _several_under_way(rank, world, how):
    group, kernels, modes, run = _group(rank, world, "transport"), set(), [], _joined
    if how in ("aot_eager", "inductor"):
        run = torch.compile(_joined_in_a_graph, backend=how, fullgraph=True)
    for k in range(100):
        if rank:
            time.sleep(0.0005)  # the other has begun all of them
        pieces = [torch.full((2, 3), 4.0 * k + j + rank / 2) for j in range(3)]
        with contextlib.ExitStack() as stack:
            seen = k == 50 and stack.enter_context(torch.autograd.profiler.profile())
            modes += [stack.enter_context(Names())] if how == "modes" else []
            whole = run(pieces, group)
        right = [torch.cat([piece - rank / 2, piece - rank / 2 + 0.5]) for piece in pieces]
        assert all(map(torch.equal, whole, right)), k
        kernels |= {event.name for event in (seen.function_events if seen else ()) if event.name.startswith("c10d::")}
    return kernels, [mode.seen.count("all_gather_into_tensor") for mode in modes]


@pytest.mark.parametrize("how", ["eager", "modes", "aot_eager", "inductor"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_several_may_be_under_way(how, wrapped, monkeypatch):
    """Those of torch's operator write to memory that has been freed, once in some ten thousand: it is not asked for."""
    if wrapped:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    seen = [3] * 100 if how == "modes" else []
    assert run_ranks(2, _several_under_way, how) == [({"c10d::_allgather_base_"}, seen)] * 2


def _told_by_torch(rank, world):
    import torch.distributed as dist

    collectives, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    for x in (torch.arange(4).view(2, 2) * (1 + 1j), torch.arange(4).view(2, 2).t() + rank):
        got = collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), world, name))
        _same(got, torch.cat([x - rank + k for k in range(world)] if not x.is_complex() else [x] * world))
    with pytest.raises(RuntimeError, match="invalid size of output tensor"):
        collectives.all_gather_into_tensor(torch.tensor(1.0), world, name)
    if "str group_name" not in str(collectives.all_gather_into_tensor.default._schema):  # the group itself, too
        got = collectives.wait_tensor(collectives.all_gather_into_tensor(torch.ones(2), world, dist.group.WORLD))
        _same(got, torch.ones(2 * world))


def test_what_is_not_carried_goes_by_the_other():
    run_ranks(2, _told_by_torch)


_THEIRS = """
import torch

library = torch.library.Library("_c10d_functional", "IMPL")
library.impl("all_gather_into_tensor", lambda x, size, name: x.repeat(size), "CPU")

from torchshard._torch import functional_collectives

print(functional_collectives().all_gather_into_tensor(torch.ones(2), 2, "none").tolist())
"""


def test_a_kernel_of_somebody_else_stays(tmp_path):
    (tmp_path / "theirs.py").write_text(_THEIRS)
    assert run_python(["theirs.py"], tmp_path, 60) == (0, "[1.0, 1.0, 1.0, 1.0]\n")
