"""Finds the norm that a module computes, by running its forward on samples.

A module has a form if on the samples its output is as far from the f64 reference as that form may
be, by the same tolerance that this package's own outputs are held to: in f32, and in the element
types that the model uses. What it is in further types is tried, too; where it is not the form, its
own forward computes. The samples hold what near-norms get wrong: rows of other scales, zeros,
outliers, NaN, negative and large weights, eps that counts, inputs of other shapes, training and
evaluation.

That tolerance allows for one rounding to the output's type. Classes of models round more often:
Llama's rounds the normalized row, and some round before they add the bias. So each element may
differ by two units of roundoff of ``xhat * weight`` more, and in half types by one for each
operator that returns such a type; by as many of ``mean * rstd * weight``, where a mean is
subtracted. A replaced module may thus differ from what it was in the last bits of half types, and
is the one with fewer roundings.

The gradients must be the form's, too. No derivative is missing if they agree to half the digits of
f32: rounding, in whatever order sums are added, is far below that, and a term of the formula far
above. f64 is not tried: classes that compute in f32 lose its precision, and replaced ones do not.

All that the forward reads from the module must be constant, but for what a form reads at each call.
A forward runs on samples only after `effects` saw that it has none.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from iree_lnbwd.ops.arguments import bind
from iree_lnbwd.ops.dtypes import DTYPES, name_of
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.runtime.frameworks import interop
from iree_lnbwd.torch import aten
from iree_lnbwd.torch.replacement import clamped, constants, effects, shards
from iree_lnbwd.torch.replacement.classes import own_class, parameter_names, stand_in
from iree_lnbwd.torch.replacement.form import Autocast, Form, Order, OutputType, Pair
from iree_lnbwd.torch.replacement.watched import NotPlainError, notes_of, watched_class
from iree_lnbwd.verification.judge import compare, judge

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, torch.finfo(torch.float32).eps)
# Of the rows: from much above to much below each eps that is usual, by its root.
_SCALES = (1.0, 4.0, 0.25, 1e-2, 1e-3, 1e-4, 1e-6, 0.0, 64.0, 1.0, 0.5, 0.0)
_MEANS = (0.0, 1.0, -0.5, 0.0, 1e-3, 0.0, 0.0, 0.25, -8.0, 4.0, 0.0, 0.0)
_ZEROS = len(_SCALES) - 1  # the row that is zero
_OUTLIER = 10  # the row that has one
_FAR = 1000.0  # an outlier, in units of its row
_LEADING = (2, 3, 2)  # as images have
_OF_VOLUMES = (2, 3, 2, 1)
_OTHER_LEADING = ((), (12,), (3, 4), (12, 1), (12, 1, 1), (1, 3, 4), (1, 2, 3, 2))
_AROUND_EPS = (0.03, 0.3, 1.0, 3.0, 30.0)  # of a row, in units of the root of eps
_ANY_WIDTHS = (48, 7, 64)  # of samples for modules without a width: the first, and others
_HALF_THE_DIGITS = 2.0**-12  # of f32
_SAME = 2.0**-22  # relative; of outputs in f32
_RAISED = "its forward raised"
_OTHER_SHAPE = "its output is no tensor of the input's shape"
_MOST_COLUMNS = 1 << 18  # samples have 12 rows
_LEAST_EPS = 1e-30  # squares of smaller rows are subnormal in f32
_ROUNDINGS_OF_AUTOCAST = 6
_WEIGHTS = (-3.0, 300.0, 0.0)  # the first ones of a sample


class Outcome(NamedTuple):
    """What was found of a module.

    Attributes:
        form: The norm that it computes; None if it is none.
        reason: Why it is none.
        read: The attributes that its forward read until that was found, and the keys of their
            values (see `constants`). It holds of all modules where these are equal.
        calls_pytorchs: Whether its forward calls a norm of PyTorch's, whose backward `enable`
            replaces.
    """

    form: Form | None
    reason: str | None
    read: Mapping[str, Hashable]
    calls_pytorchs: bool = False

    def holds_of(self, module: nn.Module) -> bool:
        """Whether another module of the class, whose parameters have these shapes, is the same."""
        return all(_key(module, name) == value for name, value in self.read.items())


def _key(module: nn.Module, name: str) -> Hashable:
    """Of an attribute, which is not got: that could compute it. Of what may change, a new one."""
    try:
        return constants.key(vars(module).get(name, constants.ABSENT))
    except constants.NotConstantError:
        return object()


def find(
    module: nn.Module,
    shapes: Mapping[str, tuple[int, ...] | None],
    dtypes: Collection[torch.dtype],
) -> Outcome:
    """The form of a module, whose parameters are not read: they may be sharded or have no memory.

    Args:
        module: `check` let it pass.
        shapes: Those of its parameters and buffers.
        dtypes: The element types that the model uses.
    """
    # Whatever the caller's defaults and modes are.
    with (
        torch.device("cpu"),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        form, reason, read, calls = None, None, set[str](), False
        try:
            watched = stand_in(
                module,
                watched_class(own_class(module)),
                {name: _without_memory(module, name, shape) for name, shape in shapes.items()},
            )
            try:
                calls = _calls_pytorchs(watched)
                form = _find(watched, dtypes)
            finally:
                there = {name for name, shape in shapes.items() if shape is not None}
                read = notes_of(watched).read - there
        except NotPlainError as error:
            reason = str(error)
    if form is not None:
        form = replace(form, fixed=frozenset(read - {form.eps_name, form.shape_name}))
    return Outcome(form, reason, {name: _key(module, name) for name in read}, calls)


def _find(module: nn.Module, dtypes: Collection[torch.dtype]) -> Form:
    candidates = tuple(_candidates(module))
    first = candidates[0]
    if 1 in first.normalized_shape or 0 in first.normalized_shape:
        raise NotPlainError(f"its parameters have shape {first.normalized_shape}")
    if math.prod(first.normalized_shape) > _MOST_COLUMNS:
        raise NotPlainError(f"its rows have more than {_MOST_COLUMNS} elements")
    layouts: list[dict[str, Any]] = [{"channels_first": False}]
    if len(first.normalized_shape) == 1:
        layouts.append({"channels_first": True})
    if first.is_flattened:  # a weight of [N, 1, 1, 1] goes with no image
        layouts.append({"channels_first": True, "ranks": (1 + len(_OF_VOLUMES),)})
    reasons = []
    for layout in layouts:
        try:
            tried = [replace(c, **layout) for c in candidates]
            _check_effects(module, tried[0])
            best = _best(module, tried)
        except NotPlainError as error:
            reasons.append(str(error))
            continue
        return _completed(module, best, dtypes)
    # Of a module that takes channels first, that it does not take them last says nothing.
    ran = (reason for reason in reasons if not reason.startswith((_RAISED, _OTHER_SHAPE)))
    raise NotPlainError(next(ran, reasons[0]))


def _completed(module: nn.Module, found: Form, dtypes: Collection[torch.dtype]) -> Form:
    """A form that f32 outputs are near to, with all that is to be known of it."""
    found = replace(found, shape_name=_shape_name(module, found))
    _check_outputs(module, found, torch.float32)
    found = replace(found, ranks=_ranks(module, found))
    _check_eps(module, found)
    _check_nan(module, found)
    around = _around_eps(module, found) if found.is_clamped else ()
    for training, scales in itertools.product((True, False), {(), around}):
        _check_gradients(module, found, training, scales)
    is_free = {found.weight_name, found.bias_name, found.shape_name} == {None}
    if found.any_width or (is_free and len(found.normalized_shape) == 1):
        _check_widths(module, found)
    outputs = _output_types(module, found, dtypes)
    output_type, pairs = _output_type(outputs, dtypes)
    found = replace(found, output_type=output_type, pairs=pairs, order=_order(module, found))
    return replace(
        found,
        on_gpus=_autocast(module, found, "cuda"),
        on_cpus=_autocast(module, found, "cpu"),
    )


def check(module: nn.Module) -> Mapping[str, tuple[int, ...] | None]:
    """Expects what every norm is, before anything is run.

    Returns:
        The shapes of the parameters and buffers, by name; None of one that is not there.

    Raises:
        NotPlainError: The module is something else.
    """
    if (holder := shards.holder(module)) is not None:
        raise NotPlainError(f"{holder} holds parts of its parameters; replace norms before that")
    if any(name != "parametrizations" for name, _ in module.named_children()):
        raise NotPlainError("it has modules of its own")
    if hasattr(own_class(module).forward, "_torchdynamo_orig_callable"):
        raise NotPlainError("torch.compile compiled its forward by itself")
    arguments = _arguments(module)
    if len(arguments) != 1:
        raise NotPlainError(f"its forward takes {len(arguments)} arguments, expected 1")
    if any(map(is_lazy, module.parameters())):
        raise NotPlainError("its parameters are not initialized yet")
    with torch.no_grad():
        parameters = {name: getattr(module, name) for name in parameter_names(module)}
    parameters |= {
        name: buffer for name, buffer in module._buffers.items()
        if buffer is None or buffer.is_floating_point()
    }  # fmt: skip
    return {name: None if p is None else tuple(p.shape) for name, p in parameters.items()}


def _without_memory(module: nn.Module, name: str, shape: tuple[int, ...] | None) -> Tensor | None:
    """In place of a parameter or a buffer."""
    if shape is None:
        return None
    if name in module._buffers:
        return torch.empty(shape, device="meta")
    own = module._parameters.get(name)  # of another one, parametrizations compute it
    return nn.Parameter(
        torch.empty(shape, device="meta"), requires_grad=own is None or own.requires_grad
    )


def _arguments(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(own_class(module).forward).parameters)[1:]
    except (TypeError, ValueError) as error:
        raise NotPlainError("its forward does not say which arguments it takes") from error


def _vectors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a stand-in has, by name."""
    every = {**module._parameters, **module._buffers}
    return {name: vector for name, vector in every.items() if vector is not None}


