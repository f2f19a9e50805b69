"""The norms by PyTorch's own operators, which can be differentiated again, and batched."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from iree_lnbwd.ops.arguments import NormOutput, Results, asked_of, results_of
from iree_lnbwd.ops.operands import (
    GRAD_INPUT,
    GRAD_INPUT_COPY,
    GRAD_INPUT_SUM,
    GRAD_OUTPUT,
    MORE_GRAD_OUTPUTS,
    Gate,
    Op,
    names,
)
from iree_lnbwd.ops.spec import LEAST_WEIGHT
from iree_lnbwd.torch import supported
from iree_lnbwd.torch.supported import TensorKind, kind


def pytorchs(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    eps: float | None,
    weight_offset: float = 0.0,
) -> NormOutput:
    """PyTorch's own layer norm: its bits.

    Args:
        op: The forward.
        tensors: In the order of its table, without a residual.
        normalized_shape: The trailing dimensions.
        eps: Added to the variance.
        weight_offset: PyTorch's has none.
    """
    input, _, weight, bias = tensors
    assert input is not None
    assert eps is not None
    assert not weight_offset
    of_input, of_weight, of_bias = kind(input), kind(weight), kind(bias)
    supported.check("input", input=of_input, weight=of_weight, bias=of_bias)
    if _takes_kinds(of_input, of_weight, of_bias):
        output, mean, rstd = torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
        return NormOutput(output, mean, rstd, None)
    wide = (None if tensor is None else tensor.float() for tensor in (weight, bias))
    output, mean, rstd = torch.native_layer_norm(input.float(), normalized_shape, *wide, eps)
    return NormOutput(output.to(input.dtype), mean, rstd, None)


@functools.lru_cache
def _takes_kinds(input: TensorKind, weight: TensorKind, bias: TensorKind) -> bool:
    """Whether PyTorch's forward takes these types together; on GPUs, it takes one type only."""
    assert input is not None
    parameters = {kind[1] for kind in (weight, bias) if kind is not None}
    mixed_on_cpu = input[0].type == "cpu" and parameters == {torch.float32}
    return parameters <= {input[1]} or mixed_on_cpu


def norm(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    eps: float | None,
    weight_offset: float,
    output_dtype: torch.dtype | None = None,
    rows_per_set: int | None = None,
) -> NormOutput:
    """What a forward of ours computes, but for rounding.

    Args:
        op: The forward.
        tensors: In the order of its table.
        normalized_shape: The trailing dimensions.
        eps: Added to the variance; None as in ``rms_norm``.
        weight_offset: Added to the weight.
        output_dtype: Of the output; None means that of the input.
        rows_per_set: Neighbouring rows that take one set of weights; None where there are no sets.
    """
    given = supported.given_for(output_dtype, op, tensors)
    total, residual = given["input"], given.get("residual")
    if residual is not None:
        sums = supported.wide(total.dtype)
        total = (total.to(sums) + residual.to(sums)).to(residual.dtype)
    parameters = (given.get("weight"), given.get("bias"))
    if op.gate is not None:
        tensors = (total, *parameters, given["gate"])
        output, mean, rstd = gated(op, tensors, normalized_shape, eps, weight_offset, rows_per_set)
        return NormOutput(output.to(output_dtype or total.dtype), mean, rstd, None)
    output, mean, rstd = normalized(
        op, total, *parameters, normalized_shape, eps, weight_offset, rows_per_set
    )
    return NormOutput(
        output.to(output_dtype or given["input"].dtype),
        *(mean, rstd, None if residual is None else total),
    )


