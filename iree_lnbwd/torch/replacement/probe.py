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
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from iree_lnbwd.arguments import bind
from iree_lnbwd.dtypes import DTYPES, name_of
from iree_lnbwd.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.runtime.frameworks import interop
from iree_lnbwd.torch import aten
from iree_lnbwd.torch.replacement.classes import own_class, parameter_names, stand_in
from iree_lnbwd.torch.replacement.form import Form, OutputType
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


class NotPlainError(Exception):
    """A module computes no norm that this package has; the message says why."""


def find(module: nn.Module) -> Form:
    """The form of a module, whose parameters are not read: they may be sharded or have no memory.

    Raises:
        NotPlainError: It has none.
    """
    check(module)
    with torch.device("cpu"):  # whatever the default is
        return _find(module)


def _find(module: nn.Module) -> Form:
    candidates = tuple(_candidates(module))
    if not candidates:
        raise NotPlainError("no width: it has no parameter and no normalized_shape")
    first = candidates[0]
    reasons = []
    for channels_first in (False, True)[: 1 + (len(first.normalized_shape) == 1)]:
        try:
            found = _best(module, [replace(c, channels_first=channels_first) for c in candidates])
        except NotPlainError as error:
            reasons.append(str(error))
            continue
        found = replace(found, argument=first.argument, output_type=_output_type(module, found))
        for dtype in _DTYPES:
            _check_outputs(module, found, dtype)
        _check_gradients(module, found)
        return replace(found, is_cast_by_autocast=_is_cast_by_autocast(module, found))
    # Of a module that takes channels first, that it does not take them last says nothing.
    ran = (reason for reason in reasons if not reason.startswith(_RAISED))
    raise NotPlainError(next(ran, reasons[0]))


def check(module: nn.Module) -> None:
    """Expects what every norm is, before anything is run.

    Raises:
        NotPlainError: The module is something else.
    """
    if any(True for _ in module.buffers(recurse=False)):
        raise NotPlainError("it has buffers")
    if any(name != "parametrizations" for name, _ in module.named_children()):
        raise NotPlainError("it has modules of its own")
    arguments = _arguments(module)
    if len(arguments) != 1:
        raise NotPlainError(f"its forward takes {len(arguments)} arguments, expected 1")


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(own_class(module).forward).parameters)[1:]


def _candidates(module: nn.Module) -> Iterator[Form]:
    """All forms that the parameters and attributes of a module allow."""
    there = [n for n in parameter_names(module) if getattr(module, n) is not None]
    shapes = {tuple(getattr(module, name).shape) for name in there}
    if not there:
        dims = getattr(module, "normalized_shape", ())
        shapes = {(dims,) if isinstance(dims, int) else tuple(dims)} if dims else set()
    if len(shapes) > 1 or len(there) > 2:
        raise NotPlainError(f"expected at most two parameters of one shape, got {len(there)}")
    attributes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, float) and value >= 0
    }
    constants = [eps for eps in _USUAL_EPS if eps not in attributes.values()]
    named = sorted(attributes.items(), key=lambda item: "eps" not in item[0])  # of equal ones
    epsilons = [*((v, n) for n, v in named), *((eps, None) for eps in constants)]
    weight_and_bias = (*there, None, None)[:2]
    roles = dict.fromkeys(itertools.permutations(weight_and_bias, 2))
    (argument,) = _arguments(module)
    for dims in shapes:
        for (weight, bias), (eps, eps_name) in itertools.product(roles, epsilons):
            for op in (LAYER_NORM, RMS_NORM) if bias is None else (LAYER_NORM,):
                for offset in (0.0, 1.0) if weight is not None else (0.0,):
                    yield Form(op, dims, eps, eps_name, weight, bias, offset, argument=argument)


def _best(module: nn.Module, candidates: Sequence[Form]) -> Form:
    """The candidate that a module's f32 outputs are nearest to, if they are near enough."""
    sample = _Sample(module, candidates[0], torch.float32)
    output = sample.output()
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

        self.module = stand_in(module, own_class(module), make)
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

    def input(self, leading: Sequence[int]) -> Tensor:
        """The rows as the module takes them, with dimensions other than the normalized ones."""
        x = self.rows.reshape(*leading, *self._form.normalized_shape)
        return x.movedim(-1, 1).contiguous() if self._form.channels_first else x

    def output(self, leading: Sequence[int] = _LEADING, *, training: bool = True) -> Tensor:
        """Of the module, without its hooks."""
        with torch.no_grad():
            return _run(self.module.train(training), self.input(leading))


def _run(module: nn.Module, input: Tensor) -> Tensor:
    """What a module's forward returns.

    Raises:
        NotPlainError: It raised an error, or returned something else than a tensor of that shape.
    """
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
            warnings.simplefilter("ignore")  # of types that are slow together
            output = module.forward(input)
    except Exception as error:  # code that is not ours
        said = str(error).strip().splitlines() or [""]
        raise NotPlainError(f"{_RAISED} {type(error).__name__}: {said[0][:120]}") from error
    if not isinstance(output, Tensor) or output.shape != input.shape:
        raise NotPlainError("its output is no tensor of the input's shape")
    return output


def _as_rows(tensor: Tensor, form: Form) -> Tensor:
    if form.channels_first:
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(-1, *form.normalized_shape)


def _check_outputs(module: nn.Module, form: Form, dtype: torch.dtype) -> None:
    sample = _Sample(module, form, dtype)
    for training in (True, False):
        _check(sample, form, sample.output(training=training))
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
    x = sample.input(_LEADING).clone().requires_grad_()
    with torch.enable_grad():
        grad_output = sample.random(*x.shape)
        asked = {"input": x, **dict(sample.module.named_parameters())}
        for tensor in asked.values():
            tensor.requires_grad_()
        output = _run(sample.module, x)
        if not output.requires_grad:
            raise NotPlainError("its output has no gradient")
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
        try:
            output = _Sample(module, form, input, weight).output()
        except NotPlainError:
            if weight in (None, input):
                raise
            continue  # it refuses mixed types, so any rule does
        left = [rule for rule in left if rule.of(input, weight) == output.dtype]
    if not left:
        raise NotPlainError("its output's element type follows none of the known rules")
    return left[0]


def _is_cast_by_autocast(module: nn.Module, form: Form) -> bool:
    """Whether autocast on GPUs widens the output; tried without a GPU, on tensors without memory.

    Raises:
        NotPlainError: It does something else.
    """
    dims = form.normalized_shape
    shape = (2, *dims, 2, 2) if form.channels_first else (*_LEADING, *dims)
    # Of a parametrized one, parameters are computed, which is not for this mode.
    plain = stand_in(module, own_class(module), lambda parameter: torch.empty(parameter.shape))
    types = (torch.float32, torch.bfloat16)
    outputs = {}
    for input, weight in itertools.product(types, types if form.weight_name else (None,)):

        def make(parameter: Tensor, dtype: torch.dtype | None = weight) -> Tensor:
            return torch.empty(parameter.shape, dtype=dtype, device="cuda")

        with FakeTensorMode(), torch.no_grad(), _autocast_on_gpus():
            sample = stand_in(plain, own_class(plain), make)
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
