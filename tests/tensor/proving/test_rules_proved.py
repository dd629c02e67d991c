"""Every rule of the tables is proved against eager torch, in every way that it allows."""

import warnings

import pytest
import torch

from tests.coverage.samples import database, samples
from tests.ranks import many
from tests.tensor.proving.bare import calls
from tests.tensor.proving.cases import GROUPS
from tests.tensor.proving.gpu_kernels import attention_calls, attention_kernels
from tests.tensor.proving.proof import operands
from torchshard.rules.registry import RULES
from torchshard.tensor.calls.call import operator_name, rule_of
from torchshard.tensor.proving.proof import described
from torchshard.tensor.proving.validate import check_call, recorded

MESHES = ((2,), (3,))


class Proved:
    """What has been proved so far; a call with the same shapes is proved once, and each operator some times."""

    def __init__(self):
        self.seen, self.right, self.wrong = set(), {}, []
        self.enough = many(24)

    def call(self, func, args, kwargs, key):
        if key in self.seen or self.right.get(key.split("[")[0], 0) > self.enough:
            return
        self.seen.add(key)
        report = check_call(func, args, kwargs, meshes=MESHES)
        self.right[key.split("[")[0]] = self.right.get(key.split("[")[0], 0) + len(report.right)
        self.wrong += map(str, report.wrong)

    def run(self, function, tensors, backward):
        for call in recorded(function, tensors, backward):
            if rule_of(call.func) is not None:
                args, kwargs = call.with_values(call.values)
                self.call(call.func, args, kwargs, f"{call.name}{[described(v) for v in call.values]}")


def _has_backward(sample):
    try:
        leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in sample.tensors]
        results = [t for t in torch.utils._pytree.tree_leaves(sample.run(leaves)) if isinstance(t, torch.Tensor)]
        sums = [t.sum() for t in results if t.requires_grad]
        torch.autograd.grad(sums, [t for t in leaves if t.requires_grad], allow_unused=True)
    except Exception:
        return False
    return bool(sums)


@pytest.mark.timeout(900)
def test_all_rules_are_right():
    proved = Proved()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cases in GROUPS.values():
            for case in cases:
                proved.run(case.run, operands(case), case.grad)
        for name in database():
            for sample in samples(name, 2):
                proved.run(lambda *ts, s=sample: s.run(list(ts)), sample.tensors, _has_backward(sample))
        with attention_kernels():
            for func, args, kwargs in (*calls(), *attention_calls()):
                proved.call(func, args, kwargs, f"{operator_name(func)}{[described(v) for v in args]}")
    assert not proved.wrong, f"{len(proved.wrong)} are wrong:\n" + "\n".join(proved.wrong[:8])
    present = {name for name in RULES if hasattr(torch.ops.aten, name.split(".")[0])}  # in this torch
    never = present - {name for name, count in proved.right.items() if count} - {"detach.default", "alias.default"}
    assert never == set()
