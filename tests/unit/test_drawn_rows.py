"""Numbers of rows that a benchmark draws."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from drawn_rows import drawn
from gpu_members import MEMBERS

_DRAWS = range(200)


@pytest.mark.parametrize(
    "name",
    ["modulated_layer_norm_backward", "head_rms_norm_backward", "gated_rms_norm_backward"],
)
def test_whole_samples_or_tokens_of_the_sizes_that_it_says(name: str) -> None:
    """Tensors are as large as it says, but for what a last sample or token rounds off."""
    for seed in _DRAWS:
        member, rows = drawn(MEMBERS[name], 1152, seed)
        unit = member.tokens or member.heads or 1
        assert rows % unit == 0
        assert math.log2((rows + unit) * 1152) >= 26
        assert math.log2(rows * 1152) <= 28.61
        number = member.tokens or member.heads
        assert member.name == (f"{name}_{number}" if number else name)


def test_samples_and_heads_have_the_sizes_that_it_says() -> None:
    """From the smallest to the largest, and no others."""
    tokens = {drawn(MEMBERS["modulated_layer_norm"], 1152, seed)[0].tokens for seed in _DRAWS}
    heads = {drawn(MEMBERS["head_rms_norm"], 128, seed)[0].heads for seed in _DRAWS}
    assert tokens <= set(range(256, 4097, 64))
    assert heads <= set(range(4, 65))
    assert len(tokens) > 40
    assert len(heads) > 40


def test_the_same_for_the_same_seed_norm_and_width_alone() -> None:
    """Both steps of a benchmark draw the same, and cells do not depend on each other."""
    member = MEMBERS["gated_rms_norm_backward"]
    rows = drawn(member, 4096, 7)[1]
    assert drawn(member, 4096, 7)[1] == rows
    other = MEMBERS["gated_first_rms_norm_backward"]
    assert len({rows, drawn(member, 4096, 8)[1], drawn(other, 4096, 7)[1]}) == 3
