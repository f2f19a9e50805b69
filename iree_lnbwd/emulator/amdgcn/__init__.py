"""Runs AMD GPUs' machine code: gfx90a, gfx942, gfx950 (CDNA), gfx1100 (RDNA3), gfx1201 (RDNA4).

code object --disassembly--> text --assembly--> instructions --vector, scalar, ...--> steps
                                                              executor: waves through the steps
"""

from iree_lnbwd.emulator.amdgcn.disassembly import disassemble
from iree_lnbwd.emulator.amdgcn.executor import AmdgcnExecutor

__all__ = ["AmdgcnExecutor", "disassemble"]
