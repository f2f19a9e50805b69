"""What the aliases of a module's text are made of: flags, types of memory, a kernel's threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import OPS, Element, Kind, Operand
from iree_lnbwd.ops.spec import NormSpec

UNROLLED = "#llvm.loop_annotation<unroll = <full = true>>"


def flag(value: bool) -> str:
    """A constant of one bit."""
    return "true" if value else "false"


def itemsize(spec: NormSpec, element: Element) -> int:
    """Bytes of an element."""
    return DTYPES[spec.element_type(element)].numpy.itemsize


def row_bytes(spec: NormSpec) -> tuple[int, int]:
    """Bytes that are read and written for a column of a row."""

    def of(operands: Sequence[Operand]) -> int:
        own = (operand for operand in operands if operand.kind is Kind.CELLS and spec.has(operand))
        return sum(itemsize(spec, operand.element) for operand in own)

    return of(spec.family.inputs), of(spec.family.results)


def kernel(threads: int, target: Target) -> str:
    """Threads of a workgroup, and of a subgroup."""
    return (
        "#iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline "
        f"workgroup_size = [{threads}, 1, 1] subgroup_size = {target.subgroup_size}>"
    )


def storage(shape: str) -> str:
    """A tensor in a caller's memory."""
    return f"memref<{shape}, #hal.descriptor_type<storage_buffer>>"


def shared(shape: str) -> str:
    """Shared memory of a workgroup."""
    return f"memref<{shape}, #gpu.address_space<workgroup>>"


def private(shape: str) -> str:
    """Memory of a thread, which becomes registers."""
    return f"memref<{shape}, #gpu.address_space<private>>"


def reads_more(spec: NormSpec) -> bool:
    """Whether a backward reads other gradients of the output beside dy, or a gate."""
    return spec.grad_outputs > 1 or spec.gate is not None


def beside_dy(spec: NormSpec) -> Element:
    """What a backward reads beside dy and x: another gradient of the output, or a gate."""
    return Element.DY if spec.gate is None else Element.GATE


def gates(spec: NormSpec) -> tuple[Element, ...]:
    """The element type of the gate, if there is one: no other spec's text speaks of it."""
    return () if spec.gate is None else (Element.GATE,)


def copies(spec: NormSpec) -> tuple[Element, ...]:
    """The element type of the copy of dx, if there is one: likewise."""
    return () if spec.grad_input_copy_dtype is None else (Element.COPY,)


def totals(spec: NormSpec) -> tuple[Element, ...]:
    """The element type of dx's sum over rows, if there is one: likewise."""
    return () if spec.grad_input_sum_dtype is None else (Element.TOTAL,)


def bindings(spec: NormSpec) -> dict[str, str]:
    """The tensors as kernels see them, partial rows of sums among them."""
    cols = spec.columns
    seen = {
        Kind.CELLS: ("rows", f"?x{cols}x"),
        Kind.ROWS: ("column", "?x"),
        Kind.COLUMNS: ("row", f"{cols}x"),
    }
    ops = (*OPS.values(), spec.family)
    tensors = [(operand.kind, operand.element) for op in ops for operand in op.rows]
    types = {
        f"!{element.value}_{called}": storage(f"{dims}!{element.value}")
        for kind, (called, dims) in seen.items()
        for of_kind, element in (*tensors, (Kind.CELLS, Element.ACC))
        if of_kind is kind
    }
    return types | (_offset_types(cols) if spec.weight_sets else {})


def _offset_types(cols: int) -> dict[str, str]:
    """Those that begin where a set of weights, or its partial rows, begin in a binding.

    For a GPU, IREE 3.13 drops the offset of a binding whose type has none.
    """
    return {
        **{
            f"!{name}_row": storage(f"{cols}x!{name}, strided<[1], offset: ?>")
            for name in ("gamma", "beta")
        },
        "!acc_rows": storage(f"?x{cols}x!acc, strided<[{cols}, 1], offset: ?>"),
    }


def chunk_types(spec: NormSpec, vector: int) -> dict[str, str]:
    """Neighbouring elements of a row."""
    return {
        "!dy_chunk": f"vector<{vector}x!dy>",
        "!dy_sum_chunk": f"vector<{vector}x!dy_sum>",
        "!x_chunk": f"vector<{vector}x!x>",
        "!gamma_chunk": f"vector<{vector}x!gamma>",
        "!beta_chunk": f"vector<{vector}x!beta>",
        "!residual_chunk": f"vector<{vector}x!residual>",
        "!chunk": f"vector<{vector}x!acc>",
        **{
            f"!{own.value}_chunk": f"vector<{vector}x!{own.value}>"
            for own in (*gates(spec), *copies(spec), *totals(spec))
        },
    }


def output_types(spec: NormSpec, types: Mapping[str, str]) -> dict[str, str]:
    """Types of an output, where it has an element type of its own.

    Elsewhere it has the input's, by their names.
    """
    return {} if spec.output_dtype is None else dict(types)
