"""Texts of files that somebody made to deceive: in messages they are plain, on one line, and short.

Files that would grow without bound when they are read are refused before they do.
"""

from __future__ import annotations

import io
import json
import re
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iree_lnbwd import NormSpec, cli, runtime
from iree_lnbwd.bundles.container import BundleFile
from iree_lnbwd.compiling import compiler, iree_compile
from iree_lnbwd.errors import ArtifactError, DeviceError, plain, shown
from iree_lnbwd.graph import Graph
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.notices import warn
from iree_lnbwd.ops import npz
from iree_lnbwd.schedules import schedule_from_dict
from iree_lnbwd.stores import tuned_folder
from iree_lnbwd.verification import evidence, verify
from iree_lnbwd.vmfb import artifact
from iree_lnbwd.vmfb.artifact import Manifest
from iree_lnbwd.vmfb.description import describe

# A color, a line's end, a mark that has letters in reverse order, and half of a pair.
ODD = "é\x1b[31m\n\u202e\ud800"
LONG = "x" * 100_000
_LONGEST = 4200
SPEC, GENERIC = NormSpec((8,)), find_target("generic")


def expect_plain(text: str) -> None:
    assert text.isprintable(), text[:300]
    assert len(text) <= _LONGEST


@pytest.mark.parametrize("most", [1, 4, 80, 4000])
def test_plain(most: int) -> None:
    for text in (ODD, LONG, ODD * 30_000, "", "plain", Path(ODD)):
        found = plain(text, most)
        assert found.isprintable()
        assert len(found) <= most + len("...")
        assert found == str(text) or not str(text).isprintable() or len(str(text)) > most


def test_a_long_text_keeps_its_end() -> None:
    assert plain(f"{LONG}: file name too long", 400).endswith("xx: file name too long")


class _Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_any_value_can_be_shown() -> None:
    for value in (10**5000, [10**5000], _Unshowable(), {ODD: LONG}, np.ones(9)):
        expect_plain(shown(value))


@pytest.mark.parametrize("kind", [ArtifactError, DeviceError])
def test_errors_about_files_and_devices_are_plain(kind: type[Exception]) -> None:
    for text in (ODD, LONG):
        expect_plain(str(kind(f"{text}: altered")))
    assert str(kind("x: y")) == "x: y"


def test_warnings_are_plain() -> None:
    with pytest.warns(RuntimeWarning) as told:
        warn(ODD + LONG)
    expect_plain(str(told[0].message))


