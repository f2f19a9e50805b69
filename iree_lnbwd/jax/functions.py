"""The norms as functions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iree_lnbwd.errors import shown
from iree_lnbwd.jax.norms import Way, normalize
from iree_lnbwd.ops.arguments import DEFAULT_EPS, GpuArray, bind_arrays, check_options, variant_of
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import LAYER_NORM, MOST_GRAD_OUTPUTS, RMS_NORM, Op, names
from iree_lnbwd.ops.spec import NormSpec


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
    rows_per_set: int = 1,
    uses: int = 1,
    gate: jax.Array | None = None,
    gate_first: bool = False,
) -> Any:
    """Normalizes ``input`` over its trailing dimensions; the arguments are PyTorch's.

    Sums are in f32 (f64 for f64 arrays), and so are the statistics that are kept for the backward.
    Each result is rounded once.

    On NVIDIA GPUs both directions are kernels of this package, on XLA's stream, without a copy. On
    the CPU they are its modules, on XLA's threads, in XLA's own memory. The first call for a row
    length, element types and a device compiles a module. This takes about half a second and is
    logged; the module is kept on disk. Elsewhere, and for more rows than a module takes
    (2**31 - 2**20), XLA compiles the same formulas.

    Under ``vmap`` the batch counts as rows; XLA computes what has parameters, or their gradients,
    for each of the batch. Gradients can be differentiated again, and XLA computes that, too.
    ``jvp`` of the norm itself is not supported, as of all functions with a ``custom_vjp``.

    Args:
        input: [..., *normalized_shape], f32, f16, bf16 or f64.
        normalized_shape: The trailing dimensions to normalize.
        weight: [*normalized_shape]; None means ones. Its element type may be another than
            ``input``'s, unless one is f64. Or [G, *normalized_shape]: G sets, of which row r takes
            ``(r // rows_per_set) % G``.
        bias: As ``weight``, with as many sets; None means zeros.
        eps: Added to the variance; a number, which cannot be traced.
        memory_efficient: Whether the output is saved for the backward, in place of the input. It
            was rounded, which is an error of the gradients as `iree_lnbwd.layer_norm_backward`
            says.
        weight_offset: Added to the weight, in the type of sums: 1.0 for Gemma's ``1 + weight``.
        output_dtype: The element type of the output, ``jnp.bfloat16`` or "bf16", say. It is rounded
            to it once. f64 mixes with itself alone. None means ``input``'s, which it must be with
            ``memory_efficient``.
        rows_per_set: Neighbouring rows that take one set of weights: 1 for a weight for each head
            of [..., heads, head_dim], and the rows of a sample for a scale and a shift of each
            sample. 1 without sets. It cannot be traced.
        uses: How many times to return the output, from 1 to 4: once for each of its uses, whose
            gradients are then added in the backward's kernel, in that order. Each sum is rounded to
            the output's type if what is normalized has it, too, and else to that of sums.
        gate: As ``input``, of any element type that mixes with it: z, of which ``silu(z)`` is a
            factor of the output. The whole formula is computed in the type of sums, and rounded
            once. Neither ``uses`` nor ``memory_efficient`` goes with it. None means none.
        gate_first: Whether ``input * silu(gate)`` is what is normalized. Otherwise the gate comes
            last, after the bias.

    Returns:
        The shape of ``input``, and its element type or that of ``output_dtype``. With more than one
        of ``uses``, a tuple of so many.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    arrays = {"input": input, "weight": weight, "bias": bias, "gate": gate}
    options = (normalized_shape, eps, weight_offset, output_dtype, rows_per_set)
    output, _ = _normalized(
        LAYER_NORM, arrays, *options, memory_efficient, uses, gate_first=gate_first
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
    rows_per_set: int = 1,
    uses: int = 1,
    gate: jax.Array | None = None,
    gate_first: bool = False,
) -> Any:
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
        rows_per_set: As `layer_norm`.
        uses: As `layer_norm`.
        gate: As `layer_norm`.
        gate_first: As `layer_norm`.

    Returns:
        As `layer_norm`.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    arrays = {"input": input, "weight": weight, "bias": bias, "gate": gate}
    options = (normalized_shape, eps, weight_offset, output_dtype, rows_per_set)
    output, _ = _normalized(
        RMS_NORM, arrays, *options, memory_efficient, uses, gate_first=gate_first
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
    rows_per_set: int = 1,
    uses: int = 1,
) -> tuple[Any, jax.Array]:
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
        rows_per_set: As `layer_norm`.
        uses: As `layer_norm`.

    Returns:
        The output, as `layer_norm` returns it, and the sum, of ``residual``'s shape and type.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    arrays = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    options = (normalized_shape, eps, weight_offset, output_dtype, rows_per_set)
    return _normalized(LAYER_NORM, arrays, *options, memory_efficient, uses)


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
    rows_per_set: int = 1,
    uses: int = 1,
) -> tuple[Any, jax.Array]:
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
        rows_per_set: As `layer_norm`.
        uses: As `layer_norm`.

    Returns:
        The output, as `layer_norm` returns it, and the sum, of ``residual``'s shape and type.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    arrays = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    options = (normalized_shape, eps, weight_offset, output_dtype, rows_per_set)
    return _normalized(RMS_NORM, arrays, *options, memory_efficient, uses)


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
    rows_per_set: int = 1,
    uses: int = 1,
) -> tuple[Any, jax.Array]:
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
        rows_per_set: As `layer_norm`.
        uses: As `layer_norm`.

    Returns:
        The output, as `layer_norm` returns it, and ``input``.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    arrays = {"input": input, "weight": weight, "bias": bias}
    options = (normalized_shape, eps, weight_offset, output_dtype, rows_per_set)
    return _normalized(LAYER_NORM, arrays, *options, memory_efficient, uses, forks=True)


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
    rows_per_set: int = 1,
    uses: int = 1,
) -> tuple[Any, jax.Array]:
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
        rows_per_set: As `layer_norm`.
        uses: As `layer_norm`.

    Returns:
        The output, as `layer_norm` returns it, and ``input``.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    arrays = {"input": input, "weight": weight, "bias": bias}
    options = (normalized_shape, eps, weight_offset, output_dtype, rows_per_set)
    return _normalized(RMS_NORM, arrays, *options, memory_efficient, uses, forks=True)


