"""Storage of the caller's (`out=`) is filled or refused; arrays may be of any library."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import (
    ARGUMENTS,
    Arguments,
    assert_same_bits,
    present,
    random_arguments,
    random_generator,
)

import iree_lnbwd as lnbwd
from iree_lnbwd import LayerNormGrads, NormSpec
from iree_lnbwd.calls.modules import loaded
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops.arguments import Array, results_type
from iree_lnbwd.ops.operands import FROM_OUTPUT, OPS, Op
from iree_lnbwd.runtime import Norm
from iree_lnbwd.verification.matrix import random_call

HOST = DeviceUri.parse("local-task")
WIDTHS = (7, 8, 1023)


def call(op: Norm, arguments: Arguments, out: Any) -> LayerNormGrads:
    gradients: LayerNormGrads = op(*(getattr(arguments, name) for name in ARGUMENTS), out=out)
    return gradients


def storage_like(gradients: LayerNormGrads) -> dict[str, Array]:
    """With a number in it that no gradient is."""
    return {
        name: np.full_like(present(gradient), -77) for name, gradient in gradients._asdict().items()
    }


def strided(array: Array) -> Array:
    return np.repeat(array, 2, axis=-1)[..., ::2]


def backwards(array: Array) -> Array:
    return array[::-1]


def every_second_row(array: Array) -> Array:
    return np.repeat(array, 2, axis=0)[::2]


def broadcast(array: Array) -> Array:
    one = np.zeros(1, array.dtype)
    return np.lib.stride_tricks.as_strided(one, array.shape, (0,) * array.ndim)


def read_only(array: Array) -> Array:
    frozen = array.copy()
    frozen.flags.writeable = False
    return frozen


def at_an_odd_address(array: Array) -> Array:
    storage = np.zeros(array.nbytes + 1, np.uint8)[1:]
    return storage.view(array.dtype).reshape(array.shape)


def in_a_larger_one(array: Array) -> Array:
    return np.zeros((array.shape[0] + 4, *array.shape[1:]), array.dtype)[2:-2]


ROWS = "grad_input"  # whose rows may have strides
# How an array is laid out, and whether it is filled; or which array alone.
LAYOUTS: dict[Callable[[Array], Array], bool | str] = {
    np.copy: True,
    at_an_odd_address: True,
    in_a_larger_one: True,
    np.asfortranarray: False,
    strided: False,
    backwards: False,
    every_second_row: ROWS,
    broadcast: False,
    read_only: False,
}


@pytest.mark.parametrize("gradient", ["grad_input", "grad_weight", "grad_bias"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("strided_rows", [False, True])
def test_every_layout_is_filled_or_refused(
    strided_rows: bool, layout: Callable[[Array], Array], dtype: str, gradient: str
) -> None:
    spec = NormSpec((5, 7), dtype, strided_rows=strided_rows)
    arguments = random_arguments(random_generator(), spec, (3, 2))
    op = loaded(spec, HOST)
    expected = arguments.backward_by(op)
    arrays = storage_like(expected)
    arrays[gradient] = layout(arrays[gradient])
    if LAYOUTS[layout] in (True, gradient):
        returned = call(op, arguments, LayerNormGrads(**arrays))
        assert present(returned._asdict()[gradient]) is arrays[gradient]
        assert_same_bits(LayerNormGrads(**arrays), expected)
        return
    before = {name: array.tobytes() for name, array in arrays.items()}
    wanted = "can be written" if layout is read_only else "contiguous"
    with pytest.raises(ValueError, match=rf"^out\.{gradient}: expected an? .*{wanted}"):
        call(op, arguments, LayerNormGrads(**arrays))
    assert {name: array.tobytes() for name, array in arrays.items()} == before


def test_a_layout_that_is_contiguous_for_its_shape() -> None:
    """A single row, or a single column of a single row, has no strides that matter."""
    spec = NormSpec((8,))
    arguments = random_arguments(random_generator(), spec, (1,))
    op = loaded(spec, HOST)
    expected = arguments.backward_by(op)
    arrays = storage_like(expected)
    arrays["grad_input"] = np.zeros((3, 8), np.float32)[::3]
    assert_same_bits(call(op, arguments, LayerNormGrads(**arrays)), expected)


# What shares memory with what, by name: of a call's arrays and its storage.
OVERLAPS = [
    *itertools.product(
        ("out.grad_input", "out.grad_weight", "out.grad_bias"),
        ("grad_output", "input", "mean", "rstd", "weight"),
    ),
    ("out.grad_weight", "out.grad_input"),
    ("out.grad_bias", "out.grad_input"),
    ("out.grad_bias", "out.grad_weight"),
]


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("part", ["all of it", "its last bytes", "its first bytes"])
@pytest.mark.parametrize(("result", "other"), OVERLAPS)
def test_overlapping_storage_is_refused(result: str, other: str, part: str, columns: int) -> None:
    spec = NormSpec((columns,))
    arguments = random_arguments(random_generator(), spec, (columns,))  # so that all have room
    op = loaded(spec, HOST)
    arrays = storage_like(arguments.backward_by(op))
    named = {f"out.{name}": array for name, array in arrays.items()}
    inputs = ("grad_output", "input", "mean", "rstd", "weight")
    named |= {name: getattr(arguments, name) for name in inputs}
    size, taken = named[result].nbytes, named[other].nbytes
    room = np.full(size + taken, 7, np.uint8)
    # The other one lies in the middle; the result begins there, before it, or at its last element.
    first = size // 8 * 4
    begins = {"all of it": first, "its last bytes": first + taken - 4, "its first bytes": 4}[part]
    begins = min(begins, len(room) - size)
    moved = {
        other: room[first : first + taken].view(np.float32).reshape(named[other].shape),
        result: room[begins : begins + size].view(np.float32).reshape(named[result].shape),
    }
    assert np.shares_memory(moved[other], moved[result])
    if not other.startswith("out."):
        moved[other][...] = named[other]
    given = {name: moved.get(name, array) for name, array in named.items()}
    arrays_in: dict[str, Any] = {name: given[name] for name in inputs}
    before = room.tobytes()
    out = LayerNormGrads(**{name: given[f"out.{name}"] for name in arrays})
    # The later of two results is the one that is named first.
    said = rf"^{re.escape(result)}: expected memory of its own, .* which {re.escape(other)} has"
    with pytest.raises(ValueError, match=said):
        op(**arrays_in, out=out)
    assert room.tobytes() == before


EVERY: list[Op] = [*OPS.values(), *FROM_OUTPUT.values()]


@pytest.mark.drawn
@pytest.mark.parametrize("op", EVERY, ids=lambda op: op.name + "_from_output" * op.from_output)
def test_results_share_memory_with_nothing_that_is_read(op: Op) -> None:
    """Of every norm with a residual: each result, with each array, and with each other result."""
    eps = None if op.is_backward else 1e-5
    spec = NormSpec((8,), op=op.name, from_output=op.from_output, eps=eps, residual_dtype="f32")
    call = random_call(spec, 8, random_generator())
    norm, of = loaded(spec, HOST), results_type(op)
    results = {
        result.name: np.full(call.shape_of(op.named(result.name)), -77, np.float32)
        for result in spec.results
    }
    assert "grad_residual" in call.arrays or "residual" in call.arrays

    def refused(result: str, storage: Array, other: str, **moved: Array) -> None:
        said = rf"^out\.{result}: expected memory of its own, .* which {re.escape(other)} has"
        with pytest.raises(ValueError, match=said):
            norm(
                **{**call.arrays, **moved},
                out=of(*map({**results, result: storage}.get, of._fields)),
            )

    for place, (result, own) in enumerate(results.items()):
        for name, array in call.arrays.items():
            room = np.zeros(own.size + array.size - 1, np.float32)  # they share an element
            moved = room[own.size - 1 :].reshape(array.shape)
            moved[...] = array
            refused(result, room[: own.size].reshape(own.shape), name, **{name: moved})
            np.testing.assert_array_equal(moved, array)
        for before in list(results)[:place]:
            if results[before].size >= own.size:
                shared = results[before].reshape(-1)[: own.size].reshape(own.shape)
                refused(result, shared, f"out.{before}")
    assert all((array == -77).all() for array in results.values())


def test_neighbours_do_not_overlap() -> None:
    """All of a call in one piece of memory, one after the other."""
    spec = NormSpec((7,))
    arguments = random_arguments(random_generator(), spec, (5,))
    op = loaded(spec, HOST)
    expected = arguments.backward_by(op)
    room = np.zeros(3 * 35 + 2 * 5 + 3 * 7, np.float32)
    pieces, end = [], 0
    for shape in ((5, 7), (5, 7), (5,), (5,), (7,), (5, 7), (7,), (7,)):
        size = int(np.prod(shape))
        pieces.append(room[end : end + size].reshape(shape))
        end += size
    names = ("grad_output", "input", "mean", "rstd", "weight")
    for piece, name in zip(pieces, names, strict=False):
        piece[...] = getattr(arguments, name)
    out = LayerNormGrads(*pieces[5:])
    given: dict[str, Any] = dict(zip(names, pieces, strict=False))
    op(**given, out=out)
    assert_same_bits(out, expected)


def test_what_is_only_read_may_overlap_and_the_bias_may_hold_its_gradient() -> None:
    spec = NormSpec((8,))
    arguments = random_arguments(random_generator(), spec, (5,))
    op = loaded(spec, HOST)
    x, bias = arguments.input, np.ones(8, np.float32)
    expected = op(x, x, arguments.mean, arguments.mean, x[0], bias)
    out = LayerNormGrads(np.empty_like(x), np.empty(8, np.float32), bias)
    op(x, x, arguments.mean, arguments.mean, x[0], bias, out=out)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("out", [[1, 2], (), "abc", 5, np.zeros((3, 8)), {"grad_input": 1}])
def test_what_is_no_storage_is_named(out: Any) -> None:
    arguments = random_arguments(random_generator(), NormSpec((8,)), (3,))
    said = rf"^out: expected LayerNormGrads or 3 arrays, got {type(out).__name__}"
    with pytest.raises(TypeError, match=said):
        call(loaded(NormSpec((8,)), HOST), arguments, out)


@pytest.mark.parametrize("kind", [tuple, list])
def test_three_arrays_will_do(kind: type) -> None:
    spec = NormSpec((8,), output_mask=(True, False, True))
    arguments = random_arguments(random_generator(), spec, (3,))
    op = loaded(spec, HOST)
    expected = arguments.backward_by(op)
    arrays = (np.empty((3, 8), np.float32), None, np.empty(8, np.float32))
    returned = call(op, arguments, kind(arrays))
    assert isinstance(returned, LayerNormGrads)
    assert returned.grad_input is arrays[0]
    assert_same_bits(returned, expected)


def test_storage_for_what_is_not_computed_is_refused() -> None:
    """It would come back as it was, in a gradient's place."""
    spec = NormSpec((8,), output_mask=(True, False, True))
    arguments = random_arguments(random_generator(), spec, (3,))
    out = (np.empty((3, 8), np.float32), np.empty(8, np.float32), np.empty(8, np.float32))
    with pytest.raises(ValueError, match=r"^out\.grad_weight: expected None.*got ndarray$"):
        call(loaded(spec, HOST), arguments, out)


