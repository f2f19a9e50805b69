"""Loads, stores, copies to shared memory, and addresses."""

from __future__ import annotations

import re

import numpy as np

from iree_lnbwd.emulator import clusters
from iree_lnbwd.emulator.launch import Array, Bytes, Fault, Lanes
from iree_lnbwd.emulator.ptx.operands import Operands
from iree_lnbwd.emulator.ptx.parser import Instruction, PtxError, vector
from iree_lnbwd.emulator.ptx.parser import address as address_parts
from iree_lnbwd.emulator.ptx.state_spaces import (
    LOCAL_WINDOW,
    SHARED_WINDOW,
    load_atomic_bytes,
    load_bytes,
    mbarriers_of,
    note_own,
    of_cluster,
    store_atomic_bytes,
    store_bytes,
)
from iree_lnbwd.emulator.ptx.threads import (
    Reader,
    Selection,
    Step,
    Threads,
    size_of,
)
from iree_lnbwd.emulator.ptx.types import DTYPES, UnknownInstructionError

_BULK_BYTES = 16  # that bulk copies are multiples of
_CACHE_HINT = "L2::cache_hint"
_POLICY = ("fractional", "L2::evict_last", "b64")
_POLICY_BITS = 0x10C1E  # what a created policy is here; no other number is one
_CACHE_HINTS = re.compile(r"(nc|volatile|relaxed|weak|gpu|cta|sys|c[agvsow]|wb|wt|lu|L[12]::\w+)$")


def load(operands: Operands, instruction: Instruction) -> Step:
    """A load from any state space."""
    hinted = _CACHE_HINT in instruction.modifiers
    destination, source, *policies = instruction.operands
    if len(policies) != hinted:
        raise UnknownInstructionError(instruction.text)
    policy = operands.reader(policies[0], "b64") if hinted else None
    space, type_, count = access_of(instruction)
    names = vector(destination)
    if len(names) != count:
        raise PtxError(f"{count} elements for {destination}")
    writers = [None if name == "_" else operands.writer(name) for name in names]
    dtype = DTYPES[type_]
    if space == "param":
        name, offset = address_parts(source)
        if offset or count > 1:
            raise UnknownInstructionError(instruction.text)
        writer = operands.writer(destination)
        mask = (1 << dtype.itemsize * 8) - 1

        def load_parameter(threads: Threads, to: Selection) -> None:
            if name not in threads.arguments:
                raise Fault(f"no parameter {name}")
            bits = np.array([threads.arguments[name] & mask], f"u{dtype.itemsize}")
            writer(threads, to, bits.view(dtype))

        return load_parameter
    addresses = operands.address(source)
    nbytes = dtype.itemsize * count
    read_bytes = load_atomic_bytes if is_atomic(instruction, space, count) else load_bytes

    def load(threads: Threads, to: Selection) -> None:
        lanes = threads.numbers[to]
        if policy is not None:
            _check_policies(policy(threads, to), lanes + threads.first_lane)
        at = np.broadcast_to(addresses(threads, to), lanes.shape)
        values = read_bytes(threads, space, lanes, at, nbytes).view(dtype)
        for number, write in enumerate(writers):
            if write is not None:
                write(threads, to, values[:, number])

    return load


def store(operands: Operands, instruction: Instruction) -> Step:
    """A store to any state space."""
    if instruction.modifiers[:1] == ("async",):
        return _send(operands, instruction)
    destination, source = instruction.operands
    space, type_, count = access_of(instruction)
    readers = [operands.reader(operand, type_) for operand in vector(source)]
    if len(readers) != count:
        raise PtxError(f"{count} elements for {source}")
    addresses = operands.address(destination)
    dtype = DTYPES[type_]
    write_bytes = store_atomic_bytes if is_atomic(instruction, space, count) else store_bytes

    def store(threads: Threads, to: Selection) -> None:
        lanes = threads.numbers[to]
        at = np.broadcast_to(addresses(threads, to), lanes.shape)
        write_bytes(threads, space, lanes, at, bytes_of(readers, dtype, threads, to))

    return store


