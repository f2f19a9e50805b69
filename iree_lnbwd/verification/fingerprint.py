"""A fingerprint of the parts of a module that run on a GPU; evidence is bound to it.

Source locations and comments in a .vmfb do not change the fingerprint. Any instruction, constant,
binding or order does.
"""

from __future__ import annotations

import json
import re

from iree_lnbwd.artifact import digest
from iree_lnbwd.description import describe
from iree_lnbwd.emulator import executables
from iree_lnbwd.emulator.amdgcn.disassembly import loaded
from iree_lnbwd.emulator.vm import disassemble

_ELF = b"\x7fELF"
# In PTX: comments, and source locations.
_UNSAID = re.compile(r"//.*|^\s*\.(?:loc|file)\b.*", re.MULTILINE)
# In the output of iree-dump-module: the beginning of the program, and executables, by their magic.
_PROGRAM = "\nvm.module "
_EXECUTABLE = re.compile(r"^(vm\.rodata\[\d+\]) = (?:43444131|48495031)[0-9A-F]*$", re.MULTILINE)


def of(vmfb: bytes, *, source: str) -> str:
    """SHA-256 of the host program, the launch plan, and each kernel's code and needs.

    Args:
        vmfb: A module for a GPU.
        source: Where it came from, for messages.

    Raises:
        ArtifactError: It is damaged or no module of this package.
        Fault, VmError, ValueError: Its code cannot be read.
    """
    launches = describe(vmfb, source=source).launches
    runs = {
        "host": _host_program(vmfb),
        "launches": None if launches is None else launches.to_dict(),
        "kernels": [
            {
                "kernel": export.kernel,
                "threads": export.threads,
                "shared_bytes": export.shared_bytes,
                "writable": export.writable,
                "constants": export.constants,
                "code_sha256": digest(_instructions(export.code)),
            }
            for export in executables.exports(vmfb)
        ],
    }
    return digest(json.dumps(runs, sort_keys=True).encode())


def _host_program(vmfb: bytes) -> str:
    _, _, program = disassemble(vmfb).partition(_PROGRAM)
    return _EXECUTABLE.sub(r"\1", program)


def _instructions(code: bytes) -> bytes:
    """PTX without comments and locations; of a code object, the parts that a loader takes."""
    if code.startswith(_ELF):
        return loaded(code)
    lines = (line.strip() for line in _UNSAID.sub("", code.decode()).splitlines())
    return "\n".join(filter(None, lines)).encode()