def test_no_rows_leave_zeros() -> None:
    op = loaded(NormSpec((8,)), HOST)
    none = np.empty((0, 8), np.float32)
    row = np.ones(8, np.float32)
    out = LayerNormGrads(none.copy(), row.copy(), row.copy())
    op(none, none, none[:, 0], none[:, 0], row, out=out)
    assert (out.grad_weight == 0).all()
    assert (out.grad_bias == 0).all()


# --- arrays that are known by DLPack alone ------------------------------------------------------


class Exported:
    """An array of a library that nobody knows, which only gives it away."""

    def __init__(self, array: Array, *, versions: bool = True) -> None:
        self._array = array
        self._versions = versions

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> object:
        if options and not self._versions:
            raise TypeError("no options")
        return self._array.__dlpack__(**options)


class Converted(Exported):
    """The same, with what NumPy asks for besides."""

    def __array__(self, *_: Any, **__: Any) -> Array:
        return self._array.copy()


@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize("kind", [Exported, Converted])
def test_arrays_with_dlpack_alone(kind: type[Exported], versions: bool) -> None:
    arguments = random_arguments(random_generator(), NormSpec((4, 6)), (3,))
    names = ("grad_output", "input", "mean", "rstd", "weight", "bias")
    given: dict[str, Any] = {
        name: kind(getattr(arguments, name), versions=versions) for name in names
    }
    expected = arguments.backward()
    gradients = lnbwd.layer_norm_backward(normalized_shape=(4, 6), **given)
    assert_same_bits(gradients, expected)  # NumPy's: there is no telling what others there are
    strided_input = np.asfortranarray(arguments.input)
    given["input"] = kind(strided_input, versions=versions)
    assert_same_bits(lnbwd.layer_norm_backward(normalized_shape=(4, 6), **given), expected)
    if versions:
        stored = storage_like(expected)
        out = LayerNormGrads(*map(kind, stored.values()))
        loaded(NormSpec((4, 6)), HOST)(**given, out=out)
        assert_same_bits(LayerNormGrads(**stored), expected)


