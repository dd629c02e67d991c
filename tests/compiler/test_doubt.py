"""What a graph cannot see: other sources of gradients, hooks, other forwards, other ranks. Right in any case."""

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from tests.compiler.models import batch, loss_of
from tests.compiler.trial import Trial, run_in_turn
from tests.ranks import run_ranks


def _plain(model, module, rank, size):
    x, y = batch("plain", size + rank)
    return loss_of(model(x), y)


def _regularised(model, module, rank, size):
    return _plain(model, module, rank, size) + module.b.weight.square().sum() + module.a.bias.sum()


def _twice(model, module, rank, size):
    return _plain(model, module, rank, size) + _plain(model, module, rank, size + 4)


def _run_other_sources(rank, world):
    trial = Trial(rank, world)
    plain = [trial.step(_plain) for _ in range(3)]
    late = [trial.step(_regularised) for _ in range(4)]
    return plain, late, trial.step(_plain), trial.step(_twice), trial.step(_plain)


def _gradients_from_outside_of_the_graph(answers):
    for plain, late, again, twice, after in answers:
        assert all(worst < 1e-5 for worst, *_ in [*plain, *late, again, twice, after])
        assert plain[2][1:] == (6, 0, 0)
        assert late[0][1:] == (6, 0, 2)  # the graph's part and the rest are averaged one by one
        assert late[3][1:] == (4, 2, 0)  # after a new layout, those two are the hooks'
        assert twice[1:] == (0, 6, 0)  # two forwards outstanding: no bucket leaves before both are back
        assert after[1:] == (4, 2, 0)


def _repeated(model, module, rank, size):
    """Backwards within the backward bring gradients of b twice, when the graph's is there."""
    x = torch.ones(2, 64, requires_grad=True)
    loss = sum(checkpoint(module.b, x * k, use_reentrant=True).square().mean() for k in (1, 2))
    return _plain(model, module, rank, size) + loss


def _run_repeated(rank, world):
    trial = Trial(rank, world)
    return [trial.step(_plain) for _ in range(3)], trial.step(_repeated)


def _gradients_that_come_twice(answers):
    for plain, repeated in answers:
        assert plain[2][1:] == (6, 0, 0)
        assert repeated[0] < 1e-5
        assert repeated[1:] == (6, 0, 2)


def _run_hooks(rank, world):
    trial = Trial(rank, world)
    plain = [trial.step(_plain) for _ in range(3)]
    nodes = []  # kept: a node that nobody refers to is made anew
    for module in (trial.ddp.module, trial.reference):
        module.c.weight.register_hook(lambda grad: grad * 2)
    hooked, seen = trial.step(_plain), []
    for module in (trial.ddp.module, trial.reference):
        before, after = [get_gradient_edge(p).node for p in (module.a.weight, module.b.weight)]
        before.register_prehook(lambda grads: tuple(grad * 2 for grad in grads))
        after.register_hook(lambda _, grads: seen.append(grads[0].clone()))
        nodes.append((before, after))
    at_ends = trial.step(_plain)
    torch.testing.assert_close(seen[0], seen[1 + rank] * world)  # this rank's own gradient, before the average
    return plain, hooked, at_ends


def _a_hook_of_the_user_sees_its_gradient(answers):
    for plain, hooked, at_ends in answers:
        assert at_ends[0] < 1e-5
        assert at_ends[1] + at_ends[2] == 6
        assert plain[2][1:] == (6, 0, 0)
        assert hooked[0] < 1e-5
        assert hooked[1] < 6
        assert hooked[1] + hooked[2] == 6


def _run_partial(rank, world):
    """torch.autograd.grad and backward(inputs=...) do not touch other gradients, and are not reduced."""
    trial = Trial(rank, world)
    for _ in range(3):
        trial.step(_plain)
    trial.ddp.zero_grad()
    params, others = list(trial.ddp.module.parameters()), list(trial.reference.parameters())
    grads = torch.autograd.grad(_plain(trial.model, None, rank, 8), params)
    expected = torch.autograd.grad(_plain(trial.reference, None, rank, 8), others)
    torch.testing.assert_close(grads, expected)
    assert all(p.grad is None for p in params)
    return trial.step(_plain)


def _partial_backwards(answers):
    for answer in answers:
        assert answer[0] < 1e-5
        assert answer[1:] == (6, 0, 0)