def _candidates(module: nn.Module) -> Iterator[Form]:
    """All forms that the parameters, buffers and attributes of a module allow."""
    vectors = _vectors(module)
    shapes = {tuple(vector.shape) for vector in vectors.values()}
    if len(shapes) > 1 or len(vectors) > 2:
        raise NotPlainError(f"expected at most two parameters of one shape, got {len(vectors)}")
    shape = next(iter(shapes), None)
    dims = _normalized_shape(module) if shape is None else shape
    any_width = not dims if shape is None else math.prod(shape) == 1
    long = tuple(size for size in dims if size != 1)
    is_flattened = not any_width and shape is not None and len(long) == 1 < len(dims)
    if any_width:
        dims = _ANY_WIDTHS[:1]
    elif is_flattened:
        dims = long
    attributes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, float) and value >= 0
    }
    named = sorted(attributes.items(), key=lambda item: "eps" not in item[0])  # of equal ones
    epsilons = [*((v, n) for n, v in named), *((eps, None) for eps in _USUAL_EPS)]
    weight_and_bias = (*vectors, None, None)[:2]
    roles = dict.fromkeys(itertools.permutations(weight_and_bias, 2))
    if vectors.keys() <= module._buffers.keys():  # some are there to be read by others alone
        roles[None, None] = None
    (argument,) = _arguments(module)
    for (weight, bias), (eps, eps_name) in itertools.product(roles, epsilons):
        kinds = [(LAYER_NORM, False, False)]
        columns = max(1, math.prod(dims))  # a weight may have none
        clamps = (False, True)[: 1 + clamped.is_possible(eps**2 / columns)]
        kinds += [(RMS_NORM, *each) for each in itertools.product((False, True), clamps)
                  if bias is None]  # fmt: skip
        for op, is_l2, is_clamped in kinds:
            for offset in (0.0, 1.0) if weight is not None else (0.0,):
                yield Form(
                    op, dims, eps, eps_name, weight, bias, offset, argument=argument, is_l2=is_l2,
                    is_clamped=is_clamped, is_flattened=is_flattened, any_width=any_width,
                )  # fmt: skip


