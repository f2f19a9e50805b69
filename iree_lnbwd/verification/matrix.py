"""The matrix that is verified on a GPU or in the emulator: specs, and the data for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from iree_lnbwd.ops.arguments import DEFAULT_EPS, Array, BoundCall, bind
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.layouts import with_strided_rows
from iree_lnbwd.ops.operands import (
    FROM_OUTPUT,
    GATED,
    GRAD_INPUT,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    MORE_GRAD_OUTPUTS,
    OPS,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    WITH_COPY,
    WITH_SUM,
    Access,
    Element,
    Gate,
    Kind,
    Op,
)
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import LEAST_WEIGHT, NormSpec
from iree_lnbwd.schedules import Schedule, most_few_rows

_WIDTHS = (1, 7, 64, 192, 768, 769, 1000, 1023, 1024, 1536, 4096, 5000, 8192, 12288, 16384, 65536)
_DTYPES = ("f32", "f16", "bf16")
_FAMILY_WIDTHS = (1, 5, 64, 769, 1024, 4096, 16384, 65536)
_OPTIONS_WIDTHS = (769, 4096)  # a remainder in every vector, and none
_TEAMS_WIDTH = 88  # whose rows end within a piece of memory
_WIDE_ODD_WIDTHS = (25001, 54321, 131041)  # clusters whose rows begin anywhere
_RMS_EPS = 1e-6  # as most models have it
SOME_SETS = Sets(3, 2)  # of calls that are given none
ADVERSARIAL_ROWS = 37


def specs() -> Iterator[NormSpec]:
    """Widths, element types, masks and options of every op; layer-norm backward's first."""
    yield from _layer_norm_backward_specs()
    for op in OPS.values():
        if op != LAYER_NORM_BACKWARD:
            yield from _plain_specs(op)
        yield from _option_specs(op)
    for op in FROM_OUTPUT.values():
        yield from _from_output_specs(op)
    for op in OPS.values():
        if op.is_backward:
            yield from _wide_odd_specs(op)


def _layer_norm_backward_specs() -> Iterator[NormSpec]:
    for width in _WIDTHS:
        for dtype in _DTYPES:
            yield NormSpec((width,), dtype)
    for dtype in ("f32", "bf16"):
        yield NormSpec((5,), dtype, eps=DEFAULT_EPS)
        yield NormSpec((65536,), dtype, output_mask=(False, True, True))
    yield NormSpec((20000,), "f64")
    for width in (769, 4096):
        yield NormSpec((width,), "f64")
        yield NormSpec((width,), "f64", eps=DEFAULT_EPS)
        for half in ("f16", "bf16"):
            yield NormSpec((width,), "f32", grad_output_dtype=half, weight_dtype=half)
            yield NormSpec((width,), half, weight_dtype="f32")
        for dtype in ("f32", "bf16"):
            yield NormSpec((width,), dtype, has_weight=False)
            yield NormSpec((width,), dtype, eps=DEFAULT_EPS)
            for mask in ((True, False, False), (False, True, True), (False, False, True)):
                yield NormSpec((width,), dtype, output_mask=mask)


def _plain_specs(op: Op) -> Iterator[NormSpec]:
    """Widths and element types, mixed ones too, and what a norm can be without."""
    of = _spec_of(op)
    for width in _FAMILY_WIDTHS:
        for dtype in ("f32", "bf16"):
            yield of((width,), dtype)
    for width in (64, *_OPTIONS_WIDTHS):
        yield of((width,), "f16")
    for width in _OPTIONS_WIDTHS:
        yield of((width,), "f64")
        yield of((width,), "bf16", weight_dtype="f32")
        yield of((width,), "f16", has_weight=False)
        if op == LAYER_NORM:
            yield of((width,), "f32", has_bias=False)
            yield of((width,), "bf16", has_weight=False, has_bias=False)
    yield of((769,), "f32", weight_dtype="bf16")
    if op == LAYER_NORM:
        yield of((769,), "f16", bias_dtype="f32")
    if op == RMS_NORM_BACKWARD:
        yield of((769,), "f32", grad_output_dtype="bf16", weight_dtype="bf16")
        for width in (5, *_OPTIONS_WIDTHS):
            for dtype in ("f32", "bf16"):
                yield of((width,), dtype, eps=_RMS_EPS)
        yield of((769,), "f64", eps=_RMS_EPS)
        for mask in ((True, False), (False, True)):
            for dtype in ("f32", "bf16"):
                yield of((4096,), dtype, output_mask=mask)
        yield of((65536,), "bf16", output_mask=(False, True))


