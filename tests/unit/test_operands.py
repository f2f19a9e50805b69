"""The tables of operands: what is written out elsewhere agrees with them."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

import iree_lnbwd
from iree_lnbwd import NormSpec, reference, runtime
from iree_lnbwd.ops.arguments import results_type
from iree_lnbwd.ops.operands import (
    BIAS,
    FROM_OUTPUT,
    GRAD_RESIDUAL,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    MORE_GRAD_OUTPUTS,
    MOST_GRAD_OUTPUTS,
    OPS,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    SUM_H,
    Access,
    Element,
    Op,
    When,
    names,
)
from iree_lnbwd.runtime.ops import CLASSES

PACKAGE = Path(iree_lnbwd.__file__).parent

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
# A spec of an op with all that it can have.
FULL = {
    op.name: NormSpec(
        (8,),
        op=op.name,
        residual_dtype="f32",
        has_bias=op.usual_bias or not op.atens_bias,
        grad_outputs=MOST_GRAD_OUTPUTS if op.is_backward else 1,
        eps=None if op.is_backward else 1e-5,
    )
    for op in OPS.values()
}


@every_op
def test_results_are_the_fields_of_what_a_call_returns(op: Op) -> None:
    """In order; a forward without a mean returns None in its place."""
    fields = results_type(op)._fields
    results = names(op.results)
    assert tuple(field for field in fields if field in results) == results
    assert set(fields) - set(results) == ({"mean"} if op is RMS_NORM else set())


@every_op
def test_arguments_are_what_callers_give(op: Op) -> None:
    """In the order of the op's table, but for the last ones, which are given by name."""
    own, module = getattr(iree_lnbwd, op.name), CLASSES[op.name].__call__
    for call in (own, module, getattr(reference, op.name)):
        parameters = inspect.signature(call).parameters
        by_place = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        by_name = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        arguments = names(op.arguments)
        taken = [name for name in arguments if name in by_place]
        assert [name for name in by_place if name in arguments] == taken
        added = {"grad_residual" if op.is_backward else "residual"}
        added |= set() if op.atens_bias else {"bias"}
        others = (
            {*arguments} - {*taken} - {*names(MORE_GRAD_OUTPUTS)}
        )  # beside the first, in a list
        assert {name for name in by_name if name in arguments} == added == others
    assert getattr(runtime, CLASSES[op.name].__name__) is CLASSES[op.name]


def test_cpp_knows_every_word_of_the_table() -> None:
    """Python sends the rows of the table to C++ as words."""
    source = (PACKAGE / "native" / "torch_native.cpp").read_text(encoding="utf-8")
    words = set(re.findall(r'"(\w+)"', source[source.index("Operand operand_of(") :]))
    for op in (*OPS.values(), *FROM_OUTPUT.values()):
        for row in (*op.arguments, *op.results):
            assert {row.kind.value, row.element.value} <= words, row.name
    counted = (When.ASKED_FOR, When.ASKED_FOR_WITH_BIAS, When.RESIDUAL_GIVEN)
    assert {Access.READ.name, *(when.name for when in counted)} <= words


def test_the_first_ops_of_cpp_are_those_of_the_table() -> None:
    """Those that replace ATen's have these numbers."""
    source = (PACKAGE / "native" / "torch_overrides.cpp").read_text(encoding="utf-8")
    listed = re.search(r"enum class Op : int64_t \{(.*?)\};", source)
    assert listed is not None
    assert tuple(each.strip() for each in listed[1].split(",")) == tuple(OPS)


def test_every_alias_of_a_type_is_in_the_ir() -> None:
    """The files of ``ir/`` speak of the tensors by what the table calls them."""
    text = (PACKAGE.parent / "ir" / "layer_norm_backward.mlir").read_text(encoding="utf-8")
    for operand in (*LAYER_NORM_BACKWARD.inputs, *LAYER_NORM_BACKWARD.results):
        if operand is not GRAD_RESIDUAL:
            assert re.search(rf"^{operand.alias} = ", text, re.MULTILINE), operand.name
            assert f"!{operand.element.value}" in text


def test_each_element_type_of_a_spec_is_its_own() -> None:
    spec = NormSpec((8,), "f16", "bf16", "f32", "bf16", residual_dtype="f32")
    types = {element: spec.element_type(element) for element in Element}
    assert list(types.values()) == [
        *("bf16", "f16", "f16", "f32", "f32", "bf16", "f32", "f16", "f16", "f16")
    ]


