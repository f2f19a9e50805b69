"""Measured schedules: the package's are legal and chosen; files are checked, merged and whole."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from iree_lnbwd import schedules
from iree_lnbwd.hardware.products import PRODUCTS, find_product, lenders
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import OnePass, measured_files
from iree_lnbwd.schedules.measured import Key, Measurement, Run, merged
from iree_lnbwd.schedules.measured_csv import from_text, measured_numbers, to_text
from iree_lnbwd.schedules.measured_files import DATA, fastest, merge, read, serving

FILES = sorted(DATA.glob("*.csv"))
MEASURED = [
    (path.stem, measurement)
    for path in FILES
    for run in read(DATA, path.stem)
    for measurement in run.measurements
]
ONE = OnePass(132, 2, 8, 8, ahead=2, slots=3, stages_weight=True)
SMALL = Measurement("layer_norm_backward", False, False, False, False, 1, 2, 768, 65536, 0.93, ONE)
_REREADS = replace(ONE, groups=1, rereads=True)
LARGE = Measurement("rms_norm_backward", True, False, False, False, 3, 4, 8192, 8192, 0.9, _REREADS)
RUN = Run("NVIDIA H200", "580.1", "3.13.0", "2026-11-21", (SMALL, LARGE))


def test_there_are_measurements() -> None:
    assert {path.stem for path in FILES} <= set(PRODUCTS)
    assert sum(len(fastest(path.stem)) for path in FILES) == len(MEASURED)
    assert len(fastest("h200")) > len(fastest("h200_as_sm_80")) > 40


def test_a_product_that_nobody_measured_has_none() -> None:
    assert fastest("t4") == {}


def test_a_product_alike_has_the_very_schedules() -> None:
    """The H100 has as many processors as the H200."""
    assert fastest("h100") == {}
    assert serving(find_product("h100")) == fastest("h200") == serving(find_product("h200"))


@pytest.mark.parametrize("name", ["b200", "b300"])
def test_a_product_with_more_processors_has_as_many_workgroups_for_each(name: str) -> None:
    product, measured = find_product(name), fastest("h200")
    assert serving(product).keys() == measured.keys()
    for key, one in serving(product).items():
        most = product.walkers(one.resident, one.cluster)
        assert 0.9 * most < one.workgroups <= most
        assert one.workgroups * one.groups * key.columns % one.vector == 0
        assert replace(one, workgroups=measured[key].workgroups) == measured[key]


@pytest.mark.parametrize("name", ["h100", "b200", "b300"])
def test_what_another_product_measured_is_chosen(name: str) -> None:
    product, spec = find_product(name), NormSpec((4096,), "bf16")
    chosen = schedules.choose(spec, find_target(name), product)
    assert isinstance(chosen, OnePass)
    expected = serving(product)[Key(spec.op, 2, spec.columns)]
    assert measured_numbers(chosen) == measured_numbers(expected)


def test_a_products_own_measurement_comes_before_another_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(SMALL, schedule=replace(ONE, warps=3))
    merge(tmp_path, "h200", RUN)
    merge(tmp_path, "h100", replace(RUN, device="NVIDIA H100", measurements=(own,)))
    monkeypatch.setattr(measured_files, "DATA", tmp_path)
    for name in ("_measurements", "fastest"):  # without what they keep of the package's files
        monkeypatch.setattr(measured_files, name, getattr(measured_files, name).__wrapped__)
    known = serving.__wrapped__(find_product("h100"))
    assert known == {SMALL.key: own.schedule, LARGE.key: LARGE.schedule}


def test_who_lends_schedules_has_its_own() -> None:
    names = {p.schedules_from for p in PRODUCTS.values()} - {None}
    assert names == {"h200", "h200_as_sm_80"}
    for name in names:
        assert name is not None
        assert fastest(name)


def test_a_gpu_without_clusters_takes_a_stand_ins_schedules_then_the_stand_ins_lenders() -> None:
    a100 = find_product("a100")
    assert [p.name for p in lenders(a100)] == ["a100", "h200_as_sm_80", "h200"]
    stand_in, h200 = fastest("h200_as_sm_80"), fastest("h200")
    both = {**h200, **stand_in}
    assert serving(a100).keys() == both.keys()
    assert any(h200[key] != one for key, one in stand_in.items() if key in h200)
    for key, one in serving(a100).items():
        assert replace(one, workgroups=both[key].workgroups) == both[key]


@pytest.mark.parametrize("name", ["a100", "rtx3090", "rtx4090", "l4", "l40s"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_schedules_of_a_stand_in_fit_what_a_gpu_has(name: str, dtype: str) -> None:
    """Measurements choose up to 8192 columns, by as many workgroups as the GPU runs at once."""
    product, target = find_product(name), find_target(name)
    for columns in (395, 607, 1288, 2420, 4584, 5703, 8003):
        spec = NormSpec((columns,), dtype)
        chosen = schedules.choose(spec, target, product)
        assert isinstance(chosen, OnePass)
        assert chosen.has_room(spec, target)
        most = chosen.resident * product.processors
        assert 0.9 * most < chosen.workgroups <= most


@pytest.mark.parametrize(
    ("product", "measurement"), MEASURED, ids=[f"{p}-{m.key}" for p, m in MEASURED]
)
def test_every_measured_schedule_is_legal_and_chosen(
    product: str, measurement: Measurement
) -> None:
    target = find_target(product)
    dtype = {2: "bf16", 4: "f32"}[measurement.element_bytes]
    residual = dtype if measurement.has_residual else None
    spec = NormSpec(
        (measurement.columns,),
        dtype,
        op=measurement.op,
        residual_dtype=residual,
        from_output=measurement.from_output,
        gate="after" if measurement.has_gate else None,
        weight_sets=measurement.has_sets,
        grad_outputs=measurement.grad_outputs,
    )
    chosen = schedules.choose(spec, target, find_product(product))
    assert isinstance(chosen, OnePass)
    assert measured_numbers(chosen) == measured_numbers(measurement.schedule)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_of_the_package_is_as_it_would_be_written(path: Path) -> None:
    assert to_text(path.stem, read(DATA, path.stem)) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("runs", [(), (RUN,), (RUN, replace(RUN, date=None, measurements=()))])
def test_runs_survive_a_file(runs: tuple[Run, ...]) -> None:
    assert from_text(to_text("h200", runs), "h200", "it") == runs


def test_a_new_run_replaces_what_it_measured_and_nothing_else() -> None:
    better = replace(SMALL, share=0.97, schedule=replace(ONE, workgroups=264))
    new = Run("NVIDIA H200", "590.2", "3.14.0", "2027-01-01", (better,))
    assert merged((RUN,), new) == (replace(RUN, measurements=(LARGE,)), new)


def test_a_run_of_which_nothing_is_left_goes() -> None:
    new = replace(RUN, driver="590.2", measurements=(LARGE, SMALL))
    assert merged((RUN,), new) == (replace(new, measurements=(SMALL, LARGE)),)


def test_what_two_passes_might_beat_is_left_to_them() -> None:
    slow = replace(RUN, driver="590.2", measurements=(replace(SMALL, share=0.6),))
    assert merged((RUN,), slow) == (replace(RUN, measurements=(LARGE,)),)


def test_merging_into_a_folder(tmp_path: Path) -> None:
    other = tmp_path / "a100.csv"
    other.write_text("not ours to read")
    path = merge(tmp_path, "h200", RUN)
    assert path == tmp_path / "h200.csv"
    assert read(tmp_path, "h200") == (RUN,)
    added = replace(RUN, measurements=(replace(SMALL, columns=1024),))
    merge(tmp_path, "h200", added)
    assert read(tmp_path, "h200") == (RUN, added)
    assert other.read_text() == "not ours to read"
    assert set(tmp_path.iterdir()) == {other, path}


def test_a_damaged_file_is_not_merged_into(tmp_path: Path) -> None:
    path = tmp_path / "h200.csv"
    path.write_text('# {"product": "h200"')
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 1: expected JSON: ")):
        merge(tmp_path, "h200", RUN)
    assert path.read_text() == '# {"product": "h200"'


FACTS = (
    '# {"product": "h200", "device": "NVIDIA H200", "driver": "580.1", '
    '"iree_base_compiler": "3.13.0", "date": "2026-11-21"}'
)
NAMES = (
    "op,has_residual,from_output,has_gate,has_sets,grad_outputs,element_bytes,columns,rows,share,"
    + ",".join(measured_numbers(ONE))
)
FIRST = "layer_norm_backward,0,0,0,0,1,2,768,65536,0.93,132,2,8,8,2,3,0,1,0,"
TEXT = to_text("h200", (RUN,))


def test_a_file_as_it_is_read_by_people() -> None:
    facts, names, first, second = TEXT.splitlines()
    assert (facts, names) == (FACTS, NAMES)
    assert first.startswith(FIRST)
    assert second.startswith("rms_norm_backward,1,0,0,0,3,4,8192,8192,0.9,132,1,8,8,2,3,1,1,0,")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"h200"', '"h100"', "line 1.product: expected 'h200', got 'h100'"),
        ('"driver": "580.1", ', "", "line 1.driver: missing"),
        ('"580.1"', "580", "line 1.driver: expected a string, got 580"),
        ('"device"', '"note": 1, "device"', "line 1: unknown field 'note', expected product, "),
        (FACTS, "# []", "line 1: expected an object, got []"),
        (FACTS, "# [", "line 1: expected JSON: "),
        (FACTS, '# {"product": NaN}', "line 1: expected JSON: "),
        (FACTS, "# " + "[" * 100000, "line 1: expected JSON: "),
        (FACTS + "\n", "", "line 2: expected facts above the rows, got 'layer_norm_backward,"),
        ("2026-11-21", "soon", "date: expected a date of ISO 8601 or null, got 'soon'"),
        ("op,", "name,", f"line 2: expected {NAMES}, got 'name,"),
        (",rows", "", "line 2: expected op,"),
        (NAMES + "\n", "", "line 2: expected op,"),
        (TEXT, "", ": expected op,"),
        (TEXT, FACTS, ": expected op,"),
        (",0.93,", ",", "line 3: expected "),
        (",0.93,", ",0.93,0.94,", "line 3: expected "),
        (",0.93,", ",True,", "line 3.share: expected a number above 0, got 'True'"),
        (",0.93,", ",nan,", "line 3.share: expected a number above 0, got nan"),
        (",768,", ",0,", "line 3.columns: expected an int of at least 1, got 0"),
        (",768,", f",{'7' * 5000},", "line 3.columns: expected an int of at least 1, got '777"),
        (",65536,", ",many,", "line 3.rows: expected an int of at least 1, got 'many'"),
        (",65536,", ",6.5,", "line 3.rows: expected an int of at least 1, got '6.5'"),
        (
            FIRST,
            FIRST.replace("8,8", "x,8"),
            "line 3.warps: expected an int of at least 0, got 'x'",
        ),
        (FIRST, FIRST.replace("3,0", "3,2"), "line 3.rereads: expected a bool, got '2'"),
        (FIRST, FIRST.replace("3,0", "3,"), "line 3.rereads: expected a bool, got ''"),
        (
            "layer_norm_backward",
            "layer_norm",
            "line 3.op: expected one of layer_norm_backward, rms_norm_backward, got 'layer_norm'",
        ),
        ("backward,0,0", "backward,no,0", "line 3.has_residual: expected a bool, got 'no'"),
        (
            TEXT,
            TEXT + TEXT.replace(NAMES + "\n", ""),
            "line 6: expected one schedule for each op, element_bytes, columns, has_residual, "
            "from_output, has_gate, has_sets, grad_outputs, got a second one for "
            "layer_norm_backward, 2, 768, False, False, False, False, 1",
        ),
    ],
)
def test_damage_is_named_with_its_file_and_line(
    before: str, after: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "h200.csv"
    assert before in TEXT
    path.write_text(TEXT.replace(before, after))
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        read(tmp_path, "h200")
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("content", [b"", b"[", b"\xff", b"[" * 100000])
def test_what_is_no_table_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "h200.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}: ")) as caught:
        read(tmp_path, "h200")
    assert "expected" in str(caught.value)
    assert len(str(caught.value)) < 600
