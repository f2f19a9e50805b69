"""What the emulator's memory notices: each fault, and the right use beside it that is none."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
from support import random_generator

from iree_lnbwd.emulator import Binding, Fault, GlobalMemory, Launch, SharedMemory
from iree_lnbwd.emulator.memory import LocalMemory, global_memory
from iree_lnbwd.ops.arguments import Array

_WORDS = 64


def launch(*bindings: Binding, workgroups: int = 2, threads: int = 64) -> Launch:
    return Launch("kernel", (workgroups, 1, 1), (threads, 1, 1), 32, 0, (), bindings)


def memory_with(
    *, write_once: bool = False, lockstep: bool = False
) -> tuple[GlobalMemory, int, int]:
    """Memory in a launch that may read 64 words and write 64 others; their addresses."""
    memory = GlobalMemory(lockstep=lockstep)
    source = memory.allocate("source", 4 * _WORDS, data=np.arange(_WORDS, dtype=np.uint32))
    result = memory.allocate("result", 4 * _WORDS, write_once=write_once)
    memory.barrier()
    memory.begin(
        launch(
            Binding(source.address, source.nbytes, writable=False),
            Binding(result.address, result.nbytes),
        )
    )
    return memory, source.address, result.address


def words(values: npt.ArrayLike, count: int = 1) -> Array:
    return (
        np.broadcast_to(np.asarray(values, np.uint32), count).copy().view(np.uint8).reshape(-1, 4)
    )


def at(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(
    ("space", "nbytes"),
    [(space, n) for space in ("global", "shared", "local") for n in (1, 2, 4, 8, 16)]
    + [("global", 12), ("shared", 12)],  # AMD GPUs have those, at multiples of 4
)
def test_what_was_stored_is_loaded(space: str, nbytes: int) -> None:
    """At random places, in accesses of every width, one after the other."""
    rng = random_generator()
    length = 16 * 64
    if space == "global":
        memory = GlobalMemory()
        buffer = memory.allocate("buffer", length)
        memory.begin(launch(Binding(buffer.address, length)))
        load, store, base = memory.load, memory.store, buffer.address
    elif space == "shared":
        shared = SharedMemory(length, workgroups=2, threads=64, subgroup_size=32)
        load, store, base = shared.load, shared.store, 0
    else:
        local = LocalMemory(length, lanes=4)
        load, store, base = local.load, local.store, 0  # type: ignore[assignment]
    lanes = np.zeros(8, np.int64)  # one thread, so that nothing races
    alignment = nbytes & -nbytes
    mirror = np.zeros(length, np.uint8)
    known = np.zeros(length, np.bool_)
    extra = {"alignment": alignment} if nbytes == 12 else {}
    for _ in range(20):
        places = rng.choice(length // 16, 8, replace=False) * 16
        values = rng.integers(0, 256, (8, nbytes)).astype(np.uint8)
        store(lanes, base + places, values, **extra)
        for place, value in zip(places, values, strict=True):
            mirror[place : place + nbytes] = value
            known[place : place + nbytes] = True
        places = rng.permutation(np.flatnonzero(known[::16]) * 16)[:8]
        expected = np.stack([mirror[place : place + nbytes] for place in places])
        actual = load(lanes[: len(places)], base + places, nbytes, **extra)
        np.testing.assert_array_equal(actual, expected)


def test_out_of_bounds_names_buffer_offset_and_thread() -> None:
    memory, source, _ = memory_with()
    memory.load(at(3), at(source + 4 * _WORDS - 4), 4)
    with pytest.raises(Fault, match="out of bounds: byte 256 of source") as caught:
        memory.load(at(2, 67), at(source, source + 4 * _WORDS), 4)
    assert caught.value.lanes == (67,)
    assert "workgroup 1 thread 3" in str(caught.value.of(launch()))
    with pytest.raises(Fault, match="out of bounds"):
        memory.load(at(0), at(source - 4), 4)
    with pytest.raises(Fault, match="out of bounds of every buffer"):
        memory.load(at(0), at(0), 4)


def test_bounds_are_those_of_the_binding() -> None:
    memory = GlobalMemory()
    buffer = memory.allocate("buffer", 256, data=np.zeros(64, np.uint32))
    memory.begin(launch(Binding(buffer.address + 64, 64)))
    memory.load(at(0), at(buffer.address + 124), 4)
    for offset in (60, 128):
        with pytest.raises(Fault, match=f"byte {offset} of buffer .*bound: 64 to 128"):
            memory.load(at(0), at(buffer.address + offset), 4)
    with pytest.raises(Fault, match="binding 0 ends at byte 320 of buffer, which has 256"):
        memory.begin(launch(Binding(buffer.address + 64, 256)))


def test_buffers_that_were_given_back() -> None:
    memory = GlobalMemory()
    buffer = memory.allocate("buffer", 64)
    memory.release(buffer)
    with pytest.raises(Fault, match="binding 0 is buffer, which was given back"):
        memory.begin(launch(Binding(buffer.address, 64)))
    for use in (
        lambda: memory.read(buffer, 0, 4),
        lambda: memory.write(buffer, 0, np.zeros(4, np.uint8)),
        lambda: memory.fill(buffer, 0, 4, np.zeros(1, np.uint8)),
        lambda: memory.release(buffer),
    ):
        with pytest.raises(Fault, match="buffer is used, which was given back"):
            use()


def test_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = GlobalMemory()
    for nbytes in (1 << 60, 1 << 62, (1 << 64) - 1):
        with pytest.raises(Fault, match=f"no memory for transient of {nbytes} bytes: 0 and"):
            memory.allocate("transient", nbytes)
    monkeypatch.setattr(global_memory, "_CAPACITY", 4096)
    first = memory.allocate("first", 1024)  # and as much for its stamps
    with pytest.raises(Fault, match="no memory for second of 1040 bytes: 2048 and 2080"):
        memory.allocate("second", 1040)
    memory.release(first)
    second = memory.allocate("second", 1040)
    # Narrow accesses need stamps of their own.
    memory.begin(launch(Binding(second.address, 1040)))
    with pytest.raises(Fault, match="no memory for second of 1040 bytes: 2080 and 3120"):
        memory.store(at(0), at(second.address), words(0))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_the_host_moves_much_in_pieces(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_memory, "_PIECE", 64)
    memory = GlobalMemory()
    data = random_generator().integers(0, 256, 256).astype(np.uint8)
    buffer = memory.allocate("buffer", 256)
    memory.write(buffer, 24, data[:length])
    assert (memory.read(buffer, 24, length) == data[:length]).all()
    with pytest.raises(Fault, match=f"{256 - length} bytes of buffer were never .* at byte 0"):
        memory.read(buffer, 0, 256)
    filled = memory.allocate("filled", 256)
    memory.fill(filled, 8, length // 4 * 4, data[:4])
    expected = np.tile(data[:4], length // 4)
    assert (memory.read(filled, 8, length // 4 * 4) == expected).all()
    with pytest.raises(Fault, match="out of bounds of filled"):
        memory.fill(filled, 248, 12, data[:4])


def test_more_barriers_than_are_counted() -> None:
    """The next one would be taken for a barrier of more threads, or for another launch's."""
    memory, _, _ = memory_with()
    for workgroups in (at(0), at(1)):
        memory.workgroup_barrier(workgroups)
        memory._passed[workgroups] += (1 << 20) - 2  # as many as it takes a minute to run
        with pytest.raises(Fault, match="more than 1048575 barriers of a workgroup"):
            memory.workgroup_barrier(workgroups)


