"""A bundle's file, and the choice among its members; no module in these is ever loaded."""

from __future__ import annotations

import io
import itertools
import json
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iree_lnbwd import ArtifactError, BundleFile, DeviceError, Manifest, NormSpec, cli
from iree_lnbwd.bundles import choosing, commands, container, index
from iree_lnbwd.bundles.index import Member, StoredFile
from iree_lnbwd.cli.command import _parser
from iree_lnbwd.cli.spec_options import specs_of
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware import devices
from iree_lnbwd.hardware.devices import DeviceUri, Gpu
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.stores import cache
from iree_lnbwd.verification import matrix
from iree_lnbwd.vmfb import artifact

SPECS = (NormSpec((8,)), NormSpec((4, 4), "bf16", op="rms_norm", eps=1e-5))
PLACES = ("generic", "h200", "sm_80")
CPU, CUDA = DeviceUri.parse("local-task"), DeviceUri.parse("cuda")


def stored(spec: NormSpec, made_for: str) -> tuple[str, bytes, Manifest]:
    """Bytes that stand for a module, with a manifest of theirs."""
    content = f"{spec.name} for {made_for}".encode() * 100
    _, planned = compiler.plan(spec, find_target(made_for))
    return made_for, content, replace(planned, vmfb_sha256=artifact.digest(content))


MODULES = [stored(spec, place) for spec in SPECS for place in PLACES]
PACKED = bytes(container.packed(MODULES))
NAME = "generic/layer_norm_backward_n8_f32_generic.vmfb"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "norms.lnb").write_bytes(PACKED)
    return tmp_path / "norms.lnb"


def read_all(path: Path) -> dict[str, tuple[bytes, Manifest]]:
    file = BundleFile(path)
    return {member.made_for + member.spec.name: file.read(member) for member in file.members}


# --- the format ------------------------------------------------------------------------------


def test_what_is_packed_is_read(path: Path) -> None:
    assert read_all(path) == {
        made_for + manifest.spec.name: (vmfb, manifest) for made_for, vmfb, manifest in MODULES
    }


def test_the_bytes_depend_on_the_modules_alone() -> None:
    assert bytes(container.packed(reversed(MODULES))) == PACKED
    assert bytes(container.packed(MODULES[1:])) != PACKED


def test_other_tools_open_it(path: Path, tmp_path: Path) -> None:
    """And find the two files that `compile` writes."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path)
    for made_for, vmfb, manifest in MODULES:
        place = tmp_path / made_for / f"{manifest.stem}.vmfb"
        assert artifact.read(place) == (vmfb, manifest)


def test_members_are_read_from_the_file_that_was_opened(path: Path) -> None:
    """A new version that takes its place, as a deployment does it, changes nothing."""
    file = BundleFile(path)
    newer = path.with_name("newer.lnb")
    newer.write_bytes(container.packed(MODULES[:1]))
    newer.replace(path)
    assert [file.read(member)[1].spec for member in file.members]
    assert len(BundleFile(path).members) == 1


# --- hostile and damaged files ---------------------------------------------------------------


def refusal(path: Path, content: bytes) -> str:
    """The one line that says what is wrong, which is found before or when a member is read."""
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as raised:
        read_all(path)
    said = str(raised.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return said.removeprefix(str(path))


def test_any_altered_byte_is_refused(path: Path) -> None:
    some = range(0, len(PACKED), 499)
    for place in {*some, *range(30), *range(len(PACKED) - 120, len(PACKED))}:
        altered = bytearray(PACKED)
        altered[place] ^= 1 << place % 8
        refusal(path, bytes(altered))


def test_any_truncated_file_is_refused(path: Path) -> None:
    for size in (*range(0, 60, 7), *range(60, len(PACKED), 997), len(PACKED) - 1):
        refusal(path, PACKED[:size])


def repacked(change: Callable[[list[tuple[zipfile.ZipInfo, bytes]]], Any], **options: Any) -> bytes:
    """The bundle, packed again by another tool with other content."""
    with zipfile.ZipFile(io.BytesIO(PACKED)) as archive:
        content = [(container._info(i.filename), archive.read(i)) for i in archive.infolist()]
    content = change(content) or content
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for info, data in content:
            archive.writestr(info, data, **options)
    return buffer.getvalue()


def renamed(name: str) -> Callable[[list[Any]], Any]:
    return lambda content: [
        (container._info(name) if info.filename == NAME else info, data) for info, data in content
    ]


def with_index(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The bundle with another index, signed."""

    def changed(content: list[Any]) -> list[Any]:
        values = json.loads(content[0][1])
        del values["index_sha256"]
        change(values)
        values["index_sha256"] = index._digest(values)
        return [(content[0][0], json.dumps(values).encode()), *content[1:]]

    return repacked(changed)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "name", ["../../root.vmfb", "/etc/passwd", "generic/../x.vmfb", "generic\\x.vmfb", "C:x"]
)
def test_a_path_that_leads_elsewhere_is_refused_by_name(name: str, path: Path) -> None:
    said = refusal(path, repacked(renamed(name)))
    assert said == f": expected the file {NAME}, got {name!r}"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_comes_twice_is_refused_by_name(path: Path) -> None:
    first = "generic/layer_norm_backward_n8_f32_generic.json"
    assert refusal(path, repacked(renamed(first))) == f": the file {first!r} comes 2 times"
    more = repacked(lambda content: [*content, content[1]])
    assert refusal(path, more) == f": the file {first!r} comes 2 times"


