"""The element types of a norm's output, and what autocast changes about them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from iree_lnbwd.torch.replacement import effects
from iree_lnbwd.torch.replacement.checks import check_outputs, roundings_of
from iree_lnbwd.torch.replacement.classes import stand_in
from iree_lnbwd.torch.replacement.form import Autocast, Form, OutputType, Types
from iree_lnbwd.torch.replacement.judging import check_output
from iree_lnbwd.torch.replacement.sampling import Sample, run
from iree_lnbwd.torch.replacement.tracing import empty_inputs, empty_vectors
from iree_lnbwd.torch.replacement.watched import NotPlainError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROUNDINGS_OF_AUTOCAST = 6


def output_types_of(
    module: nn.Module, form: Form, dtypes: Collection[torch.dtype]
) -> dict[Types, torch.dtype]:
    """The output's element type for all types of an input and a weight that the form holds for.

    Raises:
        NotPlainError: It does not hold for one that the model uses.
    """
    has_vector = form.weight_name is not None or form.bias_name is not None
    of_gate = 0 if form.gate is None else 1
    found: dict[Types, torch.dtype] = {}
    for dtype in _DTYPES:
        same = (dtype, dtype if has_vector else None, *(dtype,) * of_gate)
        try:
            found[same] = check_outputs(module, form, dtype)
        except NotPlainError:
            if dtype in dtypes:
                raise
    mixed = (t for t in itertools.product(_DTYPES, repeat=2 + of_gate) if len({*t}) > 1)
    for types in mixed if has_vector else ():
        try:
            sample = Sample(module, form, *types)
            roundings = roundings_of(module, form, types)
            outputs = [sample.output(turned=turned) for turned in (False, True)]
            for output in outputs:
                check_output(sample, form, output, roundings)
        except NotPlainError:
            continue  # it refuses mixed types, or is less exact
        if outputs[0].dtype == outputs[1].dtype:
            found[types] = outputs[0].dtype
    return found


def output_type_of(
    outputs: Mapping[Types, torch.dtype], dtypes: Collection[torch.dtype]
) -> tuple[OutputType, tuple[Types, ...]]:
    """The rule for the output's type that holds for most of the types, and these.

    Raises:
        NotPlainError: None holds for all types that the model uses.
    """
    held = {
        rule: tuple(types for types, output in outputs.items() if rule.of(*types[:2]) == output)
        for rule in OutputType
    }
    best = max(held, key=lambda rule: len(held[rule]))
    if any(types not in held[best] for types in outputs if {*types} <= {*dtypes, None}):
        raise NotPlainError("its output's element type follows none of the known rules")
    wide = tuple(
        tuple(None if each is None else torch.float64 for each in types)
        for types in held[best]
        if {*types} <= {torch.float32, None}
    )
    return best, (*held[best], *wide)


def autocast_of(module: nn.Module, form: Form, device: str) -> Autocast:
    """What autocast changes, tried on tensors without memory: so no GPU is needed."""
    dtype = torch.bfloat16
    outputs: dict[Types, torch.dtype] = {}
    for types in form.types or ():
        if torch.float64 in types or torch.float16 in types:
            continue
        with effects.quiet(), FakeTensorMode(), torch.no_grad(), _autocast_on(device, dtype):
            sample = stand_in(module, type(module), empty_vectors(module, types[1], device))
            try:
                outputs[types] = run(sample, *empty_inputs(form, types, device)).dtype
            except NotPlainError:
                return Autocast.UNKNOWN
    if all(form.output_type.of(*types[:2]) == output for types, output in outputs.items()):
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
    sample = Sample(module, form, torch.bfloat16)
    modes = [_autocast_on("cpu", torch.bfloat16)]
    modes += [_autocast_on("cuda", torch.bfloat16)] if device == "cuda" else []
    try:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            output = sample.output()
        check_output(sample, form, output.bfloat16(), _ROUNDINGS_OF_AUTOCAST)
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