@pytest.mark.parametrize(("first", "epochs"), [(46, 17), (30, 16), (12, 18)])
def test_more_barriers_of_shared_memory_than_are_counted(first: int, epochs: int) -> None:
    shared = SharedMemory(64, workgroups=1, threads=32, subgroup_size=32)
    lanes = np.arange(32)

    def barrier() -> None:
        if first == 46:
            shared.barrier(at(0))
        elif first == 30:
            shared.group_barrier(lanes, np.ones(32, np.int64))
        else:
            shared.subgroup_barrier(lanes)

    barrier()
    done = int(shared._now[0] >> first) & (1 << epochs) - 1
    shared._now += (1 << epochs) - 2 - done << first  # as many as it takes a minute to run
    barrier()
    with pytest.raises(Fault, match=f"more than {(1 << epochs) - 1} barriers"):
        barrier()


def test_more_launches_than_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_memory, "_MOST_LAUNCHES", 3)
    memory = GlobalMemory()
    for _ in range(3):
        memory.begin(launch())
    with pytest.raises(Fault, match="more than 3 launches"):
        memory.begin(launch())


@pytest.mark.parametrize("threads", [0, (1 << 23) + 1])
def test_launches_of_strange_sizes(threads: int) -> None:
    with pytest.raises(Fault, match="threads, the emulator takes 1 to 8388608"):
        GlobalMemory().begin(launch(threads=threads, workgroups=1))


