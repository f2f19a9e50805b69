"""Any number in any field of a schedule: refused at once and in one line, or compiled and right."""

from __future__ import annotations

import json
import tracemalloc
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import assert_right, random_generator

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.devices import DeviceUri, Gpu
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.schedules import (
    FewRows,
    Forward,
    OnePass,
    RowBlocks,
    Schedule,
    TwoPass,
    WholeTensors,
)
from iree_lnbwd.stores import tuned_choice, tuned_folder
from iree_lnbwd.stores.tuned import Tuned, code_sha256
from iree_lnbwd.stores.tuned_json import to_text
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm

BACKWARD = NormSpec((96,), "bf16")
FORWARD = NormSpec((96,), "bf16", op="layer_norm", eps=1e-5)
FEW = FewRows(rows=8, warps=4, tile=16, tile_vector=2)
COPIED = OnePass(4, 1, 2, 4, ahead=2, slots=3, rereads=True, stages_weight=True, few_rows=FEW)
# By name: a legal schedule, and what it is for.
LEGAL: dict[str, tuple[Schedule, NormSpec, str]] = {
    "one pass": (OnePass(4, 4, 1, 2, subgroup_rows=2, few_rows=FEW), BACKWARD, "gfx942"),
    "in subgroups": (OnePass(4, 2, 1, 2, subgroup_rows=2, few_rows=FEW), BACKWARD, "gfx1100"),
    "copied": (COPIED, BACKWARD, "sm_90"),
    "in bulk": (OnePass(4, 1, 2, 4, ahead=1, slots=1, bulk=True), BACKWARD, "sm_90"),
    "in clusters": (OnePass(4, 1, 1, 8, cluster=2), BACKWARD, "sm_90"),
    "two passes": (TwoPass(4, 2, 2, 2, 2), BACKWARD, "gfx90a"),
    "forward": (Forward(2, 64, 2, 1, in_registers=True, most_few_rows=4), FORWARD, "gfx942"),
    "read again": (Forward(1, 64, 1, 1, in_registers=False), FORWARD, "sm_80"),
    "row blocks": (RowBlocks(4, 2, 16), BACKWARD, "generic"),
}
NUMBERS = (0, -1, 1, 3, 7, 8, 33, 1025, 10**8, 2**31 - 1, 2**63, -(2**63), 10**5000)
NO_NUMBERS = (True, 1.0, None, "1")
_TRIED = 3  # of what is not refused
_MOST_MEMORY = 1 << 24  # of an answer
_LONGEST = 1000  # characters of a message


def changed(how: Schedule, values: tuple[Any, ...]) -> Iterator[Schedule]:
    """The schedule with each number in turn replaced by each of these values."""
    for field in fields(how):
        if field.type == "int":
            yield from (replace(how, **{field.name: value}) for value in values)
    if isinstance(how, OnePass) and how.few_rows is not None:
        for field in fields(FewRows):
            few = (replace(how.few_rows, **{field.name: value}) for value in values)
            yield from (replace(how, few_rows=each) for each in few)


def why_illegal(how: Schedule, spec: NormSpec, target: Target) -> str | None:
    assert not isinstance(how, WholeTensors)
    return how.illegal(spec, target)


@pytest.mark.parametrize("name", LEGAL)
def test_compile_answers_at_once_and_in_one_line(name: str) -> None:
    how, spec, on = LEGAL[name]
    target = find_target(on)
    assert why_illegal(how, spec, target) is None
    for one in changed(how, NUMBERS):
        if why_illegal(one, spec, target) is not None:
            with pytest.raises(
                ValueError, match=f"^schedule: illegal for {spec.name} on {on}: "
            ) as e:
                compiler.source_text(spec, target, schedule=one)
            assert str(e.value).isprintable()
            assert len(str(e.value)) < _LONGEST
    for one in changed(how, NO_NUMBERS):
        with pytest.raises(TypeError, match=r"^schedule\.\w+(\.\w+)?: expected int, got "):
            compiler.source_text(spec, target, schedule=one)
    tracemalloc.start()
    try:
        for one in changed(how, (10**8, 2**31 - 1)):
            why_illegal(one, spec, target)
        assert tracemalloc.get_traced_memory()[1] < _MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.drawn
