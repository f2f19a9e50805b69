"""The norms by PyTorch's own operators, which can be differentiated again, and batched."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from iree_lnbwd.arguments import NormOutput
from iree_lnbwd.operands import Op
from iree_lnbwd.torch import kinds
from iree_lnbwd.torch.kinds import TensorKind, kind


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
    kinds.check("input", input=of_input, weight=of_weight, bias=of_bias)
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
) -> NormOutput:
    """What a forward of ours computes, but for rounding.

    Args:
        op: The forward.
        tensors: In the order of its table.
        normalized_shape: The trailing dimensions.
        eps: Added to the variance; None as in ``rms_norm``.
        weight_offset: Added to the weight.
    """
    given = kinds.given(op, tensors)
    total, residual = given["input"], given.get("residual")
    if residual is not None:
        sums = kinds.wide(total.dtype)
        total = (total.to(sums) + residual.to(sums)).to(residual.dtype)
    parameters = (given.get("weight"), given.get("bias"))
    output, mean, rstd = normalized(op, total, *parameters, normalized_shape, eps, weight_offset)
    return NormOutput(
        output.to(given["input"].dtype), mean, rstd, None if residual is None else total
    )


def normalized(
    op: Op,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float | None,
    weight_offset: float,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Output, mean and rstd in the type of sums; the mean is None of an op that has none."""
    sums = kinds.wide(input.dtype)
    x = input.to(sums)
    gamma = None if weight is None else weight.to(sums) + weight_offset
    if op.centres:
        beta = None if bias is None else bias.to(sums)
        return torch.native_layer_norm(x, normalized_shape, gamma, beta, eps)  # type: ignore[no-any-return]
    dims = tuple(range(-len(normalized_shape), 0))
    added = torch.finfo(sums).eps if eps is None else eps
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + added)
    return x * rstd if gamma is None else x * rstd * gamma, None, rstd
