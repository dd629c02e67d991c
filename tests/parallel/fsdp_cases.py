"""A small model under FSDP1 and tensor parallelism, with this package's classes or torch's, beside a plain one."""

import torch
from torch import nn

WIDTH = 8


class MLP(nn.Module):
    """A residual block; `hidden` need not divide evenly."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def plain(seed=0, hidden=(10, 7)):
    torch.manual_seed(seed)
    return nn.Sequential(*[MLP(n) for n in hidden])


def parallel(mesh, library="ours", seed=0, hidden=(10, 7)):
    """The model, its linear layers cut along the axis "tp" of the mesh; whole if there is no such axis."""
    if library == "ours":
        from torchshard.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    model = plain(seed, hidden)
    if "tp" in mesh.mesh_dim_names:
        parallelize_module(model, mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    return model


def fsdp_axes(mesh):
    """The axes of a mesh that FSDP has: "dp", or "rep" and "dp"."""
    names = tuple(name for name in mesh.mesh_dim_names if name in ("rep", "dp"))
    return names if len(names) > 1 else names[0]


def wrapped(model, mesh, orig=True, strategy=None, **options):
    """FSDP around each block and the whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    axes = fsdp_axes(mesh)
    strategy = strategy or ("FULL_SHARD" if axes == "dp" else "HYBRID_SHARD")
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh if len(mesh.mesh_dim_names) == mesh[axes].ndim else mesh[axes],
        use_orig_params=orig,
        auto_wrap_policy=ModuleWrapPolicy({MLP}),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
        **options,
    )


def train(model, optimizer, steps=5, at=0, of=1):
    """Steps on this rank's part of the batches: part `at` of `of`."""
    for step in range(steps):
        batch = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
        model(batch.chunk(of)[at]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def place(mesh):
    """This rank's place among those that get different batches, and their number."""
    axes = fsdp_axes(mesh)
    at, of = 0, 1
    for name in (axes,) if isinstance(axes, str) else axes:
        at, of = at * mesh[name].size() + mesh[name].get_local_rank(), of * mesh[name].size()
    return {"at": at, "of": of}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model, optimizer=None, **where):
    """Model and optimizer after training."""
    optimizer = optimizer or adamw(model)
    train(model, optimizer, **where)
    return model, optimizer


def sharded(model, optimizer):
    """Sharded state dicts of model and optimizer."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def load_sharded(model, optimizer, state, optimizer_state):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(state)
        found = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, optimizer_state)
        optimizer.load_state_dict(found)


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def by_name(model, optimizer):
    """The optimizer's states of a plain model, by name of parameter."""
    states = optimizer.state_dict()["state"]
    return {name: states[at] for at, (name, _) in enumerate(model.named_parameters())}


def assert_same(state, optimizer_state, model, optimizer, **tolerance):
    """State dicts are those of a plain model and its optimizer (if there is one)."""
    want = model.state_dict()
    assert set(state) == set(want)
    for name, value in state.items():
        torch.testing.assert_close(full(value), want[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")
    states = by_name(model, optimizer) if optimizer else {}
    assert set(optimizer_state["state"]) == set(states)
    for name, values in optimizer_state["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(
                full(value), states[name][key], **tolerance, msg=lambda m, at=(name, key): f"{at}: {m}"
            )
