"""The rules by which DTensor shards the operators, as it does ATen's norms.

Rows are sharded alike in all tensors, weight and bias are replicated, and each process has a part
of the sum that their gradients are. Dimensions that are normalized are never sharded.

Weights may have sets. A dimension of rows is sharded only where each process's rows then take the
sets that they would take of one process: where all sets recur within each index of the dimension
(samples before heads), or where the dimension itself numbers the sets (samples that have a scale
each, heads). In the latter case the sets are sharded alike, and their gradients are whole.

``torch.distributed.tensor`` takes a third of a second to import, so the rules are registered only
when somebody else has imported it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from iree_lnbwd.ops.arguments import asked_of
from iree_lnbwd.ops.operands import GRAD_INPUT_COPY, GRAD_INPUT_SUM, Kind, Op, names
from iree_lnbwd.torch.operator_table import ALL_GRADIENTS, ALL_NORMS

_DTENSOR = "torch.distributed.tensor"
_Placements = list[Any]


def register() -> None:
    """Registers the rules, if there can be a DTensor; the second time, this does nothing.

    Operators call it before a tensor that is not plain reaches the dispatcher.
    """
    if not torch.compiler.is_dynamo_compiling() and _DTENSOR in sys.modules:
        _register()


def is_dtensor(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor is one; torch.compile reads this."""
    is_plain = tensor is None or type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return not is_plain and hasattr(tensor, "device_mesh")


@functools.cache
def _register() -> None:
    for norm in ALL_NORMS:
        _register_one(norm.operator, norm.op, norm.results)
    for gradients in ALL_GRADIENTS:
        _register_one(gradients.operator, gradients.op, gradients.results)


def _register_one(overload: Any, op: Op, results: Sequence[str]) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    arguments = tuple(argument.name for argument in overload._schema.arguments)
    kinds = {operand.name: operand.kind for operand in (*op.arguments, *op.results)}

    def shardings(*values: Any) -> list[tuple[_Placements, _Placements]]:
        """For one dimension of a mesh: the placements of the results and of the arguments."""
        given = dict(zip(arguments, values, strict=True))
        return _shardings(op, given, kinds, results)

    register_sharding(overload)(shardings)
    # By itself, its cache need only look at arguments that are an int, and not at lists of them: a
    # call with another mask or other dimensions might have the placements of the first.
    first = min(i for i, name in enumerate(arguments) if name not in kinds)
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[overload] = RuntimeSchemaInfo(first, needs_pytree=True)


def _shardings(
    op: Op, given: Mapping[str, Any], kinds: Mapping[str, Kind], results: Sequence[str]
) -> list[tuple[_Placements, _Placements]]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    replicated, partial = Replicate(), Partial()
    returned: Sequence[bool] = (True,) * len(results)
    if op.is_backward:
        there = {f"has_{name}": given[name] is not None for name in ("weight", "bias")}
        asked = asked_of(op, given["output_mask"], **there)
        computed = names(op.gradients_with(has_bias=there["has_bias"]))
        of = dict(zip(computed, asked, strict=True))
        of |= {GRAD_INPUT_COPY.name: True, GRAD_INPUT_SUM.name: True}  # where they are results
        returned = tuple(of.get(name, False) for name in results)

    def placed(
        rows: Any, summed: Any, parameters: Any = replicated
    ) -> tuple[_Placements, _Placements]:
        """With the rows, what is summed over them, and the parameters placed so."""
        return (
            [
                None if not there else summed if kinds[name] is Kind.COLUMNS else rows
                for name, there in zip(results, returned, strict=True)
            ],
            [
                None
                if name not in kinds or value is None
                else parameters
                if kinds[name] is Kind.COLUMNS
                else rows
                for name, value in given.items()
            ],
        )

    data, first_set = given[op.data.name], Shard(0)
    leading = data.shape[: data.ndim - len(given["normalized_shape"])]
    found = [placed(replicated, replicated)]
    for dimension, size in enumerate(leading):
        inner, rows = math.prod(leading[dimension + 1 :]), Shard(dimension)
        if (rows_per_set := given.get("rows_per_set")) is None:
            found.append(placed(rows, partial))
            continue
        period = rows_per_set * given["weight"].shape[0]
        if inner % period == 0:
            found.append(placed(rows, partial))
        # Each process has as many sets, on any dimension of the mesh, and none has none.
        elif size * inner == period and inner % rows_per_set == 0 == size % data.mesh.size():
            found.append(placed(rows, first_set, first_set))
    return found
