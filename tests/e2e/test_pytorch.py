"""PyTorch's OpInfo samples for native_layer_norm, and its own CPU kernel beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from support import (
    Arguments,
    assert_matches_reference,
    present,
    random_arguments,
    random_generator,
)

from iree_lnbwd import LayerNormGrads, NormSpec, reference
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES

# torch/testing/_internal/common_methods_invocations.py, sample_inputs_native_layer_norm:
# input shape, normalized shape, eps.
Sample = tuple[tuple[int, ...], tuple[int, ...], float]
SAMPLES: tuple[Sample, ...] = (
    ((1, 2, 3), (1, 2, 3), 0.5),
    ((2, 2, 3), (2, 3), -0.5),
    ((1,), (1,), 1e-5),
    ((1, 2), (2,), 1e-5),
    ((0, 1), (1,), 1e-5),
)
PARAMETERS = ("weight and bias", "weight", "bias", "neither")

sample = pytest.mark.parametrize(("shape", "normalized_shape", "eps"), SAMPLES)
parameters = pytest.mark.parametrize("parameters", PARAMETERS)


def in_turn(samples: Sequence[Sample]) -> pytest.MarkDecorator:
    """Each two of sample, parameters and element type meet; beside PyTorch, all of them do."""
    return pytest.mark.parametrize(
        ("shape", "normalized_shape", "eps", "parameters", "dtype"),
        [
            (*each, PARAMETERS[(i + j) % len(PARAMETERS)], dtype)
            for i, each in enumerate(samples)
            for j, dtype in enumerate(DTYPES)
        ],
    )


def sample_arguments(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    eps: float,
    parameters: str,
    dtype: str,
) -> Arguments:
    """With the statistics given."""
    spec = NormSpec(normalized_shape, dtype, has_weight="weight" in parameters)
    leading = shape[: len(shape) - len(normalized_shape)]
    arguments = random_arguments(random_generator(), spec, leading, eps=eps)
    return arguments if "bias" in parameters else replace(arguments, bias=None)


@pytest.mark.drawn
@in_turn(SAMPLES)
def test_opinfo_samples_with_statistics_given(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    eps: float,
    parameters: str,
    dtype: str,
) -> None:
    arguments = sample_arguments(shape, normalized_shape, eps, parameters, dtype)
    assert_matches_reference(arguments.backward(), arguments)


@pytest.mark.drawn
@in_turn([each for each in SAMPLES if each[2] > 0])
def test_opinfo_samples_with_statistics_recomputed(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    eps: float,
    parameters: str,
    dtype: str,
) -> None:
    arguments = sample_arguments(shape, normalized_shape, eps, parameters, dtype)
    arguments = replace(arguments, mean=None, rstd=None)
    assert_matches_reference(arguments.backward(), arguments)


@pytest.mark.drawn
@pytest.mark.parametrize("recompute", [False, True], ids=["given", "recomputed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_below_minus_the_variance_gives_nan(dtype: str, recompute: bool) -> None:
    """The sample with eps = -0.5, its first row with a variance under 0.5, its second above."""
    x = np.array([[0.0, 0.5, 0.0, 0.5, 0.0, 0.5], [-2.0, 2.0, -2.0, 2.0, -2.0, 2.0]])
    spec = NormSpec((2, 3), dtype)
    arguments = random_arguments(random_generator(), spec, (2,), x=x, eps=-0.5)
    assert np.isnan(present(arguments.rstd)).tolist() == [True, False]
    if recompute:
        arguments = replace(arguments, mean=None, rstd=None)
    gradients = arguments.backward()
    assert_matches_reference(gradients, arguments)
    grad_input = present(gradients.grad_input).astype(np.float64)
    assert np.isnan(grad_input[0]).all()
    assert np.isfinite(grad_input[1]).all()
    assert np.isnan(present(gradients.grad_weight).astype(np.float64)).all()
    assert np.isfinite(present(gradients.grad_bias).astype(np.float64)).all()


def backward_by_pytorch(arguments: Arguments) -> LayerNormGrads:
    """aten::native_layer_norm_backward on the CPU."""
    torch = pytest.importorskip("torch")

    def tensor(array: Array | None) -> object:
        return None if array is None else torch.from_numpy(array)

    leading_rank = arguments.input.ndim - len(arguments.normalized_shape)
    with_ones = (*arguments.input.shape[:leading_rank], *(1,) * len(arguments.normalized_shape))
    # PyTorch's Python binding cannot return the gradient of a parameter that is not there.
    given = (True, arguments.weight is not None, arguments.bias is not None)
    gradients = torch.ops.aten.native_layer_norm_backward(
        tensor(arguments.grad_output),
        tensor(arguments.input),
        list(arguments.normalized_shape),
        tensor(present(arguments.mean).reshape(with_ones)),
        tensor(present(arguments.rstd).reshape(with_ones)),
        tensor(arguments.weight),
        tensor(arguments.bias),
        [asked and there for asked, there in zip(arguments.output_mask, given, strict=True)],
    )
    return LayerNormGrads(*(None if g is None else g.numpy() for g in gradients))


def assert_agrees_with_pytorch(arguments: Arguments) -> None:
    """Where PyTorch gives a gradient, ours is it: the right one, and theirs but for their error.

    That is what PyTorch allows its own kernels, and the rounding of the expanded forms that they
    compute by: x * rstd - mean * rstd in grad_weight, and a * dy + b * x + c in grad_input.
    """
    ours = arguments.backward()
    judgement = assert_matches_reference(ours, arguments)
    theirs = backward_by_pytorch(arguments)

    dtype = DTYPES[arguments.input.dtype.name.replace("float", "f")]
    relative, absolute = {"f32": (1.3e-6, 1e-5), "f64": (1e-7, 1e-7)}[dtype.name]
    arrays = {name: array.astype(np.float64) for name, array in arguments.call().arrays.items()}
    x, dy = arrays["input"], arrays["grad_output"]
    mean, rstd = arrays["mean"][:, None], arrays["rstd"][:, None]
    size = np.abs(x) + np.abs(mean)
    of_weight = (np.abs(dy) * size * rstd).sum(axis=0)
    weighted, cubed = dy * arrays.get("weight", 1.0), rstd**3 / x.shape[1]
    b = np.abs((weighted * (x - mean)).sum(axis=1, keepdims=True)) * cubed
    of_b = (np.abs(weighted) * size).sum(axis=1, keepdims=True) * cubed
    of_input = b * size + of_b * np.abs(x - mean)

    further = {
        "grad_weight": 4 * dtype.unit_roundoff * of_weight.reshape(arguments.normalized_shape),
        "grad_input": 4 * dtype.unit_roundoff * of_input.reshape(arguments.input.shape),
    }
    for name, other in theirs._asdict().items():
        if other is not None:
            got = present(getattr(ours, name))
            assert (got.shape, got.dtype) == (other.shape, other.dtype)
            allowed = judgement.tolerance[name] + absolute + relative * np.abs(other)
            allowed += further.get(name, 0.0)
            comparison = reference.compare(got, other.astype(np.float64), allowed)
            assert comparison.passed, comparison


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@parameters
@sample
def test_opinfo_samples_agree_with_pytorch(
    shape: tuple[int, ...],
    normalized_shape: tuple[int, ...],
    eps: float,
    parameters: str,
    dtype: str,
) -> None:
    assert_agrees_with_pytorch(sample_arguments(shape, normalized_shape, eps, parameters, dtype))


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)])
def test_a_training_step_agrees_with_pytorch(mask: tuple[bool, bool, bool], dtype: str) -> None:
    spec = NormSpec((768,), dtype, output_mask=mask)
    assert_agrees_with_pytorch(random_arguments(random_generator(), spec, (8, 33)))
