"""The parts of the demo that need no ranks."""

import math

import torch

from torchshard.demo.checks import Report
from torchshard.demo.model import GPT, Config, generate, loss
from torchshard.demo.text import find_text


def test_the_standard_library_is_found_and_split():
    corpus = find_text(None)
    assert corpus.files > 100
    assert len(corpus.train) > 5 * len(corpus.held_out) > 100_000
    assert 4 < corpus.entropy < 6


def test_one_file_is_split_into_two_parts(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"ab" * 60_000)
    corpus = find_text(file)
    assert (len(corpus.train), len(corpus.held_out)) == (108_000, 12_000)
    assert abs(corpus.entropy - 1.0) < 1e-9


def test_a_report_passes_only_if_every_check_does():
    report = Report()
    assert not report.passed
    report.add("fine", 0.5, 1.0)
    assert report.passed
    report.add("not a number", math.nan, 1.0)
    assert not report.passed
    assert "FAILED" in str(report)


def test_the_model_sees_only_what_came_before():
    torch.manual_seed(0)
    model = GPT(Config(layers=1, width=16, heads=2, context=8))
    tokens = torch.randint(256, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = 7
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    assert abs(loss(model(tokens), tokens).item() - math.log(256)) < 1
    assert len(generate(model, b"ab", 12, torch.Generator().manual_seed(0))) == 14
