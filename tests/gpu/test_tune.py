"""Tuning on a GPU: what wins is right, kept and used, and it takes less than a minute."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from support import assert_right

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.calls import modules
from iree_lnbwd.hardware.devices import DeviceUri, target_of
from iree_lnbwd.schedules import OnePass, TwoPass
from iree_lnbwd.stores import tuned_folder
from iree_lnbwd.verification.matrix import both_sides, random_call

pytestmark = pytest.mark.gpu

SPECS = (
    NormSpec((6656,), "bf16"),
    NormSpec((6656,), "bf16", op="layer_norm", eps=1e-5, residual_dtype="bf16"),
    NormSpec((1152,), "bf16", weight_sets=True),
)
SECONDS = 60


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tuning folder for one test, and a cache: nothing is loaded before or after."""
    monkeypatch.setenv("IREE_LNBWD_TUNING", str(tmp_path / "tuning"))
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "tuning"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_one_width_and_type(spec: NormSpec, gpu: DeviceUri, tuning: Path) -> None:
    said: list[str] = []
    start = time.perf_counter()
    (outcome,) = lnbwd.tune(spec, str(gpu), progress=said.append)
    assert time.perf_counter() - start < SECONDS
    assert outcome.wrong == ()
    tuned = outcome.tuned
    assert tuned is not None
    print(tuned.source, tuned.gain, tuned.schedule)
    assert tuned.chosen == schedules.choose(spec, target_of(gpu))
    assert tuned.microseconds <= tuned.chosen_microseconds
    assert len(said) > tuned.candidates > 20
    assert tuned_folder.kept(_raise) == (tuned,)

    modules.forget([spec], gpu)
    norm = modules.loaded(spec, gpu)
    schedule = norm._module.description.schedule
    assert schedule == tuned.schedule
    modules.forget([spec], gpu)
    walkers = schedule.workgroups if isinstance(schedule, OnePass | TwoPass) else 64
    rng = np.random.default_rng(0)
    for rows in (1, 37, *both_sides(spec, schedule), 3 * walkers + 1):
        call = random_call(spec, rows, rng)
        assert_right(norm.run(call), call)


def test_memory_is_given_back(gpu: DeviceUri, tuning: Path) -> None:
    """After an interruption, too."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def stop(line: str) -> None:
        if "timing" in line:
            raise KeyboardInterrupt

    spec = NormSpec((1024,), "bf16", op="rms_norm", eps=1e-5)
    lost = []
    for _ in range(5):  # the first runs make a context, and load code that stays
        free, _ = torch.cuda.mem_get_info()
        with pytest.raises(KeyboardInterrupt):
            lnbwd.tune(spec, str(gpu), candidates=2, progress=stop)
        lost.append(free - torch.cuda.mem_get_info()[0])
    # The middle one of the last three: other processes allocate, too.
    assert sorted(lost[2:])[1] < 1 << 26
    assert tuned_folder.kept(_raise) == ()


def test_a_warmup_tunes(gpu: DeviceUri, tuning: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from iree_lnbwd.torch import RMSNorm, warmup

    norm = RMSNorm(1536, device="cuda")
    warmup(norm, tune=True)
    kept = {tuned.spec.op: tuned for tuned in tuned_folder.kept(_raise)}
    assert set(kept) == {"rms_norm", "rms_norm_backward"}
    for spec, uri in modules.in_use():
        if spec.columns == 1536:
            schedule = modules.loaded(spec, uri)._module.description.schedule
            assert schedule == kept[spec.op].schedule
    x = torch.randn(300, 1536, device="cuda", requires_grad=True)
    norm(x).sum().backward()
    expected = torch.nn.functional.rms_norm(x.detach(), (1536,), norm.weight)
    torch.testing.assert_close(norm(x), expected)


def _raise(error: ValueError) -> None:
    raise error
