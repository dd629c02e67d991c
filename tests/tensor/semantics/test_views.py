"""Views: they share memory with their base, or refuse what would show that they do not."""

from copy import deepcopy

import pytest
import torch

from tests.ranks import run_ranks


def shared(rank, world):
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(24.0).view(4, 6)
    found = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        x, want = distribute_tensor(full, mesh, [placement]), full.clone()
        for t in (x, want):
            t.t().mul_(2)
            t.unsqueeze(0).add_(1)
            t.transpose(0, 1).view(6, 4).neg_() if placement.is_replicate() or t is want else t.neg_()
            a, b = t.chunk(2, 1 if placement == Shard(0) else 0) if placement != Shard(1) else (t[:2], t[2:])
            a.zero_()
            b.mul_(3)
        found.append(torch.equal(x.full_tensor(), want))
    with torch.no_grad():
        moved = x[:, 1:5]  # of Shard(1): a copy
        x.to_local().add_(1)  # seen by the part's own version only
        found.append(torch.equal(moved.full_tensor(), want[:, 1:5] + 1))
    return found


def test_writes_through_views_reach_the_base():
    for found in run_ranks(2, shared):
        assert all(found)


def inference(rank, world):
    from torchshard import Shard, distribute_module, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 3), torch.nn.LayerNorm(3))
    x = torch.randn(5, 6)
    want = model(x)
    distribute_module(model, mesh)
    errors = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = model(distribute_tensor(x, mesh, [Shard(0)]))
            errors.append((y.full_tensor() - want).abs().max().item())
            z = y.clone()
            z.t().add_(1)
            errors.append((z.full_tensor() - want - 1).abs().max().item())
    return errors


def test_inference_mode():
    for errors in run_ranks(2, inference):
        assert max(errors) < 1e-5


def memory(rank, world):
    from torchshard import Replicate, distribute_tensor, init_device_mesh

    x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (world,)), [Replicate()])
    found = {}
    for name, call in {
        "as_strided of a view": lambda: x[1:].as_strided((2, 2), (1, 1), 4),
        "as_strided_": lambda: x.as_strided_((2, 2), (1, 1)),
        "resize_": lambda: x.resize_(2, 2),
    }.items():
        try:
            found[name] = f"returned {call()}"
        except Exception as error:
            found[name] = type(error).__name__
    return found


def the_whole_as_strided(rank, world):
    """All of a tensor, as it lies: this rank's part, as any view of it; with its gradient."""
    from torchshard import Shard, distribute_tensor, init_device_mesh
    from torchshard.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(20.0).view(5, 4).requires_grad_()
    x = distribute_tensor(full.detach(), mesh, [Shard(0)]).requires_grad_()
    with CommDebugMode() as mode:
        seen, told = x.as_strided((5, 4), (4, 1)), x.as_strided((5, 4), (4, 1), 0)
        copied, turned = torch.as_strided_copy(x, (5, 4), (4, 1)), x.t().as_strided((4, 5), (1, 4))
    (seen * told * copied).sum().backward()
    turned.detach().add_(1)
    (full**3).sum().backward()
    return (
        mode.get_total_counts(),
        [t.placements == (Shard(0),) for t in (seen, told, copied)] + [turned.placements == (Shard(1),)],
        [t.to_local().data_ptr() == x.to_local().data_ptr() for t in (seen, told, copied, turned)],
        torch.equal(x.grad.full_tensor(), full.grad),
        [torch.equal(t.full_tensor(), full + 1) for t in (x, seen, turned.t())],
    )


def test_a_window_on_all_of_a_tensor_is_no_other_part():
    for found in run_ranks(2, the_whole_as_strided):
        assert found == (0, [True] * 4, [True, True, False, True], True, [True] * 3), found


@pytest.mark.parametrize("name", ["as_strided of a view", "as_strided_", "resize_"])
def test_operators_on_memory_are_refused(name):
    for found in run_ranks(1, memory):
        assert found[name] == "UnsupportedOperatorError"


def shapes_in_place(rank, world):
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh, full = init_device_mesh("cpu", (world,)), torch.randn(5, 1, 4, requires_grad=True)
    for name, args in (("squeeze_", (1,)), ("unsqueeze_", (0,)), ("transpose_", (0, 2)), ("squeeze_", ())):
        plain, placed = full * 2, distribute_tensor(full.detach(), mesh, [Shard(0)]).requires_grad_() * 2
        getattr(plain, name)(*args)
        assert getattr(placed, name)(*args) is placed
        torch.testing.assert_close((placed * 3).full_tensor(), plain * 3)
    window, placed = full.as_strided((3, 2), (4, 1), 1), distribute_tensor(full.detach(), mesh, [Shard(0)])
    seen = placed.as_strided((3, 2), (4, 1), 1)
    torch.testing.assert_close(seen.full_tensor(), window)
    seen.zero_()
    changed = full.detach().clone()
    changed.as_strided((3, 2), (4, 1), 1).zero_()
    torch.testing.assert_close(placed.full_tensor(), changed)
    for tensor in (changed, placed):  # a window of a view, from where it starts
        tensor.view(20)[4:].as_strided((3, 4), (5, 1)).mul_(2)
    torch.testing.assert_close(placed.full_tensor(), changed)
    return True


def spectra(rank, world):
    from torchshard import Shard, distribute_tensor, init_device_mesh

    mesh, made = init_device_mesh("cpu", (world,)), []
    for put in (lambda t: t, lambda t: distribute_tensor(t, mesh, [Shard(0)])):
        torch.manual_seed(0)
        x, window = put(torch.randn(3, 64)).requires_grad_(), put(torch.hann_window(16))
        y = torch.stft(x, 16, 5, window=window, return_complex=True)
        z = torch.istft(y, 16, 5, window=window)
        (y.abs().square().sum() + z.square().sum()).backward()
        made.append([y, z, x.grad])
    for want, got in zip(*made, strict=True):
        torch.testing.assert_close(got.full_tensor(), want)
        assert got.stride() == want.stride()
    return True


