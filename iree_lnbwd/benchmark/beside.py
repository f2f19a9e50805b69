"""Ours in PyTorch, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from iree_lnbwd.benchmark import gpu_times, pytorch
from iree_lnbwd.benchmark.alone import LEAST, OURS, SECONDS, TURNS
from iree_lnbwd.benchmark.cells import Cell
from iree_lnbwd.benchmark.host_times import Call, call_times
from iree_lnbwd.benchmark.machine import version
from iree_lnbwd.calls import modules
from iree_lnbwd.errors import one_line
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.torch import native

OTHERS = {"eager": pytorch.eager, "compile": pytorch.compiled}
_COLUMNS = {"eager": "PyTorch eager", "compile": "torch.compile"}


def why_not(uri: DeviceUri) -> str | None:
    """Why PyTorch has no such device; None if it has."""
    if uri.backend == "cpu":
        return None
    build = "rocm" if torch.version.hip else "cuda"
    if build != uri.backend or uri.index >= torch.cuda.device_count():
        return f"{torch.__version__} finds no {uri}"
    return None


class Beside:
    """Times calls of ours in PyTorch, and of others on the same tensors.

    Attributes:
        columns: The contenders.
        how: What the times are.
    """

    def __init__(self, uri: DeviceUri, others: Sequence[str], tell: Callable[[str], None]) -> None:
        """Builds or loads the C++ operators.

        Args:
            uri: Where.
            others: Names of `OTHERS`.
            tell: Is told of what takes long.
        """
        self._uri, self._others, self._tell = uri, others, tell
        self.columns = (OURS, *(_COLUMNS[name] for name in others))
        self._left_out: dict[str, str] = {}
        self._device = "cpu" if uri.backend == "cpu" else f"cuda:{uri.index}"
        if uri.backend == "cpu":
            self.how = f"{LEAST} calls from Python, contenders in turns"
        else:
            torch.cuda.set_device(uri.index)
            self.how = (
                "medians of the sum of a call's kernels by torch.profiler, contenders in turns, "
                "with other data in the L2 cache"
            )
        native.load()

    def times(self, cell: Cell) -> Mapping[str, float]:
        """Microseconds of a call, by column; a contender that fails has none."""
        operands = pytorch.Operands.of(cell, self._device)
        them: dict[str, Call] = {OURS: pytorch.ours(cell, operands)}
        them[OURS]()
        for name in self._others:
            column = _COLUMNS[name]
            if name == "compile":
                self._tell(f"{cell}: torch.compile compiles")
            try:
                call = OTHERS[name](cell, operands)
                call()
            except Exception as error:  # tools that are not ours may raise anything
                self._left_out[column] = f"{type(error).__name__}: {one_line(error)}"
                self._tell(f"{cell}: {column} is left out: {self._left_out[column]}")
                continue
            them[column] = call
        self._tell(f"{cell}: timing")
        if self._uri.backend == "cpu":
            timed = call_times(them, SECONDS, turns=TURNS)
            return {name: min(each) for name, each in timed.items()}
        contenders = {name: _ignoring_number(call) for name, call in them.items()}
        return {name: each.p50 for name, each in gpu_times.kernel_times(contenders).items()}

    def facts(self) -> dict[str, str]:
        """What the times depend on, besides the device."""
        facts = {"PyTorch": f"{torch.__version__}; our operators in C++: {native.status()}"}
        if self._uri.backend == "cpu":
            facts["threads"] = str(torch.get_num_threads())
        else:
            facts["PyTorch"] += f"; Triton {version('triton')}"
        for column, why in self._left_out.items():
            facts[f"{column} was left out"] = why
        return facts

    def specs(self, cells: Iterable[Cell]) -> list[NormSpec]:
        """What there were modules for."""
        shapes = {cell.normalized_shape for cell in cells}
        used = (spec for spec, uri in modules.in_use() if uri == self._uri)
        return sorted(
            (spec for spec in used if spec.normalized_shape in shapes), key=lambda spec: spec.name
        )

    def close(self) -> None:
        """Nothing is kept."""


def _ignoring_number(call: Call) -> gpu_times.Contender:
    return lambda _: call()
