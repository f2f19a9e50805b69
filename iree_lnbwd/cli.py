"""The command ``iree-lnbwd``: targets, compile, bundle, verify, run, inspect, tune."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import secrets
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np

from iree_lnbwd import emulator, runtime
from iree_lnbwd.bundles import choosing, serving
from iree_lnbwd.bundles.container import BundleFile, is_bundle
from iree_lnbwd.bundles.index import Member
from iree_lnbwd.bundles.writing import bundle
from iree_lnbwd.compiling import compiler
from iree_lnbwd.disk import files
from iree_lnbwd.disk.user_folders import UnusableError
from iree_lnbwd.errors import (
    ArtifactError,
    CompileError,
    DeviceError,
    counted,
    one_line,
    plain,
    shown,
)
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri, target_of
from iree_lnbwd.hardware.products import standing_for
from iree_lnbwd.hardware.targets import Target, find_target, targets
from iree_lnbwd.ops import npz
from iree_lnbwd.ops.arguments import DEFAULT_EPS, BoundCall, rms_eps
from iree_lnbwd.ops.dtypes import DTYPES, unknown
from iree_lnbwd.ops.operands import FROM_OUTPUT, LAYER_NORM_BACKWARD, OPS, names
from iree_lnbwd.ops.spec import MOST_ROWS, NormSpec, check_output_mask
from iree_lnbwd.schedules import (
    Forward,
    OnePass,
    Schedule,
    TwoPass,
    WholeTensors,
    cost_model,
    paths,
)
from iree_lnbwd.stores import shipping, tuned_folder
from iree_lnbwd.stores.tuned import why_stale
from iree_lnbwd.tuning import tuner
from iree_lnbwd.verification import evidence, matrix, verify
from iree_lnbwd.verification.verify import Runs
from iree_lnbwd.version import __version__
from iree_lnbwd.vmfb import artifact, inspection, raw_interface
from iree_lnbwd.vmfb.artifact import Manifest
from iree_lnbwd.vmfb.description import Description, describe
from iree_lnbwd.vmfb.inspection import KernelReport

_MASK_LENGTHS = {len(op.masked) for op in OPS.values() if op.is_backward}
_DTYPES = f"{{{','.join(DTYPES)}}}"  # in the help
_CALLS = ("through IREE's device, waiting for the result", "on the caller's stream, not waiting")

_EXIT_OK, _EXIT_MISS, _EXIT_ERROR = 0, 1, 2
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_LONGEST_LINE = 1 << 14  # characters of what is asked for, such as the flags of a module


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 if all went well, 1 if a verification missed, 2 if something could not be done; then one
        line on standard error says what.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _expect_streams()
        return _run_command(words)
    except KeyboardInterrupt:
        _tell("interrupted")
        return _EXIT_INTERRUPTED
    except Exception as error:  # Python itself would exit with 1, which means that something missed
        _tell(f"error: {_explained(error)}")
        return _EXIT_ERROR


def _run_command(words: Sequence[str]) -> int:
    """Runs the command of these words; returns the exit status."""
    # Words after "--" are for iree-compile, also those that look like options of ours.
    cut = words.index("--") if "--" in words else len(words)
    try:
        options = _parser().parse_args(words[:cut])
    except SystemExit as ended:  # argparse has said what is wrong, or printed the help
        return _EXIT_ERROR if ended.code else _EXIT_OK
    options.extra_flags = tuple(words[cut + 1 :])
    command: Callable[[argparse.Namespace], int] = options.command
    compiles = (
        command is _bundle
        or (command is _compile and not options.print_ir)
        or (command is _verify and options.modules is None and options.bundle is None)
    )
    if options.extra_flags and not compiles:
        raise ValueError(
            f"flags: expected none after --, nothing is compiled here, got {options.extra_flags}"
        )
    return command(options)


def _explained(error: Exception) -> str:
    match error:
        case CompileError() | DeviceError() | OSError() | TypeError() | ValueError():
            return str(error) or type(error).__name__
        case MemoryError():
            return f"out of memory: {error}" if str(error) else "out of memory"
    at = traceback.extract_tb(error.__traceback__)[-1]
    name = type(error).__name__
    return f"unexpected, please report: {name}: {error}, at {Path(at.filename).name}:{at.lineno}"


def _expect_streams() -> None:
    """Makes sure that no other file can get the number of a standard stream.

    Raises:
        OSError: Standard output is closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")  # argparse would take standard output in its place
    if sys.stdout is None:
        raise OSError("standard output: expected it open, got it closed")


def _say(line: str, stream: TextIO | None = None) -> None:
    """Writes a line to a stream, standard output by default, as plain text for a terminal."""
    _put(f"{plain(line, _LONGEST_LINE)}\n", sys.stdout if stream is None else stream)


