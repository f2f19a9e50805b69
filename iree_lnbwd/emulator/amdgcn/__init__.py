"""Runs the AMDGCN code that IREE's compiler generates (gfx9 CDNA, gfx11, gfx12)."""

from iree_lnbwd.emulator.amdgcn.executor import AmdgcnExecutor

__all__ = ["AmdgcnExecutor"]