def test_misaligned() -> None:
    memory, source, _ = memory_with()
    memory.load(at(0), at(source + 4), 8, alignment=4)
    for nbytes, offset in ((4, 2), (8, 4), (16, 8), (2, 1)):
        with pytest.raises(
            Fault, match=f"misaligned: byte {offset} of source.*multiple of {nbytes}"
        ):
            memory.load(at(0), at(source + offset), nbytes)
    shared = SharedMemory(64, workgroups=1, threads=32, subgroup_size=32)
    with pytest.raises(Fault, match="misaligned: byte 8 of shared memory"):
        shared.store(at(0), at(8), np.zeros((1, 16), np.uint8))


def test_reading_what_nobody_wrote() -> None:
    memory, _, result = memory_with()
    memory.store(at(1), at(result), words(7))
    memory.load(at(1), at(result), 4)
    for nbytes in (8, 16):  # part of it was written
        with pytest.raises(Fault, match="a read of result at byte 0, which nobody wrote"):
            memory.load(at(1), at(result), nbytes)
    shared = SharedMemory(64, workgroups=1, threads=32, subgroup_size=32)
    with pytest.raises(Fault, match="a read of shared memory at byte 4, which nobody wrote"):
        shared.load(at(0), at(4), 4)
    local = LocalMemory(64, lanes=2)
    local.store(at(0), at(4), words(1))
    with pytest.raises(Fault, match="a read of local memory at byte 4, which nobody wrote"):
        local.load(at(1), at(4), 4)


@pytest.mark.parametrize(("offset", "length"), [(0, 64), (4, 8), (3, 5), (16, 32)])
def test_the_host_writes(offset: int, length: int) -> None:
    rng = random_generator()
    memory = GlobalMemory()
    buffer = memory.allocate("buffer", 64)
    data = rng.integers(0, 256, length).astype(np.uint8)
    memory.write(buffer, offset, data)
    assert memory.read(buffer, offset, length).tolist() == data.tolist()
    outside = set(range(64)) - set(range(offset, offset + length))
    assert set(memory.unwritten(buffer, 0, 64).tolist()) == outside


def test_the_host_reads_only_what_was_written() -> None:
    memory = GlobalMemory()
    buffer = memory.allocate("result", 64)
    memory.write(buffer, 0, np.zeros(60, np.uint8))
    assert memory.unwritten(buffer, 0, 64).tolist() == [60, 61, 62, 63]
    with pytest.raises(Fault, match="4 bytes of result were never written, the first at byte 60"):
        memory.read(buffer, 0, 64)
    with pytest.raises(Fault, match="out of bounds of result"):
        memory.read(buffer, 60, 8)


