"""The table of operands: what is written out elsewhere agrees with it, and another op fits it."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

import iree_lnbwd
from iree_lnbwd import LayerNormBackward, LayerNormGrads, NormSpec, layer_norm_backward
from iree_lnbwd.arguments import ARGUMENTS
from iree_lnbwd.operands import (
    BACKWARD,
    BIAS,
    INPUT,
    MEAN,
    RSTD,
    WEIGHT,
    Access,
    Element,
    Kind,
    Operand,
    Operands,
    When,
    names,
)
from iree_lnbwd.spec import GRADIENTS

PACKAGE = Path(iree_lnbwd.__file__).parent


def test_gradients_are_the_results() -> None:
    assert LayerNormGrads._fields == GRADIENTS


@pytest.mark.parametrize("call", [layer_norm_backward, LayerNormBackward.__call__])
def test_arguments_are_what_callers_give(call: object) -> None:
    assert callable(call)
    parameters = tuple(inspect.signature(call).parameters)
    assert tuple(name for name in parameters if name in ARGUMENTS) == ARGUMENTS


def test_the_pointers_of_cpp_are_in_the_tables_order() -> None:
    source = (PACKAGE / "torch_native.cpp").read_text(encoding="utf-8")
    listed = re.search(r" pointers = \{\n(.*?)\n  \};", source, re.DOTALL)
    assert listed is not None
    taken = re.findall(r"address\((\w+)\)", listed[1])
    assert len(taken) == len(listed[1].splitlines())
    results = [result.symbol for result in BACKWARD.results]
    assert taken == [*names(BACKWARD.inputs), *results]


def test_every_alias_of_a_type_is_in_the_ir() -> None:
    """The files of ``ir/`` speak of the tensors by what the table calls them."""
    text = (PACKAGE.parent / "ir" / "layer_norm_backward.mlir").read_text(encoding="utf-8")
    for operand in (*BACKWARD.inputs, *BACKWARD.results):
        assert re.search(rf"^{operand.alias} = ", text, re.MULTILINE), operand.name
        assert f"!{operand.element.value}" in text


def test_each_element_type_of_a_spec_is_its_own() -> None:
    spec = NormSpec((8,), "f16", "bf16", "f32", "bf16")
    types = {element: spec.element_type(element) for element in Element}
    assert list(types.values()) == ["bf16", "f16", "f32", "f32", "bf16"]


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, set()),
        ({"eps": 1e-5}, {"mean", "rstd"}),
        ({"has_weight": False}, {"weight", "grad_weight"}),
        ({"output_mask": (False, True, False)}, {"grad_input", "grad_bias"}),
    ],
)
def test_a_spec_says_which_are_there(changes: dict[str, object], missing: set[str]) -> None:
    spec = NormSpec((8,), **changes)  # type: ignore[arg-type]
    there = {argument.name for argument in spec.arguments}
    assert there == set(names(BACKWARD.rows)) - {BIAS.name} - missing


def test_other_ops_of_the_family_are_rows_and_a_list() -> None:
    """RMS normalization's backward has no mean; a forward reads a bias and writes statistics."""
    rms = Operands(tuple(row for row in BACKWARD.rows if row is not MEAN))
    assert names(rms.statistics) == ("rstd",)
    output = Operand("output", "y", Kind.CELLS, Element.X, Access.WRITTEN)
    residual = Operand("residual", "r", Kind.CELLS, Element.X)
    written = (replace(row, access=Access.WRITTEN, when=When.ALWAYS) for row in (MEAN, RSTD))
    bias = replace(BIAS, access=Access.READ, when=When.WEIGHT_GIVEN)
    forward = Operands((INPUT, residual, WEIGHT, bias, output, *written))
    assert names(forward.inputs) == ("input", "residual", "weight", "bias")
    assert [row.alias for row in forward.results] == ["!x_mn", "!acc_m", "!acc_m"]
    assert forward.statistics == ()