def written(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


# --- each kind of file -------------------------------------------------------------------------

NAMES = pytest.mark.parametrize(
    "text", [ODD.replace("\ud800", ""), LONG[:60_000]], ids=["odd", "long"]
)


@NAMES
@pytest.mark.parametrize("damage", [False, True])
def test_modules(text: str, damage: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "x.vmfb", {text: b"content"})
    if damage:
        path.write_bytes(path.read_bytes().replace(b"content", b"CONTENT"))
    with pytest.raises(ArtifactError) as refused:
        runtime.load(path)
    expect_plain(str(refused.value))


@pytest.mark.parametrize("name", ["target", "spec", "schedule"])
def test_what_a_module_says_of_itself(name: str) -> None:
    text, manifest = compiler.plan(SPEC, GENERIC)
    value = json.dumps({"form": LONG, ODD: 1}) if name != "target" else f"{LONG}\n"
    said = re.compile(rf"iree_lnbwd\.{name} = \"(?:[^\"\\]|\\.)*\"")
    changed = said.sub(lambda _: f"iree_lnbwd.{name} = {json.dumps(value)}", text, count=1)
    assert changed != text
    vmfb = iree_compile.run(changed, "none", manifest.flags, "a module")
    with pytest.raises(ArtifactError, match=r"^x: no module of iree-lnbwd: ") as refused:
        describe(vmfb, source="x")
    expect_plain(str(refused.value))


@pytest.mark.parametrize("text", [ODD, LONG], ids=["odd", "long"])
def test_manifests(text: str) -> None:
    _, manifest = compiler.plan(SPEC, GENERIC)
    for change in (
        {"spec": {text: 1}},
        {"spec": {"normalized_shape": text}},
        {"spec": {"normalized_shape": [8], "dtype": text}},
        {"spec": {"normalized_shape": [1] * 100_000}},
        {"schedule": {"form": text}},
        {"schedule": {"form": "RowBlocks", text: 1}},
        {"schedule": {"form": "RowBlocks", "workgroups": text, "block": 1, "vector": 1}},
        {"schema_version": text},
    ):
        values = json.loads(manifest.to_json()) | change
        del values["manifest_sha256"]
        values["manifest_sha256"] = artifact.digest(json.dumps(values, sort_keys=True).encode())
        with pytest.raises(ArtifactError) as refused:
            Manifest.from_json(json.dumps(values), path=Path(text))
        expect_plain(str(refused.value))


@NAMES
def test_bundles(text: str, tmp_path: Path) -> None:
    for members in ({text: b""}, {"index.json": json.dumps({"format": text}).encode()}):
        with pytest.raises(ArtifactError) as refused:
            BundleFile(written(tmp_path / "x.lnb", members))
        expect_plain(str(refused.value))


@pytest.mark.parametrize("text", [ODD, LONG], ids=["odd", "long"])
def test_tuning_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / ODD.replace("\ud800", "")
    for content in (
        json.dumps({text: 1}),
        json.dumps({"schema_version": text, "tuned": []}),
        json.dumps({"schema_version": 1, "tuned": [text]}),
        "1" * 4000 + "e999",
        "9" * 100_000,
        f'{{"{text}'.encode("utf-8", "replace").decode(),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"\$|JSON") as refused:
            tuned_folder.take(path)
        expect_plain(str(refused.value))


@NAMES
def test_arrays(text: str, tmp_path: Path) -> None:
    path = tmp_path / f"{ODD[:-1]}.npz"
    array = io.BytesIO()
    np.save(array, np.ones(3, np.float32))
    of_other_types = io.BytesIO()
    np.save(of_other_types, np.ones(3, [(text[:200], np.float32)]))
    cases: tuple[dict[str, bytes], ...] = (
        {f"{text}.npy": b"no array"},
        {f"{text}:bf16.npy": array.getvalue()},
        {f"{text}:bf16.npy": of_other_types.getvalue()},
    )
    for members in cases:
        with pytest.raises(ValueError, match=r"npz: ") as refused:
            npz.read(written(path, members))
        expect_plain(str(refused.value))
    written(path, {f"{text}/{text[:5000]}.npy": array.getvalue()})
    for case, arrays in npz.read_cases(path).items():
        with pytest.raises(ValueError, match=r"unknown arrays") as refused:
            verify.bind_case(arrays, source=verify.shown_case(case))
        expect_plain(str(refused.value))


@pytest.mark.parametrize("text", [ODD, LONG], ids=["odd", "long"])
def test_graphs(text: str) -> None:
    types = dict.fromkeys(("compute_data_type", "io_data_type", "intermediate_data_type"), "unset")
    graph: dict[str, Any] = {"name": "", **types, "nodes": [], "tensors": []}
    tensor = {"uid": 1, "name": text, "data_type": "float", "dims": [8], "strides": [1]}
    tensor |= {"virtual": False}
    changes: tuple[dict[str, Any], ...] = (
        {text: 1},
        {"io_data_type": text},
        {"nodes": [{"type": text}]},
        {"tensors": [tensor]},
        {"tensors": [tensor | {"dims": [2**62] * 100_000}]},
        {"tensors": [tensor | {"uid": 10**4000}]},
        {"tensors": [tensor, tensor]},
        {"tensors": [tensor | {"value": text, "value_type": text}]},
    )
    for change in changes:
        with pytest.raises(ValueError, match=":") as refused:
            Graph.from_json(json.dumps(graph | change)).validate()
        expect_plain(str(refused.value))


def test_schedules() -> None:
    for values in ({ODD: 1}, {"form": ODD}, {"form": "WholeTensors", LONG: 1}, LONG, None):
        with pytest.raises(ValueError, match=r"^schedule") as refused:
            schedule_from_dict(values)
        expect_plain(str(refused.value))


def test_evidence() -> None:
    for text in (ODD, LONG):
        for passed, missed in (({"x"}, set[str]()), (set[str](), {"x"})):
            ran = frozenset(passed), frozenset(missed)
            record = evidence.Record("sm_90", text, frozenset(), *ran)
            expect_plain(evidence.of_module("x", [record]))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is not done, is said in one short line."""
    path = written(tmp_path / "x.npz", {f"{LONG[:60_000]}/{ODD[:-1]}.npy": b""})
    for words in (["verify", f"--data={path}"], ["inspect", LONG], ["compile", f"--target={LONG}"]):
        assert cli.main(words) == 2
        last = capsys.readouterr().err.removesuffix("\n").splitlines()[-1]
        expect_plain(last)


# --- what would grow ---------------------------------------------------------------------------


def zeros(size: int) -> bytes:
    array = io.BytesIO()
    np.save(array, np.zeros(size, np.uint8))
    return array.getvalue()


def expect_little_memory(read: Callable[[], object], error: type[Exception], said: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(error, match=said):
            read()
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_arrays_that_inflate_are_bounded_before_they_do(tmp_path: Path) -> None:
    """One large array, or many that are small."""
    method = zipfile.ZIP_DEFLATED
    path = written(tmp_path / "x.npz", {"input.npy": zeros(1 << 27)}, method)
    assert path.stat().st_size < 1 << 18
    said = "its arrays have .* bytes, at most .* may be compressed into .*; np.savez stores them"
    expect_little_memory(lambda: npz.read(path), ValueError, said)
    written(path, {f"{i}/input.npy": zeros(1 << 22) for i in range(32)}, method)
    expect_little_memory(lambda: npz.read(path), ValueError, said)


def test_arrays_that_are_compressed_as_usual_are_read(tmp_path: Path) -> None:
    """Numbers, and a megabyte of zeros."""
    numbers = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    np.savez_compressed(tmp_path / "x.npz", weight=numbers, bias=np.zeros(1 << 18, np.float32))
    assert set(npz.read(tmp_path / "x.npz")) == {"weight", "bias"}


def test_modules_that_inflate_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x.vmfb", {"module.fb": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)
    expect_little_memory(lambda: runtime.load(path), ArtifactError, "'module.fb' is compressed")