def test_stores_to_what_is_read_only() -> None:
    memory, source, result = memory_with()
    memory.store(at(0), at(result), words(0))
    with pytest.raises(Fault, match="a store to read-only source at byte 8"):
        memory.store(at(0), at(source + 8), words(0))


def test_outputs_are_written_once() -> None:
    memory, _, result = memory_with(write_once=True)
    memory.store(at(0, 1), at(result, result + 4), words(0, 2))
    with pytest.raises(Fault, match="result is written twice at byte 4"):
        memory.store(at(1), at(result + 4), words(0))  # by the very thread


class TestRacesInGlobalMemory:
    """Two threads, one of them writes, and nothing orders them."""

    def test_two_threads_write(self) -> None:
        memory, _, result = memory_with()
        memory.store(at(5), at(result), words(1))
        with pytest.raises(
            Fault, match=r"race in result at byte 0.*writes what was written"
        ) as caught:
            memory.store(at(70), at(result), words(1))
        assert caught.value.lanes == (70, 5)

    def test_two_threads_write_in_one_instruction(self) -> None:
        memory, _, result = memory_with()
        with pytest.raises(
            Fault, match="race in result at byte 8: the first thread writes at once"
        ):
            memory.store(at(5, 6), at(result + 8, result + 8), words(1, 2))

    def test_one_writes_and_another_reads(self) -> None:
        memory, _, result = memory_with()
        memory.store(at(5), at(result), words(1))
        memory.load(at(5), at(result), 4)
        with pytest.raises(Fault, match="reads what was written by the second") as caught:
            memory.load(at(6), at(result), 4)
        assert caught.value.lanes == (6, 5)

    @pytest.mark.parametrize("readers", [(6,), (5, 6), (6, 7, 100)])
    def test_some_read_and_another_writes(self, readers: tuple[int, ...]) -> None:
        memory = GlobalMemory()
        buffer = memory.allocate("buffer", 64, data=np.zeros(16, np.uint32))
        memory.begin(launch(Binding(buffer.address, 64)))
        for reader in readers:
            memory.load(at(reader), at(buffer.address), 4)
        with pytest.raises(Fault, match=r"race in buffer at byte 0.*writes what was read by"):
            memory.store(at(5), at(buffer.address), words(1))

    def test_readers_of_one_instruction_are_all_remembered(self) -> None:
        rng = random_generator()
        for _ in range(20):
            memory = GlobalMemory()
            buffer = memory.allocate("buffer", 64, data=np.zeros(16, np.uint32))
            memory.begin(launch(Binding(buffer.address, 64)))
            readers = np.sort(rng.choice(128, 3, replace=False))
            memory.load(readers, np.full(3, buffer.address), 4)
            memory.workgroup_barrier(at(0))
            inside = (readers < 64).all()  # then the barrier came between for all
            writer = at(0)
            if inside:
                memory.store(writer, at(buffer.address), words(1))
                continue
            with pytest.raises(Fault, match="race"):
                memory.store(writer, at(buffer.address), words(1))

    def test_neighbours_do_not_race(self) -> None:
        memory, _, result = memory_with()
        memory.store(at(0), at(result), np.zeros((1, 16), np.uint8))
        memory.store(at(1), at(result + 16), np.zeros((1, 1), np.uint8))
        memory.store(at(2), at(result + 17), np.zeros((1, 1), np.uint8))
        with pytest.raises(Fault, match="race in result at byte 15"):
            memory.store(at(3), at(result + 15), np.zeros((1, 1), np.uint8))

    def test_barriers_of_the_workgroup_order(self) -> None:
        memory, _, result = memory_with()
        memory.store(at(5), at(result), words(1))
        memory.workgroup_barrier(at(0))
        memory.load(at(6), at(result), 4)
        with pytest.raises(Fault, match="race"):
            memory.load(at(70), at(result), 4)  # of the other workgroup

    def test_lockstep_orders_subgroups(self) -> None:
        memory, _, result = memory_with(lockstep=True)
        memory.store(at(5), at(result), words(1))
        memory.load(at(31), at(result), 4)
        with pytest.raises(Fault, match="race"):
            memory.load(at(32), at(result), 4)

    def test_launches(self) -> None:
        """They are ordered where a barrier of the host stands between them."""
        memory = GlobalMemory()
        buffer = memory.allocate("buffer", 64)
        one = launch(Binding(buffer.address, 64))
        for ordered in (True, False):
            memory.barrier()
            memory.begin(one)
            memory.store(at(0), at(buffer.address), words(1))
            if ordered:
                memory.barrier()
            memory.begin(one)
            if ordered:
                memory.load(at(1), at(buffer.address), 4)
                continue
            with pytest.raises(Fault, match="another dispatch, with no barrier between"):
                memory.load(at(1), at(buffer.address), 4)

    def test_readers_of_two_launches(self) -> None:
        """A barrier of the last reader's workgroup does not order the first one."""
        memory = GlobalMemory()
        buffer = memory.allocate("buffer", 64, data=np.zeros(16, np.uint32))
        for reader in (1, 2):
            memory.begin(launch(Binding(buffer.address, 64)))
            memory.load(at(reader), at(buffer.address), 4)
        memory.workgroup_barrier(at(0))
        with pytest.raises(Fault, match=r"race in buffer at byte 0.*writes what was read by"):
            memory.store(at(3), at(buffer.address), words(1))


