"""Manifests say what a module is; files appear whole or not at all; alterations are found."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iree_lnbwd import ArtifactError, LayerNormSpec, Manifest, artifact, compiler
from iree_lnbwd.targets import find_target

VMFB = b"not really a module, which the artifact does not care about"
HERE = Path("here.json")


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """Of a real compilation, but for the module."""
    spec = LayerNormSpec((16, 64), "bf16", weight_dtype="f32")
    flags = ["--iree-opt-level=O1"]
    made = compiler.build(spec, find_target("generic"), extra_flags=flags)[1]
    return replace(made, vmfb_sha256=artifact.digest(VMFB))


def signed(values: dict[str, Any]) -> str:
    """A manifest of these values whose own SHA-256 is right."""
    digest = artifact.digest(json.dumps(values, sort_keys=True).encode())
    return json.dumps(values | {"manifest_sha256": digest})


def values_of(manifest: Manifest) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(manifest.to_json())
    del values["manifest_sha256"]
    return values


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"target": "host", "host_cpu": "x86_64-0123456789ab"},
        {"flags": ()},
        {"flags": ('--with="quotes" and spaces', "--with=ünïcode")},
        {"spec": LayerNormSpec((1,), rows=1, recompute_eps=1e-5)},
        {"package_version": "9.9.9"},
    ],
)
def test_round_trip(change: dict[str, Any], manifest: Manifest) -> None:
    changed = replace(manifest, **change)
    assert Manifest.from_json(changed.to_json(), path=HERE) == changed


def test_lists_the_arguments_and_results(manifest: Manifest) -> None:
    values = values_of(manifest)
    assert values["entry"] == "layer_norm_backward"
    assert values["arguments"][0] == {
        "name": "grad_output",
        "dtype": "bf16",
        "shape": [None, 1024],
    }
    assert [a["name"] for a in values["arguments"]] == [a.name for a in manifest.spec.arguments]
    assert [r["name"] for r in values["results"]] == ["grad_input", "grad_weight", "grad_bias"]


def test_says_all_that_the_contract_promises(manifest: Manifest) -> None:
    values = json.loads(manifest.to_json())
    assert values["flags"][-1] == "--iree-opt-level=O1"
    assert set(values) >= {
        "arguments",
        "compiler_version",
        "entry",
        "flags",
        "ir_sha256",
        "package_version",
        "results",
        "schema_version",
        "spec",
        "target",
        "vmfb_sha256",
    }


def test_layout_does_not_count_but_content_does(manifest: Manifest) -> None:
    text = json.dumps(json.loads(manifest.to_json()), separators=(",", ":"))
    assert Manifest.from_json(text, path=HERE) == manifest


def test_every_altered_character_is_found(manifest: Manifest) -> None:
    text = manifest.to_json()
    for position, character in enumerate(text):
        if character.isspace():
            continue
        altered = text[:position] + chr(ord(character) ^ 1) + text[position + 1 :]
        with pytest.raises(ArtifactError, match=r"^here\.json: "):
            Manifest.from_json(altered, path=HERE)


def test_every_truncation_is_found(manifest: Manifest) -> None:
    text = manifest.to_json().rstrip("\n")
    for length in range(len(text)):
        with pytest.raises(ArtifactError, match=r"^here\.json: not a manifest: "):
            Manifest.from_json(text[:length], path=HERE)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema(version: object, manifest: Manifest) -> None:
    text = signed(values_of(manifest) | {"schema_version": version})
    with pytest.raises(
        ArtifactError, match=f"here.json: expected schema_version 1, got {version!r}"
    ):
        Manifest.from_json(text, path=HERE)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '"schema_version"'])
def test_json_that_is_no_manifest(text: str) -> None:
    with pytest.raises(ArtifactError, match=r"here\.json: not a manifest: no schema_version"):
        Manifest.from_json(text, path=HERE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spec", None),
        ("spec", {}),
        ("spec", {"normalized_shape": [0]}),
        ("spec", {"normalized_shape": [8], "surprise": 1}),
        ("flags", None),
    ],
)
def test_signed_nonsense(field: str, value: object, manifest: Manifest) -> None:
    with pytest.raises(ArtifactError, match=r"here\.json: not a manifest: "):
        Manifest.from_json(signed(values_of(manifest) | {field: value}), path=HERE)


@pytest.mark.parametrize("field", ["spec", "target", "flags", "vmfb_sha256", "host_cpu"])
def test_missing_field(field: str, manifest: Manifest) -> None:
    values = values_of(manifest)
    del values[field]
    with pytest.raises(ArtifactError, match=f"here.json: not a manifest: .*{field}"):
        Manifest.from_json(signed(values), path=HERE)


def test_files_are_named_after_spec_and_target(tmp_path: Path, manifest: Manifest) -> None:
    made = artifact.write(tmp_path / "made" / "if need be", VMFB, manifest)
    assert made.path.name == "layer_norm_backward_n16x64_bf16_wf32_generic.vmfb"
    assert made.manifest_path == made.path.with_suffix(".json")
    assert {p.name for p in made.path.parent.iterdir()} == {
        made.path.name,
        made.manifest_path.name,
    }
    assert made.path.read_bytes() == VMFB
    assert made.manifest_path.read_text() == manifest.to_json()


def test_read_takes_either_file(tmp_path: Path, manifest: Manifest) -> None:
    made = artifact.write(tmp_path, VMFB, manifest)
    assert artifact.read(made.path) == (VMFB, manifest)
    assert artifact.read(str(made.manifest_path)) == (VMFB, manifest)


def test_read_of_a_lone_module(tmp_path: Path, manifest: Manifest) -> None:
    made = artifact.write(tmp_path, VMFB, manifest)
    made.manifest_path.unlink()
    assert artifact.read(made.path) == (VMFB, None)


def test_read_of_a_lone_manifest(tmp_path: Path, manifest: Manifest) -> None:
    made = artifact.write(tmp_path, VMFB, manifest)
    made.path.unlink()
    with pytest.raises(ArtifactError, match=r"\.vmfb: cannot be read: No such file"):
        artifact.read(made.manifest_path)


@pytest.mark.parametrize("altered", [VMFB[:-1], VMFB + b"\0", b"", VMFB.swapcase()])
def test_read_of_a_module_that_is_not_the_manifests(
    tmp_path: Path, altered: bytes, manifest: Manifest
) -> None:
    made = artifact.write(tmp_path, VMFB, manifest)
    made.path.write_bytes(altered)
    with pytest.raises(ArtifactError, match=r"truncated or altered: its SHA-256 is .* expects"):
        artifact.read(made.path)


def test_read_of_a_manifest_that_is_no_text(tmp_path: Path, manifest: Manifest) -> None:
    made = artifact.write(tmp_path, VMFB, manifest)
    made.manifest_path.write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match=r"\.json: cannot be read"):
        artifact.read(made.path)


def test_read_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read: Is a directory"):
        artifact.read(tmp_path)


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()
    artifact.write_atomically(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()  # a file cannot replace a folder
    with pytest.raises(OSError, match="Is a directory"):
        artifact.write_atomically(tmp_path / "taken", b"data")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_readers_see_one_whole_version(tmp_path: Path) -> None:
    path = tmp_path / "file"
    versions = [bytes([i]) * 200_000 for i in range(4)]
    artifact.write_atomically(path, versions[0])

    def rewrite(data: bytes) -> None:
        for _ in range(25):
            artifact.write_atomically(path, data)

    writers = [threading.Thread(target=rewrite, args=(data,)) for data in versions]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in versions
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