def _option_specs(op: Op) -> Iterator[NormSpec]:
    """A residual or its gradient, and an offset of the weight; alone and together."""
    of = _spec_of(op)
    for width in _OPTIONS_WIDTHS:
        for dtype in _DTYPES:
            yield of((width,), dtype, residual_dtype=dtype)
        yield of((width,), "bf16", residual_dtype="f32")
        for dtype in ("f32", "bf16"):
            yield of((width,), dtype, weight_offset=1.0)
        yield of((width,), "bf16", residual_dtype="bf16", weight_offset=1.0)
    yield of((769,), "f32", residual_dtype="bf16")
    yield of((769,), "f64", residual_dtype="f64", weight_offset=1.0)
    yield of((5,), "f16", residual_dtype="f32", weight_offset=1.0)
    yield of((16384,), "bf16", residual_dtype="bf16")
    yield of((65536,), "bf16", residual_dtype="bf16")
    yield of((4096,), "bf16", residual_dtype="bf16", has_weight=False)
    if op.is_backward:
        alone = tuple(gradient.name == "grad_input" for gradient in op.masked)
        for dtype in ("f32", "bf16"):
            yield of((769,), dtype, residual_dtype=dtype, eps=_eps(op))
            yield of((4096,), dtype, residual_dtype=dtype, output_mask=alone)


def operand_specs() -> Iterator[NormSpec]:
    """Specs with operands that `specs` leaves out. The emulator's records need not have them."""
    for op in OPS.values():
        if not op.is_backward:
            yield from _odd_forward_specs(op)
    yield from several_gradients()
    yield from typed_outputs()
    yield from weight_sets()
    yield from biased_rms_norms()
    yield from gated()
    yield from strided_rows()
    yield from copied_gradients()
    yield from summed_gradients()


def several_gradients() -> Iterator[NormSpec]:
    """Backwards of several gradients of the output."""
    for op in OPS.values():
        if op.is_backward:
            yield from _several_gradients(op)


def _several_gradients(op: Op) -> Iterator[NormSpec]:
    """Of one type and of mixed ones, with other options."""
    of = _spec_of(op)
    for width in _OPTIONS_WIDTHS:
        for count in (2, 3, 4):
            yield of((width,), "bf16", grad_outputs=count, residual_dtype="bf16")
        yield of((width,), "f16", grad_outputs=2)
        yield of((width,), "f32", grad_outputs=3)
        yield of((width,), "f32", grad_output_dtype="bf16", grad_outputs=3, residual_dtype="f32")
        yield of((width,), "bf16", grad_output_dtype="f32", grad_outputs=2)
        yield of((width,), "f64", grad_outputs=2)
    yield of((5,), "bf16", grad_outputs=3)
    yield of((769,), "bf16", grad_output_dtype="f16", grad_outputs=4)
    yield of((16384,), "bf16", grad_outputs=3)
    yield of((25001,), "bf16", grad_outputs=2)
    yield of((65536,), "f32", grad_outputs=4)
    yield of((65536,), "bf16", grad_outputs=2, residual_dtype="bf16")
    without = tuple(gradient.name != "grad_input" for gradient in op.masked)
    yield of((4096,), "bf16", grad_outputs=2, output_mask=without)
    yield _spec_of(FROM_OUTPUT[op.name])((4096,), "bf16", grad_outputs=2)


def typed_outputs() -> Iterator[NormSpec]:
    """Forwards whose output has another type than the input."""
    for op in (LAYER_NORM, RMS_NORM):
        of = _spec_of(op)
        for width in _FAMILY_WIDTHS:
            yield of((width,), "f32", output_dtype="bf16")
            yield of((width,), "bf16", output_dtype="f32")
        for width in _OPTIONS_WIDTHS:
            yield of((width,), "f32", output_dtype="f16")
            yield of((width,), "bf16", output_dtype="f16")
            yield of((width,), "f32", output_dtype="bf16", weight_dtype="bf16", weight_offset=1.0)
            yield of((width,), "f32", output_dtype="bf16", residual_dtype="f32")
            yield of((width,), "bf16", output_dtype="f32", residual_dtype="bf16")
            yield of((width,), "f32", output_dtype="bf16", has_weight=False, has_bias=False)
        yield of((25001,), "f32", output_dtype="bf16")


