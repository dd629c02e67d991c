"""What only GPUs show: their kernels, their streams and their memory; beside plain tensors on the same GPU."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_CLOSE = {torch.float32: (1e-4, 1e-5), torch.float16: (1e-2, 1e-2), torch.bfloat16: (3e-2, 3e-2)}


def _mesh(world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cuda", (world,))


def _whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _close(got: Any, expected: torch.Tensor, what: str) -> None:
    rtol, atol = _CLOSE.get(expected.dtype, (0, 0))
    torch.testing.assert_close(_whole(got), expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def _same(world: int, what: str, run: Callable[..., Any], operands: list[torch.Tensor], *places: Any) -> Any:
    """`run` of DTensors and of plain tensors: results and gradients; the DTensor's result."""
    from torchshard import distribute_tensor

    mesh = _mesh(world)
    plain = [x.clone().requires_grad_(x.is_floating_point()) for x in operands]
    spread = [
        distribute_tensor(x.clone(), mesh, [place]).requires_grad_(x.is_floating_point())
        for x, place in zip(operands, places, strict=True)
    ]
    expected, got = run(*plain), run(*spread)
    _close(got, expected, what)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    got.backward(distribute_tensor(grad, mesh, got.placements))
    for i, (x, y) in enumerate(zip(spread, plain, strict=True)):
        if y.grad is not None:
            _close(x.grad, y.grad, f"{what}, gradient {i}")
    return got


def attention(rank: int, world: int) -> None:
    """All kernels: split batches and heads stay split, grouped and causal ones and masks."""
    from torchshard import Replicate, Shard

    torch.manual_seed(0)
    backends = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
    for backend in backends:
        for dtype in (torch.bfloat16, torch.float16):
            q, k, v = (torch.randn(4, 4, 32, 64, dtype=dtype) for _ in range(3))
            for place in (Shard(0), Shard(1), Shard(2), Replicate()):
                for causal in (False, True):
                    run = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
                    if backend is SDPBackend.MATH:  # torch makes a plain mask for it
                        run = _with_replicated(run)
                    with sdpa_kernel(backend):
                        out = _same(world, f"{backend} {dtype} {place} {causal}", run, [q, k, v], place, place, place)
                    if place in (Shard(0), Shard(1)):
                        assert out.placements == (place,), (backend, out.placements)
        if backend is not SDPBackend.FLASH_ATTENTION:
            for length in (32, 27):  # the rows of the second start nowhere in particular
                q, k, v = (torch.randn(4, 4, length, 64, dtype=dtype) for _ in range(3))
                mask = torch.rand(4, 4, length, length) > 0.3
                mask[..., 0] = True
                for place in (Shard(0), Shard(1), Shard(2)):
                    with sdpa_kernel(backend):
                        _same(world, f"{backend}, mask", F.scaled_dot_product_attention, [q, k, v, mask], *[place] * 4)
        if backend is SDPBackend.FLASH_ATTENTION:
            run = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
            with sdpa_kernel(backend):
                out = _same(world, "grouped", run, [q, k[:, :2], v[:, :2]], *[Shard(1)] * 3)
                assert out.placements == (Shard(1),)
    dropped = functools.partial(F.scaled_dot_product_attention, dropout_p=0.5)
    from torchshard import distribute_tensor

    results = []
    for place in (Shard(0), Shard(1), Replicate()):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.manual_seed(7)
            results.append(dropped(*(distribute_tensor(x, _mesh(world), [place]) for x in (q, k, v))).full_tensor())
    for other in results[1:]:
        _close(other, results[0], "dropout in attention")


