"""From a code object to assembly: the encodings of gfx9 (CDNA), gfx11 (RDNA3) and gfx12 (RDNA4).

A module holds machine code, and the emulator runs text. The compiler's own listing of a module
cannot be used: it comes from a second run of the code generator, on a copy of the module, which
chooses other registers, another order, even other instructions. So the machine code itself is read.

LLVM's assembler turns the text into the same bytes again (tests check this). Any bit of an
instruction that is not understood is a fault.

Sources: AMD's ISA documents, "Microcode Formats"; LLVM's AMDGPU guide, "Kernel Descriptor".
"""

from iree_lnbwd.emulator.amdgcn.disassembly.code_objects import PROCESSORS, loaded, symbols
from iree_lnbwd.emulator.amdgcn.disassembly.listing import disassemble

__all__ = ["PROCESSORS", "disassemble", "loaded", "symbols"]
