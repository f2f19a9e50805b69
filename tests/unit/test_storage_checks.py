"""What counts as memory that a result shares with another array of a call."""

from __future__ import annotations

import re

import numpy as np
import pytest

from iree_lnbwd.runtime.storage import Extent, check_apart, extent

A, B = Extent("a", 100, 10), Extent("b", 200, 20)


@pytest.mark.parametrize(
    ("address", "nbytes"), [(90, 10), (110, 90), (220, 1), (0, 100), (105, 0), (100, 0), (300, 7)]
)
def test_neighbours_are_apart(address: int, nbytes: int) -> None:
    """And nothing shares memory with an array that has none."""
    result = Extent("out.c", address, nbytes)
    check_apart([A, B], [result])
    check_apart([], [A, B, result])


@pytest.mark.parametrize(
    ("address", "nbytes", "other", "shared"),
    [
        (91, 10, "a", 1),
        (109, 10, "a", 1),
        (100, 10, "a", 10),
        (102, 3, "a", 3),
        (0, 150, "a", 10),
        (110, 91, "b", 1),
        (219, 1, "b", 1),
    ],
)
def test_shared_memory_is_refused_by_name(
    address: int, nbytes: int, other: str, shared: int
) -> None:
    result = Extent("out.c", address, nbytes)
    said = (
        f"^out.c: expected memory of its own, got memory of which {re.escape(other)} has "
        f"{shared} bytes, too$"
    )
    with pytest.raises(ValueError, match=said):
        check_apart([A, B], [result])
    with pytest.raises(ValueError, match=said):
        check_apart([B] if other == "a" else [A], [A if other == "a" else B, result])


def test_arrays_that_are_read_may_share_memory() -> None:
    check_apart([A, A, A], [B])


def test_the_later_of_two_results_is_named() -> None:
    said = "^b: expected memory of its own, got memory of which c has 20 bytes, too$"
    with pytest.raises(ValueError, match=said):
        check_apart([], [A, Extent("c", 150, 1000), B])


def test_the_memory_of_an_array() -> None:
    array = np.zeros((3, 4), np.float32)
    whole, row = extent("x", array), extent("y", array[1])
    assert (whole.name, whole.nbytes) == ("x", 48)
    assert row == Extent("y", whole.address + 16, 16)
    assert whole.address == array.ctypes.data
