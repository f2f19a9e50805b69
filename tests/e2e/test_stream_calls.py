"""Calls on arrays in a GPU's memory, from the arguments to the kernels: the emulator is the GPU.

All but the driver and the arrays is what runs on a GPU. C++ is not tried here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from emulated_arrays import EmulatedArray, Namespace, ReadOnlyArray
from emulated_driver import EmulatedDriver
from support import (
    ARGUMENTS,
    Arguments,
    assert_matches_reference,
    assert_right,
    assert_same_bits,
    built,
    random_arguments,
    random_generator,
)

from iree_lnbwd import LayerNormGrads, NormSpec, runtime
from iree_lnbwd.calls import modules
from iree_lnbwd.emulator import Fault
from iree_lnbwd.functional import rms_norm_backward
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array, BoundCall, Results, bind, results_type
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import LAYER_NORM, OPS
from iree_lnbwd.runtime import gpu_module
from iree_lnbwd.runtime.frameworks import dlpack_arrays
from iree_lnbwd.schedules import OnePass, Schedule, TwoPass
from iree_lnbwd.verification.matrix import random_call

Grads = TypeVar("Grads", bound=Results)

SPEC = NormSpec((96,))
ONE_PASS = OnePass(4, 1, 2, 1)


def family() -> Iterator[NormSpec]:
    """Each norm with every option and without any."""
    bare: dict[str, Any] = {"has_weight": False}
    for op in OPS.values():
        kinds: list[dict[str, Any]] = [
            {},
            bare,
            {"residual_dtype": "f32", "weight_offset": 1.0},
            {"residual_dtype": "f32", **bare},
        ]
        if op is LAYER_NORM:
            kinds += [{"has_bias": False}, {"has_bias": False, **bare}]
        if op.is_backward:
            kinds += [{"from_output": True}, {"from_output": True, **bare}]
        for kind in kinds:
            yield NormSpec((96,), op=op.name, eps=None if op.is_backward else 1e-5, **kind)


class Gpu:
    """A module on an emulated GPU, and arrays there."""

    def __init__(self, spec: NormSpec, how: Schedule | None, patch: pytest.MonkeyPatch) -> None:
        self.driver = EmulatedDriver("cuda")
        self.arrays = Namespace(self.driver)
        patch.setattr(gpu_module, "Driver", lambda uri: self.driver)
        vmfb, _ = built(spec, find_target("sm_90"), how)
        self.op = runtime.load_built(vmfb, "cuda")

    def given(self, arguments: Arguments, **changes: Any) -> dict[str, Any]:
        """The arguments in its memory."""
        made = {}
        for name in ARGUMENTS:
            array = getattr(arguments, name)
            put = changes.get(name, self.arrays.asarray)
            made[name] = None if array is None else put(array)
        return made


def on_host(results: Grads) -> Grads:
    return type(results)(*(None if r is None else r.numpy() for r in results))


SPECS: dict[str, tuple[NormSpec, Schedule | None]] = {
    "few rows": (NormSpec((4, 16), "bf16"), None),
    "one pass": (SPEC, ONE_PASS),
    "two passes": (SPEC, TwoPass(2, 4, 4, 1, rows=2)),
    "sums posted in memory": (SPEC, OnePass(2, 1, 2, 1, cluster=2, posts=True)),
    "sums posted in memory, columns alone": (
        NormSpec((96,), output_mask=(False, True, True)),
        OnePass(2, 1, 2, 1, cluster=2, posts=True),
    ),
    "f64": (NormSpec((33,), "f64"), None),
    "statistics": (NormSpec((96,), "f16", eps=1e-5), ONE_PASS),
    "no weight": (NormSpec((96,), has_weight=False), ONE_PASS),
    "columns alone": (NormSpec((96,), output_mask=(False, True, True)), ONE_PASS),
    "rows alone": (NormSpec((96,), output_mask=(True, False, False)), ONE_PASS),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", SPECS)
def test_calls_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows and fewer, of kinds of calls that are known and that are not; with none, too."""
    gpu, rng = Gpu(*SPECS[name], monkeypatch), random_generator()
    for rows in (5, 23, 0, 5, 1):
        arguments = random_arguments(rng, gpu.op.spec, (rows,))
        gradients = gpu.op(**gpu.given(arguments))
        assert_matches_reference(on_host(gradients), arguments)


