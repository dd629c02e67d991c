"""What ranks need, imported once in the process that they are forked from: all of the package but its commands."""

import importlib
import pkgutil

import expecttest  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.experimental  # noqa: F401

import tests.compilers  # noqa: F401
import torchshard

COMMANDS = ("torchshard.cli", "torchshard.demo", "torchshard.__main__")

for module in pkgutil.walk_packages(torchshard.__path__, "torchshard."):
    if not module.name.startswith(COMMANDS):
        importlib.import_module(module.name)
