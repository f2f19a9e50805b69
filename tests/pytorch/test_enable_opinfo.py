"""PyTorch's own samples of norms with our kernels in place of its own, as its own tests run them.

On the CPU all sizes are ours here, and RMS norms are PyTorch's: there is no kernel to replace. With
``-rP``, each test says how many calls were whose.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from norm_support import FORMS, assert_gradients_right, gradients_of
from opinfo_samples import FUNCTIONS, NATIVE, RMS_NORM, SAMPLES, Sample
from torch import Tensor
from torch_support import TORCH_DTYPES

import iree_lnbwd.torch as lnbwd

every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=str)
with_numbers = pytest.mark.parametrize(
    "sample", [sample for sample in SAMPLES if sample.is_a_number], ids=str
)
NO_ELEMENTS = "PyTorch's kernel alone takes such arguments"
# Raised inside PyTorch 2.13.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("enable_ends"),
]


def assert_ours(sample: Sample, device: str) -> None:
    """All calls were ours that could be."""
    status = lnbwd.status()
    print(f"{sample}: {status.ours} calls ours, {status.pytorchs} PyTorch's")
    reasons = {each.reason for each in status.calls}
    if sample.name == RMS_NORM and device == "cpu":
        assert not reasons
    else:
        assert reasons == ({NO_ELEMENTS} if 0 in sample.shape else {None})


def of_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.drawn
@every_sample
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_forward_and_backward(sample: Sample, dtype: str, device: str) -> None:
    """Values are PyTorch's, within its own tolerance. Gradients are judged: its own are coarser."""
    tensors = sample.tensors(TORCH_DTYPES[dtype], device)
    expected = sample(*tensors)
    with lnbwd.enabled(forwards=True):
        outputs = sample(*tensors)
        output = of_tuple(outputs)[0]
        reached = (output.detach().cos(),)
        given = ("input", *itertools.compress(("weight", "bias"), sample.parameters))
        named = dict(zip(given, tensors, strict=True))
        gradients = gradients_of((output,), named, reached)
    torch.testing.assert_close(outputs, expected, equal_nan=True)
    form = FORMS["rms_norm" if sample.name == RMS_NORM else "layer_norm"]
    assert_gradients_right(form, named, sample.dims, reached, gradients, eps=sample.given_eps)
    assert_ours(sample, device)


@pytest.mark.drawn
@with_numbers
def test_derivatives_of_all_orders(sample: Sample, device: str) -> None:
    """Against finite differences, in reverse and forward mode, batched and not."""
    tensors = sample.tensors(torch.float64, device)
    # PyTorch's OpInfo of native_layer_norm has no forward mode.
    modes = (
        {}
        if sample.name == NATIVE
        else {"check_forward_ad": True, "check_batched_forward_grad": True}
    )
    with lnbwd.enabled(forwards=True):
        assert torch.autograd.gradcheck(sample, tensors, check_batched_grad=True, **modes)
        # PyTorch's own is wrong of a bias without a weight (pytorch#79705).
        if sample.parameters != (False, True):
            assert torch.autograd.gradgradcheck(sample, tensors, check_batched_grad=True)
    assert_ours(sample, device)


@with_numbers
def test_batches_of_samples(sample: Sample, device: str) -> None:
    """``vmap`` of values and gradients is a loop of them."""
    batch, *parameters = (t.detach() for t in sample.tensors(torch.float64, device, batch=(3,)))
    each = tuple(range(1 + len(parameters)))

    def loss(*tensors: Tensor) -> Tensor:
        outputs = of_tuple(sample(*tensors))
        return torch.stack([output.square().sum() for output in outputs]).sum()

    of_one = torch.func.grad_and_value(loss, each)
    expected = [of_one(row, *parameters) for row in batch]
    with lnbwd.enabled(forwards=True):
        found = torch.vmap(of_one, (0, *(None for _ in parameters)))(batch, *parameters)
    for index, (gradients, value) in enumerate(expected):
        torch.testing.assert_close(found[1][index], value)
        torch.testing.assert_close(tuple(g[index] for g in found[0]), gradients)
    if sample.name == RMS_NORM:
        assert not lnbwd.status().calls  # under torch.func PyTorch takes it apart
    else:
        assert_ours(sample, device)


@pytest.mark.drawn
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.name in (NATIVE, RMS_NORM)], ids=str)
def test_opcheck_of_the_operators(sample: Sample, device: str) -> None:
    """PyTorch's own, as their schemas, fake tensors and AOTAutograd see them."""
    tensors = sample.tensors(torch.float32, device)
    rest = iter(tensors[1:])
    given = [next(rest) if there else None for there in sample.parameters]
    operator = torch.ops.aten.native_layer_norm.default
    if sample.name == RMS_NORM:
        operator, given = torch.ops.aten._fused_rms_norm.default, given[:1]
    with lnbwd.enabled(forwards=True):
        torch.library.opcheck(operator, (tensors[0], list(sample.dims), *given, sample.given_eps))
    if sample.is_a_number:
        assert_ours(sample, device)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_samples_are_pytorchs(name: str) -> None:
    """The table says what that of this PyTorch does."""
    reason = "PyTorch's OpInfos cannot be imported"
    pytest.importorskip("expecttest", reason=reason)
    invocations = pytest.importorskip(
        "torch.testing._internal.common_methods_invocations", reason=reason
    )
    (info,) = (
        info for info in invocations.op_db if info.name == name and not info.variant_test_name
    )

    def of(theirs: Any) -> Sample:
        dims, given = theirs.args[0], list(theirs.args[1:])
        eps = theirs.kwargs.get("eps")
        if name == NATIVE:
            eps = given.pop()
        weight, bias, *_ = (*given, None, None)
        is_default = eps == 1e-5
        there = (weight is not None, bias is not None)
        return Sample(name, tuple(theirs.input.shape), dims, None if is_default else eps, there)

    theirs = [of(sample) for sample in info.sample_inputs("cpu", torch.float32)]
    assert theirs == [sample for sample in SAMPLES if sample.name == name]