def test_what_the_index_does_not_name_is_refused(path: Path) -> None:
    more = repacked(lambda content: [*content, (container._info("more"), b"")])
    assert refusal(path, more) == ": expected 12 files beside the index, got 13"
    assert "expected 12 files beside the index" in refusal(path, repacked(lambda c: c[:-1]))
    assert "expected the file index.json first" in refusal(path, repacked(lambda c: c[1:]))


def test_what_unpacks_to_more_is_refused_by_name(path: Path) -> None:
    """A ZIP bomb: nothing is ever unpacked."""
    bomb = repacked(lambda c: None, compress_type=zipfile.ZIP_DEFLATED)
    assert re.search(
        r"^: 'index.json': expected it stored, got \d+ bytes that", refusal(path, bomb)
    )


def test_members_that_share_bytes_are_refused_by_name(path: Path) -> None:
    """The other ZIP bomb: every name leads to the same bytes."""
    content = bytearray(PACKED)
    start = struct.unpack_from("<L", content, len(content) - 6)[0]
    second = content.index(b"PK\1\2", start + 4)
    content[second + 42 : second + 46] = bytes(4)
    assert re.search(
        r"^: '\S+\.json': expected it at byte \d+, not 0$", refusal(path, bytes(content))
    )


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer": (lambda v: v.update(version=2), "index.json: expected version 1, got 2"),
    "no bundle": (lambda v: v.update(format="x"), "expected the format 'iree-lnbwd bundle'"),
    "target": (
        lambda v: v["members"][0].update(made_for="../x"),
        "members[0].made_for: expected a target or product that this version knows, got '../x'",
    ),
    "huge": (
        lambda v: v["members"][1]["vmfb"].update(bytes=1 << 40),
        "members[1].vmfb.bytes: expected at most 1073741824, got 1099511627776",
    ),
    "size": (
        lambda v: v["members"][0]["vmfb"].update(bytes=7),
        f"{NAME}: expected 7 bytes as in the index, got ",
    ),
    "digest": (
        lambda v: v["members"][0]["vmfb"].update(sha256="0" * 64),
        f"{NAME}: altered: its SHA-256 is ",
    ),
    "twice": (
        lambda v: v["members"].insert(0, v["members"][0]),
        "the member generic/layer_norm_backward_n8_f32_generic comes twice",
    ),
    "unknown": (lambda v: v["members"][0].update(more=1), "members[0]: unknown field 'more'"),
    "another's": (
        lambda v: v["members"][0].update(host_cpu="x"),
        "it describes another module than the index does",
    ),
    "empty": (lambda v: v["members"].clear(), "members: expected 1 to 16384, got 0"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_lies_is_refused(case: str, path: Path) -> None:
    change, expected = INDEXES[case]
    assert expected in refusal(path, with_index(change))


def test_an_index_that_is_deep_or_huge_is_refused(path: Path) -> None:
    deep = repacked(lambda c: [(c[0][0], b"[" * 100_000), *c[1:]])
    assert "index.json" in refusal(path, deep)
    monstrous = bytearray(PACKED)
    monstrous[-10:-6] = (0x7FFFFFFF).to_bytes(4, "little")  # of the directory
    assert "expected a directory of 13 files, got 2147483647 bytes" in refusal(
        path, bytes(monstrous)
    )


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none.lnb"):
        with pytest.raises(ArtifactError, match=f"^{re.escape(str(place))}: cannot be read"):
            BundleFile(place)
    with pytest.raises(TypeError, match=r"^path: expected a str or a path, got int"):
        BundleFile(7)  # type: ignore[arg-type]


# --- the choice ------------------------------------------------------------------------------


def members(*places: str, host: str | None = None) -> list[Member]:
    empty = StoredFile(1, "0" * 64)
    return [Member(p, SPECS[0], host if p == "host" else None, empty, empty) for p in places]


def order(found: list[Member], uri: DeviceUri) -> list[str]:
    """The same for any order of the members."""
    (ranks,) = {
        tuple(member.made_for for member in choosing.ranked(each, uri))
        for each in itertools.islice(itertools.permutations(found), 24)
    }
    return list(ranks)


def test_a_cpu_takes_its_own_module_before_one_for_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, others = (
        members("generic", "sm_90", "host", host=devices.host_cpu()),
        members("host", "gfx942", "generic", host="x86_64-000000000000"),
    )
    assert order(ours, CPU) == ["host", "generic"]
    assert order(others, CPU) == ["generic"]
    cpu_has(monkeypatch, "avx")
    assert order(others, CPU) == []
    assert choosing.why_not(others[2], CPU) == "this CPU has no f16c"


def test_a_cpu_takes_the_module_that_uses_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = members("generic", "generic-v3", "sm_90", "host", host="x86_64-000000000000")
    cpu_has(monkeypatch, "avx", "f16c", "fma", "avx2", "avx512f")
    assert order(found, CPU) == ["generic-v3", "generic"]
    cpu_has(monkeypatch, "avx", "f16c")
    assert order(found, CPU) == ["generic"]
    assert choosing.why_not(found[1], CPU) == "this CPU has no avx2 and no fma"
    assert choosing.target_to_ship(CPU).name == "generic"


def cpu_has(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    """This CPU is an x86-64 one with these features."""
    for module in (cache, choosing):
        monkeypatch.setattr(module, "cpu_features", lambda: features)
    here = replace(find_target("host"), architecture="x86_64")
    monkeypatch.setattr(choosing, "target_of", lambda uri: here)


@pytest.mark.parametrize(
    ("architecture", "name", "other"),
    [("x86_64", "generic", "aarch64"), ("aarch64", "generic-aarch64", "x86_64")],
)
def test_a_cpu_takes_the_module_for_its_architecture(
    architecture: str, name: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(find_target("host"), architecture=architecture)
    monkeypatch.setattr(choosing, "target_of", lambda uri: here)
    found = members("generic", "sm_90", "generic-aarch64")
    assert order(found, CPU) == [name]
    (wrong,) = (m for m in found if m.target.architecture == other)
    assert choosing.why_not(wrong, CPU) == f"it is for {other} CPUs, this one is {architecture}"
    assert choosing.target_to_ship(CPU).name == name


@pytest.mark.parametrize(
    ("capability", "name", "processors", "expected"),
    [
        ((9, 0), "NVIDIA H200", 132, ["h200", "sm_90", "h100", "sm_80"]),
        ((9, 0), "NVIDIA H100 80GB HBM3", 132, ["h100", "sm_90", "h200", "sm_80"]),
        ((9, 0), "NVIDIA H100 PCIe", 114, ["sm_90", "h100", "h200", "sm_80"]),
        ((10, 0), "NVIDIA B200", 148, ["sm_90", "h100", "h200", "sm_80"]),
        ((8, 0), "NVIDIA A100", 108, ["sm_80"]),
        ((8, 9), "NVIDIA L4", 58, ["sm_80"]),
        ((12, 0), "NVIDIA GeForce RTX 5090", 170, ["sm_120", "sm_90", "h100", "h200", "sm_80"]),
    ],
)
def test_a_gpu_takes_its_product_then_its_target_then_older_ones(
    capability: tuple[int, int],
    name: str,
    processors: int,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "_cuda_capability", lambda uri: capability)
    monkeypatch.setattr(choosing, "gpu_of", lambda uri: Gpu(name, processors, 0))
    found = members("sm_90", "h200", "sm_80", "h100", "generic", "gfx942", "sm_120")
    assert order(found, CUDA) == expected


def test_an_absent_device_is_an_error() -> None:
    with pytest.raises(DeviceError, match="absent"):
        choosing.ranked(members("gfx942"), DeviceUri.parse("hip://63"))


# --- the command -----------------------------------------------------------------------------


@pytest.mark.drawn
def test_the_words_for_a_spec_mean_that_spec() -> None:
    """Of every third spec that is verified, and one of each option."""
    more = (
        NormSpec((16, 64), "f16", bias_dtype="f32", weight_offset=-0.1),
        NormSpec((7,), op="layer_norm", eps=1e-12, has_bias=False, has_weight=False),
        NormSpec((7,), op="rms_norm_backward", eps=0.1, output_mask=(False, True)),
        *matrix.operand_specs(),
    )
    for spec in (*itertools.islice(matrix.specs(), 0, None, 3), *more):
        words = ["bundle", *commands.spec_words(spec), "-o", "x.lnb"]
        assert specs_of(_parser().parse_args(words)) == [spec], words


def test_lists_mean_each_with_each(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--op=rms_norm,layer_norm", "--normalized-shape=1024,16x64", "--dtype=bf16,f32"]
    options = _parser().parse_args(["bundle", *words, "-o", "x.lnb", "--target=sm_90,h200"])
    found = {(spec.op, spec.normalized_shape, spec.dtype) for spec in specs_of(options)}
    shapes = ((1024,), (16, 64))
    assert found == set(itertools.product(("rms_norm", "layer_norm"), shapes, ("bf16", "f32")))
    assert options.target == ("sm_90", "h200")
    for word, said in {
        "--op=rms_norm,": "expected some of layer_norm,",
        "--dtype=f8": "expected one of bf16, f16, f32, f64, got 'f8'",
        "--normalized-shape=8;9": "expected a shape such as 4096 or 16x64, got '8;9'",
    }.items():
        assert cli.main(["bundle", word, "-o", "x.lnb"]) == 2
        assert said in capsys.readouterr().err