def weight_sets() -> Iterator[NormSpec]:
    """Norms whose weight has sets, of every op."""
    for op in (*OPS.values(), *FROM_OUTPUT.values()):
        of = functools.partial(_spec_of(op), weight_sets=True)
        for width in (*_FAMILY_WIDTHS, _TEAMS_WIDTH):
            for dtype in ("f32", "bf16"):
                yield of((width,), dtype)
        for width in _OPTIONS_WIDTHS:
            yield of((width,), "f64")
            yield of((width,), "f16", weight_dtype="f32", weight_offset=1.0)
            yield of((width,), "bf16", residual_dtype="f32", has_bias=op.takes_bias)
        yield of((25001,), "bf16")
        for gradient in op.masked:
            without = tuple(other is not gradient for other in op.masked)
            yield of((1024,), "f32", output_mask=without)


def biased_rms_norms() -> Iterator[NormSpec]:
    """RMS norms with a bias, of every op."""
    for op in (RMS_NORM, RMS_NORM_BACKWARD, FROM_OUTPUT[RMS_NORM_BACKWARD.name]):
        yield from _biased(op)


def gated() -> Iterator[NormSpec]:
    """Norms with a gate, after and before, of every op."""
    for op in (*GATED[Gate.AFTER].values(), *GATED[Gate.BEFORE].values()):
        yield from _gated(op)


def _gated(op: Op) -> Iterator[NormSpec]:
    """Widths, element types, masks and options."""
    of = functools.partial(_spec_of(op), gate=None if op.gate is None else op.gate.value)
    for width in _FAMILY_WIDTHS:
        for dtype in ("f32", "bf16"):
            yield of((width,), dtype)
    for width in _OPTIONS_WIDTHS:
        yield of((width,), "f16", gate_dtype="f32")
        yield of((width,), "f64")
        yield of((width,), "f32", gate_dtype="bf16", weight_dtype="bf16")
        yield of((width,), "bf16", has_weight=False)
        yield of((width,), "bf16", weight_offset=1.0, has_bias=op.takes_bias)
    if not op.is_backward:
        return
    for gradient in op.masked:
        for width in _OPTIONS_WIDTHS:
            yield of((width,), "bf16", output_mask=tuple(row is gradient for row in op.masked))
    yield of((4096,), "f32", output_mask=tuple(row.name != "grad_gate" for row in op.masked))
    yield of((65536,), "bf16", output_mask=tuple(row.name != "grad_input" for row in op.masked))
    yield of((25001,), "bf16")
    yield of((769,), "bf16", grad_output_dtype="f32", eps=_eps(op))
    yield of((4096,), "bf16", eps=_eps(op))


def strided_rows() -> Iterator[NormSpec]:
    """Norms whose rows lie where a call says, of every op, with each of the other operands."""
    for op in (*OPS.values(), *FROM_OUTPUT.values()):
        of = functools.partial(_spec_of(op), strided_rows=True)
        for width in _FAMILY_WIDTHS:
            for dtype in ("f32", "bf16"):
                yield of((width,), dtype)
        for width in _OPTIONS_WIDTHS:
            yield of((width,), "f64")
            yield of((width,), "f16", weight_dtype="f32", residual_dtype="f32")
            yield of((width,), "bf16", weight_sets=True, has_bias=op.takes_bias)
        for gradient in op.masked:
            without = tuple(other is not gradient for other in op.masked)
            yield of((1024,), "f32", output_mask=without)
        if op.is_backward:
            yield of((1024,), "bf16", grad_outputs=3, residual_dtype="bf16")
            if not op.from_output:
                yield of((1024,), "bf16", grad_output_dtype="f32", eps=_eps(op))
        else:
            yield of((1024,), "f32", output_dtype="bf16")
    for gated_op in (*GATED[Gate.AFTER].values(), *GATED[Gate.BEFORE].values()):
        gate = None if gated_op.gate is None else gated_op.gate.value
        for dtype in ("f32", "bf16"):
            yield _spec_of(gated_op)((128,), dtype, gate=gate, strided_rows=True)


def copied_gradients() -> Iterator[NormSpec]:
    """Backwards that store a copy of the input's gradient in 16 bits."""
    for op in WITH_COPY:
        of = functools.partial(_spec_of(op), grad_input_copy_dtype="bf16")
        for width in _FAMILY_WIDTHS:
            yield of((width,))
        for width in _OPTIONS_WIDTHS:
            yield of((width,), grad_input_copy_dtype="f16")
            yield of((width,), residual_dtype="f32", grad_output_dtype="bf16", grad_outputs=3)
            yield of((width,), has_weight=False)
            yield of((width,), weight_sets=True, has_bias=op.takes_bias)
            yield of((width,), output_mask=tuple(row is GRAD_INPUT for row in op.masked))
        yield of((1024,), strided_rows=True, residual_dtype="bf16")
        yield of((25001,))
        yield of((65536,), residual_dtype="f32")
        if not op.from_output:
            yield of((769,), eps=_eps(op))


