"""PTX's state spaces: which memory an address is in, and notes on who touches it."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.emulator import clusters, mbarriers
from iree_lnbwd.emulator.launch import Bytes, Fault, Lanes
from iree_lnbwd.emulator.ptx.threads import Threads

# Generic addresses of other memory than global: far above every global address.
SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 1 << 61


def load_bytes(threads: Threads, space: str, lanes: Lanes, addresses: Lanes, nbytes: int) -> Bytes:
    """Each thread reads neighbouring bytes: [T, nbytes]."""
    match space:
        case "global":
            return threads.memory.load(lanes + threads.first_lane, addresses, nbytes)
        case "shared":
            note_own(threads, lanes, addresses, nbytes, writes=False)
            return threads.shared.load(lanes, addresses, nbytes)
        case "shared::cluster":
            values = np.empty((len(lanes), nbytes), np.uint8)
            own, others, workgroups, at = _in_cluster(
                threads, lanes, addresses, nbytes, writes=False
            )
            values[own] = threads.shared.load(lanes[own], at[own], nbytes)
            values[others] = threads.shared.load_of(
                workgroups[others], lanes[others], at[others], nbytes
            )
            return values
        case "local":
            return threads.local.load(lanes, addresses, nbytes)
    values = np.empty((len(lanes), nbytes), np.uint8)
    for where, part, window in _windows(addresses):
        values[part] = load_bytes(threads, where, lanes[part], addresses[part] - window, nbytes)
    return values


def store_bytes(
    threads: Threads, space: str, lanes: Lanes, addresses: Lanes, values: Bytes
) -> None:
    """Each thread writes neighbouring bytes: [T, nbytes]."""
    match space:
        case "global":
            threads.memory.store(lanes + threads.first_lane, addresses, values)
        case "shared":
            note_own(threads, lanes, addresses, values.shape[1], writes=True)
            threads.shared.store(lanes, addresses, values)
        case "shared::cluster":
            own, others, workgroups, at = _in_cluster(
                threads, lanes, addresses, values.shape[1], writes=True
            )
            threads.shared.store(lanes[own], at[own], values[own])
            threads.shared.store_of(workgroups[others], lanes[others], at[others], values[others])
        case "local":
            threads.local.store(lanes, addresses, values)
        case _:
            for where, part, window in _windows(addresses):
                store_bytes(threads, where, lanes[part], addresses[part] - window, values[part])


def load_atomic_bytes(
    threads: Threads, space: str, lanes: Lanes, addresses: Lanes, nbytes: int
) -> Bytes:
    """As `load_bytes`, of global memory, where others may store at any time."""
    assert space == "global"
    return threads.memory.load_atomic(lanes + threads.first_lane, addresses, nbytes)


def store_atomic_bytes(
    threads: Threads, space: str, lanes: Lanes, addresses: Lanes, values: Bytes
) -> None:
    """As `store_bytes`, to global memory, where others may load at any time."""
    assert space == "global"
    threads.memory.store_atomic(lanes + threads.first_lane, addresses, values)


def of_cluster(threads: Threads) -> clusters.Cluster:
    """The cluster of these threads; one workgroup if there are only mbarriers."""
    if threads.cluster is None:
        raise Fault("an instruction of clusters in a kernel without .reqnctapercluster")
    return threads.cluster


def mbarriers_of(threads: Threads) -> mbarriers.Mbarriers:
    """The mbarriers of these threads. workgroups."""
    if threads.mbarriers is None:
        raise Fault("an mbarrier in a kernel that initialises none")
    return threads.mbarriers


def note_own(
    threads: Threads, lanes: Lanes, addresses: Lanes, nbytes: int, *, writes: bool
) -> None:
    """Threads touch their workgroup's memory, which others of the cluster may touch as well."""
    if threads.cluster is not None:
        _note(threads, lanes, lanes // threads.threads, addresses, nbytes, writes=writes)


def _note(
    threads: Threads,
    lanes: Lanes,
    workgroups: Lanes,
    addresses: Lanes,
    nbytes: int,
    *,
    writes: bool,
) -> None:
    """Threads touch the memory of workgroups of their cluster."""
    of_cluster(threads).note(lanes, workgroups, addresses, nbytes, writes=writes)
    if threads.mbarriers is not None:
        threads.mbarriers.note(lanes, workgroups, addresses, nbytes)


def _in_cluster(
    threads: Threads, lanes: Lanes, addresses: Lanes, nbytes: int, *, writes: bool
) -> tuple[Lanes, Lanes, Lanes, Lanes]:
    """Accesses to a workgroup's own memory, the others; whose memory each is to, and where."""
    cluster = of_cluster(threads)
    workgroups, at = cluster.locate(lanes, addresses)
    is_own = workgroups == lanes // threads.threads
    cluster.check_there(lanes[~is_own], workgroups[~is_own], threads.alive)
    _note(threads, lanes, workgroups, at, nbytes, writes=writes)
    return np.flatnonzero(is_own), np.flatnonzero(~is_own), workgroups, at


def _windows(addresses: Lanes) -> list[tuple[str, Lanes, int]]:
    """The state spaces that generic addresses are in, with the accesses to each."""
    is_local = addresses >= LOCAL_WINDOW
    is_shared = (addresses >= SHARED_WINDOW) & ~is_local
    parts = (
        ("global", ~is_local & ~is_shared, 0),
        ("shared", is_shared, SHARED_WINDOW),
        ("local", is_local, LOCAL_WINDOW),
    )
    return [(space, np.flatnonzero(mask), window) for space, mask, window in parts if mask.any()]
