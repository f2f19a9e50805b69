"""The interpreter of host programs against IREE's own virtual machine, on the same bytecode."""

from __future__ import annotations

import functools

import iree.runtime as rt
import numpy as np
import pytest
from iree.compiler.tools import compile_str
from support import random_generator

from iree_lnbwd.emulator.vm import Program, VmError

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


def test_what_is_not_there(program: Program) -> None:
    assert "loop" in program.functions
    with pytest.raises(VmError, match="no function nothing; the module has"):
        program.call("nothing")
    with pytest.raises(VmError, match="loop: expected 2 arguments, got 1"):
        program.call("loop", 1)
    with pytest.raises(VmError, match="iree-dump-module failed"):
        Program(b"no module", {})
