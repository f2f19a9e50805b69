"""Bad input: one clear line each, before anything is compiled; nothing half-written, no crash."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import iree.runtime
import ml_dtypes
import numpy as np
import pytest
from iree.compiler.tools import compile_str
from support import (
    Arguments,
    assert_matches_reference,
    assert_same_bits,
    random_arguments,
    random_generator,
)

import iree_lnbwd as lnbwd
from iree_lnbwd import (
    Artifact,
    ArtifactError,
    CompileError,
    DeviceError,
    NormSpec,
    reference,
    runtime,
)
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops import npz
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.schedules import FewRows, OnePass, RowBlocks, WholeTensors
from iree_lnbwd.stores import cache
from iree_lnbwd.verification import verify
from iree_lnbwd.vmfb import artifact

COMMAND = Path(sys.executable).parent / "iree-lnbwd"
SPEC = NormSpec((8,))

# Makes the compiler unimportable, as where only the runtime is installed.
NO_COMPILER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "iree.compiler" or name.startswith("iree.compiler."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

# The line that installs what is missing: of the release that the runtime is of.
ABSENT = (
    "compiling needs iree-base-compiler, which is not installed: pip install "
    f"iree-base-compiler=={metadata.version('iree-base-runtime')}"
)


def python(script: str, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **env},
    )


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


@pytest.fixture(scope="module")
def generic(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A module that every test may read and none may change."""
    return lnbwd.compile(SPEC, "generic", tmp_path_factory.mktemp("generic"))


def copied(made: Artifact, folder: Path) -> Artifact:
    """The same module, to be damaged."""
    return artifact.write(folder, made.path.read_bytes(), made.manifest)


# --- arguments -------------------------------------------------------------------------------

LEADING, DIMS = (3, 2), (4, 5)


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


def full() -> dict[str, Any]:
    """Good arguments, all of them."""
    return {
        "grad_output": ones(*LEADING, *DIMS),
        "input": ones(*LEADING, *DIMS),
        "normalized_shape": DIMS,
        "mean": ones(*LEADING),
        "rstd": ones(*LEADING),
        "weight": ones(*DIMS),
        "bias": ones(*DIMS),
    }


F64, F16, I32 = np.float64, np.float16, np.int32
SWAPPED = np.dtype(np.float32).newbyteorder()

