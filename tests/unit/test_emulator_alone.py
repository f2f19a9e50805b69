"""The emulator knows nothing of the package around it, nor of itself in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from iree_lnbwd import emulator
from iree_lnbwd.emulator.limits import CUDA_SHARED_BYTES, ROCM_SHARED_BYTES
from iree_lnbwd.hardware.targets import targets

PACKAGE = "iree_lnbwd.emulator"
CODE = "iree_lnbwd.vmfb.executables"  # how the code of a GPU lies in a .vmfb
FOLDER = Path(emulator.__file__).parent


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        parts = path.relative_to(FOLDER).with_suffix("").parts
        found[".".join((PACKAGE, *(part for part in parts if part != "__init__")))] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """The modules that a file names, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("name", modules())
def test_nothing_of_the_package_around_it(name: str) -> None:
    allowed = (*sys.stdlib_module_names, "numpy", PACKAGE, CODE)
    for other in {*imported(modules()[name])} - {CODE.rpartition(".")[0]}:
        assert any(other == known or other.startswith(f"{known}.") for known in allowed), other


def test_no_circle_of_imports() -> None:
    """But for the package's own file, which only says what there is."""
    known = {name: path for name, path in modules().items() if name != PACKAGE}
    needs = {name: {*imported(path)} & known.keys() for name, path in known.items()}
    # A package's file names its modules; who names the package has them.
    needs[f"{PACKAGE}.amdgcn"] -= {f"{PACKAGE}.amdgcn"}
    left = dict(needs)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_what_it_says_it_has() -> None:
    assert all(hasattr(emulator, name) for name in emulator.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = emulator.Nothing


def test_who_reads_executables_loads_no_more() -> None:
    """What runs on real GPUs reads them, and is quick to import."""
    code = (
        "import sys, iree_lnbwd.vmfb.executables\n"
        "print([m for m in sys.modules if m.startswith('iree_lnbwd.emulator.')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_commands_that_emulate_nothing_load_no_more_either() -> None:
    """It would be a quarter of the time that they take to start."""
    code = (
        "import sys; from iree_lnbwd import cli; assert cli.main(['targets']) == 0\n"
        "print([m for m in sys.modules if m.startswith('iree_lnbwd.emulator.')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_schedules_take_no_more_shared_memory_than_there_is() -> None:
    known = {**CUDA_SHARED_BYTES, **ROCM_SHARED_BYTES}
    assert known.keys() == {target.name for target in targets() if target.backend != "cpu"}
    for target in targets():
        assert target.shared_bytes <= known.get(target.name, 0)
