"""Finds the norm that a module computes, by running its forward on samples.

A module has a form if on the samples, in f32, f16 and bf16, its output is as far from the f64
reference as that form may be, by the same tolerance that this package's own outputs are held to.
That tolerance allows for one rounding to the output's type. Classes of models round up to twice
more: Llama's rounds the normalized row, and some round before they add the bias. So each element
may differ by two units of roundoff of ``xhat * weight`` more. A replaced module may thus differ
from what it was in the last bit or two of half types, and is the one with fewer roundings.

The gradients must be the form's, too. No derivative is missing if they agree to half the digits of
f32: rounding, in whatever order sums are added, is far below that, and a term of the formula far
above. f64 is not tried: classes that compute in f32 lose its precision, and replaced ones do not.

All that the forward reads from the module must be constant, but for what a form reads at each call.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from iree_lnbwd.arguments import bind
from iree_lnbwd.dtypes import DTYPES, name_of
from iree_lnbwd.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.runtime.frameworks import interop
from iree_lnbwd.torch import aten
from iree_lnbwd.torch.replacement import constants, shards
from iree_lnbwd.torch.replacement.classes import own_class, parameter_names, stand_in
from iree_lnbwd.torch.replacement.form import Form, Order, OutputType
from iree_lnbwd.torch.replacement.watched import NotPlainError, notes_of, watched_class
from iree_lnbwd.verification.judge import compare, judge

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, torch.finfo(torch.float32).eps)
# Of the rows: from much above to much below each eps that is usual, by its root.
_SCALES = (1.0, 4.0, 0.25, 1e-2, 1e-3, 1e-4, 1e-6, 0.0)
_MEANS = (0.0, 1.0, -0.5, 0.0, 1e-3, 0.0, 0.0, 0.25)
_LEADING = (2, 2, 2)  # as images have
_OTHER_LEADING = ((8,), (2, 4))
_HALF_THE_DIGITS = 2.0**-12  # of f32
_RAISED = "its forward raised"
_MOST_COLUMNS = 1 << 18  # samples have 8 rows


class Outcome(NamedTuple):
    """What was found of a module.

    Attributes:
        form: The norm that it computes; None if it is none.
        reason: Why it is none.
        read: The attributes that its forward read until that was found, and the keys of their
            values (see `constants`). It holds of all modules where these are equal.
    """

    form: Form | None
    reason: str | None
    read: Mapping[str, Hashable]

    def holds_of(self, module: nn.Module) -> bool:
        """Whether another module of the class, whose parameters have these shapes, is the same."""
        return all(_key(module, name) == value for name, value in self.read.items())


def _key(module: nn.Module, name: str) -> Hashable:
    """Of an attribute, which is not got: that could compute it. Of what may change, a new one."""
    try:
        return constants.key(vars(module).get(name, constants.ABSENT))
    except constants.NotConstantError:
        return object()


def find(module: nn.Module, shapes: Mapping[str, tuple[int, ...] | None]) -> Outcome:
    """The form of a module, whose parameters are not read: they may be sharded or have no memory.

    Args:
        module: `check` let it pass.
        shapes: Those of its parameters.
    """
    # Whatever the caller's defaults and modes are.
    with (
        torch.device("cpu"),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        form, reason, read = None, None, set[str]()
        try:
            watched = stand_in(
                module,
                watched_class(own_class(module)),
                {name: _without_memory(module, name, shape) for name, shape in shapes.items()},
            )
            try:
                form = _find(watched)
            finally:
                there = {name for name, shape in shapes.items() if shape is not None}
                read = notes_of(watched).read - there
        except NotPlainError as error:
            reason = str(error)
    if form is not None:
        form = replace(form, fixed=frozenset(read - {form.eps_name, form.shape_name}))
    return Outcome(form, reason, {name: _key(module, name) for name in read})


def _find(module: nn.Module) -> Form:
    candidates = tuple(_candidates(module))
    if not candidates:
        raise NotPlainError("no width: it has no parameter and no normalized_shape")
    first = candidates[0]
    if 1 in first.normalized_shape or 0 in first.normalized_shape:
        # Of one element, it would be multiplied with rows of any length.
        raise NotPlainError(f"its parameters have shape {first.normalized_shape}")
    if math.prod(first.normalized_shape) > _MOST_COLUMNS:
        raise NotPlainError(f"its rows have more than {_MOST_COLUMNS} elements")
    reasons = []
    for channels_first in (False, True)[: 1 + (len(first.normalized_shape) == 1)]:
        try:
            found = _best(module, [replace(c, channels_first=channels_first) for c in candidates])
        except NotPlainError as error:
            reasons.append(str(error))
            continue
        found = replace(
            found,
            argument=first.argument,
            shape_name=_shape_name(module, found),
            output_type=_output_type(module, found),
            order=_order(module, found),
        )
        for dtype in _DTYPES:
            _check_outputs(module, found, dtype)
        _check_gradients(module, found)
        return replace(found, is_cast_by_autocast=_is_cast_by_autocast(module, found))
    # Of a module that takes channels first, that it does not take them last says nothing.
    ran = (reason for reason in reasons if not reason.startswith(_RAISED))
    raise NotPlainError(next(ran, reasons[0]))


def check(module: nn.Module) -> Mapping[str, tuple[int, ...] | None]:
    """Expects what every norm is, before anything is run.

    Returns:
        The shapes of the parameters, by name; None of one that is not there.

    Raises:
        NotPlainError: The module is something else.
    """
    if (holder := shards.holder(module)) is not None:
        raise NotPlainError(f"{holder} holds parts of its parameters; replace norms before that")
    if any(True for _ in module.buffers(recurse=False)):
        raise NotPlainError("it has buffers")
    if any(name != "parametrizations" for name, _ in module.named_children()):
        raise NotPlainError("it has modules of its own")
    arguments = _arguments(module)
    if len(arguments) != 1:
        raise NotPlainError(f"its forward takes {len(arguments)} arguments, expected 1")
    if any(map(is_lazy, module.parameters())):
        raise NotPlainError("its parameters are not initialized yet")
    with torch.no_grad():
        parameters = {name: getattr(module, name) for name in parameter_names(module)}
    return {name: None if p is None else tuple(p.shape) for name, p in parameters.items()}


def _without_memory(
    module: nn.Module, name: str, shape: tuple[int, ...] | None
) -> nn.Parameter | None:
    """In place of a parameter."""
    if shape is None:
        return None
    own = module._parameters.get(name)  # of another one, parametrizations compute it
    return nn.Parameter(
        torch.empty(shape, device="meta"), requires_grad=own is None or own.requires_grad
    )


def _arguments(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(own_class(module).forward).parameters)[1:]
    except (TypeError, ValueError) as error:
        raise NotPlainError("its forward does not say which arguments it takes") from error


def _candidates(module: nn.Module) -> Iterator[Form]:
    """All forms that the parameters and attributes of a module allow."""
    there = [name for name, parameter in module._parameters.items() if parameter is not None]
    shapes = {tuple(getattr(module, name).shape) for name in there}
    if not there:
        shapes = {dims} if (dims := _normalized_shape(module)) else set()
    if len(shapes) > 1 or len(there) > 2:
        raise NotPlainError(f"expected at most two parameters of one shape, got {len(there)}")
    attributes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, float) and value >= 0
    }
    named = sorted(attributes.items(), key=lambda item: "eps" not in item[0])  # of equal ones
    epsilons = [*((v, n) for n, v in named), *((eps, None) for eps in _USUAL_EPS)]
    weight_and_bias = (*there, None, None)[:2]
    roles = dict.fromkeys(itertools.permutations(weight_and_bias, 2))
    (argument,) = _arguments(module)
    for dims in shapes:
        for (weight, bias), (eps, eps_name) in itertools.product(roles, epsilons):
            for op in (LAYER_NORM, RMS_NORM) if bias is None else (LAYER_NORM,):
                for offset in (0.0, 1.0) if weight is not None else (0.0,):
                    yield Form(op, dims, eps, eps_name, weight, bias, offset, argument=argument)


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
    rows = candidates[0]
    wide = {name: parameter.double() for name, parameter in sample.parameters.items()}

    def distance(form: Form) -> float:
        """Relative to the largest element of each row."""
        weight, bias = (
            None if name is None else wide[name] for name in (form.weight_name, form.bias_name)
        )
        x = sample.rows.double()
        if weight is not None:
            weight = weight + form.weight_offset
        expected, *_ = aten.normalized(
            form.op, x, weight, bias, form.normalized_shape, form.eps, 0.0
        )
        apart = (_as_rows(output, rows).double() - expected).abs().flatten(1).amax(1)
        size = expected.abs().flatten(1).amax(1).clamp(min=1e-300)
        return float(torch.nan_to_num(apart / size, nan=np.inf).max())

    best = min(candidates, key=distance)
    _check(sample, best, output)
    return best


class _Sample:
    """Random rows and parameters for a module, and the module with these parameters.

    Attributes:
        parameters: By name.
        rows: [rows, *normalized_shape].
    """

    def __init__(
        self,
        module: nn.Module,
        form: Form,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._form = form

        def make(parameter: Tensor) -> Tensor:
            shape, generator = parameter.shape, self._generator
            values = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float32)
            return values.to(dtype if weight_dtype is None else weight_dtype)

        made = {
            name: None if p is None else nn.Parameter(make(p), requires_grad=p.requires_grad)
            for name, p in module._parameters.items()
        }
        self.module = stand_in(module, type(module), made)
        self.parameters = {name: p.detach() for name, p in self.module.named_parameters()}
        rows = self.random(len(_SCALES), *form.normalized_shape)
        scales, means = (
            torch.tensor(values, dtype=torch.float32).reshape(
                -1, *(1 for _ in form.normalized_shape)
            )
            for values in (_SCALES, _MEANS)
        )
        self.rows = (rows * scales + means).to(dtype)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers in f32."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float32)

    def input(self, leading: Sequence[int] = _LEADING, *, turned: bool = False) -> Tensor:
        """The rows as the module takes them, with dimensions other than the normalized ones.

        Args:
            leading: These dimensions.
            turned: Whether they lie in another order in memory: those of images channels last.
        """
        x = self.rows.reshape(*leading, *self._form.normalized_shape)
        if self._form.channels_first:
            x = x.movedim(-1, 1)
            return x.clone() if turned else x.contiguous()
        return x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x.clone()

    def output(
        self,
        leading: Sequence[int] = _LEADING,
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
    read = (input, *module.parameters())
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
        raise NotPlainError("its output is no tensor of the input's shape")
    if versions != [tensor._version for tensor in read]:
        raise NotPlainError("its forward changes its input or its parameters")
    return output


def _as_rows(tensor: Tensor, form: Form) -> Tensor:
    if form.channels_first:
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(-1, *form.normalized_shape)


def _check_outputs(module: nn.Module, form: Form, dtype: torch.dtype) -> None:
    sample = _Sample(module, form, dtype)
    for training, turned in itertools.product((True, False), (False, True)):
        _check(sample, form, sample.output(training=training, turned=turned))
    if form.channels_first and _takes_sequences(sample, form):
        raise NotPlainError("it normalizes another dimension of sequences than of images")
    for leading in _OTHER_LEADING:
        try:
            output = sample.output(leading)
        except NotPlainError:
            continue  # it does not take so few dimensions
        _check(sample, form, output)


def _takes_sequences(sample: _Sample, form: Form) -> bool:
    """Whether a module takes channels last, too, in inputs with fewer dimensions."""
    (columns,) = form.normalized_shape
    leading = (2, 4) if columns != 4 else (4, 2)
    try:
        _run(sample.module, sample.rows.reshape(*leading, columns))
    except NotPlainError:
        return False
    return True


def _check(sample: _Sample, form: Form, output: Tensor) -> None:
    """Expects an output within its tolerance."""
    given = _arrays(sample, form)
    judged = judge(bind(form.op.name, given, form.normalized_shape, eps=form.eps,
                        weight_offset=form.weight_offset))  # fmt: skip
    expected, tolerance = judged.expected["output"], judged.tolerance["output"]
    got = interop.to_numpy("output", _as_rows(output, form).contiguous())
    name = name_of(got.dtype)
    if name is None:
        raise NotPlainError(f"its output has another element type: {output.dtype}")
    scaled = expected if given["bias"] is None else expected - given["bias"].astype(np.float64)
    roundoff = DTYPES[name].unit_roundoff
    more = 2 * (roundoff * np.abs(scaled) + DTYPES[name].smallest_subnormal)
    compared = compare(got, expected, tolerance + more)
    if not compared.passed:
        raise NotPlainError(
            f"its output in {name} is {compared.ratio:.3g} times its tolerance from "
            f"{'a layer norm' if form.op.centres else 'an RMS norm'}'s"
        )


def _check_gradients(module: nn.Module, form: Form) -> None:
    """Expects the gradients of the form, in f32."""
    sample = _Sample(module, form, torch.float32)
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
        weight, bias = (
            None if name is None else wide[name] for name in (form.weight_name, form.bias_name)
        )
        y, *_ = aten.normalized(
            form.op, _as_rows(wide["input"], form),
            weight, bias, form.normalized_shape, form.eps, form.weight_offset,
        )  # fmt: skip
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


def _output_type(module: nn.Module, form: Form) -> OutputType:
    """The rule for the output's type that holds for all pairs of an input's and a weight's."""
    left = list(OutputType)
    pairs = itertools.product(_DTYPES, _DTYPES if form.weight_name is not None else (None,))
    for input, weight in pairs:
        sample = _Sample(module, form, input, weight)
        for turned in (False, True):
            try:
                output = sample.output(turned=turned)
            except NotPlainError:
                if weight in (None, input):
                    raise
                continue  # it refuses mixed types, so any rule does
            left = [rule for rule in left if rule.of(input, weight) == output.dtype]
    if not left:
        raise NotPlainError("its output's element type follows none of the known rules")
    return left[0]


