"""DTensors in torch.distributed.checkpoint: values and metadata are those that torch's own would give."""

import pytest
import torch

from tests.ranks import run_ranks

SHAPES = {"even": (8, 4), "uneven": (7, 3), "tiny": (1, 3), "empty": (0, 2), "scalar": ()}


def state(module, mesh, seed, cut):
    """Tensors of each shape, cut where they have dims; `module` is ours or torch's."""
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in SHAPES.items():
        full = torch.randn(shape, generator=g)
        placements = [p if len(shape) else module.Replicate() for p in cut]
        made[name] = module.distribute_tensor(full, mesh, placements)
    return made


def chunks(path):
    """Offsets and sizes of everything stored, without where its bytes are."""
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (tuple(m.size), str(m.properties.dtype), sorted((tuple(c.offsets), tuple(c.sizes)) for c in m.chunks))
        for name, m in stored.items()
    }


def body(rank, world, folder, how):
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor as theirs

    import torchshard as ours

    mesh = ours.init_device_mesh("cpu", (2, 2))
    line = ours.init_device_mesh("cpu", (4,))
    cut = [ours.Shard(0), ours.Replicate()]
    mine = state(ours, mesh, 0, cut)
    if how == "async":
        dcp.async_save(mine, checkpoint_id=f"{folder}/ours").result()
    else:
        dcp.save(mine, checkpoint_id=f"{folder}/ours")
    dcp.save(state(theirs, mesh, 0, cut), checkpoint_id=f"{folder}/torch")
    want = {k: v.full_tensor() for k, v in mine.items()}
    found = {"metadata": chunks(f"{folder}/ours") == chunks(f"{folder}/torch")}
    targets = {
        "same": state(ours, mesh, 1, cut),
        "other": state(ours, mesh, 1, [ours.Shard(0), ours.Shard(0)]),
        "line": state(ours, line, 1, [ours.Shard(0)]),
        "torch": state(theirs, mesh, 1, [theirs.Replicate(), theirs.Shard(0)]),
    }
    for name, target in targets.items():
        for source in ("ours", "torch"):
            dcp.load(target, checkpoint_id=f"{folder}/{source}")
            found[name, source] = all(torch.equal(target[k].full_tensor(), want[k]) for k in SHAPES)
    plain = {k: torch.zeros(shape) for k, shape in SHAPES.items()}
    dcp.load(plain, checkpoint_id=f"{folder}/ours")
    found["plain"] = all(torch.equal(plain[k], want[k]) for k in SHAPES)
    return found


@pytest.mark.parametrize("how", ["save", "async"])
def test_saved_and_loaded_in_other_layouts(tmp_path, how):
    for found in run_ranks(4, body, str(tmp_path), how):
        assert all(found.values()), found


def partial(rank, world, folder):
    import torch.distributed.checkpoint as dcp

    from torchshard import DTensor, Partial, init_device_mesh

    x = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (world,)), [Partial()])
    try:
        dcp.save({"x": x}, checkpoint_id=folder)
    except BaseException as error:
        return str(error)
    return "saved"


def test_a_partial_tensor_is_not_saved(tmp_path):
    for message in run_ranks(2, partial, str(tmp_path)):
        assert "A Partial tensor cannot be saved or loaded" in message


def training_state(rank, world, folder):
    """Model and optimizer through torch's state-dict functions, saved, loaded into a fresh pair."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from torchshard import init_device_mesh
    from torchshard.demo.model import GPT, Config, tensor_parallel

    mesh = init_device_mesh("cpu", (world,))

    def fresh(seed):
        torch.manual_seed(seed)
        model = tensor_parallel(GPT(Config(layers=1, width=8, heads=2, context=8, vocabulary=11)), mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer):
        for p in model.parameters():
            p.grad = p.detach() * 0.5
        optimizer.step()

    model, optimizer = fresh(0)
    step(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    other, other_optimizer = fresh(1)
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for m, o in ((model, optimizer), (other, other_optimizer)):
        step(m, o)
    return all(
        torch.equal(p.to_local(), q.to_local()) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_training_goes_on_from_a_checkpoint(tmp_path):
    assert all(run_ranks(2, training_state, str(tmp_path)))
