"""Manifests say what a module is; files appear whole or not at all; alterations are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iree_lnbwd import ArtifactError, Manifest, NormSpec
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.vmfb import artifact

VMFB = b"not really a module, which the artifact does not care about"
HERE = Path("here.json")


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """Of a real compilation, but for the module."""
    spec = NormSpec((16, 64), "bf16", weight_dtype="f32")
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
        {"spec": NormSpec((1,), rows=1, eps=1e-5)},
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
        "has_sets": False,
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
        ("flags", "--iree-opt-level=O1"),
        ("flags", {"--iree-opt-level=O1": 1}),
        ("flags", ["--iree-opt-level=O1", 1]),
        ("target", ["generic"]),
        ("target", None),
        ("compiler_version", 3.13),
        ("package_version", {}),
        ("host_cpu", True),
        ("ir_sha256", 0),
        ("vmfb_sha256", [[]]),
        ("schedule", "OnePass"),
        ("schedule", {"form": ["OnePass"]}),
        ("schedule", {"form": "OnePass", "few_rows": 3}),
        ("spec", [["normalized_shape", [8]]]),
        ("spec", {"normalized_shape": [8], "eps": "1e-5"}),
        ("spec", {"normalized_shape": [8], "rows": 1.0}),
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


def with_member(manifest: Manifest, literal: str) -> str:
    """A manifest with one member more, spelled like this; it cannot be signed."""
    return manifest.to_json().replace("{", f'{{"more": {literal},', 1)


# JSON, or what Python takes for it, that no two readers take for the same, or that none can read.
NO_JSON = {
    "deep arrays": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "deep and not closed": "[" * 100_000,
    "a number beyond f64": "1e999",
    "a number below f64": "-1e999",
    "not a number": "NaN",
    "infinite": "-Infinity",
    "more digits than an int may have": "9" * 5000,
    "a name twice": '{"a": 1, "a": 2}',
    "a name twice, escaped": '{"a": 1, "\\u0061": 2}',
    "a control character": '"\x1b"',
}


@pytest.mark.parametrize("what", NO_JSON)
def test_json_that_can_be_misread(what: str, manifest: Manifest) -> None:
    with pytest.raises(ArtifactError, match=r"^here\.json: not a manifest: [^\n]{1,400}$"):
        Manifest.from_json(with_member(manifest, NO_JSON[what]), path=HERE)


@pytest.mark.parametrize("depth", [300, 900, 990, 1000, 1100, 5000])
def test_json_as_deep_as_can_just_be_read(depth: int, manifest: Manifest) -> None:
    """The reader, the digest and the message go down differently far."""
    for literal in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        text = with_member(manifest, literal)
        for changed in (text, text.replace('"schema_version": 1', f'"schema_version": {literal}')):
            with pytest.raises(ArtifactError, match=r"^here\.json: [^\n]{1,400}$"):
                Manifest.from_json(changed, path=HERE)


def test_a_member_that_comes_twice(manifest: Manifest) -> None:
    """Python would take the last, others the first."""
    text = manifest.to_json().replace("{", '{"target": "sm_90",', 1)
    with pytest.raises(ArtifactError, match="not a manifest: a name comes twice in an object"):
        Manifest.from_json(text, path=HERE)


def test_a_message_is_short_however_long_what_came_is(manifest: Manifest) -> None:
    long = "x" * 100_000
    for change in ({"spec": {long: 1}}, {"schema_version": long}, {"schedule": {"form": long}}):
        with pytest.raises(ArtifactError, match=r"^here\.json: [^\n]{1,400}$"):
            Manifest.from_json(signed(values_of(manifest) | change), path=HERE)


def test_strings_may_be_any(manifest: Manifest) -> None:
    """Lone surrogates too: what a file name that is no UTF-8 comes to."""
    changed = replace(manifest, flags=("--a=\udcff", "\x1b[31m", "\0", "\u202e", ""))
    assert Manifest.from_json(changed.to_json(), path=HERE) == changed


def test_numbers_as_large_as_can_be_read(manifest: Manifest) -> None:
    values = values_of(manifest)
    values["spec"]["normalized_shape"] = [10**4000, 10**4000]
    said = (
        r"^here\.json: not a manifest: normalized_shape: expected at most \d+ columns, got \[1000"
    )
    with pytest.raises(ArtifactError, match=said):
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


def test_read_of_a_manifest_with_a_byte_order_mark(tmp_path: Path, manifest: Manifest) -> None:
    made = artifact.write(tmp_path, VMFB, manifest)
    made.manifest_path.write_bytes(b"\xef\xbb\xbf" + made.manifest_path.read_bytes())
    with pytest.raises(ArtifactError, match=r"\.json: not a manifest: .*BOM"):
        artifact.read(made.path)


def test_read_of_a_manifest_that_is_too_long(tmp_path: Path, manifest: Manifest) -> None:
    made = artifact.write(tmp_path, VMFB, manifest)
    text = made.manifest_path.read_bytes()
    made.manifest_path.write_bytes(text + b" " * ((1 << 20) - len(text)))
    assert artifact.read(made.path) == (VMFB, manifest)
    made.manifest_path.write_bytes(text + b" " * ((1 << 20) - len(text) + 1))
    with pytest.raises(ArtifactError, match=r"\.json: cannot be read: expected at most 1048576"):
        artifact.read(made.path)


def test_no_manifest_is_written_that_is_too_long(tmp_path: Path, manifest: Manifest) -> None:
    long = replace(manifest, flags=("x" * (1 << 20),))
    with pytest.raises(ArtifactError, match="manifest: expected at most 1048576 bytes, got "):
        artifact.write(tmp_path, VMFB, long)
    assert not list(tmp_path.iterdir())


def test_read_of_a_module_that_no_memory_holds(tmp_path: Path) -> None:
    with (tmp_path / "x.vmfb").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArtifactError, match=r"x\.vmfb: cannot be read: expected at most"):
        artifact.read(tmp_path / "x.vmfb")


@pytest.mark.parametrize("name", ["x.vmfb", "x.json"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("pipe", "expected a regular file, got a pipe, a socket or a device"),
        ("folder", "Is a directory"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_read_of_what_is_no_file(name: str, kind: str, said: str, tmp_path: Path) -> None:
    """Nothing waits for a writer that may never come."""
    (tmp_path / "x.vmfb").write_bytes(VMFB)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
    with pytest.raises(ArtifactError, match=rf"{name}: cannot be read: {said}$"):
        artifact.read(tmp_path / "x.vmfb")


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 4000, "nul\0", "\ud800", "", ".", "/"])
def test_read_of_what_can_be_no_file(name: str) -> None:
    with pytest.raises(ArtifactError, match="cannot be read: "):
        artifact.read(name)


def test_read_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read: Is a directory"):
        artifact.read(tmp_path)


FILLED_UP = """
import resource, sys
from dataclasses import replace
from pathlib import Path
from iree_lnbwd import ArtifactError
from iree_lnbwd.vmfb import artifact

