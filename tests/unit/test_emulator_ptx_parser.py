"""Text that the emulator cannot take for PTX."""

from __future__ import annotations

import pytest

from iree_lnbwd.emulator import PtxError, ptx_parser


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".visible .entry f() { ret;", "a kernel's body does not end"),
        (
            ".visible .entry f() {\n\tret;\n\t%r1 = 2;\n}",
            "line 3: expected an instruction, got %r1",
        ),
        (".visible .entry f() { .reg .b16 %a; .reg .b32 %a; ret; }", "%a is declared twice"),
    ],
)
def test_text_that_is_no_ptx(text: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        ptx_parser.parse(text)
