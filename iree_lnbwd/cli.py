"""The command ``iree-lnbwd``: targets, compile, verify, run, inspect."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from iree_lnbwd import (
    artifact,
    compiler,
    emulator,
    evidence,
    inspection,
    matrix,
    npz,
    runtime,
    verify,
)
from iree_lnbwd.arguments import Call
from iree_lnbwd.artifact import Manifest
from iree_lnbwd.description import Description, describe
from iree_lnbwd.devices import DEFAULT_DEVICE, DeviceUri, target_of
from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.errors import ArtifactError, CompileError, DeviceError
from iree_lnbwd.inspection import Kernel
from iree_lnbwd.schedule import WholeTensors, paths
from iree_lnbwd.spec import ENTRY, GRADIENTS, LayerNormSpec
from iree_lnbwd.targets import Target, find_target, targets
from iree_lnbwd.verify import Runs
from iree_lnbwd.version import __version__

_CALLS = ("through IREE's device, waiting for the result", "on the caller's stream, not waiting")

_EXIT_OK, _EXIT_MISS, _EXIT_ERROR = 0, 1, 2
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 where all went well, 1 where a verification missed, 2 where something could not be done;
        then one line on standard error says what.
    """
    # What follows "--" is iree-compile's, also where it looks like an option of ours.
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    options.extra_flags = tuple(words[cut + 1 :])
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (ArtifactError, CompileError, DeviceError, TypeError, ValueError) as error:
        print(f"iree-lnbwd: error: {error}", file=sys.stderr)
        return _EXIT_ERROR
    except KeyboardInterrupt:
        print("iree-lnbwd: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, `head` say, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="iree-lnbwd", description="Layer-norm backward modules, compiled by IREE."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    sub = commands.add_parser("targets", help="what can be compiled for, and what is verified")
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
    sub.add_argument("-o", "--output-dir", default=".", type=Path, help="made if need be")
    shown = sub.add_mutually_exclusive_group()
    shown.add_argument("--print-ir", action="store_true", help="print the MLIR, compile nothing")
    shown.add_argument(
        "--print-command",
        action="store_true",
        help="print the iree-compile command that takes --print-ir's output, compile nothing",
    )
    sub.set_defaults(command=_compile)

    sub = commands.add_parser(
        "verify", help="compile, run on real captured tensors, compare with the f64 reference"
    )
    sub.add_argument("--target", help="compile for this (default: what fits the device)")
    sub.add_argument("--device", help="run there (default: what runs the target)")
    sub.add_argument("--data", type=Path, help=".npz of cases (default: the captured tensors)")
    sub.add_argument(
        "--modules", type=Path, help="folder of modules to use instead of compiling them"
    )
    sub.add_argument(
        "--emulate",
        action="store_true",
        help="run the code for a GPU target in software, on a machine without that GPU",
    )
    sub.add_argument(
        "--normalized-shape", type=_dims, help="take random rows of this shape, not captured ones"
    )
    sub.add_argument("--dtype", default="f32", choices=DTYPES, help="of the random rows")
    sub.add_argument(
        "--rows", default=(1, 7, 64), type=_dims, help="how many random rows (default: 1,7,64)"
    )
    sub.set_defaults(command=_verify)

    sub = commands.add_parser("run", help="run a module on the arrays of an .npz")
    sub.add_argument("artifact", type=Path, help="a .vmfb")
    sub.add_argument("--device", default=DEFAULT_DEVICE, help="IREE device URI, e.g. cuda://1")
    sub.add_argument(
        "--input", required=True, type=Path, help=".npz with grad_output, input, mean, rstd, weight"
    )
    sub.add_argument("--output", required=True, type=Path, help=".npz to write the gradients to")
    sub.set_defaults(command=_run)

    sub = commands.add_parser("inspect", help="what a module is and what its kernels need")
    sub.add_argument("artifact", type=Path, help="a .vmfb")
    sub.set_defaults(command=_inspect)
    return parser


def _add_spec_options(parser: argparse.ArgumentParser) -> None:
    types = tuple(DTYPES)
    parser.add_argument("--normalized-shape", required=True, type=_dims, help="e.g. 4096 or 16,64")
    parser.add_argument("--dtype", default="f32", choices=types, help="of input and grad_input")
    parser.add_argument("--grad-output-dtype", choices=types, help="default: --dtype")
    parser.add_argument("--weight-dtype", choices=types, help="default: --dtype")
    parser.add_argument("--bias-dtype", choices=types, help="default: --weight-dtype")
    parser.add_argument("--no-weight", action="store_true", help="gamma is 1")
    parser.add_argument(
        "--output-mask",
        type=_mask,
        default=(True, True, True),
        help=f"three of 0 and 1, for {', '.join(GRADIENTS)} (default: 111)",
    )
    parser.add_argument("--rows", type=int, help="fix the number of rows (default: dynamic)")
    parser.add_argument(
        "--recompute-statistics",
        type=float,
        metavar="EPS",
        help="take no mean and rstd; recompute them from input with this eps",
    )


def _dims(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected ints such as 4096 or 16,64, got {text!r}"
        ) from None


def _mask(text: str) -> tuple[bool, ...]:
    if len(text) != len(GRADIENTS) or set(text) - {"0", "1"}:
        raise argparse.ArgumentTypeError(f"expected three of 0 and 1 such as 110, got {text!r}")
    return tuple(digit == "1" for digit in text)


def _spec(options: argparse.Namespace) -> LayerNormSpec:
    return LayerNormSpec(
        normalized_shape=options.normalized_shape,
        dtype=options.dtype,
        grad_output_dtype=options.grad_output_dtype,
        weight_dtype=options.weight_dtype,
        bias_dtype=options.bias_dtype,
        has_weight=not options.no_weight,
        output_mask=options.output_mask,
        rows=options.rows,
        recompute_eps=options.recompute_statistics,
    )


def _targets(_: argparse.Namespace) -> int:
    rows = [("name", "backend", "aliases", "verified")]
    rows += [(t.name, t.backend, " ".join(t.aliases), _verified(t)) for t in targets()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]))
    return _EXIT_OK


