"""What `status` says of the operators in C++, and of the sizes that `enable` acts at."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import iree_lnbwd.torch as ours
from iree_lnbwd.torch import native


def test_status_says_how_long_its_operators_are_being_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread's `enable` builds them, which `status` does not wait for."""
    said = []

    def build() -> tuple[bool, None]:
        native._BUILD.has_begun("being compiled:")
        with ThreadPoolExecutor(1) as pool:  # it would wait for ever
            said.append(str(pool.submit(ours.status).result(timeout=60)))
        return False, None

    monkeypatch.setattr(native, "_BUILD", native._Build())
    monkeypatch.setattr(native, "_loaded", build)
    native.load.cache_clear()
    assert "\nC++: not loaded yet\n" in str(ours.status())
    try:
        ours.enable()
    finally:
        ours.disable()
        native.load.cache_clear()
    assert re.search(r"^C\+\+: being compiled: for \d+ s$", said[0], re.MULTILINE)
    assert "\nC++: could not be built; the log says why\n" in str(ours.status())


def test_status_says_from_which_size_it_acts_on_cpus() -> None:
    assert native.load() or not native.can_be_had()
    with ours.enabled():
        rows = [row.split("  ") for row in str(ours.status()).splitlines()]
    has_cpp = native.load()
    (said,) = (
        row[-1] for row in rows if row[0] == "aten::native_layer_norm_backward" and "cpu" in row
    )
    assert (said.strip() == "takes calls of every size") == has_cpp
