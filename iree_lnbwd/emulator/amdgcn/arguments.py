"""A kernel's arguments in memory: those that IREE passes, and those that the HIP runtime adds.

Sources: IREE, runtime/src/iree/hal/drivers/hip (pointers to the bindings, then the constants);
LLVM's AMDGPU guide, "Code Object V5 Metadata" (the hidden arguments and their offsets).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator.launch import Bytes, Launch

KERNARG_ADDRESS = 1 << 20
ARGUMENTS_END = 1 << 32  # from here on addresses are of global memory
_HIDDEN_BYTES = 256
_PADDING = 64  # a load may go beyond the last argument, to the next multiple


@dataclass(frozen=True)
class Arguments:
    """The memory at a kernel's kernarg segment pointer.

    Attributes:
        content: The bytes.
        known: Which of them mean something; others are padding, or hidden arguments that are not
            known here.
    """

    content: Bytes
    known: npt.NDArray[np.bool_]


def arguments(launch: Launch, declared: int) -> Arguments:
    """The arguments of a launch.

    Args:
        launch: The dispatch.
        declared: The bytes that the kernel declares; if there are more than IREE passes, the rest
            holds the hidden arguments.
    """
    addresses = np.array([binding.address for binding in launch.bindings], np.uint64)
    constants = np.array(launch.constants, np.uint32)
    given = np.concatenate([addresses.view(np.uint8), constants.view(np.uint8)])
    hidden_at = -(-given.size // 8) * 8
    size = -(-max(given.size, declared) // _PADDING) * _PADDING
    content, known = np.zeros(size, np.uint8), np.zeros(size, np.bool_)
    content[: given.size], known[: given.size] = given, True
    if declared >= hidden_at + _HIDDEN_BYTES:
        for offset, value in _hidden(launch):
            part = slice(hidden_at + offset, hidden_at + offset + len(value))
            content[part], known[part] = np.frombuffer(value, np.uint8), True
    return Arguments(content, known)


def _hidden(launch: Launch) -> tuple[tuple[int, bytes], ...]:
    """Offsets and values of the hidden arguments that are known."""
    return (
        (0, struct.pack("<3I", *launch.workgroup_count)),
        (12, struct.pack("<3H", *launch.workgroup_size)),
        (18, struct.pack("<3H", 0, 0, 0)),  # threads of a last, partial workgroup: there is none
        (40, struct.pack("<3Q", 0, 0, 0)),  # offset of the grid
    )
