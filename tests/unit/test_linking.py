"""Functions of ir/math/ in the place of their declarations."""

from __future__ import annotations

import re

import pytest
from iree.compiler.tools import compile_str

from iree_lnbwd.compiling import linking

LIBRARY = """\
!narrow = vector<8xbf16>
!wide = vector<8xf32>
// End of what is replaced.

// Twice a value.
func.func private @twice(%value: !narrow, %by: !wide) -> !narrow {
  %two = arith.addf %value, %value : !narrow
  return %two : !narrow
}

func.func private @same(%value: !wide) -> !wide {
  return %value : !wide
}
"""

KERNEL = """\
  builtin.module {
    func.func private @twice_of_x(!x, !acc) -> !x
    func.func private @twice_of_y(!y, !acc) -> !y
    func.func private @mine(%value: !x) -> !x {
      return %value : !x
    }
  }
"""
ALIASES = {"!x": "vector<4x!e>", "!y": "f64", "!acc": "vector<2xf32>", "!e": "f16"}


def as_named(name: str, _types: tuple[str, ...]) -> str:
    return name


def test_a_declaration_becomes_the_function_for_its_types() -> None:
    text = linking.link(KERNEL, ALIASES, linking.functions([LIBRARY]), as_named)
    assert "func.func private @twice_of_x(%value: vector<4xf16>, %by: vector<2xf32>)" in text
    assert "    %two = arith.addf %value, %value : f64\n" in text
    assert text.count("@twice") == 2
    assert "@mine(%value: !x) -> !x {" in text  # a function of the kernel's own
    header = "".join(f"{name} = {type_}\n" for name, type_ in reversed(ALIASES.items()))
    assert compile_str(header + text, extra_args=["--compile-to=input"])


def test_which_function_may_follow_from_the_types() -> None:
    seen = []

    def choose(name: str, types: tuple[str, ...]) -> str:
        seen.append((name, types))
        return "same" if types[0] == types[-1] else "twice"

    kernel = "  func.func private @cast_of_x(!x) -> !x\n"
    text = linking.link(kernel, ALIASES, linking.functions([LIBRARY]), choose)
    assert seen == [("cast", ("vector<4xf16>", "vector<4xf16>"))]
    assert text.startswith("  func.func private @cast_of_x(%value: vector<4xf16>)")


def test_a_function_that_there_is_not() -> None:
    with pytest.raises(KeyError, match="missing"):
        linking.link("func.func private @missing(!x) -> !x\n", ALIASES, {}, as_named)


@pytest.mark.parametrize(
    ("declared", "function"),
    [
        ("@same(!x, !x) -> !x", "same"),  # one type too many
        ("@twice(!x) -> !x", "twice"),  # one too few
        ("@same(!x) -> !y", "same"),  # two in the place of one
    ],
)
def test_as_many_types_as_the_function_has(declared: str, function: str) -> None:
    kernel = f"func.func private {declared}\n"
    with pytest.raises(ValueError, match=rf"^@{function}: expected types like \(!\w+"):
        linking.link(kernel, ALIASES, linking.functions([LIBRARY]), as_named)


def test_a_function_may_have_types_that_are_no_aliases_and_no_result() -> None:
    library = """\
func.func private @keep(%value: !narrow, %times: i32) {
  %words = vector.bitcast %value : !narrow to !words
  return
}
"""
    kernel = "  func.func private @keep_of_x(!x, i32)\n"
    text = linking.link(kernel, ALIASES, linking.functions([library]), as_named)
    assert "func.func private @keep_of_x(%value: vector<4xf16>, %times: i32) {" in text
    assert "vector<4xf16> to vector<2xi32>" in text


@pytest.mark.parametrize(
    ("vector", "bits"), [("vector<8xbf16>", 128), ("vector<1xf32>", 32), ("vector<2xf64>", 128)]
)
def test_bits_of_a_vector(vector: str, bits: int) -> None:
    assert linking.bits(vector) == bits


