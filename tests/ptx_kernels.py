"""Small PTX kernels for the tests of the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator import Binding, GlobalMemory, Launch, PtxExecutor
from iree_lnbwd.emulator.launch import Dim3
from iree_lnbwd.emulator.memory import Buffer
from iree_lnbwd.ops.arguments import Array

# %rd<n> holds the address of buffer n, %r0 the thread's number in its workgroup, %r1 the
# workgroup's number, and %rd20 four times the thread's number in the launch.
_PROLOGUE = """
.version 8.0
.target sm_90
.address_size 64
{module}
.visible .entry kernel(
{parameters}
)
.maxntid {x}, {y}, {z}
{directives}
{{
\t.reg .pred %p<20>;
\t.reg .b16 %rs<40>;
\t.reg .b32 %r<60>;
\t.reg .b64 %rd<60>;
{addresses}
\tmov.u32 %r0, %tid.x;
\tmov.u32 %r1, %ctaid.x;
\tmov.u32 %r2, %ntid.x;
\tmad.lo.s32 %r3, %r1, %r2, %r0;
\tmul.wide.u32 %rd20, %r3, 4;
{body}
\tret;
}}
"""


def run_kernel(
    body: str,
    buffers: Sequence[Array | int],
    *,
    workgroups: int = 1,
    threads: Dim3 = (64, 1, 1),
    shared_bytes: int = 0,
    read_only: Sequence[int] = (),
    module: str = "",
    directives: str = "",
    lockstep: bool = False,
) -> list[Array]:
    """Runs the body of a kernel.

    Args:
        body: Instructions; see the registers above.
        buffers: Arrays are given to the kernel as they are, numbers are the lengths of buffers of
            32-bit words that nobody wrote.
        workgroups: How many.
        threads: Of a workgroup.
        shared_bytes: Dynamic shared memory.
        read_only: Numbers of the buffers that the kernel promises not to write.
        module: What stands before the kernel.
        directives: Of the kernel, besides the size of its workgroups.
        lockstep: Threads of a warp run in step.

    Returns:
        Every buffer's content afterwards, as 32-bit words where it was given by its length.
    """
    memory = GlobalMemory(lockstep=lockstep)
    allocated: list[tuple[Buffer, np.dtype[Any]]] = []
    for number, given in enumerate(buffers):
        if isinstance(given, int):
            allocated.append((memory.allocate(f"buffer {number}", 4 * given), np.dtype("u4")))
        else:
            buffer = memory.allocate(f"buffer {number}", given.nbytes, data=given)
            allocated.append((buffer, given.dtype))
    names = [f"kernel_param_{number}" for number in range(len(buffers))]
    text = _PROLOGUE.format(
        module=module,
        directives=directives,
        parameters=",\n".join(f"\t.param .u64 .ptr .global .align 16 {name}" for name in names),
        x=threads[0],
        y=threads[1],
        z=threads[2],
        addresses="\n".join(f"\tld.param.b64 %rd{n}, [{name}];" for n, name in enumerate(names)),
        body=body,
    )
    launch = Launch(
        kernel="kernel",
        workgroup_count=(workgroups, 1, 1),
        workgroup_size=threads,
        subgroup_size=32,
        shared_bytes=shared_bytes,
        constants=(),
        bindings=tuple(
            Binding(buffer.address, buffer.nbytes, number not in read_only)
            for number, (buffer, _) in enumerate(allocated)
        ),
    )
    memory.barrier()
    memory.begin(launch)
    PtxExecutor(text).run(launch, memory)
    return [
        memory.read(buffer, 0, buffer.nbytes).view(dtype)
        if not memory.unwritten(buffer, 0, buffer.nbytes).size
        else np.zeros(0, dtype)
        for buffer, dtype in allocated
    ]


_LETTERS = {1: "rs", 2: "rs", 4: "r", 8: "rd"}


def evaluate(
    instruction: str, sources: Sequence[Array], result: npt.DTypeLike, *, predicates: int = 0
) -> Array:
    """What one instruction computes, a value to a thread.

    Args:
        instruction: With {d} for its destination and {0}, {1}, ... for its sources, e.g.
            "add.s32 {d}, {0}, {1}".
        sources: Values by source; the last ``predicates`` of them are bools.
        result: Type of the result; bool for a predicate.
        predicates: How many of the last sources are predicates.
    """
    count = len(sources[0])
    padded = -(-count // 32) * 32
    dtype = np.dtype(result)
    lines = []
    names = []
    buffers: list[Array | int] = []
    first_predicate = len(sources) - predicates
    for number, values in enumerate(sources):
        stored = values.astype(np.uint32) if values.dtype == np.bool_ else values
        buffers.append(np.resize(stored, padded))
        size = stored.itemsize
        lines.append(f"\tmad.wide.u32 %rd{30 + number}, %r3, {size}, %rd{number};")
        name = f"%{_LETTERS[size]}{40 + number if size == 8 else 20 + number}"
        lines.append(f"\tld.global.b{8 * size} {name}, [%rd{30 + number}];")
        if number >= first_predicate:
            lines.append(f"\tsetp.ne.u32 %p{number}, {name}, 0;")
            name = f"%p{number}"
        names.append(name)
    size = 4 if dtype == np.bool_ else dtype.itemsize
    register = f"%{_LETTERS[size]}{50 if size > 2 else 10}"
    destination = "%p10" if dtype == np.bool_ else register
    lines.append(f"\t{instruction.format(*names, d=destination)};")
    if dtype == np.bool_:
        lines.append(f"\tselp.b32 {register}, 1, 0, %p10;")
    out = len(buffers)
    lines.append(f"\tmad.wide.u32 %rd{30 + out}, %r3, {size}, %rd{out};")
    lines.append(f"\tst.global.b{8 * size} [%rd{30 + out}], {register};")
    buffers.append(padded * size // 4)
    words = run_kernel("\n".join(lines), buffers, workgroups=padded // 32, threads=(32, 1, 1))[-1]
    values = words.view(np.uint32 if dtype == np.bool_ else dtype)[:count]
    return values != 0 if dtype == np.bool_ else values
