"""Cases of `scripts/fuzz` that replace the norms of small random models.

A replaced norm computes what the module was: forward and backward are compared with the model as it
was, in f64, under the judge's tolerances. A module that is kept has its own bits.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fuzz_draw import EPS, OFFSETS, Case, Failure, array_of
from torch import Tensor, nn

from iree_lnbwd import reference
from iree_lnbwd.ops.arguments import Array, bind, rms_eps
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM, Op, names
from iree_lnbwd.torch.replacement.classes import ReplacedNorm

_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f64": torch.float64,
}
_FACTORS = 2048
_TWIST = 1.015625  # a factor that no plain norm has, and every element type does


class AnyNorm(nn.Module):
    """One class for many norms, told apart by what their attributes hold, as models have them."""

    def __init__(self, columns: int, op: Op, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns) + 1.0 - offset)
        self.bias = nn.Parameter(torch.randn(columns)) if op.centres else None
        self.eps, self.offset, self.centres = eps, offset, op.centres
        self.rounds_first = False
        # No parameter and no buffer; too long to be printed whole.
        self.factors = torch.ones(_FACTORS)

    def forward(self, x: Tensor) -> Tensor:
        """As Llama's, or Gemma's, or a layer norm in f32."""
        wide = x.double() if x.dtype == torch.float64 else x.float()
        if self.centres:
            wide = wide - wide.mean(-1, keepdim=True)
        xhat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.rounds_first:
            return (self.offset + self.weight) * xhat.to(x.dtype)
        output = (self.offset + self.weight.to(wide.dtype)) * xhat
        output = output * self.factors[_FACTORS // 2].item()
        if self.bias is not None:
            output = output + self.bias.to(wide.dtype)
        return output.to(x.dtype)


class OfImages(AnyNorm):
    """The same with channels first."""

    def forward(self, x: Tensor) -> Tensor:
        """Over dimension 1."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@dataclass(frozen=True)
class Ran:
    """One norm in a run of a model: its tensors, and the gradients of a backward."""

    input: Tensor
    output: Tensor
    parameters: Mapping[str, Tensor]

    def arrays(self, channels_first: bool) -> dict[str, Array]:
        """What a backward takes, in the order of rows."""
        found = {"input": self.input, "output": self.output}
        found |= {"grad_input": self.input.grad, "grad_output": self.output.grad}
        if channels_first:
            found = {name: tensor.movedim(1, -1) for name, tensor in found.items()}
        found |= self.parameters
        found |= {f"grad_{name}": p.grad for name, p in self.parameters.items()}
        return {name: array_of(tensor) for name, tensor in found.items()}


def _draw_norm(case: Case, dims: tuple[int, ...]) -> nn.Module:
    """Of PyTorch's classes or of ours; some are no plain norms."""
    columns, eps = dims[-1], case.pick(*EPS[:2])
    kind = case.pick("layer", "rms", "any", "any", "images")
    if kind == "layer":
        norm: nn.Module = nn.LayerNorm(dims, eps, case.chance(0.8), bias=case.chance(0.7))
    elif kind == "rms":
        norm = nn.RMSNorm(dims, case.pick(None, eps), case.chance(0.8))
    else:
        cls = OfImages if kind == "images" else AnyNorm
        norm = cls(columns, case.pick(LAYER_NORM, RMS_NORM), eps, case.pick(*OFFSETS))
        norm.rounds_first = norm.bias is None and norm.offset == 0 and case.chance(0.5)
        if not norm.rounds_first and case.chance(0.25):
            _twist(norm)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0)
    return norm


