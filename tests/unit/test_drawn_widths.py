"""Widths that scripts draw: the same of one seed, spread over octaves, of the kind asked for."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from drawn_widths import add_options, widths_of


def widths(*words: str) -> list[int]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return widths_of(parser.parse_args(words))


def test_none_are_drawn_unasked() -> None:
    assert widths("--seed=7") == []
    assert widths("--seed=7", "--columns=96,8") == [8, 96]


@pytest.mark.parametrize("seed", range(20))
def test_each_part_of_the_octaves_has_one(seed: int) -> None:
    found = widths("--random=8:256:65536", f"--seed={seed}")
    assert found == widths("--random=8:256:65536", f"--seed={seed}")
    assert all(256 << n <= width + 1 and width - 1 <= 512 << n for n, width in enumerate(found))
    assert all(width % 8 for width in found)
    multiples = widths("--random=8:256:65536", f"--seed={seed}", "--multiples-of-8")
    assert len(multiples) == 8
    assert all(width % 8 == 0 for width in multiples)


@pytest.mark.parametrize("text", ["8:256", "8:256:128", "0:1:2", "8:256:512:1", "a:1:2"])
def test_what_is_no_range_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        widths(f"--random={text}")
    assert "argument --random: expected" in capsys.readouterr().err
