"""XLA's custom call, built ahead as for a release's wheel, is loaded without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed")
import jaxlib

ROOT = Path(__file__).parents[2]

USE = """
import sys
from pathlib import Path
from iree_lnbwd.native import prebuilt
prebuilt.FOLDER = Path(sys.argv[1])
import jax, jax.numpy as jnp
from iree_lnbwd.jax import rms_norm
x = jnp.arange(24.0).reshape(3, 8)
gradient = jax.jit(jax.grad(lambda x: (rms_norm(x, 8) ** 3).sum()))(x)
def formula(x):
    return ((x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1.1920929e-07)) ** 3).sum()
print(jnp.allclose(gradient, jax.grad(formula)(x), atol=1e-4))
"""


def used(ahead: Path, cache: Path) -> str:
    """What is said on the side, where there is no compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"JAX_PLATFORMS": "cpu", "PATH": str(cache), "IREE_LNBWD_CACHE": str(cache)}
    ended = subprocess.run(
        [sys.executable, "-c", USE, str(ahead)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout == "True\n", ended.stderr
    return ended.stderr


def test_it_is_loaded_without_a_compiler(tmp_path: Path) -> None:
    if not all(map(shutil.which, (os.environ.get("CXX", "c++").split()[0], "nm", "objdump"))):
        pytest.skip("no C++ compiler or no binutils on PATH")
    ahead, package = tmp_path / "ahead", Path(jaxlib.__file__).parent
    script = str(ROOT / "scripts" / "build_ahead")
    subprocess.run([sys.executable, script, str(ahead), str(package)], check=True)
    assert "XLA computes the norms" not in used(ahead, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))
    (library,) = ahead.glob("*.so")
    library.write_bytes(library.read_bytes()[:-1])
    assert "XLA computes the norms" in used(ahead, tmp_path / "cache")
