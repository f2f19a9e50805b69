"""Rows where they lie: arrays whose rows have two strides are read and written without a copy."""

from __future__ import annotations

import functools
import mmap
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import (
    assert_right,
    assert_same_bits,
    built,
    normal,
    random_generator,
    without_few_rows,
)
from test_family import spec_of

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec, runtime, schedules
from iree_lnbwd.bundles import serving
from iree_lnbwd.calls.modules import loaded
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.ops.strides import dense
from iree_lnbwd.runtime import Norm
from iree_lnbwd.verification import host_calls, matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.verification.scattered import ScatteredNorm, scattered
from iree_lnbwd.vmfb.counts import count_of
from iree_lnbwd.vmfb.description import describe
from iree_lnbwd.vmfb.executables import exports

HOST = DeviceUri.parse("local-task")
ROWS = (1, 2, 5, 41, 700)
B, S, H, D = 2, 6, 3, 16
_UNRESERVED = 0x4000  # Linux's MAP_NORESERVE
SPECS = list(matrix.strided_rows())
by_name = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


@pytest.mark.drawn
@by_name
def test_rows_apart_and_nothing_between_them(spec: NormSpec) -> None:
    """NaNs lie between the rows that are read, and what lies between results stays."""
    norm = ScatteredNorm(runtime.load_built(built(spec, find_target("host"))[0]))
    rng = random_generator()
    for rows in (0, *ROWS):
        if rows * spec.columns <= 1 << 20:
            call = matrix.random_call(spec, rows, rng)
            assert_right(norm.run(call), call)
    call = matrix.adversarial_call(spec, rng)
    assert_right(norm.run(call), call)


@pytest.mark.drawn
@pytest.mark.parametrize("op", OPS)
def test_the_bits_are_those_of_dense_rows(op: str) -> None:
    spec = spec_of(op, 96, "f32")
    dense, apart = (loaded(replace(spec, strided_rows=is_so), HOST) for is_so in (False, True))
    rng = random_generator()
    for rows in (1, 7, 300, 3000):
        call = matrix.random_call(spec, rows, rng)
        strided = call._replace(spec=apart.spec)
        expected = dense.run(call)
        assert_same_bits(apart.run(strided), expected)
        assert_same_bits(ScatteredNorm(apart).run(strided), expected)


def packed(rng: np.random.Generator) -> Array:
    return normal(rng, "f32", (B, S, 3, H, D))


# Views of [B, S, H, D], or other leading dimensions, and whether a call uses them where they lie.
VIEWS: dict[str, tuple[Callable[[np.random.Generator], Array], bool]] = {
    "q": (lambda rng: packed(rng)[:, :, 0], True),
    "v": (lambda rng: packed(rng)[:, :, 2], True),
    "every second": (lambda rng: packed(rng)[:, ::2, 1], True),
    "a slice of features": (lambda rng: normal(rng, "f32", (B, S, 3 * D))[..., D : 2 * D], True),
    "batch and sequence": (lambda rng: normal(rng, "f32", (S, B, D)).swapaxes(0, 1), True),
    "one row for all": (lambda rng: np.broadcast_to(normal(rng, "f32", (D,)), (B, S, D)), True),
    "heads for all": (lambda rng: np.broadcast_to(packed(rng)[0, 0, 0], (B, S, H, D)), True),
    "read-only": (lambda rng: _frozen(packed(rng))[:, :, 1], True),
    "heads first": (lambda rng: packed(rng)[:, :, 1].swapaxes(1, 2), False),
    "backwards": (lambda rng: packed(rng)[::-1, :, 1], False),
    "columns apart": (lambda rng: normal(rng, "f32", (B, S, 2 * D))[..., ::2], False),
    "at no multiple": (lambda rng: _at_no_multiple(normal(rng, "f32", (S, D))), False),
    "one row": (lambda rng: packed(rng)[1:, 3:4, 1, 2:], False),
    "no rows": (lambda rng: packed(rng)[:, :0, 1], False),
}


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _at_no_multiple(array: Array) -> Array:
    kind = np.dtype([("row", "f4", (D,)), ("between", "u1", (2,))])
    apart: Array = np.zeros(len(array), kind)["row"]
    apart[...] = array
    return apart


