"""Graphs of cuDNN's adaptive layer norms: a scale and a bias for each sample."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from graph_support import EPS, INFERENCE, TRAINING, empty_for, put
from support import normal, random_generator

from iree_lnbwd.graph import (
    AdaLayernormAttributes,
    AdaLayernormBackwardAttributes,
    DataType,
    Graph,
    Tensor,
)
from iree_lnbwd.ops.arguments import Array

ALL = ("Y", "MEAN", "INV_VARIANCE", "DX", "DSCALE", "DBIAS")
FORWARD = AdaLayernormAttributes(epsilon=EPS, forward_phase=TRAINING)


def formula(x: Array, scale: Array, bias: Array, dy: Array, count: int) -> dict[str, Array]:
    """In f64, of samples in the first dimension."""
    x, scale, bias, dy = (each.astype(float) for each in (x, scale, bias, dy))
    axes = tuple(range(x.ndim - count, x.ndim))
    rows = tuple(range(1, x.ndim - count))
    mean = x.mean(axes, keepdims=True)
    norm = 1 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + EPS)
    xhat, h = (x - mean) * norm, dy * scale
    inner = h - h.mean(axes, keepdims=True) - xhat * (h * xhat).mean(axes, keepdims=True)
    return {
        **{"Y": xhat * scale + bias, "MEAN": mean, "INV_VARIANCE": norm, "DX": norm * inner},
        "DSCALE": (dy * xhat).sum(rows, keepdims=True),
        "DBIAS": dy.sum(rows, keepdims=True),
    }


def given(
    shape: tuple[int, ...], count: int, order: tuple[int, ...] | None = None, dtype: str = "f32"
) -> dict[str, Array]:
    """X and DY, with their dimensions in an order in memory, SCALE and BIAS."""
    rng = random_generator()
    order = tuple(range(len(shape))) if order is None else order
    own = (shape[0], *(1 for _ in shape[1 : len(shape) - count]), *shape[len(shape) - count :])
    cells = (normal(rng, dtype, shape) for _ in range(2))
    x, dy = (np.ascontiguousarray(a.transpose(order)).transpose(np.argsort(order)) for a in cells)
    scale, bias = (normal(rng, "f32", own) for _ in range(2))
    return {"X": x, "SCALE": scale, "BIAS": bias, "DY": dy}


def run(arrays: dict[str, Array], wanted: tuple[str, ...], *, recompute: bool = False) -> Any:
    """The outputs of a forward and its backward, of which the backward reads the statistics."""
    graph = Graph()
    t = {name: put(graph, name, array) for name, array in arrays.items()}
    y, mean, norm = graph.adalayernorm(t["X"], t["SCALE"], t["BIAS"], FORWARD)
    assert mean is not None
    assert norm is not None
    also = AdaLayernormBackwardAttributes(*((None, None, EPS) if recompute else (mean, norm)))
    made = graph.adalayernorm_backward(t["DY"], t["X"], t["SCALE"], also)
    every = dict(zip(ALL, (y, mean, norm, *made), strict=True))
    outputs: dict[str, Tensor] = {name: every[name].set_output(True) for name in wanted}
    graph.validate()
    graph = Graph.from_json(graph.to_json())
    graph.build()
    results = {name: empty_for(tensor) for name, tensor in outputs.items()}
    pack: dict[Any, Array] = {}
    for name, array in (*arrays.items(), *results.items()):
        uid = (t | outputs)[name].get_uid()
        assert uid is not None
        pack[uid] = array
    graph.execute(pack)
    return results


@pytest.mark.drawn
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_any_order_in_memory(order: tuple[int, ...], count: int) -> None:
    """Samples may come first or last among the dimensions of rows, or between others."""
    arrays = given((3, 2, 5, 4), count, order)
    expected = formula(**{name.lower(): array for name, array in arrays.items()}, count=count)
    for name, array in run(arrays, ALL).items():
        np.testing.assert_allclose(array, expected[name], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("wanted", [("DX",), ("DSCALE", "Y"), ("DBIAS",)], ids=str)
def test_cudnns_case_and_what_is_asked_for(wanted: tuple[str, ...]) -> None:
    """AdaLayerNorm Backward, of HALF beside FLOAT; [B, S, D] of fewer tokens."""
    arrays = given((4, 16, 128), 1, dtype="f16")
    expected = formula(**{name.lower(): array for name, array in arrays.items()}, count=1)
    for name, array in run(arrays, wanted, recompute=True).items():
        assert array.dtype == (np.float16 if name in ("Y", "DX") else np.float32)
        np.testing.assert_allclose(array, expected[name], rtol=2e-3, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("shape", [(3, 8), (1, 5, 8), (4, 1, 8), (2, 3, 1)], ids=str)
def test_few_rows_samples_and_columns(shape: tuple[int, ...]) -> None:
    arrays = given(shape, 1)
    expected = formula(**{name.lower(): array for name, array in arrays.items()}, count=1)
    for name, array in run(arrays, ALL).items():
        np.testing.assert_allclose(array, expected[name], atol=2e-5, err_msg=name)


def test_dimensions_and_statistics_are_inferred() -> None:
    graph = Graph(io_data_type=DataType.BFLOAT16)
    x, scale, bias = (graph.tensor(dim) for dim in ((4, 6, 8), (4, 1, 8), (4, 1, 8)))
    y, mean, _ = graph.adalayernorm(x, scale, bias, FORWARD)
    y.set_output(True)
    graph.validate()
    assert mean is not None
    assert mean.get_dim() == (4, 6, 1)
    (spec,) = graph.specs
    assert (spec.weight_sets, spec.normalized_shape, spec.gate) == (True, (8,), None)
    inference = AdaLayernormAttributes(epsilon=EPS, forward_phase=INFERENCE)
    assert graph.adalayernorm(x, scale, bias, inference)[1:] == (None, None)


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        ((1, 1, 8), "ada.SCALE: expected 3 dimensions, as X, of which the first is 4, got"),
        ((4, 8), "ada.SCALE: expected 3 dimensions, as X, of which the first is 4, got"),
        ((4, 2, 8), "ada.SCALE: expected the last few dimensions of X, (4, 6, 8), alone or after"),
    ],
)
def test_a_bad_scale_is_named(scale: tuple[int, ...], error: str) -> None:
    graph = Graph(io_data_type=DataType.FLOAT)
    x, own, bias = (graph.tensor(dim) for dim in ((4, 6, 8), scale, scale))
    attributes = AdaLayernormAttributes(epsilon=EPS, forward_phase=TRAINING, name="ada")
    graph.adalayernorm(x, own, bias, attributes)[0].set_output(True)
    with pytest.raises(ValueError, match="ada") as raised:
        graph.validate()
    assert error in str(raised.value)