def normalized(
    op: Op,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float | None,
    weight_offset: float,
    rows_per_set: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Output, mean and rstd in the type of sums; the mean is None of an op that has none."""
    sums = supported.wide(input.dtype)
    x = input.to(sums)
    gamma = None if weight is None else weight.to(sums) + weight_offset
    beta = None if bias is None else bias.to(sums)
    if rows_per_set is not None and op.centres:
        xhat, mean, rstd = torch.native_layer_norm(x, normalized_shape, None, None, eps)
        assert gamma is not None
        y = xhat * _taken(gamma, x, rows_per_set)
        return y if beta is None else y + _taken(beta, x, rows_per_set), mean, rstd
    if rows_per_set is not None:
        gamma, beta = (None if p is None else _taken(p, x, rows_per_set) for p in (gamma, beta))
    if op.centres:
        return torch.native_layer_norm(x, normalized_shape, gamma, beta, eps)  # type: ignore[no-any-return]
    dims = tuple(range(-len(normalized_shape), 0))
    added = torch.finfo(sums).eps if eps is None else eps
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + added)
    y = x * rstd if gamma is None else x * rstd * gamma
    return y if beta is None else y + beta, None, rstd


def gated(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    eps: float | None,
    weight_offset: float,
    rows_per_set: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `normalized`, of an op with a gate.

    Args:
        op: The forward.
        tensors: Its input, weight, bias and gate.
        normalized_shape: The trailing dimensions.
        eps: Added to the variance; None as in ``rms_norm``.
        weight_offset: Added to the weight.
        rows_per_set: As `norm`.
    """
    input, weight, bias, gate = tensors
    assert input is not None
    assert gate is not None
    sums = supported.wide(input.dtype)
    factor, x = torch.nn.functional.silu(gate.to(sums)), input.to(sums)
    x = x * factor if op.gate is Gate.BEFORE else x
    options = (normalized_shape, eps, weight_offset, rows_per_set)
    y, mean, rstd = normalized(op, x, weight, bias, *options)
    return (y * factor if op.gate is Gate.AFTER else y), mean, rstd


def gradients(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    output_mask: Sequence[bool],
    eps: float | None,
    weight_offset: float,
    rows_per_set: int | None = None,
    grad_input_copy_dtype: torch.dtype | None = None,
    grad_input_sum_dtype: torch.dtype | None = None,
) -> Results:
    """What a backward of ours computes, but for rounding; the arguments are checked.

    Args:
        op: The op.
        tensors: In the order of its table.
        normalized_shape: The trailing dimensions.
        output_mask: Which gradients to compute.
        eps: Used if the statistics are recomputed; None as in ``rms_norm``.
        weight_offset: Added to the weight.
        rows_per_set: Neighbouring rows that take one set of weights; None where there are no sets.
        grad_input_copy_dtype: Of the copy of the input's gradient, where the op stores one.
        grad_input_sum_dtype: Of its sum over rows, where the op sums it.
    """
    given = supported.given(op, tensors)
    data, weight, residual = given[op.data.name], given.get("weight"), given.get("grad_residual")
    sums, dims = supported.wide(data.dtype), tuple(range(-len(normalized_shape), 0))
    dy = _gradient_of_output(given, data.dtype)
    wide_data, given_dy, is_first = data.to(sums), dy, op.gate is Gate.BEFORE
    if op.gate is not None:
        z = given["gate"].to(sums)
        factor, sigmoid = torch.nn.functional.silu(z), torch.sigmoid(z)
        slope = sigmoid + factor * torch.sigmoid(-z)
        wide_data, dy = (wide_data * factor, dy) if is_first else (wide_data, dy * factor)
    gamma = None if weight is None else weight.to(sums) + weight_offset
    bias = given.get("bias")
    if rows_per_set is not None:
        gamma, bias = (None if p is None else _taken(p, data, rows_per_set) for p in (gamma, bias))
    if op.from_output:
        xhat, rstd = _of_output(data.to(sums), gamma, bias), given["rstd"]
    else:
        xhat, rstd = _of_input(op, wide_data, given, dims, eps)
    h = dy if gamma is None else dy * gamma
    inner = h - xhat * (h * xhat).mean(dims, keepdim=True)
    if op.centres:
        inner = inner - h.mean(dims, keepdim=True)
    dx = _of_rows(rstd, data, dims) * inner
    if residual is not None:
        dx = dx + residual.to(sums)
    of_gate: dict[str, tuple[Tensor, torch.dtype]] = {}
    if op.gate is not None:
        n = xhat if gamma is None else xhat * gamma
        n = n if bias is None else n + bias.to(sums)
        dz = (data.to(sums) * dx if is_first else given_dy * n) * slope
        of_gate["grad_gate"] = (dz, given["gate"].dtype)
        dx = dx * factor if is_first else dx

    leading = tuple(range(data.ndim - len(dims)))

    def summed(cells: Tensor) -> Tensor:
        if rows_per_set is not None:
            assert weight is not None
            if (of_sets := _dims_of_sets(cells, weight, rows_per_set)) is not None:
                others = [dim for dim in leading if dim not in of_sets]
                return (cells.sum(others) if others else cells).reshape(weight.shape)
            cells = cells.reshape(-1, *normalized_shape)
            which = _sets(len(cells), weight, rows_per_set)
            return torch.zeros_like(weight, dtype=sums).index_add_(0, which, cells)
        return cells.sum(leading) if leading else cells  # of no dimensions PyTorch sums all

    of_weight = data.dtype if weight is None else weight.dtype
    computed = {
        **of_gate,
        "grad_input": (dx, data.dtype),
        "grad_weight": (summed(dy * xhat), of_weight),
        "grad_bias": (summed(dy), given["bias"].dtype if "bias" in given else of_weight),
    }
    there = {"has_weight": weight is not None, "has_bias": "bias" in given}
    asked = asked_of(op, output_mask, **there)
    gradients = names(op.gradients_with(has_bias="bias" in given))
    found = (name for name, wanted in zip(gradients, asked, strict=True) if wanted)
    results = {name: computed[name][0].to(computed[name][1]) for name in found}
    if grad_input_copy_dtype is not None:
        results[GRAD_INPUT_COPY.name] = results[GRAD_INPUT.name].to(grad_input_copy_dtype)
    if grad_input_sum_dtype is not None:
        results[GRAD_INPUT_SUM.name] = summed(dx).to(grad_input_sum_dtype)
    return results_of(op, results)


def _sets(rows: int, weight: Tensor, rows_per_set: int) -> Tensor:
    """Which set each row takes."""
    return torch.arange(rows, device=weight.device) // rows_per_set % weight.shape[0]


def _taken(parameter: Tensor, data: Tensor, rows_per_set: int) -> Tensor:
    """What each row of the data takes of a parameter's sets."""
    leading = data.shape[: data.ndim - parameter.ndim + 1]
    if (of_sets := _dims_of_sets(data, parameter, rows_per_set)) is not None:
        shape = (size if dim in of_sets else 1 for dim, size in enumerate(leading))
        return parameter.reshape(*shape, *parameter.shape[1:])
    which = _sets(math.prod(leading), parameter, rows_per_set)
    return parameter[which].reshape(*leading, *parameter.shape[1:])


def _dims_of_sets(data: Tensor, parameter: Tensor, rows_per_set: int) -> range | None:
    """The dimensions that number the sets, if some do: those of samples, or of heads.

    With them, nothing has to be gathered, which a compiler can fuse.
    """
    leading, number = data.shape[: data.ndim - parameter.ndim + 1], parameter.shape[0]
    for end in range(len(leading), 0, -1):
        if not _is_known(math.prod(leading[end:]) == rows_per_set):
            continue
        for begin in range(end - 1, -1, -1):
            if _is_known(math.prod(leading[begin:end]) == number):
                return range(begin, end)
    return None


def _is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on shapes is so, without a guard of a compiler's."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental import symbolic_shapes  # slow to import

    return bool(symbolic_shapes.statically_known_true(condition))


def _gradient_of_output(given: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of all gradients of the output in the type of sums, rounded as `NormSpec` says."""
    first, *more = (
        given[name] for name in names((GRAD_OUTPUT, *MORE_GRAD_OUTPUTS)) if name in given
    )
    sums = supported.wide(dtype)
    stored = dtype if first.dtype == dtype else sums
    total = first.to(sums)
    for gradient in more:
        total = (total + gradient.to(sums)).to(stored).to(sums)
    return total


def _of_input(
    op: Op, x: Tensor, given: Mapping[str, Tensor], dims: tuple[int, ...], eps: float | None
) -> tuple[Tensor, Tensor]:
    """``xhat`` and ``rstd``, from the statistics where they are given."""
    mean, rstd = given.get("mean"), given.get("rstd")
    if op.centres:
        centre = x.mean(dims, keepdim=True) if mean is None else _of_rows(mean, x, dims)
        x = x - centre
    if rstd is None:
        added = torch.finfo(x.dtype).eps if eps is None else eps
        rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + added)
    rstd = _of_rows(rstd, x, dims)
    return x * rstd, rstd


def _of_output(y: Tensor, gamma: Tensor | None, bias: Tensor | None) -> Tensor:
    """``xhat``, as ``layer_norm_backward`` says."""
    y = y if bias is None else y - bias.to(y.dtype)
    if gamma is None:
        return y
    least = torch.full_like(gamma, LEAST_WEIGHT).copysign(gamma)
    return y / torch.where(gamma.abs() < LEAST_WEIGHT, least, gamma)


def _of_rows(statistic: Tensor, data: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A statistic, with or without trailing dimensions of 1, for all elements of its row."""
    if statistic.ndim == data.ndim:
        return statistic
    leading = data.shape[: data.ndim - len(dims)]
    return statistic.reshape(*leading, *(1 for _ in dims))