@pytest.mark.drawn
@pytest.mark.parametrize("spec", tuple(family()), ids=lambda spec: spec.name)
def test_calls_of_every_norm_are_right(spec: NormSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no argument changes."""
    gpu, rng = Gpu(spec, None, monkeypatch), random_generator()
    for rows in (5, 5, 1):  # the second time, such a call is known
        call = random_call(spec, rows, rng)
        arrays = {name: gpu.arrays.asarray(array) for name, array in call.arrays.items()}
        results = gpu.op(**arrays)
        assert_right(on_host(results), call)
        for name, array in call.arrays.items():
            assert arrays[name].numpy().tobytes() == array.tobytes(), name


def test_kernels_are_put_on_the_stream_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are several, and nobody captures them into a graph of their own."""
    gpu = Gpu(SPEC, ONE_PASS, monkeypatch)
    for rows, captured, graphs in ((23, False, 1), (5, False, 2), (23, True, 2), (23, False, 3)):
        monkeypatch.setattr(dlpack_arrays.ON_GPU, "is_captured", lambda captured=captured: captured)
        arguments = random_arguments(random_generator(), SPEC, (rows,))
        assert_matches_reference(on_host(gpu.op(**gpu.given(arguments))), arguments)
        assert gpu.driver.graphs == graphs


def test_arrays_at_any_address_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(SPEC, ONE_PASS, monkeypatch)
    arguments = random_arguments(random_generator(), SPEC, (7,))
    expected = on_host(gpu.op(**gpu.given(arguments)))
    assert_matches_reference(expected, arguments)
    for name in ARGUMENTS[:-1]:
        for put in (lambda array: gpu.arrays.asarray(array, shift=4), gpu.arrays.spread):
            for _ in range(2):  # the second time, such a call is known
                given = gpu.given(arguments, **{name: put})
                before = given[name].numpy()
                assert_same_bits(on_host(gpu.op(**given)), expected)
                assert given[name].numpy().tobytes() == before.tobytes()


def test_storage_of_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, rng = Gpu(SPEC, ONE_PASS, monkeypatch), random_generator()
    shapes = ((7, 96), (96,), (96,))
    out = LayerNormGrads(*(gpu.arrays.asarray(np.full(shape, -77, np.float32)) for shape in shapes))
    for _ in range(2):
        arguments = random_arguments(rng, SPEC, (7,))
        returned = gpu.op(**gpu.given(arguments), out=out)
        assert all(got is own for got, own in zip(returned, out, strict=True))
        assert_matches_reference(on_host(out), arguments)
    given = gpu.given(arguments)
    before = on_host(out)
    shifted = gpu.arrays.asarray(np.zeros(96, np.float32), shift=4)
    apart = gpu.arrays.spread(np.zeros((7, 96), np.float32))
    for wrong, said in (
        ({"grad_input": given["input"]}, "out.grad_input: expected memory of its own"),
        ({"grad_weight": given["weight"]}, "out.grad_weight: expected memory of its own"),
        ({"grad_bias": out.grad_weight}, "out.grad_bias: expected memory of its own"),
        ({"grad_weight": shifted}, "out.grad_weight: expected memory that begins at a multiple"),
        ({"grad_input": apart}, "out.grad_input: expected a contiguous array"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{said}"):
                gpu.op(**given, out=out._replace(**wrong))
    assert_same_bits(on_host(out), before)


@pytest.mark.parametrize(
    "kind",
    [type("ArrayImpl", (EmulatedArray,), {"__module__": "jaxlib._jax"}), ReadOnlyArray],
    ids=["by its library", "by itself"],
)
def test_storage_that_is_not_to_be_written(
    kind: type[EmulatedArray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused also where such a call with another library's storage is known."""
    gpu = Gpu(SPEC, ONE_PASS, monkeypatch)
    given = gpu.given(random_arguments(random_generator(), SPEC, (7,)))
    shapes = ((7, 96), (96,), (96,))
    out = LayerNormGrads(*(gpu.arrays.asarray(np.full(shape, -77, np.float32)) for shape in shapes))
    gpu.op(**given, out=out)
    before = on_host(out)
    out.grad_weight.__class__ = kind
    with pytest.raises(
        ValueError, match=r"^out\.grad_weight: expected an array that can be written"
    ):
        gpu.op(**gpu.given(random_arguments(random_generator(), SPEC, (7,))), out=out)
    assert_same_bits(on_host(out), before)


def test_a_bias_on_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its gradient would be stored there."""
    gpu = Gpu(*SPECS["no weight"], monkeypatch)
    given = gpu.given(random_arguments(random_generator(), gpu.op.spec, (7,)))
    elsewhere = type("Elsewhere", (EmulatedArray,), {"__dlpack_device__": lambda self: (2, 1)})
    given["bias"].__class__ = elsewhere
    with pytest.raises(ValueError, match=r"^input: .* on one device, got .*bias on cuda://1$"):
        gpu.op(**given)


STRIDED = NormSpec((96,), strided_rows=True)


@pytest.mark.drawn
@pytest.mark.parametrize("schedule", [None, ONE_PASS], ids=["few rows", "one pass"])
def test_rows_are_used_where_they_lie(
    schedule: Schedule | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all arrays, or of some, beside dense ones; what lies beside a result stays."""
    gpu, rng = Gpu(STRIDED, schedule, monkeypatch), random_generator()
    for apart in (("grad_output", "input", "out"), ("input",), ("out",), ()):
        for _ in range(2):  # the second time, such a call is known
            arguments = random_arguments(rng, SPEC, (2, 7))
            places = dict.fromkeys(apart, gpu.arrays.beside_others)
            given = gpu.given(arguments, **places)
            put = places.get("out", gpu.arrays.asarray)
            out = LayerNormGrads(
                put(np.zeros((2, 7, 96), np.float32)),
                *(gpu.arrays.asarray(np.zeros(96, np.float32)) for _ in range(2)),
            )
            begun = len(gpu.driver.launches)
            gpu.op(**given, out=out)
            assert_matches_reference(on_host(out), arguments)
            first = gpu.driver.launches[begun].bindings
            assert [b.address for b in first[:2]] == [
                given[name].buffer.address for name in ("grad_output", "input")
            ]
            if "out" in apart:
                assert first[5].address == out.grad_input.buffer.address
                beside = out.grad_input.room.numpy()[:, :, 1:]
                assert (beside == -77).all()


def test_rows_that_no_access_begins_at_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """At another address, or with other strides; also where others like them are known."""
    gpu = Gpu(STRIDED, ONE_PASS, monkeypatch)
    arguments = random_arguments(random_generator(), SPEC, (2, 7))

    def wide(array: Array, more: int) -> EmulatedArray:
        room = gpu.arrays.asarray(np.full((2, 7, 96 + more), -77, array.dtype))
        view = room._view((2, 7, 96), (7 * (96 + more), 96 + more, 1))
        view[...] = array
        return view

    def turned(array: Array) -> EmulatedArray:
        return gpu.arrays.asarray(array.transpose(1, 0, 2)).transpose(1, 0, 2)

    expected = on_host(gpu.op(**gpu.given(arguments)))
    places: list[tuple[Any, bool]] = [
        (gpu.arrays.beside_others, True),
        (lambda array: gpu.arrays.beside_others(array, shift=4), False),
        (lambda array: gpu.arrays.beside_others(array, shift=16), True),
        (lambda array: wide(array, 4), True),
        (lambda array: wide(array, 2), False),
        (turned, True),
        (gpu.arrays.spread, False),
    ]
    for _ in range(2):
        for put, in_place in places:
            given = gpu.given(arguments, input=put)
            begun = len(gpu.driver.launches)
            assert_same_bits(on_host(gpu.op(**given)), expected)
            address = gpu.driver.launches[begun].bindings[1].address
            assert (address == given["input"].buffer.address + given["input"].offset) == in_place


@pytest.mark.parametrize("spec", [SPEC, STRIDED], ids=["dense rows", "strided rows"])
def test_storage_whose_rows_are_apart(spec: NormSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is filled in place, or from a result elsewhere; or refused, and nothing has changed."""
    gpu = Gpu(spec, ONE_PASS, monkeypatch)
    arguments = random_arguments(random_generator(), SPEC, (2, 7))
    given = gpu.given(arguments)
    zeros = np.zeros((2, 7, 96), np.float32)
    sums = [gpu.arrays.asarray(np.zeros(96, np.float32)) for _ in range(2)]
    for shift in (0, 16):
        storage = gpu.arrays.beside_others(zeros, shift=shift)
        for _ in range(2):
            out = LayerNormGrads(storage, *sums)
            assert gpu.op(**given, out=out) == out
            assert_matches_reference(on_host(out), arguments)
            assert storage.room is not None
            assert (storage.room.numpy()[:, :, 1:] == -77).all()
    row = gpu.arrays.asarray(np.zeros(96, np.float32))
    same = row._view((2, 7, 96), (0, 0, 1))
    meets = given["input"]._view((2, 7, 96), (7 * 96, 96, 1))
    meets.offset += 16
    for storage, said in (
        (same, "expected a contiguous array, or rows that share no element"),
        (gpu.arrays.beside_others(zeros, shift=4), "expected a contiguous array, or"),
        (gpu.arrays.spread(zeros), "expected a contiguous array, or"),
        (meets, "expected memory of its own"),
    ):
        with pytest.raises(ValueError, match=rf"^out\.grad_input: {said}"):
            gpu.op(**given, out=LayerNormGrads(storage, *sums))
    packed = gpu.arrays.beside_others(arguments.input)
    assert packed.room is not None
    beside = packed.room._view((2, 7, 96), packed._steps)
    beside.offset += 96 * 4
    in_packed = gpu.given(arguments, input=lambda _: packed)
    gpu.op(**in_packed, out=LayerNormGrads(beside, *sums))
    assert_matches_reference(on_host(LayerNormGrads(beside, *sums)), arguments)
    assert packed.numpy().tobytes() == arguments.input.tobytes()
    with pytest.raises(ValueError, match=r"^out\.grad_input: expected memory of its own"):
        gpu.op(**in_packed, out=LayerNormGrads(packed, *sums))


def test_scratch_is_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library may give its memory to others afterwards, as CUDA graphs' pools do."""
    gpu = Gpu(SPEC, ONE_PASS, monkeypatch)
    arguments = random_arguments(random_generator(), SPEC, (23,))
    given = gpu.given(arguments)
    made: list[weakref.ref[EmulatedArray]] = []
    empty_like = gpu.arrays.empty_like

    def noted(*like: Any, **options: Any) -> EmulatedArray:
        array = empty_like(*like, **options)
        made.append(weakref.ref(array))
        return array

    monkeypatch.setattr(gpu.arrays, "empty_like", noted)
    for _ in range(3):
        made.clear()
        results = gpu.op(**given)
        gc.collect()
        alive = [array() for array in made if array() is not None]
        assert len(made) == len(results) + 1
        assert {id(array) for array in alive} == {id(result) for result in results}
        assert_matches_reference(on_host(results), arguments)


def test_scratch_that_is_too_short_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(SPEC, ONE_PASS, monkeypatch)
    arguments = random_arguments(random_generator(), SPEC, (23,))
    call = gpu.op._gpu.sequence(23)
    assert call is not None
    short = replace(call, scratch_bytes=call.scratch_bytes // 2)
    monkeypatch.setattr(gpu.op._gpu, "sequence", lambda *_: short)
    with pytest.raises(Fault, match=r"out of bounds|outside of every buffer"):
        gpu.op(**gpu.given(arguments))


def test_the_arrays_are_such_as_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not such as the call would have copied to the host."""
    gpu = Gpu(SPEC, ONE_PASS, monkeypatch)
    given = gpu.given(random_arguments(random_generator(), SPEC, (7,)))
    gradients = gpu.op(**given)
    assert all(isinstance(gradient, EmulatedArray) for gradient in gradients)
    first = gpu.driver.launches[0].bindings
    assert first[0].address == given["grad_output"].buffer.address
    assert first[5].address == gradients.grad_input.buffer.address


def first_storage(gpu: Gpu, call: BoundCall) -> dict[str, EmulatedArray]:
    """An array for each result, by name."""
    assert call.spec is not None
    return {
        result.name: gpu.arrays.asarray(
            np.full(
                call.shape_of(call.spec.family.named(result.name)), -77, DTYPES[result.dtype].numpy
            )
        )
        for result in call.spec.results
    }


@pytest.mark.drawn
@pytest.mark.parametrize("spec", tuple(family()), ids=lambda spec: spec.name)
def test_storage_shares_memory_with_nothing_that_is_read(
    spec: NormSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every norm with every option: each result, with each array; and nothing is written."""
    gpu, rng = Gpu(spec, None, monkeypatch), random_generator()
    call = random_call(spec, 3, rng)
    arrays = {name: gpu.arrays.asarray(array) for name, array in call.arrays.items()}
    own = first_storage(gpu, call)
    of = results_type(spec.family)
    ran = len(gpu.driver.launches)
    for result, storage in own.items():
        for name, array in arrays.items():
            shared = EmulatedArray(gpu.arrays, array.buffer, 0, storage.shape, storage.dtype)
            out = of(*map({**own, result: shared}.get, of._fields))
            said = rf"^out\.{result}: expected memory of its own, .* which {name} has \d+ bytes"
            for _ in range(2):  # the second time, such a call is known
                with pytest.raises(ValueError, match=said):
                    gpu.op(**arrays, out=out)
    assert len(gpu.driver.launches) == ran
    for name, kept in call.arrays.items():
        assert arrays[name].numpy().tobytes() == kept.tobytes(), name
    returned = gpu.op(**arrays, out=of(*map(own.get, of._fields)))
    assert_right(on_host(returned), call)


# Two values of each option, in turn on the same arrays.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eps": ({"eps": 1e-5}, {"eps": 0.5}),
    "weight_offset": ({"weight_offset": 0.0}, {"weight_offset": 1.0}),
    "output_mask": ({"output_mask": (True, True)}, {"output_mask": (True, False)}),
    "rows_per_set": ({"rows_per_set": 1}, {"rows_per_set": 2}),
    "grad_input_copy_dtype": ({"grad_input_copy_dtype": "bf16"}, {"grad_input_copy_dtype": "f16"}),
    "no copy": ({"grad_input_copy_dtype": "bf16"}, {}),
    "grad_input_sum_dtype": ({"grad_input_sum_dtype": "f32"}, {"grad_input_sum_dtype": "f16"}),
    "no sum": ({"grad_input_sum_dtype": "bf16"}, {}),
    "a sum or a copy": ({"grad_input_sum_dtype": "bf16"}, {"grad_input_copy_dtype": "bf16"}),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDriver]:
    """The GPU that functions run on; what they loaded on it is let go."""
    driver, uri = EmulatedDriver("cuda"), DeviceUri.parse("cuda")
    monkeypatch.setattr(gpu_module, "Driver", lambda uri: driver)
    monkeypatch.setattr(modules, "target_of", lambda uri: find_target("sm_90"))
    yield driver
    modules.forget([spec for spec, where in modules.in_use() if where == uri], uri)


@pytest.mark.parametrize("option", OPTIONS)
def test_each_value_of_an_option_has_its_own_results(option: str, driver: EmulatedDriver) -> None:
    """By the functions, whose calls are of a kind: with the statistics recomputed."""
    has_sets = option == "rows_per_set"
    spec = NormSpec((96,), op="rms_norm_backward", eps=1e-5, weight_sets=has_sets)
    call = random_call(spec, 3, random_generator())
    arrays = {name: Namespace(driver).asarray(array) for name, array in call.arrays.items()}
    for values in (*OPTIONS[option], *OPTIONS[option]):
        got = rms_norm_backward(
            arrays["grad_output"], arrays["input"], (96,), None, arrays["weight"], **values
        )
        options = {"eps": None, **values}
        assert_right(on_host(got), bind(spec.op, call.arrays, (96,), **options))