def _normalized(
    op: Op,
    arrays: Mapping[str, Any],
    normalized_shape: object,
    eps: object,
    weight_offset: object,
    output_dtype: object,
    rows_per_set: object,
    memory_efficient: object,
    uses: object,
    *,
    gate_first: object = False,
    forks: bool = False,
) -> tuple[Any, Any]:
    """Checks the arguments, and computes: the output, as often as asked, and what goes past."""
    numbers = {"eps": eps, "weight_offset": weight_offset, "rows_per_set": rows_per_set}
    for name, number in (numbers | {"uses": uses}).items():
        if isinstance(number, jax.core.Tracer):
            raise TypeError(f"{name}: expected a number that is not traced, got a JAX tracer")
    if not isinstance(memory_efficient, bool):
        raise TypeError(f"memory_efficient: expected a bool, got {shown(memory_efficient)}")
    given = {
        name: checked_array(name, array)
        for name, array in arrays.items()
        if array is not None or name in ("input", "residual")
    }
    facts = {
        name: GpuArray(_known(array.shape), array.dtype, "XLA's", contiguous=True)
        for name, array in given.items()
    }
    if "residual" in given and (shape := given["residual"].shape) != given["input"].shape:
        raise ValueError(f"residual: expected shape {given['input'].shape}, got {shape}")
    options = check_options(
        *(variant_of(op, facts, gate_first), normalized_shape, (), eps, weight_offset),
        output_dtype=output_dtype,
        rows_per_set=rows_per_set,
    )
    spec = bind_arrays(facts, options).spec
    assert spec is not None  # of a forward
    count = _check_uses(uses)
    _check_spec(spec, count, memory_efficient=memory_efficient)
    rows = options.rows_per_set if spec.weight_sets else None
    in_order = _varying_alike([given[name] for name in names(spec.inputs)])
    compute = functools.partial(normalize, spec, Way(memory_efficient, forks, count, rows))
    sharding = jax.typeof(in_order[0]).sharding
    if spec.weight_sets and sharding.mesh.explicit_axes:
        # Rows are counted across dimensions, of which types with shardings cannot say theirs.
        compute = jax.sharding.auto_axes(compute, out_sharding=sharding.spec)
    found = compute(*in_order)
    outputs, past = found[:count], found[count:]
    return outputs if count > 1 else outputs[0], past[0] if past else None


def _check_uses(uses: object) -> int:
    try:
        count = operator.index(uses)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if isinstance(uses, bool) or not 1 <= count <= MOST_GRAD_OUTPUTS:
        raise ValueError(f"uses: expected an int from 1 to {MOST_GRAD_OUTPUTS}, got {shown(uses)}")
    return count


def _check_spec(spec: NormSpec, uses: int, *, memory_efficient: bool) -> None:
    """Expects a forward that XLA can compute, too, and options that go together."""
    assert spec.eps is not None
    if 0 < abs(spec.eps) < (least := DTYPES[spec.acc_dtype].smallest_normal):
        raise ValueError(
            f"eps: expected 0, or a number from {least:.3g} in magnitude for sums of "
            f"{spec.acc_dtype}, because XLA takes others for 0, got {spec.eps}"
        )
    if spec.gate is not None and uses > 1:
        raise ValueError(f"uses: expected 1 beside gate, got {uses}")
    if not memory_efficient:
        return
    if spec.gate is not None:
        raise ValueError("memory_efficient: expected False beside gate, got True")
    for name, dtype in (("residual", spec.residual_dtype), ("output_dtype", spec.output_dtype)):
        if dtype not in (None, spec.dtype):
            raise TypeError(
                f"{name}: expected {spec.dtype} like input with memory_efficient, whose gradients "
                f"have the output's type, got {dtype}"
            )


def _known(shape: Sequence[Any]) -> tuple[int, ...]:
    """A shape with 1 for each dimension that `jax.export` leaves open: it cannot be compared."""
    return tuple(size if isinstance(size, int) else 1 for size in shape)


def checked_array(name: str, array: Any) -> jax.Array:
    """A caller's array as JAX's."""
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