# What is wrong, the error, and what it says: the argument, what was expected, what came.
BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    # rank and shape
    ({"input": ones()}, ValueError, r"input: expected a shape that ends in .*\(4, 5\), got \(\)"),
    ({"input": ones(5)}, ValueError, r"input: expected .*\(4, 5\), got \(5,\)"),
    ({"input": ones(3, 2, 5, 4)}, ValueError, r"input: expected .*\(4, 5\), got \(3, 2, 5, 4\)"),
    ({"grad_output": ones(3, 2, 20)}, ValueError, r"grad_output: expected .*, got \(3, 2, 20\)"),
    ({"grad_output": ones(6, 4, 5)}, ValueError, r"grad_output: expected .*\(3, 2, 4, 5\), got"),
    (
        {"grad_output": ones(1)},
        ValueError,
        r"grad_output: expected shape \(3, 2, 4, 5\), got \(1,\)",
    ),
    ({"mean": ones(6)}, ValueError, r"mean: expected shape \(3, 2\) or \(3, 2, 1, 1\), got \(6,\)"),
    ({"mean": ones(3, 2, 1)}, ValueError, r"mean: expected .*, got \(3, 2, 1\)"),
    ({"mean": ones(2, 3)}, ValueError, r"mean: expected .*, got \(2, 3\)"),
    ({"rstd": ones()}, ValueError, r"rstd: expected .*, got \(\)"),
    ({"rstd": ones(3, 2, 4, 5)}, ValueError, r"rstd: expected .*, got \(3, 2, 4, 5\)"),
    ({"weight": ones(20)}, ValueError, r"weight: expected shape \(4, 5\), got \(20,\)"),
    ({"weight": ones(5)}, ValueError, r"weight: expected shape \(4, 5\), got \(5,\)"),
    ({"weight": ones()}, ValueError, r"weight: expected shape \(4, 5\), got \(\)"),
    ({"bias": ones(5, 4)}, ValueError, r"bias: expected shape \(4, 5\), got \(5, 4\)"),
    # element type
    ({"input": ones(3, 2, 4, 5, dtype=I32)}, TypeError, "input: expected .*bf16, .*, got int32"),
    ({"input": ones(3, 2, 4, 5, dtype=bool)}, TypeError, "input: expected .*, got bool"),
    ({"input": ones(3, 2, 4, 5, dtype=complex)}, TypeError, "input: .*, got complex128"),
    ({"grad_output": ones(3, 2, 4, 5, dtype=I32)}, TypeError, "grad_output: .*, got int32"),
    (
        {"weight": ones(4, 5, dtype=I32)},
        TypeError,
        "weight: expected an element type .*, got int32",
    ),
    ({"bias": ones(4, 5, dtype=ml_dtypes.float8_e5m2)}, TypeError, "bias: .*, got float8_e5m2"),
    ({"mean": ones(3, 2, dtype=F64)}, TypeError, "mean: expected element type f32, got float64"),
    ({"rstd": ones(3, 2, dtype=F16)}, TypeError, "rstd: expected element type f32, got float16"),
    ({"mean": ones(3, 2, dtype=I32)}, TypeError, "mean: expected an element type .*, got int32"),
    (
        {"weight": ones(4, 5, dtype=F64)},
        ValueError,
        "weight: expected bf.* beside an input or output of f32, got f64",
    ),
    (
        {"grad_output": ones(3, 2, 4, 5, dtype=F64)},
        ValueError,
        "grad_output: .* input or output of f32, got f64",
    ),
    (
        {"bias": ones(4, 5, dtype=F64)},
        ValueError,
        "bias: expected bf.* input or output of f32, got f64",
    ),
    ({"input": ones(3, 2, 4, 5, dtype=F64)}, TypeError, "mean: expected element type f64, got"),
    # byte order
    ({"input": ones(3, 2, 4, 5, dtype=SWAPPED)}, TypeError, "input: expected .*, got >f4"),
    ({"grad_output": ones(3, 2, 4, 5, dtype=SWAPPED)}, TypeError, "grad_output: .*, got >f4"),
    ({"mean": ones(3, 2, dtype=SWAPPED)}, TypeError, "mean: expected .*, got >f4"),
    ({"rstd": ones(3, 2, dtype=SWAPPED)}, TypeError, "rstd: expected .*, got >f4"),
    ({"weight": ones(4, 5, dtype=SWAPPED)}, TypeError, "weight: expected .*, got >f4"),
    ({"bias": ones(4, 5, dtype=SWAPPED)}, TypeError, "bias: expected .*, got >f4"),
    # no array
    (
        {"input": [[1.0]]},
        TypeError,
        "input: expected a NumPy array, .* another array with DLPack, got list",
    ),
    ({"input": None}, TypeError, "input: expected an array, or output in its place, got None"),
    ({"grad_output": 1.0}, TypeError, "grad_output: expected a NumPy array, .*, got float"),
    ({"mean": [1.0] * 6}, TypeError, "mean: expected a NumPy array, .*, got list"),
    ({"rstd": (1.0,)}, TypeError, "rstd: expected a NumPy array, .*, got tuple"),
    ({"weight": [1.0] * 20}, TypeError, "weight: expected a NumPy array, .*, got list"),
    ({"bias": True}, TypeError, "bias: expected a NumPy array, .*, got bool"),
    # half-given statistics
    ({"mean": None}, ValueError, "mean: expected both mean and rstd or neither, got only rstd"),
    ({"rstd": None}, ValueError, "rstd: expected both mean and rstd or neither, got only mean"),
    # the rest
    ({"normalized_shape": ()}, ValueError, r"normalized_shape: expected .*, got \(\)"),
    ({"normalized_shape": (4, 0)}, ValueError, r"normalized_shape: expected .*, got \(4, 0\)"),
    ({"normalized_shape": 5.0}, TypeError, "normalized_shape: expected .*, got float"),
    ({"normalized_shape": (9,) * 5}, ValueError, r"input: expected .*\(9, 9, 9, 9, 9\), got"),
    ({"output_mask": (True, True)}, ValueError, r"output_mask: expected .*, got \(True, True\)"),
    ({"output_mask": (1, 0, 1)}, ValueError, r"output_mask: expected .*, got \(1, 0, 1\)"),
    ({"eps": "tiny"}, TypeError, "eps: expected a float, got str"),
    ({"eps": float("inf")}, ValueError, "eps: expected a finite number, got inf"),
    ({"device": "gpu"}, ValueError, "device: expected one of local-task, .*, got 'gpu'"),
    ({"device": 0.5}, TypeError, "device: expected a string, got float"),
]


