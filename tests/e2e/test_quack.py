"""QuACK's tests of RMS norm and layer norm (Dao-AILab/quack), on these ops.

Restated from tests/test_rmsnorm.py and tests/test_layernorm.py. Widths and element types are
QuACK's, and so are 1 and 199 rows up to 4096 columns; wider rows are 3 here, so that the tests do
not take minutes. QuACK runs the products of its parameters; here each element type and each option
comes up, on widths of each kind, in fewer modules.

QuACK's tolerances are absolute, 1e-4 of f32 and 0.1 of bf16; here each element has its own, derived
from its roundings.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import checked, normal, random_generator, trained

import iree_lnbwd as lnbwd
from iree_lnbwd.ops.dtypes import DTYPES

EPS = 1e-6
ROWS, LONG, ROWS_OF_LONG = 199, 4096, 3


def row_counts(columns: int) -> tuple[int, int]:
    return 1, (ROWS if columns <= LONG else ROWS_OF_LONG)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("columns", "dtype", "weight_dtype"),
    [
        (192, "bf16", "bf16"),
        (760, "f16", "f32"),
        (1128, "f32", None),
        (262144, "f16", None),
    ],
)
def test_rmsnorm_forward_backward(columns: int, dtype: str, weight_dtype: str | None) -> None:
    rng = random_generator()
    weight = None if weight_dtype is None else normal(rng, weight_dtype, (columns,))
    for rows in row_counts(columns):
        x, dy = (normal(rng, dtype, (rows, columns)) for _ in range(2))
        given = {"input": x, "weight": weight}
        trained("rms_norm", columns, given, {"grad_output": dy}, eps=EPS)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("columns", "dtype", "bias_dtype", "past"),
    [(192, "bf16", "f32", False), (1128, "f32", "f32", True), (32768, "f16", "f16", False)],
)
def test_rmsnorm_with_bias(columns: int, dtype: str, bias_dtype: str, past: bool) -> None:
    """With a weight and without one, and of a sum with a residual."""
    rng = random_generator()
    x, residual, dy = (normal(rng, dtype, (row_counts(columns)[1], columns)) for _ in range(3))
    bias = normal(rng, bias_dtype, (columns,))
    for weight in (normal(rng, "f32", (columns,)), None):
        given = {"input": x, "weight": weight, "bias": bias}
        given |= {"residual": residual} if past else {}
        _, grads = trained("rms_norm", columns, given, {"grad_output": dy}, eps=EPS)
        assert grads.grad_bias.dtype == bias.dtype


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("columns", "dtype", "weight_dtype"), [(1024, "bf16", "f32"), (32768, "f32", "bf16")]
)
def test_rmsnorm_weight_offset(columns: int, dtype: str, weight_dtype: str) -> None:
    """Weights around zero, and zeros: without the offset, zeros are what would come out."""
    rng = random_generator()
    x, dy = (normal(rng, dtype, (row_counts(columns)[1], columns)) for _ in range(2))
    weight = normal(rng, weight_dtype, (columns,), scale=0.1)
    for around_zero in (weight, np.zeros_like(weight)):
        given = {"input": x, "weight": around_zero}
        trained("rms_norm", columns, given, {"grad_output": dy}, eps=EPS, weight_offset=1.0)


def test_rmsnorm_noncontiguous_grad() -> None:
    """The gradient of a sum: one number in memory, seen as all elements."""
    rng = random_generator()
    x = normal(rng, "bf16", (2, 64, 512))
    dy = np.broadcast_to(np.ones((), x.dtype), x.shape)
    given = {"input": x, "weight": np.ones(512, np.float32)}
    trained("rms_norm", 512, given, {"grad_output": dy}, eps=EPS)


@pytest.mark.parametrize("shape", [(2, 16, 4, 64), (1, 1, 32, 64)])
def test_rmsnorm_qk(shape: tuple[int, ...]) -> None:
    """Each head has its weight, and its rows are not next to each other."""
    rng = random_generator()
    x, residual, dy = (normal(rng, "f16", shape) for _ in range(3))
    weight = normal(rng, "f32", shape[2:])
    given = {"input": x, "residual": residual, "weight": weight}
    _, grads = trained("rms_norm", shape[3], given, {"grad_output": dy}, eps=EPS)
    assert grads.grad_weight.shape == weight.shape


def test_rmsnorm_strided_tensor() -> None:
    """The first 512 of 576 columns."""
    rng = random_generator()
    x = normal(rng, "bf16", (8, 32, 576))[:, :, :512]
    dy = normal(rng, "bf16", (8, 32, 512))
    given = {"input": x, "weight": normal(rng, "f32", (512,))}
    trained("rms_norm", 512, given, {"grad_output": dy}, eps=EPS)


@pytest.mark.parametrize("past", [False, True], ids=["only_output", "both"])
def test_rmsnorm_with_residual(past: bool) -> None:
    """In f16 with a weight of f32; a gradient reaches the output alone, or the sum as well."""
    rng = random_generator()
    x, residual, dy = (normal(rng, "f16", (32, 1024)) for _ in range(3))
    given = {"input": x, "residual": residual, "weight": normal(rng, "f32", (1024,))}
    reached = {"grad_output": dy, "grad_residual": dy if past else None}
    trained("rms_norm", 1024, given, reached, eps=EPS)


def test_rmsnorm_residual_dtype() -> None:
    """A residual stream of f32 takes x of bf16 without any rounding but that of f32."""
    rng = random_generator()
    x = normal(rng, "bf16", (32, 1024))
    residual = normal(rng, "bf16", (32, 1024)).astype(np.float32)
    given = {"input": x, "residual": residual, "weight": normal(rng, "f32", (1024,))}
    out = checked("rms_norm", 1024, given, eps=EPS)
    assert out.output.dtype == x.dtype
    assert out.residual_output.dtype == np.float32
    np.testing.assert_array_equal(out.residual_output, x.astype(np.float32) + residual)


def test_amp_bf16_training() -> None:
    """A gradient of bf16 for data of f32, and any numbers as rstd."""
    rng = random_generator()
    arrays = {
        "grad_output": normal(rng, "bf16", (ROWS, 1024)),
        "input": normal(rng, "f32", (ROWS, 1024)),
        "rstd": normal(rng, "f32", (ROWS,)),
        "weight": normal(rng, "f32", (1024,)),
    }
    checked("rms_norm_backward", 1024, arrays)


def test_rmsnorm_empty() -> None:
    """No rows: a gradient of zeros for the weight."""
    none = np.zeros((0, 192), DTYPES["bf16"].numpy)
    given = {"input": none, "weight": np.ones(192, none.dtype)}
    out, grads = trained("rms_norm", 192, given, {"grad_output": none}, eps=EPS)
    assert out.output.shape == none.shape
    assert out.rstd.shape == (0, 1)
    assert grads.grad_weight.shape == (192,)
    assert not grads.grad_weight.any()


@pytest.mark.parametrize(
    ("weight", "error", "said"),
    [
        (np.ones(512, np.float32), ValueError, r"weight: expected shape \(1024,\), got \(512,\)"),
        (
            np.ones(1024),
            ValueError,
            "weight: expected bf16 or f16 or f32 beside an input or output of f16",
        ),
    ],
)
def test_rmsnorm_input_validation(
    weight: lnbwd.ops.arguments.Array, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=rf"^(?:{said})"):
        lnbwd.rms_norm(np.ones((32, 1024), np.float16), 1024, weight)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("columns", "dtype", "has_bias"),
    [
        (760, "bf16", False),
        (1128, "f16", True),
        (131072, "f32", True),
    ],
)
def test_layernorm_forward_backward(columns: int, dtype: str, has_bias: bool) -> None:
    """A weight of f32; a bias is the backward's alone, as an element type of its gradient."""
    rng = random_generator()
    weight = normal(rng, "f32", (columns,))
    for rows in row_counts(columns):
        x, dy = (normal(rng, dtype, (rows, columns)) for _ in range(2))
        out = checked("layer_norm", columns, {"input": x, "weight": weight}, eps=EPS)
        statistics = {"mean": out.mean, "rstd": out.rstd}
        arrays = {"grad_output": dy, "input": x, "weight": weight, **statistics}
        grads = checked("layer_norm_backward", columns, arrays, output_mask=(True, True, has_bias))
        assert (grads.grad_bias is not None) == has_bias


def test_layernorm_forward_masks_out_of_bounds_lanes() -> None:
    """A width of no whole vector, far from zero: numbers that are not there would show."""
    columns = np.arange(769, dtype=np.float32)
    rows = np.arange(3, dtype=np.float32)[:, None]
    x = 1000 + rows * 100 + (columns % 17 - 8) / 8
    checked("layer_norm", 769, {"input": x, "weight": np.ones_like(columns)}, eps=1e-5)
