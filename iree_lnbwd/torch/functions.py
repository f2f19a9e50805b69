"""The norms as functions."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from iree_lnbwd.errors import shown
from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.ops.sets import check_rows_per_set
from iree_lnbwd.torch import sharding
from iree_lnbwd.torch.jagged import by_values, is_jagged
from iree_lnbwd.torch.operator_table import OWN_LAYER_NORM, OWN_RMS_NORM, PYTORCHS_LAYER_NORM

AUTOCAST = "autocast"  # an output's element type: that of autocast, where it is on
_EXPECTED = f"expected a torch.dtype, {AUTOCAST!r} or None"
_INTEGERS = (int, torch.SymInt)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = DEFAULT_EPS,
    *,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    output_dtype: torch.dtype | str | None = None,
    own_forward: bool = False,
    rows_per_set: int = 1,
) -> Tensor:
    """Normalizes ``input`` over its trailing dimensions, as ``torch.nn.functional.layer_norm``.

    The forward is PyTorch's own, so the output has its bits; the backward is this package's. The
    first backward for a row length, element types and a device compiles a module. This takes about
    half a second and is logged; the module is kept on disk, or a warning says why it is not.
    `warmup` compiles it ahead of time. Where no module can be had, as without a compiler, PyTorch's
    operators compute the same formula, which is logged once.

    PyTorch's own operators compute the gradients if they are themselves to be differentiated
    (``create_graph=True``), and under the transforms of ``torch.func``.

    The first use compiles the operators in C++, too, where no release's wheel has them (see
    ``native.load``).

    Args:
        input: [..., *normalized_shape], on the CPU or a GPU; f32, f16, bf16 or f64. Any strides:
            rows with two of them are read where they lie, others are copied.
        normalized_shape: The trailing dimensions to normalize.
        weight: [*normalized_shape], on the same device; None means ones. Its element type may be
            another than ``input``'s, unless one is f64. Or [G, *normalized_shape]: G sets, of which
            row r takes ``(r // rows_per_set) % G``. Sets take this package's forward, and autocast
            changes no type of theirs.
        bias: As ``weight``, with as many sets; None means zeros.
        eps: Added to the variance.
        memory_efficient: Whether the output is kept for the backward, in place of the input; it
            takes this package's forward. The output must not change before the backward. It was
            rounded, which is an error of the gradients as `iree_lnbwd.layer_norm_backward` says;
            they cannot be differentiated again.
        weight_offset: Added to the weight, in the type of sums: 1.0 for Gemma's ``1 + weight``. Any
            but 0.0 takes this package's forward, for PyTorch's has none.
        output_dtype: Of the output: the input of a stream in f32, say, and the output in bf16 for
            what reads it, without a cast. The output is rounded to it once; under autocast, the
            tensors keep their types then. f64 mixes with itself alone. "autocast" is the type of
            autocast where that is on, unless the input is f64. None is the usual type, below. Any
            other takes this package's forward. With ``memory_efficient``, it must be ``input``'s.
        own_forward: Whether to take this package's forward. Its statistics are f32 on the CPU, too,
            so that a backward in half precision need not recompute them.
        rows_per_set: Neighbouring rows that take one set of a weight's, where this has sets: 1 for
            a weight for each head of [..., heads, head_dim]. 1 without sets.

    Returns:
        The shape of ``input``, and its element type (f32 under ``torch.autocast`` on a GPU) or the
        one of ``output_dtype``.

    Raises:
        TypeError, ValueError, RuntimeError: Naming the tensor, what came and what was expected.
    """
    alone: Tensor
    columns = _columns(normalized_shape, input, weight, weight_offset, output_dtype, rows_per_set)
    if columns and own_forward is False and memory_efficient is False and not weight_offset:
        alone = PYTORCHS_LAYER_NORM.output_alone(input, weight, bias, columns, eps)
        return alone
    check_flag("own_forward", own_forward)
    check_flag("memory_efficient", memory_efficient)
    if columns:
        alone = OWN_LAYER_NORM.output_alone(
            input, weight, bias, columns, eps, weight_offset, memory_efficient, None
        )
        return alone
    tensors = {"input": input, "weight": weight, "bias": bias}
    own = _output_dtype(output_dtype, input, memory_efficient)
    options = (eps, weight_offset, memory_efficient, own)
    if has_sets(weight, normalized_shape, rows_per_set):
        sets = torch.ops.iree_lnbwd.own_layer_norm_of_sets
        return call(sets, tensors, normalized_shape, *options, rows_per_set)[0]
    if own_forward or memory_efficient or _is_an_offset(weight_offset) or own is not None:
        return call(torch.ops.iree_lnbwd.own_layer_norm, tensors, normalized_shape, *options)[0]
    return call(torch.ops.iree_lnbwd.layer_norm, tensors, normalized_shape, eps)[0]


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    output_dtype: torch.dtype | str | None = None,
    rows_per_set: int = 1,
) -> Tensor:
    """Divides by the root of the mean square, as ``torch.nn.functional.rms_norm``.

    Both directions are this package's. The output is rounded once, after the weight and the bias.
    Compilation, ``create_graph=True`` and ``torch.func``: as `layer_norm`.

    Args:
        input: As `layer_norm`.
        normalized_shape: The trailing dimensions to normalize.
        weight: As `layer_norm`.
        eps: Added to the mean of the squares; None means the machine epsilon of f32, or of f64 for
            f64 tensors, as PyTorch has it.
        bias: As ``weight``; None means none. PyTorch's own has none.
        memory_efficient: As `layer_norm`.
        weight_offset: Added to the weight, in the type of sums: 1.0 for Gemma's ``1 + weight``.
        output_dtype: As `layer_norm`.
        rows_per_set: As `layer_norm`.

    Returns:
        The shape of ``input``, and its element type (f32 under ``torch.autocast`` on a GPU,
        if PyTorch's own is) or the one of ``output_dtype``.

    Raises:
        TypeError, ValueError, RuntimeError: Naming the tensor, what came and what was expected.
    """
    check_flag("memory_efficient", memory_efficient)
    columns = _columns(normalized_shape, input, weight, weight_offset, output_dtype, rows_per_set)
    if columns:
        alone: Tensor = OWN_RMS_NORM.output_alone(
            input, weight, bias, columns, eps, weight_offset, memory_efficient, None
        )
        return alone
    tensors = {"input": input, "weight": weight, "bias": bias}
    own = _output_dtype(output_dtype, input, memory_efficient)
    options = (eps, weight_offset, memory_efficient, own)
    if has_sets(weight, normalized_shape, rows_per_set):
        sets = torch.ops.iree_lnbwd.rms_norm_of_sets
        return call(sets, tensors, normalized_shape, *options, rows_per_set)[0]
    return call(torch.ops.iree_lnbwd.rms_norm, tensors, normalized_shape, *options)[0]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = DEFAULT_EPS,
    *,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    output_dtype: torch.dtype | str | None = None,
    rows_per_set: int = 1,
) -> tuple[Tensor, Tensor]:
    """Normalizes ``input + residual``, and returns that sum, too.

    Both directions are this package's. The sum is rounded to ``residual``'s element type, and that
    is what is normalized, so the outputs have the bits of an addition and a norm. In the backward,
    the norm's kernel adds the gradient that reaches the sum past the norm, before the sum's
    gradient is rounded. That gradient is ``residual``'s, and ``input``'s too, cast to its element
    type where that is another.

    Under ``torch.autocast`` the tensors keep the types that they are given: the residual stream may
    be f32 where ``input`` is bf16. Compilation, ``create_graph=True`` and ``torch.func``: as
    `layer_norm`.

    Args:
        input: As `layer_norm`.
        residual: As ``input``, of any element type that mixes with it: f64 does not.
        normalized_shape: The trailing dimensions to normalize.
        weight: As `layer_norm`.
        bias: As ``weight``; None means zeros.
        eps: Added to the variance.
        memory_efficient: As `layer_norm`: nor is the sum kept for the backward. Gradients are
            computed in the output's element type, so ``residual`` must have it, too.
        weight_offset: Added to the weight, in the type of sums: 1.0 for Gemma's ``1 + weight``.
        output_dtype: As `layer_norm`.
        rows_per_set: As `layer_norm`.

    Returns:
        The output, of ``input``'s shape, and its element type or the one of ``output_dtype``, and
        the sum, of ``residual``'s.

    Raises:
        TypeError, ValueError, RuntimeError: Naming the tensor, what came and what was expected.
    """
    _check_sum(input, residual, memory_efficient)
    tensors = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    own = _output_dtype(output_dtype, input, memory_efficient)
    options = (eps, weight_offset, memory_efficient, own)
    if has_sets(weight, normalized_shape, rows_per_set):
        sets = torch.ops.iree_lnbwd.add_layer_norm_of_sets
        found = call(sets, tensors, normalized_shape, *options, rows_per_set)
        return found[0], found[-1]
    found = call(torch.ops.iree_lnbwd.add_layer_norm, tensors, normalized_shape, *options)
    return found[0], found[-1]


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    output_dtype: torch.dtype | str | None = None,
    rows_per_set: int = 1,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of ``input + residual``, and that sum, too; as `add_layer_norm`.

    Args:
        input: As `layer_norm`.
        residual: As `add_layer_norm`.
        normalized_shape: The trailing dimensions to normalize.
        weight: As `layer_norm`.
        eps: As `rms_norm`.
        bias: As `rms_norm`.
        memory_efficient: As `add_layer_norm`.
        weight_offset: Added to the weight, in the type of sums: 1.0 for Gemma's ``1 + weight``.
        output_dtype: As `layer_norm`.
        rows_per_set: As `layer_norm`.

    Returns:
        The output, of ``input``'s shape, and its element type or the one of ``output_dtype``, and
        the sum, of ``residual``'s.

    Raises:
        TypeError, ValueError, RuntimeError: Naming the tensor, what came and what was expected.
    """
    _check_sum(input, residual, memory_efficient)
    tensors = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    own = _output_dtype(output_dtype, input, memory_efficient)
    options = (eps, weight_offset, memory_efficient, own)
    if has_sets(weight, normalized_shape, rows_per_set):
        sets = torch.ops.iree_lnbwd.add_rms_norm_of_sets
        found = call(sets, tensors, normalized_shape, *options, rows_per_set)
        return found[0], found[-1]
    found = call(torch.ops.iree_lnbwd.add_rms_norm, tensors, normalized_shape, *options)
    return found[0], found[-1]


def _columns(
    dims: object,
    input: object,
    weight: Any,
    weight_offset: object,
    output_dtype: object,
    rows_per_set: object,
) -> int:
    """The columns, if only the operator has something left to check or to decide, as in most calls.

    What the general way takes to find that out can be measured. 0 means that it has to.
    """
    if (
        type(input) is Tensor
        and isinstance(dims, tuple)  # or a torch.Size
        and len(dims) == 1
        and type(columns := dims[0]) is int
        and output_dtype is None
        and type(rows_per_set) is int
        and rows_per_set == 1
        and type(weight_offset) is float
        and (weight is None or getattr(weight, "ndim", None) == 1)
        and not is_dynamo_compiling()  # compilers look for the norm's operator
    ):
        return columns
    return 0


def has_sets(
    weight: Tensor | None, normalized_shape: int | Sequence[int], rows_per_set: int
) -> bool:
    """Whether a weight has sets: a dimension more than those that are normalized.

    Raises:
        TypeError, ValueError: ``rows_per_set`` is no int >= 1, or not 1 without sets.
    """
    if not isinstance(rows_per_set, torch.SymInt):  # one is not known while a graph is made
        check_rows_per_set(rows_per_set)
    dims = 1 if isinstance(normalized_shape, _INTEGERS) else len(normalized_shape)
    if isinstance(weight, Tensor) and weight.ndim == dims + 1:
        return True
    if rows_per_set != 1:
        got = None if weight is None else tuple(weight.shape)
        raise ValueError(
            "rows_per_set: expected 1 where weight has no sets, got "
            f"{rows_per_set} and weight {got}"
        )
    return False


def call(
    operator: Any,
    tensors: Mapping[str, Tensor | None],
    normalized_shape: int | Sequence[int],
    *options: Any,
) -> Sequence[Tensor]:
    """What an operator returns; of jagged tensors, only its results with the input's shape.

    Args:
        operator: Of ``torch.ops.iree_lnbwd``.
        tensors: What it takes, by name and in order.
        normalized_shape: The trailing dimensions, as the caller gave them.
        options: The others that it takes.
    """
    dims = normalized_shape
    if type(dims) is not tuple and isinstance(dims, _INTEGERS):
        dims = (dims,)
    if torch.jit.is_tracing():  # of its tensors in place of integers, it keeps none for operators
        dims = tuple(map(int, dims))
    given = tensors["input"]
    if type(given) is not Tensor:
        if given is None:
            raise TypeError("input: expected a tensor, got None")
        if isinstance(given, Tensor) and is_jagged(given):
            return by_values(
                lambda dense: operator.default(*dense.values(), dims, *options), tensors, dims
            )
        sharding.register()
    found: Sequence[Tensor] = operator.default(*tensors.values(), dims, *options)
    return found


def _check_sum(input: Tensor, residual: Tensor, memory_efficient: object) -> None:
    check_flag("memory_efficient", memory_efficient)
    if residual is None:
        raise TypeError("residual: expected a tensor, got None")
    # The gradient of the residual stream must not lose its precision in each norm.
    both = isinstance(input, Tensor) and isinstance(residual, Tensor)
    if memory_efficient and both and input.dtype != residual.dtype:
        raise TypeError(
            f"residual: expected {input.dtype} like input with memory_efficient, whose gradients "
            f"have the output's type, got {residual.dtype}"
        )
    if type(residual) is not Tensor:
        sharding.register()


def check_output_dtype(value: object) -> None:
    """Expects an element type, "autocast" or None.

    Raises:
        TypeError, ValueError: Saying what came.
    """
    if isinstance(value, str) and value != AUTOCAST:
        raise ValueError(f"output_dtype: {_EXPECTED}, got {shown(value)}")
    if not (value is None or isinstance(value, str | torch.dtype)):
        raise TypeError(f"output_dtype: {_EXPECTED}, got {shown(value)}")


def output_dtype_now(output_dtype: torch.dtype | str | None, input: Tensor) -> torch.dtype | None:
    """The element type that an ``output_dtype`` means for an input now; None is the usual one."""
    if not isinstance(output_dtype, str):
        return output_dtype
    device = input.device.type
    is_on = device != "meta" and torch.is_autocast_enabled(device)
    if not is_on or input.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def _output_dtype(
    given: torch.dtype | str | None, input: Tensor, memory_efficient: bool
) -> torch.dtype | None:
    """The element type that a caller says, as operators take it."""
    if given is None or not isinstance(input, Tensor):
        return None
    check_output_dtype(given)
    dtype = output_dtype_now(given, input)
    if memory_efficient and dtype not in (None, input.dtype):
        raise TypeError(
            f"output_dtype: expected {input.dtype} like input with memory_efficient, whose "
            f"gradients have the output's type, got {dtype}"
        )
    return dtype


def check_flag(name: str, value: object) -> None:
    """Expects True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")


def _is_an_offset(value: object) -> bool:
    # An abstract class takes longer to ask than all other checks.
    if type(value) is not float and not isinstance(value, numbers.Real):
        raise TypeError(f"weight_offset: expected a float, got {type(value).__name__}")
    return value != 0.0
