"""Which backwards of a graph will have modules: without IREE's compiler, those that are there.

PyTorch's operators would compute the others one after another. In a graph, inductor fuses them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from iree_lnbwd.calls import modules
from iree_lnbwd.compiling import iree_compile
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops import dtypes
from iree_lnbwd.ops.arguments import GpuArray, bind_arrays
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import Kind
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime.frameworks import pytorch
from iree_lnbwd.torch import tensor_calls
from iree_lnbwd.torch.fallbacks import REFUSALS
from iree_lnbwd.torch.operator_table import Gradients
from iree_lnbwd.torch.supported import TensorKind


class Backward(NamedTuple):
    """A backward in a graph, as far as its module depends on it.

    Attributes:
        gradients: What it computes.
        kinds: Of the tensors that it takes, by name; None for those that are not given.
        options: The other arguments of the operator.
    """

    gradients: Gradients
    kinds: Mapping[str, TensorKind]
    options: Sequence[Any]

    def is_served(self) -> bool:
        """Whether it may find a module."""
        found = self._module()
        return found is None or tensor_calls.expects(*found)

    def is_left_out(self) -> bool:
        """Whether it finds none; why that is, is logged once."""
        found = self._module()
        if found is None or tensor_calls.expects(*found):
            return False
        REFUSALS.say(*found)
        return True

    def _module(self) -> tuple[NormSpec, DeviceUri] | None:
        """Which one a call takes, of rows that follow each other; None if only the call knows."""
        given = {name: kind for name, kind in self.kinds.items() if kind is not None}
        op, named = self.gradients.op, self.gradients.options(self.options)
        dims = tuple(named["normalized_shape"])
        device, _ = given[op.data.name]
        if device.type == "meta" or not all(isinstance(dim, int) for dim in dims):
            return None
        if "rows_per_set" in named:
            named["rows_per_set"] = 1
        of_columns = (1, *dims) if "rows_per_set" in named else dims
        shapes = {Kind.CELLS: (1, *dims), Kind.ROWS: (1,), Kind.COLUMNS: of_columns}
        uri = pytorch.uri_of(device)
        row = {
            name: GpuArray(shapes[op.named(name).kind], _numpy(dtype), str(uri), contiguous=True)
            for name, (_, dtype) in given.items()
        }
        spec = bind_arrays(row, tensor_calls.backward_options(op, given, **named)).spec
        return None if spec is None else (spec, uri)


def there() -> Hashable:
    """For the identity of graphs: what modules there are, if none can be compiled."""
    return None if iree_compile.is_installed() else modules.there()


def _numpy(dtype: torch.dtype) -> Any:
    return DTYPES[dtypes.check(dtype, "dtype")].numpy