def summed_gradients() -> Iterator[NormSpec]:
    """Backwards that sum the input's gradient over rows."""
    for op in WITH_SUM:
        of = functools.partial(_spec_of(op), grad_input_sum_dtype="bf16")
        for width in _FAMILY_WIDTHS:
            yield of((width,), "bf16")
        for width in _OPTIONS_WIDTHS:
            yield of((width,), "f32", grad_input_sum_dtype="f32")
            yield of((width,), "f64", grad_input_sum_dtype="f64", residual_dtype="f64")
            yield of((width,), "bf16", residual_dtype="bf16", grad_outputs=3)
            yield of((width,), "bf16", has_weight=False, grad_input_sum_dtype="f32")
            yield of((width,), "f16", output_mask=tuple(row is GRAD_INPUT for row in op.masked))
        yield of((1024,), "bf16", strided_rows=True, residual_dtype="bf16")
        yield of((25001,), "bf16")
        yield of((65536,), "f32", residual_dtype="f32")
        if not op.from_output:
            yield of((769,), "bf16", eps=_eps(op))


def _biased(op: Op) -> Iterator[NormSpec]:
    """Widths, element types, masks and options."""
    of = functools.partial(_spec_of(op), has_bias=True)
    for width in _FAMILY_WIDTHS:
        for dtype in ("f32", "bf16"):
            yield of((width,), dtype)
    for width in _OPTIONS_WIDTHS:
        yield of((width,), "f16")
        yield of((width,), "f64")
        yield of((width,), "f32", bias_dtype="bf16")
        yield of((width,), "bf16", weight_dtype="f32", bias_dtype="f16")
        yield of((width,), "bf16", has_weight=False)
        yield of((width,), "bf16", residual_dtype="f32", weight_offset=1.0)
    yield of((16384,), "bf16", residual_dtype="bf16")
    if not op.is_backward:
        return
    for mask in ((True, False, True), (False, True, True), (False, False, True)):
        for dtype in ("f32", "bf16"):
            yield of((4096,), dtype, output_mask=mask)
    yield of((65536,), "bf16", output_mask=(False, True, True))
    yield of((25001,), "bf16")
    yield of((769,), "bf16", grad_output_dtype="f32", grad_outputs=2)
    if op.from_output:
        yield of((769,), "bf16", output_mask=(True, True, False))
    else:
        yield of((769,), "bf16", eps=_RMS_EPS)


def _odd_forward_specs(op: Op) -> Iterator[NormSpec]:
    """Rows that begin anywhere in an access: of a part of a subgroup, several, and a cluster."""
    of = _spec_of(op)
    yield of((131,), "f32")
    for width in (3334, 3335):
        yield of((width,), "bf16")
    yield of((3335,), "f16", residual_dtype="f16")
    for dtype in ("f32", "bf16"):
        yield of((_WIDE_ODD_WIDTHS[0],), dtype)


def _wide_odd_specs(op: Op) -> Iterator[NormSpec]:
    """Every width in two types, and one with a residual and from the output."""
    of = _spec_of(op)
    for width in _WIDE_ODD_WIDTHS:
        for dtype in ("f32", "bf16"):
            yield of((width,), dtype)
    yield of((54321,), "bf16", residual_dtype="bf16")
    yield _spec_of(FROM_OUTPUT[op.name])((54321,), "bf16")


def _from_output_specs(op: Op) -> Iterator[NormSpec]:
    """Widths, element types, masks and options of a backward from the output."""
    of = _spec_of(op)
    for width in _FAMILY_WIDTHS:
        for dtype in ("f32", "bf16"):
            yield of((width,), dtype)
    for width in _OPTIONS_WIDTHS:
        yield of((width,), "f16")
        yield of((width,), "f64")
        yield of((width,), "bf16", weight_dtype="f32")
        yield of((width,), "f16", has_weight=False)
        yield of((width,), "bf16", residual_dtype="f32", weight_offset=1.0)
        for gradient in op.masked:
            yield of((width,), "bf16", output_mask=tuple(other is gradient for other in op.masked))
        if op.usual_bias:
            yield of((width,), "f32", has_bias=False)
            yield of((width,), "bf16", bias_dtype="f32")
    yield of((769,), "f32", grad_output_dtype="bf16", weight_dtype="bf16")
    yield of((769,), "f64", residual_dtype="f64", weight_offset=1.0)
    yield of((16384,), "bf16", residual_dtype="bf16")
    alone = tuple(gradient.name != "grad_input" for gradient in op.masked)
    yield of((65536,), "bf16", output_mask=alone)


