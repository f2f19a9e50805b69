"""What is in a module's text if rows lie where a call says: their memory, and the call's numbers.

In a kernel, such rows are a ``memref`` with two numbers that nothing else needs: its stride is the
one from a run to the next, and its *first size* is the stride of rows in a run. From it and the
number of a row, ``ir/math/rows.mlir`` makes a ``memref`` whose every row is that one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from iree_lnbwd.ops import layouts
from iree_lnbwd.ops.operands import Element, Kind, Operand
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.ops.strides import MOST_STRIDE, RowStrides
from iree_lnbwd.schedules.ir_types import beside_dy, copies, gates, storage
from iree_lnbwd.vmfb.counts import DIVISOR_NUMBERS, StridesNumber, strides_of
from iree_lnbwd.vmfb.launches import KERNELS, PlannedLaunch

_SUBSPAN = re.compile(
    r"^( *)%(\w+) = (hal\.interface\.binding\.subspan layout\((#\w+)\) binding\((\d+)\).*) : "
    r"(!(?:forward_)?(\w+)_(?:rows|lines))(\{%\w+\})\n",
    re.MULTILINE,
)
_BOUND = re.compile(r"binding\.subspan layout\(#\w+\) binding\((\d+)\).* : !(\w+)")
# A number of a division, as ir/math/rows.mlir has it.
_NUMBER = re.compile(r"layout\(#its_layout\) ordinal\((\d+)\)")


def aliases(spec: NormSpec) -> dict[str, str]:
    """The types of rows, of the memory that they are in, and of tensors with that memory."""
    found: dict[str, str] = {}
    own = (*([Element.Y] if spec.output_dtype else []), *gates(spec), *copies(spec))
    for element in (each.value for each in (Element.DY, Element.X, Element.RESIDUAL, *own)):
        rows = storage(f"?x{spec.columns}x!{element}, strided<[?, 1], offset: ?>")
        found |= {
            f"!{element}_mn": f"tensor<?x!{element}>",
            f"!{element}_memory": storage(f"?x!{element}"),
            f"!{element}_rows": rows,
            f"!{element}_lines": rows,
            f"!forward_{element}_rows": rows,
        }
    return {**found, "!more_memory": f"!{beside_dy(spec).value}_memory"}


def found(kernel: str, spec: NormSpec, launch: PlannedLaunch, *, on_gpu: bool) -> str:
    """A kernel whose rows are found by the numbers of a call.

    On a GPU, strides are multiples of what an access needs. Without the mask that says so, LLVM
    would load and store single elements.

    Args:
        kernel: Its text, with functions of ``ir/math/rows.mlir``.
        spec: What is computed, with strides.
        launch: Has the numbers among its constants.
        on_gpu: Whether it is a GPU's.
    """
    places = {count: place for place, count in enumerate(launch.constants)}
    there = {spec.family.named(name).symbol: name for name in launch.bindings}
    own = f"#{launch.kernel}_layout"

    def loaded(indent: str, name: str, number: StridesNumber, multiple: int) -> list[str]:
        load = f"hal.interface.constant.load layout({own}) ordinal({places[number]}) : i32"
        lines = [
            f"%{name}_i32 = {load}",
            f"%{name}_whole = arith.constant {-multiple} : i32",
            f"%{name}_known = arith.andi %{name}_i32, %{name}_whole : i32",
            f"%{name} = arith.index_castui %{name}_known : i32 to index",
        ]
        return [indent + line for line in lines]

    def rows(line: re.Match[str]) -> str:
        indent, name, subspan, _, binding, type_, element, size = line.groups()
        operand = KERNELS[launch.kernel].bindings[int(binding)]
        if operand.kind is not Kind.CELLS:
            return line[0]
        lines = [f"{indent}%{name}_memory = {subspan} : !{element}_memory{size}"]
        inner = outer = "%c0"  # of one in place of an operand that the spec lacks
        if operand.symbol in there:
            given = spec.family.named(there[operand.symbol])  # an output has a type of its own
            each = layouts.multiple(spec, given) if on_gpu else 1
            for number, field in zip(strides_of(given.name), RowStrides._fields, strict=True):
                lines += loaded(indent, f"{name}_{field}", number, each)
            inner, outer = f"%{name}_inner", f"%{name}_outer"
        lines.append(
            f"{indent}%{name} = memref.reinterpret_cast %{name}_memory to offset: [%c0], "
            f"sizes: [{inner}, {spec.columns}], strides: [{outer}, 1] "
            f": !{element}_memory to {type_}"
        )
        return "".join(f"{line}\n" for line in lines)

    def number(found: re.Match[str]) -> str:
        return f"layout({own}) ordinal({places[DIVISOR_NUMBERS[int(found[1])]]})"

    text = _NUMBER.sub(number, _SUBSPAN.sub(rows, kernel))
    for binding, type_ in _BOUND.findall(text):
        operand = KERNELS[launch.kernel].bindings[int(binding)]
        if operand.kind is Kind.CELLS and not type_.endswith("_memory"):
            raise ValueError(f"{launch.kernel}: expected memory of {operand.symbol}, got {type_}")
    return text


def arguments(spec: NormSpec, operands: Sequence[Operand]) -> list[str]:
    """The numbers that the public function takes, behind its arrays."""
    own = [f"%{symbol(number, spec)[1:]}_given: i64" for number in _strides(spec, operands)]
    rows = ["%rows_given: i64"] if spec.rows is None else []
    return [*rows, "%inner_count_given: i64", *own]


def _strides(spec: NormSpec, operands: Sequence[Operand]) -> list[StridesNumber]:
    return [n for o in operands if spec.is_strided(o) for n in strides_of(o.name)]


def symbol(number: StridesNumber, spec: NormSpec) -> str:
    """The symbol of a number in the public function."""
    name, _, field = number.of_strides.partition(".")
    if not field:
        return f"%{name}"
    operand = spec.family.named(name)
    if not spec.has(operand):  # scratch
        return {"inner": "%n", "outer": "%scratch_outer"}[field]
    return f"%{operand.symbol}_{field}"


def length(operand: Operand) -> str:
    """The symbol of how many elements an argument's memory has."""
    return f"%{operand.symbol}_length"