def _verified(target: Target) -> str:
    if target.backend == "cpu":
        return "run by the tests against f64 NumPy"
    return evidence.of_target(target.name)


def _compile(options: argparse.Namespace) -> int:
    spec, target = _spec(options), find_target(options.target)
    how = WholeTensors("asked for") if options.whole_tensors else None
    if options.print_ir:
        print(compiler.source_text(spec, target, how=how), end="")
    elif options.print_command:
        print(compiler.command_line(spec, target, extra_flags=options.extra_flags))
    else:
        start = time.perf_counter()
        made = compiler.compile(
            spec, target.name, options.output_dir, how=how, extra_flags=options.extra_flags
        )
        size = made.path.stat().st_size
        print(f"{made.path}  {size} bytes, {time.perf_counter() - start:.1f} s")
        print(made.manifest_path)
    return _EXIT_OK


def _verify(options: argparse.Namespace) -> int:
    load, where = _emulated(options) if options.emulate else _on_device(options)
    cases, data_name = _cases(options)
    print(f"{ENTRY} {where}, {data_name}\n")
    start = time.perf_counter()
    width = max((len(name) for name in cases), default=0)
    rows: list[verify.Row] = []
    fault = ""
    try:
        for row in verify.verify(cases, load):
            if not rows:
                print(verify.table_header(width))
            print(verify.table_line(row, width), flush=True)
            rows.append(row)
    except (emulator.Fault, emulator.VmError) as error:
        fault = str(error)
        print(f"FAULT: {fault}")
    print(f"\n{verify.EXPLANATION}\n")
    missed = sum(not row.comparison.passed for row in rows)
    verdict = "FAILED" if missed or fault or not rows else "passed"
    print(
        f"{verdict}: {len(rows) - missed} of {len(rows)} gradients within tolerance, "
        f"{len(cases)} cases, {time.perf_counter() - start:.1f} s"
    )
    return _EXIT_OK if verdict == "passed" else _EXIT_MISS


def _cases(options: argparse.Namespace) -> tuple[dict[str, Call], str]:
    """What to verify on, and what it is in words."""
    if options.normalized_shape is not None:
        if options.data is not None:
            raise ValueError("normalized-shape: expected no --data beside it")
        seed = secrets.randbits(63)
        rng = np.random.default_rng(seed)
        spec = LayerNormSpec(options.normalized_shape, options.dtype)
        calls = {f"random {m}": matrix.random_call(spec, m, rng) for m in options.rows}
        return calls, f"random rows of seed {seed}"
    if options.data is not None:
        captured, name = npz.read_cases(options.data), str(options.data)
    else:
        source = resources.files("iree_lnbwd") / "data" / "training_step.npz"
        with resources.as_file(source) as path:
            captured, name = npz.read_cases(path), "tensors captured from a training step"
    return {case: verify.bind_case(arrays, case=case) for case, arrays in captured.items()}, name


