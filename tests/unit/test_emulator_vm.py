"""The interpreter of host programs against IREE's own virtual machine, on the same bytecode."""

from __future__ import annotations

import functools
import re
import struct

import iree.runtime as rt
import numpy as np
import pytest
from iree.compiler.tools import compile_str
from support import random_generator

from iree_lnbwd.emulator import vm
from iree_lnbwd.emulator.vm import Program, VmError, disassemble

_OPERATIONS = {
    "add": "arith.addi",
    "sub": "arith.subi",
    "mul": "arith.muli",
    "divs": "arith.divsi",
    "divu": "arith.divui",
    "rems": "arith.remsi",
    "remu": "arith.remui",
    "mins": "arith.minsi",
    "minu": "arith.minui",
    "maxs": "arith.maxsi",
    "maxu": "arith.maxui",
    "and": "arith.andi",
    "or": "arith.ori",
    "xor": "arith.xori",
    "shl": "arith.shli",
    "shrs": "arith.shrsi",
    "shru": "arith.shrui",
}
_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")

Machine = tuple[rt.VmContext, rt.VmModule]


def _source() -> str:
    functions = []
    for bits in (32, 64):
        for name, operation in _OPERATIONS.items():
            functions.append(f"""
  func.func @{name}{bits}(%a: i{bits}, %b: i{bits}) -> i{bits} {{
    %r = {operation} %a, %b : i{bits}
    return %r : i{bits}
  }}""")
        for predicate in _PREDICATES:
            functions.append(f"""
  func.func @{predicate}{bits}(%a: i{bits}, %b: i{bits}) -> i{bits} {{
    %p = arith.cmpi {predicate}, %a, %b : i{bits}
    %r = arith.select %p, %a, %b : i{bits}
    return %r : i{bits}
  }}""")
    return f"""module @host {{{"".join(functions)}
  func.func @widen_signed(%a: i32) -> i64 {{
    %r = arith.extsi %a : i32 to i64
    return %r : i64
  }}
  func.func @widen_unsigned(%a: i32) -> i64 {{
    %r = arith.extui %a : i32 to i64
    return %r : i64
  }}
  func.func @narrow(%a: i64) -> i32 {{
    %r = arith.trunci %a : i64 to i32
    return %r : i32
  }}
  func.func @rows_of_workgroup(%m: i64, %p: i64) -> i64 {{
    %r = arith.ceildivsi %m, %p : i64
    return %r : i64
  }}
  func.func @loop(%n: i32, %x: i64) -> (i64, i32) {{
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %s, %i = scf.while (%acc = %x, %k = %c0) : (i64, i32) -> (i64, i32) {{
      %more = arith.cmpi slt, %k, %n : i32
      scf.condition(%more) %acc, %k : i64, i32
    }} do {{
    ^bb0(%acc: i64, %k: i32):
      %twice = func.call @mixed(%acc, %k) : (i64, i32) -> i64
      %next = arith.addi %k, %c1 : i32
      scf.yield %twice, %next : i64, i32
    }}
    return %s, %i : i64, i32
  }}
  func.func @forever(%n: i32) -> i32 {{
    %c1 = arith.constant 1 : i32
    %r = scf.while (%k = %n) : (i32) -> i32 {{
      %odd = arith.ori %k, %c1 : i32
      %more = arith.cmpi ne, %odd, %n : i32
      scf.condition(%more) %odd : i32
    }} do {{
    ^bb0(%k: i32):
      %next = func.call @inner(%k) : (i32) -> i32
      scf.yield %next : i32
    }}
    return %r : i32
  }}
  func.func @outer(%a: i32) -> i32 {{
    %r = func.call @inner(%a) : (i32) -> i32
    return %r : i32
  }}
  func.func private @inner(%a: i32) -> i32 attributes {{noinline}} {{
    %c2 = arith.constant 2 : i32
    %r = arith.muli %a, %c2 : i32
    return %r : i32
  }}
  func.func private @mixed(%a: i64, %k: i32) -> i64 attributes {{noinline}} {{
    %w = arith.extsi %k : i32 to i64
    %b = arith.muli %a, %a : i64
    %r = arith.addi %b, %w : i64
    return %r : i64
  }}
}}
"""


@functools.cache
def _module() -> bytes:
    flags = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=vmvx"]
    vmfb: bytes = compile_str(_source(), input_type="none", extra_args=flags)
    return vmfb


@pytest.fixture(scope="module")
def program() -> Program:
    return Program(_module(), {})


@pytest.fixture(scope="module")
def machine() -> Machine:
    instance = rt.VmInstance()
    module = rt.VmModule.copy_buffer(instance, _module())
    return rt.VmContext(instance, modules=[module]), module


def _by_iree(machine: Machine, name: str, *values: int) -> list[int]:
    context, module = machine
    arguments, results = rt.VmVariantList(len(values)), rt.VmVariantList(2)
    for value in values:
        arguments.push_int(value)
    context.invoke(module.lookup_function(name), arguments, results)
    return [results.get_variant(n) for n in range(len(results))]


def _numbers(rng: np.random.Generator, bits: int, count: int) -> list[int]:
    random = rng.integers(-(1 << bits - 1), (1 << bits - 1) - 1, count).tolist()
    edges = [0, 1, -1, 7, (1 << bits - 1) - 1, -(1 << bits - 1) + 1]
    return [int(n) for n in [*random, *edges]]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", [*_OPERATIONS, *_PREDICATES])
