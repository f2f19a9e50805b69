"""The interface of a bare .vmfb: its name, its function and its arguments, for callers without us.

``docs/raw_module.md`` describes it for users of ``iree-run-module`` and of IREE's runtime.
"""

from __future__ import annotations

import os
import shlex

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import MEAN
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.ops.strides import RowStrides, Strides, alone

DECLARATION = "iree.abi.declaration"  # IREE's name of the attribute that its tools quote

_NO_SYMBOL = str.maketrans({".": "_", "-": "m", "+": "p"})  # in the numbers of a spec's name
_FEW = 2  # rows of an example


def symbol(spec: NormSpec, target: Target) -> str:
    """The name of a module in IREE's runtime, where those of a context need names of their own.

    It is that of the module's file, with letters in place of what a symbol cannot have.
    """
    return f"{spec.name.translate(_NO_SYMBOL)}_{target.name.replace('-', '_')}"


def declaration(spec: NormSpec) -> str:
    """The public function as IREE's tools show it: its arguments by name and type, in order."""
    named = [(given.name, given) for given in spec.inputs]
    named += [(storage_name(result.name), result) for result in spec.results]
    takes = ", ".join(f"%{name}: tensor<{type_}>" for name, type_ in named)
    takes += "".join(f", %{name}: i64" for name in numbers(spec))
    gives = ", ".join(f"tensor<{result}>" for result in spec.results)
    return f"sync func @{spec.op}({takes}) -> ({gives})"


def numbers(spec: NormSpec) -> tuple[str, ...]:
    """The names of the numbers that follow the arrays."""
    of_sets = ("rows_per_set",) if spec.weight_sets else ()
    if not spec.strided_rows:
        return of_sets
    named = [given.name for given in spec.inputs if given.is_strided]
    named += [storage_name(result.name) for result in spec.results if result.is_strided]
    own = (f"{name}.{field}_stride" for name in named for field in RowStrides._fields)
    return (*of_sets, *(("rows",) if spec.rows is None else ()), "inner_count", *own)


def values_of(
    spec: NormSpec, rows: int, sets: Sets | None = None, strides: Strides | None = None
) -> list[int]:
    """What a call gives for `numbers`.

    Args:
        spec: What the module computes.
        rows: M.
        sets: Those of the weight, where it has some.
        strides: Those of the rows, where the spec has some.
    """
    values = [] if sets is None else [sets.rows_per_set]
    if strides is None:
        return values
    own = (
        stride
        for argument in spec.arguments
        if argument.is_strided
        for stride in strides.of(argument.name)
    )
    return [*values, *([rows] if spec.rows is None else ()), strides.inner_count, *own]


def storage_name(result: str) -> str:
    """The name of the caller's storage for a result, in messages."""
    return f"out.{result}"


def command(path: str | os.PathLike[str], spec: NormSpec, target: Target) -> str:
    """A shell command that runs a module on two rows of constants and prints the results.

    Args:
        path: The .vmfb.
        spec: What it computes.
        target: What it was compiled for.
    """
    rows = _FEW if spec.rows is None else spec.rows
    words = [f"--device={target.driver}", f"--module={os.fspath(path)}", f"--function={spec.op}"]
    sets = Sets(_FEW, 1) if spec.weight_sets else None
    strides = alone(rows, spec.columns) if spec.strided_rows else None
    for argument in spec.arguments:
        shape = "x".join([*map(str, argument.dims(rows, sets, strides)), argument.dtype])
        words.append(f"--input={shape}")
        if argument in spec.inputs:
            words[-1] += f"={int(argument.name != MEAN.name)}"
    words += [f"--input={number}" for number in values_of(spec, rows, sets, strides)]
    return shlex.join(["iree-run-module", *words])
