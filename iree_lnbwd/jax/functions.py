"""The norms as functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iree_lnbwd.errors import shown
from iree_lnbwd.jax.norms import Way, normalize
from iree_lnbwd.ops.arguments import DEFAULT_EPS, GpuArray, bind_arrays, check_options
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM, Op, names


def layer_norm(
    input: jax.Array,
    normalized_shape: int | Sequence[int],
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = DEFAULT_EPS,
    *,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    output_dtype: Any = None,
) -> jax.Array:
    """Normalizes ``input`` over its trailing dimensions; the arguments are PyTorch's.

    Sums are in f32 (f64 for f64 arrays), and so are the statistics that are kept for the backward.
    Each result is rounded once.

    On NVIDIA GPUs both directions are kernels of this package, on XLA's stream, without a copy. On
    the CPU they are its modules, on XLA's threads, in XLA's own memory. The first call for a row
    length, element types and a device compiles a module. This takes about a second and is logged;
    the module is kept on disk. Else, and for more than 2**31 rows, XLA compiles the same formulas.

    Under ``vmap`` the batch counts as rows; XLA computes what has parameters, or their gradients,
    for each of the batch. Gradients can be differentiated again, and XLA computes that, too.
    ``jvp`` of the norm itself is not supported, as of all functions with a ``custom_vjp``.

    Args:
        input: [..., *normalized_shape], f32, f16, bf16 or f64.
        normalized_shape: The trailing dimensions to normalize.
        weight: [*normalized_shape]; None means ones. Its element type may be another than
            ``input``'s, unless one is f64.
        bias: As ``weight``; None means zeros.
        eps: Added to the variance; a number, which cannot be traced.
        memory_efficient: Whether the output is saved for the backward, in place of the input. It
            was rounded, which is an error of the gradients as `iree_lnbwd.layer_norm_backward`
            says.
        weight_offset: Added to the weight, in the type of sums: 1.0 for Gemma's ``1 + weight``.
        output_dtype: The element type of the output, ``jnp.bfloat16`` or "bf16", say. It is rounded
            to it once. f64 mixes with itself alone. None means ``input``'s, which it must be with
            ``memory_efficient``.

    Returns:
        The shape of ``input``, and its element type or that of ``output_dtype``.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    arrays = {"input": input, "weight": weight, "bias": bias}
    (output,) = _normalized(
        LAYER_NORM, arrays, normalized_shape, eps, weight_offset, memory_efficient, output_dtype
    )
    return output


