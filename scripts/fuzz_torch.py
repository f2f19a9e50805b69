"""The cases of `scripts/fuzz` that call PyTorch's norms: as they are, compiled, captured, replaced.

Whatever the way, outputs and gradients are judged by the f64 reference. Two values of an option in
turn show that what is kept of one call does not answer for another.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from fuzz_draw import (
    EPS,
    OFFSETS,
    PUBLIC,
    Case,
    Failure,
    array_of,
    draw_arrays,
    draw_junk,
    draw_rows,
    draw_spec,
    draw_values,
    lay_out_tensor,
    lnbwd_torch,
    on_host,
    tensor_of,
)

import iree_lnbwd as lnbwd
from iree_lnbwd import reference
from iree_lnbwd.ops.arguments import Array, BoundCall, bind, results_of
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    GATED,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    OPS,
    OUTPUT,
    RESIDUAL_OUTPUT,
    RMS_NORM_BACKWARD,
    Element,
    Gate,
    Op,
    names,
)

_ORDER = ("input", "residual", "weight", "bias", "gate")
_OF_BINDING = ("eps", "weight_offset", "rows_per_set", "gate_first")  # options that results have
_BACKENDS = ("aot_eager", "inductor") if shutil.which("c++") else ("aot_eager",)

Layout = Callable[[Any], Any]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """A call of one of PyTorch's norms, and the gradients that reach its results.

    Attributes:
        op: What it computes.
        tensors: By the names of its arguments; None where there is none. Those that require
            gradients are differentiated.
        reached: The gradient of the output, and, where there is a sum, of the sum or None.
        options: The other arguments.
    """

    op: Op
    tensors: Mapping[str, Any]
    reached: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def has_sum(self) -> bool:
        """Whether it normalizes ``input + residual``."""
        return self.tensors.get("residual") is not None

    @property
    def has_gate(self) -> bool:
        """Whether there is a gate."""
        return self.tensors.get("gate") is not None

    @property
    def has_sets(self) -> bool:
        """Whether its weight has sets."""
        weight, dims = self.tensors.get("weight"), self.options["normalized_shape"]
        return weight is not None and weight.ndim > len(dims)

    @property
    def function(self) -> str:
        """By which it is public."""
        kind = "gated_" if self.has_gate else "add_" if self.has_sum else ""
        return f"torch.{kind}{self.op.name}"

    @property
    def arguments(self) -> dict[str, Any]:
        """All that it takes."""
        left_out = {"memory_efficient"} if self.has_gate else {"gate_first"}
        if self.has_sum or self.has_gate or not self.op.centres:
            left_out.add("own_forward")
        options = {name: value for name, value in self.options.items() if name not in left_out}
        given = {name: tensor for name, tensor in self.tensors.items() if tensor is not None}
        return given | options

    @property
    def own_forward(self) -> bool:
        """Whether the output is this package's, and not PyTorch's."""
        asked = ("own_forward", "memory_efficient", "weight_offset")
        is_ours = self.has_sum or self.has_gate or self.has_sets or not self.op.centres
        return is_ours or any(self.options[name] for name in asked)

    @property
    def backward(self) -> Op:
        """The op of its gradients."""
        name = f"{self.op.name}_backward"
        return OPS[name] if self.op.gate is None else GATED[self.op.gate][name]

    @property
    def leaves(self) -> dict[str, Any]:
        """What is differentiated."""
        given = {name: t for name, t in self.tensors.items() if t is not None}
        return {name: tensor for name, tensor in given.items() if tensor.requires_grad}

    def arrays(self) -> dict[str, Array]:
        """The values of the tensors, now."""
        return {name: array_of(t) for name, t in self.tensors.items() if t is not None}


Computed = tuple[tuple[Any, ...], dict[str, Any]]


def computed(call: Call, function: Function) -> Computed:
    """Its outputs, and the gradients by the names of what they are of."""
    found = function(**call.arguments)
    outputs = tuple(found) if call.has_sum else (found,)
    pairs = [(o, g) for o, g in zip(outputs, call.reached, strict=False) if g is not None]
    leaves = call.leaves
    gradients = torch.autograd.grad(
        [o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs]
    )
    return outputs, dict(zip(leaves, gradients, strict=True))


def judge(case: Case, call: Call, results: Computed, *, is_fused: bool = False) -> None:
    """They are right, by the values that the tensors have now.

    Args:
        case: The case.
        call: What was called.
        results: What came of it.
        is_fused: Whether a compiler may have made kernels of its own: one that computes the
            gradients of both terms of a sum, and rounds each of them once, or a forward's.
    """
    outputs, gradients = results
    given = call.arrays()
    options: dict[str, Any] = {name: call.options[name] for name in _OF_BINDING}
    dims = call.options["normalized_shape"]
    if call.own_forward:
        forward = bind(call.op.name, given, dims, **options)
        by_name = dict(zip((OUTPUT.name, RESIDUAL_OUTPUT.name), outputs, strict=False))
        case.judge(on_host(results_of(call.op, by_name)), forward, but=names(call.op.statistics))
    if call.options["memory_efficient"]:
        saved = getattr(lnbwd, call.op.name)(normalized_shape=dims, **options, **given)
        given |= {"output": array_of(outputs[0]), "rstd": saved.rstd}
    elif call.has_sum:
        given["input"] = _sum(given["input"], given["residual"])
    gradients = dict(gradients)
    if call.has_sum:
        of_sum, of_input = gradients.pop("residual", None), gradients.pop("input", None)
        if of_input is not None and not _is_cast(of_input, of_sum, is_fused):
            raise Failure("input: another gradient than that of residual")
        if of_sum is not None:
            gradients["input"] = of_sum
    if call.options["memory_efficient"]:
        del given["input"]
    given.pop("residual", None)
    of_output, of_residual = (*call.reached, None)[:2]
    given["grad_output"] = array_of(of_output)
    if of_residual is not None:
        given["grad_residual"] = array_of(of_residual)
    backward = call.backward
    masked = names(backward.gradients if given.get("bias") is not None else backward.masked)
    asked = {name: name.removeprefix("grad_") in gradients for name in masked}
    found = {n: gradients[n.removeprefix("grad_")] for n, wanted in asked.items() if wanted}
    bound = bind(backward.name, given, dims, tuple(asked.values()), **options)
    has_other_rstd = is_fused and call.options["memory_efficient"] and "grad_input" in found
    more_off = {"grad_input": _off_by_rstd(bound, forward)} if has_other_rstd else {}
    case.judge(on_host(results_of(backward, found)), bound, more_off=more_off)


def _off_by_rstd(backward: BoundCall, forward: BoundCall) -> Array:
    """How much further dx may be off, if its rstd is a compiler's and not the one that is judged.

    A compiler adds squares up in an order of its own, so its rstd is any that the forward's
    tolerance allows. From the output, rstd is a factor of dx, but for what is added to it, and of
    dx's error: where it is off by a part of itself, so are they, and then the sum is rounded.
    """
    assert backward.spec is not None
    of_forward, judged = reference.judge(forward), reference.judge(backward)
    rstd = backward.arrays["rstd"].reshape(of_forward.expected["rstd"].shape)
    apart = np.abs(rstd - of_forward.expected["rstd"]) + of_forward.tolerance["rstd"]
    dx = judged.expected["grad_input"]
    if "grad_residual" in backward.arrays:
        dx = dx - backward.arrays["grad_residual"].reshape(dx.shape)
    rounded = np.abs(dx) * (1 + DTYPES[backward.spec.dtype].unit_roundoff)
    off: Array = apart / np.abs(rstd) * (rounded + judged.tolerance["grad_input"])
    return off


def _sum(input: Array, residual: Array) -> Array:
    """Rounded to the type of the residual stream."""
    wide = DTYPES["f64" if input.dtype == np.float64 else "f32"].numpy
    total: Array = (input.astype(wide) + residual.astype(wide)).astype(residual.dtype)
    return total


def draw_call(case: Case, layout: Layout | None = None) -> Call:
    """A norm of PyTorch's, of any layouts or of one, and with any gradients asked for.

    Args:
        case: Draws it.
        layout: Of the tensors; None takes any.
    """
    spec = draw_spec(case, LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD, may_have_all=True)
    # A sum of another type is refused.
    keeps_output = spec.from_output and spec.residual_dtype in (None, spec.dtype)
    gate = None if spec.gate is None else Gate(spec.gate)
    has_bias = None if spec.family.atens_bias else spec.has_bias
    spec = dataclasses.replace(spec, from_output=False, has_bias=has_bias, grad_outputs=1)
    given = draw_arrays(case, spec, max(1, draw_rows(case, spec)), plain=True)
    given |= {"mean": None, "rstd": None}
    if case.chance(0.3):
        given["bias"] = None
    device = "cuda" if case.where == "gpu" else "cpu"

    def tensor(array: Array) -> Any:
        made = tensor_of(array, device)
        laid_out = lay_out_tensor(case, made) if layout is None else layout(made)
        return laid_out.detach().clone() if laid_out.is_inference() else laid_out.detach()

    has_sum = spec.residual_dtype is not None
    if has_sum:
        of_residual = spec.element_type(Element.RESIDUAL)
        given["residual"] = draw_values(case, of_residual, given["input"].shape, plain=True)
    tensors = {name: tensor(given[name]) for name in _ORDER if given.get(name) is not None}
    asked = {name for name in tensors if case.chance(0.7)} or {"input"}
    reached = [tensor(given["grad_output"].astype(given["input"].dtype))]
    if given.get("grad_residual") is not None and case.chance(0.8):
        reached.append(tensor(given["grad_residual"]))
    name = spec.op.removesuffix("_backward")
    options = {
        "normalized_shape": spec.normalized_shape,
        "eps": case.pick(*EPS),
        "weight_offset": spec.weight_offset,
        "memory_efficient": keeps_output,
        "own_forward": case.chance(0.5),
        "rows_per_set": case.rows_per_set,
        "gate_first": gate is Gate.BEFORE,
    }
    op = OPS[name] if gate is None else GATED[gate][name]
    call = _asking(Call(op, tensors, tuple(reached), options), asked)
    case.said += [f"of {sorted(call.leaves)}", *options, device]
    return call


def _asking(call: Call, asked: Collection[str]) -> Call:
    """The same call, with the gradients of these, of one type where there is a sum."""
    if call.has_sum and "input" in asked:
        asked = {*asked, "residual"}
    tensors = {
        name: None if t is None else t.detach().requires_grad_(name in asked)
        for name, t in call.tensors.items()
    }
    return replace(call, tensors=tensors)


def autograd(case: Case) -> None:
    """PyTorch's norms, forward and backward."""
    call = draw_call(case)
    judge(case, call, computed(call, _public(case, call)))


