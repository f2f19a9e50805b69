"""``scripts/sweeps``: schedules in raw files that this version does not have."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from iree_lnbwd.schedules import OnePass, schedule_to_dict

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