def rms_norm(
    input: jax.Array,
    normalized_shape: int | Sequence[int],
    weight: jax.Array | None = None,
    eps: float | None = None,
    *,
    bias: jax.Array | None = None,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    output_dtype: Any = None,
) -> jax.Array:
    """Divides by the root of the mean square. Otherwise as `layer_norm`.

    Args:
        input: As `layer_norm`.
        normalized_shape: The trailing dimensions to normalize.
        weight: As `layer_norm`.
        eps: Added to the mean of the squares. None means the machine epsilon of f32, or of f64 for
            f64 arrays, as PyTorch has it.
        bias: As `layer_norm`; None means none. PyTorch's own has none.
        memory_efficient: As `layer_norm`.
        weight_offset: As `layer_norm`.
        output_dtype: As `layer_norm`.

    Returns:
        As `layer_norm`.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    arrays = {"input": input, "weight": weight, "bias": bias}
    (output,) = _normalized(
        RMS_NORM, arrays, normalized_shape, eps, weight_offset, memory_efficient, output_dtype
    )
    return output


def add_layer_norm(
    input: jax.Array,
    residual: jax.Array,
    normalized_shape: int | Sequence[int],
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = DEFAULT_EPS,
    *,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    output_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Normalizes ``input + residual``, and returns that sum, too. Otherwise as `layer_norm`.

    The sum is rounded to ``residual``'s element type, and that is what is normalized. In the
    backward, the gradient that reaches the sum past the norm is added before the sum's gradient is
    rounded. That gradient is ``residual``'s, and ``input``'s too, cast to its element type where
    that is another.

    Args:
        input: As `layer_norm`.
        residual: As ``input``, of any element type that mixes with it: f64 does not.
        normalized_shape: The trailing dimensions to normalize.
        weight: As `layer_norm`.
        bias: As `layer_norm`.
        eps: As `layer_norm`.
        memory_efficient: As `layer_norm`: nor is the sum saved. Gradients are computed in the
            output's element type, so ``residual`` must have it, too.
        weight_offset: As `layer_norm`.
        output_dtype: As `layer_norm`.

    Returns:
        The output, as that of `layer_norm`, and the sum, of ``residual``'s shape and type.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    arrays = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    output, total = _normalized(
        LAYER_NORM, arrays, normalized_shape, eps, weight_offset, memory_efficient, output_dtype
    )
    return output, total


def add_rms_norm(
    input: jax.Array,
    residual: jax.Array,
    normalized_shape: int | Sequence[int],
    weight: jax.Array | None = None,
    eps: float | None = None,
    *,
    bias: jax.Array | None = None,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    output_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`rms_norm` of ``input + residual``, and that sum, too; as `add_layer_norm`.

    Args:
        input: As `layer_norm`.
        residual: As `add_layer_norm`.
        normalized_shape: The trailing dimensions to normalize.
        weight: As `layer_norm`.
        eps: As `rms_norm`.
        bias: As `rms_norm`.
        memory_efficient: As `add_layer_norm`.
        weight_offset: As `layer_norm`.
        output_dtype: As `layer_norm`.

    Returns:
        The output, as that of `layer_norm`, and the sum, of ``residual``'s shape and type.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    arrays = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    output, total = _normalized(
        RMS_NORM, arrays, normalized_shape, eps, weight_offset, memory_efficient, output_dtype
    )
    return output, total


def fork_layer_norm(
    input: jax.Array,
    normalized_shape: int | Sequence[int],
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = DEFAULT_EPS,
    *,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    output_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`layer_norm`, and ``input`` itself, for what goes past the norm.

    In the backward, the gradient that reaches ``input`` past the norm is added before ``input``'s
    gradient is rounded. So ``h, x = fork_layer_norm(x, ...)`` and ``x = x + branch(h)`` need no
    addition of their own in the backward. XLA may have a matrix product add in the forward; where
    it does not, `add_layer_norm` saves that addition, too.

    Args:
        input: As `layer_norm`.
        normalized_shape: As `layer_norm`.
        weight: As `layer_norm`.
        bias: As `layer_norm`.
        eps: As `layer_norm`.
        memory_efficient: As `layer_norm`.
        weight_offset: As `layer_norm`.
        output_dtype: As `layer_norm`.

    Returns:
        The output, and ``input``.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    arrays = {"input": input, "weight": weight, "bias": bias}
    output, past = _normalized(
        *(LAYER_NORM, arrays, normalized_shape, eps, weight_offset, memory_efficient, output_dtype),
        forks=True,
    )
    return output, past


def fork_rms_norm(
    input: jax.Array,
    normalized_shape: int | Sequence[int],
    weight: jax.Array | None = None,
    eps: float | None = None,
    *,
    bias: jax.Array | None = None,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    output_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`rms_norm`, and ``input`` itself; as `fork_layer_norm`.

    Args:
        input: As `layer_norm`.
        normalized_shape: As `layer_norm`.
        weight: As `layer_norm`.
        eps: As `rms_norm`.
        bias: As `rms_norm`.
        memory_efficient: As `layer_norm`.
        weight_offset: As `layer_norm`.
        output_dtype: As `layer_norm`.

    Returns:
        The output, and ``input``.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    arrays = {"input": input, "weight": weight, "bias": bias}
    output, past = _normalized(
        *(RMS_NORM, arrays, normalized_shape, eps, weight_offset, memory_efficient, output_dtype),
        forks=True,
    )
    return output, past


def _normalized(
    op: Op,
    arrays: Mapping[str, Any],
    normalized_shape: object,
    eps: object,
    weight_offset: object,
    memory_efficient: object,
    output_dtype: object,
    *,
    forks: bool = False,
) -> tuple[jax.Array, ...]:
    """Checks the arguments, and computes."""
    for name, number in (("eps", eps), ("weight_offset", weight_offset)):
        if isinstance(number, jax.core.Tracer):
            raise TypeError(f"{name}: expected a number that is not traced, got a JAX tracer")
    if not isinstance(memory_efficient, bool):
        raise TypeError(f"memory_efficient: expected a bool, got {shown(memory_efficient)}")
    given = {
        name: _array(name, array)
        for name, array in arrays.items()
        if array is not None or name in ("input", "residual")
    }
    facts = {
        name: GpuArray(_known(array.shape), array.dtype, "XLA's", contiguous=True)
        for name, array in given.items()
    }
    if "residual" in given and (shape := given["residual"].shape) != given["input"].shape:
        raise ValueError(f"residual: expected shape {given['input'].shape}, got {shape}")
    options = check_options(op, normalized_shape, (), eps, weight_offset, output_dtype=output_dtype)
    spec = bind_arrays(facts, options).spec
    assert spec is not None  # of a forward
    assert spec.eps is not None
    if 0 < abs(spec.eps) < (least := DTYPES[spec.acc_dtype].smallest_normal):
        raise ValueError(
            f"eps: expected 0, or a number from {least:.3g} in magnitude for sums of "
            f"{spec.acc_dtype}, because XLA takes others for 0, got {spec.eps}"
        )
    if memory_efficient and spec.residual_dtype not in (None, spec.dtype):
        raise TypeError(
            f"residual: expected {spec.dtype} like input with memory_efficient, whose gradients "
            f"have the output's type, got {spec.residual_dtype}"
        )
    if memory_efficient and spec.output_dtype is not None:
        raise TypeError(
            f"output_dtype: expected {spec.dtype} like input with memory_efficient, whose "
            f"gradients have the output's type, got {spec.output_dtype}"
        )
    in_order = _varying_alike([given[name] for name in names(spec.inputs)])
    normalized: tuple[jax.Array, ...] = normalize(spec, Way(memory_efficient, forks), *in_order)
    return normalized


def _known(shape: Sequence[Any]) -> tuple[int, ...]:
    """A shape with 1 for each dimension that `jax.export` leaves open: it cannot be compared."""
    return tuple(size if isinstance(size, int) else 1 for size in shape)


def _array(name: str, array: Any) -> jax.Array:
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(f"{name}: expected a JAX or NumPy array, got {type(array).__name__}")
    return jnp.asarray(array)


def _varying_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Under ``shard_map``: arrays that vary over the same axes of the mesh, as JAX's sums would.

    A weight is the same on all devices, and its gradient the sum of theirs, which the transpose of
    this computes.
    """
    axes = [_axes(array) for array in arrays]
    everywhere: frozenset[str] = frozenset().union(*axes)
    return [
        jax.lax.pcast(array, tuple(everywhere - own), to="varying") if everywhere - own else array
        for array, own in zip(arrays, axes, strict=True)
    ]


def _axes(array: jax.Array) -> frozenset[str]:
    """The axes of the mesh over which an array varies, under ``shard_map``."""
    kind = jax.typeof(array)
    axes: frozenset[str] = kind.mat.varying if hasattr(kind, "mat") else kind.vma
    return axes
