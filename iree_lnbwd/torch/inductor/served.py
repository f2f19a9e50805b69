"""Which backwards of a graph will have modules: without IREE's compiler, those that are there.

PyTorch's operators would compute the others one after another. In a graph, inductor fuses them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from iree_lnbwd.calls import modules
from iree_lnbwd.compiling import iree_compile
from iree_lnbwd.ops import dtypes
from iree_lnbwd.ops.arguments import GpuArray, bind_arrays
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import Kind
from iree_lnbwd.runtime.frameworks import pytorch
from iree_lnbwd.torch import tensor_calls
from iree_lnbwd.torch.operator_table import Gradients
from iree_lnbwd.torch.supported import TensorKind


def is_served(
    gradients: Gradients, kinds: Mapping[str, TensorKind], options: Sequence[Any]
) -> bool:
    """Whether a backward may find a module.

    Args:
        gradients: What it computes.
        kinds: Of the tensors that it takes, by name.
        options: The other arguments of the operator.
    """
    given = {name: kind for name, kind in kinds.items() if kind is not None}
    op, named = gradients.op, gradients.options(options)
    dims = tuple(named["normalized_shape"])
    device, _ = given[op.data.name]
    if device.type == "meta" or not all(isinstance(dim, int) for dim in dims):
        return True
    if "rows_per_set" in named:
        named["rows_per_set"] = 1
    of_columns = (1, *dims) if "rows_per_set" in named else dims
    shapes = {Kind.CELLS: (1, *dims), Kind.ROWS: (1,), Kind.COLUMNS: of_columns}
    uri = pytorch.uri_of(device)
    row = {
        name: GpuArray(shapes[op.named(name).kind], _numpy(dtype), str(uri), contiguous=True)
        for name, (_, dtype) in given.items()
    }
    bound = bind_arrays(row, tensor_calls.backward_options(op, given, **named))
    return bound.spec is None or tensor_calls.expects(bound.spec, uri)


def there() -> Hashable:
    """For the identity of graphs: what modules there are, if none can be compiled."""
    return None if iree_compile.is_installed() else modules.there()


def _numpy(dtype: torch.dtype) -> Any:
    return DTYPES[dtypes.check(dtype, "dtype")].numpy
