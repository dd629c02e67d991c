"""What the ranks of a sweep need, imported once in the process that they are forked from."""

import torch.distributed.tensor  # noqa: F401
from torch.testing._internal import common_methods_invocations  # noqa: F401

from torchshard.tensor.calls import dispatch, plan  # noqa: F401
