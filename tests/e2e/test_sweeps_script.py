"""``scripts/sweeps``: schedules in raw files that this version does not have."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.hardware.products import find_product
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.schedules import Forward, OnePass, schedule_to_dict

_SCRIPT = Path(__file__).parents[2] / "scripts" / "sweeps"
_ONE = OnePass(132, groups=1, warps=8, vector=8, ahead=2, slots=2, rereads=True, bulk=True)
_FEWEST = 5  # schedules of a cell, to be ordered


def _model(folder: Path, *more: Mapping[str, object]) -> subprocess.CompletedProcess[str]:
    """Judges the model by as many schedules as it takes, and by others with these fields."""
    about = {"member": "layer_norm_backward", "columns": 8192, "dtype": "bf16"}
    said = schedule_to_dict(_ONE)
    given = [said | {"workgroups": 132 - number} for number in range(_FEWEST)]
    given += [said | dict(fields) for fields in more]
    timed = [about | {"schedule": how, "share": 0.9 - i / 100} for i, how in enumerate(given)]
    raw = folder / "raw.json"
    raw.write_text(json.dumps(timed))
    command = [sys.executable, str(_SCRIPT), "model", str(raw)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_slot_that_was_refilled_in_parts_counts_for_no_schedule_of_today(tmp_path: Path) -> None:
    done = _model(tmp_path, {"refills": 1}, {"refills": 2}, {"refills": 4})
    assert f"| bf16 | 8192 | 8192 | {_FEWEST + 1} |" in done.stdout, done


def test_a_field_that_no_schedule_has_is_refused(tmp_path: Path) -> None:
    done = _model(tmp_path, {"waves": 2})
    assert done.returncode == 2
    assert "raw.json: expected a list of timed schedules" in done.stderr
    assert "'waves'" in done.stderr


def test_the_rules_of_forwards_against_the_best_of_a_sweep(tmp_path: Path) -> None:
    spec = NormSpec((1024,), "bf16", op="layer_norm", eps=1e-5)
    chosen = schedules.choose(spec, find_target("sm_90"), find_product("h200"))
    assert isinstance(chosen, Forward)
    other = replace(chosen, chunks=4 * chosen.chunks, resident=chosen.resident + 1)
    about = {"member": "layer_norm", "columns": 1024, "dtype": "bf16"}
    timed = [
        about | {"schedule": schedule_to_dict(how), "share": share}
        for how, share in ((chosen, 0.76), (other, 0.95))
    ]
    not_timed = [timed[1] | {"dtype": "f32"}]
    raw = tmp_path / "raw.json"
    raw.write_text(json.dumps(timed + not_timed))
    command = [sys.executable, str(_SCRIPT), "forwards", str(raw)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    differs = f"chunks={other.chunks}, resident={other.resident}"
    cell = f"| layer_norm | bf16 | 1024 | 65536 | 2 | 76.0% | 95.0% | 20.0% | {differs} |"
    assert cell in said, said
    assert "| layer_norm | f32 | 1024 | 65536 | 1 | not timed | 95.0% |  |" in said, said
    assert said.endswith("1 cells: median 20.0%, worst 20.0%\n")