def _normalized_shape(module: nn.Module) -> tuple[int, ...]:
    """The module's attribute, as a tuple; an empty one if it has none."""
    dims = vars(module).get("normalized_shape", ())
    dims = dims if isinstance(dims, tuple) else (dims,)
    return dims if all(type(size) is int for size in dims) else ()


def _shape_name(module: nn.Module, form: Form) -> str | None:
    name = "normalized_shape"
    is_it = _normalized_shape(module) == form.normalized_shape
    return name if is_it and name in notes_of(module).read else None


def _best(module: nn.Module, candidates: Sequence[Form]) -> Form:
    """The candidate that a module's f32 outputs are nearest to, if they are near enough."""
    sample = _Sample(module, candidates[0], torch.float32)
    output = sample.output()
    read = notes_of(module).read
    candidates = [c for c in candidates if c.eps_name is None or c.eps_name in read]
    rows = sample.rows[:_ZEROS].double()
    got = _as_rows(output, candidates[0])[:_ZEROS].double()

    def distance(form: Form) -> float:
        """Relative to the largest element of each row; that of zeros is only checked."""
        apart = (got - _reference(sample.module, form, rows)).abs().flatten(1).amax(1)
        size = got.abs().flatten(1).amax(1).clamp(min=1e-300)
        return float(torch.nan_to_num(apart / size, nan=np.inf).max())

    with torch.no_grad():
        apart = {form: distance(form) for form in candidates}
    best = min(apart, key=apart.__getitem__)
    # Without eps and with a clamp at one, they are the same in all but the shortest rows.
    alike = [form for form in apart if apart[form] <= apart[best] + _SAME < math.inf]
    if any(form.is_clamped for form in alike):
        best = _first_around_eps(module, alike) or best
    _check(sample, best, output)
    return best


