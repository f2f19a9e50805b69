"""Prepared calls as numbers for C++, which launches them without Python: `kernel_calls.h`.

Those on the CPU are in `host_calls.h`.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

from iree_lnbwd.runtime.gpu_driver import Graph
from iree_lnbwd.runtime.host_module import HostSequence
from iree_lnbwd.runtime.stream_module import LaunchSequence

# The fields of Driver in C++: only those that a call needs.
_FUNCTIONS: tuple[str, ...] = ("get", "push", "pop", "launch")
_GRAPH_FUNCTIONS = ("captures", "set", "run")


class NativeCall(NamedTuple):
    """The arguments of `call_of` in C++.

    Attributes:
        driver: The driver's context, and the addresses of its functions; none on the CPU.
        ones: Address of a weight of ones, if kernels need it; else 0.
        scratch_bytes: Bytes of all pieces of scratch.
        scratch: Where each piece begins.
        launches: In order: the kernel, workgroups, threads, shared bytes, the number of pointers
            and their places, and the number of constants and they themselves. On the CPU there are
            no threads and shared bytes, and the pointers' lengths follow their places.
        graph: The driver's handles of the executable graph and of its nodes, if there is one.
    """

    driver: tuple[int, ...]
    ones: int
    scratch_bytes: int
    scratch: tuple[int, ...]
    launches: tuple[int, ...]
    graph: tuple[int, ...]


def native_call(
    sequence: LaunchSequence, pointers: Sequence[str], graphs: MutableMapping[Graph, Graph]
) -> NativeCall:
    """A call for C++. What it launches must be kept as long as C++ knows it.

    Args:
        sequence: The launches.
        pointers: The operands that the call's pointers point to, in order, before its scratch.
        graphs: C++'s own graphs, by the graph that Python has of the same kernels; a new one is
            added.
    """
    places = {name: at for at, name in enumerate((*pointers, *sequence.scratch_names))}
    launches: list[int] = []
    for launch, bindings in zip(sequence.launches, sequence.bindings, strict=True):
        launches += (launch.function, *launch.workgroups, *launch.threads, launch.shared_bytes)
        launches += (len(bindings), *(places[name] for name in bindings))
        launches += (len(launch.constants), *launch.constants)
    driver, functions = sequence.driver, _FUNCTIONS
    graph: tuple[int, ...] = ()
    if sequence.graph is not None:
        functions += _GRAPH_FUNCTIONS
        if sequence.graph not in graphs:  # one of its own: the other is under other locks
            graphs[sequence.graph] = driver.graph(sequence.launches)
        graph = graphs[sequence.graph].handles
    return NativeCall(
        driver=(driver.context, *map(driver.entry_point, functions)),
        ones=sequence.fixed[0].pointer if sequence.fixed else 0,
        scratch_bytes=sequence.scratch_bytes,
        scratch=sequence.scratch,
        launches=tuple(launches),
        graph=graph,
    )


def native_host_call(sequence: HostSequence, pointers: Sequence[str]) -> NativeCall:
    """A call on the CPU for C++, which keeps what its kernels are in.

    Args:
        sequence: The launches.
        pointers: As `native_call`.
    """
    places = {name: at for at, name in enumerate((*pointers, *sequence.scratch_names))}
    launches: list[int] = []
    for launch in sequence.launches:
        launches += (launch.function, *launch.workgroups, len(launch.bindings))
        launches += (*(places[name] for name in launch.bindings), *launch.lengths)
        launches += (len(launch.constants), *launch.constants)
    return NativeCall((), 0, sequence.scratch_bytes, sequence.scratch, tuple(launches), ())