class TestRacesInSharedMemory:
    """The same within a workgroup, between its barriers."""

    @pytest.fixture
    def shared(self) -> SharedMemory:
        memory = SharedMemory(256, workgroups=2, threads=64, subgroup_size=32, first_lane=128)
        lanes = np.arange(128)
        memory.store(lanes, lanes % 64 * 4, words(lanes, 128))
        return memory

    def test_one_writes_and_another_reads(self, shared: SharedMemory) -> None:
        with pytest.raises(
            Fault, match=r"race in shared memory at byte 4: .*reads what was"
        ) as caught:
            shared.load(at(64), at(4), 4)
        assert caught.value.lanes == (128 + 64, 128 + 65)
        shared.barrier(at(0, 1))
        assert shared.load(at(64, 0), at(4, 8), 4).view(np.uint32).tolist() == [[65], [2]]

    def test_barriers_are_of_one_workgroup(self, shared: SharedMemory) -> None:
        shared.barrier(at(0))
        shared.load(at(0), at(4), 4)
        with pytest.raises(Fault, match="race"):
            shared.load(at(64), at(4), 4)

    def test_one_reads_and_another_writes(self, shared: SharedMemory) -> None:
        shared.barrier(at(0, 1))
        shared.load(at(0), at(4), 4)
        shared.store(at(0), at(4), words(1))  # the reader itself
        shared.barrier(at(0, 1))
        shared.load(at(0), at(8), 4)
        with pytest.raises(Fault, match="writes what was read by the second"):
            shared.store(at(2), at(8), words(1))

    @pytest.mark.parametrize("readers", [(3, 4), (3, 40), (3, 4, 40), (40, 3, 41)])
    @pytest.mark.parametrize("at_once", [True, False])
    def test_many_read_and_one_of_them_writes(
        self, shared: SharedMemory, readers: tuple[int, ...], at_once: bool
    ) -> None:
        shared.barrier(at(0, 1))
        for group in [readers] if at_once else [(reader,) for reader in readers]:
            shared.load(at(*group), np.full(len(group), 12), 4)
        # Barriers of the writer's subgroup order only those readers that are in it.
        shared.subgroup_barrier(np.arange(32))
        if max(readers) < 32:
            shared.store(at(3), at(12), words(1))
            return
        with pytest.raises(Fault, match="writes what was read by"):
            shared.store(at(3), at(12), words(1))

    def test_two_write_in_one_instruction(self, shared: SharedMemory) -> None:
        shared.barrier(at(0, 1))
        with pytest.raises(Fault, match="writes at once with the second"):
            shared.store(at(1, 2), at(0, 0), words(5, 2))

    def test_barriers_of_subgroups(self, shared: SharedMemory) -> None:
        shared.subgroup_barrier(np.arange(32))
        shared.load(at(0), at(4), 4)
        with pytest.raises(Fault, match="race"):
            shared.load(at(0), at(4 * 40), 4)  # written by the other subgroup

    def test_workgroups_have_memory_of_their_own(self, shared: SharedMemory) -> None:
        shared.barrier(at(0, 1))
        assert shared.load(at(0, 64), at(0, 0), 4).view(np.uint32).tolist() == [[0], [64]]

    def test_bounds(self, shared: SharedMemory) -> None:
        message = "byte 256 is out of bounds of shared memory, which has 256"
        with pytest.raises(Fault, match=re.escape(message)):
            shared.load(at(0), at(256), 4)
        with pytest.raises(Fault, match="out of bounds"):
            shared.load(at(0), at(-4), 4)