def _first_around_eps(module: nn.Module, candidates: Sequence[Form]) -> Form | None:
    """The first candidate that a module's outputs are near to where eps counts."""
    for form in candidates:
        with contextlib.suppress(NotPlainError):
            _check_eps(module, form)
            _check_zeros(module, form)
            return form
    return None


def _reference(
    module: nn.Module, form: Form, rows: Tensor, vectors: Mapping[str, Tensor] | None = None
) -> Tensor:
    """What a form computes of rows, in f64, with a module's vectors or others."""
    named = _vectors(module) if vectors is None else vectors
    weight, bias = (
        None if name is None else named[name].double()
        for name in (form.weight_name, form.bias_name)
    )
    dims = form.normalized_shape
    weight, bias, offset = form.scaling(weight, bias, dims, rows)
    eps = None if form.eps is None else form.eps_of(module, dims)
    if form.is_clamped:
        assert eps is not None
        return clamped.normalized(rows, dims, weight, offset, eps)
    return aten.normalized(form.op, rows, weight, bias, dims, eps, offset)[0]


class _Sample:
    """Random rows and parameters for a module, and the module with these parameters.

    Attributes:
        rows: [rows, *normalized_shape].
        module: A copy, with random parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        form: Form,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        scales: Sequence[float] = (),
    ) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._form = form
        made = {name: self._made(module, name, vector, weight_dtype or dtype)
                for name, vector in {**module._parameters, **module._buffers}.items()}  # fmt: skip
        self.module = stand_in(module, type(module), made)
        rows = self.random(len(_SCALES), *form.normalized_shape)
        if scales:
            self.rows = rows * self._column([scales[i % len(scales)] for i in range(len(rows))])
        else:
            rows = rows * self._column(_SCALES) + self._column(_MEANS)
            rows[_OUTLIER].view(-1)[-1] *= _FAR
            self.rows = rows.to(dtype)

    def _column(self, values: Sequence[float]) -> Tensor:
        ones = (1 for _ in self._form.normalized_shape)
        return torch.tensor(values, dtype=torch.float32).reshape(-1, *ones)

    def _made(
        self, module: nn.Module, name: str, vector: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """In place of a parameter or a buffer."""
        if vector is None:
            return None
        values = torch.randn(vector.shape, generator=self._generator, dtype=torch.float32) + 0.5
        if vector.numel() > len(_WEIGHTS):
            values.view(-1)[: len(_WEIGHTS)] = torch.tensor(_WEIGHTS)
        if name in module._buffers:
            return values.to(dtype)
        return nn.Parameter(values.to(dtype), requires_grad=vector.requires_grad)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers in f32."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float32)

    def input(self, leading: Sequence[int] | None = None, *, turned: bool = False) -> Tensor:
        """The rows as the module takes them, with dimensions other than the normalized ones.

        Args:
            leading: These dimensions; None means those that the module is sure to take.
            turned: Whether they lie in another order in memory: those of images channels last.
        """
        dims = self._form.normalized_shape
        leading = _leading(self._form) if leading is None else leading
        x = self.rows.reshape(*leading, *dims) if leading else self.rows[0]
        if self._form.channels_first and leading:
            x = x.movedim(-1, 1)
            return x.clone() if turned else x.contiguous()
        return x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x.clone()

    def output(
        self,
        leading: Sequence[int] | None = None,
        *,
        turned: bool = False,
        training: bool = True,
    ) -> Tensor:
        """Of the module, without its hooks, for an `input`."""
        with torch.no_grad():
            return _run(self.module.train(training), self.input(leading, turned=turned))


def _run(module: nn.Module, input: Tensor) -> Tensor:
    """What a module's forward returns.

    Raises:
        NotPlainError: It raised an error, or returned something else than a tensor of that shape.
    """
    forward = module.forward
    read = (input, *_vectors(module).values())
    versions = [tensor._version for tensor in read]
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=()),
            notes_of(module).taken(),
        ):
            warnings.simplefilter("ignore")  # of types that are slow together
            output = forward(input)
    except Exception as error:  # code that is not ours
        # torch.compile puts another error around ours, or adds lines to it.
        notes = (e for e in (error, error.__context__) if isinstance(e, NotPlainError))
        if (noted := next(notes, None)) is not None:
            raise NotPlainError(str(noted).splitlines()[0]) from error
        said = str(error).strip().splitlines() or [""]
        raise NotPlainError(f"{_RAISED} {type(error).__name__}: {said[0][:120]}") from error
    if not isinstance(output, Tensor) or output.shape != input.shape:
        raise NotPlainError(_OTHER_SHAPE)
    if versions != [tensor._version for tensor in read]:
        raise NotPlainError("its forward changes its input or its parameters")
    return output


def _as_rows(tensor: Tensor, form: Form) -> Tensor:
    if form.channels_first:
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(-1, *form.normalized_shape)


def _check_effects(module: nn.Module, form: Form) -> None:
    """Expects a forward and a backward without effects, before either runs on values."""
    for training in (True, False):
        _traced(module, form, torch.float32, torch.float32, training=training)


def _traced(
    module: nn.Module, form: Form, dtype: torch.dtype, other: torch.dtype, *, training: bool = True
) -> effects.Trace:
    """What a module calls for such element types, forward and backward."""
    with effects.observed() as mode:
        made = _empty_vectors(module, other, "cpu")
        sample = stand_in(module, type(module), made).train(training)
        x = torch.empty(_shape(form), dtype=dtype).requires_grad_()
        mode.begin()
        output = _run(sample, x)
        trace = mode.trace
        if output.requires_grad:
            asked = [x, *(p for p in sample.parameters() if p.requires_grad)]
            try:
                torch.autograd.grad(output.sum(), asked, allow_unused=True)
            except NotPlainError as error:
                raise NotPlainError(str(error).replace("forward", "backward")) from error
            except Exception as error:  # code that is not ours
                raise NotPlainError(f"its backward raised {type(error).__name__}") from error
    return trace


def _shape(form: Form) -> tuple[int, ...]:
    """Of a sample's input."""
    dims, leading = form.normalized_shape, _leading(form)
    return (leading[0], *dims, *leading[1:]) if form.channels_first else (*leading, *dims)


