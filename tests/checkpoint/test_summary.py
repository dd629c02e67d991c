"""What `inspect` says: a table, totals, and plain data for JSON."""

import json

import torch
from expecttest import assert_expected_inline

from torchshard import checkpoint
from torchshard.checkpoint.text import format_size, parse_size, printable


def test_a_table_with_totals(dcp_mesh):
    table, _, totals = str(checkpoint.inspect(dcp_mesh)).partition("\n\n")
    head, line, *rows = table.splitlines()
    shown = [head, line, *sorted(row for row in rows if "optimizer" not in row), totals.partition(" pieces")[0]]
    assert_expected_inline(
        "\n".join(row.rstrip() for row in shown),
        """\
key                                 dtype     shape      pieces     size
----------------------------------  --------  ---------  ---------  -------
model.bf16                          bfloat16  9 x 8      2 (1x2)    144 B
model.bool                          bool      5 x 3      2 (2x1)    15 B
model.both                          float32   7 x 10     4 (2x2)    280 B
model.columns                       float32   7 x 10     2 (1x2)    280 B
model.few                           int64     2          2 (2)      16 B
model.inner                         float32   7 x 10     2 (1x2)    280 B
model.middle                        int64     3 x 5 x 4  2 (1x2x1)  480 B
model.nothing                       float32   0 x 4      0          0 B
model.one                           bfloat16  1 x 3      1          6 B
model.replicated                    float32   7 x 10     1          280 B
model.rows                          float32   7 x 10     2 (2x1)    280 B
model.twice                         float32   7 x 10     4 (4x1)    280 B
plain                               int64     5          1          40 B
dcp: 37 tensors of 1,161 elements and 4.7 KiB in 61""",
    )


def test_plain_data_for_json(dcp_mesh):
    found = json.loads(json.dumps(checkpoint.inspect(dcp_mesh).as_dict()))
    entries = {entry["key"]: entry for entry in found["entries"]}
    assert entries["model.both"] == {
        "key": "model.both", "kind": "tensor", "dtype": "float32", "shape": [7, 10], "cut": [2, 2], "pieces": 4,
        "bytes": 280,
    }  # fmt: skip
    assert entries["optimizer.lr"]["kind"] == "object"
    assert found["totals"]["tensors"] == sum(entry["kind"] == "tensor" for entry in found["entries"])
    assert found["totals"]["file_bytes"] == sum(p.stat().st_size for p in dcp_mesh.iterdir())
    assert set(found["files"]) == {p.name for p in dcp_mesh.iterdir()}


def test_names_that_would_play_with_the_terminal(tmp_path):
    torch.save({"\x1b[2Jevil": torch.ones(1), "plain": torch.ones(1)}, tmp_path / "a.pt")
    text = str(checkpoint.inspect(tmp_path / "a.pt"))
    assert "\x1b" not in text
    assert "\\x1b[2Jevil" in text


def test_sizes_as_text():
    for text, size in {"64MiB": 2**26, "1.5 GiB": 3 * 2**29, "500MB": 5 * 10**8, "7": 7, "2g": 2**31, "3 B": 3}.items():
        assert parse_size(text) == size
    assert [format_size(n) for n in (0, 1023, 1536, 2**26, 2**41)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "64.0 MiB",
        "2.0 TiB",
    ]


def test_untrusted_values_as_text():
    assert printable("a" * 500) == "a" * 120 + "..."
    assert printable("a\nb") == "'a\\nb'"
    assert printable(10**5000) == "an integer of 16610 bits"
    assert printable((1, "x")) == "(1, x)"
    assert printable([[]]) == "a list"
    assert printable({}) == "a dict"