@pytest.mark.drawn
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_any_view_gives_the_bits_of_its_copy(op: str, name: str) -> None:
    """As the input, as the gradient and the residual, alone and beside others."""
    make, _ = VIEWS[name]
    rng = random_generator()
    weight = normal(rng, "f32", (D,))
    forward, backward = getattr(lnbwd, op), getattr(lnbwd, f"{op}_backward")
    x, dy = make(rng), make(rng)
    others = [
        make(rng),
        np.ascontiguousarray(make(rng)),
        packed(rng)[: x.shape[0], : x.shape[1], 2],
    ]
    before = [x.tobytes(), dy.tobytes()]
    for residual in [None, *(other for other in others if other.shape == x.shape)]:
        results = forward(x, D, weight, residual=residual)
        copied = None if residual is None else residual.copy()
        assert_same_bits(results, forward(x.copy(), D, weight, residual=copied))
        for gradient in (dy, dy.copy(), [dy, x]):
            given = (
                [each.copy() for each in gradient] if type(gradient) is list else gradient.copy()
            )
            results = backward(gradient, x, D, weight=weight, grad_residual=residual)
            plain = backward(given, x.copy(), D, weight=weight, grad_residual=copied)
            assert_same_bits(results, plain)
    assert [x.tobytes(), dy.tobytes()] == before


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_copied_and_what_is_not(name: str) -> None:
    make, in_place = VIEWS[name]
    x = make(random_generator())
    call = lnbwd.ops.arguments.bind_arrays(
        {"input": x}, lnbwd.ops.arguments.check_options(OPS["rms_norm"], D)
    )
    placed = lnbwd.ops.layouts.in_place(call)
    assert (placed is not None) == in_place
    if placed is not None:
        assert np.shares_memory(placed.arrays["input"], x)