def _leading(form: Form) -> tuple[int, ...]:
    """The dimensions of a sample's input other than the normalized ones."""
    takes_images = form.ranks is None or len(_LEADING) + len(form.normalized_shape) in form.ranks
    return _LEADING if takes_images else _OF_VOLUMES


def _empty_vectors(
    module: nn.Module, dtype: torch.dtype | None, device: str
) -> dict[str, Tensor | None]:
    """Parameters and buffers without values."""
    made: dict[str, Tensor | None] = dict.fromkeys((*module._parameters, *module._buffers))
    for name, vector in _vectors(module).items():
        empty = torch.empty(vector.shape, dtype=dtype, device=device)
        made[name] = empty if name in module._buffers else nn.Parameter(
            empty, requires_grad=vector.requires_grad)  # fmt: skip
    return made


def _calls_pytorchs(module: nn.Module) -> bool:
    """Whether the forward calls a norm of PyTorch's on a GPU, tried without one."""
    first = next(_candidates(module))
    for channels_first in (False, True):
        form = replace(first, channels_first=channels_first)
        with contextlib.suppress(NotPlainError), effects.observed() as mode:
            sample = stand_in(module, type(module), _empty_vectors(module, None, "cuda"))
            x = torch.empty(_shape(form), device="cuda")
            mode.begin()
            with torch.no_grad():
                _run(sample, x)
            return mode.trace.calls_pytorchs
    return False


def _check_outputs(module: nn.Module, form: Form, dtype: torch.dtype) -> torch.dtype:
    """Expects those of the form, in all shapes, orders and modes; their element type."""
    sample = _Sample(module, form, dtype)
    roundings = _roundings(module, form, dtype, dtype)
    for training, turned in itertools.product((True, False), (False, True)):
        output = sample.output(training=training, turned=turned)
        _check(sample, form, output, roundings)
    if form.channels_first and _vectors(module) and _takes_sequences(sample, form):
        raise NotPlainError("it normalizes another dimension of sequences than of images")
    for leading in _OTHER_LEADING:
        try:
            other = sample.output(leading)
        except NotPlainError:
            continue  # it does not take such dimensions
        if not leading:
            other = torch.cat((other[None], _as_rows(output, form)[1:]))
            _check(sample, replace(form, channels_first=False), other, roundings)
        else:
            _check(sample, form, other, roundings)
    return output.dtype


