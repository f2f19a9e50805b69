"""Cases of `scripts/fuzz` that call with two values of an option in turn, on the same arrays.

What is kept of a first call, such as the kernels for its kind, must not answer for the second.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fuzz_draw import (
    DEVICES,
    EPS,
    OFFSETS,
    Case,
    copies,
    draw_arrays,
    draw_rows,
    draw_spec,
    draw_values,
    lay_out,
    libraries,
    on_host,
)

from iree_lnbwd import NormSpec
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import bind
from iree_lnbwd.ops.operands import MORE_GRAD_OUTPUTS, names

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from emulated_arrays import emulated_gpu

_MOST_EMULATED, _MOST_COLUMNS_EMULATED = 1 << 11, 1 << 10
_EMULATED_TARGET = "sm_90"  # one with graphs and clusters

Arguments = dict[str, Any]


def turns(case: Case) -> None:
    """A function twice, with a call in between that differs in one option: each is right."""
    spec = draw_spec(case)
    given = draw_arrays(case, spec, draw_rows(case, spec))
    library = case.pick(*(name for name in libraries(case.where) if name != "cupy"))
    if spec.dtype == "bf16" and library == "dlpack":
        library = "numpy"
    case.said.append(library)
    device = DEVICES[case.where] if library in ("numpy", "dlpack") else None
    _in_turn(case, spec, given, {"device": device}, lambda array: lay_out(case, library, array))


def emulated_turns(case: Case) -> None:
    """The same on arrays of an emulated GPU, where kinds of call are known by their options."""
    while (spec := draw_spec(case)).columns > _MOST_COLUMNS_EMULATED:
        pass
    given = draw_arrays(case, spec, max(1, draw_rows(case, spec, _MOST_EMULATED)))
    with emulated_gpu(find_target(_EMULATED_TARGET)) as arrays:
        _in_turn(case, spec, given, {}, arrays.asarray)


def _in_turn(
    case: Case,
    spec: NormSpec,
    given: Arguments,
    where: Arguments,
    put: Callable[[Any], Any],
) -> None:
    """Calls with the first value of an option, with a second, and with the first again."""
    options: Arguments = {
        "normalized_shape": spec.normalized_shape,
        "eps": EPS[0] if spec.eps is None else spec.eps,
        "weight_offset": spec.weight_offset,
    }
    if spec.family.is_backward:
        options["output_mask"] = spec.output_mask
        options["grad_input_copy_dtype"] = spec.grad_input_copy_dtype
        options["grad_input_sum_dtype"] = spec.grad_input_sum_dtype
    else:
        options["output_dtype"] = spec.output_dtype
    others = _others(case, spec, given, options)
    name = case.pick(*others)
    case.said.append(f"{name} in turn")
    first = {**given, **options}
    second = {**first, **others[name]}
    laid_out = {argument: None if a is None else put(a) for argument, a in given.items()}
    laid_out |= {
        argument: put(second[argument])
        for argument in given
        if laid_out[argument] is None and second[argument] is not None
    }
    for call in (first, second, first):
        arrays = {n: None if call[n] is None else laid_out[n] for n in given}
        results = case.call(spec.op, **{**call, **arrays, **where})
        case.judge(on_host(results), _bound(spec, call, tuple(given)))


def _bound(spec: NormSpec, call: Arguments, arrays: tuple[str, ...]) -> Any:
    options = {name: value for name, value in call.items() if name not in arrays}
    return bind(spec.op, copies({name: call[name] for name in arrays}), **options)


def _others(
    case: Case, spec: NormSpec, given: Mapping[str, Any], options: Arguments
) -> dict[str, Arguments]:
    """What differs in a second call, by what it is."""
    op = spec.family
    found: dict[str, Arguments] = {
        "eps": {"eps": case.pick(*(eps for eps in EPS if eps != options["eps"]))}
    }
    without: Arguments = {}
    if op.is_backward:
        without["output_mask"] = (True,) * len(spec.masked)
        other_mask = {"output_mask": _other_mask(case, spec)}
        if (copied := spec.grad_input_copy_dtype) is not None:  # which asks for grad_input
            other_mask["output_mask"] = (True, *other_mask["output_mask"][1:])
            found["grad_input_copy_dtype"] = {
                "grad_input_copy_dtype": case.pick(None, "f16" if copied == "bf16" else "bf16")
            }
        if (summed := spec.grad_input_sum_dtype) is not None:
            other_mask["output_mask"] = (True, *other_mask["output_mask"][1:])
            of_f64 = (None,) if summed == "f64" else (None, "f16" if summed == "bf16" else "bf16")
            found["grad_input_sum_dtype"] = {"grad_input_sum_dtype": case.pick(*of_f64)}
        found["output_mask"] = other_mask
    if given["weight"] is not None:
        offset = case.pick(*(o for o in OFFSETS if o != options["weight_offset"]))
        found["weight_offset"] = {"weight_offset": offset}
        found["no weight"] = {"weight": None, "weight_offset": 0.0, **without}
    if given.get("bias") is not None:
        found["no bias"] = {"bias": None}
        if op.is_backward:
            found["no bias"]["output_mask"] = (True,) * len(op.masked)
    added = "grad_residual" if op.is_backward else "residual"
    if given[added] is None:
        like = given[op.data.name]
        found[added] = {added: draw_values(case, spec.dtype, like.shape)}
    else:
        found[f"no {added}"] = {added: None}
    if spec.grad_outputs > 1:
        found["one gradient less"] = {names(MORE_GRAD_OUTPUTS)[spec.grad_outputs - 2]: None}
    if op.is_backward and not op.from_output and given["rstd"] is not None:
        found["recomputed"] = dict.fromkeys(names(op.statistics))
    shape = given[op.data.name].shape
    leading = shape[: len(shape) - len(spec.normalized_shape)]
    of_a_shape = (*names(op.statistics), "weight", "bias")  # which is not that of all cells
    if leading and leading[-1] and all(given.get(name) is None for name in of_a_shape):
        found["normalized_shape"] = {"normalized_shape": (leading[-1], *spec.normalized_shape)}
    return found


def _other_mask(case: Case, spec: NormSpec) -> tuple[bool, ...]:
    gradients = names(spec.masked)
    masks = [
        mask
        for mask in itertools.product((True, False), repeat=len(gradients))
        if mask != (spec.output_mask or (True,) * len(gradients))
        and any(
            wanted and (spec.has_weight or name != "grad_weight")
            for wanted, name in zip(mask, gradients, strict=True)
        )
    ]
    chosen: tuple[bool, ...] = case.pick(*masks)
    return chosen