class TestGroups:
    """Two groups of two subgroups, in each of two workgroups, with barriers of their own."""

    @pytest.fixture
    def shared(self) -> SharedMemory:
        memory = SharedMemory(512, workgroups=2, threads=128, subgroup_size=32)
        lanes = np.arange(256)
        memory.store(lanes, lanes % 128 * 4, words(lanes, 256))
        return memory

    @staticmethod
    def meet(shared: SharedMemory, *, workgroup: int, group: int) -> None:
        lanes = workgroup * 128 + group * 64 + np.arange(64)
        shared.group_barrier(lanes, np.full(64, 1 + group))

    def test_orders_the_group_alone(self, shared: SharedMemory) -> None:
        self.meet(shared, workgroup=0, group=0)
        assert shared.load(at(0, 63), at(4 * 40, 0), 4).view(np.uint32).tolist() == [[40], [0]]
        for reader, place in ((0, 64), (64, 0), (128, 40)):  # nor the other workgroup's
            with pytest.raises(Fault, match="race"):
                shared.load(at(reader), at(4 * place), 4)

    def test_many_read_before_another_writes(self, shared: SharedMemory) -> None:
        self.meet(shared, workgroup=1, group=1)
        lanes = 128 + 64 + np.arange(64)
        shared.load(lanes, np.full(64, 4 * 70), 4)
        with pytest.raises(Fault, match="writes what was read by others"):
            shared.store(at(128 + 70), at(4 * 70), words(1))
        self.meet(shared, workgroup=1, group=1)
        shared.store(at(128 + 70), at(4 * 70), words(1))
        self.meet(shared, workgroup=1, group=0)
        with pytest.raises(Fault, match="reads what was written by the second"):
            shared.load(at(128), at(4 * 70), 4)

    def test_subgroups_and_workgroups_still_meet(self, shared: SharedMemory) -> None:
        self.meet(shared, workgroup=0, group=0)
        shared.store(at(0), at(0), words(1))
        with pytest.raises(Fault, match="race"):
            shared.load(at(1), at(0), 4)
        shared.subgroup_barrier(np.arange(32))
        shared.load(at(1), at(0), 4)
        with pytest.raises(Fault, match="race"):
            shared.load(at(32), at(0), 4)
        shared.barrier(at(0))
        shared.load(at(127), at(0), 4)

    def test_readers_of_both_groups(self, shared: SharedMemory) -> None:
        shared.barrier(at(0, 1))
        for group in (0, 1):
            self.meet(shared, workgroup=0, group=group)
        shared.load(at(1, 100), at(0, 0), 4)
        self.meet(shared, workgroup=0, group=0)
        with pytest.raises(Fault, match="writes what was read by others"):
            shared.store(at(0), at(0), words(1))

    def test_a_thread_of_two_groups(self, shared: SharedMemory) -> None:
        self.meet(shared, workgroup=0, group=0)
        with pytest.raises(Fault, match="barrier 2, after one at barrier 1"):
            shared.group_barrier(np.arange(32, 96), np.full(64, 2))