def _order(module: nn.Module, form: Form) -> Order:
    """The rule for the output's order in memory that holds for all orders of the input."""
    left = list(Order)
    sample = _Sample(module, form, torch.float32)
    for turned in (False, True):
        input, output = sample.input(turned=turned), sample.output(turned=turned)
        left = [o for o in left if o.strides(input, form.channels_first) == output.stride()]
    if not left:
        raise NotPlainError("its output's order in memory follows none of the known rules")
    return left[0]


def _is_cast_by_autocast(module: nn.Module, form: Form) -> bool:
    """Whether autocast on GPUs widens the output; tried without a GPU, on tensors without memory.

    Raises:
        NotPlainError: It does something else.
    """
    dims = form.normalized_shape
    shape = (2, *dims, 2, 2) if form.channels_first else (*_LEADING, *dims)
    types = (torch.float32, torch.bfloat16)
    outputs = {}
    for input, weight in itertools.product(types, types if form.weight_name else (None,)):
        with FakeTensorMode(), torch.no_grad(), _autocast_on_gpus():
            made = {
                name: None
                if p is None
                else nn.Parameter(torch.empty(p.shape, dtype=weight, device="cuda"))
                for name, p in module._parameters.items()
            }
            sample = stand_in(module, type(module), made)
            with contextlib.suppress(NotPlainError):  # it refuses mixed types there
                x = torch.empty(shape, dtype=input, device="cuda")
                outputs[input, weight] = _run(sample, x).dtype
    if all(form.output_type.of(*types) == output for types, output in outputs.items()):
        return False
    if form.output_type is OutputType.INPUTS and set(outputs.values()) == {torch.float32}:
        return True
    raise NotPlainError("its output's element type under autocast follows none of the known rules")


@contextlib.contextmanager
def _autocast_on_gpus() -> Iterator[None]:
    """To bf16; ``torch.autocast`` refuses where there is no GPU."""
    before = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    _set_autocast(True, torch.bfloat16)
    try:
        yield
    finally:
        _set_autocast(*before)


def _set_autocast(enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    torch.clear_autocast_cache()


def _arrays(sample: _Sample, form: Form) -> Mapping[str, np.ndarray | None]:
    tensors = {
        "input": sample.rows,
        "weight": None if form.weight_name is None else sample.parameters[form.weight_name],
        "bias": None if form.bias_name is None else sample.parameters[form.bias_name],
    }
    return interop.views(None, tensors)  # type: ignore[return-value]