folder = Path(sys.argv[1])
vmfb, manifest = artifact.read(next(folder.glob("*.vmfb")))
limit = len(manifest.to_json()) - 1  # enough for the module, not for the manifest
assert len(vmfb) < limit
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
manifest = replace(manifest, vmfb_sha256=artifact.digest(b"after"))
for output in (folder, folder / "new"):
    try:
        artifact.write(output, b"after", manifest)
    except ArtifactError as error:
        print(error)
"""


def test_a_disk_that_fills_up_keeps_what_was_there(tmp_path: Path, manifest: Manifest) -> None:
    """A module without its manifest, or beside an older one, would be half of what was asked."""
    made = artifact.write(tmp_path, VMFB, manifest)
    ended = subprocess.run(
        [sys.executable, "-c", FILLED_UP, tmp_path], capture_output=True, text=True, check=True
    )
    said = [f"output_dir: cannot write to {folder}: " for folder in (tmp_path, tmp_path / "new")]
    for line, begin in zip(ended.stdout.splitlines(), said, strict=True):
        assert line.startswith(begin)
        assert "File too large" in line
    assert artifact.read(made.path) == (VMFB, manifest)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


@pytest.mark.parametrize("taken", ["vmfb", "json"])
def test_a_name_that_a_folder_has_keeps_the_other_as_it_was(
    taken: str, tmp_path: Path, manifest: Manifest
) -> None:
    made = artifact.write(tmp_path, VMFB, manifest)
    made.path.with_suffix(f".{taken}").unlink()
    made.path.with_suffix(f".{taken}").mkdir()

    def there() -> dict[str, object]:
        return {path.name: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}

    before = there()
    with pytest.raises(ArtifactError, match=r"output_dir: .*Is a directory"):
        artifact.write(tmp_path, b"another", replace(manifest, package_version="9"))
    assert there() == before


@pytest.mark.parametrize("folder", ["nul\0", "\ud800", "x" * 300])
def test_a_folder_that_cannot_be_made(folder: str, tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(ArtifactError, match="output_dir: cannot write to "):
        artifact.write(tmp_path / folder, VMFB, manifest)