def _public(case: Case, call: Call) -> Function:
    return lambda **arguments: case.call(call.function, **arguments)


def other_calls(case: Case, call: Call) -> dict[str, Call]:
    """Calls that differ in one option, on the same memory, by what differs."""
    options = call.options
    has_weight = call.tensors.get("weight") is not None

    def with_option(name: str, value: Any) -> Call:
        return replace(call, options={**options, name: value})

    def without(*left_out: str) -> Call:
        left = replace(call, tensors={**call.tensors, **dict.fromkeys(left_out)})
        return _asking(left, set(left.leaves) or {"input"})

    found = {"eps": with_option("eps", case.pick(*(e for e in EPS if e != options["eps"])))}
    alike = not call.has_sum or call.tensors["input"].dtype == call.tensors["residual"].dtype
    if call.has_gate:
        other = Gate.AFTER if call.op.gate is Gate.BEFORE else Gate.BEFORE
        turned = with_option("gate_first", other is Gate.BEFORE)
        found["gate_first"] = replace(turned, op=GATED[other][call.op.name])
        left = replace(without("gate"), op=OPS[call.op.name])
        found["no gate"] = replace(left, options={**options, "gate_first": False})
    elif alike:
        found["memory_efficient"] = with_option("memory_efficient", not options["memory_efficient"])
    if call.has_sets:
        rows = case.pick(*(each for each in (1, 2, 5) if each != options["rows_per_set"]))
        found["rows_per_set"] = with_option("rows_per_set", rows)
    if call.op is LAYER_NORM and not call.has_sum:
        found["own_forward"] = with_option("own_forward", not options["own_forward"])
    if has_weight:
        offset = case.pick(*(o for o in OFFSETS if o != options["weight_offset"]))
        found["weight_offset"] = with_option("weight_offset", offset)
        left = without("weight", *(["bias"] if call.has_sets else []))
        no_options = {"weight_offset": 0.0, "rows_per_set": 1}
        found["no weight"] = replace(left, options={**options, **no_options})
    if call.tensors.get("bias") is not None:
        found["no bias"] = without("bias")
    if call.has_sum:
        found["no residual"] = replace(without("residual"), reached=call.reached[:1])
        if len(call.reached) > 1:
            found["a gradient past the norm"] = replace(call, reached=call.reached[:1])
    given = sorted(name for name, tensor in call.tensors.items() if tensor is not None)
    others = {name for name in given if case.chance(0.5)} or {"input"}
    found["gradients"] = _asking(call, others)
    return found


