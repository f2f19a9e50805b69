"""What the tests of the norms for JAX share: cases, and a judged step of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iree_lnbwd import NormSpec, reference
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.jax import calls
from iree_lnbwd.ops.arguments import bind
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    GRAD_OUTPUT,
    LAYER_NORM,
    MORE_GRAD_OUTPUTS,
    RMS_NORM,
    Element,
    names,
)
from iree_lnbwd.ops.spec import check_number
from iree_lnbwd.verification.matrix import random_call

COLUMNS, EPS = 48, 1e-3
CASES = [
    NormSpec((COLUMNS,), dtype, op=op.name, eps=EPS, **options)
    for op, dtype, options in (
        (LAYER_NORM, "f32", {}),
        (LAYER_NORM, "f16", {"has_weight": False, "has_bias": False}),
        (LAYER_NORM, "bf16", {"weight_dtype": "f32", "residual_dtype": "f32"}),
        (LAYER_NORM, "f64", {"residual_dtype": "f64", "weight_offset": 1.0}),
        (RMS_NORM, "bf16", {"residual_dtype": "bf16", "weight_offset": 1.0}),
        (RMS_NORM, "f32", {"has_weight": False}),
        (RMS_NORM, "bf16", {"has_bias": True, "bias_dtype": "f32", "residual_dtype": "f32"}),
        (LAYER_NORM, "f32", {"output_dtype": "bf16", "residual_dtype": "f32"}),
        (RMS_NORM, "bf16", {"output_dtype": "f32"}),
    )
]
FUNCTIONS: Mapping[tuple[str, bool], Any] = {
    (LAYER_NORM.name, False): lnbwd.layer_norm,
    (RMS_NORM.name, False): lnbwd.rms_norm,
    (LAYER_NORM.name, True): lnbwd.add_layer_norm,
    (RMS_NORM.name, True): lnbwd.add_rms_norm,
}
GRAD_OUTPUTS = names((GRAD_OUTPUT, *MORE_GRAD_OUTPUTS))
FORKS: Mapping[str, Any] = {
    LAYER_NORM.name: lnbwd.fork_layer_norm,
    RMS_NORM.name: lnbwd.fork_rms_norm,
}


MEMORY_EFFICIENT = [
    replace(spec, residual_dtype=spec.residual_dtype and spec.dtype, output_dtype=None)
    for spec in CASES
]


def assert_a_step_is_right(
    spec: NormSpec,
    rows: int,
    rng: np.random.Generator,
    *,
    memory_efficient: bool = False,
    forks: bool = False,
    uses: int = 1,
) -> None:
    """The outputs and gradients of a norm under ``jit`` are within their tolerances.

    Args:
        spec: Of the forward.
        rows: M.
        rng: The source of the arrays.
        memory_efficient: The function's option.
        forks: Whether the function is of `FORKS`, for a spec without a residual.
        uses: How often the function returns its output.
    """
    call = random_call(spec, rows, rng)
    rows_per_set = None if call.sets is None else call.sets.rows_per_set
    has_residual = spec.residual_dtype is not None
    past_dtype = spec.dtype if forks else spec.residual_dtype
    function = FORKS[spec.op] if forks else FUNCTIONS[spec.op, has_residual]
    with jax.enable_x64(spec.dtype == "f64"):
        given = {name: jnp.asarray(call.arrays[name]) for name in names(spec.inputs)}
        reached = {
            name: jnp.asarray(rng.standard_normal((rows, spec.columns)), DTYPES[dtype].numpy)
            for name, dtype in (
                *((name, spec.element_type(Element.Y)) for name in GRAD_OUTPUTS[:uses]),
                ("grad_residual", past_dtype),
            )
            if dtype is not None
        }

        options: Any = {} if spec.gate is None else {"gate_first": spec.gate_first}

        def normalized(given: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
            out = function(
                **given,
                normalized_shape=spec.normalized_shape,
                eps=check_number(spec.eps),
                memory_efficient=memory_efficient,
                weight_offset=spec.weight_offset,
                output_dtype=spec.output_dtype,
                rows_per_set=1 if rows_per_set is None else rows_per_set,
                uses=uses,
                **options,
            )
            output, *past = out if past_dtype is not None else (out,)
            return (*(output if uses > 1 else (output,)), *past)

        def step(given: Any, reached: Any) -> Any:
            outputs, pull = jax.vjp(normalized, given)
            # Of this program: XLA may round the statistics of another one in another way.
            inputs = (given[name] for name in names(spec.inputs))
            saved = calls.function(spec, rows_per_set)(*inputs)
            return outputs, pull(tuple(reached.values()))[0], saved

        outputs, gradients, saved = jax.jit(step)(given, reached)
    computed = dict(zip(names(spec.results), map(np.asarray, saved), strict=True))
    for other in outputs[1:uses]:
        np.testing.assert_array_equal(other, outputs[0])
    found = dict(zip(("output", "residual_output"), outputs[uses - 1 :], strict=False))
    if forks:
        np.testing.assert_array_equal(found.pop("residual_output"), given["input"])
    _assert_right(found, reference.judge(call))
    arrays = {name: np.asarray(array) for name, array in (given | reached).items()}
    arrays |= {name: computed[name] for name in names(spec.family.statistics)}
    data = arrays.pop("input")
    if memory_efficient:
        arrays["output"] = np.asarray(outputs[0])
        arrays.pop("mean", None)
    else:
        arrays["input"] = computed.get("residual_output", data)
    arrays.pop("residual", None)
    judged = reference.judge(
        bind(
            f"{spec.op}_backward",
            arrays,
            spec.normalized_shape,
            weight_offset=spec.weight_offset,
            rows_per_set=rows_per_set,
            gate_first=spec.gate_first,
        )
    )
    assert all(gradients[name].dtype == array.dtype for name, array in given.items())
    if has_residual:  # they share one; input's is cast
        shared = gradients.pop("residual")
        cast = np.asarray(shared).astype(given["input"].dtype)
        np.testing.assert_array_equal(gradients["input"], cast)
        gradients["input"] = shared
    _assert_right({f"grad_{name}": array for name, array in gradients.items()}, judged)


def _assert_right(found: Mapping[str, Any], judged: reference.Judgement) -> None:
    for name, array in found.items():
        expected, tolerance = judged.expected[name], judged.tolerance[name]
        comparison = reference.compare(np.asarray(array), expected, tolerance)
        assert comparison.passed, f"{name}: {comparison}"