def test_arithmetic(name: str, bits: int, program: Program, machine: Machine) -> None:
    rng = random_generator()
    mask = (1 << bits) - 1
    second = _numbers(rng, bits, 20)
    if name.startswith(("div", "rem")):
        second = [n or 3 for n in second]
    if name.startswith("sh"):
        second = [n % bits for n in second]
    for a, b in zip(_numbers(rng, bits, 20), rng.permutation(second).tolist(), strict=True):
        (expected,) = _by_iree(machine, f"{name}{bits}", a, b)
        assert program.call(f"{name}{bits}", a & mask, b & mask) == (expected & mask,), (a, b)


def test_conversions(program: Program, machine: Machine) -> None:
    for a in _numbers(random_generator(), 32, 20):
        for name in ("widen_signed", "widen_unsigned"):
            (expected,) = _by_iree(machine, name, a)
            assert program.call(name, a & 0xFFFFFFFF) == (expected & (1 << 64) - 1,)
    for a in _numbers(random_generator(), 64, 20):
        (expected,) = _by_iree(machine, "narrow", a)
        assert program.call("narrow", a & (1 << 64) - 1) == (expected & 0xFFFFFFFF,)


def test_loops_and_calls(program: Program, machine: Machine) -> None:
    for n in (0, 1, 5, 40):
        total, count = _by_iree(machine, "loop", n, 3)
        assert program.call("loop", n, 3) == (total & (1 << 64) - 1, count)


@pytest.mark.drawn
def test_a_program_that_does_not_end(program: Program) -> None:
    with pytest.raises(VmError, match="the host program does not end: 262144 steps were made"):
        program.call("forever", 2)
    # Each call has as many steps as the first.
    assert program.call("outer", 21) == (42,)


def test_functions_that_call_themselves() -> None:
    """No compiler makes that of a program: an ordinal in the bytecode is changed."""
    whole = _module()
    text = disassemble(whole)
    calls = re.findall(r"vm\.call @host:(\d+)\(%i0\)", text)
    inner = int(calls[-1])
    exported = [line for line in text.splitlines() if line.startswith(("vm.func", "vm.export"))]
    functions = [line for line in exported if line.startswith("vm.func")]
    outer = next(n for n, line in enumerate(functions) if line.startswith("vm.func @outer("))
    for place in re.finditer(re.escape(struct.pack("<I", inner)), whole):
        changed = whole[: place.start()] + struct.pack("<I", outer) + whole[place.end() :]
        try:
            found = re.search(r"vm\.func @outer.*?\n\}", disassemble(changed), re.DOTALL)
        except VmError:
            continue
        if found is not None and f"@host:{outer}(" in found[0]:
            with pytest.raises(VmError, match="outer: more than 64 calls inside each other"):
                Program(changed, {}).call("outer", 1)
            return
    pytest.fail("no place of the bytecode is the call of a function")


def test_what_has_no_result(program: Program) -> None:
    for name in ("divs32", "divu64", "rems64", "remu32"):
        with pytest.raises(VmError, match=r"vm\.(div|rem)\.i\d\d.*: ZeroDivisionError"):
            program.call(name, 7, 0)


def test_shifts_by_more_than_there_are_bits(program: Program, machine: Machine) -> None:
    """As on the CPU that runs IREE; an integer of 2^32 bits would not fit a machine."""
    for name, bits in (("shl32", 32), ("shrs64", 64)):
        (expected,) = _by_iree(machine, name, 5, bits + 1)
        assert program.call(name, 5, bits + 1) == (expected & (1 << bits) - 1,)
    assert program.call("shl32", 5, (1 << 32) - 1) == (5 << 31 & 0xFFFFFFFF,)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("%i1 = vm.add.i32 %i0, %i1", "%i1 = vm.add.i32 %i0, %i9", "%i9 is read and was never"),
        ("%i1 = vm.add.i32 %i0, %i1", "%i1 = vm.add.i32 %i0", "ValueError: not enough values"),
        ("%i1 = vm.add.i32 %i0, %i1", "%i1 = vm.frob.i32 %i0, %i1", "unknown instruction vm.frob"),
        ("%i1 = vm.add.i32 %i0, %i1", "%r1 = vm.const.ref.rodata 7 x", "KeyError: 7"),
        ("%i1 = vm.add.i32 %i0, %i1", "vm.br ^bb7()", r"add32: a jump to \^bb7, which it does not"),
        ("%i1 = vm.add.i32 %i0, %i1", "vm.br bb7", "unknown jump: bb7"),
        ("%i1 = vm.add.i32 %i0, %i1", "vm.cond_br %i0, ^bb0()", "ValueError: not enough values"),
        ("%i1 = vm.add.i32 %i0, %i1", "%i1 = vm.call @host:99(%i0)", "which the module does not"),
        ("%i1 = vm.add.i32 %i0, %i1", "%i1 = vm.call @host:1()", "ValueError: zip"),
        ("%i1 = vm.add.i32 %i0, %i1", "vm.call", "unknown call: vm.call"),
    ],
)
def test_programs_that_make_no_sense(
    before: str, after: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IREE's own verifier lets none of these pass; what it says of them is what is read here."""
    text = disassemble(_module()).replace(before, after)
    monkeypatch.setattr(vm, "disassemble", lambda vmfb: text)
    assert after in text
    with pytest.raises(VmError, match=message):
        Program(b"", {}).call("add32", 1, 2)


def test_what_is_not_there(program: Program) -> None:
    assert "loop" in program.functions
    with pytest.raises(VmError, match="no function nothing; the module has"):
        program.call("nothing")
    with pytest.raises(VmError, match="loop: expected 2 arguments, got 1"):
        program.call("loop", 1)
    with pytest.raises(VmError, match="iree-dump-module failed"):
        Program(b"no module", {})