def test_short_time_fourier_transforms_and_back():
    assert run_ranks(2, spectra) == [True, True]


def test_shapes_change_in_place_and_windows_reach_their_base():
    assert run_ranks(2, shapes_in_place) == [True, True]


VIEWS = {
    "columns": lambda t: t[..., 1:3],
    "steps": lambda t: t[..., ::2],
    "corner": lambda t: t[..., :3, :3],
    "one column": lambda t: t[..., 1],
    "transposed corner": lambda t: t.mT[..., 1:, 1:],
    "halves": lambda t: t.chunk(2, -1)[1],
}


def with_gaps(rank, world):
    """Strides of views are eager's, so what copies there copies here, and gradients take the same way."""
    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh

    torch.manual_seed(0)
    mesh, full = init_device_mesh("cpu", (world,)), torch.randn(3, 4, 4)
    eye = distribute_tensor(torch.eye(3), mesh, [Replicate()])
    compared = [
        lambda t, one: torch.det(t),
        lambda t, one: torch.linalg.slogdet(t)[1],
        lambda t, one: torch.linalg.solve(t, one.expand(3, 3, 3)),
    ]
    for placement in (Replicate(), *map(Shard, range(3))):
        for view in VIEWS.values():
            placed = distribute_tensor(full, mesh, [placement])
            seen, expected = view(placed), view(full)
            assert (seen.stride(), seen.is_contiguous()) == (expected.stride(), expected.is_contiguous())
            for copy in (lambda t: t.reshape(-1), lambda t: t.flatten(), lambda t: t.contiguous().view(-1)):
                torch.testing.assert_close(copy(seen).full_tensor(), copy(expected))
            written = full.clone()
            for write in (lambda t: t.contiguous().zero_(), lambda t: t.reshape(-1).add_(1)):
                write(view(written))
                write(seen)
                torch.testing.assert_close(placed.full_tensor(), written)
        for square in ("corner", "transposed corner"):
            for compute in compared:
                x, y = full.clone().requires_grad_(), distribute_tensor(full, mesh, [placement]).requires_grad_()
                compute(VIEWS[square](x), torch.eye(3)).sum().backward()
                compute(VIEWS[square](y), eye).sum().backward()
                torch.testing.assert_close(y.grad.full_tensor(), x.grad, rtol=1e-3, atol=1e-3)
    wide = torch.randn(3, 2, 2)  # two matrices on the first rank, and a right side that might be two vectors
    for side in (torch.randn(2, 2), torch.randn(2, 5)):
        ours = torch.linalg.solve(
            *[distribute_tensor(t, mesh, [p]) for t, p in ((wide, Shard(0)), (side, Replicate()))]
        )
        torch.testing.assert_close(ours.full_tensor(), torch.linalg.solve(wide, side))
    return True


def test_views_with_gaps():
    assert run_ranks(2, with_gaps) == [True, True]


def of_length_one(rank, world):
    """A split dim of length 1 goes on in another one; so do gradients of heads with one output."""
    from torchshard import Shard, distribute_tensor, init_device_mesh
    from torchshard.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    for shape, at, into, there in (
        ((1, 1), 1, (1,), 0),
        ((1, 1, 4), 0, (1, 4), 0),
        ((3, 1, 1), 1, (3, 1), 1),
        ((6, 1), 1, (2, 1, 3), 1),
        ((1, 3), 0, (3, 1), 1),
    ):
        base, full = distribute_tensor(torch.ones(shape), mesh, [Shard(at)]), torch.ones(shape)
        view = base.view(into)
        assert view.placements == (Shard(there),), (shape, at, into)
        view.mul_(3)
        assert torch.equal(base.full_tensor(), 3 * full)
    torch.manual_seed(0)
    plain = torch.nn.Linear(6, 1)
    head = parallelize_module(deepcopy(plain), mesh, ColwiseParallel())
    norms = []
    for m in (plain, head):
        m(torch.ones(3, 6)).square().sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1))
        torch.optim.AdamW(m.parameters(), fused=True).step()
    assert head.bias.grad.placements == (Shard(0),)
    torch.testing.assert_close(norms[1].full_tensor(), norms[0])
    for p, q in zip(head.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


def test_dims_of_length_one():
    run_ranks(2, of_length_one)


def not_of_the_piece(rank, world):
    """Views that global strides allow, and those of a piece whose last dim has length 1 do not."""
    from torchshard import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    x, w = torch.randn(15, 4), torch.randn(world, 4).requires_grad_()
    rows, split = distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(w.detach(), mesh, [Shard(0)])
    split.requires_grad_()
    for _ in range(2):  # with a new plan, and with the one that was kept
        for a, b in ((x, w), (rows, split)):
            torch.nn.functional.linear(a, b).view(5, 3, world).transpose(0, 1).square().sum().backward()
    torch.testing.assert_close(split.grad.full_tensor(), w.grad)
    for _ in range(2):
        local = torch.arange(15.0).view(3, 5, 1).transpose(0, 1)
        base = DTensor.from_local(local, mesh, [Shard(2)], shape=(5, 3, world), stride=(3 * world, world, 1))
        view = base.view(15, world)
        base.add_(1)
        torch.testing.assert_close(view.to_local(), local.reshape(15, 1))
        view.mul_(2)
        torch.testing.assert_close(base.to_local(), view.to_local().view(5, 3, 1))


def test_views_that_pieces_do_not_allow():
    run_ranks(2, not_of_the_piece)