@pytest.mark.parametrize(("wrong", "error", "said"), BAD_ARGUMENTS)
def test_bad_argument(
    wrong: dict[str, Any],
    error: type[Exception],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(error, match=said) as caught:
        lnbwd.layer_norm_backward(**(full() | wrong))
    one_line(caught.value)
    assert not (tmp_path / "cache").exists()  # nothing was compiled


def test_the_good_arguments_are_good() -> None:
    assert all(gradient is not None for gradient in lnbwd.layer_norm_backward(**full()))


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"input": ones(3, 7)}, ValueError, r"input: expected .*\(8,\), got \(3, 7\)"),
        ({"grad_output": ones(2, 8)}, ValueError, r"grad_output: expected .*, got \(2, 8\)"),
        ({"weight": None}, ValueError, "weight: this module takes a weight, got None"),
        ({"weight": ones(8, dtype=F16)}, TypeError, "weight: .* compiled for f32, got f16"),
        ({"bias": ones(8, dtype=F16)}, TypeError, "bias: .* compiled for f32, got f16"),
        ({"grad_output": ones(3, 8, dtype=F16)}, TypeError, "grad_output: .* f32, got f16"),
        ({"mean": None, "rstd": None}, ValueError, "mean: this module takes mean and rstd"),
        ({"rstd": None}, ValueError, "rstd: expected both mean and rstd or neither"),
        (
            {"input": [1.0]},
            TypeError,
            "input: expected a NumPy array, .* another array with DLPack, got list",
        ),
        (
            {"input": ones(3, 8, dtype=F16), "grad_output": ones(3, 8, dtype=F16)},
            TypeError,
            "input: this module was compiled for f32, got f16",
        ),
    ],
)
def test_bad_argument_of_a_module(
    wrong: dict[str, Any], error: type[Exception], said: str, generic: Artifact
) -> None:
    good = {"grad_output": ones(3, 8), "input": ones(3, 8), "mean": ones(3), "rstd": ones(3)}
    good |= {"weight": ones(8), "bias": ones(8)}
    op = lnbwd.load(generic.path)
    with pytest.raises(error, match=said) as caught:
        op(**(good | wrong))
    one_line(caught.value)
    assert op(**good).grad_input is not None


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("spec", "arguments", "said"),
    [
        (NormSpec((8,), has_weight=False), {"weight": ones(8)}, "weight: .* has no weight"),
        (NormSpec((8,), eps=1e-5), {}, "mean: this module recomputes mean and rstd"),
        (NormSpec((8,), rows=4), {"weight": ones(8)}, "input: .* compiled for 4 rows, got 3"),
        (NormSpec((8,), rows=1), {"weight": ones(8)}, "input: .* compiled for 1 row, got 3"),
    ],
)
def test_bad_argument_of_a_special_module(
    spec: NormSpec, arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    op = lnbwd.load(lnbwd.compile(spec, "generic", tmp_path).path)
    with pytest.raises(ValueError, match=said):
        op(ones(3, 8), ones(3, 8), ones(3), ones(3), **arguments)


def test_a_module_of_so_many_rows_takes_them_in_any_dimensions(tmp_path: Path) -> None:
    op = lnbwd.load(lnbwd.compile(NormSpec((8,), rows=6), "generic", tmp_path).path)
    flat = op(ones(6, 8), ones(6, 8), ones(6), ones(6), ones(8))
    for leading in ((2, 3), (1, 6, 1)):
        x, row = ones(*leading, 8), ones(*leading)
        found = op(x, x, row, row, ones(8))
        assert np.array_equal(found.grad_input, flat.grad_input.reshape(x.shape))
    with pytest.raises(ValueError, match="compiled for 6 rows, got 8"):
        op(ones(4, 2, 8), ones(4, 2, 8), ones(4, 2), ones(4, 2), ones(8))


# --- what is compiled ------------------------------------------------------------------------

GPU: Any = OnePass(1, 1, 1, 8)
few_rows: Any = FewRows  # what follows shall not pass the type checker
row_blocks: Any = RowBlocks
whole_tensors: Any = WholeTensors
BAD_COMPILATIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"spec": None}, TypeError, "spec: expected a NormSpec, got NoneType"),
    ({"spec": (8,)}, TypeError, "spec: expected a NormSpec, got tuple"),
    ({"spec": NormSpec}, TypeError, "spec: expected a NormSpec, got type"),
    ({"target": None}, TypeError, "target: expected a string, got NoneType"),
    ({"target": find_target("generic")}, TypeError, "target: expected a string, got Target"),
    ({"target": b"generic"}, TypeError, "target: expected a string, got bytes"),
    ({"target": ""}, ValueError, "target: expected one of host, .*, got ''"),
    ({"output_dir": None}, TypeError, "output_dir: expected a path, got None"),
    ({"output_dir": 5}, TypeError, "output_dir: expected a path, got 5"),
    ({"output_dir": b"out"}, TypeError, "output_dir: expected a path, got b'out'"),
    ({"output_dir": ["out"]}, TypeError, r"output_dir: expected a path, got \['out'\]"),
    ({"output_dir": "a\0b"}, ValueError, r"output_dir: expected a path, got 'a\\x00b'"),
    ({"output_dir": "\ud800"}, ValueError, r"output_dir: expected a path, got '\\ud800'"),
    (
        {"output_dir": "x" * 5000},
        ArtifactError,
        "output_dir: cannot write to x*\\.{3}x*: .* name too long",
    ),
    ({"schedule": "best"}, TypeError, "schedule: expected a schedule or None, got str"),
    ({"schedule": OnePass}, TypeError, "schedule: expected a schedule or None, got type"),
    ({"schedule": 5}, TypeError, "schedule: expected a schedule or None, got int"),
    (
        {"schedule": few_rows(1, 1, 32, 1)},
        TypeError,
        "schedule: expected a schedule or None, got FewRows",
    ),
    ({"schedule": whole_tensors(5)}, TypeError, "schedule.reason: expected str, got 5"),
    ({"schedule": row_blocks("1", 1, 1)}, TypeError, "schedule.workgroups: expected int, got '1'"),
    ({"schedule": row_blocks(1, 1.5, 1)}, TypeError, r"schedule.block: expected int, got 1\.5"),
    ({"schedule": row_blocks(1, 1, None)}, TypeError, "schedule.vector: expected int, got None"),
    ({"schedule": row_blocks(1, 1, True)}, TypeError, "schedule.vector: expected int, got True"),
    ({"schedule": replace(GPU, rereads=1)}, TypeError, "schedule.rereads: expected bool, got 1"),
    (
        {"schedule": replace(GPU, few_rows=1)},
        TypeError,
        "schedule.few_rows: expected .*FewRows.*, got 1",
    ),
    (
        {"schedule": replace(GPU, few_rows=few_rows(1, 1, "32", 1))},
        TypeError,
        "schedule.few_rows.tile: expected int, got '32'",
    ),
    (
        {"schedule": GPU},
        ValueError,
        "schedule: illegal for .* on generic: .* need a GPU; got OnePass",
    ),
    (
        {"schedule": row_blocks(0, 1, 1)},
        ValueError,
        "schedule: illegal .*: a number below 1; got Row",
    ),
    ({"extra_flags": None}, TypeError, "extra_flags: expected a sequence of strings, got None"),
    ({"extra_flags": 5}, TypeError, "extra_flags: expected a sequence of strings, got 5"),
    ({"extra_flags": [1]}, TypeError, "extra_flags: expected a sequence of strings, got 1 in it"),
    ({"extra_flags": b"x"}, TypeError, "extra_flags: expected a sequence of strings, got b'x'"),
    ({"extra_flags": "--x"}, TypeError, "extra_flags: expected a sequence of strings, got '--x'"),
    *(
        ({"extra_flags": [flag]}, ValueError, f"extra_flags: expected .*, got '{flag}'")
        for flag in (
            *("-o", "-o=x", "--compile-to=input", "--compile-from=vm", "--help", "--version"),
            *("--output-format=vm-c", "--iree-vm-bytecode-module-output-format=flatbuffer-text"),
            *("--iree-input-type=auto", "x.mlir", "@x", "-", "--", ""),
            *("--mlir-pass-pipeline-crash-reproducer=x", "--iree-hal-target-device=cuda"),
            *("--iree-llvmcpu-target-cpu=host", "--iree-rocm-target=gfx942"),
        )
    ),
    (
        {"extra_flags": ["--iree-vm-emit-polyglot-zip=false"]},  # which no list knows of
        CompileError,
        "compiling .* for generic failed: what iree-compile wrote: truncated, altered or not a",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "said"), BAD_COMPILATIONS)
