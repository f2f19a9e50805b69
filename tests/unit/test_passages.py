"""Passages of ``ir/`` that only modules with a gate have."""

from __future__ import annotations

from pathlib import Path

import iree_lnbwd
from iree_lnbwd.compiling import passages

IR = Path(iree_lnbwd.__file__).parents[1] / "ir"
TEXT = """\
func {
  %x = load
  // With a gate:
  // Why.
  %x_gated = times(%x)
  %y, %z_gated = both(%x)
  if {
    %inner_gated = of(%x)
  }
  // End of the gate.
  use(%x, %xhat, %z)
  loop {
    use(%x, %inner)
  }
}
func {
  use(%x)
}
"""


def test_without_a_gate_a_passage_is_left_out() -> None:
    assert (
        passages.chosen(TEXT, has_gate=False)
        == """\
func {
  %x = load
  use(%x, %xhat, %z)
  loop {
    use(%x, %inner)
  }
}
func {
  use(%x)
}
"""
    )


def test_with_a_gate_its_names_count_to_the_end_of_the_block() -> None:
    assert (
        passages.chosen(TEXT, has_gate=True)
        == """\
func {
  %x = load
  // Why.
  %x_gated = times(%x)
  %y, %z_gated = both(%x)
  if {
    %inner_gated = of(%x)
  }
  use(%x_gated, %xhat, %z_gated)
  loop {
    use(%x_gated, %inner)
  }
}
func {
  use(%x)
}
"""
    )


def test_every_passage_of_the_files_ends() -> None:
    for path in IR.rglob("*.mlir"):
        text = path.read_text(encoding="utf-8")
        begun, ended = text.count("// With a gate:"), text.count("// End of the gate.")
        assert begun == ended, path.name
        for has_gate in (False, True):
            chosen = passages.chosen(text, has_gate=has_gate)
            assert "With a gate:" not in chosen, path.name
            assert "End of the gate." not in chosen, path.name
