"""What `targets` and `inspect` say was run, and whether it speaks of the modules of today."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from support import built

from iree_lnbwd import NormSpec
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.verification import evidence, fingerprint, matrix
from iree_lnbwd.verification.evidence import Module, Record

_H200 = Record("sm_90", "H200, driver 1", frozenset(), frozenset({"a", "b"}), frozenset({"c"}))
_EMULATED = Record("sm_90", "", frozenset(), frozenset({"a", "d"}), frozenset({"b"}))

# One module of each form of the fast path and of each kind of option.
_SAMPLE = [
    NormSpec((64,), "f32"),
    NormSpec((769,), "bf16"),
    NormSpec((1024,), "f32"),
    NormSpec((4096,), "bf16"),
    NormSpec((16384,), "f32"),
    NormSpec((65536,), "bf16"),
    NormSpec((4096,), "f64"),
    NormSpec((4096,), "bf16", has_weight=False),
    NormSpec((769,), "f32", eps=1e-5),
    NormSpec((769,), "bf16", output_mask=(False, True, True)),
    NormSpec((4096,), "bf16", op="layer_norm", eps=1e-5),
    NormSpec((769,), "bf16", op="layer_norm", eps=1e-5),
    NormSpec((4096,), "bf16", op="rms_norm", eps=1e-6, residual_dtype="bf16"),
    NormSpec((4096,), "bf16", op="rms_norm_backward"),
    NormSpec((4096,), "bf16", op="rms_norm_backward", from_output=True),
]
# Further operands, which GPUs ran for sm_90, and whose emulation is not recorded.
_OPERANDS = [
    NormSpec((1024,), "f32", op="layer_norm", eps=1e-5, strided_rows=True),
    NormSpec((4096,), "f64", op="rms_norm", eps=1e-6, strided_rows=True),
    NormSpec((4096,), "bf16", weight_sets=True, strided_rows=True),
    NormSpec((4096,), "bf16", op="rms_norm", eps=1e-6, gate="after"),
    NormSpec((4096,), "bf16", op="rms_norm_backward", gate="before"),
    NormSpec((1024,), "bf16", weight_sets=True),
    NormSpec((4096,), "bf16", op="rms_norm_backward", grad_input_sum_dtype="bf16"),
]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("a", "verified on H200, driver 1; emulated"),
        ("b", "verified on H200, driver 1; FAILED in emulation"),
        ("c", "FAILED on H200, driver 1"),
        ("d", "emulated"),
        ("e", "compiled only: this very module was never run"),
    ],
)
def test_what_is_said_of_a_module(code: str, said: str) -> None:
    assert evidence.of_module(code, (_H200, _EMULATED)) == said


def test_what_is_said_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "records", lambda: (_H200, _EMULATED))
    assert evidence.of_target("sm_90") == (
        "2 of 3 modules verified on H200, driver 1; 2 of 3 modules emulated"
    )
    assert evidence.of_target("sm_80") == "compiled only, never run"


def written(folder: Path, name: str, **values: Any) -> None:
    modules = (Module(code, code in "ac", code) for code in "abcd")
    facts = {"target": "sm_90", "emulated": False, "device": "H200, driver 1", **values}
    (folder / name).write_text(evidence.to_text(facts, modules), encoding="utf-8")


def test_a_module_that_missed_is_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on hardware nor in the emulator, and what is said of it says so."""
    monkeypatch.setattr(evidence, "_FOLDER", str(tmp_path))
    written(tmp_path, "1.csv", emulated=True, device="the emulator")
    written(tmp_path, "2.csv")
    written(tmp_path, "3.csv", target="gfx942", emulated=False, device="MI300 \u00b5")
    ran = frozenset("abcd"), frozenset("ac"), frozenset("bd")
    assert evidence.records() == (
        Record("sm_90", "H200, driver 1", *ran),
        Record("gfx942", "MI300 \u00b5", *ran),
        Record("sm_90", "", *ran),
    )
    assert (
        evidence.of_module("a") == "verified on H200, driver 1; verified on MI300 \u00b5; emulated"
    )
    assert evidence.of_module("b") == (
        "FAILED on H200, driver 1; FAILED on MI300 \u00b5; FAILED in emulation"
    )
    assert evidence.of_target("sm_90") == (
        "2 of 4 modules verified on H200, driver 1; 2 of 4 modules emulated"
    )
    assert evidence.of_target("gfx942") == "2 of 4 modules verified on MI300 \u00b5"
    assert evidence.of_module("a", ()) == "compiled only: this very module was never run"


_FACTS = {"target": "sm_90", "emulated": False, "device": "H200"}
_TEXT = evidence.to_text(_FACTS, [Module("m_sm_90", True, "ab")])


