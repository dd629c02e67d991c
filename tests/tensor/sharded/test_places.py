"""Devices on which the parts of a ShardedTensor lie, where each rank has one of its own."""

import torch


def test_each_rank_has_its_parts_on_its_own_device(monkeypatch):
    from torchshard.tensor.sharded import specs

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(specs, "this_rank", lambda: 1)
    spec = specs.chunks(0, [0, 1, 2], torch.device("cuda", 1))
    assert list(map(str, spec.placements)) == ["rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:0"]
    metadata = specs.metadata_of(spec, torch.Size([6]), specs.TensorProperties(torch.float32))
    for rank, device in ((0, "cuda:0"), (1, "cuda:1"), (3, "cuda")):
        monkeypatch.setattr(specs, "this_rank", lambda rank=rank: rank)
        assert specs.device_here(metadata) == torch.device(device)
