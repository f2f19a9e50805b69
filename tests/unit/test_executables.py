"""Kernels out of a .vmfb: held against what the code itself says."""

from __future__ import annotations

import io
import re
import zipfile

import pytest
from support import built, random_generator

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.vmfb import inspection
from iree_lnbwd.vmfb.executables import exports, exports_of_executable
from iree_lnbwd.vmfb.launches import launches

PARAMETERS = re.compile(r"\.entry (\w+)\((.*?)\)", re.DOTALL)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_75", "sm_90", "gfx942", "gfx1100"])
@pytest.mark.parametrize("columns", [769, 4096, 65536])
def test_exports_are_what_the_code_and_the_launches_say(columns: int, target: str) -> None:
    spec, found = NormSpec((columns,), "bf16"), find_target(target)
    vmfb, _ = built(spec, found)
    by_name = {export.kernel: export for export in exports(vmfb)}
    planned = launches(spec, found, schedules.choose(spec, found))
    assert planned is not None
    kernels = [launch for plan in planned.plans for launch in plan.kernels]
    assert set(by_name) == {launch.kernel for launch in kernels}
    for launch in kernels:
        export = by_name[launch.kernel]
        assert export.bindings == len(launch.bindings)
        assert export.constants == len(launch.constants)
    for kernel in inspection.kernels(vmfb, found):
        x, y, z = by_name[kernel.name].threads
        assert kernel.threads == x * y * z
    if found.backend == "cuda":
        for name, parameters in PARAMETERS.findall(
            inspection.ptx(by_name[next(iter(by_name))].code)
        ):
            assert parameters.count(".u64") == by_name[name].bindings
            assert parameters.count(".b32") == by_name[name].constants


def test_dynamic_shared_memory_is_what_the_schedule_reckons() -> None:
    spec, target = NormSpec((4096,), "bf16"), find_target("sm_90")
    how = schedules.choose(spec, target)
    assert isinstance(how, OnePass)
    (rows,) = (e for e in exports(built(spec, target)[0]) if e.kernel == "rows")
    assert rows.shared_bytes <= how.shared_bytes(spec, target) <= target.shared_bytes
    assert rows.shared_bytes > how.shared_bytes(spec, target) * 0.9


def test_what_a_kernel_may_write() -> None:
    vmfb, _ = built(NormSpec((4096,), "bf16"), find_target("sm_90"))
    (finalize,) = (export for export in exports(vmfb) if export.kernel == "finalize")
    assert finalize.writable == (False, False, True, True)


def test_what_is_no_executable() -> None:
    with pytest.raises(ValueError, match="executable: expected one of"):
        exports_of_executable(b"nothing of the kind")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_damaged_executable_is_a_value_error_and_takes_no_memory(target: str) -> None:
    """The lengths of its vectors too, which would be lists of billions."""
    vmfb, _ = built(NormSpec((64,)), find_target(target))
    with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:
        files = [archive.read(name) for name in archive.namelist()]
    (whole,) = (file for file in files if file[:4] in (b"CDA1", b"HIP1"))
    rng = random_generator()
    said = []
    for _ in range(300):
        damaged = bytearray(whole)
        at = len(whole) - int(rng.integers(1, 600))
        damaged[at : at + int(rng.integers(1, 9))] = bytes([int(rng.choice([0, 1, 127, 255]))])
        try:
            exports_of_executable(bytes(damaged))
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 20
    assert not any("\n" in words for words in said)


def test_a_module_for_the_cpu_has_none() -> None:
    assert exports(built(NormSpec((64,)), find_target("generic"))[0]) == ()
