"""Kernels that are not ours, through the emulator: what IREE makes of small functions by itself."""

from __future__ import annotations

import numpy as np
import pytest
from iree.compiler.tools import compile_str
from support import random_generator

from iree_lnbwd.emulator import Module, VmError
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array


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


def test_a_cluster_that_swaps_the_halves_of_rows() -> None:
    """Two workgroups to a row; each writes its half into the other's shared memory."""
    module = _compile(
        """
#layout = #hal.pipeline.layout<bindings = [
  #hal.pipeline.binding<storage_buffer>, #hal.pipeline.binding<storage_buffer>]>
#kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline
  workgroup_size = [32, 1, 1] subgroup_size = 32>
!rows = memref<3x2x32xf32, #hal.descriptor_type<storage_buffer>>
!half = memref<32xf32, #gpu.address_space<workgroup>>
hal.executable.source private @swap {
  hal.executable.export public @swap ordinal(0) layout(#layout)
      count(%device: !hal.device) -> (index, index, index) {
    %six = arith.constant 6 : index
    %one = arith.constant 1 : index
    hal.return %six, %one, %one : index, index, index
  }
  builtin.module {
    func.func @swap()
        attributes {translation_info = #kernel, nvvm.cluster_dim = array<i32: 2, 1, 1>} {
      %c0 = arith.constant 0 : index
      %c2 = arith.constant 2 : index
      %x = hal.interface.binding.subspan layout(#layout) binding(0) alignment(64) offset(%c0)
        : !rows
      %y = hal.interface.binding.subspan layout(#layout) binding(1) alignment(64) offset(%c0)
        : !rows
      %half = memref.alloc() : !half
      %t = gpu.thread_id x
      %workgroup = hal.interface.workgroup.id[0] : index
      %row = arith.divui %workgroup, %c2 : index
      %part = arith.remui %workgroup, %c2 : index
      %value = memref.load %x[%row, %part, %t] : !rows
      %rank = nvvm.read.ptx.sreg.cluster.ctarank : i32
      %one = arith.constant 1 : i32
      %other = arith.xori %rank, %one : i32
      %base = memref.extract_aligned_pointer_as_index %half : !half -> index
      %base_i32 = arith.index_cast %base : index to i32
      %t_i32 = arith.index_cast %t : index to i32
      %four = arith.constant 4 : i32
      %offset = arith.muli %t_i32, %four : i32
      %mine = arith.addi %base_i32, %offset : i32
      nvvm.cluster.arrive
      nvvm.cluster.wait
      %theirs = llvm.inline_asm has_side_effects "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r"
        %mine, %other : (i32, i32) -> i32
      llvm.inline_asm has_side_effects "st.shared::cluster.f32 [$0], $1;", "r,f,~{memory}"
        %theirs, %value : (i32, f32) -> ()
      nvvm.cluster.arrive
      nvvm.cluster.wait
      %got = memref.load %half[%t] : !half
      memref.store %got, %y[%row, %part, %t] : !rows
      return
    }
  }
}
func.func @f(%x: tensor<3x2x32xf32>) -> tensor<3x2x32xf32> {
  %y = flow.dispatch @swap::@swap(%x) : (tensor<3x2x32xf32>) -> tensor<3x2x32xf32>
  return %y : tensor<3x2x32xf32>
}""",
        "sm_90",
    )
    x = random_generator().standard_normal((3, 2, 32), np.float32)
    np.testing.assert_array_equal(_call(module, x), x[:, ::-1])
