"""What was tuned, on disk: whole, refused if hostile, ignored if stale, used where it is for."""

from __future__ import annotations

import json
import stat
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iree_lnbwd import NormSpec, cli, schedules
from iree_lnbwd.calls import modules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.disk.user_folders import UnusableError
from iree_lnbwd.hardware.devices import DeviceUri, Gpu
from iree_lnbwd.hardware.products import find_product
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.schedules import Forward, OnePass
from iree_lnbwd.stores import tuned_choice, tuned_folder
from iree_lnbwd.stores.tuned import Tuned, code_sha256, subject, why_stale
from iree_lnbwd.stores.tuned_json import from_text, to_text

SM_90, CUDA = find_target("sm_90"), DeviceUri.parse("cuda")
BACKWARD = NormSpec((1024,), "bf16")
FORWARD = NormSpec((1024,), "bf16", op="rms_norm", eps=1e-5)
GPU = Gpu("NVIDIA H200", 132, 50 << 20)


def tuned(spec: NormSpec) -> Tuned:
    """As if another schedule than the choice had won."""
    chosen = schedules.choose(spec, SM_90)
    assert isinstance(chosen, OnePass | Forward)
    schedule = replace(chosen, resident=chosen.resident + 1)
    return Tuned(
        spec=spec,
        target="sm_90",
        gpu=GPU.name,
        processors=GPU.processors,
        compiler=compiler.compiler_version(),
        code_sha256=code_sha256(spec, SM_90, schedule),
        date="2026-11-21",
        rows=65536,
        candidates=48,
        microseconds=90.5,
        chosen_microseconds=100.0,
        chosen=chosen,
        schedule=schedule,
    )


@pytest.fixture(scope="module")
def backward() -> Tuned:
    return tuned(BACKWARD)