def test_nothing_is_copied() -> None:
    """Of arrays that are a hundred times what a call may need besides them."""
    rng = random_generator()
    qkv, gradients = (normal(rng, "f32", (2, 700, 3, 4, 64)) for _ in range(2))
    x, dy, dx = qkv[:, :, 0], gradients[:, :, 2], np.zeros_like(qkv)
    dgamma = np.zeros(64, np.float32)
    spec = spec_of("rms_norm_backward", 64, "f32", eps=1e-6, strided_rows=True)
    module, weight = loaded(spec, HOST), normal(rng, "f32", (64,))
    out = (dx[:, :, 1], dgamma)
    module(dy, x, weight=weight, out=out)
    tracemalloc.start()
    try:
        module(dy, x, weight=weight, out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Partial sums of columns are all that a call makes.
    assert peak < dx[:, :, 1].nbytes / 4


@pytest.mark.drawn
@pytest.mark.parametrize("strided_rows", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_storage_with_strides_is_filled_and_nothing_else(op: str, strided_rows: bool) -> None:
    """By a module for such rows in place, by any other by way of a copy."""
    spec = spec_of(op, D, "f32", residual_dtype="f32", strided_rows=strided_rows)
    module, rng = loaded(spec, HOST), random_generator()
    call = matrix.random_call(replace(spec, strided_rows=False), B * S * H, rng)
    shaped: dict[str, Any] = {
        name: array.reshape(B, S, H, D) if array.shape == (B * S * H, D) else array
        for name, array in call.arrays.items()
    }
    expected = loaded(replace(spec, strided_rows=False), HOST).run(call)
    leading = (B, S, H)
    shaped |= {n: a.reshape(*leading, 1) for n, a in shaped.items() if a.shape == (B * S * H,)}
    for place in range(3):
        out: dict[str, Any] = {}
        whole: dict[str, Array] = {}
        for name, array in expected._asdict().items():
            if array is None:
                out[name] = None
            elif array.shape == (B * S * H, D):
                whole[name] = np.full((B, S, 3, H, D), -77, array.dtype)
                out[name] = whole[name][:, :, place]
            else:
                statistics = array.shape == (B * S * H, 1)
                out[name] = np.zeros((B, S, H, 1) if statistics else array.shape, array.dtype)
        returned = module(**shaped, out=type(expected)(**out))
        for name, array in expected._asdict().items():
            if array is None:
                continue
            assert returned._asdict()[name] is out[name]
            assert np.ascontiguousarray(out[name]).tobytes() == array.tobytes(), name
            if name in whole:
                others = np.delete(whole[name], place, axis=2)
                assert (others == -77).all(), name


STORAGE: dict[str, Callable[[], Array]] = {
    "rows that share elements": lambda: np.lib.stride_tricks.as_strided(
        np.zeros(99, np.float32), (4, D), (4 * (D - 1), 4)
    ),
    "the same row": lambda: np.lib.stride_tricks.as_strided(
        np.zeros(D, np.float32), (4, D), (0, 4)
    ),
    "backwards": lambda: np.zeros((4, D), np.float32)[::-1],
    "columns apart": lambda: np.zeros((4, 2 * D), np.float32)[:, ::2],
    "at no multiple": lambda: _at_no_multiple(np.zeros((4, D), np.float32)),
}


@pytest.mark.parametrize("strided_rows", [False, True])
@pytest.mark.parametrize("name", STORAGE)
def test_other_storage_is_refused(name: str, strided_rows: bool) -> None:
    module = loaded(spec_of("rms_norm", D, "f32", strided_rows=strided_rows), HOST)
    x, rstd = normal(random_generator(), "f32", (4, D)), np.zeros((4, 1), np.float32)
    storage = STORAGE[name]()
    before = storage.tobytes()
    with pytest.raises(ValueError, match=r"^out\.output: expected a contiguous array, or "):
        module(x, np.ones(D, np.float32), out=(storage, None, rstd, None))
    assert storage.tobytes() == before


def test_storage_between_the_rows_of_others() -> None:
    """Rows of one array lie between those of another; where they meet, both are named."""
    module = loaded(spec_of("rms_norm", D, "f32", strided_rows=True), HOST)
    qkv = packed(random_generator())
    weight, rstd = np.ones(D, np.float32), np.zeros((B, S, H, 1), np.float32)
    q = qkv[:, :, 0]
    expected = lnbwd.rms_norm(q.copy(), D, weight)
    kept = qkv.copy()
    module(q, weight, eps=None, out=(qkv[:, :, 1], None, rstd, None))
    assert qkv[:, :, 1].tobytes() == expected.output.tobytes()
    for other in (0, 2):
        assert qkv[:, :, other].tobytes() == kept[:, :, other].tobytes()
    one_later = qkv.reshape(-1)[H * D - 1 :][: -3 * H * D + 1]
    shifted = np.lib.stride_tricks.as_strided(one_later, q.shape, q.strides)
    for storage in (q, shifted[:1]):
        given = q[: len(storage)]
        said = r"^out\.output: expected memory of its own, got rows of which input has elements"
        with pytest.raises(ValueError, match=said):
            module(given, weight, out=(storage, None, rstd[: len(storage)], None))


@pytest.mark.parametrize("op", ["layer_norm", "layer_norm_backward"])
def test_rows_beyond_2_to_the_31_elements(op: str) -> None:
    """Memory that nobody touches takes none."""
    columns, rows, stride = 8, 6, (1 << 30) - 8
    nbytes = 2 * ((rows - 1) * stride + columns)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED
    rng = random_generator()

    def far_apart(values: Array) -> Array:
        memory = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.float16)
        shape, steps = (rows, columns), (2 * stride, 2)
        apart: Array = np.lib.stride_tricks.as_strided(memory, shape, steps)
        apart[...] = values
        return apart

    spec = spec_of(op, columns, "f16", strided_rows=True)
    module = loaded(spec, HOST)
    call = matrix.random_call(replace(spec, strided_rows=False), rows, rng)
    expected = loaded(replace(spec, strided_rows=False), HOST).run(call)
    cells = (rows, columns)
    given = {n: far_apart(a) if a.shape == cells else a for n, a in call.arrays.items()}
    out = {
        name: None if a is None else far_apart(np.zeros_like(a)) if a.shape == cells else a.copy()
        for name, a in expected._asdict().items()
    }
    module(**given, out=type(expected)(**out))
    for name, array in expected._asdict().items():
        if array is not None:
            assert np.ascontiguousarray(out[name]).tobytes() == array.tobytes(), name


def test_without_a_module_for_such_rows_they_are_copied(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle has the plain module alone."""
    spec = spec_of("rms_norm", D, "f32")
    path = tmp_path / "norms.lnb"
    lnbwd.bundle([spec], ["generic"], path)
    norms = lnbwd.Bundle(path)
    q = packed(random_generator())[:, :, 0]
    weight = np.ones(D, np.float32)
    expected = lnbwd.rms_norm(q.copy(), D, weight)
    asked: list[bool] = []
    find = serving.find

    def noted(file: Any, spec: NormSpec, uri: DeviceUri) -> Any:
        asked.append(spec.strided_rows)
        return find(file, spec, uri)

    monkeypatch.setattr(serving, "find", noted)
    for _ in range(3):
        assert_same_bits(norms.rms_norm(q, D, weight), expected)
    assert asked == [True, False]  # what there is not is not asked for again


DENSE = [
    *(spec_of(op, 24, dtype, strided_rows=True) for op in OPS for dtype in ("f32", "bf16")),
    spec_of("layer_norm_backward", 24, "f32", strided_rows=True, rows=6),
]


@pytest.mark.drawn
@pytest.mark.parametrize("spec", DENSE, ids=lambda spec: spec.name)
def test_modules_take_dense_arrays_too(spec: NormSpec) -> None:
    module = loaded(spec, HOST)
    for rows in (0, 1, 6) if spec.rows is None else (spec.rows,):
        call = matrix.random_call(replace(spec, strided_rows=False), rows, random_generator())
        assert_right(module(**call.arrays), call)


@pytest.mark.parametrize("strided_rows", [False, True])
def test_rows_of_several_dimensions_that_a_module_has_fixed(strided_rows: bool) -> None:
    spec = spec_of("rms_norm", D, "f32", rows=B * S, strided_rows=strided_rows)
    module = loaded(spec, HOST)
    wide = normal(random_generator(), "f32", (B, S, 2 * D))
    weight = np.ones(D, np.float32)
    for x in (wide[..., D:], wide[..., D:].copy()):
        assert_same_bits(module(x, weight), lnbwd.rms_norm(x.copy(), D, weight))
    with pytest.raises(ValueError, match="input: this module was compiled for 12 rows, got 10"):
        module(wide[:, 1:, D:], weight)


def bare(spec: NormSpec) -> Any:
    """IREE's own call of a module."""
    module: Norm = loaded(spec, HOST)
    return module._iree().run


def test_numbers_that_do_not_fit_are_named() -> None:
    """Whoever calls a bare module is told which."""
    spec = spec_of("rms_norm", 8, "f32", strided_rows=True)
    run = bare(spec)
    x, y, rstd = (np.ones(n, np.float32) for n in (64, 64, 5))
    weight = np.ones(8, np.float32)
    good: dict[str, Any] = {"rows": 5, "count": 2, "x": (20, 10), "y": (16, 8)}

    def call(rows: int, count: int, x_steps: Any, y_steps: Any) -> None:
        run([x, weight], [y, rstd], [rows, count, *x_steps, *y_steps])

    call(*good.values())
    for name, bad, said in (
        ("count", 1, "inner_count"),
        ("count", 1 << 31, "inner_count"),
        ("x", (29, 8), "input: expected memory of all rows"),
        ("x", (20, 40), "input: expected memory of all rows"),
        ("x", (-1, 8), "input: expected strides"),
        ("x", (0, 1 << 31), "input: expected strides"),
        ("y", (16, 41), "out.output: expected memory of all rows"),
        ("rows", 1 << 32, "rstd"),
        ("rows", -1, "rstd"),
    ):
        with pytest.raises(Exception, match=said):
            call(*{**good, name: bad}.values())


EMULATED = [
    spec_of("layer_norm", 64, "f32", strided_rows=True),
    spec_of("rms_norm", 300, "bf16", weight_offset=1.0, has_bias=True, strided_rows=True),
    spec_of("layer_norm", 33, "f16", weight_dtype="f32", strided_rows=True),
    spec_of("rms_norm", 4100, "f32", residual_dtype="bf16", strided_rows=True),
    spec_of("layer_norm", 20001, "bf16", strided_rows=True),
    spec_of("rms_norm", 128, "bf16", gate="before", strided_rows=True),
    spec_of("rms_norm", 128, "bf16", weight_sets=True, strided_rows=True),
    spec_of("rms_norm", 256, "f32", output_dtype="f16", strided_rows=True),
    spec_of("layer_norm_backward", 64, "f32", strided_rows=True),
    spec_of("layer_norm_backward", 300, "bf16", residual_dtype="f32", strided_rows=True),
    spec_of("layer_norm_backward", 1, "f64", strided_rows=True),
    spec_of("layer_norm_backward", 72, "f32", output_mask=(False, True, True), strided_rows=True),
    spec_of("rms_norm_backward", 96, "f32", eps=1e-5, strided_rows=True),
    spec_of("rms_norm_backward", 65, "f16", weight_dtype="f32", has_bias=True, strided_rows=True),
    spec_of("rms_norm_backward", 4100, "bf16", grad_outputs=2, strided_rows=True),
    spec_of("rms_norm_backward", 64, "bf16", from_output=True, has_bias=True, strided_rows=True),
    spec_of("rms_norm_backward", 80, "bf16", gate="after", strided_rows=True),
    spec_of("rms_norm_backward", 96, "bf16", weight_sets=True, strided_rows=True),
]  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("target", "few"),
    [("sm_80", False), ("sm_90", False), ("sm_90", True), ("gfx942", False), ("gfx1100", True)],
)
@pytest.mark.parametrize("spec", EMULATED, ids=lambda spec: spec.name)
def test_on_emulated_gpus(spec: NormSpec, target: str, few: bool) -> None:
    """Kernels for few rows, and those for many; each byte of a row is written once."""
    on = find_target(target)
    how = None if few else without_few_rows(spec, on)
    emulated = EmulatedNorm(compiler.build(spec, on, schedule=how)[0])
    rng = random_generator()
    for rows in (1, 2, 19, 37):
        call = matrix.random_call(spec, rows, rng)
        assert_right(emulated.run(call), call)
    if few:
        call = matrix.adversarial_call(spec, rng)
        assert_right(emulated.run(call), call)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_strides_of_an_output_are_counted_in_its_own_type(dtype: str, target: str) -> None:
    """Four f32 are an access; of x, eight elements are."""
    spec = spec_of("layer_norm", 64, dtype, output_dtype="f32", strided_rows=True)
    emulated = EmulatedNorm(built(spec, find_target(target))[0])
    rng, tried = random_generator(), 0
    call = matrix.random_call(spec, 5, rng)
    while tried < 3:
        apart = scattered(call, rng)
        assert apart.strides is not None
        if any(stride % 8 for stride in apart.strides.of("output")):
            assert_right(emulated.run(apart), call)
            tried += 1


@pytest.mark.drawn
@pytest.mark.parametrize("spec", EMULATED, ids=lambda spec: spec.name)
def test_host_programs_launch_what_streams_launch(spec: NormSpec) -> None:
    """The plan's numbers, as Python computes them for a stream, are those of the host program."""
    vmfb, _ = built(spec, find_target("sm_90"))
    described = describe(vmfb, source="a module")
    planned, strides = described.launches, host_calls.some_strides(spec)
    assert planned is not None
    for rows, launched in host_calls.asked(vmfb, described).items():
        sets = matrix.SOME_SETS.for_rows(int(rows)) if spec.weight_sets else None
        of_call = functools.partial(count_of, rows=int(rows), sets=sets, strides=strides)
        expected = [
            [each.kernel, [*map(of_call, each.workgroups)], [*map(of_call, each.constants)]]
            for each in planned.of(int(rows)).kernels
        ]
        kernels = [each for each in launched if each[0] not in ("fill", "write", "read")]
        assert [kernel[:3] for kernel in kernels] == expected, rows


@pytest.mark.drawn
@pytest.mark.parametrize("columns", [100, 128, 4096])
@pytest.mark.parametrize("op", OPS)
def test_accesses_are_as_wide_as_those_of_dense_rows(op: str, columns: int) -> None:
    """LLVM would access single elements, if it did not know that strides are whole accesses."""
    target = find_target("sm_90")
    spec = spec_of(op, columns, "bf16", strided_rows=True)
    how = schedules.choose(spec, target)
    narrow = []
    for each in (replace(spec, strided_rows=False), spec):
        vmfb, _ = compiler.build(each, target, schedule=how)
        (code,) = {export.code for export in exports(vmfb)}
        narrow.append(len(re.findall(rb"(?:ld|st)\.global\S*\.b16", code)))
        assert re.search(rb"global\S*\.v[24]\.b32", code)
    assert narrow[0] == narrow[1]


def test_scattered_calls_have_strides() -> None:
    """What the tests above rely on."""
    rng = random_generator()
    spec = spec_of("layer_norm_backward", 16, "f32", strided_rows=True)
    call = matrix.random_call(spec, 37, rng)
    counts, apart, wide_of_dense = set(), 0, 0
    for _ in range(300):
        strides = scattered(call, rng).strides
        assert strides is not None
        counts.add(strides.inner_count)
        apart += sum(
            strides.of(name) != (16 * strides.inner_count, 16) for name, _ in strides.given
        )
        is_dense = strides.of("input") == dense(strides.inner_count, 16)
        wide_of_dense += is_dense and min(strides.of("grad_input")) >= 2 * 16
    assert counts == {37, 2, 3, 7, 36}
    assert apart > 300
    assert wide_of_dense > 3