def in_turn(case: Case) -> tuple[Call, Call]:
    """A call and another on the same memory."""
    call = draw_call(case, case.pick(torch.clone, _of_another_order))
    others = other_calls(case, call)
    name = case.pick(*others)
    case.said.append(f"{name} in turn")
    return call, others[name]


def _of_another_order(tensor: Any) -> Any:
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor.clone()


def torch_turns(case: Case) -> None:
    """Two values of an option in turn: each call is right, and the first one once more."""
    first, second = in_turn(case)
    for call in (first, second, first):
        judge(case, call, computed(call, _public(case, call)))


def _is_cast(one: Any, other: Any, is_fused: bool) -> bool:
    """Whether a gradient is another one, cast; or both are one, each rounded once to its type."""
    if not is_fused or one.dtype == other.dtype:
        return bool(torch.equal(one, other.to(one.dtype)))
    of_one, of_other = (torch.finfo(tensor.dtype) for tensor in (one, other))
    off = max(of_one.eps, of_other.eps), max(of_one.smallest_normal, of_other.smallest_normal)
    return bool(torch.allclose(one.double(), other.double(), *off, equal_nan=True))


def compiled(case: Case) -> None:
    """The same within ``torch.compile``, which takes some seconds."""
    first, second = in_turn(case)
    backend = case.pick(*_BACKENDS)
    case.said.append(backend)
    torch._dynamo.reset()
    kept = {
        name: torch.compile(PUBLIC[name], backend=backend)
        for name in (first.function, second.function)
    }
    for call in (first, second, first):
        judge(case, call, computed(call, kept[call.function]), is_fused=backend == "inductor")