def _spec_of(op: Op) -> Callable[..., NormSpec]:
    """A spec of an op; a forward needs an eps."""
    if op.is_backward:
        return functools.partial(NormSpec, op=op.name, from_output=op.from_output)
    return functools.partial(NormSpec, op=op.name, eps=_eps(op))


def _eps(op: Op) -> float:
    return DEFAULT_EPS if op.centres else _RMS_EPS


def both_sides(spec: NormSpec, schedule: Schedule) -> tuple[int, ...]:
    """The most rows that count as few, and one row more, if a module has two forms."""
    most = most_few_rows(schedule, spec)
    return () if most is None else (most, most + 1)


def random_call(
    spec: NormSpec, rows: int, rng: np.random.Generator, sets: Sets = SOME_SETS
) -> BoundCall:
    """Rows from a normal distribution, with their true statistics where the op takes them.

    Args:
        spec: What it computes.
        rows: M.
        rng: The source of random numbers.
        sets: Those of the weight, where the spec has some.
    """
    x = rng.standard_normal((rows, spec.columns)) * 2 + 0.5
    return _call(spec, x, rng, _as_they_are, sets)


def calls(
    spec: NormSpec,
    schedule: Schedule,
    row_counts: Sequence[int],
    most_elements: int,
    rng: np.random.Generator,
) -> Iterator[tuple[str, BoundCall]]:
    """The data that a module is verified on, by a name for each.

    Args:
        spec: What it computes.
        schedule: How; each of its forms is run, on random and on adversarial rows.
        row_counts: Numbers of random rows; those with too many elements are left out.
        most_elements: The most elements of a call, except where a form would not be run at all.
        rng: The source of random numbers.
    """
    sides = both_sides(spec, schedule)

    def fits(rows: int) -> bool:
        return rows * spec.columns <= most_elements

    for rows in sorted({*row_counts, *sides}):
        if rows in (1, *sides[1:]) or fits(rows):
            yield f"random {rows}", random_call(spec, rows, rng)
    for rows in (ADVERSARIAL_ROWS, *sides[1:]):
        if fits(rows):
            yield f"adversarial {rows}", adversarial_call(spec, rng, rows)


def adversarial_call(
    spec: NormSpec, rng: np.random.Generator, rows: int = ADVERSARIAL_ROWS
) -> BoundCall:
    """Random rows, and among them constant ones, ones far from zero, zeros, an Inf and a NaN.

    What is added to the rows has them, too, so that sums are constant, far from zero and zero. For
    a backward from the output, these rows are the output, and some weights are near zero.
    """
    x = rng.standard_normal((rows, spec.columns))
    x[0] = 3.0  # with layer norm, rstd is 1 / sqrt(eps)
    x[1] += 100.0
    x[2] = 0.0
    x[3, 0] = np.inf
    x[4, -1] = np.nan
    call = _call(spec, x, rng, _adversarial)
    return _from_any_output(call, x) if spec.from_output else call


def _from_any_output(call: BoundCall, rows: Array) -> BoundCall:
    """The same call from an output of these rows, by weights of which some are near zero."""
    assert call.spec is not None
    output = rows.astype(DTYPES[call.spec.dtype].numpy)
    changed = {"output": output}
    if "weight" in call.arrays:
        changed["weight"] = weight = call.arrays["weight"].copy()
        of_least = (0.0, -0.0, 0.25, -0.25, 1.0, -1.0, 2.0, -2.0)
        small = LEAST_WEIGHT * np.array(of_least)
        places = np.arange(0, weight.size, 3)
        weight.reshape(-1)[places] = small[places % len(small)] - call.spec.weight_offset
    return call._replace(arrays={**call.arrays, **changed})


def _as_they_are(added: Array) -> Array:
    return added


def _adversarial(added: Array) -> Array:
    """What is added to the rows of `adversarial_call`; its own Inf and NaN are in other rows."""
    added[0] = -0.5
    added[2] = 0.0
    added[-1, 0] = -np.inf
    added[-2, -1] = np.nan
    return added


