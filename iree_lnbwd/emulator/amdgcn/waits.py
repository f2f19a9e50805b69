"""Memory accesses under way, as s_waitcnt counts them.

A load writes its registers some time after it was issued. Each wave counts what is under way in a
few counters, and s_waitcnt lets it go on when a counter has come down far enough. Code that touches
a register before it waited for its load is wrong, but often works on hardware. Here it is a fault.

Sources: AMD's ISA documents ("Data Dependency Resolution", "S_WAITCNT"), and LLVM's AMDGPU guide
for the order: vector memory loads come back in order (with the stores, before gfx10), stores among
themselves, LDS accesses among themselves; scalar loads in no order, so that only a wait for none
says anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from iree_lnbwd.emulator.launch import Array, Fault, Lanes

# What is counted on its own. s_waitcnt's lgkmcnt waits for LDS and SCALAR together.
VECTOR, STORE, LDS, SCALAR = "vector memory", "stores", "LDS", "scalar memory"
_IN_ORDER = (VECTOR, STORE, LDS)


@dataclass
class _Counter:
    issued: Array
    done: Array
    # Registers with a load under way in some wave: for each wave, the number of the load.
    pending: dict[tuple[bool, int], Array] = field(default_factory=dict)


class Waits:
    """What is under way in each wave."""

    def __init__(self, waves: int) -> None:
        self._waves = waves
        self._counters = {
            name: _Counter(np.zeros(waves, np.int64), np.zeros(waves, np.int64))
            for name in (*_IN_ORDER, SCALAR)
        }

    def issue(
        self, counter: str, index: slice | Lanes, registers: tuple[tuple[bool, int], ...] = ()
    ) -> None:
        """An access starts, in some waves; a load says which registers it will write."""
        count = self._counters[counter]
        count.issued[index] += 1
        for register in registers:
            if register not in count.pending:
                count.pending[register] = np.zeros(self._waves, np.int64)
            count.pending[register][index] = count.issued[index]

    def wait(self, counter: str, index: slice | Lanes, most: int) -> None:
        """Some waves wait until at most ``most`` accesses are under way."""
        count = self._counters[counter]
        if counter in _IN_ORDER:
            count.done[index] = np.maximum(count.done[index], count.issued[index] - most)
        elif most == 0:
            count.done[index] = count.issued[index]
        for register in [r for r, loads in count.pending.items() if (loads <= count.done).all()]:
            del count.pending[register]

    def idle(self, counter: str) -> Array:
        """Nothing is under way: [waves]."""
        count = self._counters[counter]
        done: Array = count.issued == count.done
        return done

    def check(
        self, index: slice | Lanes, registers: tuple[tuple[bool, int], ...], *, loads: str = ""
    ) -> None:
        """An instruction touches registers.

        Args:
            index: The waves.
            registers: (is a vector register, its number).
            loads: The counter of the instruction, where it is a load in order: it may write what
                an earlier load of that counter writes.

        Raises:
            Fault: One of them has a load under way.
        """
        for name, count in self._counters.items():
            if not count.pending or (name == loads and name in _IN_ORDER):
                continue
            for register in registers:
                load = count.pending.get(register)
                if load is not None and (load[index] > count.done[index]).any():
                    letter = "v" if register[0] else "s"
                    raise Fault(
                        f"{letter}{register[1]} is touched while a load from {name} into it is "
                        "under way: an s_waitcnt is missing"
                    )
