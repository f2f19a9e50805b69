"""The norms for JAX: `layer_norm`, `rms_norm` and their fused forms, under its transformations.

``modulated_layer_norm`` and ``modulated_rms_norm`` have a scale and a shift for each sample,
``gated_layer_norm`` and ``gated_rms_norm`` a gate, after or before the norm.

They work under ``jit``, ``grad``, ``vmap``, ``pmap``, ``shard_map`` and on arrays whose rows are
sharded. On NVIDIA GPUs this package's kernels run, on XLA's stream, forward and backward. On the
CPU, where JAX has no GPU, its modules compute norms of every size in XLA's own memory. Elsewhere
XLA compiles the same formulas.
"""

from iree_lnbwd.jax.functions import (
    add_layer_norm,
    add_rms_norm,
    fork_layer_norm,
    fork_rms_norm,
    layer_norm,
    rms_norm,
)
from iree_lnbwd.jax.gated import gated_layer_norm, gated_rms_norm
from iree_lnbwd.jax.modulated import modulated_layer_norm, modulated_rms_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "fork_layer_norm",
    "fork_rms_norm",
    "gated_layer_norm",
    "gated_rms_norm",
    "layer_norm",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "rms_norm",
]