def _on_device(options: argparse.Namespace) -> tuple[Callable[[LayerNormSpec], Runs], str]:
    """How to load the module of a spec where the options say, and where that is in words."""
    target, uri = _where(options.target, options.device)

    def load(spec: LayerNormSpec) -> Runs:
        if options.modules is not None:
            name = f"{artifact.stem(spec, target.name)}.vmfb"
            return runtime.load(options.modules / name, str(uri))
        vmfb, _ = compiler.build(spec, target, extra_flags=options.extra_flags)
        return runtime.load_built(vmfb, str(uri))

    return load, f"for {target.name} on {uri}"


def _emulated(options: argparse.Namespace) -> tuple[Callable[[LayerNormSpec], Runs], str]:
    """The same in the emulator."""
    if options.device is not None:
        raise DeviceError("device: expected none beside --emulate")
    if options.target is None:
        raise ValueError("target: expected the name of a GPU target beside --emulate, got none")
    target = find_target(options.target)
    emulator.check_target(target)

    def load(spec: LayerNormSpec) -> Runs:
        name = artifact.stem(spec, target.name)
        if options.modules is not None:
            vmfb, _ = artifact.read(options.modules / f"{name}.vmfb")
        else:
            vmfb, _ = compiler.build(spec, target, extra_flags=options.extra_flags)
        return emulator.EmulatedLayerNormBackward(vmfb, source=name, progress=_show_launch)

    return load, f"for {target.name} in the emulator"


def _show_launch(launch: emulator.Launch) -> None:
    """What runs now, on a line of a terminal that the next line of the table overwrites."""
    if sys.stderr.isatty():
        said = f"{launch.kernel}: {launch.workgroups} workgroups of {launch.threads} threads"
        print(f"\x1b[2K{said}\r", end="", file=sys.stderr, flush=True)


def _where(target: str | None, device: str | None) -> tuple[Target, DeviceUri]:
    """What to compile for and where to run it, from either or both or neither."""
    if target is None:
        uri = DeviceUri.parse(device or DEFAULT_DEVICE)
        return target_of(uri), uri
    found = find_target(target)
    uri = DeviceUri.parse(device or found.driver)
    if uri.backend != found.backend:
        raise DeviceError(f"device: {found.name} ({found.backend}) does not run on {uri}")
    try:
        runtime.probe(uri)
    except DeviceError as error:
        raise DeviceError(f"{found.name}: nothing was run here: {error}") from error
    return found, uri


def _run(options: argparse.Namespace) -> int:
    arrays = npz.read(options.input)
    op = runtime.load(options.artifact, options.device)
    verify.check_names(arrays, str(options.input))
    gradients = op(
        arrays["grad_output"],
        arrays["input"],
        arrays.get("mean"),
        arrays.get("rstd"),
        arrays.get("weight"),
        arrays.get("bias"),
    )
    named = {k: v for k, v in gradients._asdict().items() if v is not None}
    npz.write(options.output, named)
    for name, array in named.items():
        print(f"{name}: {'x'.join(map(str, array.shape))} {array.dtype}")
    print(options.output)
    return _EXIT_OK


def _inspect(options: argparse.Namespace) -> int:
    vmfb, manifest = artifact.read(options.artifact)
    described = describe(vmfb, source=str(options.artifact))
    target = described.target
    for name, value in _facts(described, manifest, artifact.digest(vmfb)):
        print(f"{name:<10}{value}")
    print("kernels")
    for kernel in inspection.kernels(vmfb, target):
        print(f"  {kernel.name}\n    {_needs(kernel)}")
    return _EXIT_OK


def _facts(
    described: Description, manifest: Manifest | None, vmfb_sha256: str
) -> list[tuple[str, object]]:
    spec, target, schedule, launches, _ = described
    facts: list[tuple[str, object]] = [
        ("op", spec.name),
        ("target", f"{target.name} ({target.backend}): {_verified(target)}"),
        ("module", f"SHA-256 {vmfb_sha256}: {evidence.of_module(vmfb_sha256)}"),
        ("takes", ", ".join(f"{a.name} {a}" for a in spec.inputs)),
        ("fills", ", ".join(f"{r.name} {r}" for r in spec.results)),
        *(("path", path) for path in paths(schedule, spec)),
        *((("calls", _CALLS[launches is not None]),) if target.backend != "cpu" else ()),
    ]
    if manifest is None:
        return [*facts, ("manifest", "none beside the .vmfb; the above is from the module itself")]
    return [
        *facts,
        ("compiler", f"iree-base-compiler {manifest.compiler_version}"),
        ("flags", " ".join(manifest.flags)),
        ("IR", f"SHA-256 {manifest.ir_sha256}"),
    ]


def _needs(kernel: Kernel) -> str:
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
