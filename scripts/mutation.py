"""Changes of the code that judges, one place at a time: mutmut's, of each file of `SUBJECTS`."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

ROOT = Path(__file__).resolve().parents[1]
# NumPy takes None for f64: such a change is none.
_AS_F64 = re.compile(r".*\.astype\(np\.float64\)", re.DOTALL)


@dataclass(frozen=True)
class Subject:
    """A file under mutation.

    Attributes:
        path: From the root of the repository.
        tests: The files of tests that have to notice, or single tests of a file.
        functions: Only these functions and methods; none means all, and the file's constants.
    """

    path: str
    tests: tuple[str, ...]
    functions: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The name that it is imported by."""
        return self.path.removesuffix(".py").replace("/", ".")


_JUDGE = (
    "test_judge_bounds",
    "test_reference",
    "test_judge_family::test_each_backward_is_the_derivative_of_its_forward",
    "test_judge_family::test_gates_and_sets_have_the_derivatives_of_their_forwards",
    "test_judge_family::test_the_expected_values_are_those_of_the_formulas",
    "test_judge_family::test_the_stored_sum_is_what_is_normalized",
    "test_judge_family::test_the_sum_has_to_match_to_the_bit",
    "test_judge_family::test_the_sum_is_rounded_to_the_type_of_sums_first",
    "test_judge_family::test_blocks_of_rows_change_nothing",
    "test_judge_family::test_inf_and_nan_stay_in_their_rows",
    "test_judge_family::test_no_rows",
    "test_judge_family::test_each_partial_sum_is_rounded",
    "test_judge_family::test_sums_that_are_not_finite_are_those_of_additions",
)
SUBJECTS = (
    Subject("iree_lnbwd/verification/backward.py", _JUDGE),
    Subject("iree_lnbwd/verification/forward.py", _JUDGE),
    Subject("iree_lnbwd/verification/judge.py", _JUDGE),
    Subject("iree_lnbwd/verification/expectation.py", _JUDGE),
    Subject("iree_lnbwd/verification/row_block.py", _JUDGE),
    Subject("iree_lnbwd/verification/sums.py", _JUDGE),
    Subject("iree_lnbwd/verification/gate.py", _JUDGE),
    Subject("iree_lnbwd/verification/output_error.py", ("test_output_error",)),
    Subject(
        "iree_lnbwd/verification/matrix.py",
        ("test_matrix", "test_judge_family::test_the_matrix_begins_with_the_specs_of_old"),
    ),
    Subject("iree_lnbwd/verification/verify.py", ("test_verify",)),
    Subject("iree_lnbwd/verification/recorded_bits.py", ("test_bits",)),
    Subject("iree_lnbwd/verification/evidence.py", ("test_evidence",)),
    Subject(
        "iree_lnbwd/verification/fingerprint.py",
        ("test_recorded_code", "test_fingerprint::test_what_is_no_module"),
    ),
    Subject("iree_lnbwd/verification/host_calls.py", ("test_recorded_code",)),
    Subject("iree_lnbwd/ops/arguments.py", ("test_arguments", "test_errors::test_bad_argument")),
    Subject("iree_lnbwd/calls/calling.py", ("test_kinds_of_call",), ("call",)),
    Subject("iree_lnbwd/runtime/storage.py", ("test_storage_checks",), ("extent", "check_apart")),
    Subject("iree_lnbwd/tuning/checks.py", ("test_tuning_checks",)),
    Subject("iree_lnbwd/stores/tuned.py", ("test_legality",), ("why_illegal",)),
    *(
        Subject(f"iree_lnbwd/schedules/{form}.py", ("test_legality",), functions)
        for form, functions in (
            ("one_pass", ("OnePass.illegal", "OnePass._rules_of_threads")),
            ("two_pass", ("TwoPass.illegal",)),
            ("few_rows", ("FewRows.illegal",)),
            ("forward", ("Forward.illegal",)),
            ("row_blocks", ("RowBlocks.illegal",)),
            (
                "rules",
                (
                    *("first_broken", "out_of_bounds", "gpu_rules", "cluster_rules"),
                    *("resident_rule", "elements_rule", "stride_rule", "grid_rule", "terms_rule"),
                    "wait_by_themselves",
                ),
            ),
        )
    ),
)


class Change(NamedTuple):
    """What a mutant is told by, so that an argument about it stands as long as its line does.

    Attributes:
        place: The file and, if it is in one, the function.
        before: The changed lines.
        after: The lines in their place.
    """

    place: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"- {line}" for line in self.before] + [f"+ {line}" for line in self.after]
        return "\n".join([self.place, *lines])


class Mutant(NamedTuple):
    """One change of one file.

    Attributes:
        subject: The file.
        function: The function or method that it is in; "" for what is outside of all.
        module: The file, parsed.
        original: The node that is changed.
        changed: What is in its place.
    """

    subject: Subject
    function: str
    module: cst.Module
    original: cst.CSTNode
    changed: cst.CSTNode

    def source(self) -> str:
        """The changed file."""
        changed = self.module.deep_replace(self.original, self.changed)
        assert isinstance(changed, cst.Module)
        code: str = changed.code
        return code

    def change(self) -> Change:
        """The lines that differ."""
        before, after = (
            [line.strip() for line in code.splitlines()]
            for code in (self.module.code, self.source())
        )
        differ = [line for line in difflib.ndiff(before, after) if line[0] in "-+"]
        gone, come = (tuple(line[2:] for line in differ if line[0] == sign) for sign in "-+")
        return Change(f"{self.subject.path} {self.function}".strip(), gone, come)


class _Visitor(MutationVisitor):
    """mutmut's, but it changes decorated functions, too, and no words of errors."""

    def __init__(self) -> None:
        super().__init__(mutation_operators, IgnoredCode(set(), set(), set()))
        self.lines: list[int] = []  # of each mutation

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            return False
        return bool(super()._skip_node_and_children(node))

    def _create_mutations(self, node: cst.CSTNode) -> None:
        super()._create_mutations(node)
        line = self.get_metadata(PositionProvider, node).start.line
        self.lines += [line] * (len(self.mutations) - len(self.lines))


def mutants_of(subject: Subject) -> Iterator[Mutant]:
    """Every mutant of a file."""
    source = (ROOT / subject.path).read_text()
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = _Visitor()
    wrapper.visit(visitor)
    functions, words = functions_of(source), _words_of_errors(source)
    for mutation, line in zip(visitor.mutations, visitor.lines, strict=True):
        function = function_at(functions, line)
        node = mutation.original_node
        if subject.functions and function not in subject.functions:
            continue
        if isinstance(node, cst.BaseString) and line in words:
            continue
        if _AS_F64.fullmatch(wrapper.module.code_for_node(node)) and (
            wrapper.module.code_for_node(mutation.mutated_node).endswith(".astype(None)")
        ):
            continue
        yield Mutant(subject, function, wrapper.module, node, mutation.mutated_node)


def functions_of(source: str) -> list[tuple[range, str]]:
    """The lines and the name of each function and method; those inside of others are theirs."""
    found = []

    def look(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                assert node.end_lineno is not None
                found.append((range(first, node.end_lineno + 1), prefix + node.name))

    look(ast.parse(source).body, "")
    return found


def function_at(functions: Iterable[tuple[range, str]], line: int) -> str:
    """The name of the function that a line is in; "" for a line outside of all."""
    return next((name for lines, name in functions if line in lines), "")


def _words_of_errors(source: str) -> set[int]:
    """The lines of statements that raise."""
    raised = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))
    return {
        line for node in raised for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