def _ranks(module: nn.Module, form: Form) -> tuple[int, ...]:
    """The numbers of dimensions that a module takes, whatever their sizes are."""
    sample = _Sample(module, form, torch.float32)
    taken, refused = {sample.input().dim()}, set[int]()
    for leading in _OTHER_LEADING:
        x = sample.input(leading)
        try:
            sample.output(leading)
            taken.add(x.dim())
        except NotPlainError:
            refused.add(x.dim())
    return tuple(sorted(taken - refused))


def _roundings(module: nn.Module, form: Form, dtype: torch.dtype, other: torch.dtype) -> int:
    """How many more roundings than one an output may have, in units of ``xhat * weight``.

    Those of a mean are in units of the mean itself.
    """
    if torch.float32 == dtype == other:
        return 2
    return max(2, _traced(module, form, dtype, other).roundings)


def _check_eps(module: nn.Module, form: Form) -> None:
    """Expects eps where it counts: in rows of about its size."""
    if scales := _around_eps(module, form):
        sample = _Sample(module, form, torch.float32, scales=scales)
        _check(sample, form, sample.output())


def _check_zeros(module: nn.Module, form: Form) -> None:
    """Expects what the form makes of a row of zeros, which it may divide by their length."""
    sample = _Sample(module, form, torch.float32, scales=(1.0, 0.0))
    _check(sample, form, sample.output())


def _around_eps(module: nn.Module, form: Form) -> tuple[float, ...]:
    """Scales of rows in which eps counts; none if squares of such rows do not."""
    eps = None if form.eps is None else form.eps_of(module, form.normalized_shape)
    if eps is None or eps < _LEAST_EPS:
        return ()
    return tuple(math.sqrt(eps) * s for s in _AROUND_EPS)


def _check_nan(module: nn.Module, form: Form) -> None:
    """Expects what every norm makes of a NaN: its row, and no other."""
    sample = _Sample(module, form, torch.float32)
    sample.rows[0].view(-1)[-1] = math.nan
    _check(sample, form, sample.output())


def _check_widths(module: nn.Module, form: Form) -> None:
    """Expects the same norm of rows of other lengths."""
    for width in _ANY_WIDTHS[1:]:
        other = replace(form, normalized_shape=(width,))
        sample = _Sample(module, other, torch.float32)
        _check(sample, other, sample.output())


def _takes_sequences(sample: _Sample, form: Form) -> bool:
    """Whether a module takes channels last, too, in inputs with fewer dimensions."""
    (columns,) = form.normalized_shape
    leading = (3, 4) if columns != 4 else (4, 3)
    try:
        _run(sample.module, sample.rows.reshape(*leading, columns))
    except NotPlainError:
        return False
    return True


def _check(sample: _Sample, form: Form, output: Tensor, roundings: int = 2) -> None:
    """Expects an output within its tolerance.

    Args:
        sample: What it was computed from.
        form: The norm.
        output: As the module returned it.
        roundings: More than one, in units of ``xhat * weight``.
    """
    dims = form.normalized_shape
    given, offset = _arrays(sample, form)
    eps = None if form.eps is None else form.eps_of(sample.module, dims)
    added = torch.finfo(torch.float32).tiny if form.is_clamped else eps
    judged = judge(bind(form.op.name, given, dims, eps=added, weight_offset=offset))
    expected, tolerance = judged.expected["output"], judged.tolerance["output"]
    got = interop.to_numpy("output", _as_rows(output, form).contiguous())
    name = name_of(got.dtype)
    if name is None:
        raise NotPlainError(f"its output has another element type: {output.dtype}")
    if form.is_clamped:
        assert eps is not None
        linear, is_short = _short_rows(given, offset, eps)
        roundoff_of_three = 3 * DTYPES[name].unit_roundoff  # of the clamp, the quotient, the output
        expected = np.where(is_short, linear, expected)
        tolerance = np.where(is_short, roundoff_of_three * np.abs(linear), tolerance)
    scaled = expected if given["bias"] is None else expected - given["bias"].astype(np.float64)
    roundoff = DTYPES[name].unit_roundoff
    if name == "f32" and roundings > 2:  # they were in a half type
        roundoff = max(DTYPES[name_of(a.dtype) or name].unit_roundoff
                       for a in given.values() if a is not None)  # fmt: skip
    with np.errstate(all="ignore"):
        more = roundings * (roundoff * np.abs(scaled) + DTYPES[name].smallest_subnormal)
        if form.op.centres and roundings > 2:
            more = more + roundings * roundoff * _off_centre(given, eps or 0.0)
    compared = compare(got, expected, tolerance + more)
    if not compared.passed:
        what = "a layer norm" if form.op.centres else "an L2 norm" if form.is_l2 else "an RMS norm"
        raise NotPlainError(
            f"its output in {name} is {compared.ratio:.3g} times its tolerance from {what}'s"
        )


