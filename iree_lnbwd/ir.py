"""From a spec to a module's text: a file of ``ir/`` specialised, and its entry point.

A file becomes a module by four rules, all of them visible in the result:

1. The block of aliases at its top is replaced by the spec's.
2. A cast between equal types is dropped.
3. Where the number of rows is fixed, ``tensor.empty(%rows)`` loses its argument.
4. The public entry point is appended; it picks the arguments and gradients that the spec has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from iree_lnbwd.spec import ENTRY, LayerNormSpec, TensorType

LINALG = "layer_norm_backward.mlir"
STABLEHLO = "layer_norm_backward.stablehlo.mlir"

_BEGIN = "// What a LayerNormSpec decides. These lines are replaced; nothing below them is.\n"
_END = "// End of what is replaced.\n"
_CAST = re.compile(r" *%(\w+) = arith\.(?:extf|truncf) %(\w+) : (!\w+) to (!\w+)")
_VALUE = re.compile(r"%(\w+)")

# What the entry point calls each argument and result, and the alias of its type.
_KERNEL_NAMES = {
    "grad_output": ("dy", "!dy_mn"),
    "input": ("x", "!x_mn"),
    "mean": ("mean", "!acc_m"),
    "rstd": ("rstd", "!acc_m"),
    "weight": ("gamma", "!gamma_n"),
    "grad_input": ("dx", "!x_mn"),
    "grad_weight": ("dgamma", "!gamma_n"),
    "grad_bias": ("dbeta", "!beta_n"),
}


def specialize(text: str, spec: LayerNormSpec, *, target: str) -> str:
    """The module that computes ``spec``, from the text of a file of ``ir/``.

    Args:
        text: One of `LINALG` or `STABLEHLO` (the latter for a fixed number of rows only).
        spec: What is computed.
        target: Name of the target; recorded in the module, changes nothing in what it computes.

    Returns:
        MLIR text with one public function, `spec.ENTRY`, of the spec's arguments and results.
    """
    aliases = _aliases(spec)
    before, _, rest = text.partition(_BEGIN)
    _, _, body = rest.partition(_END)
    if not body:
        raise ValueError(f"text: expected the lines {_BEGIN!r} and {_END!r}")
    header = "".join(f"{name} = {value}\n" for name, value in aliases.items())
    body = _drop_identity_casts(body, aliases)
    if spec.rows is not None:
        body = body.replace("tensor.empty(%rows)", "tensor.empty()")
    return before + header + body + _entry(spec, target)


def _aliases(spec: LayerNormSpec) -> dict[str, str]:
    rows = "?" if spec.rows is None else str(spec.rows)
    cols = spec.columns
    eps = 0.0 if spec.recompute_eps is None else spec.recompute_eps
    return {
        "!dy": spec.dy_dtype,
        "!x": spec.dtype,
        "!gamma": spec.gamma_dtype,
        "!beta": spec.beta_dtype,
        "!acc": spec.acc_dtype,
        "!dy_mn": f"tensor<{rows}x{cols}x!dy>",
        "!x_mn": f"tensor<{rows}x{cols}x!x>",
        "!acc_mn": f"tensor<{rows}x{cols}x!acc>",
        "!acc_m": f"tensor<{rows}x!acc>",
        "!acc_n": f"tensor<{cols}x!acc>",
        "!gamma_n": f"tensor<{cols}x!gamma>",
        "!beta_n": f"tensor<{cols}x!beta>",
        "#inv_n": f"{1.0 / cols:.17e} : !acc",
        "#eps": f"{eps:.17e} : !acc",
    }


def _drop_identity_casts(body: str, aliases: Mapping[str, str]) -> str:
    """Without the casts whose two types are the same, which arith does not allow."""
    renamed: dict[str, str] = {}
    lines = []
    for line in body.splitlines(keepends=True):
        cast = _CAST.match(line)
        if cast and aliases[cast[3]] == aliases[cast[4]]:
            renamed[cast[1]] = cast[2]
        else:
            lines.append(_VALUE.sub(lambda value: "%" + renamed.get(value[1], value[1]), line))
    return "".join(lines)


def _entry(spec: LayerNormSpec, target: str) -> str:
    """The public function: arguments in, ``@backward`` called, the asked gradients out."""
    inputs = spec.arguments[: len(spec.arguments) - len(spec.results)]
    parameters = [_declare(argument) for argument in inputs] + [
        f"{_declare(result, prefix='out_')} {{iree.abi.output = {i} : index}}"
        for i, result in enumerate(spec.results)
    ]
    body = []
    if not spec.has_weight:
        body.append("%gamma = arith.constant dense<1.0> : !gamma_n")
    if spec.recompute_eps is not None:
        body.append("%mean, %rstd = call @statistics(%x) : (!x_mn) -> (!acc_m, !acc_m)")
    body.append(
        "%dx, %dgamma, %dbeta = call @backward(%dy, %x, %mean, %rstd, %gamma)\n"
        "      : (!dy_mn, !x_mn, !acc_m, !acc_m, !gamma_n) -> (!x_mn, !gamma_n, !beta_n)"
    )
    values = ", ".join("%" + _KERNEL_NAMES[r.name][0] for r in spec.results)
    types = ", ".join(_KERNEL_NAMES[r.name][1] for r in spec.results)
    body.append(f"return {values} : {types}")
    reflection = {
        "iree_lnbwd.spec": json.dumps(spec.to_dict(), sort_keys=True),
        "iree_lnbwd.target": target,
    }
    attributes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in reflection.items())
    lines = [
        "",
        f"func.func @{ENTRY}(",
        ",\n".join(f"    {parameter}" for parameter in parameters) + ")",
        f"    -> ({types})",
        f"    attributes {{iree.reflection = {{{attributes}}}}} {{",
        *(f"  {line}" for line in body),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _declare(argument: TensorType, prefix: str = "") -> str:
    name, alias = _KERNEL_NAMES[argument.name]
    return f"%{prefix}{name}: {alias}"