def test_bad_argument_of_compile(
    wrong: dict[str, Any],
    error: type[Exception],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    good: dict[str, Any] = {"spec": SPEC, "target": "generic", "output_dir": "out"}
    with pytest.raises(error, match=f"^{said}") as caught:
        lnbwd.compile(**(good | wrong))
    one_line(caught.value)
    assert not list(tmp_path.iterdir())


# --- targets and devices ---------------------------------------------------------------------


def test_unknown_target(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sm_75.*gfx1201.*got 'gfx941'\. Did you mean 'gfx942'"):
        lnbwd.compile(SPEC, "gfx941", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cuda://97", "hip://97"])
def test_absent_device(device: str, generic: Artifact) -> None:
    with pytest.raises(DeviceError, match=f"device: {device} is absent: ") as caught:
        lnbwd.layer_norm_backward(**full(), device=device)
    one_line(caught.value)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("target", "backend", "devices"),
    [
        ("generic", "cpu", {"cuda": "cuda://0", "hip": "hip://0"}),
        ("sm_90", "cuda", {"local-task": "local-task", "hip": "hip://0"}),
        ("gfx942", "rocm", {"local-sync": "local-sync", "cuda://1": "cuda://1"}),
    ],
)
def test_module_for_another_device(
    target: str, backend: str, devices: dict[str, str], tmp_path: Path
) -> None:
    """The module says it, with a manifest beside it or without."""
    made = lnbwd.compile(SPEC, target, tmp_path)
    for has_manifest in (True, False):
        if not has_manifest:
            made.manifest_path.unlink()
        for device, shown in devices.items():
            said = rf"was compiled for {target} \({backend}\), got {shown}"
            with pytest.raises(DeviceError, match=f"device: .*{said}") as caught:
                lnbwd.load(made.path, device=device)
            one_line(caught.value)


@pytest.mark.parametrize("manifest", ["manifest", "no manifest"])
def test_module_for_another_cpu(
    manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module says it, with a manifest beside it or without, from a file or in memory."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(compiler, "host_cpu", lambda: "x86_64-000000000000")
        made = lnbwd.compile(SPEC, "host", tmp_path)
    if manifest == "no manifest":
        made.manifest_path.unlink()
    said = "compiled for the CPU x86_64-000000000000, this one is"
    with pytest.raises(DeviceError, match=said) as caught:
        lnbwd.load(made.path)
    one_line(caught.value)
    with pytest.raises(DeviceError, match=said):
        runtime.load_built(made.path.read_bytes())


def test_manifest_that_lies_about_the_cpu(tmp_path: Path) -> None:
    made = lnbwd.compile(SPEC, "host", tmp_path)
    values = json.loads(made.manifest_path.read_text())
    del values["manifest_sha256"]
    values["host_cpu"] = "x86_64-000000000000"
    sign(made.manifest_path, values)
    with pytest.raises(ArtifactError, match="the manifest describes another module than the"):
        lnbwd.load(made.path)


def test_unknown_device_of_a_module(generic: Artifact) -> None:
    with pytest.raises(ValueError, match=r"device: expected one of .*, got 'vulkan'"):
        lnbwd.load(generic.path, device="vulkan")


# --- damaged modules -------------------------------------------------------------------------

# Loads each version of a file and says what came of it; where it loads, it must also be right.
LOAD_EACH = """
import json, sys
from pathlib import Path
import numpy as np
import iree_lnbwd as lnbwd

whole, folder, step = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), int(sys.argv[3])
x = np.arange(24, dtype=np.float32).reshape(3, 8)
arguments = (x, x[::-1], np.full(3, 11.5, np.float32), np.full(3, 0.2, np.float32), x[0])
path = folder / "module.vmfb"

def bits(file):
    return b"".join(g.tobytes() for g in lnbwd.load(file)(*arguments))

def damaged():
    if sys.argv[4] == "truncated":
        for length in (*range(0, len(whole), step), *range(len(whole) - 40, len(whole))):
            yield whole[:length]
    else:
        ends = (*range(0, 100), *range(len(whole) - 300, len(whole)))
        for position in (*range(0, len(whole), step), *ends):
            for mask in (0x01, 0x80):
                version = bytearray(whole)
                version[position] ^= mask
                yield bytes(version)

right = bits(sys.argv[1])
came, messages = {"refused": 0, "right": 0}, set()
for version in damaged():
    path.write_bytes(version)
    try:
        assert bits(path) == right, "loaded, and computed something else"
        came["right"] += 1
    except lnbwd.ArtifactError as error:
        came["refused"] += 1
        messages.add(str(error))
print(json.dumps({**came, "messages": sorted(messages)}))
"""


def load_each(made: Artifact, folder: Path, *, step: int, how: str) -> dict[str, Any]:
    ended = python(LOAD_EACH, made.path, folder, str(step), how)
    assert ended.returncode == 0, ended.stderr  # a crash would be negative
    came: dict[str, Any] = json.loads(ended.stdout)
    for message in came["messages"]:
        assert re.match(r".*module\.vmfb: .*(truncated|altered|no module of iree-lnbwd)", message)
        assert "\n" not in message
    return came


def test_truncated_lone_module(generic: Artifact, tmp_path: Path) -> None:
    came = load_each(generic, tmp_path, step=97, how="truncated")
    assert came["right"] == 0
    assert came["refused"] > 100


@pytest.mark.drawn
def test_altered_lone_module(generic: Artifact, tmp_path: Path) -> None:
    """Found, or harmless: a date or a gap between files changes nothing of what is computed."""
    came = load_each(generic, tmp_path, step=149, how="altered")
    assert came["refused"] > came["right"]


# Alters the program of a lone module, sets its checksum right, and says what comes of `describe`.
# IREE checks what it reads, but not all of it: in processes of their own, which may end.
DESCRIBE_FORGED = """
import json, os, random, struct, sys, zipfile, zlib
from pathlib import Path
from iree_lnbwd import ArtifactError
from iree_lnbwd.vmfb.description import describe

whole, rng = Path(sys.argv[1]).read_bytes(), random.Random(int(sys.argv[2]))
with zipfile.ZipFile(sys.argv[1]) as archive:
    info = archive.infolist()[0]
name_length, extra_length = struct.unpack_from("<HH", whole, info.header_offset + 26)
start = info.header_offset + 30 + name_length + extra_length

def forged():
    version = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 5))):
        version[start + rng.randrange(info.file_size)] = rng.randrange(256)
    crc = zlib.crc32(bytes(version[start : start + info.file_size]))
    return bytes(version).replace(struct.pack("<I", info.CRC), struct.pack("<I", crc))

for _ in range(200):
    version = forged()
    if os.fork() == 0:
        try:
            describe(version, source="module.vmfb")
            said = "right"
        except ArtifactError as error:
            said = str(error)
        print(json.dumps(said), flush=True)
        os._exit(0)
    status = os.wait()[1]
    if status:
        print(json.dumps(f"ended with {status}"), flush=True)
"""


@pytest.mark.drawn
def test_forged_lone_module(generic: Artifact) -> None:
    """Whatever IREE says of it is an ArtifactError; that it ends a process is rare, and IREE's."""
    ended = python(DESCRIBE_FORGED, generic.path, str(random_generator().integers(2**32)))
    assert (ended.returncode, ended.stderr) == (0, "")
    came = list(map(json.loads, ended.stdout.splitlines()))
    assert len(came) == 200
    refused = [said for said in came if said != "right" and not said.startswith("ended with ")]
    assert len(refused) > 50
    assert all(said.startswith("module.vmfb: ") and "\n" not in said for said in refused)
    assert sum(said.startswith("ended with ") for said in came) < 20


@pytest.mark.parametrize("part", [0.0, 0.2, 0.5, 0.9, 0.9999])
def test_altered_module_with_a_manifest(part: float, generic: Artifact, tmp_path: Path) -> None:
    made = copied(generic, tmp_path)
    data = bytearray(made.path.read_bytes())
    data[int(part * len(data))] ^= 1
    made.path.write_bytes(data)
    with pytest.raises(ArtifactError, match="truncated or altered: its SHA-256 is ") as caught:
        lnbwd.load(made.path)
    one_line(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "\x00"])
def test_manifest_that_is_none(text: str, generic: Artifact, tmp_path: Path) -> None:
    made = copied(generic, tmp_path)
    made.manifest_path.write_text(text)
    with pytest.raises(ArtifactError, match=r"\.json: not a manifest: ") as caught:
        lnbwd.load(made.path)
    one_line(caught.value)


def sign(path: Path, values: dict[str, Any]) -> None:
    """A manifest that says these values, and whose own SHA-256 is right."""
    digest = artifact.digest(json.dumps(values, sort_keys=True).encode())
    path.write_text(json.dumps(values | {"manifest_sha256": digest}))


def test_altered_manifest(generic: Artifact, tmp_path: Path) -> None:
    made = copied(generic, tmp_path)
    made.manifest_path.write_text(made.manifest_path.read_text().replace("generic", "gfx942"))
    with pytest.raises(ArtifactError, match=r"\.json: altered: its manifest_sha256 does not match"):
        lnbwd.load(made.path)


def test_manifest_of_another_schema(generic: Artifact, tmp_path: Path) -> None:
    made = copied(generic, tmp_path)
    values = json.loads(made.manifest_path.read_text())
    values["schema_version"] += 1
    made.manifest_path.write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=r"\.json: expected schema_version \d+, got \d+"):
        lnbwd.load(made.path)


def test_manifest_of_another_module(generic: Artifact, tmp_path: Path) -> None:
    made = copied(generic, tmp_path)
    other = lnbwd.compile(NormSpec((9,)), "generic", tmp_path / "other")
    made.manifest_path.write_bytes(other.manifest_path.read_bytes())
    with pytest.raises(ArtifactError, match="truncated or altered: its SHA-256 is "):
        lnbwd.load(made.path)


def test_manifest_that_lies_about_what_the_module_is(generic: Artifact, tmp_path: Path) -> None:
    made = copied(generic, tmp_path)
    values = json.loads(made.manifest_path.read_text())
    del values["manifest_sha256"]
    values["spec"]["normalized_shape"] = [4, 2]
    sign(made.manifest_path, values)
    with pytest.raises(ArtifactError, match="the manifest describes another module than the"):
        lnbwd.load(made.path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "func.func @other(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }",
            "no fu",
        ),
        (
            "func.func @layer_norm_backward(%a: tensor<4xf32>) -> tensor<4xf32> "
            "{ return %a : tensor<4xf32> }",
            "iree_lnbwd.spec",
        ),
    ],
)
def test_module_of_somebody_else(text: str, said: str, tmp_path: Path) -> None:
    flags = list(find_target("generic").flags)
    (tmp_path / "theirs.vmfb").write_bytes(compile_str(text, extra_args=flags))
    with pytest.raises(ArtifactError, match=rf"no module of iree-lnbwd: .*{said}"):
        lnbwd.load(tmp_path / "theirs.vmfb")


