"""What takes torch's wrapper takes this one: Accelerate and Lightning, where they are installed."""

import os

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks


def _accelerate(rank, world):
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel

    from torchshard import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE=str(world))  # looked at, not used
    accelerator = Accelerator(cpu=True)
    model = DistributedDataParallel(nn.Linear(8, 2))
    assert extract_model_from_parallel(model) is model.module
    assert accelerator.unwrap_model(model) is model.module
    assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]
    with accelerator.no_sync(model):
        model(torch.ones(1, 8)).sum().backward()
    model(torch.ones(1, 8)).sum().backward()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 8)).sum())
    return model.reducer.counters.backwards


def test_accelerate():
    pytest.importorskip("accelerate")
    assert run_ranks(2, _accelerate) == [2, 2]


def _lightning(rank, world):
    import lightning.pytorch as lightning
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.strategies import ddp as fabric
    from lightning.pytorch.strategies import ddp as trainer

    from torchshard import DistributedDataParallel

    fabric.DistributedDataParallel = trainer.DistributedDataParallel = DistributedDataParallel
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")])
    model = strategy.setup_module(nn.Linear(8, 2))
    assert type(model) is DistributedDataParallel
    with strategy._backward_sync_control.no_backward_sync(model, True):
        model(torch.ones(1, 8)).sum().backward()
    assert model.reducer.counters.backwards == 0
    assert list(strategy.get_module_state_dict(model)) == ["weight", "bias"]

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch, number):
            self.reduced = self.trainer.strategy.model.reducer.counters.backwards
            return self.net(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2)

    module = Module()
    lightning.Trainer(
        strategy=trainer.DDPStrategy(process_group_backend="gloo"), accelerator="cpu", devices=1,
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module)  # fmt: skip
    return module.reduced


@pytest.mark.filterwarnings("ignore")
def test_lightning():
    pytest.importorskip("lightning")
    assert run_ranks(1, _lightning)[0] == 3  # before the last of four steps