def test_storage_of_others_that_is_read_only_is_refused() -> None:
    spec = NormSpec((8,))
    arguments = random_arguments(random_generator(), spec, (3,))
    stored = storage_like(arguments.backward())
    frozen = read_only(stored["grad_weight"])
    out = LayerNormGrads(stored["grad_input"], Exported(frozen), stored["grad_bias"])
    with pytest.raises(
        ValueError, match=r"out\.grad_weight: (expected an array that can be written|its library)"
    ):
        call(loaded(spec, HOST), arguments, out)
    assert (frozen == -77).all()


def test_what_a_library_does_not_give_away_is_named() -> None:
    class Refuses(Exported):
        def __dlpack__(self, **_: Any) -> object:
            raise BufferError("it is spread over two devices")

    class Nowhere(Exported):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise RuntimeError("it was deleted")

    class Lies(Exported):
        def __dlpack__(self, **_: Any) -> object:
            return object()

    x = np.ones((3, 8), np.float32)
    for kind, said in (
        (Refuses, "grad_output: its library does not give it away: it is spread over two devices"),
        (Nowhere, "grad_output: its library does not say where it is: it was deleted"),
        (Lies, "grad_output: expected a DLPack capsule of it, got object"),
    ):
        with pytest.raises(ValueError, match=said):
            lnbwd.layer_norm_backward(kind(x), x, 8)
    with pytest.raises(TypeError, match=r"grad_output: expected an element type of .* got "):
        lnbwd.layer_norm_backward(Exported(x.astype(np.int8)), x, 8)


