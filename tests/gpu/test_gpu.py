"""The op on the GPU at hand: compiled for it, run on it, held against the f64 reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import assert_matches_reference, assert_same_bits, random_arguments, random_generator

from iree_lnbwd import NormSpec, compile, load
from iree_lnbwd.hardware.devices import DeviceUri, target_of
from iree_lnbwd.hardware.targets import older_targets

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("columns", [1, 64, 769, 1000, 1024, 4096, 8192, 65536])
def test_every_width_and_type(gpu: DeviceUri, columns: int, dtype: str) -> None:
    rng = random_generator()
    for rows in (0, 1, 37, 265):
        arguments = random_arguments(rng, NormSpec((columns,), dtype), (rows,))
        assert_matches_reference(arguments.backward(str(gpu)), arguments)


@pytest.mark.parametrize(
    "spec",
    [
        NormSpec((1024,), "f64"),
        NormSpec((1024,), "bf16", output_mask=(True, False, False)),
        NormSpec((1024,), "bf16", output_mask=(False, True, True)),
        NormSpec((1024,), "f32", has_weight=False),
        NormSpec((1024,), "f32", eps=1e-5),
        NormSpec((1024,), "f32", grad_output_dtype="f16", weight_dtype="f16"),
        NormSpec((4, 256), "bf16", weight_dtype="f32"),
    ],
    ids=lambda spec: spec.name,
)
def test_every_option(gpu: DeviceUri, spec: NormSpec) -> None:
    arguments = random_arguments(random_generator(), spec, (37,))
    assert_matches_reference(arguments.backward(str(gpu)), arguments)


def test_the_same_bits_a_hundred_times(gpu: DeviceUri) -> None:
    arguments = random_arguments(random_generator(), NormSpec((4096,), "bf16"), (1023,))
    first = arguments.backward(str(gpu))
    for _ in range(99):
        assert_same_bits(arguments.backward(str(gpu)), first)


def test_modules_for_older_gpus_run_with_a_warning(gpu: DeviceUri, tmp_path: Path) -> None:
    older = older_targets(target_of(gpu))
    if not older:
        pytest.skip(f"{gpu} runs no older target's modules")
    for target in older:
        made = compile(NormSpec((1024,), "bf16"), target.name, tmp_path)
        with pytest.warns(RuntimeWarning, match=f"got one for {target.name}: it runs"):
            op = load(made.path, str(gpu))
        arguments = random_arguments(random_generator(), op.spec, (37,))
        assert_matches_reference(arguments.backward_by(op), arguments)