def _twist(norm: AnyNorm) -> None:
    norm.factors[_FACTORS // 2] = _TWIST


def _has_twist(norm: nn.Module) -> bool:
    return isinstance(norm, AnyNorm) and _TWIST in norm.factors


def _draw_norms(case: Case, dims: tuple[int, ...]) -> dict[str, nn.Module]:
    """A few; two may differ in one number alone."""
    norms = [_draw_norm(case, dims) for _ in range(case.pick(1, 2, 3, 4))]
    if isinstance(norms[0], AnyNorm) and not norms[0].rounds_first and case.chance(0.5):
        norms.append(copy.deepcopy(norms[0]))
        if not _has_twist(norms[0]):
            _twist(norms[-1])
    return {f"n{number}": norm for number, norm in enumerate(norms)}


def _run(
    model: nn.ModuleDict, called: Mapping[str, Any], x: Tensor, seeds: Mapping[str, Tensor]
) -> dict[str, Ran]:
    """A forward through a chain of norms with skips, and a backward of each.

    Args:
        model: The norms.
        called: What is called for each: it, or it compiled.
        x: What the chain begins with.
        seeds: The gradient that reaches each norm's output.
    """
    stream, ran = x, {}
    for name, norm in model.items():
        input = stream.detach().clone().requires_grad_()
        output = called[name](input)
        output.retain_grad()
        ran[name] = Ran(input, output, dict(norm.named_parameters()))
        stream = 1.5 * stream + output
        output.backward(seeds[name])
    return ran


def _as_it_was(norm: nn.Module, dtype: str, replaced: Ran) -> dict[str, Array]:
    """What the module was computes in f64, from the same numbers."""
    exact = copy.deepcopy(norm).double()
    if isinstance(exact, nn.RMSNorm) and exact.eps is None:
        exact.eps = rms_eps(dtype)
    input = replaced.input.detach().double().requires_grad_()
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(replaced.parameters[name].double())
            parameter.grad = None
    output = exact(input)
    output.retain_grad()
    assert replaced.output.grad is not None
    output.backward(replaced.output.grad.double())
    ran = Ran(input, output, dict(exact.named_parameters()))
    return ran.arrays(isinstance(norm, OfImages))


def _expect_same(name: str, norm: nn.Module, dtype: str, ran: Ran) -> None:
    """A norm's output and gradients are, to the judge's tolerances, those of what it was."""
    expected = _as_it_was(norm, dtype, ran)
    got = ran.arrays(isinstance(norm, OfImages))
    centres = isinstance(norm, nn.LayerNorm) or (isinstance(norm, AnyNorm) and norm.centres)
    op = LAYER_NORM if centres else RMS_NORM
    eps: Any = norm.eps
    options: dict[str, Any] = {
        "normalized_shape": getattr(norm, "normalized_shape", (got["input"].shape[-1],)),
        "eps": rms_eps(dtype) if eps is None else eps,
        "weight_offset": getattr(norm, "offset", 0.0),
    }
    given = {argument: got[argument] for argument in names(op.arguments) if argument in got}
    forward = reference.judge(bind(op.name, given, **options))
    given |= {"grad_output": got["grad_output"]}
    found = {"output": forward.tolerance["output"]}
    backward = f"{op.name}_backward"
    masked = [f"grad_{argument}" for argument in ("input", "weight", "bias")[: 2 + op.centres]]
    mask = tuple(gradient in got for gradient in masked)
    bound = bind(backward, given, output_mask=mask, **options)
    found |= reference.judge(bound).tolerance
    for result, tolerance in found.items():
        if result not in got:
            continue
        if got[result].dtype != DTYPES[dtype].numpy:
            raise Failure(f"{name}: {result} is {got[result].dtype}, not {dtype}")
        comparison = reference.compare(got[result], expected[result], tolerance)
        if not comparison.passed:
            raise Failure(f"{name}: {result} is not what it was: {comparison}")


def replaced(case: Case) -> None:
    """A model before and after `replace_norms`, with another eps in between, and compiled."""
    dtype = case.pick(*_DTYPES)
    columns = case.pick(6, 32, 96, 257)
    dims = case.pick((columns,), (columns,), (4, columns))
    device = "cuda" if case.where == "gpu" else "cpu"
    torch.manual_seed(int(case.rng.integers(2**31)))
    drawn = _draw_norms(case, dims)
    case.said += [dtype, str(dims), *(type(norm).__name__ for norm in drawn.values())]
    model = nn.ModuleDict(drawn).to(device, _DTYPES[dtype])
    before = copy.deepcopy(model)
    case.call("torch.replace_norms", model=model)
    for name, norm in model.items():
        if isinstance(norm, ReplacedNorm) and _has_twist(norm):
            raise Failure(f"{name} was replaced, though it is no plain norm")
        if not isinstance(norm, ReplacedNorm) and isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            raise Failure(f"{name} was not replaced")
    called: dict[str, Any] = dict(model.items())
    if case.chance(0.2):
        case.said.append("aot_eager")
        torch._dynamo.reset()
        called = {name: torch.compile(norm, backend="aot_eager") for name, norm in called.items()}
    x = torch.randn(2, columns, *dims).to(device, _DTYPES[dtype])
    seeds = {name: torch.randn_like(x) for name in drawn}
    own = {name: norm.eps for name, norm in before.items()}
    for eps in (own, dict.fromkeys(own, case.pick(*EPS)), own):
        for norms in (model, before):
            norms.zero_grad()
            for name, norm in norms.items():
                norm.eps = eps[name]
        for name, ran in _run(model, called, x, seeds).items():
            if isinstance(model[name], ReplacedNorm):
                _expect_same(name, before[name], dtype, ran)
            elif not torch.equal(before[name](ran.input), ran.output):
                raise Failure(f"{name} was kept, and computes something else")
