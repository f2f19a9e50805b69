"""Modules that are not ours, on each instruction set: what functions take and give, and scratch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from iree.compiler.tools import compile_str
from support import random_generator

from iree_lnbwd.emulator import Module, VmError
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array

TARGETS = ("sm_80", "gfx90a", "gfx942", "gfx1100", "gfx1201")


def load(text: str, target: str) -> Module:
    found = find_target(target)
    flags = ["--iree-input-demote-f64-to-f32=false", *found.flags]
    vmfb = compile_str(text, input_type="none", extra_args=flags)
    return Module(vmfb, found.backend, lockstep=True)


# Three results in another order than the arguments that they come from, of lengths of their own.
SEVERAL = """
#rows = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (j)>
#all = affine_map<(i) -> (i)>
func.func @f(%b: tensor<?x9xf32>, %a: tensor<9xf32>, %c: tensor<?xi32>)
    -> (tensor<?xi32>, tensor<?x9xf32>, tensor<9xf32>) {
  %c0 = arith.constant 0 : index
  %m = tensor.dim %b, %c0 : tensor<?x9xf32>
  %n = tensor.dim %c, %c0 : tensor<?xi32>
  %of_sums = tensor.empty(%m) : tensor<?x9xf32>
  %sums = linalg.generic {indexing_maps = [#rows, #row, #rows],
      iterator_types = ["parallel", "parallel"]}
      ins(%b, %a : tensor<?x9xf32>, tensor<9xf32>) outs(%of_sums : tensor<?x9xf32>) {
    ^bb0(%x: f32, %y: f32, %old: f32):
      %sum = arith.addf %x, %y : f32
      linalg.yield %sum : f32
  } -> tensor<?x9xf32>
  %of_squares = tensor.empty(%n) : tensor<?xi32>
  %squares = linalg.generic {indexing_maps = [#all, #all], iterator_types = ["parallel"]}
      ins(%c : tensor<?xi32>) outs(%of_squares : tensor<?xi32>) {
    ^bb0(%x: i32, %old: i32):
      %square = arith.muli %x, %x : i32
      linalg.yield %square : i32
  } -> tensor<?xi32>
  %doubled = arith.addf %a, %a : tensor<9xf32>
  return %squares, %sums, %doubled : tensor<?xi32>, tensor<?x9xf32>, tensor<9xf32>
}"""


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
def test_several_results(target: str) -> None:
    """Also of nothing: what has no elements is given, and comes back."""
    module = load(SEVERAL, target)
    rng = random_generator()
    a = rng.standard_normal(9, np.float32)
    for rows, count in ((4, 6), (0, 70), (33, 0), (0, 0)):
        b, c = rng.standard_normal((rows, 9), np.float32), rng.integers(-9, 9, count, np.int32)
        views = module.call("f", module.input("b", b), module.input("a", a), module.input("c", c))
        kinds = (np.int32, np.float32, np.float32)
        squares, sums, doubled = (
            module.read(view, np.dtype(kind)) for view, kind in zip(views, kinds, strict=True)
        )
        np.testing.assert_array_equal(squares, c * c)
        np.testing.assert_array_equal(sums, b + a)
        np.testing.assert_array_equal(doubled, a + a)


SCALARS = """
#all = affine_map<(i) -> (i)>
func.func @f(%n: i32, %a: tensor<?xf32>, %s: f32, %w: i64)
    -> (tensor<?xf32>, i64, index, f32, i32) {
  %c0 = arith.constant 0 : index
  %m = tensor.dim %a, %c0 : tensor<?xf32>
  %n_f32 = arith.sitofp %n : i32 to f32
  %w_f32 = arith.sitofp %w : i64 to f32
  %empty = tensor.empty(%m) : tensor<?xf32>
  %r = linalg.generic {indexing_maps = [#all, #all], iterator_types = ["parallel"]}
      ins(%a : tensor<?xf32>) outs(%empty : tensor<?xf32>) {
    ^bb0(%x: f32, %old: f32):
      %scaled = arith.mulf %x, %s : f32
      %more = arith.addf %scaled, %n_f32 : f32
      %most = arith.addf %more, %w_f32 : f32
      linalg.yield %most : f32
  } -> tensor<?xf32>
  %w2 = arith.addi %w, %w : i64
  %s2 = arith.mulf %s, %s : f32
  %n2 = arith.addi %n, %n : i32
  return %r, %w2, %m, %s2, %n2 : tensor<?xf32>, i64, index, f32, i32
}"""


@pytest.mark.parametrize("target", TARGETS)
def test_scalars(target: str) -> None:
    """They come to kernels as constants, a 64-bit one as two; and back as numbers."""
    module = load(SCALARS, target)
    a = np.arange(70, dtype=np.float32)
    n, s, w = -3, 0.1, -(1 << 40)
    view, *numbers = module.call("f", n, module.input("a", a), s, w)
    expected = a * np.float32(s) + np.float32(n) + np.float32(w)
    np.testing.assert_array_equal(module.read(view, np.dtype(np.float32)), expected)
    square = float(np.float32(s) * np.float32(s))
    assert numbers == [2 * w & (1 << 64) - 1, 70, square, 2 * n & (1 << 32) - 1]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((3, 4.0, 0.5, 7), "f: argument 1: expected a tensor, got 4.0"),
        ((3.5, None, 0.5, 7), "f: argument 0: expected a number of the type i32, got 3.5"),
        (
            (1 << 32, None, 0.5, 7),
            "f: argument 0: expected a number of the type i32, got 4294967296",
        ),
        ((3, None, "0.5", 7), "f: argument 2: expected a number of the type f32, got str"),
        ((3, None, 0.5), "f: expected 4 arguments, got 3"),
    ],
)
def test_scalars_that_do_not_fit(arguments: tuple[object, ...], what: str) -> None:
    module = load(SCALARS, "sm_80")
    view = module.input("a", np.zeros(4, np.float32))
    given = [view if argument is None else argument for argument in arguments]
    with pytest.raises(VmError, match=what):
        module.call("f", *given)  # type: ignore[arg-type]


ELEMENTS: dict[str, tuple[str, np.dtype[np.generic], str]] = {
    "i8": ("arith.addi", np.dtype(np.int8), "add"),
    "i1": ("arith.ori", np.dtype(np.bool_), "logical_or"),
    "i16": ("arith.addi", np.dtype(np.uint16), "add"),
    "i64": ("arith.muli", np.dtype(np.int64), "multiply"),
    "f16": ("arith.addf", np.dtype(np.float16), "add"),
    "bf16": ("arith.addf", np.dtype(ml_dtypes.bfloat16), "add"),
    "f64": ("arith.mulf", np.dtype(np.float64), "multiply"),
}


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
def test_element_types(target: str) -> None:
    """Functions of a module, one for each type."""
    functions = (
        f"func.func @f_{name}(%a: tensor<?x{name}>, %b: tensor<?x{name}>) -> tensor<?x{name}> {{\n"
        f"  %r = {operation} %a, %b : tensor<?x{name}>\n  return %r : tensor<?x{name}>\n}}\n"
        for name, (operation, _, _) in ELEMENTS.items()
    )
    module = load("\n".join(functions), target)
    assert set(module.functions) == {f"f_{name}" for name in ELEMENTS}
    for name, (_, dtype, function) in ELEMENTS.items():
        a, b = (random_generator().integers(0, 20, 70).astype(dtype) for _ in range(2))
        (view,) = module.call(f"f_{name}", module.input("a", a), module.input("b", b))
        np.testing.assert_array_equal(module.read(view, dtype), getattr(np, function)(a, b))


OUTPUTS = """
func.func @f(%second: tensor<4x5xf32> {iree.abi.output = 1 : index}, %a: tensor<4x5xf32>,
    %first: tensor<4x5xf32> {iree.abi.output = 0 : index})
    -> (tensor<4x5xf32>, tensor<4x5xf32>) {
  %sum = arith.addf %a, %a : tensor<4x5xf32>
  %square = arith.mulf %a, %a : tensor<4x5xf32>
  return %sum, %square : tensor<4x5xf32>, tensor<4x5xf32>
}"""


@pytest.mark.parametrize("target", TARGETS)
def test_storage_of_the_callers_in_any_order(target: str) -> None:
    module = load(OUTPUTS, target)
    a = random_generator().standard_normal((4, 5), np.float32)
    kind = np.dtype(np.float32)
    first, second = (module.output(name, (4, 5), kind) for name in ("first", "second"))
    views = module.call("f", second, module.input("a", a), first)
    assert len(views) == 2
    np.testing.assert_array_equal(module.read(first, kind), a + a)
    np.testing.assert_array_equal(module.read(second, kind), a * a)


@pytest.mark.parametrize("target", TARGETS)
def test_a_tensor_of_one_number(target: str) -> None:
    """Its kernel has workgroups of one thread."""
    module = load(
        """
func.func @f(%a: tensor<f64>) -> tensor<f64> {
  %r = arith.addf %a, %a : tensor<f64>
  return %r : tensor<f64>
}""",
        target,
    )
    (view,) = module.call("f", module.input("a", np.array(0.1)))
    assert view.shape == ()
    assert module.read(view, np.dtype(np.float64)) == 0.2


COUNTS = """
func.func @f(%a: tensor<128xi32>) -> (tensor<128xi32>, tensor<128xi32>, tensor<128xi32>) {
  %leading = math.ctlz %a : tensor<128xi32>
  %trailing = math.cttz %a : tensor<128xi32>
  %ones = math.ctpop %a : tensor<128xi32>
  return %leading, %trailing, %ones : tensor<128xi32>, tensor<128xi32>, tensor<128xi32>
}"""


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
def test_counts_of_bits(target: str) -> None:
    module = load(COUNTS, target)
    a = (
        random_generator().integers(0, 1 << 32, 128, np.uint32)
        >> np.arange(128, dtype=np.uint32) % 32
    )
    a[:3] = 0, 1, 1 << 31
    views = module.call("f", module.input("a", a))
    leading, trailing, ones = (module.read(view, np.dtype(np.int32)).tolist() for view in views)
    numbers = a.tolist()
    assert leading == [32 - x.bit_length() for x in numbers]
    assert trailing == [(x & -x).bit_length() - 1 if x else 32 for x in numbers]
    assert ones == [x.bit_count() for x in numbers]


# Each thread turns a row by its number, in memory of its own.
TURNED = """
#layout = #hal.pipeline.layout<bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>, #hal.pipeline.binding<storage_buffer>]>
#none = #iree_codegen.no_pipeline
#how = #iree_codegen.translation_info<pipeline = #none workgroup_size = [64, 1, 1]>
#own = #gpu.address_space<private>
hal.executable.source private @turned {
  hal.executable.export public @turned ordinal(0) layout(#layout)
      count(%device: !hal.device) -> (index, index, index) {
    %c1 = arith.constant 1 : index
    %c2 = arith.constant 2 : index
    hal.return %c2, %c1, %c1 : index, index, index
  }
  builtin.module {
    func.func @turned() attributes {translation_info = #how} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %c64 = arith.constant 64 : index
      %c511 = arith.constant 511 : index
      %c512 = arith.constant 512 : index
      %given = hal.interface.binding.subspan layout(#layout) binding(0) alignment(64) offset(%c0)
          flags(ReadOnly) : memref<128x512xf32>
      %out = hal.interface.binding.subspan layout(#layout) binding(1) alignment(64) offset(%c0)
          : memref<128x512xf32>
      %thread = gpu.thread_id x
      %workgroup = hal.interface.workgroup.id[0] : index
      %first = arith.muli %workgroup, %c64 : index
      %row = arith.addi %first, %thread : index
      %scratch = memref.alloca() : memref<512xf32, #own>
      scf.for %i = %c0 to %c512 step %c1 {
        %v = memref.load %given[%row, %i] : memref<128x512xf32>
        %j = arith.addi %row, %i : index
        %k = arith.andi %j, %c511 : index
        memref.store %v, %scratch[%k] : memref<512xf32, #own>
      }
      scf.for %i = %c0 to %c512 step %c1 {
        %v = memref.load %scratch[%i] : memref<512xf32, #own>
        memref.store %v, %out[%row, %i] : memref<128x512xf32>
      }
      return
    }
  }
}
func.func @f(%a: tensor<128x512xf32>) -> tensor<128x512xf32> {
  %r = flow.dispatch @turned::@turned(%a) : (tensor<128x512xf32>) -> tensor<128x512xf32>
  return %r : tensor<128x512xf32>
}"""


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
def test_scratch(target: str) -> None:
    module = load(TURNED, target)
    a: Array = random_generator().standard_normal((128, 512), np.float32)
    (view,) = module.call("f", module.input("a", a))
    expected = np.stack([np.roll(row, n) for n, row in enumerate(a)])
    np.testing.assert_array_equal(module.read(view, np.dtype(np.float32)), expected)
