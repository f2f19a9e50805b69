"""Reading the executables inside a module."""

from __future__ import annotations

import io
import zipfile

import pytest

from iree_lnbwd import LayerNormSpec, compiler, inspection
from iree_lnbwd.emulator import PtxError, executable, ptx_parser
from iree_lnbwd.schedule import OnePass
from iree_lnbwd.targets import find_target


def _data(vmfb: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:
        (name,) = (name for name in archive.namelist() if name != "module.fb")
        return archive.read(name)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernels_and_what_their_launches_need(target: str) -> None:
    spec = LayerNormSpec((1024,), "bf16")
    vmfb, manifest = compiler.build(spec, find_target(target))
    read = executable.read(_data(vmfb))
    how = manifest.schedule
    assert isinstance(how, OnePass)
    assert read.format == ("cuda-nvptx-fb" if target == "sm_90" else "rocm-hsaco-fb")
    rows, finalize = sorted(read.exports, key=lambda export: export.name, reverse=True)
    assert rows.workgroup_size == (how.groups * how.threads(find_target(target)), 1, 1)
    assert finalize.name == "finalize"
    assert finalize.constants == 1
    assert finalize.writable == (False, False, True, True)
    names = {kernel.name for kernel in inspection.kernels(vmfb, find_target(target))}
    assert {export.name for export in read.exports} == names
    (code,) = read.codes
    if target == "sm_90":
        parsed = ptx_parser.parse(code.decode())
        assert set(parsed) == names
        assert parsed["finalize"].max_threads == finalize.workgroup_size
        # Four pointers and the number of partial rows.
        assert list(parsed["finalize"].parameters.values()) == ["u64"] * 4 + ["b32"]
    else:
        assert code.startswith(b"\x7fELF")


def test_what_is_no_executable() -> None:
    with pytest.raises(ValueError, match="executable: expected one of"):
        executable.read(b"nothing of the kind" * 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".visible .entry f() { ret;", "a kernel's body does not end"),
        (
            ".visible .entry f() {\n\tret;\n\t%r1 = 2;\n}",
            "line 3: expected an instruction, got %r1",
        ),
        (".visible .entry f() { .reg .b16 %a; .reg .b32 %a; ret; }", "%a is declared twice"),
    ],
)
def test_text_that_is_no_ptx(text: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        ptx_parser.parse(text)
