"""Messages on the side of what takes long."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from iree_lnbwd import notices

LOGGER = logging.getLogger("test_notices")


def test_a_long_block_says_how_long_it_has_taken(caplog: pytest.LogCaptureFixture) -> None:
    with notices.repeated(LOGGER, "still making %s", "it", every=0.01):
        until = time.monotonic() + 20
        while len(caplog.messages) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    said = list(caplog.messages)
    assert len(said) >= 3
    assert all(line.startswith("still making it: ") and line.endswith(" s so far") for line in said)
    time.sleep(0.05)
    assert caplog.messages == said
    assert not [t for t in threading.enumerate() if t.name == "iree-lnbwd-progress"]


def test_a_short_block_says_nothing_and_raises_what_it_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(KeyError), notices.repeated(LOGGER, "still making it"):
        raise KeyError
    assert not caplog.messages


def test_lines_that_only_count_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    tell = notices.log_progress(LOGGER)
    for line in ("n: compiling 3 schedules", "n: compiled 1 of 3 schedules", "n: timing 100 %"):
        tell(line)
    assert caplog.messages == ["n: compiling 3 schedules", "n: timing 100 %"]