def test_missing_module(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"none\.vmfb: cannot be read: No such file"):
        lnbwd.load(tmp_path / "none.vmfb")


# --- writing ---------------------------------------------------------------------------------


def test_output_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ArtifactError, match="output_dir: cannot write to ") as caught:
            lnbwd.compile(SPEC, "generic", folder)
        one_line(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_output_name_taken_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / f"{SPEC.name}_generic.vmfb").mkdir()
    with pytest.raises(ArtifactError, match="output_dir: cannot write to "):
        lnbwd.compile(SPEC, "generic", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def children(pid: int) -> list[int]:
    """The processes that a process has started and not yet waited for."""
    listed = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(word) for text in listed for word in text.split()]


def start_compiling(folder: Path, temporary: Path) -> subprocess.Popen[str]:
    """The command, at the moment when iree-compile has begun."""
    words = [str(COMMAND), "compile", "--normalized-shape=4096", "--dtype=bf16", f"-o{folder}"]
    command = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    deadline = time.monotonic() + 30
    while not children(command.pid):
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return command


def test_interrupted_compile(tmp_path: Path) -> None:
    command = start_compiling(tmp_path / "out", tmp_path)
    command.send_signal(signal.SIGINT)
    said, complaint = command.communicate(timeout=60)
    assert (command.returncode, said, complaint) == (130, "", "iree-lnbwd: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_interrupted_with_everything_it_started(tmp_path: Path) -> None:
    """As Ctrl-C in a terminal does."""
    command = start_compiling(tmp_path / "out", tmp_path)
    os.killpg(command.pid, signal.SIGINT)
    said, complaint = command.communicate(timeout=60)
    assert said == ""
    assert command.returncode in (2, 130)
    assert re.fullmatch(r"iree-lnbwd: [^\n]+\n", complaint), complaint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed_compile(
    how: signal.Signals, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    command = start_compiling(tmp_path / "out", tmp_path_factory.mktemp("temporary"))
    os.killpg(command.pid, how)
    command.communicate(timeout=60)
    assert command.returncode == -how
    assert not list(tmp_path.iterdir())


def test_killed_at_any_time_nothing_is_incomplete(tmp_path: Path) -> None:
    """A script that only writes, killed while it does so: what has its name is whole."""
    script = (
        "import sys, iree_lnbwd.disk.files as f\n"
        "from pathlib import Path\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    for letter in b'ab':\n"
        "        f.write({Path(sys.argv[1]) / 'file': bytes([letter]) * 4_000_000})\n"
    )
    whole = {bytes([letter]) * 4_000_000 for letter in b"ab"}
    for round_ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(0.05 + 0.003 * round_)
        while not (tmp_path / "file").exists():
            time.sleep(0.01)
        writer.kill()
        writer.communicate()
        assert (tmp_path / "file").read_bytes() in whole


def test_two_processes_compile_the_same(tmp_path: Path) -> None:
    words = [str(COMMAND), "compile", "--target=generic", "--normalized-shape=8", f"-o{tmp_path}"]
    pair = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(2)]
    for command in pair:
        command.communicate(timeout=60)
    assert [command.returncode for command in pair] == [0, 0]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".vmfb"]
    arguments = random_arguments(random_generator(), SPEC, (5,))
    op = lnbwd.load(tmp_path / f"{SPEC.name}_generic.vmfb")
    assert_matches_reference(arguments.backward_by(op), arguments)


