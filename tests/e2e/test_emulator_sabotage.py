"""Proof that the emulator can fail: kernels that are broken on purpose, each in one place."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np
import pytest
from support import built, emulated_verdict

from iree_lnbwd import schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.emulator.module import Edit
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import OnePass, TwoPass
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.vmfb.counts import count_of
from iree_lnbwd.vmfb.executables import exports
from iree_lnbwd.vmfb.launches import launches

_TARGET = find_target("sm_90")
_ROWS = 9
# cp.async and vectors of 8, more rows than set out at first; and plain loads and single elements.
# Both with rows left over. And the kernel for few rows alone, which is what a module has where so
# many rows are fixed.
_SPECS = {
    "staged": NormSpec((1000,), "bf16"),
    "direct": NormSpec((769,), "bf16"),
    "few": NormSpec((769,), "bf16", rows=_ROWS),
}

_SCHEDULES = {
    "staged": OnePass(2, 2, 2, 8, 1, 2, False, True, True, finalize_slices=3, finalize_rows=1),
    "direct": OnePass(264, 6, 1, 1, resident=2),
}


@functools.cache
def _module(form: str) -> bytes:
    spec = _SPECS[form]
    how = _SCHEDULES.get(form) or schedules.choose(spec, _TARGET)
    return built(spec, _TARGET, how)[0]


@functools.cache
def _text(form: str) -> str:
    """The PTX of a module, as the emulator sees it."""
    codes = {export.code for export in exports(_module(form))}
    (code,) = codes
    return code.rstrip(b"\0").decode()


def _places(form: str, pattern: str) -> list[re.Match[str]]:
    found = list(re.finditer(pattern, _text(form), re.MULTILINE))
    assert found, pattern
    return found


def _with(form: str, place: re.Match[str], replacement: str) -> Edit:
    text = _text(form)
    changed = text[: place.start()] + replacement + text[place.end() :]
    assert changed != text
    return lambda _: changed


def _verdicts(form: str, pattern: str, change: Callable[[re.Match[str]], str]) -> list[str]:
    """One for each place that a pattern matches, with that place changed."""
    return [
        emulated_verdict(_module(form), _SPECS[form], _with(form, place, change(place)), _ROWS)
        for place in _places(form, pattern)
    ]


@pytest.mark.parametrize("form", _SPECS)
class TestSabotage:
    def test_unchanged(self, form: str) -> None:
        assert emulated_verdict(_module(form), _SPECS[form], lambda text: text, _ROWS) == "passed"

    def test_dropped_barriers(self, form: str) -> None:
        for verdict in _verdicts(form, r"^\tbar\.sync.*$", lambda _: ""):
            assert "race in shared memory" in verdict

    @pytest.mark.drawn
    def test_shuffles_of_the_wrong_distance(self, form: str) -> None:
        pattern = r"^(\tshfl\.sync\.bfly\.b32 .*, )(\d+)(, 31, -1;)$"
        for verdict in _verdicts(form, pattern, lambda m: f"{m[1]}{int(m[2]) // 2 or 16}{m[3]}"):
            assert verdict == "missed"

    @pytest.mark.drawn
    def test_shuffles_of_the_wrong_mask(self, form: str) -> None:
        pattern = r"^(\tshfl\.sync\.bfly\.b32 .*, 31, )-1;$"
        for verdict in _verdicts(form, pattern, lambda m: f"{m[1]}65535;"):
            assert "does not name the thread itself" in verdict

    @pytest.mark.drawn
    def test_dropped_stores_to_shared_memory(self, form: str) -> None:
        for verdict in _verdicts(form, r"^\tst\.shared.*$", lambda _: ""):
            assert verdict == "missed" or "shared memory" in verdict

    @pytest.mark.drawn
    def test_dropped_stores_to_global_memory(self, form: str) -> None:
        # Of values, that is: no launch takes the stores of zeros, which only keep the compiler from
        # assuming that what it reads is constant.
        pattern = r"^\tst\.global.*\], .*%r.*$"
        for verdict in _verdicts(form, pattern, lambda _: ""):
            assert "never written" in verdict or "which nobody wrote" in verdict

    def test_bounds_of_columns_that_are_off_by_one(self, form: str) -> None:
        pattern = r"^(\tsetp\.(?:lt|gt)\.u32 \t%p\d+, %r\d+, )(\d{2,});$"
        verdicts = _verdicts(form, pattern, lambda m: f"{m[1]}{int(m[2]) + 1};")
        faults = "out of bounds|race in|never written|nobody wrote|written twice"
        assert any(re.search(faults, verdict) for verdict in verdicts)
        for verdict in verdicts:
            # For few rows a bound of its own chooses what is summed; no access is wrong there.
            wrong_sum = form == "few" and verdict == "missed"
            assert wrong_sum or re.search(faults, verdict), verdict

    def test_bounds_of_rows_that_are_off_by_one(self, form: str) -> None:
        """One row, or partial row, more is added up than there are."""
        pattern = r"^(\tsetp\.)ge(\.u(?:32|64) \t%p\d+, %rd?\d+, %rd?\d+;)$"
        for verdict in _verdicts(form, pattern, lambda m: f"{m[1]}gt{m[2]}"):
            assert re.search("a read of transient|out of bounds", verdict), verdict


class TestSabotageOfTheStagedForm:
    """What only vectors and asynchronous copies have."""

    def test_truncated_stores(self) -> None:
        pattern = r"^\tst\.global\.v4\.b32 (.*\{%r\d+, %r\d+), %r\d+, %r\d+\};$"
        for verdict in _verdicts("staged", pattern, lambda m: f"\tst.global.v2.b32 {m[1]}}};"):
            assert "never written" in verdict or "which nobody wrote" in verdict

    def test_copies_that_are_not_waited_for(self) -> None:
        verdicts = _verdicts("staged", r"^\tcp\.async\.wait_group.*$", lambda _: "")
        assert all("asynchronous copy" in verdict for verdict in verdicts)

    def test_copies_that_are_waited_for_one_group_too_few(self) -> None:
        # (Not of waits for all groups: the last of those is empty.)
        pattern = r"^(\tcp\.async\.wait_group \t)([1-9]);$"
        verdicts = _verdicts("staged", pattern, lambda m: f"{m[1]}{int(m[2]) + 1};")
        assert all("asynchronous copy" in verdict for verdict in verdicts)

    def test_dropped_copies(self) -> None:
        for verdict in _verdicts("staged", r"^\tcp\.async\.c[ag].*$", lambda _: ""):
            assert "which nobody wrote" in verdict

    def test_outputs_that_are_stored_twice(self) -> None:
        pattern = r"^(\tst\.global\..*)$"
        verdicts = _verdicts("staged", pattern, lambda m: f"{m[1]}\n{m[1]}")
        twice = {
            verdict.split(";")[1].split(" at ")[0] for verdict in verdicts if verdict != "passed"
        }
        results = {f" {result.name} is written twice" for result in _SPECS["staged"].results}
        assert twice == results


@pytest.mark.parametrize(
    ("how", "found"),
    [
        # Its rows are read from where their accesses begin, and only copies are masked there.
        (OnePass(132, groups=1, warps=4, vector=4), "missed"),
        (TwoPass(8, warps=8, vector=4, chunks=1, rows=1), "misaligned|out of bounds"),
    ],
    ids=["OnePass", "TwoPass"],
)
def test_a_rule_of_schedules_that_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, how: OnePass | TwoPass, found: str
) -> None:
    """Vectors of 4 where N is no multiple of 4: the rule keeps that from being compiled."""
    spec = NormSpec((769,), "f32")
    with pytest.raises(ValueError, match="N is no multiple of 4"):
        compiler.build(spec, _TARGET, schedule=how)
    monkeypatch.setattr(type(how), "illegal", lambda *_: None)
    vmfb, _ = compiler.build(spec, _TARGET, schedule=how)
    said = emulated_verdict(vmfb, spec, lambda text: text, _ROWS)
    assert re.search(found, said), said


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("columns", "mask"),
    [
        (769, (True, True, True)),
        (769, (True, False, False)),
        (1024, (True, False, True)),
        (65536, (True, True, True)),
    ],
)
def test_the_host_program_launches_what_the_module_says(
    columns: int, mask: tuple[bool, bool, bool]
) -> None:
    """`iree_lnbwd.launches` is what callers with a stream of their own launch."""
    spec = NormSpec((columns,), "bf16", output_mask=mask)
    vmfb, manifest = built(spec, _TARGET)
    planned = launches(spec, _TARGET, manifest.schedule)
    assert planned is not None
    op = EmulatedNorm(vmfb)
    for rows in (1, 3, *matrix.both_sides(spec, manifest.schedule), 20 if columns > 2000 else 300):
        op.run(matrix.random_call(spec, rows, np.random.default_rng(0)))
        kernels = planned.of(rows).kernels
        assert len(op.launches) == len(kernels)
        for launch, plan in zip(op.launches, kernels, strict=True):
            assert launch.kernel == plan.kernel
            assert launch.workgroup_count == tuple(count_of(n, rows) for n in plan.workgroups)
            assert launch.constants == tuple(count_of(n, rows) for n in plan.constants)
            assert len(launch.bindings) == len(plan.bindings)
