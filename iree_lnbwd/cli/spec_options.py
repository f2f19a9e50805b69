"""The options of a spec, or of several that differ in op, shape and type."""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Sequence
from typing import Any

from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import show_progress
from iree_lnbwd.errors import (
    one_line,
    shown,
)
from iree_lnbwd.ops.arguments import DEFAULT_EPS, rms_eps
from iree_lnbwd.ops.operands import (
    FROM_OUTPUT,
    GATED,
    LAYER_NORM_BACKWARD,
    MOST_GRAD_OUTPUTS,
    OPS,
    Gate,
    names,
)
from iree_lnbwd.ops.spec import NormSpec, check_output_mask

_OP, _DTYPE = LAYER_NORM_BACKWARD.name, "f32"


def add_spec_options(parser: argparse.ArgumentParser) -> None:
    """All options of one spec."""
    parser.add_argument("--op", choices=OPS, default=_OP, help=f"what to compute (default: {_OP})")
    parser.add_argument(
        "--normalized-shape", required=True, type=words.shape, help="e.g. 4096 or 16x64"
    )
    parser.add_argument(
        "--dtype",
        default=_DTYPE,
        type=words.dtype,
        metavar=words.DTYPES_IN_HELP,
        help=f"of input and its gradient (default: {_DTYPE})",
    )
    _add_other_options(parser)


def add_specs_options(
    parser: argparse.ArgumentParser, *, shapes: argparse._ActionsContainer | None = None
) -> None:
    """All options of several specs: each op with each shape and each type.

    Args:
        parser: It gets them.
        shapes: A group, of which one member is required, that gets the shapes.
    """
    parser.add_argument(
        "--op",
        type=words.known(OPS),
        default=(_OP,),
        help=f"what to compute, with commas (default: {_OP})",
    )
    (shapes or parser).add_argument(
        "--normalized-shape",
        type=words.shapes,
        help="shapes with commas, e.g. 1024,4096 or 16x64,8192",
        required=shapes is None,
    )
    parser.add_argument(
        "--dtype",
        type=words.dtypes,
        default=(_DTYPE,),
        help=f"of input and its gradient, with commas (default: {_DTYPE})",
    )
    _add_other_options(parser)


def _add_other_options(parser: argparse.ArgumentParser) -> None:
    """The options of a spec besides its op, shape and type."""
    types: dict[str, Any] = {"type": words.dtype, "metavar": words.DTYPES_IN_HELP}
    parser.add_argument("--output-dtype", **types, help="of a forward's output (default: --dtype)")
    parser.add_argument("--grad-output-dtype", **types, help="default: --dtype")
    parser.add_argument(
        "--grad-input-copy-dtype",
        **types,
        help="of a second grad_input, beside one of f32: f16 or bf16 (default: no such)",
    )
    parser.add_argument(
        "--grad-input-sum-dtype",
        **types,
        help="of the sum of grad_input over rows, beside that (default: no such)",
    )
    parser.add_argument(
        "--grad-outputs",
        type=int,
        default=1,
        help=f"gradients that a backward adds up, up to {MOST_GRAD_OUTPUTS} (default: 1)",
    )
    parser.add_argument("--weight-dtype", **types, help="default: --dtype")
    parser.add_argument("--bias-dtype", **types, help="default: --weight-dtype")
    parser.add_argument("--no-weight", action="store_true", help="gamma is 1")
    parser.add_argument("--bias", action="store_true", help="an RMS norm with a bias")
    parser.add_argument("--no-bias", action="store_true", help="a layer norm without a bias")
    parser.add_argument(
        "--from-output",
        action="store_true",
        help="a backward takes the forward's output in place of its input and mean",
    )
    parser.add_argument(
        "--residual-dtype", **types, help="of residual or grad_residual (default: none)"
    )
    parser.add_argument(
        "--gate",
        choices=[gate.value for gate in Gate],
        help="silu(gate) is a factor, after the norm or before it (default: none)",
    )
    parser.add_argument("--gate-dtype", **types, help="default: --dtype")
    parser.add_argument(
        "--weight-sets", action="store_true", help="weight and bias have sets: [G, ...] each"
    )
    parser.add_argument(
        "--strided-rows",
        action="store_true",
        help="rows lie where a call says: each array of them has two strides",
    )
    parser.add_argument(
        "--weight-offset",
        type=float,
        default=0.0,
        help="added to the weight: 1 for Gemma's 1 + weight (default: 0)",
    )
    parser.add_argument(
        "--output-mask",
        type=words.mask,
        help=(
            "a 0 or 1 for each of a backward's gradients: "
            f"{', '.join(names(LAYER_NORM_BACKWARD.masked))} (default: all); an RMS norm has "
            "the last with --bias only, and --gate adds one for the gate"
        ),
    )
    parser.add_argument("--rows", type=int, help="fix the number of rows (default: dynamic)")
    parser.add_argument(
        "--recompute-statistics",
        type=float,
        metavar="EPS",
        help="a backward takes no mean and rstd; it recomputes them from input with this eps",
    )
    parser.add_argument(
        "--eps",
        type=float,
        help="of a forward (default: 1e-5 for layer_norm, the machine epsilon for rms_norm)",
    )