# --- the cache -------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.suffix: (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_hit_compiles_nothing(empty_cache: Path) -> None:
    target = find_target("generic")
    first = cache.build(SPEC, target)
    written = files(empty_cache)
    assert set(written) == {".vmfb", ".json"}
    assert cache.build(SPEC, target) == first
    assert files(empty_cache) == written


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "module truncated": lambda vmfb, _: os.truncate(vmfb, 1000),
    "module empty": lambda vmfb, _: os.truncate(vmfb, 0),
    "module gone": lambda vmfb, _: vmfb.unlink(),
    "manifest truncated": lambda _, manifest: os.truncate(manifest, 100),
    "manifest gone": lambda _, manifest: manifest.unlink(),
    "manifest altered": lambda _, m: m.write_text(m.read_text().replace("generic", "host")),
}


@pytest.mark.drawn
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_compiled_again(damage: str, empty_cache: Path) -> None:
    target = find_target("generic")
    first = cache.build(SPEC, target)
    (vmfb,), (manifest,) = empty_cache.rglob("*.vmfb"), empty_cache.rglob("*.json")
    whole = {path: path.read_bytes() for path in (vmfb, manifest)}
    DAMAGES[damage](vmfb, manifest)
    assert cache.build(SPEC, target) == first
    assert {path: path.read_bytes() for path in (vmfb, manifest)} == whole