def test_several_results_and_a_call_of_the_copys_own_kind() -> None:
    """What a copy calls by ``_of_it`` has the name that tells the copy apart."""
    library = """\
func.func private @both(%value: !narrow, %k: index) -> (!narrow, index) {
  %two = func.call @twice_of_it(%value) : (!narrow) -> !narrow
  return %two, %k : !narrow, index
}
func.func private @twice(%value: !narrow) -> !narrow {
  %two = arith.addf %value, %value : !narrow
  return %two : !narrow
}
"""
    kernel = """\
func.func private @both_of_x(!x, index) -> (!x, index)
func.func private @twice_of_x(!x) -> !x
"""
    text = linking.link(kernel, ALIASES, linking.functions([library]), as_named)
    assert "@both_of_x(%value: vector<4xf16>, %k: index) -> (vector<4xf16>, index) {" in text
    assert "func.call @twice_of_x(%value)" in text
    assert compile_str(text, extra_args=["--compile-to=input"])
    other = kernel.replace("(!x, index)\n", "(!y, index)\n", 1)
    with pytest.raises(ValueError, match="expected types like"):
        linking.link(other, ALIASES, linking.functions([library]), as_named)


def test_a_copy_knows_how_many_elements_its_type_has() -> None:
    library = linking.functions(
        [
            "func.func private @number(%value: !chunk) -> !chunk {\n"
            "  %count = arith.constant #elements\n"
            "  return %value : !chunk\n"
            "}\n"
        ]
    )
    kernel = "func.func private @number_of_x(!x) -> !x\n"
    text = linking.link(kernel, {"!x": "vector<4xf32>"}, library, as_named)
    assert "%count = arith.constant 4 : index\n" in text


def test_two_functions_of_one_name() -> None:
    """The one of another part would be taken in silence."""
    with pytest.raises(ValueError, match="@twice: expected one function of that name, got two"):
        linking.functions([LIBRARY, LIBRARY])


NESTED = """\
func.func private @outer(%value: !narrow, %k: index) -> !narrow {
  %same = func.call @inner_of_it(%value) : (!narrow) -> !narrow
  func.call @nothing() : () -> ()
  return %same : !narrow
}
func.func private @inner(%value: !narrow) -> !narrow {
  %two = arith.addf %value, %value : !narrow
  return %two : !narrow
}
func.func private @nothing() {
  return
}
"""


def test_what_a_copy_calls_is_copied_for_the_types_of_the_call() -> None:
    """Once for each module of kernels, and not if the kernel has a function of that name."""
    kernel = """\
builtin.module {
  func.func private @outer_of_x(!x, index) -> !x
  func.func private @outer_of_y(!y, index) -> !y
}
builtin.module {
  func.func private @outer_of_x(!x, index) -> !x
  func.func private @nothing() {
    %mine = arith.constant 0 : index
    return
  }
}
"""
    text = linking.link(kernel, ALIASES, linking.functions([NESTED]), as_named)
    first, second = text.split("builtin.module {")[1:]
    assert "@inner_of_x(%value: vector<4xf16>) -> vector<4xf16> {" in first
    assert "@inner_of_y(%value: f64) -> f64 {" in first
    assert first.count("func.func private @nothing()") == 1
    assert second.count("func.func private @nothing()") == 1
    assert "%mine" in second
    assert compile_str(text, extra_args=["--compile-to=input"])


def test_a_function_that_mlir_does_not_inline_stands_where_it_is_called() -> None:
    """So does what calls it; each copy has names of its own."""
    library = """\
func.func private @twice(%memory: !narrow, %k: index) {
  %c1 = arith.constant 1 : index
  %next = arith.addi %k, %c1 : index
  func.call @copy(%memory, %k) : (!narrow, index) -> ()
  func.call @copy(%memory, %next) : (!narrow, index) -> ()
  return
}
func.func private @copy(%memory: !narrow, %at: index) {
  %group = "nvgpu.device_async_create_group"() : () -> !nvgpu.device.async.token
  %seen = arith.addi %at, %at : index
  return
}
"""
    kernel = """\
func.func private @twice(!x, index)
func.func @kernel(%memory: !x, %c1: index) {
  func.call @twice(%memory, %c1) : (!x, index) -> ()
  return
}
"""
    text = linking.link(kernel, ALIASES, linking.functions([library]), as_named)
    assert "func.call" not in text
    assert text.count("func.func") == 1
    assert text.count('"nvgpu.device_async_create_group"') == 2
    assert "arith.addi %c1, %c1 : index" in text  # the kernel's own %c1
    assert len(re.findall(r"(%\w+) = .nvgpu", text)) == len(
        set(re.findall(r"(%\w+) = .nvgpu", text))
    )
    header = "".join(f"{name} = {type_}\n" for name, type_ in reversed(ALIASES.items()))
    assert compile_str(header + text, extra_args=["--compile-to=input"])
