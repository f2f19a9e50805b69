"""A module of the family on an emulated GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from iree_lnbwd.emulator.hal import View
from iree_lnbwd.emulator.launch import Fault, Launch
from iree_lnbwd.emulator.module import EXECUTORS, FORMATS, Edit, Module
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.arguments import Array, BoundCall, Results, results_of
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.spec import TensorType
from iree_lnbwd.schedules import WholeTensors
from iree_lnbwd.verification.scattered import cells_of, scattered
from iree_lnbwd.vmfb.description import describe
from iree_lnbwd.vmfb.raw_interface import values_of


class EmulatedNorm:
    """Runs a module's own host program and kernels in software, for calls of its spec.

    Our own kernels are checked strictly: only the operations that PTX names order the threads of a
    subgroup, and every byte of a result is written exactly once. Kernels that IREE makes from
    whole tensors exchange values between threads of a subgroup through global memory without a
    barrier, and accumulate in the output; they are allowed to.

    Attributes:
        spec: What it computes.
        target: Name of the target that it was compiled for.
        launches: The dispatches of the last call.
    """

    def __init__(
        self,
        vmfb: bytes,
        *,
        source: str = "module",
        edit: Edit = lambda text: text,
        progress: Callable[[Launch], None] = lambda launch: None,
    ) -> None:
        """Loads a module.

        Args:
            vmfb: Its bytes.
            source: Where it came from, for messages.
            edit: Changes the kernels' text before it is read: for tests that break it on purpose.
            progress: Is told of every dispatch before it runs.

        Raises:
            ArtifactError: It is damaged or no module of this package.
            ValueError: There is no emulator for its target.
        """
        described = describe(vmfb, source=source)
        check_target(described.target)
        self.spec = described.spec
        self.target = described.target.name
        self.launches: list[Launch] = []
        self._vmfb = vmfb
        self._backend = described.target.backend
        self._edit = edit
        self._progress = progress
        self._strict = not isinstance(described.schedule, WholeTensors)
        self._rng = np.random.default_rng(0)  # of where rows lie apart

    def run(self, call: BoundCall) -> Results:
        """Computes a call that `arguments.bind` has checked and that is for this spec.

        Raises:
            Fault: A kernel did what no kernel may do, or a code object is damaged.
            ValueError: Another executable is damaged; PtxError if its text is no PTX.
            VmError: The host program failed.
        """
        if self.spec.strided_rows and call.rows:
            call = call if call.strides is not None else scattered(call, self._rng)
        # A fresh GPU for each call: no call can read data that an earlier one left.
        module = Module(
            self._vmfb,
            self._backend,
            lockstep=not self._strict,
            edit=self._edit,
            progress=self._progress,
        )
        results = {result.name for result in self.spec.results}
        views: dict[str, View] = {}
        for given in self.spec.arguments:
            if given.name in call.arrays:
                views[given.name] = module.input(given.name, call.arrays[given.name])
                continue
            views[given.name] = module.output(
                given.name,
                given.dims(call.rows, call.sets, call.strides),
                DTYPES[given.dtype].numpy,
                write_once=self._strict and given.name in results,
            )
        numbers = values_of(self.spec, call.rows, call.sets, call.strides)
        module.call(self.spec.op, *views.values(), *numbers)
        self.launches = module.launches
        computed = {
            result.name: self._read(module, views[result.name], result, call).reshape(
                call.shape_of(self.spec.family.named(result.name))
            )
            for result in self.spec.results
        }
        return results_of(self.spec.family, computed)

    def _read(self, module: Module, view: View, result: TensorType, call: BoundCall) -> Array:
        """A result; of strided rows, all of them, and nothing but them, was written."""
        dtype = DTYPES[result.dtype].numpy
        if not result.is_strided:
            return module.read(view, dtype)
        buffer, size = view.span.buffer, dtype.itemsize
        cells = cells_of(call, result.name)
        rows = [
            module.memory.read(buffer, int(first) * size, cells.shape[1] * size).view(dtype)
            for first in cells[:, 0]
        ]
        gaps = buffer.nbytes - cells.size * size
        if len(module.memory.unwritten(buffer, 0, buffer.nbytes)) != gaps:
            raise Fault(f"{buffer.name}: what lies between its rows was written")
        return np.stack(rows)


def check_target(target: Target) -> None:
    """Expects a target whose modules can be emulated.

    Raises:
        ValueError: They cannot be emulated.
    """
    if FORMATS.get(target.backend) not in EXECUTORS:
        raise ValueError(f"target: there is no emulator for {target.name} ({target.backend})")