def captured(case: Case) -> None:
    """Both captured into CUDA graphs, which are replayed in turn on new values."""
    calls = in_turn(case)
    graphs = []
    stream = torch.cuda.Stream()
    for call in calls:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                computed(call, PUBLIC[call.function])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = computed(call, PUBLIC[call.function])
        graphs.append((call, graph, results))
    written = {t.data_ptr(): t for call in calls for t in call.tensors.values() if t is not None}
    for call, graph, results in (graphs[0], graphs[1], graphs[0]):
        for tensor in written.values():
            with torch.no_grad():
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        torch.cuda.synchronize()
        judge(case, call, results)


def torch_junk(case: Case) -> None:
    """PyTorch's functions, with one argument that is junk: an error, by name, and no crash."""
    device = case.pick("cpu", "meta", "meta")  # meta: new options take a compilation
    x, residual = torch.ones(2, 3, 8, device=device)
    weight, bias = torch.ones(2, 8, device=device)
    shared = {"normalized_shape": 8, "weight": weight, "eps": 1e-5}
    shared |= {"weight_offset": 1.0, "memory_efficient": True, "rows_per_set": 1}
    shared["output_dtype"] = None
    modulated = {"input": x, "normalized_shape": 8, "scale": x, "shift": residual, "eps": 1e-5}
    gated = {"input": x, "gate": residual, "normalized_shape": 8, "weight": weight, "bias": bias}
    gated |= {"eps": 1e-5, "gate_first": True, "weight_offset": 1.0, "rows_per_set": 1}
    types = dict.fromkeys(("dtype", "residual_dtype", "weight_dtype"), torch.float32)
    replaced = {"model": torch.nn.LayerNorm(8), "only": [torch.nn.LayerNorm]}
    name, given = case.pick(
        ("torch.layer_norm", {"input": x, "bias": bias, "own_forward": True} | shared),
        ("torch.rms_norm", {"input": x, "bias": bias} | shared),
        ("torch.add_layer_norm", {"input": x, "residual": residual, "bias": bias} | shared),
        ("torch.add_rms_norm", {"input": x, "residual": residual, "bias": bias} | shared),
        ("torch.modulated_layer_norm", modulated),
        ("torch.modulated_rms_norm", modulated),
        ("torch.gated_layer_norm", gated),
        ("torch.gated_rms_norm", gated),
        (
            "torch.warmup",
            {"model": lnbwd_torch().AddRMSNorm(8), "device": "cpu", "tune": False} | types,
        ),
        ("torch.specs", {"model": lnbwd_torch().AddRMSNorm(8)} | types),
        ("torch.replace_norms", {"dtypes": [torch.float32], "output_dtype": None} | replaced),
    )
    if case.chance(0.2):
        case.call(name, **given)
        return
    bad = case.pick(*given)
    given = given | {bad: draw_junk(case)}
    case.said += [name, bad, repr(given[bad])[:80]]
    try:
        case.call(name, bad=bad, **given)
    except (TypeError, ValueError, RuntimeError, OverflowError, AssertionError) as error:
        case.refused = f"{type(error).__name__}: {error}"
