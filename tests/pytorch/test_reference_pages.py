"""The references of `iree_lnbwd.torch` and `jax` are full where those are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("sphinx", reason="Sphinx is not installed")

# As docs/conf.py has Sphinx stand in for a package, also for one that is there.
READ = """
import importlib, inspect, sys
from sphinx.ext.autodoc.mock import mock

module, *needed = sys.argv[1:]
with mock(needed):
    home = importlib.import_module(module)
    for name in home.__all__:
        value = getattr(home, name)
        assert inspect.getdoc(value) and value.__module__.startswith("iree_lnbwd."), name
        assert inspect.signature(value), name
    assert {type(sys.modules[name]).__name__ for name in needed} == {"_MockModule"}
"""


@pytest.mark.parametrize(
    "words", [("iree_lnbwd.torch", "torch"), ("iree_lnbwd.jax", "jax", "jaxlib")]
)
def test_every_public_name_can_be_read_without_the_framework(words: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", READ, *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
