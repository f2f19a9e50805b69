"""What all kinds of memory share: cells with their stamps, and bytes as words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator.launch import Array, Bytes, Fault, Lanes

WIDEST = 16  # bytes of one access, and of a cell before a narrower access came
_AT_ONCE = 1 << 30  # of the registers, shared and local memory of the workgroups that run together
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
POISON = 0xFF  # what memory holds before anything was written: NaN in every float type

Stamps = npt.NDArray[np.int64]


class Cells:
    """A stamp of the last write and of the last read for each cell of a piece of memory."""

    def __init__(
        self, nbytes: int, *, written: int = 0, claim: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Cells of the widest access.

        Args:
            nbytes: Of the memory.
            written: The stamp of the last write.
            claim: Is told how many bytes more the stamps take before they do.
        """
        self.size = WIDEST
        self._claim = claim
        count = -(-nbytes // WIDEST)
        self.write = np.full(count, written, np.int64)
        self.read = np.zeros(count, np.int64)

    @property
    def nbytes(self) -> int:
        """Of all stamps."""
        return self.write.nbytes + self.read.nbytes

    def index(self, offsets: Lanes, nbytes: int, alignment: int) -> Lanes:
        """The cells of each access: [T, cells of one access]."""
        unit = min(nbytes & -nbytes, alignment)
        if unit < self.size:
            finer = self.size // unit
            self._claim((finer - 1) * self.nbytes)
            self.write, self.read = np.repeat(self.write, finer), np.repeat(self.read, finer)
            self.size = unit
        first = (offsets // self.size)[:, None]
        count = nbytes // self.size
        return first if count == 1 else first + np.arange(count)


def workgroups_at_once(shared_bytes: int, thread_bytes: int, threads: int) -> int:
    """How many workgroups may run together, so that they need little memory.

    Args:
        shared_bytes: Shared memory of one workgroup.
        thread_bytes: Registers and local memory of a thread, with the notes on them.
        threads: Threads of a workgroup.

    Raises:
        Fault: Not even one may run.
    """
    needed = (1 + 2 * 8) * shared_bytes + thread_bytes * threads  # stamps, where cells are bytes
    if needed > _AT_ONCE:
        raise Fault(
            f"a workgroup with {shared_bytes} bytes of shared memory and {threads} threads of "
            f"{thread_bytes} takes {needed}, the emulator has {_AT_ONCE}"
        )
    return _AT_ONCE // max(1, needed)


def check_alignment(offsets: Lanes, alignment: int, lanes: Lanes, name: str) -> None:
    """Expects aligned accesses.

    Raises:
        Fault: One is not, of the memory with this name.
    """
    if (wrong := offsets & (alignment - 1)).any():
        first = np.flatnonzero(wrong)
        raise Fault(
            f"misaligned: byte {offsets[first[0]]} of {name}, expected a multiple of {alignment}",
            lanes[first],
        )


def check_written(stamps: Array, lanes: Lanes, offsets: Lanes, name: str) -> None:
    """Expects that somebody wrote what is read.

    Raises:
        Fault: Nobody did.
    """
    if not stamps.all():
        missing = ~stamps.all(axis=1)
        raise Fault(
            f"a read of {name} at byte {offsets[missing][0]}, which nobody wrote", lanes[missing]
        )


def gather(data: Bytes, offsets: Lanes, nbytes: int, alignment: int) -> Bytes:
    """The bytes of each access: [T, nbytes]."""
    words, index = _words(data, offsets, nbytes, alignment)
    return words[index].view(np.uint8).reshape(len(offsets), nbytes)


def scatter(data: Bytes, offsets: Lanes, values: Bytes, alignment: int) -> None:
    """Writes the bytes of each access: [T, nbytes]."""
    words, index = _words(data, offsets, values.shape[1], alignment)
    words[index] = np.ascontiguousarray(values).view(words.dtype).reshape(index.shape)


def _words(data: Bytes, offsets: Lanes, nbytes: int, alignment: int) -> tuple[Array, Lanes]:
    """Memory in the widest words that accesses are made of, and the words of each: [T, words]."""
    unit = min(nbytes & -nbytes, alignment, max(_WORDS))
    words = data.view(_WORDS[unit])
    first = (offsets // unit)[:, None]
    return words, first if nbytes == unit else first + np.arange(nbytes // unit)
