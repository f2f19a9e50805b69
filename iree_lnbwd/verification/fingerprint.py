"""A fingerprint of what a module runs on a GPU; evidence is bound to it.

Any instruction of a kernel, any constant, binding or order of a launch changes it, whether the host
program or the launch plan asks for that. Source locations, comments and names do not, nor does what
the host program checks before it launches anything.
"""

from __future__ import annotations

import json
import re

from iree_lnbwd.emulator.amdgcn.disassembly import loaded
from iree_lnbwd.verification import host_calls
from iree_lnbwd.vmfb import executables
from iree_lnbwd.vmfb.artifact import digest
from iree_lnbwd.vmfb.description import describe

_ELF = b"\x7fELF"
# In PTX: comments, and source locations.
_UNSAID = re.compile(r"//.*|^\s*\.(?:loc|file)\b.*", re.MULTILINE)


def of(vmfb: bytes, *, source: str) -> str:
    """SHA-256 of what the host program launches, the launch plan, and kernels' code and needs.

    Args:
        vmfb: A module for a GPU.
        source: Where it came from, for messages.

    Raises:
        ArtifactError: It is damaged or no module of this package.
        Fault, VmError, ValueError: Its code cannot be read.
    """
    described = describe(vmfb, source=source)
    launches = described.launches
    runs = {
        "host": host_calls.asked(vmfb, described),
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


def _instructions(code: bytes) -> bytes:
    """PTX without comments and locations; of a code object, the parts that a loader takes."""
    if code.startswith(_ELF):
        return loaded(code)
    lines = (line.strip() for line in _UNSAID.sub("", code.decode()).splitlines())
    return "\n".join(filter(None, lines)).encode()
