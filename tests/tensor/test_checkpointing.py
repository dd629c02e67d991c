"""DTensors in torch.distributed.checkpoint: values and metadata are those that torch's own would give."""

import pytest
import torch

from tests.older import known
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
    """Everything about what is stored but where its bytes are."""
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (m.size, m.properties, sorted((tuple(c.offsets), tuple(c.sizes)) for c in m.chunks))
        for name, m in stored.items()
    }


def body(rank, world, folder, how):
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor as theirs

    import torchshard as ours

    mesh = ours.init_device_mesh("cpu", (2, 2))
    line = ours.init_device_mesh("cpu", (4,))
    cut = [ours.Shard(0), ours.Replicate()]
    mine, yours = state(ours, mesh, 0, cut), state(theirs, mesh, 0, cut)
    if how == "save":  # stagers copy values only
        for x in (mine["uneven"], yours["uneven"]):
            x.requires_grad_()
    if how == "async":
        dcp.async_save(mine, checkpoint_id=f"{folder}/ours").result()
    else:
        dcp.save(mine, checkpoint_id=f"{folder}/ours")
    dcp.save(yours, checkpoint_id=f"{folder}/torch")
    want = {k: v.detach().full_tensor() for k, v in mine.items()}
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


def saved_on_two_by_two(rank, world, folder):
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor as theirs

    import torchshard as ours

    mesh = ours.init_device_mesh("cpu", (2, 2))
    for cut in range(2):
        for module in (ours, theirs):
            placements = [module.Shard(0), module.Shard(0)] if cut else [module.Replicate(), module.Shard(0)]
            dcp.save(state(module, mesh, 0, placements), checkpoint_id=f"{folder}/{module.__name__}{cut}")


def loaded_elsewhere(rank, world, folder):
    """Into tensors of both libraries, split by rows; what was saved by either."""
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor as theirs

    import torchshard as ours

    line = ours.init_device_mesh("cpu", (world,))
    want = {k: v.full_tensor() for k, v in state(ours, line, 0, [ours.Replicate()]).items()}
    for cut in range(2):
        for module in (ours, theirs):
            target = state(module, line, 1, [module.Shard(0)])
            for source in (ours, theirs):
                dcp.load(target, checkpoint_id=f"{folder}/{source.__name__}{cut}")
                assert all(torch.equal(target[k].full_tensor(), want[k]) for k in want), (cut, module, source)


@pytest.mark.parametrize("world", [1, 3])
def test_saved_on_four_ranks_and_loaded_on_others(tmp_path, world):
    run_ranks(4, saved_on_two_by_two, str(tmp_path))
    run_ranks(world, loaded_elsewhere, str(tmp_path))


def parts_of_the_world(rank, world, folder):
    """Meshes of some of the ranks: the others save and load nothing of them, and take part."""
    import torch.distributed.checkpoint as dcp

    from torchshard import DeviceMesh, Shard, distribute_tensor

    whole = torch.arange(21.0).reshape(7, 3)
    first, last = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    source = {"first": distribute_tensor(whole, first, [Shard(0)]), "last": distribute_tensor(whole, last, [Shard(1)])}
    target = {
        "first": distribute_tensor(torch.zeros(7, 3), last, [Shard(0)]),
        "last": distribute_tensor(torch.zeros(7, 3), first, [Shard(1)]),
    }
    for how in ("save", "async"):
        if how == "save":
            dcp.save(source, checkpoint_id=f"{folder}/{how}")
        else:
            dcp.async_save(source, checkpoint_id=f"{folder}/{how}").result()
        for x in target.values():
            x.to_local().zero_()
        dcp.load(target, checkpoint_id=f"{folder}/{how}")
        for name, ranks in (("first", (1, 2)), ("last", (0, 1))):
            if rank in ranks:
                assert torch.equal(target[name].full_tensor(), whole), (how, name)
    plain = {"first": torch.zeros(7, 3), "last": torch.zeros(7, 3)}
    dcp.load(plain, checkpoint_id=f"{folder}/async")
    assert all(torch.equal(x, whole) for x in plain.values())
    views(DeviceMesh("cpu", range(world)), f"{folder}/views")


