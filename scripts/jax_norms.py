"""XLA's own norms, which `scripts/benchmark_jax` and `scripts/train_jax` time ours beside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from iree_lnbwd.ops.arguments import DEFAULT_EPS, rms_eps


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    """Layer norm of the last dimension, as people write it: sums in f32, rounded once."""
    wide, w, b = _wide(x, weight, bias)
    centred = wide - wide.mean(-1, keepdims=True)
    rstd = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + DEFAULT_EPS)
    return (centred * rstd * w + b).astype(x.dtype)


def rms_norm(x: Any, weight: Any) -> Any:
    """As `layer_norm`, an RMS norm."""
    wide, w = _wide(x, weight)
    rstd = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + rms_eps("f32"))
    return (wide * rstd * w).astype(x.dtype)


def _wide(*arrays: Any) -> tuple[Any, ...]:
    return tuple(array.astype(jnp.float32) for array in arrays)