def inverse() -> list[str]:
    """The lines that compute what rows are divided by, and what scratch has."""
    return [
        "%all_bits = arith.constant -1 : i64",
        "%one_more = arith.constant 1 : i64",
        "%half_bits = arith.constant 32 : i64",
        "%inverse_below = arith.divui %all_bits, %inner_count_given : i64",
        "%inverse_i64 = arith.addi %inverse_below, %one_more : i64",
        "%inverse_high_i64 = arith.shrui %inverse_i64, %half_bits : i64",
        "%inverse_low = arith.index_cast %inverse_i64 : i64 to index",
        "%inverse_high = arith.index_cast %inverse_high_i64 : i64 to index",
        "%cells = arith.muli %m, %n : index",
        "%scratch_outer = arith.muli %inner_count, %n : index",
    ]


def checks(spec: NormSpec, named: Mapping[Operand, str], *, on_gpu: bool) -> list[str]:
    """Expects numbers that kernels can count with, and memory that has all rows.

    Args:
        spec: With strides.
        named: The arguments, and their names in messages.
        on_gpu: Whether kernels are a GPU's.
    """
    lines = [
        "%c1_row = arith.constant 1 : index",
        "%least_inner = arith.constant 2 : index",
        f"%most_stride = arith.constant {MOST_STRIDE} : index",
        "%inner_count = arith.index_cast %inner_count_given : i64 to index",
        "%is_a_run = arith.cmpi uge, %inner_count, %least_inner : index",
        "%is_short = arith.cmpi ule, %inner_count, %most_stride : index",
        "%divides = arith.andi %is_a_run, %is_short : i1",
        f'cf.assert %divides, "inner_count: expected 2 to {MOST_STRIDE}"',
        "%some_rows = arith.maxui %m, %c1_row : index",
        "%last_of_all = arith.subi %some_rows, %c1_row : index",
        "%runs_before = arith.divui %last_of_all, %inner_count : index",
        "%last_place = arith.remui %last_of_all, %inner_count : index",
        "%most_place = arith.subi %inner_count, %c1_row : index",
        "%most_in_run = arith.minui %last_of_all, %most_place : index",
        "%whole_runs = arith.maxui %runs_before, %c1_row : index",
        "%whole_before = arith.subi %whole_runs, %c1_row : index",
        "%no_rows = arith.cmpi eq, %m, %c0 : index",
    ]
    for operand, name in named.items():
        if not spec.is_strided(operand):
            continue
        of = f"%{operand.symbol}"
        each = layouts.multiple(spec, operand) if on_gpu else 1
        multiples = f"multiples of {each}" if each > 1 else "numbers"
        lines.append(f"{of}_multiple = arith.constant {each} : index")
        for field in RowStrides._fields:
            lines += [
                f"{of}_{field} = arith.index_cast {of}_{field}_given : i64 to index",
                f"{of}_{field}_fits = arith.cmpi ule, {of}_{field}, %most_stride : index",
                f"{of}_{field}_rest = arith.remui {of}_{field}, {of}_multiple : index",
                f"{of}_{field}_whole = arith.cmpi eq, {of}_{field}_rest, %c0 : index",
                f"{of}_{field}_good = arith.andi {of}_{field}_fits, {of}_{field}_whole : i1",
                f'cf.assert {of}_{field}_good, "{name}: expected strides from 0 to {MOST_STRIDE}, '
                f'{multiples}"',
            ]
        lines += [
            f"{of}_whole = arith.muli %whole_before, {of}_outer : index",
            f"{of}_most = arith.muli %most_in_run, {of}_inner : index",
            f"{of}_before_last = arith.addi {of}_whole, {of}_most : index",
            f"{of}_runs = arith.muli %runs_before, {of}_outer : index",
            f"{of}_places = arith.muli %last_place, {of}_inner : index",
            f"{of}_last = arith.addi {of}_runs, {of}_places : index",
            f"{of}_first_of_last = arith.maxui {of}_before_last, {of}_last : index",
            f"{of}_extent = arith.addi {of}_first_of_last, %n : index",
            f"{of}_is_there = arith.cmpi ule, {of}_extent, {length(operand)} : index",
            f"{of}_suffices = arith.ori {of}_is_there, %no_rows : i1",
            f'cf.assert {of}_suffices, "{name}: expected memory of all rows"',
        ]
    return lines