def _short_rows(
    given: Mapping[str, np.ndarray | None], offset: float, least_square: float
) -> tuple[np.ndarray, np.ndarray]:
    """What rows shorter than a clamp become, of all rows, and which are."""
    rows = np.asarray(given["input"], np.float64)
    axes, weight = tuple(range(1, rows.ndim)), given["weight"]
    gamma = 1.0 if weight is None else np.asarray(weight, np.float64) + offset
    with np.errstate(all="ignore"):
        is_short = np.square(rows).mean(axes, keepdims=True) < least_square
        return rows / math.sqrt(least_square) * gamma, is_short


def _off_centre(given: Mapping[str, np.ndarray | None], eps: float) -> Any:
    """How large the mean of each row is, as what the output gets of it."""
    rows = np.asarray(given["input"], np.float64)
    axes = tuple(range(1, rows.ndim))
    mean, variance = rows.mean(axes, keepdims=True), rows.var(axes, keepdims=True)
    weight = given["weight"]
    return (
        np.abs(mean) / np.sqrt(variance + eps)
        * (1.0 if weight is None else np.abs(np.asarray(weight, np.float64)))
    )  # fmt: skip


def _check_gradients(
    module: nn.Module, form: Form, training: bool, scales: Sequence[float]
) -> None:
    """Expects the gradients of the form, in f32, of rows of such scales."""
    sample = _Sample(module, form, torch.float32, scales=scales)
    sample.module.train(training)
    x = sample.input().requires_grad_()
    with torch.enable_grad():
        grad_output = sample.random(*x.shape)
        asked = {"input": x, **dict(sample.module.named_parameters())}
        for tensor in asked.values():
            tensor.requires_grad_()
        output = _run(sample.module, x)
        if not output.requires_grad:
            raise NotPlainError("its output has no gradient")
        _check(sample, form, output.detach())
        found = torch.autograd.grad(output, list(asked.values()), grad_output, allow_unused=True)
        wide = {name: t.detach().double().requires_grad_() for name, t in asked.items()}
        vectors = {**_vectors(sample.module), **wide}
        y = _reference(sample.module, form, _as_rows(wide["input"], form), vectors)
        rows = _as_rows(grad_output, form).double()
        expected = torch.autograd.grad(y, list(wide.values()), rows)
    for name, ours, theirs in zip(asked, expected, found, strict=True):
        if theirs is None:
            raise NotPlainError(f"it has no gradient of {name}")
        if name == "input":
            ours, theirs = (_as_rows(g, form).flatten(1) for g in (ours, theirs))
            size = ours.abs().amax(1, keepdim=True)
        else:
            size = ours.abs().max()
        if bool(((ours - theirs).abs() > _HALF_THE_DIGITS * size).any()):
            raise NotPlainError(f"its gradient of {name} is not that of the norm")


def _output_types(
    module: nn.Module, form: Form, dtypes: Collection[torch.dtype]
) -> dict[Pair, torch.dtype]:
    """The output's element type for each pair of types that the form holds for.

    Raises:
        NotPlainError: It does not hold for one that the model uses.
    """
    has_vector = form.weight_name is not None or form.bias_name is not None
    found: dict[Pair, torch.dtype] = {}
    for dtype in _DTYPES:
        try:
            found[dtype, dtype if has_vector else None] = _check_outputs(module, form, dtype)
        except NotPlainError:
            if dtype in dtypes:
                raise
    for dtype, other in itertools.permutations(_DTYPES, 2) if has_vector else ():
        try:
            sample = _Sample(module, form, dtype, other)
            roundings = _roundings(module, form, dtype, other)
            outputs = [sample.output(turned=turned) for turned in (False, True)]
            for output in outputs:
                _check(sample, form, output, roundings)
        except NotPlainError:
            continue  # it refuses mixed types, or is less exact
        if outputs[0].dtype == outputs[1].dtype:
            found[dtype, other] = outputs[0].dtype
    return found