class TestAsynchronousCopies:
    """From their start to their end, nobody may touch what they write."""

    @pytest.fixture
    def shared(self) -> SharedMemory:
        return SharedMemory(256, workgroups=1, threads=64, subgroup_size=32)

    def test_arrive_when_they_are_waited_for(self, shared: SharedMemory) -> None:
        shared.copy_async(at(0, 1), at(0, 4), words([7, 8], 2))
        shared.commit(at(0, 1))
        for lanes in (at(0), at(5)):
            with pytest.raises(Fault, match="is read while an asynchronous copy"):
                shared.load(lanes, at(0), 4)
        shared.wait(at(0, 1), 0)
        assert shared.load(at(0, 1), at(0, 4), 4).view(np.uint32).tolist() == [[7], [8]]

    def test_others_need_a_barrier(self, shared: SharedMemory) -> None:
        shared.copy_async(at(0), at(0), words(7))
        shared.commit(at(0))
        shared.wait(at(0), 0)
        with pytest.raises(Fault, match="race"):
            shared.load(at(1), at(0), 4)
        shared.barrier(at(0))
        shared.load(at(1), at(0), 4)

    def test_groups_end_in_order(self, shared: SharedMemory) -> None:
        for number in range(3):
            shared.copy_async(at(0), at(4 * number), words(number))
            shared.commit(at(0))
        shared.wait(at(0), 1)
        assert shared.load(at(0, 0), at(0, 4), 4).view(np.uint32).tolist() == [[0], [1]]
        with pytest.raises(Fault, match="is read while"):
            shared.load(at(0), at(8), 4)

    def test_a_group_that_is_open_is_not_waited_for(self, shared: SharedMemory) -> None:
        shared.copy_async(at(0), at(0), words(1))
        shared.wait(at(0), 0)
        with pytest.raises(Fault, match="is read while"):
            shared.load(at(0), at(0), 4)
        shared.wait_all(at(0))
        shared.load(at(0), at(0), 4)

    def test_waiting_is_for_ones_own(self, shared: SharedMemory) -> None:
        shared.copy_async(at(0), at(0), words(1))
        shared.commit(at(0))
        shared.wait(at(1), 0)
        with pytest.raises(Fault, match="is read while"):
            shared.load(at(1), at(0), 4)

    def test_stores_and_copies_to_the_same_place(self, shared: SharedMemory) -> None:
        shared.copy_async(at(0), at(0), words(1))
        with pytest.raises(Fault, match="is written while"):
            shared.store(at(0), at(0), words(2))
        with pytest.raises(Fault, match="is copied to again while"):
            shared.copy_async(at(0), at(0), words(2))

    def test_a_copy_is_a_write(self, shared: SharedMemory) -> None:
        shared.store(at(1), at(0), words(1))
        with pytest.raises(Fault, match="race"):
            shared.copy_async(at(0), at(0), words(2))

    def test_narrower_accesses_afterwards(self, shared: SharedMemory) -> None:
        """Cells become finer while a copy is under way."""
        shared.copy_async(at(0), at(0), np.arange(16, dtype=np.uint8)[None])
        shared.commit(at(0))
        shared.store(at(1), at(16), np.zeros((1, 1), np.uint8))
        with pytest.raises(Fault, match="is read while"):
            shared.load(at(0), at(15), 1)
        shared.wait(at(0), 0)
        assert shared.load(at(0), at(15), 1).tolist() == [[15]]


def test_local_memory_bounds() -> None:
    local = LocalMemory(16, lanes=1)
    local.store(at(0), at(12), words(1))
    with pytest.raises(Fault, match="byte 16 is out of bounds of local memory, which has 16"):
        local.store(at(0), at(16), words(1))