def views(mesh, folder):
    """Parts that lie within other memory; a view that had to be moved, of which one rank writes what all have."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from torchshard import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torchshard.checkpoint import load_into
    from torchshard.errors import CheckpointError, UnsupportedOperatorError

    part = DTensor.from_local(torch.arange(12.0)[6:].view(2, 3), mesh, [Replicate()])
    dcp.async_save({"part": part, "chunk": part.chunk(2)[1]}, checkpoint_id=folder).result()
    plain = {"part": torch.zeros(2, 3), "chunk": torch.zeros(1, 3)}
    dcp.load(plain, checkpoint_id=folder)
    assert plain["part"].flatten().tolist() == [6, 7, 8, 9, 10, 11]
    assert plain["chunk"].tolist() == [[9, 10, 11]]

    base = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    view = base[2:3]
    base.add_(1)
    dcp.save({"view": view}, checkpoint_id=folder)
    plain = {"view": torch.zeros(1)}
    dcp.load(plain, checkpoint_id=folder)
    assert view.placements == (Replicate(),)
    assert plain["view"].item() == 3
    for target, words in ((view, "had to be moved"), (DTensor.from_local(torch.ones(1), mesh, [Partial()]), "Partial")):
        with pytest.raises(CheckpointException, match=f"{words}.*cannot be"):
            dcp.load({"view": target}, checkpoint_id=folder)
        with pytest.raises(CheckpointError, match=rf"{words}.*cannot be(?s:.*)where: +view"):
            load_into(folder, {"view": target})
    with pytest.raises(UnsupportedOperatorError, match="as dcp"):
        dcp.async_save({"view": view}, checkpoint_id=folder)


def test_meshes_of_some_ranks(tmp_path):
    run_ranks(3, parts_of_the_world, str(tmp_path))


def saved_while_training(rank, world, folder):
    """What async_save stores is what there was when it was called, by each of its stagers, more than once."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

    import torchshard as ours

    mesh = ours.init_device_mesh("cpu", (2, 2))
    cut = [ours.Shard(0), ours.Replicate()]
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    stagers = {
        "none": None,
        "cached": BlockingAsyncStager(cache_staged_state_dict=True),
        "default": DefaultStager(options),
    }
    for name, stager in stagers.items():
        mine = state(ours, mesh, 0, cut)
        for step in range(2 if known("stagers that are used again") else 1):
            want = {k: v.full_tensor().clone() for k, v in mine.items()}
            given = {} if stager is None else {"async_stager": stager}
            pending = dcp.async_save(mine, checkpoint_id=f"{folder}/{name}{step}", **given)
            for response in (getattr(pending, "staging_completion", None),):
                if response is not None:
                    response.result()
            for x in mine.values():
                x.to_local().add_(1)
            (getattr(pending, "upload_completion", None) or pending).result()
            target = state(ours, mesh, 1, cut)
            dcp.load(target, checkpoint_id=f"{folder}/{name}{step}")
            assert all(torch.equal(target[k].full_tensor(), want[k]) for k in want), (name, step)


def test_async_save_stores_what_there_was(tmp_path):
    run_ranks(4, saved_while_training, str(tmp_path))


def several_parts(rank, world, folder):
    """Tensors of which each rank holds several parts, given to writers of safetensors; what comes of each."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    from torchshard import Shard, checkpoint, distribute_tensor, init_device_mesh, state_dict
    from torchshard.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    packed = torch.nn.Linear(3, 12, bias=False)
    want = packed.weight.detach().clone()
    parallelize_module(packed, mesh, ColwiseParallel(unit=2, runs=3))
    rows = [ShardMetadata([3 * k, 0], [3, 3], f"rank:{k % 2}/cpu") for k in range(4)]
    tensors = {
        "packed": packed.weight,
        "shards": state_dict.to_sharded_tensor(want, spec=EnumerableShardingSpec(rows)),
        "rows": distribute_tensor(want, mesh, [Shard(0)]),
    }
    cut = SerializationFormat.SAFETENSORS
    writers = {
        "hugging_face": lambda path: dcp.HuggingFaceStorageWriter(path, save_distributed=True),
        "safetensors": lambda path: dcp.FileSystemWriter(path, serialization_format=cut),
        "a_file_each": lambda path: dcp.FileSystemWriter(path, serialization_format=cut, single_file_per_rank=False),
    }
    found = {}
    for name, tensor in tensors.items():
        for kind, writer in writers.items():
            path = f"{folder}/{name}_{kind}"
            try:
                dcp.save({"x": tensor.detach()}, storage_writer=writer(path))
            except dcp.api.CheckpointException as error:
                found[name, kind] = str(error)
                continue
            loaded = {"x": torch.zeros_like(tensor.detach())}
            checkpoint.load_into(path, loaded)
            found[name, kind] = bool(torch.equal(state_dict.to_full(loaded)["x"], want))
    return found


def test_writers_that_would_lose_parts_are_refused(tmp_path):
    for found in run_ranks(2, several_parts, str(tmp_path)):
        for name, parts in (("packed", 3), ("shards", 2)):
            for kind in ("hugging_face", "safetensors"):
                told = found.pop((name, kind))
                assert f"{parts} parts of x" in told
                assert "torchshard convert" in told
        assert list(found.values()) == [True] * 5, found


def within_objects(rank, world, folder):
    """Tensors inside of tuples, which torch pickles on one rank; what comes of each way to save them."""
    import torch.distributed.checkpoint as dcp

    from torchshard import Replicate, Shard, distribute_tensor, init_device_mesh, state_dict

    mesh = init_device_mesh("cpu", (world,))
    x = torch.arange(6.0)
    made = {
        "rows": distribute_tensor(x, mesh, [Shard(0)]),
        "whole": distribute_tensor(x, mesh, [Replicate()]),
        "shards": state_dict.to_sharded_tensor(x),
    }
    found = {}
    for name, tensor in made.items():
        try:
            dcp.save({"x": (tensor, 3)}, checkpoint_id=f"{folder}/{name}")
            found[name] = "saved"
        except dcp.api.CheckpointException as error:
            found[name] = str(error)
        own = f"{folder}/{name}_of_{rank}"  # each rank's own checkpoint
        dcp.save({"x": (tensor, 3)}, checkpoint_id=own, no_dist=True)
        loaded = {"x": (torch.zeros(()), 0)}
        dcp.load(loaded, checkpoint_id=own, no_dist=True)
        assert torch.equal(state_dict.to_full(loaded["x"][0]), x)
        assert loaded["x"][1] == 3
    return found


def test_tensors_within_objects_are_not_saved_by_one_rank_alone(tmp_path):
    for found in run_ranks(2, within_objects, str(tmp_path)):
        for told in found.values():
            assert "one rank alone" in told
            assert "in dicts and lists" in told