@pytest.fixture(scope="module")
def forward() -> Tuned:
    return tuned(FORWARD)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tuning folder: not there yet."""
    monkeypatch.setenv("IREE_LNBWD_TUNING", str(tmp_path / "tuning"))
    monkeypatch.setattr(tuned_choice, "gpu_of", lambda uri: GPU)
    return tmp_path / "tuning"


def refuse(error: ValueError) -> None:
    raise error


# --- files -----------------------------------------------------------------------------------


def test_entries_survive_a_file(backward: Tuned, forward: Tuned) -> None:
    assert from_text(to_text((backward, forward)), "it") == (backward, forward)
    assert from_text(to_text(()), "it") == ()


def _set(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for step in path[:-1]:
            values = values[step]
        values[path[-1]] = to

    return change


FIRST, SECOND = ("tuned", 0), ("tuned", 1)
HOSTILE: dict[str, tuple[Callable[[Any], object], str]] = {
    "another schema": (_set("schema_version", to=2), "$.schema_version: expected 1, got 2"),
    "no schema": (lambda v: v.pop("schema_version"), "$.schema_version: missing"),
    "more": (_set("note", to=1), "$: unknown field 'note'"),
    "no list": (_set("tuned", to={}), "$.tuned: expected a list"),
    "no entry": (_set(*FIRST, to=3), "$.tuned[0]: expected an object, got 3"),
    "more in an entry": (_set(*FIRST, "why", to=1), "$.tuned[0]: unknown field 'why'"),
    "less": (lambda v: v["tuned"][0].pop("gpu"), "$.tuned[0].gpu: missing"),
    "twice": (lambda v: v["tuned"].append(v["tuned"][0]), "$.tuned[2]: expected one entry"),
    "another GPU's name": (_set(*FIRST, "gpu", to="a\x1b[2K"), "gpu: expected 1 to 256 printable"),
    "a long name": (_set(*FIRST, "gpu", to="a" * 257), "gpu: expected 1 to 256 printable"),
    "a product": (_set(*FIRST, "target", to="h200"), "target: expected the name of a GPU target"),
    "a CPU": (_set(*FIRST, "target", to="host"), "target: expected the name of a GPU target"),
    "no target": (_set(*FIRST, "target", to="sm_1"), "target: expected the name of a GPU target"),
    "no date": (_set(*FIRST, "date", to="now"), "date: expected a date of ISO 8601, got 'now'"),
    "no time": (_set(*FIRST, "microseconds", to=0), "microseconds: expected a number above 0"),
    "forever": (_set(*FIRST, "microseconds", to=10**400), "microseconds: expected a number above"),
    "no processors": (_set(*FIRST, "processors", to=True), "processors: expected an int from"),
    "rows": (_set(*FIRST, "rows", to=2**63), "rows: expected an int from 1 to 2147483647"),
    "candidates": (_set(*FIRST, "candidates", to=0.5), "candidates: expected an int from 1"),
    "spec": (_set(*FIRST, "spec", "dtype", to="f8"), "spec: dtype: expected one of"),
    "fixed rows": (_set(*FIRST, "spec", "rows", to=7), "spec: expected any rows"),
    "two dimensions": (_set(*FIRST, "spec", "normalized_shape", to=[2, 512]), "spec: expected any"),
    "no form": (_set(*FIRST, "schedule", "form", to="X"), "schedule: expected a known form"),
    "a list as form": (_set(*FIRST, "schedule", "form", to=[]), "schedule: expected a known form"),
    "whole tensors": (
        _set(*FIRST, "schedule", to={"form": "WholeTensors"}),
        "schedule: expected a schedule of a GPU",
    ),
    "another field": (_set(*FIRST, "schedule", "x", to=1), "schedule: unknown field 'x'"),
    "a wrong type": (_set(*FIRST, "schedule", "warps", to="1"), "warps: expected int, got '1'"),
    "a bool": (_set(*FIRST, "schedule", "warps", to=True), "warps: expected int, got True"),
    "huge": (_set(*FIRST, "schedule", "workgroups", to=1 << 40), "workgroups: expected an int"),
    "negative": (_set(*FIRST, "schedule", "few_rows", "rows", to=-1), "few_rows.rows: expected"),
    "deep": (
        _set(*FIRST, "schedule", "few_rows", to=json.loads('{"a":' * 900 + "1" + "}" * 900)),
        "schedule.few_rows: unknown field 'a' of FewRows",
    ),
    "no number": (_set(*FIRST, "schedule", "few_rows", to=1), "few_rows: expected an object"),
    "no tile": (_set(*FIRST, "schedule", "few_rows", "tile", to=0), "tile: expected an int from 1"),
    "illegal": (_set(*FIRST, "schedule", "warps", to=64), "schedule: illegal for layer_norm_"),
    "zero": (
        _set(*FIRST, "schedule", "vector", to=0),
        "schedule.vector: expected an int from 1 to",
    ),
    "other sums": (
        _set(*SECOND, "schedule", "threads", to=128),
        "it shares a row out in another way than the choice without tuning",
    ),
    "a forward's": (
        lambda v: v["tuned"][0].update(schedule=v["tuned"][1]["schedule"]),
        "expected two schedules of a backward or of a forward, got Forward and OnePass",
    ),
    "both a forward's": (
        lambda v: v["tuned"][0].update(
            schedule=v["tuned"][1]["schedule"], chosen=v["tuned"][1]["chosen"]
        ),
        "Forward is no schedule of layer_norm_backward",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name_and_nothing_is_kept(
    name: str, backward: Tuned, forward: Tuned, tmp_path: Path, place: Path
) -> None:
    change, said = HOSTILE[name]
    values = json.loads(to_text((backward, forward)))
    change(values)
    path = tmp_path / "given.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared below
        tuned_folder.take(path)
    assert str(refused.value).startswith(f"{path}: $")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not place.exists()


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"a": 1, "a": 2}', '{"a": NaN}', "\xff"])
def test_json_that_can_be_misread_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"given\.json: expected JSON: "):
        tuned_folder.take(path)


# --- the folder ------------------------------------------------------------------------------


def test_a_file_that_is_shared(backward: Tuned, forward: Tuned, tmp_path: Path) -> None:
    """From one user's folder to another's, and only where there is something to share."""
    path = tmp_path / "shared.json"
    with pytest.raises(ValueError, match=r"^export: expected something tuned in .*, got nothing$"):
        tuned_folder.export(path)
    assert not path.exists()
    for each in (backward, forward):
        tuned_folder.keep(each)
    assert tuned_folder.export(path) == 2
    for file in tuned_folder.directory().iterdir():
        file.unlink()
    assert tuned_folder.find(BACKWARD, SM_90, GPU) is None
    assert set(tuned_folder.take(path)) == {backward, forward}
    assert tuned_folder.find(BACKWARD, SM_90, GPU) == backward
    assert tuned_folder.find(FORWARD, SM_90, GPU) == forward


def test_it_is_for_us_alone_and_has_whole_files(backward: Tuned, place: Path) -> None:
    tuned_folder.keep(backward)
    tuned_folder.keep(replace(backward, date="2026-11-22"))  # in place of the first
    (file,) = place.iterdir()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert not file.stat().st_mode & 0o022
    assert tuned_folder.kept(refuse) == (replace(backward, date="2026-11-22"),)


def test_several_at_once_lose_nothing(backward: Tuned) -> None:
    """Of one norm and of several; each file is whole whenever it is read."""
    all_of_them = [
        replace(backward, gpu=f"GPU {number % 4}", date=f"2026-11-{number + 1:02}")
        for number in range(16)
    ]
    threads = [threading.Thread(target=tuned_folder.keep, args=(each,)) for each in all_of_them]
    for thread in threads:
        thread.start()
        tuned_folder.kept(refuse)
    for thread in threads:
        thread.join()
    kept = tuned_folder.kept(refuse)
    assert {each.gpu for each in kept} == {f"GPU {number}" for number in range(4)}
    assert set(kept) <= set(all_of_them)


@pytest.mark.parametrize("which", ["the folder", "a file"])
def test_what_others_can_write_to_is_not_used(which: str, backward: Tuned, place: Path) -> None:
    tuned_folder.keep(backward)
    what = place if which == "the folder" else next(place.iterdir())
    what.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="^tuned schedule not used: .* others can write to it"):
        assert tuned_choice.for_device(BACKWARD, SM_90, CUDA) is None
    with pytest.raises(UnusableError, match="IREE_LNBWD_TUNING can name a folder of your own"):
        tuned_folder.export(place / "x")


def test_a_damaged_file_is_not_used(backward: Tuned, forward: Tuned, place: Path) -> None:
    """It leads to a warning, and the others are still used."""
    tuned_folder.keep(backward)
    next(place.iterdir()).write_text("{")
    tuned_folder.keep(forward)
    with pytest.warns(RuntimeWarning, match=r"^tuned schedule not used: .*: expected JSON"):
        assert tuned_choice.for_device(BACKWARD, SM_90, CUDA) is None
    assert tuned_choice.for_device(FORWARD, SM_90, CUDA) == forward
    with pytest.warns(RuntimeWarning, match=r"^tuned schedule not used: .*: expected JSON"):
        assert tuned_choice.for_product(FORWARD, SM_90, find_product("h200")) == forward
    with pytest.raises(ValueError, match="expected JSON"):
        tuned_folder.export(place / "x")


def test_a_file_under_another_name_says_nothing(backward: Tuned, place: Path) -> None:
    tuned_folder.keep(backward)
    (file,) = place.iterdir()
    file.rename(place / f"other_{file.name}")
    assert tuned_folder.find(BACKWARD, SM_90, GPU) is None
    assert tuned_folder.kept(refuse) == ()


PLACES: dict[str, tuple[dict[str, str], str]] = {
    "named": ({"IREE_LNBWD_TUNING": "/named", "XDG_DATA_HOME": "/xdg"}, "/named"),
    "XDG": ({"IREE_LNBWD_TUNING": "", "XDG_DATA_HOME": "/xdg"}, "/xdg/iree-lnbwd"),
    "home": ({"IREE_LNBWD_TUNING": "", "XDG_DATA_HOME": ""}, "/home/u/.local/share/iree-lnbwd"),
}


@pytest.mark.parametrize("name", PLACES)
def test_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, expected = PLACES[name]
    for variable, value in {"HOME": "/home/u", **values}.items():
        monkeypatch.setenv(variable, value)
    assert tuned_folder.directory() == Path(expected)


def test_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing was tuned; only who wants to keep something has to know."""
    monkeypatch.setenv("IREE_LNBWD_TUNING", "relative")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned_choice.for_device(BACKWARD, SM_90, CUDA) is None
    with pytest.raises(UnusableError, match="IREE_LNBWD_TUNING: expected an absolute path"):
        tuned_folder.make()