def layers(rank: int, world: int) -> None:
    """Layers that cudnn or CUDA have kernels of their own for, with a split batch, even and uneven."""
    from torchshard import Replicate, Shard

    torch.manual_seed(0)
    for batch in (4, 5):
        x = torch.randn(batch, 4, 8, 8)
        w, b = torch.randn(6, 4, 3, 3), torch.randn(6)
        split = Shard(0), Replicate(), Replicate()
        _same(world, "conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), [x, w, b], *split)
        _same(world, "conv2d, channels", lambda x, w, b: F.conv2d(x, w, b), [x, w, b], Replicate(), Shard(0), Shard(0))
        _same(world, "conv2d, rows", lambda x, w, b: F.conv2d(x, w, b, padding=1), [x, w, b], Shard(2), *split[1:])
        _same(world, "max_pool2d", lambda x: F.max_pool2d(x, 2), [x], Shard(0))
        gamma, beta = torch.rand(4) + 0.5, torch.randn(4)
        norm = lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)  # noqa: E731
        _same(world, "batch_norm", norm, [x, gamma, beta], *split)
        _same(world, "group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), [x, gamma, beta], *split)
        y, gamma, beta = torch.randn(batch, 16), torch.rand(16) + 0.5, torch.randn(16)
        _same(world, "layer_norm", lambda x, w, b: F.layer_norm(x, (16,), w, b), [y, gamma, beta], *split)
        _same(world, "rms_norm", lambda x, w: F.rms_norm(x, (16,), w), [y, gamma], *split[:2])
        grid = torch.rand(batch, 5, 5, 2) * 2 - 1
        sample = functools.partial(F.grid_sample, align_corners=True)
        _same(world, "grid_sample", sample, [x, grid], Shard(0), Shard(0))
        classes = torch.randint(0, 16, (batch,))
        _same(world, "cross_entropy", F.cross_entropy, [y, classes], Shard(0), Shard(0))
        _same(world, "cross_entropy, classes", F.cross_entropy, [y, classes], Shard(1), Replicate())
        table, rows = torch.randn(10, 6), torch.randint(0, 10, (batch, 3))
        _same(world, "embedding", F.embedding, [rows, table], Shard(0), Replicate())
        _same(world, "embedding, rows", F.embedding, [rows, table], Replicate(), Shard(0))
        _same(world, "embedding_bag", _with_replicated(F.embedding_bag), [rows, table], Shard(0), Replicate())
        for kind in (nn.LSTM, nn.GRU):
            first = _with_replicated(lambda x, layer=kind(4, 6, batch_first=True): layer(x)[0])  # noqa: B008
            _same(world, kind.__name__, first, [x.flatten(2).transpose(1, 2).contiguous()], Shard(0))
        log = torch.randn(12, batch, 8).log_softmax(-1)
        for kind in (torch.int32, torch.int64):
            targets = torch.randint(1, 8, (batch, 3), dtype=kind)
            lengths = torch.full((batch,), 12, dtype=kind), torch.full((batch,), 3, dtype=kind)
            loss = functools.partial(F.ctc_loss, targets=targets, input_lengths=lengths[0], target_lengths=lengths[1])
            _same(world, f"ctc_loss {kind}", _with_replicated(loss), [log], Shard(1))


def _with_replicated(function: Callable[..., Any]) -> Callable[..., Any]:
    from torchshard import implicit_replication

    def run(*args: Any) -> Any:
        with implicit_replication():
            return function(*args)

    return run


def optimizers(rank: int, world: int) -> None:
    """Fused, capturable and for lists, with a GradScaler, of split parameters, as on plain ones."""
    from torchshard import Shard, distribute_tensor

    mesh = _mesh(world)
    for make in (
        functools.partial(torch.optim.AdamW, fused=True),
        functools.partial(torch.optim.AdamW, foreach=True),
        functools.partial(torch.optim.AdamW, capturable=True),
        functools.partial(torch.optim.Adam, amsgrad=True, fused=True),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        functools.partial(torch.optim.Adagrad, lr=0.1),
    ):
        torch.manual_seed(0)
        plain = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
        spread = [nn.Parameter(distribute_tensor(x.detach().clone(), mesh, [Shard(0)])) for x in plain]
        steps, scalers = [make(plain), make(spread)], [torch.amp.GradScaler("cuda") for _ in range(2)]
        for step in range(4):
            for parameters, optimizer, scaler in zip((plain, spread), steps, scalers, strict=True):
                loss = sum((p * p).sum() for p in parameters)
                factor = torch.full_like(_whole(loss), torch.inf if step == 2 else 1.0)
                scaler.scale(loss * (distribute_tensor(factor, mesh) if parameters is spread else factor)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for x, y in zip(spread, plain, strict=True):
            _close(x.detach(), y.detach(), str(make))


def autocast(rank: int, world: int) -> None:
    """Mixed precision by autocast: a split layer."""
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
    module = parallelize_module(copy.deepcopy(plain), _mesh(world), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(6, 16)
    losses = []
    for each in (plain, module):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            losses.append(each(x).float().square().mean())
        losses[-1].backward()
    torch.testing.assert_close(_whole(losses[1]), losses[0], rtol=1e-2, atol=1e-2)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(_whole(p.grad), q.grad, rtol=5e-2, atol=1e-2)


def _wide(width: int = 1024, depth: int = 6) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)])