@pytest.mark.drawn
def test_different_specs_and_targets_have_different_entries(empty_cache: Path) -> None:
    for spec in (SPEC, NormSpec((9,))):
        for name in ("generic", "host"):
            cache.build(spec, find_target(name))
    assert len(list(empty_cache.rglob("*.vmfb"))) == 4


def test_unwritable_cache_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "file" / "cache"))
    spec = NormSpec((11,), eps=0.5)  # which no other test has loaded
    arguments = random_arguments(random_generator(), spec, (3,), eps=0.5)
    with pytest.warns(RuntimeWarning, match="compiled module not cached: .*: Not a directory"):
        gradients = arguments.backward()
    assert_matches_reference(gradients, arguments)


# --- without the compiler --------------------------------------------------------------------

CALL = """
import numpy as np
import iree_lnbwd as lnbwd

x = np.arange(24, dtype=np.float32).reshape(3, 8)
mean, rstd = np.full(3, 11.5, np.float32), np.full(3, 0.2, np.float32)
"""


def test_modules_run_without_the_compiler(generic: Artifact, tmp_path: Path) -> None:
    script = f"""{NO_COMPILER}{CALL}
grads = lnbwd.load(sys.argv[1])(x, x[::-1], mean, rstd, x[0])
np.savez(sys.argv[2], *grads)
assert "iree.compiler" not in sys.modules
"""
    ended = python(script, generic.path, tmp_path / "out.npz")
    assert (ended.returncode, ended.stderr) == (0, "")
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    mean, rstd = np.full(3, 11.5, np.float32), np.full(3, 0.2, np.float32)
    arguments = Arguments(x, x[::-1], (8,), mean, rstd, x[0])
    with np.load(tmp_path / "out.npz") as stored:
        gradients = lnbwd.LayerNormGrads(*(stored[f"arr_{i}"] for i in range(3)))
    assert_matches_reference(gradients, arguments)
    assert_same_bits(gradients, arguments.backward_by(lnbwd.load(generic.path)))


def test_compiling_without_the_compiler(tmp_path: Path) -> None:
    script = f"""{NO_COMPILER}{CALL}
try:
    lnbwd.layer_norm_backward(x, x, 8, mean, rstd)
except lnbwd.CompileError as error:
    print(error)
"""
    ended = python(script, IREE_LNBWD_CACHE=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"{ABSENT}; loading and running")
    assert ended.stdout.count("\n") == 1
    assert issubclass(CompileError, RuntimeError)


def test_a_cached_module_needs_no_compiler(tmp_path: Path) -> None:
    """Which shows that a hit does not compile."""
    call = "print(lnbwd.layer_norm_backward(x, x, 8, mean, rstd).grad_bias.tolist())\n"
    first = python(CALL + call, IREE_LNBWD_CACHE=str(tmp_path))
    assert (first.returncode, first.stderr) == (0, "")
    again = python(NO_COMPILER + CALL + call, IREE_LNBWD_CACHE=str(tmp_path))
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == first.stdout


@pytest.fixture(scope="module")
def runtime_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This environment's packages less the compiler: a folder of links to them."""
    folder = tmp_path_factory.mktemp("runtime_only")
    site = Path(iree.runtime.__file__).parents[2]
    (folder / "iree").mkdir()
    for path in (*site.iterdir(), *(site / "iree").iterdir()):
        if path.name not in ("iree", "compiler", "build") and "iree_base_compiler" not in path.name:
            (folder / path.relative_to(site)).symlink_to(path)
    return folder


