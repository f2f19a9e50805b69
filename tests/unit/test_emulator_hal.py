"""What a host program asks of the emulated GPU, and must not get."""

from __future__ import annotations

import numpy as np
import pytest
from iree.compiler.tools import compile_str

from iree_lnbwd.emulator import Fault, GlobalMemory, Module, PtxExecutor, VmError, vm
from iree_lnbwd.emulator.hal import Hal, Span
from iree_lnbwd.emulator.vm import Imports, Steps
from iree_lnbwd.hardware.targets import find_target

_WHOLE = (1 << 64) - 1


@pytest.fixture
def hal() -> Hal:
    memory = GlobalMemory()
    return Hal(memory, "cuda-nvptx-fb", lambda _, code: PtxExecutor(code.decode()), Steps())


@pytest.fixture
def imports(hal: Hal) -> Imports:
    return hal.imports


def _span(hal: Hal, nbytes: int = 64) -> Span:
    data = np.arange(nbytes, dtype=np.uint8)
    return Span(hal.memory.allocate("buffer", nbytes, data=data), 0, nbytes)


def test_pieces_of_buffers(hal: Hal, imports: Imports) -> None:
    subspan = imports["hal.buffer.subspan"]
    span = _span(hal)
    assert subspan(span, 60, 4).length == 4
    assert subspan(span, 60, _WHOLE).length == 4
    assert subspan(span, 64, _WHOLE).length == 0
    for offset, length in ((60, 5), (65, 0), (65, _WHOLE), (1 << 60, _WHOLE), (0, 1 << 60)):
        with pytest.raises(VmError, match=f"bytes {offset} to .* of a piece of buffer that has 64"):
            subspan(span, offset, length)


def _fill(imports: Imports, span: Span, length: int, width: int) -> None:
    imports["hal.device.queue.fill"](None, 0, None, None, span, 0, length, 0x0403020100, width, 0)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_fills(width: int, hal: Hal, imports: Imports) -> None:
    span = _span(hal)
    _fill(imports, span, 48, width)
    pattern = bytes.fromhex("0001020304000000")[:width]
    assert hal.memory.read(span.buffer, 0, 48).tobytes() == pattern * (48 // width)


@pytest.mark.parametrize(("length", "width"), [(64, 0), (64, 3), (64, 16), (63, 2), (4, 8)])
def test_fills_with_a_strange_pattern(length: int, width: int, hal: Hal, imports: Imports) -> None:
    with pytest.raises(VmError, match=f"a fill of {length} bytes with a pattern of {width}"):
        _fill(imports, _span(hal), length, width)


def test_updates_with_more_than_there_is(hal: Hal, imports: Imports) -> None:
    update = imports["hal.device.queue.update"]
    span = _span(hal)
    update(None, 0, None, None, b"12345678", 4, span, 0, 4, 0)
    assert hal.memory.read(span.buffer, 0, 4).tobytes() == b"5678"
    with pytest.raises(VmError, match="an update with bytes 4 to 12 of 8"):
        update(None, 0, None, None, b"12345678", 4, span, 0, 8, 0)


def test_buffers_that_are_given_back_twice(hal: Hal, imports: Imports) -> None:
    span = imports["hal.allocator.allocate"](None, 0, 0, 0, 64)
    release = imports["hal.device.queue.dealloca"]
    release(None, 0, None, None, span, 0)
    with pytest.raises(Fault, match="transient 1 is used, which was given back"):
        release(None, 0, None, None, span, 0)
    with pytest.raises(Fault, match="transient 1 is used, which was given back"):
        _fill(imports, span, 64, 4)


def test_commands_are_steps_of_the_program(
    hal: Hal, imports: Imports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of a few steps may execute many commands many times."""
    monkeypatch.setattr(vm, "_MOST_STEPS", 100)
    hal._steps.begin()
    commands = imports["hal.command_buffer.create"]()
    for _ in range(30):
        imports["hal.command_buffer.execution_barrier"](commands, 0, 0, 0)
    execute = imports["hal.device.queue.execute"]
    for _ in range(3):
        execute(None, 0, None, None, commands)
    with pytest.raises(VmError, match="the host program does not end: 100 steps were made"):
        execute(None, 0, None, None, commands)


def test_what_is_moved_takes_steps(
    hal: Hal, imports: Imports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vm, "_MOST_STEPS", 100)
    hal._steps.begin()
    span = _span(hal, 1 << 20)
    for _ in range(6):  # of 16 steps each
        _fill(imports, span, 1 << 20, 8)
    with pytest.raises(VmError, match="the host program does not end"):
        _fill(imports, span, 1 << 20, 8)


def test_names_that_are_no_text(hal: Hal, imports: Imports) -> None:
    assert imports["hal.device.query.i64"](hal, b"hal.device.id", b"\xff*") == (1, 0)
    assert imports["hal.device.query.i64"](hal, b"\xff", b"x") == (0, 0)


def test_arguments_that_do_not_fit() -> None:
    text = """
func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> {
  %r = arith.addf %a, %a : tensor<4xf32>
  return %r : tensor<4xf32>
}"""
    target = find_target("sm_80")
    module = Module(compile_str(text, input_type="none", extra_args=list(target.flags)), "cuda")
    with pytest.raises(Fault, match=f"no memory for out of {1 << 62} bytes"):
        module.output("out", (1 << 30, 1 << 30), np.dtype(np.float32))
    with pytest.raises(ValueError, match=r"a: expected one of bool, .*, got complex64"):
        module.input("a", np.zeros(4, np.complex64))
    with pytest.raises(ValueError, match=r"out: expected one of bool, .*, got complex64"):
        module.output("out", (4,), np.dtype(np.complex64))
    (view,) = module.call("f", module.input("a", np.ones(4, np.float32)))
    assert (module.read(view, np.dtype(np.float32)) == 2).all()
    with pytest.raises(ValueError, match=r"view: expected float64 of shape \(4,\), got 16 bytes"):
        module.read(view, np.dtype(np.float64))