def _make_extreme(gate: Array) -> None:
    """Rows of a gate whose sigmoid is subnormal or zero, or one; and an infinite element."""
    gate[5] = -100.0
    gate[6], gate[7] = -6e4, 6e4
    gate[8, ::2] = -85.0
    gate[9, 0] = np.inf


def _call(
    spec: NormSpec,
    x64: Array,
    rng: np.random.Generator,
    change: Callable[[Array], Array],
    sets: Sets = SOME_SETS,
) -> BoundCall:
    """A call on these rows, with random arguments besides, and the rows' true statistics.

    Args:
        spec: What it computes.
        x64: The rows [M, N].
        rng: The source of random numbers. Those of an older op come first, because results are
            kept that were computed from them.
        change: Changes what is added to the rows, or to their gradients.
        sets: Those of the weight, where the spec has some.
    """
    op, dims = spec.family, spec.normalized_shape
    columns = (sets.number, spec.columns) if spec.weight_sets else (spec.columns,)

    def of(dtype: str, values: Array) -> Array:
        with np.errstate(all="ignore"):  # statistics of rows with an Inf or a NaN
            return values.astype(DTYPES[dtype].numpy)

    x = of(spec.dtype, x64)
    normalized, gates = x.astype(np.float64), {}
    if spec.gate is not None:
        z = change(2 * rng.standard_normal(x.shape))
        if change is _adversarial:
            _make_extreme(z)
        gates["gate"] = z = of(spec.element_type(Element.GATE), z)
        if spec.gate_first:
            with np.errstate(all="ignore"):
                normalized /= 1 + np.exp(-z.astype(np.float64))
                normalized *= z
    statistics = _true_statistics(spec, normalized)
    values = {"input": x, **gates, **statistics}
    values["weight"] = rng.standard_normal(columns) + (1 - spec.weight_offset)
    if op.is_backward:
        values["grad_output"] = rng.standard_normal(x.shape)
    for more in MORE_GRAD_OUTPUTS:
        if spec.has(more):
            values[more.name] = change(rng.standard_normal(x.shape))
    if spec.has_bias:
        values["bias"] = rng.standard_normal(columns)
    if spec.residual_dtype is not None:
        name = "grad_residual" if op.is_backward else "residual"
        values[name] = change(rng.standard_normal(x.shape))
    if spec.from_output:
        with np.errstate(all="ignore"):
            mean = statistics["mean"] if op.centres else np.zeros(len(x))
            xhat = (x.astype(np.float64) - mean[:, None]) * statistics["rstd"][:, None]
            g = values["weight"] + spec.weight_offset if spec.has_weight else 1.0
            added = values.get("bias", 0.0)
            if spec.weight_sets:
                of_rows = sets.of_rows(len(x))
                g, added = (np.broadcast_to(each, columns)[of_rows] for each in (g, added))
            values["output"] = xhat * g + added
    given = {}
    for operand in op.arguments:
        # A bias that is not read counts by its type, and an RMS norm has to have one.
        only_its_type = operand.access is Access.TYPE_ALONE and spec.has_bias
        if spec.has(operand) or only_its_type:
            array = of(spec.element_type(operand.element), values[operand.name])
            of_columns = (*columns[:-1], *dims)
            shapes = {Kind.CELLS: (-1, *dims), Kind.ROWS: (-1,), Kind.COLUMNS: of_columns}
            given[operand.name] = array.reshape(shapes[operand.kind])
    call = bind(
        op.name,
        {argument.name: given.get(argument.name) for argument in op.arguments},
        dims,
        output_mask=spec.output_mask,
        eps=_eps(op) if spec.eps is None else spec.eps,
        weight_offset=spec.weight_offset,
        output_dtype=spec.output_dtype,
        grad_input_copy_dtype=spec.grad_input_copy_dtype,
        grad_input_sum_dtype=spec.grad_input_sum_dtype,
        rows_per_set=sets.rows_per_set if spec.weight_sets else None,
        gate_first=spec.gate_first,
    )
    # Its rows follow each other: what runs it says where they lie.
    return call._replace(spec=with_strided_rows(call.spec)) if spec.strided_rows else call


def _true_statistics(spec: NormSpec, wide: Array) -> dict[str, Array]:
    """The rows' statistics in f64, for the backwards that take them."""
    with np.errstate(all="ignore"):
        square = wide.var(axis=1) if spec.family.centres else (wide * wide).mean(axis=1)
        return {"mean": wide.mean(axis=1), "rstd": 1 / np.sqrt(square + _eps(spec.family))}
