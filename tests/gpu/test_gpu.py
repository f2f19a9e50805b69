"""The op on the GPU at hand: compiled for it, run on it, held against the f64 reference."""

from __future__ import annotations

import pytest
from support import assert_matches_reference, assert_same_bits, random_arguments, random_generator

from iree_lnbwd import LayerNormSpec
from iree_lnbwd.devices import DeviceUri

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("columns", [1, 64, 769, 1000, 1024, 4096, 8192, 65536])
def test_every_width_and_type(gpu: DeviceUri, columns: int, dtype: str) -> None:
    rng = random_generator()
    for rows in (0, 1, 37, 265):
        arguments = random_arguments(rng, LayerNormSpec((columns,), dtype), (rows,))
        assert_matches_reference(arguments.backward(str(gpu)), arguments)


@pytest.mark.parametrize(
    "spec",
    [
        LayerNormSpec((1024,), "f64"),
        LayerNormSpec((1024,), "bf16", output_mask=(True, False, False)),
        LayerNormSpec((1024,), "bf16", output_mask=(False, True, True)),
        LayerNormSpec((1024,), "f32", has_weight=False),
        LayerNormSpec((1024,), "f32", recompute_eps=1e-5),
        LayerNormSpec((1024,), "f32", grad_output_dtype="f16", weight_dtype="f16"),
        LayerNormSpec((4, 256), "bf16", weight_dtype="f32"),
    ],
    ids=lambda spec: spec.name,
)
def test_every_option(gpu: DeviceUri, spec: LayerNormSpec) -> None:
    arguments = random_arguments(random_generator(), spec, (37,))
    assert_matches_reference(arguments.backward(str(gpu)), arguments)


def test_the_same_bits_a_hundred_times(gpu: DeviceUri) -> None:
    arguments = random_arguments(random_generator(), LayerNormSpec((4096,), "bf16"), (1023,))
    first = arguments.backward(str(gpu))
    for _ in range(99):
        assert_same_bits(arguments.backward(str(gpu)), first)