def spec_of(options: argparse.Namespace) -> NormSpec:
    """The spec that `add_spec_options` asked for.

    Raises:
        ValueError: Two options contradict each other.
    """
    op, mask = OPS[options.op], options.output_mask
    if options.from_output:
        if not op.is_backward:
            raise ValueError(f"from-output: expected it beside a backward alone, got {op.name}")
        op = FROM_OUTPUT[op.name]
    elif options.gate is not None:
        op = GATED[Gate(options.gate)][op.name]
    if options.bias and (op.atens_bias or options.no_bias):
        beside = "--no-bias" if options.no_bias else f"{op.name}, which has one without it"
        raise ValueError(f"bias: expected it beside an RMS norm alone, got it beside {beside}")
    if options.bias_dtype is not None and not (op.atens_bias or options.bias):
        raise ValueError(
            f"bias_dtype: expected none for {op.name} without --bias, got {options.bias_dtype!r}"
        )
    if mask is not None:
        mask = check_output_mask(mask, op, has_bias=options.bias)
        asked = dict(zip(names(op.gradients), mask, strict=False))
        if options.no_weight and asked.get("grad_weight"):
            raise ValueError("output_mask: expected 0 for grad_weight beside --no-weight, got 1")
        has_bias = options.bias or (op.usual_bias and not options.no_bias)
        reads_bias = op.reads_bias and has_bias
        if options.bias_dtype is not None and not (asked.get("grad_bias") or reads_bias):
            raise ValueError(
                f"bias_dtype: expected none where there is no grad_bias, got {options.bias_dtype!r}"
            )
    if op.is_backward and options.eps is not None:
        raise ValueError(
            f"eps: expected none for {op.name}, which has --recompute-statistics, got {options.eps}"
        )
    if not op.is_backward and options.recompute_statistics is not None:
        raise ValueError(
            f"recompute-statistics: expected none for {op.name}, which has --eps, got "
            f"{options.recompute_statistics}"
        )
    if options.from_output and options.recompute_statistics is not None:
        raise ValueError(
            "recompute-statistics: expected none beside --from-output, which takes rstd, got "
            f"{options.recompute_statistics}"
        )
    if options.no_bias and not op.usual_bias:
        raise ValueError(
            "no-bias: expected it beside --op=layer_norm, or layer_norm_backward with "
            f"--from-output, got {op.name}"
        )
    default = DEFAULT_EPS if op.centres else rms_eps(options.dtype)
    own = default if options.eps is None else options.eps
    return NormSpec(
        op=op.name,
        normalized_shape=options.normalized_shape,
        dtype=options.dtype,
        output_dtype=options.output_dtype,
        grad_output_dtype=options.grad_output_dtype,
        grad_outputs=options.grad_outputs,
        grad_input_copy_dtype=options.grad_input_copy_dtype,
        grad_input_sum_dtype=options.grad_input_sum_dtype,
        weight_dtype=options.weight_dtype,
        bias_dtype=options.bias_dtype,
        has_weight=not options.no_weight,
        has_bias=options.bias or (op.usual_bias and not options.no_bias),
        residual_dtype=options.residual_dtype,
        weight_offset=options.weight_offset,
        weight_sets=options.weight_sets,
        strided_rows=options.strided_rows,
        output_mask=() if mask is None else mask,
        rows=options.rows,
        eps=options.recompute_statistics if op.is_backward else own,
        from_output=options.from_output,
        gate=options.gate,
        gate_dtype=options.gate_dtype,
    )


def specs_of(options: argparse.Namespace) -> list[NormSpec]:
    """The specs that `add_specs_options` asked for."""
    chosen = vars(options)
    return [
        spec_of(
            argparse.Namespace(**chosen | {"op": op, "normalized_shape": shape, "dtype": dtype})
        )
        for op in options.op
        for shape in options.normalized_shape
        for dtype in options.dtype
    ]


# What a model says itself; as argparse has them if nobody gave them.
_SAID_BY_MODELS = {
    "op": (_OP,),
    **dict.fromkeys(("no_weight", "bias", "no_bias", "from_output"), False),
    **dict.fromkeys(("weight_sets", "strided_rows"), False),
    **dict.fromkeys(("output_dtype", "grad_output_dtype", "bias_dtype"), None),
    **dict.fromkeys(("residual_dtype", "output_mask", "gate", "gate_dtype"), None),
    **dict.fromkeys(("rows", "recompute_statistics", "eps"), None),
    "weight_offset": 0.0,
}


def specs_of_model(options: argparse.Namespace) -> Sequence[NormSpec]:
    """What the norms of a model need that a file's function returns."""
    for name, default in _SAID_BY_MODELS.items():
        if (value := getattr(options, name)) != default:
            raise ValueError(f"{name}: expected none beside a model, which says it, got {value}")
    place, _, function = options.model.rpartition(":")
    if not (place and function.isidentifier()):
        raise ValueError(f"model: expected FILE:FUNCTION, got {shown(options.model)}")
    try:
        import torch  # noqa: F401

        from iree_lnbwd.torch import model_specs
    except ImportError as error:
        raise ValueError(f"model: expected PyTorch to be installed: {one_line(error)}") from error
    show_progress(f"making the model of {options.model}, and replacing its norms")
    try:
        made = runpy.run_path(place)[function]()
    except KeyError:
        raise ValueError(f"model: expected a function {function} in {place}, got none") from None
    except Exception as error:  # code that is not ours
        said = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"model: {place}:{function} raised {said}") from error
    return model_specs.of_model(made, options.dtype, options.weight_dtype)
