"""Runs PTX kernels on arrays over all threads of many workgroups at once.

A kernel is divided into blocks of instructions, and each thread is at one block. In each step, the
earliest block that any thread can run is run by all threads that are at it. Barriers and shuffles
wait for their threads. Hardware may choose any such order.
"""

from iree_lnbwd.emulator.ptx.executor import PtxExecutor
from iree_lnbwd.emulator.ptx.parser import PtxError

__all__ = ["PtxError", "PtxExecutor"]