def change(operands: Operands, instruction: Instruction) -> Step:
    """An atomic change of a number in global memory, relaxed: it orders nothing else."""
    *how, operation, type_ = instruction.modifiers
    if how not in (["relaxed", "gpu", "global"], ["relaxed", "sys", "global"]) or (
        (operation, type_) not in (("add", "u32"), ("cas", "b32"))
    ):
        raise UnknownInstructionError(instruction.text)
    destination, place, *given = instruction.operands
    if len(given) != (2 if operation == "cas" else 1):
        raise PtxError(f"{len(given)} numbers for {operation}")
    addresses, writer = operands.address(place), operands.writer(destination)
    readers = [operands.reader(operand, type_) for operand in given]

    def change(threads: Threads, to: Selection) -> None:
        lanes = threads.numbers[to]
        at = np.broadcast_to(addresses(threads, to), lanes.shape)
        numbers = [np.broadcast_to(reader(threads, to), lanes.shape) for reader in readers]

        def after(number: int, before: Array) -> Array:
            first = numbers[0][number : number + 1]
            if operation == "add":
                more: Array = before + first
                return more
            second: Array = numbers[1][number : number + 1]
            return second if before == first else before

        found = threads.memory.change_atomic(lanes + threads.first_lane, at, 4, after)
        writer(threads, to, found.view(np.uint32)[:, 0])

    return change


def is_atomic(instruction: Instruction, space: str, count: int) -> bool:
    """Whether an access of global memory is one that other workgroups may make at any time.

    Raises:
        UnknownInstructionError: It says so, and is not whole.
    """
    words = instruction.modifiers
    if space != "global" or "relaxed" not in words or not {"gpu", "sys"} & set(words):
        return False
    if count > 1:
        raise UnknownInstructionError(instruction.text)
    return True


def _send(operands: Operands, instruction: Instruction) -> Step:
    """A store to a workgroup of the cluster, of which an mbarrier there is told."""
    *words, type_ = (word for word in instruction.modifiers if word != "weak")
    if words[1:3] != ["shared::cluster", "mbarrier::complete_tx::bytes"]:
        raise UnknownInstructionError(instruction.text)
    count = {(): 1, ("v2",): 2, ("v4",): 4}.get(tuple(words[3:]))
    if count is None or type_ not in ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
        raise UnknownInstructionError(instruction.text)
    dtype = DTYPES[type_]
    destination, source, mbarrier = instruction.operands
    readers = [operands.reader(operand, type_) for operand in vector(source)]
    nbytes = dtype.itemsize * count
    if len(readers) != count or nbytes > 16:
        raise PtxError(f"{count} elements of {type_} for {source}")
    to_address, told = operands.address(destination), operands.address(mbarrier)

    def send(threads: Threads, to: Selection) -> None:
        lanes = threads.numbers[to]
        cluster, phases = of_cluster(threads), mbarriers_of(threads)
        data = np.broadcast_to(to_address(threads, to), lanes.shape)
        workgroups, at = cluster.locate(lanes, data)
        tells = cluster.locate(lanes, np.broadcast_to(told(threads, to), lanes.shape))
        cluster.check_lives(lanes, workgroups, threads.alive)
        values = bytes_of(readers, dtype, threads, to)
        threads.shared.store_of(workgroups, lanes, at, values)
        cluster.check_send(lanes, workgroups, at, nbytes)
        phases.send(lanes, workgroups, at, nbytes, *tells)

    return send


def copy_async(operands: Operands, instruction: Instruction) -> Step:
    """A copy to shared memory, or a wait for such copies."""
    match instruction.modifiers:
        case ("async", "commit_group"):
            return lambda threads, to: threads.shared.commit(threads.numbers[to])
        case ("async", "wait_group"):
            (operand,) = instruction.operands
            if not operand.isdecimal():
                raise PtxError(f"expected a number of groups, got {operand}")
            pending = int(operand)
            return lambda threads, to: threads.shared.wait(threads.numbers[to], pending)
        case ("async", "wait_all"):
            return lambda threads, to: threads.shared.wait_all(threads.numbers[to])
        case ("async", "ca" | "cg", "shared", "global", *hints) if all(
            map(_CACHE_HINTS.match, hints)
        ):
            return _start_copy(operands, instruction)
        case (
            "async",
            "bulk",
            "shared::cluster",
            "global",
            "mbarrier::complete_tx::bytes",
            *hints,
        ) if hints in ([], [_CACHE_HINT]):
            return _copy_in_bulk(operands, instruction, hints=len(hints))
        case ("async", "bulk", "prefetch", "L2", "global", hint) if hint == _CACHE_HINT:
            return _prefetch_in_bulk(operands, instruction)
    raise UnknownInstructionError(instruction.text)