def _run_one_rank_differs(rank, world):
    """Rank 1 alone sees other sizes, compiles anew, and once does not compile at all."""
    trial = Trial(rank, world)
    answers = [trial.step(_plain, size) for size in (8, 8, 8)]
    answers += [trial.step(_own_size) for _ in range(3)]
    compiled = trial.model
    if rank == 1:
        trial.model = trial.ddp
    answers.append(trial.step(_plain))
    trial.model = compiled
    return [*answers, trial.step(_plain)]


def _own_size(model, module, rank, size):
    x, y = batch("plain", 8 if rank == 0 else 24)
    return loss_of(model(x), y)


def _ranks_that_compile_at_different_times(answers):
    first, second = answers
    assert all(worst < 1e-5 for worst, *_ in first + second)
    assert all(counts == (6, 0, 0) for _, *counts in first[2:-1] for counts in [tuple(counts)])
    assert second[-2][1:] == (0, 6, 0)
    assert first[-1][1:] == second[-1][1:] == (6, 0, 0)


def _run_failing(rank, world):
    trial = Trial(rank, world)
    for _ in range(3):
        trial.step(_plain)

    def fails(grad):
        raise ValueError("on purpose")

    x, y = batch("plain", 8)
    trial.ddp.zero_grad()
    x.requires_grad_(True)
    loss = loss_of(trial.model(x), y)
    x.register_hook(fails)
    try:
        loss.backward()
    except ValueError:
        dist.barrier()
    else:
        raise AssertionError("the hook should have raised")
    return trial.step(_plain)


def _after_a_backward_that_failed(answers):
    for answer in answers:
        assert answer[0] < 1e-5


def _run_identity(rank, world):
    trial = Trial(rank, world)
    for _ in range(3):
        trial.step(_plain)
    kept = [p.grad for p in trial.ddp.parameters()]
    copies = [g.clone() for g in kept]
    trial.step(_plain, 16)  # zero_grad sets to None: the kept ones must stay as they are
    untouched = all(map(torch.equal, kept, copies))
    present = [p.grad for p in trial.ddp.parameters()]
    trial.ddp.zero_grad(set_to_none=False)
    _plain(trial.model, None, rank, 8).backward()
    same = all(p.grad is g for p, g in zip(trial.ddp.parameters(), present, strict=True))
    return untouched, same, trial.ddp.reducer.counters.late


def _gradients_keep_their_identity_and_are_never_overwritten(answers):
    assert answers == [(True, True, 0)] * 2


def _run_settings_of_dynamo(rank, world):
    answers = []
    for value in (True, False, "python_reducer", "python_reducer_without_compiled_forward", "no_optimization"):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(optimize_ddp=value):
            for how, counted in (("traced", (6, 0, 0)), ("split", (0, 6, 0))):
                trial = Trial(rank, world, how)
                answers.append((counted, [trial.step(_plain) for _ in range(2)]))
    return answers


def _under_any_setting_of_dynamo(answers):
    for counted, (first, second) in (pair for answer in answers for pair in answer):
        assert first[0] < 1e-5
        assert second[0] < 1e-5
        assert second[1:] == counted


def _run_without_private_ways(rank, world):
    from torchshard import _torch

    with _torch.without_fast_paths():
        trial = Trial(rank, world)
        return [trial.step(_plain) for _ in range(3)]


def _hooks_reduce_where_nodes_cannot_be_told(answers):
    for steps in answers:
        assert all(worst < 1e-5 for worst, *_ in steps)
        assert steps[2][1:] == (0, 6, 0)


TRIALS = {
    _run_settings_of_dynamo: _under_any_setting_of_dynamo,
    _run_without_private_ways: _hooks_reduce_where_nodes_cannot_be_told,
    _run_other_sources: _gradients_from_outside_of_the_graph,
    _run_repeated: _gradients_that_come_twice,
    _run_hooks: _a_hook_of_the_user_sees_its_gradient,
    _run_partial: _partial_backwards,
    _run_one_rank_differs: _ranks_that_compile_at_different_times,
    _run_failing: _after_a_backward_that_failed,
    _run_identity: _gradients_keep_their_identity_and_are_never_overwritten,
}


def test_trials():
    """One start of the ranks for all."""
    answers = run_ranks(2, run_in_turn, [*TRIALS], timeout=250)
    for number, check in enumerate(TRIALS.values()):
        check([answer[number] for answer in answers])
