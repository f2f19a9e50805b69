"""``scripts/tune``: what it builds for a product, and what it refuses. Timing needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import assert_right, random_generator

from iree_lnbwd import schedules
from iree_lnbwd.hardware.products import find_product
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.vmfb.description import describe

_SCRIPT = Path(__file__).parents[2] / "scripts" / "tune"


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.drawn
def test_modules_for_a_product(tmp_path: Path) -> None:
    done = _run("build", "--product=l40s", "--columns=768", "--sample=1", tmp_path)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["product"] == "l40s"
    assert {module["dtype"] for module in index["modules"]} == {"f32", "bf16"}
    for module in index["modules"]:
        path = tmp_path / module["file"]
        described = describe(path.read_bytes(), source=str(path))
        assert described.target is find_target("sm_89")
        how = schedules.schedule_from_dict(module["schedule"], str(path))
        assert how == described.schedule
        assert isinstance(how, OnePass)
        assert how.workgroups % 142 == 0 or how.workgroups % 128 == 0


@pytest.mark.drawn
def test_what_is_chosen_defends_its_place(tmp_path: Path) -> None:
    done = _run("build", "--product=h200", "--columns=1024", "--sample=0", tmp_path)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "index.json").read_text())
    for module in index["modules"]:
        spec = NormSpec((1024,), module["dtype"])
        chosen = schedules.choose(spec, find_target("sm_90"), find_product("h200"))
        assert isinstance(chosen, OnePass)
        assert module["schedule"]["workgroups"] == chosen.workgroups


@pytest.mark.drawn
def test_others_are_near_the_choice_and_right(tmp_path: Path) -> None:
    words = ("--random=2:200:1500", "--sample=5", "--members=rms_norm_backward", "--dtypes=bf16")
    seed = random_generator().integers(1 << 31)
    done = _run("build", *words, "--product=a100", f"--seed={seed}", tmp_path)
    assert done.returncode == 0, done.stderr
    modules = json.loads((tmp_path / "index.json").read_text())["modules"]
    assert len(widths := {module["columns"] for module in modules}) == 2
    assert all(200 <= n <= 1500 and n % 8 for n in widths)
    assert len({json.dumps(module["schedule"]) for module in modules}) > 6
    for module in modules:
        emulated = EmulatedNorm((tmp_path / module["file"]).read_bytes())
        call = matrix.random_call(emulated.spec, 37, random_generator())
        assert_right(emulated.run(call), call)


@pytest.mark.drawn
@pytest.mark.parametrize("product", ["h200", "mi300x"])
@pytest.mark.parametrize("member", ["layer_norm", "add_rms_norm"])
def test_forwards_are_right_however_they_share_out_rows(
    member: str, product: str, tmp_path: Path
) -> None:
    words = (f"--members={member}", f"--product={product}", "--columns=200", "--sample=3")
    done = _run("build", *words, f"--seed={random_generator().integers(1 << 31)}", tmp_path)
    assert done.returncode == 0, done.stderr
    modules = json.loads((tmp_path / "index.json").read_text())["modules"]
    assert len(modules) >= 2 * 3
    kinds = set()
    for module in modules:
        emulated = EmulatedNorm((tmp_path / module["file"]).read_bytes())
        kinds.add((module["dtype"], module["schedule"]["threads"], module["schedule"]["chunks"]))
        for rows in (1, 37):
            call = matrix.random_call(emulated.spec, rows, random_generator())
            assert_right(emulated.run(call), call)
    assert len(kinds) > 2  # one of each type would be the choices
    described = describe((tmp_path / modules[0]["file"]).read_bytes(), source="the choice")
    spec, target = described.spec, described.target
    assert described.schedule == schedules.choose(spec, target, find_product(product))


def test_an_unknown_product_is_refused(tmp_path: Path) -> None:
    done = _run("build", "--product=sm_90", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("tune: error: product: expected one of t4, a100, ")
    assert done.stderr.endswith("got 'sm_90'\n")
    assert list(tmp_path.iterdir()) == []
