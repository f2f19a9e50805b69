"""Which GPU takes which module: older ones with a warning, newer ones not at all."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from emulated_driver import EmulatedDriver

from iree_lnbwd import DeviceError, NormSpec, compile, runtime
from iree_lnbwd.hardware import devices
from iree_lnbwd.runtime import gpu_module

SMALL = NormSpec((64,), "bf16")
WIDE = NormSpec((16384,), "bf16")  # its schedule for sm_90 takes 192 KiB of shared memory


def load(
    spec: NormSpec,
    target: str,
    capability: tuple[int, int],
    folder: Path,
    patch: pytest.MonkeyPatch,
) -> None:
    """Loads the module of a target on a GPU of a compute capability, which the emulator is."""
    patch.setattr(devices, "_cuda_capability", lambda uri: capability)
    patch.setattr(gpu_module, "Driver", lambda uri: EmulatedDriver("cuda"))
    made = compile(spec, target, folder)
    assert runtime.load(made.path, "cuda").target == target


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("target", "capability"),
    [("sm_90", (9, 0)), ("sm_86", (8, 7)), ("sm_100", (10, 1)), ("sm_121", (12, 1))],
)
def test_the_best_module_is_taken_without_a_word(
    target: str, capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(SMALL, target, capability, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("target", "capability", "best"),
    [("sm_90", (10, 0), "sm_100"), ("sm_120", (12, 1), "sm_121"), ("sm_90", (12, 0), "sm_120")],
)
def test_a_module_for_an_older_gpu_runs_and_the_user_is_told(
    target: str,
    capability: tuple[int, int],
    best: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = f"^device: cuda://0 is best served by modules for {best}, got one for {target}: it runs"
    with pytest.warns(RuntimeWarning, match=said):
        load(SMALL, target, capability, tmp_path, monkeypatch)


def test_a_module_for_a_newer_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        r"^device: \S+_sm_120\.vmfb was compiled for sm_120; cuda://0 runs modules for sm_100 and"
    )
    with pytest.raises(DeviceError, match=said):
        load(SMALL, "sm_120", (10, 0), tmp_path, monkeypatch)


def test_a_module_for_an_older_gpu_with_more_shared_memory_is_refused_if_it_needs_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        r"^device: \S+_sm_90\.vmfb was compiled for sm_90 and needs \d+ bytes of shared memory "
        r"for a workgroup; cuda://0 \(sm_120\) has 101376$"
    )
    with pytest.raises(DeviceError, match=said):
        load(WIDE, "sm_90", (12, 0), tmp_path, monkeypatch)