def streams(rank: int, world: int) -> None:
    """Gradients are whole where the caller's stream goes on, whichever that is; a long queue hides nothing."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from torchshard.ddp import DistributedDataParallel

    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"hook": default_hooks.bf16_compress_hook},
    ):
        for beside in (False, True):
            torch.manual_seed(0)
            module = _wide()
            reference = copy.deepcopy(module)
            hook = options.get("hook")
            wanted = {k: v for k, v in options.items() if k != "hook"}
            model = DistributedDataParallel(module, bucket_cap_mb=3, **wanted)
            if hook:
                model.register_comm_hook(None, hook)
            stream = torch.cuda.Stream() if beside else torch.cuda.current_stream()
            for step in range(6):
                x = torch.randn(world, 256, 1024)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(3_000_000)
                    model(x[rank]).square().mean().backward()
                    found = [p.grad.clone() for p in module.parameters()]
                    for p in module.parameters():
                        p.grad.zero_() if step % 2 else None
                    model.zero_grad(set_to_none=step % 2 == 0)
                torch.cuda.current_stream().wait_stream(stream)
                reference(x.flatten(0, 1)).square().mean().backward()
                for got, p in zip(found, reference.parameters(), strict=True):
                    tolerance = 2e-2 if hook else 1e-4
                    scale = float(p.grad.abs().max())
                    torch.testing.assert_close(got, p.grad, rtol=tolerance, atol=tolerance * scale)
                reference.zero_grad()


def memory(rank: int, world: int) -> None:
    """A change of layout takes at most twice the larger shard beyond its input."""
    from torchshard import Replicate, Shard, distribute_tensor

    mesh = _mesh(world)
    x = distribute_tensor(torch.randn(4096, 2048), mesh, [Shard(0)])
    for place, most in ((Shard(1), 2 * 4096 * 1024 * 4), (Replicate(), 2 * 4096 * 2048 * 4)):
        x.redistribute(placements=[place])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = x.redistribute(placements=[place])
        assert torch.cuda.max_memory_allocated() - before <= most + 4096, place
        del y


def pending(rank: int, world: int) -> None:
    """Results that are asked for at once of a change begun beside: they are there when read, on any stream."""
    from torchshard import Replicate, Shard, distribute_tensor

    mesh = _mesh(world)
    for _ in range(20):
        whole = torch.randn(2048, 1024)
        torch.distributed.broadcast(whole, 0)
        x = distribute_tensor(whole, mesh, [Shard(0)])
        torch.cuda._sleep(2_000_000)
        y = (x * 2).redistribute(placements=[Replicate()], async_op=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            z = y.to_local() + 1
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(z, whole * 2 + 1)


def moved(rank: int, world: int) -> None:
    """To the host and back; state dicts and checkpoints of modules on GPUs."""
    import tempfile

    from torchshard import Shard, distribute_tensor, state_dict

    mesh = _mesh(world)
    whole = torch.arange(5 * 3.0).view(5, 3)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    full = state_dict.to_full({"x": x}, cpu_offload=True)["x"]
    assert full.device.type == "cpu"
    assert torch.equal(full, whole.cpu())
    with tempfile.NamedTemporaryFile() as file:
        torch.save(x, file.name)
        again = torch.load(file.name, weights_only=False)
    assert again.device == x.device
    assert torch.equal(again.full_tensor(), whole)
    assert torch.equal(copy.deepcopy(x).full_tensor(), whole)
    assert torch.equal(x.double().to(torch.float32).full_tensor(), whole)


def captured(rank: int, world: int) -> None:
    """A step in a CUDA graph, after steps that found the layout; replayed on new data."""
    from torchshard.ddp import DistributedDataParallel

    torch.manual_seed(0)
    module = _wide(64, 3)
    reference = copy.deepcopy(module)
    stream = torch.cuda.Stream()
    x = torch.randn(world, 8, 64)
    held = x[rank].clone()
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(module)
        for _ in range(11):
            model(held).square().mean().backward()
            model.zero_grad(set_to_none=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for p in module.parameters():
            p.grad.zero_()
        model(held).square().mean().backward()
    for _ in range(3):
        x = torch.randn(world, 8, 64)
        held.copy_(x[rank])
        graph.replay()
        reference(x.flatten(0, 1)).square().mean().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
        reference.zero_grad()


def compiled(rank: int, world: int) -> None:
    """A compiled region of split layers, and a wrapper compiled with its gradients reduced in the graph."""
    from torchshard.compiler.backend import torchshard
    from torchshard.ddp import DistributedDataParallel

    _as_plain(world, 3)
    torch.manual_seed(0)
    plain = _block()
    reference = copy.deepcopy(plain)
    model = torch.compile(DistributedDataParallel(plain), backend=torchshard)
    for _ in range(4):
        x = torch.randn(world, 6, 16)
        model(x[rank]).square().mean().backward()
        reference(x.flatten(0, 1)).square().mean().backward()
        for p, q in zip(plain.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
        for each in (plain, reference):
            each.zero_grad()


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def _as_plain(world: int, steps: int, **options: Any) -> None:
    """A block of split layers, compiled, has in each step the gradients of the plain one; lengths change."""
    from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    plain = _block()
    module = parallelize_module(copy.deepcopy(plain), _mesh(world), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    region = torch.compile(module, fullgraph=True, **options)
    for step in range(steps):
        x = torch.randn((6, 6, 7, 3)[step % 4] if options.get("dynamic") else 6, 16)
        torch.distributed.broadcast(x, 0)
        torch.compiler.cudagraph_mark_step_begin()
        losses = [each(x).square().mean() for each in (plain, region)]
        _close(losses[1], losses[0].detach(), "loss")
        for loss in losses:
            loss.backward()
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            _close(p.grad, q.grad, "gradient")
        for each in (plain, module):
            each.zero_grad()


def replayed(rank: int, world: int) -> None:
    """A compiled region in CUDA graphs (reduce-overhead), its collectives with it."""
    _as_plain(world, 6, mode="reduce-overhead")
    torch._dynamo.reset()  # graphs hold the group, which would not end


def lengths(rank: int, world: int) -> None:
    """A compiled region of dynamic lengths; split batches of which ranks get more, fewer and no rows."""
    from torchshard import Replicate, Shard, distribute_tensor

    _as_plain(world, 8, dynamic=True)
    mesh = _mesh(world)

    def loss(x: Any, w: Any) -> Any:
        return torch.cat([(x @ w).relu()[1:].sin(), x[:1] @ w]).softmax(0).square().mean()

    region = torch.compile(loss, fullgraph=True)
    for rows in (7, 8, 5, 1):
        values = [torch.randn(rows, 8), torch.randn(8, 8)]
        for x in values:
            torch.distributed.broadcast(x, 0)
        plain = [x.clone().requires_grad_() for x in values]
        spread = [
            distribute_tensor(x, mesh, [place]).requires_grad_()
            for x, place in zip(values, (Shard(0), Replicate()), strict=True)
        ]
        expected, got = loss(*plain), region(*spread)
        _close(got, expected, f"{rows} rows")
        expected.backward()
        got.backward()
        for x, y in zip(spread, plain, strict=True):
            _close(x.grad, y.grad, f"{rows} rows, gradient")


def flex(rank: int, world: int) -> None:
    """flex_attention by inductor's kernels: split heads and batches stay split, functions know their places."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from torchshard import Shard

    def by_place(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return score + (b * 4 + h) * (m - n) * 0.01

    def causal(b: Any, h: Any, m: Any, n: Any) -> Any:
        return m >= n

    def of_some(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (m >= n) | ((h == 1) & (b == 0))

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for rule, of_each in ((causal, None), (of_some, 4)):
            torch._dynamo.reset()
            blocks = create_block_mask(rule, of_each, of_each, 256, 256)

            @torch.compile(fullgraph=True)
            def attend(q: Any, k: Any, v: Any, mask: Any = blocks) -> Any:
                few = [x[:, :2] for x in (k, v)]
                shared = flex_attention(q, *few, score_mod=by_place, enable_gqa=True)
                return flex_attention(q, k, v, score_mod=by_place, block_mask=mask) + shared

            operands = [torch.randn(4, 4, 256, 64, dtype=dtype) for _ in range(3)]
            for place in (Shard(0), Shard(1), Shard(2)):
                out = _same(world, f"flex {dtype} {place}", attend, operands, *[place] * 3)
                if place.dim < 2:
                    assert out.placements == (place,), out.placements


GPU_BODIES: list[tuple[int, str, tuple[Any, ...]]] = [
    (2, f"tests.device.gpus:{name}", ())
    for name in (
        "attention",
        "layers",
        "optimizers",
        "autocast",
        "streams",
        "memory",
        "pending",
        "moved",
        "captured",
        "compiled",
        "replayed",
        "lengths",
        "flex",
    )
]