@pytest.mark.parametrize("name", [name for name in LEGAL if name != "row blocks"])
def test_what_is_not_refused_is_right(name: str) -> None:
    how, spec, on = LEGAL[name]
    target, rng = find_target(on), random_generator()
    legal = [one for one in changed(how, NUMBERS) if why_illegal(one, spec, target) is None]
    for one in rng.permutation(np.array([*legal, None], object)[:-1])[:_TRIED]:
        op = EmulatedNorm(compiler.build(spec, target, schedule=one)[0])
        for rows in (3, 41):
            call = matrix.random_call(spec, rows, rng)
            assert_right(op.run(call), call)


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """As if another schedule than the choice had won on a GPU that is here."""
    gpu = Gpu("NVIDIA H200", 132, 50 << 20)
    monkeypatch.setenv("IREE_LNBWD_TUNING", str(tmp_path / "tuning"))
    monkeypatch.setattr(tuned_choice, "gpu_of", lambda uri: gpu)
    spec, target = NormSpec((1024,), "bf16"), find_target("sm_90")
    chosen = schedules.choose(spec, target)
    assert isinstance(chosen, OnePass)
    how = replace(chosen, resident=chosen.resident + 1)
    return Tuned(
        spec=spec, target="sm_90", gpu=gpu.name, processors=gpu.processors,
        compiler=compiler.compiler_version(), code_sha256=code_sha256(spec, target, how),
        date="2026-11-21", rows=65536, candidates=48, microseconds=90.5, chosen_microseconds=100.0,
        chosen=chosen, schedule=how,
    )  # fmt: skip


BAD_IN_FILES = (0, -1, 3, 10**8, 2**31 - 1, 2**63, -(2**63), True, 1.5, None, "1")


def test_a_file_with_any_number_stops_no_compilation(tuned: Tuned, tmp_path: Path) -> None:
    """What cannot be used leads to a warning; importing it is refused, and loses nothing."""
    target, uri = find_target(tuned.target), DeviceUri.parse("cuda")
    tuned_folder.keep(tuned)
    (kept,) = tuned_folder.directory().iterdir()
    good = kept.read_text()
    assert tuned_choice.for_device(tuned.spec, target, uri) == tuned
    few = tuned.chosen.few_rows if isinstance(tuned.chosen, OnePass) else None
    assert few is not None
    paths: list[tuple[str, ...]] = [(f.name,) for f in fields(OnePass)]
    paths += [("few_rows", f.name) for f in fields(FewRows)]
    given = tmp_path / "given.json"
    refused = 0
    for which in ("schedule", "chosen"):
        for path in paths:
            for bad in BAD_IN_FILES:
                values = json.loads(to_text((tuned,)))
                place = values["tuned"][0][which]
                for step in path[:-1]:
                    place = place[step]
                place[path[-1]] = bad
                text = json.dumps(values)
                kept.write_text(text)
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    usable = tuned_choice.for_device(tuned.spec, target, uri)
                if usable is not None:  # another name of the same schedule
                    assert usable == tuned
                    continue
                given.write_text(text)
                kept.write_text(good)
                if not told:  # it is legal, and other code than was timed
                    continue
                (warning,) = told
                assert str(warning.message).startswith(f"tuned schedule not used: {kept}: $")
                with pytest.raises(ValueError, match=r": \$\.tuned\[0\]\.") as error:
                    tuned_folder.take(given)
                assert str(error.value).isprintable()
                assert len(str(error.value)) < _LONGEST
                assert kept.read_text() == good
                refused += 1
    assert refused > len(paths) * len(BAD_IN_FILES)