def test_a_record_comes_back_as_it_was_written() -> None:
    facts, modules = evidence.from_text(_TEXT, "it")
    assert (facts, modules) == (_FACTS, [Module("m_sm_90", True, "ab")])


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("1,ab", "yes,ab", "it: line 3.passed: expected a bool, got 'yes'"),
        ("1,ab", "1", "it: line 3: expected 3 cells, got 2"),
        ("name,", "stem,", "it: line 2: expected name,passed,fingerprint, got 'stem,"),
        ("# {", "# [", "it: line 1: expected JSON: "),
        (_TEXT, "", "it: expected name,passed,fingerprint, got no such line"),
        (_TEXT, "name,passed,fingerprint\nm,1,a", "it: line 2: expected facts above the rows"),
        (_TEXT, "name,passed,fingerprint", "it: expected the facts of one run, got 0"),
        (_TEXT, "# 3\nname,passed,fingerprint", "it: line 1: expected an object, got 3"),
    ],
)
def test_damage_is_named(before: str, after: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        evidence.from_text(_TEXT.replace(before, after), "it")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": None}, "x.csv: target: expected a string, got None"),
        ({"target": 3}, "x.csv: target: expected a string, got 3"),
        ({"emulated": "no"}, "x.csv: emulated: expected a bool, got 'no'"),
        ({"device": 3}, "x.csv: device: expected a string, got 3"),
    ],
)
def test_a_fact_of_another_type_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(evidence, "_FOLDER", str(tmp_path))
    written(tmp_path, "x.csv", **change)
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        evidence.records()


@pytest.mark.parametrize("missing", ["target", "emulated", "device"])
def test_a_fact_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(evidence, "_FOLDER", str(tmp_path))
    facts = {name: value for name, value in _FACTS.items() if name != missing}
    (tmp_path / "x.csv").write_text(evidence.to_text(facts, []))
    with pytest.raises(ValueError, match=rf"^x\.csv: {missing}: expected .*, got None$"):
        evidence.records()


def test_a_damaged_record_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_FOLDER", str(tmp_path))
    (tmp_path / "x.csv").write_text(_TEXT.replace("1,ab", "1"))
    with pytest.raises(ValueError, match=r"^x\.csv: line 3: expected 3 cells, got 2$"):
        evidence.records()


def test_a_record_is_in_the_order_of_names() -> None:
    text = evidence.to_text(_FACTS, [Module("b", False, "1"), Module("a", True, "2")])
    assert [module.name for module in evidence.from_text(text, "it")[1]] == ["a", "b"]


def test_records_of_the_package() -> None:
    """They are of targets that exist, and those of hardware come first."""
    records = evidence.records()
    assert records
    for record in records:
        assert find_target(record.target).backend in ("cuda", "rocm")
        assert record.passed
    assert [not record.device for record in records] == sorted(not r.device for r in records)


def test_names_in_records_are_stems_of_files() -> None:
    """By these, `scripts/emulate stale` finds what a GPU ran."""
    for record in evidence.records():
        assert [name for name in record.names if not name.endswith(f"_{record.target}")] == []


TARGETS = sorted({record.target for record in evidence.records()})


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
def test_modules_without_evidence(target: str) -> None:
    """The emulator ran the modules that this checkout compiles, and no record is of older code.

    All of the sample for sm_90; for the others every fifth module, another fifth from target to
    target, because kernels and compiler are much the same; and further operands that hardware ran.

    Where it did not, the kernels or their compiler changed after it: run scripts/emulate again.
    A record of hardware may lack a module. It loses those whose code changed, until
    scripts/gpu_verify runs again.
    """
    found = find_target(target)
    sample = _SAMPLE if target == "sm_90" else _SAMPLE[TARGETS.index(target) % 5 :: 5]
    recorded = {name for one in evidence.records() if one.target == target for name in one.names}
    more = [spec for spec in matrix.operand_specs() if f"{spec.name}_{target}" in recorded]
    every = (*sample, *(_OPERANDS if target == "sm_90" else more))
    codes = {spec.name: fingerprint.of(built(spec, found)[0], source=spec.name) for spec in every}
    emulated = False
    for file in (resources.files("iree_lnbwd") / "data/evidence").iterdir():
        facts, modules = evidence.from_text(file.read_text(encoding="utf-8"), file.name)
        if facts["target"] != target:
            continue
        ran = {module.name.removesuffix(f"_{target}"): module for module in modules}
        older = {name for name in codes if name in ran and ran[name].fingerprint != codes[name]}
        assert not older, f"{file.name}: has code of before for {older}"
        if facts["emulated"]:
            emulated = True
            names = {spec.name for spec in sample}
            lacks = {name for name in names if name not in ran or not ran[name].passed}
            assert not lacks, f"{file.name}: lacks {lacks}"
    assert emulated, f"{target}: the emulator has no record"


def test_a_long_name_of_a_device_is_cut() -> None:
    names = ("d" * 200, "d" * 201)
    said = [evidence.of_module("a", [replace(_H200, device=name)]) for name in names]
    assert said == [f"verified on {'d' * 200}", f"verified on {'d' * 150}...{'d' * 50}"]