def test_arrays_of_jax() -> None:
    """Taken where they are, bf16 too; what it traces is named, what it counts on not written."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    spec = NormSpec((8,), "bf16")
    arguments = random_arguments(random_generator(), spec, (3,))
    names = ("grad_output", "input", "mean", "rstd", "weight", "bias")
    given: dict[str, Any] = {name: jax.numpy.asarray(getattr(arguments, name)) for name in names}
    gradients = lnbwd.layer_norm_backward(normalized_shape=8, **given)
    assert all(isinstance(gradient, jax.Array) for gradient in gradients)
    assert_same_bits(LayerNormGrads(*map(np.asarray, gradients)), arguments.backward())
    out = LayerNormGrads(*map(jax.numpy.zeros_like, gradients))
    with pytest.raises(ValueError, match=r"out\.grad_input: expected an array that can be written"):
        loaded(spec, HOST)(**given, out=out)
    with pytest.raises(TypeError, match="input: expected an array with values, got a JAX tracer"):
        jax.jit(lambda x: lnbwd.layer_norm_backward(x, x, 8).grad_input)(given["input"])


# --- values that are not quite what they seem ---------------------------------------------------


@pytest.mark.parametrize("name", ["grad_output", "input", "mean", "rstd", "weight", "bias"])
def test_a_mask_is_not_lost(name: str) -> None:
    arguments = random_arguments(random_generator(), NormSpec((8,)), (3,))
    names = ("grad_output", "input", "mean", "rstd", "weight", "bias")
    given = {other: getattr(arguments, other) for other in names}
    given[name] = np.ma.masked_array(given[name], mask=False)
    with pytest.raises(TypeError, match=f"^{name}: expected an array without a mask, got a masked"):
        lnbwd.layer_norm_backward(normalized_shape=8, **given)


def test_other_arrays_of_numpy_are_arrays() -> None:
    arguments = random_arguments(random_generator(), NormSpec((8,)), (3,))
    expected = arguments.backward()
    dy: Any = arguments.grad_output.view(np.matrix)
    x: Any = arguments.input.view(np.memmap)
    assert_same_bits(
        lnbwd.layer_norm_backward(
            dy, x, 8, arguments.mean, arguments.rstd, arguments.weight, arguments.bias
        ),
        expected,
    )


@pytest.mark.parametrize("eps", [np.float32(0.5), np.float64(0.5), np.float16(0.5)])
def test_numpys_scalars_are_numbers(eps: Any) -> None:
    x = random_generator().standard_normal((3, 8), dtype=np.float32)
    mask: Any = (np.bool_(True), True, np.True_)
    assert_same_bits(
        lnbwd.layer_norm_backward(x, x, 8, output_mask=mask, eps=eps),
        lnbwd.layer_norm_backward(x, x, 8, eps=0.5),
    )


ARRAYS: tuple[Any, ...] = (
    np.ones(3),
    np.ones((2, 2)),
    np.array([True] * 3),
    np.array([1e-5], np.float32),
)


@pytest.mark.parametrize("value", [0, False, "", [], *ARRAYS], ids=repr)
def test_a_device_is_a_name(value: Any) -> None:
    """What is false is not the default, and an array is not true or false."""
    x = np.ones((3, 8), np.float32)
    with pytest.raises((TypeError, ValueError), match=r"^device: expected "):
        lnbwd.layer_norm_backward(x, x, 8, device=value)


@pytest.mark.parametrize("value", ARRAYS, ids=repr)
@pytest.mark.parametrize("name", ["eps", "output_mask", "normalized_shape"])
def test_an_array_is_no_option(name: str, value: Any) -> None:
    x = np.ones((3, 8), np.float32)
    given: dict[str, Any] = {"normalized_shape": 8, name: value}
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected "):
        lnbwd.layer_norm_backward(x, x, **given)
    if name != "normalized_shape":
        op = loaded(NormSpec((8,), eps=1e-5), HOST)
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected "):
            op(x, x, weight=x[0], **{name: value})


def test_a_modules_options_in_other_words() -> None:
    op = loaded(NormSpec((8,), eps=0.5), HOST)
    x = np.ones((3, 8), np.float32)
    expected = op(x, x, weight=x[0])
    for mask, eps in (([True, True, True], 0.5), ((np.True_,) * 3, np.float32(0.5))):
        assert_same_bits(op(x, x, weight=x[0], output_mask=mask, eps=eps), expected)