def _copy_in_bulk(operands: Operands, instruction: Instruction, *, hints: int) -> Step:
    """Any number of bytes to the own workgroup's memory, of which an mbarrier there is told."""
    destination, source, size, mbarrier, *policies = instruction.operands
    if len(policies) != hints:
        raise UnknownInstructionError(instruction.text)
    to_address, from_address, told = map(operands.address, (destination, source, mbarrier))
    read_size = operands.reader(size, "u32")
    read_policies = [operands.reader(policy, "b64") for policy in policies]

    def copy(threads: Threads, to: Selection) -> None:
        lanes = threads.numbers[to]
        phases, cluster = mbarriers_of(threads), of_cluster(threads)
        sources, places, tells, sizes = (
            np.broadcast_to(read(threads, to), lanes.shape).astype(np.int64)
            for read in (from_address, to_address, told, read_size)
        )
        _check_bulk_sizes(threads, lanes, sizes)
        for policy in read_policies:
            _check_policies(policy(threads, to), lanes + threads.first_lane)
        own = lanes // threads.threads
        of_places, places = cluster.locate(lanes, places)
        of_tells, tells = cluster.locate(lanes, tells)
        if (others := (of_places != own) | (of_tells != own)).any():
            raise Fault(
                "a bulk copy to another workgroup: what orders it is not followed",
                lanes[others] + threads.first_lane,
            )
        which, offsets = _pieces(sizes)
        by, at = lanes[which], places[which] + offsets
        values = threads.memory.load(by + threads.first_lane, sources[which] + offsets, _BULK_BYTES)
        threads.shared.copy_in_bulk(by, at, values)
        cluster.check_send(by, own[which], at, _BULK_BYTES)
        phases.copy(by, at, _BULK_BYTES, tells[which])

    return copy


def _prefetch_in_bulk(operands: Operands, instruction: Instruction) -> Step:
    """Any number of bytes to the L2 cache. That changes no result; what it may touch is checked."""
    source, size, hint = instruction.operands
    address, read_size = operands.address(source), operands.reader(size, "u32")
    policy = operands.reader(hint, "b64")

    def prefetch(threads: Threads, to: Selection) -> None:
        lanes = threads.numbers[to]
        sources, sizes = (
            np.broadcast_to(read(threads, to), lanes.shape).astype(np.int64)
            for read in (address, read_size)
        )
        _check_policies(policy(threads, to), lanes + threads.first_lane)
        if (wrong := (sizes < 1) | (sizes % _BULK_BYTES != 0)).any():
            raise Fault(
                f"a prefetch of {sizes[wrong][0]} bytes: expected a multiple of {_BULK_BYTES}",
                lanes[wrong] + threads.first_lane,
            )
        which, offsets = _pieces(sizes)
        by = lanes[which] + threads.first_lane
        threads.memory.load(by, sources[which] + offsets, _BULK_BYTES)

    return prefetch


def _start_copy(operands: Operands, instruction: Instruction) -> Step:
    destination, source, size, *more = instruction.operands
    nbytes, is_hinted = int(size), _CACHE_HINT in instruction.modifiers
    limit, policies = (more[:-1], more[-1:]) if is_hinted else (more, [])
    is_short_past_l1 = nbytes != 16 and "cg" in instruction.modifiers
    if nbytes not in (4, 8, 16) or is_short_past_l1 or (is_hinted and not policies) or limit[1:]:
        raise UnknownInstructionError(instruction.text)
    to_address, from_address = operands.address(destination), operands.address(source)
    read_size = operands.reader(limit[0], "u32") if limit else None
    read_policies = [operands.reader(policy, "b64") for policy in policies]

    def copy(threads: Threads, to: Selection) -> None:
        lanes = threads.numbers[to]
        for policy in read_policies:
            _check_policies(policy(threads, to), lanes + threads.first_lane)
        sources = np.broadcast_to(from_address(threads, to), lanes.shape)
        values = np.zeros((len(lanes), nbytes), np.uint8)
        # Bytes beyond the given size are not read; they are zero.
        sizes = np.full(1, nbytes, np.uint32) if read_size is None else read_size(threads, to)
        sizes = np.broadcast_to(sizes, lanes.shape)
        for taken in np.unique(sizes):
            if taken > nbytes:
                raise Fault(f"a copy of {taken} of {nbytes} bytes", lanes + threads.first_lane)
            part = np.flatnonzero(sizes == taken)
            if taken:
                values[part, :taken] = threads.memory.load(
                    lanes[part] + threads.first_lane,
                    sources[part],
                    int(taken),
                    alignment=nbytes,
                )
        at = np.broadcast_to(to_address(threads, to), lanes.shape)
        note_own(threads, lanes, at, nbytes, writes=True)
        threads.shared.copy_async(lanes, at, values)

    return copy