def python_with(packages: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A script that finds these packages and the checkout, and nothing that is installed."""
    checkout = Path(lnbwd.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-S", "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{packages}", **env},
    )


@pytest.mark.drawn
def test_everything_but_compiling_works_without_the_compiler(
    runtime_only: Path, generic: Artifact, tmp_path: Path
) -> None:
    def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
        script = f"import sys, iree_lnbwd.cli as c; sys.exit(c.main({list(map(str, words))}))"
        return python_with(runtime_only, script, IREE_LNBWD_CACHE=str(tmp_path))

    of_generic = ("--target=generic", f"--modules={generic.path.parent}", "--normalized-shape=8")
    verified = command("verify", *of_generic)
    assert verified.returncode == 0, verified.stderr
    assert "passed: 9 of 9 results" in verified.stdout
    bundled = command("verify", lnbwd.bundle(SPEC, "generic", tmp_path / "norms.lnb").path)
    assert bundled.returncode == 0, bundled.stderr
    assert "passed: 9 of 9 results" in bundled.stdout
    assert command("inspect", generic.path).returncode == 0
    assert command("targets").returncode == 0

    for words in (
        ["compile", "--normalized-shape=8"],
        ["bundle", "--normalized-shape=8", "-o", str(tmp_path / "more.lnb")],
        ["verify", "--normalized-shape=8"],
    ):
        missing = command(*words)
        assert missing.returncode == 2
        assert missing.stderr.startswith(f"iree-lnbwd: error: {ABSENT}")
        assert missing.stderr.count("\n") == 1


@pytest.mark.drawn
def test_a_bundle_of_the_family_is_verified_without_the_compiler(
    runtime_only: Path, tmp_path: Path
) -> None:
    """On the captured tensors, of which there are some for each op."""
    source = resources.files("iree_lnbwd") / "data" / "training_step.npz"
    with resources.as_file(source) as path:
        cases = npz.read_cases(path)
    bound = [verify.bind_case(arrays, source=case).spec for case, arrays in cases.items()]
    specs = [spec for spec in bound if spec is not None]
    assert {spec.op for spec in specs} == set(OPS)
    bundle = lnbwd.bundle(specs, "generic", tmp_path / "family.lnb").path
    words = ["verify", f"--modules={bundle}", "--device=local-task"]
    verified = python_with(
        runtime_only,
        f"import sys, iree_lnbwd.cli as c; sys.exit(c.main({words}))",
        IREE_LNBWD_CACHE=str(tmp_path / "empty"),
    )
    assert verified.returncode == 0, verified.stderr
    assert re.search(rf"passed: (\d+) of \1 results .* {len(cases)} cases", verified.stdout)


@pytest.mark.drawn
def test_modules_put_into_the_cache_need_no_compiler(runtime_only: Path, tmp_path: Path) -> None:
    """What `compile` writes into the folder itself is found by the function, where it fits."""
    call = "print(lnbwd.layer_norm_backward(x, x, 8, mean, rstd).grad_bias.tolist())\n"
    environment = {"IREE_LNBWD_CACHE": str(tmp_path)}
    missing = python_with(runtime_only, CALL + call, **environment)
    assert missing.returncode == 1
    assert ABSENT in missing.stderr

    made = lnbwd.compile(NormSpec((8,), has_weight=False), "host", tmp_path)
    for path in tmp_path.iterdir():
        path.chmod(0o644)  # some umasks let the group write
    ended = python_with(runtime_only, CALL + call, **environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == python(CALL + call).stdout

    tmp_path.chmod(0o777)
    refused = python_with(runtime_only, CALL + call, **environment)
    assert refused.returncode == 1
    assert re.search(
        rf"CompileError: {re.escape(ABSENT)}; the cache is of no use: {tmp_path}: others can write "
        rf"to it, its mode is 0777 \(chmod go-w {tmp_path}\); "
        r"IREE_LNBWD_CACHE can name a folder of your own\n\Z",
        refused.stderr,
    )
    tmp_path.chmod(0o755)
    assert python_with(runtime_only, CALL + call, **environment).returncode == 0

    manifest = made.manifest_path.read_text(encoding="utf-8")
    for other in (manifest.replace("host", "generic"), "{", "\ud800"):
        made.manifest_path.write_text(other, encoding="utf-8", errors="surrogatepass")
        assert python_with(runtime_only, CALL + call, **environment).returncode == 1


@pytest.mark.parametrize("eps", [1e39, 7e-46, -1e-46])
@pytest.mark.parametrize("functions", [lnbwd, reference], ids=["ours", "reference"])
def test_an_eps_that_sums_cannot_hold(functions: Any, eps: float) -> None:
    """It is refused wherever statistics are computed, and counts for nothing where they are not."""
    x, ones = np.full((2, 8), 3.0, np.float32), np.ones(8, np.float32)
    said = "^eps: expected 0, or a number from 1.4e-45 to .* in magnitude, for sums of f32, got "
    for op in OPS:
        given: dict[str, Any] = {"input": x} | ({"grad_output": x} if "backward" in op else {})
        given |= {"normalized_shape": 8, "weight": ones, "eps": eps}
        with pytest.raises(ValueError, match=said):
            getattr(functions, op)(**given)
        if "backward" in op:
            statistics = {"rstd": ones[:2]} | ({"mean": ones[:2]} if "layer" in op else {})
            getattr(functions, op)(**given, **statistics)
