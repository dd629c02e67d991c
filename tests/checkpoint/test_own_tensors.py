"""Checkpoints of torchshard's own DTensors, and of a model that was trained with either library's."""

import warnings

import pytest
import safetensors.torch
import torch

from tests.checkpoint import sources
from tests.checkpoint.sources import assert_same_tree, flat, same_bits, torch_loads
from tests.ranks import run_ranks
from torchshard import checkpoint


@pytest.mark.parametrize("ranks", ["two", "three", "mesh"])
def test_they_are_stored_as_torch_stores_its_own(ranks, request, tmp_path):
    ours, theirs = (request.getfixturevalue(f"{whose}_{ranks}") for whose in ("ours", "dcp"))
    assert set(checkpoint.inspect(ours).rows) == set(checkpoint.inspect(theirs).rows)
    checkpoint.convert(ours, tmp_path / "out.pt", to="torch", verify=True)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same_tree(loaded, torch_loads(ours, tmp_path))
    expected = flat(torch_loads(theirs, tmp_path))
    assert flat(loaded).keys() == expected.keys()
    for key, value in flat(loaded).items():
        assert same_bits(value, expected[key]) if isinstance(value, torch.Tensor) else value == expected[key], key
    with pytest.warns(UserWarning, match=r"left out: optimizer\.lr$"):
        checkpoint.convert(ours, tmp_path / "out.safetensors", to="safetensors", verify=True)
    tensors = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert tensors.keys() == {key for key, value in expected.items() if isinstance(value, torch.Tensor)}
    assert all(same_bits(tensor, expected[key]) for key, tensor in tensors.items())


@pytest.mark.parametrize("whose", ["torch", "torchshard"])
def test_a_trained_model_goes_on_in_plain_torch(whose, tmp_path):
    """Weights, both moments, steps, param_groups and the epoch: all there, and enough to take the next step."""
    run_ranks(2, sources.save_trained, str(tmp_path / "ck"), whose)
    expected = torch.load(tmp_path / "ck.pt", weights_only=True)
    checkpoint.convert(tmp_path / "ck", tmp_path / "out.pt", to="torch")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["epoch"] == 3
    assert loaded["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert flat(loaded["model"]).keys() == flat(expected["model"]).keys()
    # torch.distributed.checkpoint stores the integer keys of "state" as text.
    state = {int(key): value for key, value in loaded["optimizer"]["state"].items()}
    assert state.keys() == expected["optimizer"]["state"].keys() == {0, 1}
    for key, value in flat({"model": loaded["model"], "state": state}).items():
        assert same_bits(value, flat({"model": expected["model"], "state": expected["optimizer"]["state"]})[key]), key

    model = torch.nn.Linear(4, 5)
    model.load_state_dict(loaded["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict({"state": state, "param_groups": loaded["optimizer"]["param_groups"]})
    before = model.weight.detach().clone()
    model(torch.arange(12.0).reshape(3, 4)).square().sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 3
    assert not torch.equal(before, model.weight)


def test_what_safetensors_leaves_out_of_an_optimizer_is_named(tmp_path):
    run_ranks(2, sources.save_trained, str(tmp_path / "ck"), "torchshard")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = checkpoint.convert(tmp_path / "ck", tmp_path / "out.safetensors", to="safetensors")
    kept = set(safetensors.torch.load_file(tmp_path / "out.safetensors"))
    everything = set(checkpoint.open(tmp_path / "ck"))
    assert kept == {"model.weight", "model.bias"} | {
        f"optimizer.state.{i}.{name}" for i in (0, 1) for name in ("step", "exp_avg", "exp_avg_sq")
    }
    assert kept | set(done.left_out) == everything
    assert {"epoch", "optimizer.param_groups.0.lr"} <= set(done.left_out)
    assert str(caught[0].message).startswith("safetensors holds tensors only; left out: ")
