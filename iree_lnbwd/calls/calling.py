"""A call of an op: arguments bound once, the module found, results in the caller's library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from iree_lnbwd.calls.modules import MODULES, Modules
from iree_lnbwd.errors import ArtifactError, CompileError
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri
from iree_lnbwd.ops.arguments import (
    BoundCall,
    Options,
    Results,
    bind_arrays,
    densely,
    results_of,
)
from iree_lnbwd.ops.layouts import in_place
from iree_lnbwd.ops.operands import RSTD, names
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.strides import Strides
from iree_lnbwd.runtime import Norm
from iree_lnbwd.runtime.frameworks import interop
from iree_lnbwd.runtime.gpu_module import KnownCall

_HOST = DeviceUri.parse(DEFAULT_DEVICE)


class HostCall(NamedTuple):
    """A kind of call on the CPU that was computed once.

    Attributes:
        norm: The module that computes it.
        rows: M, at least 1.
        sets: Those of the weight, where it has some.
        strides: Those of the rows, where they do not follow each other.
    """

    norm: Norm
    rows: int
    sets: Sets | None = None
    strides: Strides | None = None


def call(
    given: Sequence[Any],
    options: Options,
    uri: DeviceUri | None = None,
    modules: Modules | None = None,
) -> tuple[Results, KnownCall | HostCall | None]:
    """Computes an op from its arguments, in the order of its table; they are bound only once.

    Args:
        given: The arrays.
        options: Checked; for a new kind of call, its spec checks them once more.
        uri: The device; None takes the one that ``input`` is on.
        modules: Where modules come from; None takes `MODULES`.

    Returns:
        The results, and the kind of the call, if there was something to compute.
    """
    modules = modules or MODULES
    known_kinds = modules.known
    op = options.op
    arguments = names(op.arguments)
    data = given[arguments.index(op.data.name)]
    framework = interop.on_gpu(op.data.name, data)
    if framework is None:
        views = interop.views(None, dict(zip(arguments, given, strict=True)))
        bound = bind_arrays(views, options)
        if bound.spec is None:
            return results_of(op, {}), None
        norm, bound = _found(bound, uri or _HOST, modules)  # a GPU gets copies in any case
        rows = bound.rows
        known_here = HostCall(norm, rows, bound.sets, bound.strides) if rows else None
        return interop.from_numpy(norm.run(bound), like=data), known_here
    kind = framework.signature(arguments, given)
    # Where the statistics are given, eps is no option: calls with any are of one kind.
    has_eps = not op.is_backward or given[arguments.index(RSTD.name)] is None
    key = (kind, options if has_eps else options._replace(eps=None), uri)
    if (known := known_kinds.get(key)) is None:
        views = interop.views(framework, dict(zip(arguments, given, strict=True)))
        bound = bind_arrays(views, options)
        if bound.spec is None:
            return results_of(op, {}), None
        where = DeviceUri.parse(bound.arrays[op.data.name].device)
        if uri not in (None, where):
            raise ValueError(
                f"device: expected {where}, where {op.data.name} is, or None, got {uri}"
            )
        norm, bound = _found(bound, where, modules)
        kind_of_call = (kind, options.rows_per_set or 1)
        known = known_kinds[key] = norm.learn(kind_of_call, framework, views, bound)
    return known.run(framework, given), known


def _found(bound: BoundCall, uri: DeviceUri, modules: Modules) -> tuple[Norm, BoundCall]:
    """The module for a call, and the call as that takes it: rows where they lie, if it can be.

    Without a module for strided rows, they are copied.

    Args:
        bound: As `bind_arrays` has it.
        uri: The device.
        modules: Where modules come from.
    """
    is_copied = uri.backend != "cpu" and isinstance(next(iter(bound.arrays.values())), np.ndarray)
    strided = None if is_copied else in_place(bound)
    if strided is not None and strided.spec is not None:
        key = (strided.spec, uri)
        if key not in (modules.missing or ()):
            try:
                return modules.load(*key), strided
            except (ArtifactError, CompileError):
                if modules.missing is not None:
                    modules.missing.add(key)
    dense = densely(bound)
    assert dense.spec is not None
    return modules.load(dense.spec, uri), dense