def _output_type(
    outputs: Mapping[Pair, torch.dtype], dtypes: Collection[torch.dtype]
) -> tuple[OutputType, tuple[Pair, ...]]:
    """The rule for the output's type that holds for most pairs, and these pairs.

    Raises:
        NotPlainError: None holds for all types that the model uses.
    """
    held = {
        rule: tuple(pair for pair, output in outputs.items() if rule.of(*pair) == output)
        for rule in OutputType
    }
    best = max(held, key=lambda rule: len(held[rule]))
    if any(pair not in held[best] for pair in outputs if {*pair} <= {*dtypes, None}):
        raise NotPlainError("its output's element type follows none of the known rules")
    wide = tuple(
        (torch.float64, None if other is None else torch.float64)
        for dtype, other in held[best]
        if dtype == torch.float32 == (other or dtype)
    )
    return best, (*held[best], *wide)


def _order(module: nn.Module, form: Form) -> Order:
    """The rule for the output's order in memory that holds for all orders of the input."""
    left = list(Order)
    sample = _Sample(module, form, torch.float32)
    plain, turned = sample.input(), sample.input(turned=True)
    for input in (plain, turned, plain.mT.contiguous().mT):
        with torch.no_grad():
            output = _run(sample.module, input)
        _check(sample, form, output)
        left = [o for o in left if o.strides(input, form.channels_first) == output.stride()]
    if not left:
        raise NotPlainError("its output's order in memory follows none of the known rules")
    return left[0]


def _autocast(module: nn.Module, form: Form, device: str) -> Autocast:
    """What autocast changes, tried on tensors without memory: so no GPU is needed."""
    dtype = torch.bfloat16
    outputs: dict[Pair, torch.dtype] = {}
    for pair in form.pairs or ():
        if torch.float64 in pair or torch.float16 in pair:
            continue
        with effects.quiet(), FakeTensorMode(), torch.no_grad(), _autocast_on(device, dtype):
            sample = stand_in(module, type(module), _empty_vectors(module, pair[1], device))
            x = torch.empty(_shape(form), dtype=pair[0], device=device)
            try:
                outputs[pair] = _run(sample, x).dtype
            except NotPlainError:
                return Autocast.UNKNOWN
    if all(form.output_type.of(*pair) == output for pair, output in outputs.items()):
        rule = Autocast.NOTHING
    elif set(outputs.values()) == {torch.float32}:
        rule = Autocast.WIDENS
    elif set(outputs.values()) == {dtype}:
        rule = Autocast.CASTS
    else:
        return Autocast.UNKNOWN
    return rule if _holds_under_autocast(module, form, device) else Autocast.UNKNOWN


def _holds_under_autocast(module: nn.Module, form: Form, device: str) -> bool:
    """Whether the values are the form's, on the CPU, where the module is told that autocast is on.

    On the CPU, autocast may round in other places than on a GPU: to bf16, a few times.
    """
    sample = _Sample(module, form, torch.bfloat16)
    modes = [_autocast_on("cpu", torch.bfloat16)]
    modes += [_autocast_on("cuda", torch.bfloat16)] if device == "cuda" else []
    try:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            output = sample.output()
        _check(sample, form, output.bfloat16(), _ROUNDINGS_OF_AUTOCAST)
    except NotPlainError:
        return False
    return True


@contextlib.contextmanager
def _autocast_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """``torch.autocast`` refuses where there is no GPU."""
    before = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    _set_autocast(device, True, dtype)
    try:
        yield
    finally:
        _set_autocast(device, *before)


def _set_autocast(device: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.clear_autocast_cache()


def _arrays(sample: _Sample, form: Form) -> tuple[Mapping[str, np.ndarray | None], float]:
    """What the judge takes for a form of ours, and the weight's offset."""
    named = _vectors(sample.module)
    weight, bias = (
        None if name is None else named[name].detach()
        for name in (form.weight_name, form.bias_name)
    )
    weight, bias, offset = form.scaling(weight, bias, form.normalized_shape, sample.rows)
    tensors = {
        name: None if tensor is None else tensor.contiguous()
        for name, tensor in (("input", sample.rows), ("weight", weight), ("bias", bias))
    }
    return interop.views(None, tensors), offset  # type: ignore[return-value]
