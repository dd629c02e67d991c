"""State dicts go in and out with and without the names of wrappers."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from tests.models import mlp
from torchshard.ddp import DistributedDataParallel, bare_state_dict
from torchshard.keys import wrappers


def _module():
    return nn.Sequential(mlp(8), nn.BatchNorm1d(8))


def test_keys():
    assert wrappers.bare("module._orig_mod.0.weight") == "0.weight"
    own = ["module.a", "module.module.b"]
    assert wrappers.renamed(["a", "b", "c"], own) == {"a": "module.a", "b": "module.module.b", "c": "c"}
    assert wrappers.renamed(["module.a", "_orig_mod.b"], own) == {
        "module.a": "module.a", "_orig_mod.b": "module.module.b",
    }  # fmt: skip
    for twice in (["a", "module.a"], ["module.a", "_orig_mod.a"], ["b", "_orig_mod.b"]):
        assert wrappers.renamed(twice, own) == {key: key for key in twice}
    assert wrappers.renamed(["module.b"], ["b", "x.module.b", "_orig_mod.b"]) == {"module.b": "module.b"}  # which one?


def test_any_form_is_loaded(fake_group):
    source = _module()
    forms = [
        source,
        DistributedDataParallel(_module()),
        torch.compile(_module()),
        DistributedDataParallel(torch.compile(_module())),
        torch.compile(DistributedDataParallel(_module())),
    ]
    for given in forms[1:]:
        given.load_state_dict(dict(zip(given.state_dict(), source.state_dict().values(), strict=True)))
        assert bare_state_dict(given).keys() == source.state_dict().keys()
    for given in forms:
        target = DistributedDataParallel(_module())
        assert not any(target.load_state_dict(given.state_dict()))
        for name, value in source.state_dict().items():
            assert torch.equal(target.state_dict()[f"module.{name}"], value)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        target.load_state_dict({**source.state_dict(), "other": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*module\.0\.0\.weight"):
        target.load_state_dict({})


def test_two_values_of_one_parameter_are_not_taken(fake_group):
    target = DistributedDataParallel(_module())
    state = target.state_dict()
    for twice in ({**state, **bare_state_dict(_module())}, {**bare_state_dict(_module()), **state}):
        with pytest.raises(RuntimeError, match=r"Unexpected key.*\"0\.0\.weight\""):
            target.load_state_dict(twice)


def test_versions_of_modules_go_along(fake_group):
    """Before version 2, BatchNorm had no num_batches_tracked: only the metadata tells."""
    state = _module().state_dict()
    assert state._metadata["1"] == {"version": 2}
    target = DistributedDataParallel(_module())
    del state["1.num_batches_tracked"]
    state._metadata["1"] = {"version": 1}
    target.load_state_dict(state)


def test_with_torchs_checkpoint_tools(fake_group):
    model = DistributedDataParallel(_module())
    state = get_model_state_dict(model)
    assert list(state) == list(_module().state_dict())
    set_model_state_dict(model, {name: torch.zeros_like(value) for name, value in state.items()})
    assert all(not value.any() for value in model.state_dict().values())


def test_a_state_dict_method_of_the_instance(fake_group):
    """As of torch's private _patch_model_state_dict, whose names are those of the bare module, also on loading."""
    target, state = DistributedDataParallel(_module()), _module().state_dict()
    target.state_dict = dict
    assert not any(target.load_state_dict(state))
    assert all(torch.equal(target.module.state_dict()[name], value) for name, value in state.items())


def test_names_of_wrappers_that_are_none(fake_group):
    inner = nn.Module()
    inner.module = nn.Linear(2, 2)
    inner.weight, inner.bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    model = DistributedDataParallel(inner)
    with pytest.raises(ValueError, match=r"would both be (weight|bias)"):
        bare_state_dict(model)
    model.load_state_dict(model.state_dict())
