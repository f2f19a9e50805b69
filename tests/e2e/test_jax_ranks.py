"""Processes that start at once on one empty cache, with JAX: one compiles the C++ for all."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed")
from ranks import run

RANKS = 8
IMPORTS = """
import jax, jax.numpy as jnp
from iree_lnbwd import jax as norms
from iree_lnbwd.jax import native as jax_native
builds, build = [], jax_native._build

def counted(path):
    builds.append(1)
    build(path)

jax_native._build = counted
"""
WORK = """
x = jnp.asarray(np.random.default_rng(0).standard_normal((33, 48), dtype=np.float32))
found = jax.jit(lambda x: norms.rms_norm(x, 48))(x)
expected = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + np.finfo(np.float32).eps)
print(json.dumps([len(builds), len(compiled), bool(jnp.abs(found - expected).max() < 1e-5)]))
"""


@pytest.mark.slow
def test_the_custom_call_is_compiled_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    ranks = run(WORK, RANKS, imports=IMPORTS, IREE_LNBWD_CACHE=str(cache), JAX_PLATFORMS="cpu")
    said = [rank.said for rank in ranks]
    assert all(right for *_, right in said)
    assert (sum(built for built, *_ in said), sum(made for _, made, _ in said)) == (1, 1)
    assert sorted(path.suffix for path in (cache / "jax").rglob("*.*")) == [".sha256", ".so"]