# --- what holds, and where -------------------------------------------------------------------

STALE: dict[str, Callable[[Tuned], Tuned]] = {
    "other code": lambda t: replace(t, code_sha256="0" * 64),
    "another choice": lambda t: replace(t, chosen=replace(t.chosen, resident=9)),
}


@pytest.mark.parametrize("name", STALE)
def test_what_no_longer_holds_is_ignored(name: str, backward: Tuned) -> None:
    """As after an upgrade: it is no error, and no warning."""
    tuned_folder.keep(STALE[name](backward))
    assert tuned_folder.find(BACKWARD, SM_90, GPU) is not None
    assert why_stale(STALE[name](backward))
    assert tuned_choice.for_device(BACKWARD, SM_90, CUDA) is None
    tuned_folder.keep(backward)
    assert tuned_choice.for_device(BACKWARD, SM_90, CUDA) == backward


def test_another_compiler_makes_it_stale(backward: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_folder.keep(backward)
    monkeypatch.setattr(compiler, "compiler_version", lambda: "3.14.0")
    assert tuned_choice.for_device(BACKWARD, SM_90, CUDA) is None


def test_which_gpu_it_is_for(backward: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_folder.keep(backward)
    for gpu in (replace(GPU, name="NVIDIA H100"), replace(GPU, processors=114)):
        monkeypatch.setattr(tuned_choice, "gpu_of", lambda uri, gpu=gpu: gpu)
        assert tuned_choice.for_device(BACKWARD, SM_90, CUDA) is None
    assert tuned_choice.for_product(BACKWARD, SM_90, find_product("h200")) == backward
    assert tuned_choice.for_product(BACKWARD, SM_90, find_product("h100")) is None
    tuned_folder.keep(replace(backward, processors=114, date="2026-12-01"))  # a part of one
    assert tuned_choice.for_product(BACKWARD, SM_90, find_product("h200")) == backward


def test_specs_that_share_it(backward: Tuned, forward: Tuned) -> None:
    """Those that no schedule depends on."""
    tuned_folder.keep(backward)
    tuned_folder.keep(forward)
    for spec, shared in (
        (replace(BACKWARD, normalized_shape=(4, 256)), backward),
        (replace(BACKWARD, weight_offset=1.0), backward),
        (replace(FORWARD, eps=1e-6), forward),
        (replace(BACKWARD, rows=64), None),
        (replace(BACKWARD, output_mask=(True, False, False)), None),
        (replace(BACKWARD, eps=1e-5), None),
        (replace(FORWARD, residual_dtype="bf16"), None),
        (replace(BACKWARD, dtype="f16"), None),
    ):
        assert tuned_choice.for_device(spec, SM_90, CUDA) == shared, spec.name
        if shared is not None:
            assert subject(spec) == shared.spec
            how = schedules.choose(spec, SM_90)
            assert how == shared.chosen


def test_a_gpu_is_not_looked_for_where_nothing_was_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_choice, "gpu_of", lambda uri: pytest.fail("it was"))
    assert tuned_choice.for_device(BACKWARD, SM_90, CUDA) is None
    tuned_folder.make()
    assert tuned_choice.for_device(NormSpec((8,)), find_target("host"), CUDA) is None


# --- the command -----------------------------------------------------------------------------


def test_export_and_import(
    backward: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.json"
    tuned_folder.keep(replace(backward, code_sha256="0" * 64))
    assert cli.main(["tuned", "export", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: 1 entries\n"
    assert cli.main(["tuned", "import", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == f"{tuned_folder.directory()}: 1 entries from {path}"
    assert "for NVIDIA H200 (132 processors): not used: other code would be compiled" in said


WORDS = {
    "a CPU": (
        ["tune", "--normalized-shape=8", "--device=local-task"],
        "device: expected a GPU to tune on",
    ),
    "no device": (
        ["tune", "--normalized-shape=8", "--device=cuda:1"],
        "device: expected one of local-task",
    ),
    "candidates": (
        ["tune", "--normalized-shape=8", "--candidates=0"],
        "candidates: expected an int of",
    ),
    "rows": (["tune", "--normalized-shape=8", "--rows=3"], "specs: expected rows of None, got 3"),
    "no file": (
        ["tuned", "import", "/nowhere/x"],
        "/nowhere/x: cannot be read: No such file or directory",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_one_clear_error(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = WORDS[name]
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"iree-lnbwd: error: {said}")
    assert err.count("\n") == 1
    assert not place.exists()


def test_what_a_process_has_is_let_go() -> None:
    """So that it can be loaded by another schedule."""
    spec, uri = NormSpec((21,), eps=0.125), DeviceUri.parse("local-task")
    first = modules.loaded(spec, uri)
    assert (spec, uri) in modules.in_use()
    assert modules.loaded(spec, uri) is first
    modules.forget([spec], uri)
    assert (spec, uri) not in modules.in_use()
    assert modules.loaded(spec, uri) is not first
