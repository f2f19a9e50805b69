"""Kernels that are not ours, through the emulator: what IREE makes of small functions by itself."""

from __future__ import annotations

import numpy as np
import pytest
from iree.compiler.tools import compile_str
from support import random_generator

from iree_lnbwd.arguments import Array
from iree_lnbwd.emulator import Module, VmError
from iree_lnbwd.targets import find_target


def _compile(text: str, target: str = "sm_80") -> Module:
    flags = list(find_target(target).flags)
    return Module(compile_str(text, input_type="none", extra_args=flags), "cuda", lockstep=True)


def _call(module: Module, *arrays: Array) -> Array:
    (view,) = module.call("f", *(module.input(f"x{n}", x) for n, x in enumerate(arrays)))
    return module.read(view, np.dtype(np.float32))


def test_copies() -> None:
    module = _compile("""
func.func @f(%a: tensor<4xf32>, %b: tensor<8xf32>) -> tensor<12xf32> {
  %r = tensor.concat dim(0) %a, %b : (tensor<4xf32>, tensor<8xf32>) -> tensor<12xf32>
  return %r : tensor<12xf32>
}""")
    rng = random_generator()
    a, b = rng.standard_normal(4, np.float32), rng.standard_normal(8, np.float32)
    np.testing.assert_array_equal(_call(module, a, b), np.concatenate([a, b]))
    assert not module.launches


def test_fills() -> None:
    module = _compile("""
func.func @f(%a: tensor<4xf32>) -> tensor<4x9xf32> {
  %value = arith.constant 2.5 : f32
  %empty = tensor.empty() : tensor<4x9xf32>
  %filled = linalg.fill ins(%value : f32) outs(%empty : tensor<4x9xf32>) -> tensor<4x9xf32>
  %r = tensor.insert_slice %a into %filled[0, 3] [4, 1] [1, 1] : tensor<4xf32> into tensor<4x9xf32>
  return %r : tensor<4x9xf32>
}""")
    a = random_generator().standard_normal(4, np.float32)
    expected = np.full((4, 9), 2.5, np.float32)
    expected[:, 3] = a
    np.testing.assert_array_equal(_call(module, a), expected)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_rows_that_are_dynamic(rows: int) -> None:
    module = _compile("""
func.func @f(%a: tensor<?x100xf32>) -> tensor<?xf32> {
  %zero = arith.constant 0.0 : f32
  %c0 = arith.constant 0 : index
  %m = tensor.dim %a, %c0 : tensor<?x100xf32>
  %empty = tensor.empty(%m) : tensor<?xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<?xf32>) -> tensor<?xf32>
  %r = linalg.reduce { arith.addf } ins(%a : tensor<?x100xf32>) outs(%zeros : tensor<?xf32>)
    dimensions = [1]
  return %r : tensor<?xf32>
}""")
    a = random_generator().standard_normal((rows, 100), np.float32)
    np.testing.assert_allclose(_call(module, a), a.sum(axis=1), rtol=0, atol=1e-4)


def test_softmax() -> None:
    module = _compile("""
func.func @f(%a: tensor<7x64xf32>) -> tensor<7x64xf32> {
  %empty = tensor.empty() : tensor<7x64xf32>
  %r = linalg.softmax dimension(1) ins(%a : tensor<7x64xf32>) outs(%empty : tensor<7x64xf32>)
    -> tensor<7x64xf32>
  return %r : tensor<7x64xf32>
}""")
    a = random_generator().standard_normal((7, 64), np.float32)
    expected = np.exp(a) / np.exp(a).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(_call(module, a), expected, rtol=1e-5)


def test_matrix_product() -> None:
    module = _compile("""
func.func @f(%a: tensor<33x64xf32>, %b: tensor<64x48xf32>) -> tensor<33x48xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<33x48xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<33x48xf32>) -> tensor<33x48xf32>
  %r = linalg.matmul ins(%a, %b : tensor<33x64xf32>, tensor<64x48xf32>)
    outs(%zeros : tensor<33x48xf32>) -> tensor<33x48xf32>
  return %r : tensor<33x48xf32>
}""")
    rng = random_generator()
    a, b = rng.standard_normal((33, 64), np.float32), rng.standard_normal((64, 48), np.float32)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(_call(module, a, b), expected, rtol=0, atol=1e-3)


def test_constants() -> None:
    module = _compile("""
func.func @f(%a: tensor<8xf32>) -> tensor<8xf32> {
  %c = arith.constant dense<[1.0, -2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0]> : tensor<8xf32>
  %r = arith.addf %a, %c : tensor<8xf32>
  return %r : tensor<8xf32>
}""")
    a = random_generator().standard_normal(8, np.float32)
    expected = a + np.array([1, -2, 3, 4, 5, 6, 7, 9], np.float32)
    np.testing.assert_array_equal(_call(module, a), expected)


def test_arguments_that_do_not_fit() -> None:
    module = _compile("""
func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {
  %r = arith.addf %a, %a : tensor<4xf32>
  return %r : tensor<4xf32>
}""")
    with pytest.raises(VmError, match=r"input0: expected shape \(4,\) of type .*, got \(5,\)"):
        _call(module, np.zeros(5, np.float32))
    with pytest.raises(VmError, match="input0: expected shape"):
        _call(module, np.zeros(4))
    with pytest.raises(VmError, match="f: expected 1 arguments, got 0"):
        module.call("f")


def test_modules_for_another_gpu() -> None:
    flags = list(find_target("gfx942").flags)
    text = """
func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {
  %r = arith.addf %a, %a : tensor<4xf32>
  return %r : tensor<4xf32>
}"""
    vmfb = compile_str(text, input_type="none", extra_args=flags)
    with pytest.raises(VmError, match="not found or unavailable"):
        Module(vmfb, "cuda")