def test_an_output_has_an_element_of_its_own_where_a_spec_says_so() -> None:
    for op in (LAYER_NORM, RMS_NORM):
        plain = NormSpec((8,), op=op.name, eps=1e-5)
        typed = replace(plain, output_dtype="bf16")
        assert plain.family is op
        assert typed.family is replace(typed, residual_dtype="f32").family
        assert typed.family.named("output").element is Element.Y
        others = [(o, t) for o, t in zip(op.rows, typed.family.rows, strict=True) if o != t]
        assert [(o.name, t.name) for o, t in others] == [("output", "output")]


@pytest.mark.parametrize(
    ("op", "changes", "missing"),
    [
        (LAYER_NORM_BACKWARD, {}, {"grad_residual"}),
        (LAYER_NORM_BACKWARD, {"residual_dtype": "bf16"}, set()),
        (LAYER_NORM_BACKWARD, {"eps": 1e-5}, {"mean", "rstd", "grad_residual"}),
        (LAYER_NORM_BACKWARD, {"has_weight": False}, {"weight", "grad_weight", "grad_residual"}),
        (
            LAYER_NORM_BACKWARD,
            {"output_mask": (False, True, False)},
            {"grad_input", "grad_bias", "grad_residual"},
        ),
        (RMS_NORM_BACKWARD, {"residual_dtype": "f32", "has_bias": True}, set()),
        (RMS_NORM_BACKWARD, {"eps": 1e-6}, {"rstd", "grad_residual", "grad_bias"}),
        (RMS_NORM_BACKWARD, {"grad_outputs": 3, "has_bias": True}, {"grad_residual"}),
        (
            RMS_NORM_BACKWARD,
            {"output_mask": (True, False)},
            {"grad_weight", "grad_residual", "grad_bias"},
        ),
        (
            RMS_NORM_BACKWARD,
            {"output_mask": (False, False, True), "has_bias": True},
            {"grad_input", "grad_weight", "grad_residual"},
        ),
        (LAYER_NORM, {"eps": 1e-5, "residual_dtype": "f32"}, set()),
        (LAYER_NORM, {"eps": 1e-5}, {"residual", "residual_output"}),
        (LAYER_NORM, {"eps": 1e-5, "has_bias": False}, {"bias", "residual", "residual_output"}),
        (RMS_NORM, {"eps": 1e-6, "residual_dtype": "f32"}, {"bias"}),
        (RMS_NORM, {"eps": 1e-6, "residual_dtype": "f32", "has_bias": True}, set()),
        (
            RMS_NORM,
            {"eps": 1e-6, "has_weight": False},
            {"weight", "bias", "residual", "residual_output"},
        ),
    ],
)
def test_a_spec_says_which_are_there(op: Op, changes: dict[str, object], missing: set[str]) -> None:
    spec = NormSpec((8,), op=op.name, **changes)  # type: ignore[arg-type]
    there = {argument.name for argument in spec.arguments}
    others = names(MORE_GRAD_OUTPUTS)[spec.grad_outputs - 1 :]
    assert there == set(names(op.inputs + op.results)) - missing - {*others}


def test_every_row_of_a_table_is_read_or_written_or_counts_by_its_type() -> None:
    for op in OPS.values():
        others = [row for row in op.rows if row not in (*op.inputs, *op.results)]
        assert others == ([BIAS] if op.is_backward else [])
        assert len(set(names(op.rows))) == len(op.rows)
        there = [argument.name for argument in FULL[op.name].arguments]
        assert there == [*names(op.inputs), *names(op.results)]


def test_a_backward_takes_the_statistics_that_its_forward_saves() -> None:
    for forward, backward in ((LAYER_NORM, LAYER_NORM_BACKWARD), (RMS_NORM, RMS_NORM_BACKWARD)):
        assert names(forward.statistics) == names(backward.statistics)
        assert {row.access for row in forward.statistics} == {Access.WRITTEN}
        assert {row.access for row in backward.statistics} == {Access.READ}
        assert forward.centres == backward.centres
        assert (forward.is_backward, backward.is_backward) == (False, True)
        gradients = {f"grad_{name}" for name in names(forward.inputs)} - {"grad_residual"}
        assert set(names(backward.results)) == gradients
    assert [names(op.masked) for op in (LAYER_NORM, RMS_NORM)] == [(), ()]
    assert "mean" not in names(RMS_NORM.statistics)


@every_op
def test_a_kernels_operand_is_found_by_its_name(op: Op) -> None:
    for row in (*op.rows, *op.scratch):
        assert op.named(row.name) is row
        assert op.find(row.name) is row
    assert (op.find("partial_dbeta") is not None) == op.is_backward
    assert op.find("sum_h") is (SUM_H if op is LAYER_NORM_BACKWARD else None)


@every_op
def test_an_op_is_looked_up_by_identity(op: Op) -> None:
    """A call does it for its options; a hash of all operands takes longer than the call's rest."""
    assert Op.__hash__ is object.__hash__
    assert op != replace(op)