def _tell(line: str) -> None:
    """Writes a line to standard error, if that can be written."""
    with contextlib.suppress(OSError):
        _say(f"iree-lnbwd: {plain(line)}", sys.stderr)


def _put(text: str, stream: TextIO) -> None:
    """Writes text to a stream at once.

    A reader that stops reading, such as `head`, is no error: the command goes on to the end.

    Raises:
        OSError: It cannot be written.
    """
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        # Python tries to write it again when it exits, and must not fail then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            name = stream.name.strip("<>")
            raise OSError(f"{name}: cannot be written: {one_line(error)}") from error


class _Once(argparse.Action):
    """Stores a value. A second value is refused, so that none is silently dropped."""

    given = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Called by argparse for each value."""
        if self.given:
            raise argparse.ArgumentError(self, "expected once, got it again")
        self.given = True
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """argparse's parser; each option is given once, and error messages are safe to print."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        """Says what is wrong with the words, and exits."""
        super().error(plain(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints the help or a message; argparse's own loses errors, or not, by its version."""
        _put(message, sys.stderr if file is None else file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="iree-lnbwd", description="Layer and RMS normalization, compiled by IREE."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    sub = commands.add_parser("targets", help="what can be compiled for, and what is verified")
    sub.add_argument(
        "bundle", nargs="?", type=_path, help="only the targets that this bundle has modules for"
    )
    sub.add_argument("--json", action="store_true", help="for programs")
    sub.set_defaults(command=_targets)

    sub = commands.add_parser(
        "compile",
        help="make a .vmfb and its manifest",
        epilog="Flags after -- go to iree-compile and into the manifest.",
    )
    sub.add_argument("--target", default="host", help="a name of 'targets' (default: host)")
    _add_spec_options(sub)
    sub.add_argument(
        "--whole-tensors",
        action="store_true",
        help="the algorithm as it stands, lowered by IREE alone (default: the best schedule)",
    )
    sub.add_argument(
        "-o", "--output-dir", type=_path, help="made if need be (default: this folder)"
    )
    shown = sub.add_mutually_exclusive_group()
    shown.add_argument("--print-ir", action="store_true", help="print the MLIR, compile nothing")
    shown.add_argument(
        "--print-command",
        action="store_true",
        help="print the iree-compile command that takes --print-ir's output, compile nothing",
    )
    sub.add_argument(
        "--folded",
        action="store_true",
        help="with --print-ir: inlined and folded by the compiler, as the kernels run",
    )
    sub.set_defaults(command=_compile)

    sub = commands.add_parser(
        "bundle",
        help="make many modules in one file",
        epilog=(
            "Every op, shape and type is compiled for every target. What is done is kept in the "
            "cache, so the same command goes on after an interruption. Flags after -- go to "
            "iree-compile and into the manifests."
        ),
    )
    to_ship = choosing.target_to_ship(DeviceUri.parse(DEFAULT_DEVICE)).name
    sub.add_argument(
        "--target",
        type=_words,
        default=(to_ship,),
        help=f"names of 'targets', or of products, with commas (default: {to_ship})",
    )
    sub.add_argument(
        "--op",
        type=_known_words(OPS),
        default=(LAYER_NORM_BACKWARD.name,),
        help="what to compute, with commas (default: layer_norm_backward)",
    )
    of_what = sub.add_mutually_exclusive_group(required=True)
    of_what.add_argument(
        "--normalized-shape",
        type=_shapes,
        help="shapes with commas, e.g. 1024,4096 or 16x64,8192",
    )
    of_what.add_argument(
        "--model",
        metavar="FILE:FUNCTION",
        help=(
            "all that the norms of a PyTorch model need: FILE is a Python file, which is run, and "
            "FUNCTION returns the model; --dtype and --weight-dtype are those of calls"
        ),
    )
    sub.add_argument(
        "--dtype",
        type=_dtypes,
        default=("f32",),
        help="of input and its gradient, with commas (default: f32)",
    )
    _add_option_options(sub)
    sub.add_argument(
        "--with",
        dest="include",
        type=_path,
        metavar="BUNDLE",
        help="take over the members of this bundle, which may be the output itself",
    )
    sub.add_argument("--jobs", type=int, help="modules at once (default: one for each CPU)")
    sub.add_argument("-o", "--output", required=True, type=_path, help="the file, *.lnb")
    sub.set_defaults(command=_bundle)

    sub = commands.add_parser(
        "verify", help="compile, run on real captured tensors, compare with the f64 reference"
    )
    sub.add_argument(
        "bundle",
        nargs="?",
        type=_path,
        help="verify the members of this bundle that run here, on random rows",
    )
    sub.add_argument("--target", help="compile for this (default: what fits the device)")
    sub.add_argument("--device", help="run there (default: what runs the target)")
    sub.add_argument("--data", type=_path, help=".npz of cases (default: the captured tensors)")
    sub.add_argument(
        "--modules", type=_path, help="folder or bundle of modules to use instead of compiling"
    )
    sub.add_argument(
        "--emulate",
        action="store_true",
        help="run the code for a GPU target in software, on a machine without that GPU",
    )
    sub.add_argument(
        "--normalized-shape", type=_ints, help="take random rows of this shape, not captured ones"
    )
    sub.add_argument("--op", choices=OPS, help="of the random rows (default: layer_norm_backward)")
    sub.add_argument(
        "--dtype", type=_dtype, metavar=_DTYPES, help="of the random rows (default: f32)"
    )
    sub.add_argument(
        "--from-output", action="store_true", help="random outputs of a backward, not inputs"
    )
    sub.add_argument(
        "--random-rows", type=_ints, help="how many random rows, in a call each (default: 1,7,64)"
    )
    sub.set_defaults(command=_verify)

    sub = commands.add_parser("run", help="run a module on the arrays of an .npz")
    sub.add_argument("artifact", type=_path, help="a .vmfb")
    sub.add_argument("--device", default=DEFAULT_DEVICE, help="IREE device URI, e.g. cuda://1")
    sub.add_argument(
        "--input",
        required=True,
        type=_path,
        help=".npz with the op's arguments, such as grad_output, input, mean, rstd, weight",
    )
    sub.add_argument(
        "--output",
        required=True,
        help=".npz to write the results to; - is standard output",
    )
    sub.set_defaults(command=_run)

    sub = commands.add_parser(
        "tune",
        help="find the fastest schedules on this machine's GPU, and keep them for this user",
        epilog="Several shapes, types and ops are tuned one by one; each is kept when it is done.",
    )
    sub.add_argument("--device", default="cuda", help="IREE device URI (default: cuda)")
    _add_spec_options(sub, several=True)
    sub.add_argument(
        "--candidates",
        type=int,
        default=tuner.CANDIDATES,
        help=f"schedules that compete for each (default: {tuner.CANDIDATES})",
    )
    sub.add_argument("--seed", type=int, default=0, help="decides which compete (default: 0)")
    sub.add_argument(
        "--again", action="store_true", help="time again what was found before and still holds"
    )
    sub.add_argument(
        "--export", type=_path, metavar="FILE", help="write all that was found into a file, only"
    )
    sub.add_argument(
        "--import", dest="take", type=_path, metavar="FILE", help="keep what is in a file, only"
    )
    sub.set_defaults(command=_tune)

    sub = commands.add_parser("inspect", help="what a module is and what its kernels need")
    sub.add_argument("artifact", type=_path, help="a .vmfb, or a bundle")
    sub.set_defaults(command=_inspect)
    return parser


def _add_spec_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """All options of a spec, or of several that differ in op, shape and type."""
    op, dtype = LAYER_NORM_BACKWARD.name, "f32"
    many: dict[str, Any] = {"nargs": "+"} if several else {}
    parser.add_argument(
        "--op",
        choices=OPS,
        default=[op] if several else op,
        help="what to compute (default: layer_norm_backward)",
        **many,
    )
    parser.add_argument(
        "--normalized-shape",
        required=not several,
        type=_ints,
        help="e.g. 4096 or 16,64",
        **many,
    )
    parser.add_argument(
        "--dtype",
        default=[dtype] if several else dtype,
        type=_dtype,
        metavar=_DTYPES,
        help="of input and its gradient (default: f32)",
        **many,
    )
    _add_option_options(parser)


def _add_option_options(parser: argparse.ArgumentParser) -> None:
    """The options of a spec besides its op, shape and type."""
    types: dict[str, Any] = {"type": _dtype, "metavar": _DTYPES}
    parser.add_argument("--grad-output-dtype", **types, help="default: --dtype")
    parser.add_argument("--weight-dtype", **types, help="default: --dtype")
    parser.add_argument("--bias-dtype", **types, help="default: --weight-dtype")
    parser.add_argument("--no-weight", action="store_true", help="gamma is 1")
    parser.add_argument(
        "--no-bias", action="store_true", help="layer_norm adds no bias, or none is in the output"
    )
    parser.add_argument(
        "--from-output",
        action="store_true",
        help="a backward takes the forward's output in place of its input and mean",
    )
    parser.add_argument(
        "--residual-dtype", **types, help="of residual or grad_residual (default: none)"
    )
    parser.add_argument(
        "--weight-offset",
        type=float,
        default=0.0,
        help="added to the weight: 1 where it is stored around zero (default: 0)",
    )
    parser.add_argument(
        "--output-mask",
        type=_mask,
        help=(
            "a 0 or 1 for each of a backward's gradients: "
            f"{', '.join(names(LAYER_NORM_BACKWARD.masked))} (default: all)"
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


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(unknown(text))
    return text


def _dtypes(text: str) -> tuple[str, ...]:
    return tuple(map(_dtype, _words(text)))


def _known_words(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of words with commas between them, each of which is known."""

    def parse(text: str) -> tuple[str, ...]:
        for word in (words := _words(text)):
            if word not in known:
                raise argparse.ArgumentTypeError(
                    f"expected some of {', '.join(known)}, got {word!r}"
                )
        return words

    return parse


def _shapes(text: str) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(int(dim) for dim in word.split("x")) for word in _words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected shapes such as 1024,4096 or 16x64, got {text!r}"
        ) from None


def _ints(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected ints such as 4096 or 16,64, got {text!r}"
        ) from None


def _mask(text: str) -> tuple[bool, ...]:
    if len(text) not in _MASK_LENGTHS or set(text) - {"0", "1"}:
        raise argparse.ArgumentTypeError(f"expected a 0 or 1 for each gradient, got {text!r}")
    return tuple(digit == "1" for digit in text)


def _spec(options: argparse.Namespace) -> NormSpec:
    op, mask = OPS[options.op], options.output_mask
    if options.from_output:
        if not op.is_backward:
            raise ValueError(f"from-output: expected it beside a backward alone, got {op.name}")
        op = FROM_OUTPUT[op.name]
    if mask is not None:
        mask = check_output_mask(mask, op)
        asked = dict(zip(names(op.masked), mask, strict=True))
        if options.no_weight and asked.get("grad_weight"):
            raise ValueError("output_mask: expected 0 for grad_weight beside --no-weight, got 1")
        reads_bias = op.reads_bias and not options.no_bias
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
    if options.no_bias and not op.reads_bias:
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
        grad_output_dtype=options.grad_output_dtype,
        weight_dtype=options.weight_dtype,
        bias_dtype=options.bias_dtype,
        has_weight=not options.no_weight,
        has_bias=op.reads_bias and not options.no_bias,
        residual_dtype=options.residual_dtype,
        weight_offset=options.weight_offset,
        output_mask=() if mask is None else mask,
        rows=options.rows,
        eps=options.recompute_statistics if op.is_backward else own,
        from_output=options.from_output,
    )


def _specs(options: argparse.Namespace) -> list[NormSpec]:
    """The specs of several ops, shapes and types: each with each."""
    chosen = vars(options)
    return [
        _spec(argparse.Namespace(**chosen | {"op": op, "normalized_shape": shape, "dtype": dtype}))
        for op in options.op
        for shape in options.normalized_shape
        for dtype in options.dtype
    ]


# What a model says itself; as argparse has them if nobody gave them.
_SAID_BY_MODELS = {
    "op": (LAYER_NORM_BACKWARD.name,),
    **dict.fromkeys(("no_weight", "no_bias", "from_output"), False),
    **dict.fromkeys(("grad_output_dtype", "bias_dtype", "residual_dtype", "output_mask"), None),
    **dict.fromkeys(("rows", "recompute_statistics", "eps"), None),
    "weight_offset": 0.0,
}


def _specs_of_model(options: argparse.Namespace) -> Sequence[NormSpec]:
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
    try:
        made = runpy.run_path(place)[function]()
    except KeyError:
        raise ValueError(f"model: expected a function {function} in {place}, got none") from None
    except Exception as error:  # code that is not ours
        said = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"model: {place}:{function} raised {said}") from error
    return model_specs.of_model(made, options.dtype, options.weight_dtype)


def _targets(options: argparse.Namespace) -> int:
    listed, counts = targets(), Counter[str]()
    if options.bundle is not None:
        counts.update(member.target.name for member in BundleFile(options.bundle).members)
        listed = tuple(target for target in listed if target.name in counts)
    if options.json:
        for_programs = [
            {
                "name": target.name,
                "backend": target.backend,
                "driver": target.driver,
                "aliases": target.aliases,
                "cpu_features": target.cpu_features,
                "verified": _verified(target),
                **({"modules": counts[target.name]} if counts else {}),
            }
            for target in listed
        ]
        _put(json.dumps(for_programs, indent=2) + "\n", sys.stdout)
        return _EXIT_OK
    rows = [("name", "backend", "aliases", "verified")]
    rows += [(t.name, t.backend, " ".join(t.aliases), _verified(t)) for t in listed]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        _say("  ".join([*cells, row[-1]]))
    return _EXIT_OK


def _verified(target: Target) -> str:
    if target.architecture == "aarch64" and not target.is_this_cpu:
        return "disassembled by the tests; run in qemu against f64 NumPy, not on hardware"
    if target.backend == "cpu":
        return "run by the tests against f64 NumPy"
    return evidence.of_target(target.name)


def _compile(options: argparse.Namespace) -> int:
    spec, target = _spec(options), find_target(options.target)
    how: Schedule | None = WholeTensors("asked for") if options.whole_tensors else None
    if options.folded and not options.print_ir:
        raise ValueError("folded: expected only with --print-ir")
    if options.print_ir or options.print_command:
        if options.output_dir is not None:
            raise ValueError(
                f"output_dir: expected none where nothing is compiled, got {options.output_dir}"
            )
        if options.print_ir:
            if how is None and (tuned := shipping.tuned_for(spec, options.target)) is not None:
                how = tuned.schedule
            shown = compiler.folded_text if options.folded else compiler.source_text
            _put(shown(spec, target, how=how), sys.stdout)
            return _EXIT_OK
        command = compiler.command_line(spec, target, extra_flags=options.extra_flags)
        if not command.isprintable():
            raise ValueError(f"flags: expected printable ones, got {options.extra_flags}")
        _say(command)
        return _EXIT_OK
    folder = Path() if options.output_dir is None else options.output_dir
    start = time.perf_counter()
    made = shipping.compile(spec, options.target, folder, how=how, extra_flags=options.extra_flags)
    size = made.path.stat().st_size
    _say(f"{made.path}  {size} bytes, {time.perf_counter() - start:.1f} s")
    _say(str(made.manifest_path))
    return _EXIT_OK


def _bundle(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    specs = _specs(options) if options.model is None else _specs_of_model(options)
    with _interrupted_by(signal.SIGTERM):
        made = bundle(
            specs,
            options.target,
            options.output,
            jobs=options.jobs,
            extra_flags=options.extra_flags,
            include=options.include,
            progress=_show_progress,
        )
    size, seconds = made.path.stat().st_size, time.perf_counter() - start
    _say(f"{made.path}  {counted(len(made.members), 'module')}, {size} bytes, {seconds:.1f} s")
    return _EXIT_OK


def _verify(options: argparse.Namespace) -> int:
    if options.bundle is not None:
        return _verify_bundle(options)
    load, where = _emulated(options) if options.emulate else _on_device(options)
    cases, data_name = _cases(options)
    ops = dict.fromkeys(call.spec.op for call in cases.values() if call.spec is not None)
    _say(f"{', '.join(ops)} {where}, {data_name}")
    _say("")
    return _judge(verify.verify(cases, load), cases)


def _verify_bundle(options: argparse.Namespace) -> int:
    """Each member on the device that runs it, and then which members run on none."""
    for name in ("target", "data", "modules", "normalized_shape", "op", "dtype"):
        if (value := getattr(options, name)) is not None:
            raise ValueError(f"{name}: expected none beside a bundle, got {value}")
    for name in ("emulate", "from_output"):
        if getattr(options, name):
            raise ValueError(f"{name}: expected none beside a bundle")
    file = BundleFile(options.bundle)
    given = None if options.device is None else DeviceUri.parse(options.device)
    counts = _checked_rows((1, 7, 64) if options.random_rows is None else options.random_rows)
    runs: list[tuple[Member, DeviceUri]] = []
    lines = []
    for member in file.members:
        uri = given or DeviceUri.parse(member.target.driver)
        try:
            runtime.probe(uri)
            why = serving.why_not(file, member, uri)
        except DeviceError as error:
            why = str(error)
        if why is None:
            runs.append((member, uri))
        else:
            lines.append(f"not run: {member.name}: {why}")
    seed = secrets.randbits(63)
    members = f"{len(runs)} of {counted(len(file.members), 'member')}"
    for line in (f"{members} of {file.path} run here, random rows of seed {seed}", *lines, ""):
        _say(line)
    if not runs:
        raise DeviceError(f"device: no member of {file.path} runs here")
    rng = np.random.default_rng(seed)

    def rows() -> Iterator[verify.Row]:
        for member, uri in runs:
            cases = {
                _random_case(member, m): matrix.random_call(member.spec, m, rng) for m in counts
            }
            norm = serving.load(file, member, uri)
            yield from verify.verify(cases, {member.spec: norm}.__getitem__)

    return _judge(rows(), [_random_case(member, m) for member, _ in runs for m in counts])


def _random_case(member: Member, rows: int) -> str:
    return f"{member.name} random {rows}"


def _judge(judged_rows: Iterable[verify.Row], cases: Collection[str]) -> int:
    """Shows what comes of the cases of these names; returns the exit status."""
    start = time.perf_counter()
    width = max(len(verify.shown_case(name)) for name in cases)
    rows: list[verify.Row] = []
    fault = ""
    try:
        for row in judged_rows:
            for line in () if rows else verify.table_header(width):
                _say(line)
            _say(verify.table_line(row, width))
            rows.append(row)
    except (emulator.Fault, emulator.VmError) as error:
        fault = str(error)
        _say(f"FAULT: {fault}")
    for line in ("", *verify.EXPLANATION.splitlines(), ""):
        _say(line)
    missed = sum(not row.comparison.passed for row in rows)
    verdict = "FAILED" if missed or fault or not rows else "passed"
    judged = f"{len(rows) - missed} of {counted(len(rows), 'result')} within tolerance"
    if fault:
        judged = f"{judged}, then a fault" if rows else "a fault before the first result"
    seconds = time.perf_counter() - start
    _say(f"{verdict}: {judged}, {counted(len(cases), 'case')}, {seconds:.1f} s")
    return _EXIT_OK if verdict == "passed" else _EXIT_MISS


def _cases(options: argparse.Namespace) -> tuple[dict[str, BoundCall], str]:
    """The calls to verify on, and a description of them."""
    if options.normalized_shape is not None:
        if options.data is not None:
            raise ValueError("normalized-shape: expected no --data beside it")
        return _random_cases(
            _random_spec(options),
            (1, 7, 64) if options.random_rows is None else options.random_rows,
        )
    for name in ("op", "dtype", "random_rows", "from_output"):
        if (value := getattr(options, name)) not in (None, False):
            raise ValueError(f"{name}: expected none without --normalized-shape, got {value}")
    if options.data is not None:
        captured, name = npz.read_cases(options.data), plain(options.data)
    else:
        source = resources.files("iree_lnbwd") / "data" / "training_step.npz"
        with resources.as_file(source) as path:
            captured, name = npz.read_cases(path), "tensors captured from a training step"
    if not captured:
        raise ValueError(f"{name}: expected one case or more, got none")
    calls = {
        case: verify.bind_case(arrays, source=verify.shown_case(case) or name)
        for case, arrays in captured.items()
    }
    return calls, name


def _random_spec(options: argparse.Namespace) -> NormSpec:
    op, dtype = OPS[options.op or LAYER_NORM_BACKWARD.name], options.dtype or "f32"
    eps = DEFAULT_EPS if op.centres else rms_eps(dtype)
    return NormSpec(
        options.normalized_shape,
        dtype,
        op=op.name,
        eps=None if op.is_backward else eps,
        from_output=options.from_output,
    )


def _random_cases(spec: NormSpec, rows: tuple[int, ...]) -> tuple[dict[str, BoundCall], str]:
    """Calls of so many random rows each, and a description of them."""
    rows = _checked_rows(rows)
    seed = secrets.randbits(63)
    rng = np.random.default_rng(seed)
    calls = {f"random {m}": matrix.random_call(spec, m, rng) for m in rows}
    return calls, f"random rows of seed {seed}"


def _checked_rows(rows: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(rows)) != len(rows) or min(rows) < 0 or max(rows) > MOST_ROWS:
        raise ValueError(f"random_rows: expected different ints from 0 to {MOST_ROWS}, got {rows}")
    return rows


def _on_device(options: argparse.Namespace) -> tuple[Callable[[NormSpec], Runs], str]:
    """A loader of a spec's module for the place in the options, and a description of that place."""
    target, uri = _where(options.target, options.device)
    only = None if options.target is None else target
    if options.modules is not None and is_bundle(options.modules):
        file = BundleFile(options.modules)

        def load_member(spec: NormSpec) -> Runs:
            norm = serving.find(file, spec, uri, only)
            if norm is None:
                raise ArtifactError(serving.missing(file, spec, uri, only))
            return norm

        return load_member, f"from {options.modules} on {uri}"

    def load(spec: NormSpec) -> Runs:
        if options.modules is not None:
            path = options.modules / f"{artifact.stem(spec, target.name)}.vmfb"
            op = runtime.load(path, str(uri))
            _expect_module(path, op.spec, op.target)
            return op
        vmfb, _ = compiler.build(spec, target, extra_flags=options.extra_flags)
        return runtime.load_built(vmfb, str(uri))

    return load, f"for {target.name} on {uri}"


def _emulated(options: argparse.Namespace) -> tuple[Callable[[NormSpec], Runs], str]:
    """The same as `_on_device`, for the emulator."""
    from iree_lnbwd.verification import (
        emulated_norm,  # the emulator is slow to load, and seldom needed
    )

    if options.device is not None:
        raise DeviceError("device: expected none beside --emulate")
    if options.target is None:
        raise ValueError("target: expected the name of a GPU target beside --emulate, got none")
    target = find_target(options.target)
    emulated_norm.check_target(target)

    def load(spec: NormSpec) -> Runs:
        name = artifact.stem(spec, target.name)
        if options.modules is None:
            vmfb, _ = compiler.build(spec, target, extra_flags=options.extra_flags)
            return emulated_norm.EmulatedNorm(vmfb, source=name, progress=_show_launch)
        path = options.modules / f"{name}.vmfb"
        if is_bundle(options.modules):
            vmfb = serving.read(BundleFile(options.modules), spec, target)
        else:
            vmfb, _ = artifact.read(path)
        op = emulated_norm.EmulatedNorm(vmfb, source=str(path), progress=_show_launch)
        _expect_module(path, op.spec, op.target)
        return op

    return load, f"for {target.name} in the emulator"


def _expect_module(path: Path, spec: NormSpec, target: str) -> None:
    """Expects a module to compute what its file's name says."""
    if (name := artifact.stem(spec, target)) != path.stem:
        raise ArtifactError(f"{path}: expected the module that it is named after, got {name}")


def _show_launch(launch: emulator.Launch) -> None:
    """Shows the current launch on a terminal's line, which the table's next line overwrites."""
    if sys.stderr.isatty():
        said = f"{launch.kernel}: {launch.workgroups} workgroups of {launch.threads} threads"
        print(f"\x1b[2K{plain(said)}\r", end="", file=sys.stderr, flush=True)


def _where(target: str | None, device: str | None) -> tuple[Target, DeviceUri]:
    """The target to compile for and the device to run on, if both, one or neither are given."""
    if target is None:
        uri = DeviceUri.parse(DEFAULT_DEVICE if device is None else device)
        return target_of(uri), uri
    found = find_target(target)
    uri = DeviceUri.parse(found.driver if device is None else device)
    if uri.backend != found.backend:
        raise DeviceError(f"device: {found.name} ({found.backend}) does not run on {uri}")
    try:
        runtime.probe(uri)
    except DeviceError as error:
        software = "" if found.backend == "cpu" else "; --emulate runs its code in software"
        raise DeviceError(f"{found.name}: nothing was run here: {error}{software}") from error
    return found, uri


def _run(options: argparse.Namespace) -> int:
    arrays = npz.read(options.input)
    op = runtime.load(options.artifact, options.device)
    verify.check_names(arrays, plain(options.input), op.spec.family)
    named = {k: v for k, v in op(**arrays)._asdict().items() if v is not None}
    output = Path("/dev/fd/1" if options.output == "-" else options.output)
    summary = sys.stderr if files.is_stdout(output) else sys.stdout
    npz.write(output, named)
    for name, array in named.items():
        _say(f"{name}: {'x'.join(map(str, array.shape))} {array.dtype}", summary)
    _say(options.output, summary)
    return _EXIT_OK


def _tune(options: argparse.Namespace) -> int:
    files_given = [name for name in ("export", "take") if getattr(options, name) is not None]
    if len(files_given) + (options.normalized_shape is not None) != 1:
        raise ValueError("tune: expected one of --normalized-shape, --export and --import")
    if options.export is not None:
        return _export_tuned(options.export)
    if options.take is not None:
        return _import_tuned(options.take)
    specs = _specs(options)
    missed, start = False, time.perf_counter()
    with _interrupted_by(signal.SIGTERM):
        for outcome in tuner.outcomes(
            specs,
            options.device,
            candidates=options.candidates,
            seed=options.seed,
            again=options.again,
            progress=_show_progress,
        ):
            missed |= bool(outcome.wrong)
            _say_tuned(outcome, time.perf_counter() - start)
            start = time.perf_counter()
    return _EXIT_MISS if missed else _EXIT_OK


def _say_tuned(outcome: tuner.Outcome, seconds: float) -> None:
    for wrong in outcome.wrong:
        _say(f"WRONG, and not kept: {wrong}")
    tuned = outcome.tuned
    if tuned is None:
        _say(f"{outcome.spec.name}: nothing is kept: the choice without tuning is wrong")
        return
    how = f"the best of {tuned.candidates} schedules, {seconds:.0f} s"
    _say(f"{outcome.spec.name}: {tuned.gain}")
    _say(f"  {how if outcome.is_new else 'kept before; --again times it anew'}; {tuned.source}")
    _say(f"  {tuned_folder.file_of(tuned)}")


def _export_tuned(path: Path) -> int:
    with _unusable_as_error():
        _say(f"{path}: {tuned_folder.export(path)} entries")
    return _EXIT_OK


def _import_tuned(path: Path) -> int:
    with _unusable_as_error():
        found = tuned_folder.take(path)
        _say(f"{tuned_folder.directory()}: {len(found)} entries from {path}")
    for tuned in found:
        try:
            why = why_stale(tuned)
        except CompileError as error:
            why = str(error)
        used = "used where the GPU is that" if why is None else f"not used: {why}"
        _say(f"  {tuned.spec.name} for {tuned.gpu} ({tuned.processors} processors): {used}")
    return _EXIT_OK


@contextlib.contextmanager
def _unusable_as_error() -> Iterator[None]:
    try:
        yield
    except UnusableError as error:
        raise OSError(str(error)) from error


@contextlib.contextmanager
def _interrupted_by(number: signal.Signals) -> Iterator[None]:
    """A signal ends what goes on as Ctrl-C does: files are whole and temporary ones removed."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


def _show_progress(line: str) -> None:
    """Shows what is being done: on a terminal's line that the next one overwrites, else in lines.

    Lines that only count are left out then.
    """
    if sys.stderr.isatty():
        print(f"\x1b[2K{plain(line)}\r", end="", file=sys.stderr, flush=True)
    elif ": compiled " not in line:
        _tell(line)


def _inspect(options: argparse.Namespace) -> int:
    if is_bundle(options.artifact):
        return _inspect_bundle(BundleFile(options.artifact))
    vmfb, manifest = artifact.read(options.artifact)
    described = describe(vmfb, source=str(options.artifact))
    try:
        kernels = inspection.kernels(vmfb, described.target)
        run = _what_was_run(vmfb, described)
    except (ValueError, emulator.Fault, emulator.VmError) as error:
        raise ArtifactError(f"{options.artifact}: {error}") from error
    path = options.artifact.with_suffix(".vmfb")
    module = f"SHA-256 {artifact.digest(vmfb)}: {run}"
    for name, value in _facts(path, described, manifest, module, kernels):
        _say(f"{name:<10}{value}")
    _say("kernels")
    for kernel in kernels:
        _say(f"  {kernel.name}")
        _say(f"    {_needs(kernel)}")
    return _EXIT_OK


def _inspect_bundle(file: BundleFile) -> int:
    size = sum(stored.size for member in file.members for _, stored in member.files)
    _say(f"{file.path}: {counted(len(file.members), 'module')}, {size} bytes with manifests")
    width = max(len(member.name) for member in file.members)
    for member in file.members:
        needed = "" if member.host_cpu is None else f"  for the CPU {member.host_cpu}"
        said = f"{member.vmfb.size:>9} bytes, SHA-256 {member.vmfb.sha256}"
        _say(f"{member.name:<{width}}  {said}{needed}")
    return _EXIT_OK


def _what_was_run(vmfb: bytes, described: Description) -> str:
    if described.target.backend == "cpu":
        return f"{_verified(described.target)}, as others of its kind"
    from iree_lnbwd.verification import fingerprint  # it loads much of the emulator

    return evidence.of_module(fingerprint.of(vmfb, source=described.spec.name))


def _facts(
    path: Path,
    described: Description,
    manifest: Manifest | None,
    module: str,
    kernels: Sequence[KernelReport],
) -> list[tuple[str, object]]:
    spec, target, schedule, launches, *_ = described
    facts: list[tuple[str, object]] = [
        ("op", spec.name),
        ("target", f"{target.name} ({target.backend}): {_verified(target)}"),
        ("module", module),
        ("takes", ", ".join(f"{a.name} {a}" for a in spec.inputs)),
        ("fills", ", ".join(f"{r.name} {r}" for r in spec.results)),
        *(("path", path) for path in paths(schedule, spec)),
        *(("paper", line) for line in _on_paper(described, kernels)),
        *((("calls", _CALLS[launches is not None]),) if target.backend != "cpu" else ()),
        ("function", f"{described.declaration} of module {described.name}"),
        ("bare", raw_interface.command(path, spec, target)),
    ]
    if manifest is None:
        return [*facts, ("manifest", "none beside the .vmfb; the above is from the module itself")]
    return [
        *facts,
        ("schedule", manifest.schedule_source),
        ("compiler", f"iree-base-compiler {manifest.compiler_version}"),
        ("flags", " ".join(manifest.flags)),
        ("IR", f"SHA-256 {manifest.ir_sha256}"),
    ]


def _on_paper(described: Description, kernels: Sequence[KernelReport]) -> list[str]:
    """What the model says of the schedule of many rows, if it knows the target's product."""
    spec, target, schedule, *_ = described
    if target.backend == "cpu" or not isinstance(schedule, OnePass | TwoPass | Forward):
        return []
    product = standing_for(target.name)
    if not cost_model.knows(product) or schedule.illegal(spec, target) is not None:
        return []
    registers = {kernel.name: kernel.registers for kernel in kernels}
    paper = cost_model.estimate(
        spec, target, product, schedule, registers=registers.get(cost_model.kernel(schedule))
    )
    share = f"; about {paper.share:.0%} of the bandwidth" if target.backend == "cuda" else ""
    rows = counted(cost_model.rows_of(spec), "row")
    return [f"not measured: {product.name}, {rows}: {paper.said}{share}"]


def _needs(kernel: KernelReport) -> str:
    known = (
        ("threads", kernel.threads),
        ("registers", kernel.registers),
        ("bytes shared", kernel.shared_bytes),
        ("bytes stack", kernel.stack_bytes),
    )
    said = [f"{value} {unit}" for unit, value in known if value is not None]
    return ", ".join(said) or "CPU code"


if __name__ == "__main__":
    sys.exit(main())
