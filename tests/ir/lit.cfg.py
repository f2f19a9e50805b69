"""FileCheck tests of the IR: each .mlir file here says what it runs and what must come out.

By hand: lit -v tests/ir
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lit.formats

if TYPE_CHECKING:
    config: Any = None  # lit defines it

_HERE = Path(__file__).parent

config.name = "iree-lnbwd IR"
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = [".mlir"]
config.test_source_root = str(_HERE)

# iree-lnbwd, iree-compile and filecheck are those of the Python that runs lit.
config.environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
if "PYTHONPATH" in os.environ:
    config.environment["PYTHONPATH"] = os.environ["PYTHONPATH"]

# %{ir}            the folder with the files that modules are made from
# %{to-input}      what reads a module's text and prints it with every alias resolved
# %{to-flow}       what turns a command of --print-command into one that prints its dispatches
config.substitutions += [
    ("%{ir}", str(_HERE.parent.parent / "ir")),
    ("%{to-input}", "iree-compile - --iree-input-type=none --compile-to=input"),
    ("%{to-flow}", "sed 's/ -o [^ ]* / --compile-to=flow -o - /'"),
]
