"""What the emulator does not know of a module is said before anything runs."""

from __future__ import annotations

import functools
import re

import pytest
from iree.compiler.tools import compile_str

from iree_lnbwd.compiling import compiler
from iree_lnbwd.emulator import Fault, Module, PtxError, unsupported
from iree_lnbwd.hardware.targets import find_target, targets
from iree_lnbwd.ops.spec import NormSpec

PRODUCT = """
func.func @f(%a: tensor<64x64xf16>, %b: tensor<64x64xf16>) -> tensor<64x64xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<64x64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
  %r = linalg.matmul ins(%a, %b : tensor<64x64xf16>, tensor<64x64xf16>)
    outs(%zeros : tensor<64x64xf32>) -> tensor<64x64xf32>
  return %r : tensor<64x64xf32>
}"""
# Every thread adds one to the same number.
COUNTED = """
#layout = #hal.pipeline.layout<bindings = [#hal.pipeline.binding<storage_buffer>]>
#none = #iree_codegen.no_pipeline
#how = #iree_codegen.translation_info<pipeline = #none workgroup_size = [64, 1, 1]>
hal.executable.source private @counted {
  hal.executable.export public @counted ordinal(0) layout(#layout)
      count(%device: !hal.device) -> (index, index, index) {
    %c1 = arith.constant 1 : index
    hal.return %c1, %c1, %c1 : index, index, index
  }
  builtin.module {
    func.func @counted() attributes {translation_info = #how} {
      %c0 = arith.constant 0 : index
      %one = arith.constant 1 : i32
      %out = hal.interface.binding.subspan layout(#layout) binding(0) alignment(64) offset(%c0)
          : memref<1xi32>
      %old = memref.atomic_rmw addi %one, %out[%c0] : (i32, memref<1xi32>) -> i32
      return
    }
  }
}
func.func @f(%a: tensor<1xi32>) -> tensor<1xi32> {
  %r = flow.dispatch @counted::@counted(%a) : (tensor<1xi32>) -> %a
  return %r : tensor<1xi32>
}"""


def built(text: str, target: str) -> bytes:
    flags = list(find_target(target).flags)
    vmfb: bytes = compile_str(text, input_type="none", extra_args=flags)
    return vmfb


@functools.cache
def ours(target: str) -> bytes:
    return compiler.build(NormSpec((64,), "bf16"), find_target(target))[0]


@pytest.mark.drawn
@pytest.mark.parametrize("target", [t.name for t in targets() if t.backend != "cpu"])
def test_all_of_ours_is_known(target: str) -> None:
    assert unsupported(ours(target), find_target(target).backend) == []


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("text", "target", "instruction"),
    [
        (PRODUCT, "gfx90a", "unknown_vop3p"),
        (PRODUCT, "gfx942", "unknown_vop3p"),
        (PRODUCT, "gfx1100", "unknown_vop3p"),
        (PRODUCT, "gfx1201", "unknown_vop3p"),
        (COUNTED, "sm_80", r"atom\.|red\."),
        (COUNTED, "gfx942", "unknown_flat"),
        (COUNTED, "gfx1100", "unknown_flat"),
        (COUNTED, "gfx1201", "unknown_vflat"),
    ],
)
def test_tensor_cores_and_atomics(text: str, target: str, instruction: str) -> None:
    """One of each kernel, with its line; and what is listed is all that is wrong with it."""
    vmfb, backend = built(text, target), find_target(target).backend
    found = unsupported(vmfb, backend)
    assert found
    for one in found:
        assert one.line > 0
        assert re.match(instruction, one.text), one
        assert str(one).startswith(f"kernel {one.kernel}, line {one.line}: {one.text}: ")
    if backend == "rocm":
        with pytest.raises(Fault, match="number not known"):
            Module(vmfb, backend)


EDITS = {
    "sm_90": (r"(\n\s*)ret;", r"\1frob.b32 %r1, %r2;\1ret;", "frob.b32 %r1, %r2", "unknown instr"),
    "gfx942": (
        r"(\n\t)s_endpgm",
        r"\1v_frob_b32 v1, v2\1s_endpgm",
        "v_frob_b32 v1, v2",
        "not known",
    ),
}


@pytest.mark.parametrize("target", EDITS)
def test_an_instruction_that_there_is_not(target: str) -> None:
    """In every kernel, in each place, whether or not a thread would come there."""
    pattern, put, text, why = EDITS[target]
    texts: list[str] = []

    def edit(kernels: str) -> str:
        changed, count = re.subn(pattern, put, kernels)
        changed, more = re.subn(
            rf"{pattern}", rf"\g<0>\g<1>{text}{';' * (target[0] == 's')}", changed
        )
        assert count
        assert more == count
        texts.append(changed)
        return changed

    found = unsupported(ours(target), find_target(target).backend, edit=edit)
    lines = texts[0].splitlines()
    assert [one.line for one in found if one.kernel == found[0].kernel]
    assert len(found) == sum(line.strip().rstrip(";") == text for line in lines)
    for one in found:
        assert lines[one.line - 1].strip().rstrip(";") == text == one.text
        assert why in one.why
    assert {one.kernel for one in found} == {"rows", "finalize", "few_rows"}


@pytest.mark.parametrize(
    ("target", "old", "new", "why"),
    [
        ("sm_90", ".maxntid", ".explicitcluster\n.maxntid", "unknown directives .explicitcluster"),
        (
            "gfx942",
            ".amdhsa_float_denorm_mode_32 3",
            ".amdhsa_float_denorm_mode_32 0",
            ".amdhsa_float_denorm_mode_32 0: only 3 is known",
        ),
    ],
)
def test_how_a_kernel_is_launched(target: str, old: str, new: str, why: str) -> None:
    texts: list[str] = []

    def edit(text: str) -> str:
        texts.append(text)
        return text.replace(old, new)

    found = unsupported(ours(target), find_target(target).backend, edit=edit)
    assert all(old in text for text in texts)
    assert {(one.kernel, one.line, one.why) for one in found} == {
        (kernel, 0, why) for kernel in ("rows", "finalize", "few_rows")
    }


def test_what_is_no_module_for_the_backend() -> None:
    with pytest.raises(ValueError, match="backend: there is no emulator for 'vulkan'"):
        unsupported(ours("sm_90"), "vulkan")
    assert unsupported(ours("sm_90"), "rocm") == []
    with pytest.raises(PtxError, match="does not say what it is for"):
        unsupported(ours("sm_90"), "cuda", edit=lambda text: text.replace(".target", ".tarjet"))