def convert_address(operands: Operands, instruction: Instruction) -> Step:
    """Between generic addresses and those of a state space."""
    destination, source = instruction.operands
    windows = {"global": 0, "const": 0, "shared": SHARED_WINDOW, "local": LOCAL_WINDOW}
    *way, space, type_ = instruction.modifiers
    if type_ != "u64" or way not in ([], ["to"]):
        raise UnknownInstructionError(instruction.text)
    offset = np.uint64(windows[space])
    reader, writer = operands.reader(source, "u64"), operands.writer(destination)

    def convert(threads: Threads, to: Selection) -> None:
        value = reader(threads, to)
        writer(threads, to, value - offset if way else value + offset)

    return convert


def create_policy(operands: Operands, instruction: Instruction) -> Step:
    """Which data leaves the cache late. That changes no result; who has a policy is checked."""
    destination, share = instruction.operands
    if instruction.modifiers != _POLICY or share != "1.0":
        raise UnknownInstructionError(instruction.text)
    writer = operands.writer(destination)

    def create(threads: Threads, to: Selection) -> None:
        writer(threads, to, np.array([_POLICY_BITS], np.uint64))

    return create


def map_address(operands: Operands, instruction: Instruction) -> Step:
    """An address in the shared memory of another workgroup of the cluster."""
    if instruction.modifiers != ("shared::cluster", "u32"):
        raise UnknownInstructionError(instruction.text)
    destination, source, rank = instruction.operands
    address, ranks = operands.reader(source, "u32"), operands.reader(rank, "u32")
    writer = operands.writer(destination)

    def map_address(threads: Threads, to: Selection) -> None:
        both = address(threads, to).astype(np.int64), ranks(threads, to).astype(np.int64)
        writer(threads, to, clusters.address_of(*both).astype(np.uint32))

    return map_address


def _check_bulk_sizes(threads: Threads, lanes: Lanes, sizes: Lanes) -> None:
    """Expects numbers of bytes that bulk copies can have.

    Raises:
        Fault: One is not.
    """
    most = threads.shared.nbytes
    if (wrong := (sizes < 1) | (sizes % _BULK_BYTES != 0) | (sizes > most)).any():
        raise Fault(
            f"a bulk copy of {sizes[wrong][0]} bytes to shared memory, which has {most}: expected "
            f"a multiple of {_BULK_BYTES}",
            lanes[wrong] + threads.first_lane,
        )


def _pieces(sizes: Lanes) -> tuple[Lanes, Lanes]:
    """For each 16 bytes of the copies: the number of the copy, and the offset in it."""
    counts = sizes // _BULK_BYTES
    which = np.repeat(np.arange(sizes.size), counts)
    before = np.cumsum(counts) - counts
    return which, (np.arange(which.size) - before[which]) * _BULK_BYTES


def _check_policies(policies: Array, lanes: Lanes) -> None:
    """Expects policies that were created: hardware traps at other numbers.

    Raises:
        Fault: One is not.
    """
    if (wrong := np.broadcast_to(policies, lanes.shape) != _POLICY_BITS).any():
        raise Fault("a cache hint that createpolicy has not made", lanes[wrong])


def access_of(instruction: Instruction) -> tuple[str, str, int]:
    """State space, element type and number of elements of a load or a store."""
    *words, type_ = instruction.modifiers
    space, count = "generic", 1
    for word in words:
        # PTX 8.3 and later may say whose parameter, or shared memory, it is.
        word = word.removesuffix("::entry").removesuffix("::cta")
        if word in ("global", "shared", "shared::cluster", "local", "param"):
            space = word
        elif word == "const":  # its addresses here are those of global memory
            space = "global"
        elif word in ("v2", "v4", "v8"):
            count = int(word[1:])
        elif not _CACHE_HINTS.match(word):
            raise UnknownInstructionError(instruction.text)
    if type_ not in DTYPES or type_ == "pred":
        raise UnknownInstructionError(instruction.text)
    return space, type_, count


def bytes_of(
    readers: list[Reader], dtype: np.dtype[np.generic], threads: Threads, to: Selection
) -> Bytes:
    """The elements that each thread stores: [T, bytes]."""
    values = np.empty((size_of(to), len(readers)), dtype)
    for number, reader in enumerate(readers):
        values[:, number] = reader(threads, to)
    return values.view(np.uint8)
