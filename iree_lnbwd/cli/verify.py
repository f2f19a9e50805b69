"""``iree-lnbwd verify``: runs a module, and compares with the f64 reference."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib import resources
from pathlib import Path

import numpy as np

from iree_lnbwd import emulator, runtime
from iree_lnbwd.bundles import serving
from iree_lnbwd.bundles.container import BundleFile, is_bundle
from iree_lnbwd.bundles.index import Member
from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import (
    EXIT_MISS,
    EXIT_OK,
    say,
    show_progress,
)
from iree_lnbwd.compiling import compiler
from iree_lnbwd.errors import (
    ArtifactError,
    DeviceError,
    counted,
    plain,
)
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri, target_of
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.ops import npz
from iree_lnbwd.ops.arguments import DEFAULT_EPS, BoundCall, rms_eps
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, OPS, Gate
from iree_lnbwd.ops.spec import MOST_ROWS, NormSpec
from iree_lnbwd.verification import matrix, verify
from iree_lnbwd.verification.verify import Runs
from iree_lnbwd.vmfb import artifact

_SILENT_S = 5.0


def add(commands: words.Commands) -> None:
    """Adds the command to the parser."""
    sub = commands.add_parser(
        "verify", help="compile, run on real captured tensors, compare with the f64 reference"
    )
    sub.add_argument(
        "bundle",
        nargs="?",
        type=words.path,
        help="verify the members of this bundle that run here, on random rows",
    )
    sub.add_argument("--target", help="compile for this (default: what fits the device)")
    sub.add_argument("--device", help="run there (default: what runs the target)")
    sub.add_argument("--data", type=words.path, help=".npz of cases (default: captured tensors)")
    sub.add_argument(
        "--modules", type=words.path, help="folder or bundle of modules to use instead of compiling"
    )
    sub.add_argument(
        "--emulate",
        action="store_true",
        help="run the code for a GPU target in software, on a machine without that GPU",
    )
    sub.add_argument(
        "--normalized-shape",
        type=words.shape,
        help="take random rows of this shape",
    )
    sub.add_argument("--op", choices=OPS, help="of the random rows (default: layer_norm_backward)")
    sub.add_argument(
        "--dtype",
        type=words.dtype,
        metavar=words.DTYPES_IN_HELP,
        help="of the random rows (default: f32)",
    )
    sub.add_argument(
        "--from-output", action="store_true", help="of the backward that takes the output"
    )
    sub.add_argument("--gate", choices=[gate.value for gate in Gate], help="with a gate there")
    sub.add_argument("--weight-sets", action="store_true", help="with three sets of weights")
    sub.add_argument("--strided-rows", action="store_true", help="with rows apart in memory")
    sub.add_argument(
        "--rows", type=words.ints, help="how many random rows, in a call each (default: 1,7,64)"
    )
    sub.set_defaults(command=_run, takes_flags=_compiles)


def _compiles(options: argparse.Namespace) -> bool:
    return options.modules is None and options.bundle is None


def _run(options: argparse.Namespace) -> int:
    if options.bundle is not None:
        return _verify_bundle(options)
    load, where = _emulated(options) if options.emulate else _on_device(options)
    cases, data_name = _cases(options)
    ops = dict.fromkeys(call.spec.op for call in cases.values() if call.spec is not None)
    say(f"{', '.join(ops)} {where}, {data_name}")
    say("")
    return _judge(verify.verify(cases, load), cases)


def _verify_bundle(options: argparse.Namespace) -> int:
    """Each member on the device that runs it, and then which members run on none."""
    for name in ("target", "data", "modules", "normalized_shape", "op", "dtype", "gate"):
        if (value := getattr(options, name)) is not None:
            raise ValueError(f"{name}: expected none beside a bundle, got {value}")
    for name in ("emulate", "from_output", "weight_sets", "strided_rows"):
        if getattr(options, name):
            raise ValueError(f"{name}: expected none beside a bundle")
    file = BundleFile(options.bundle)
    given = None if options.device is None else DeviceUri.parse(options.device)
    counts = _checked_rows((1, 7, 64) if options.rows is None else options.rows)
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
        say(line)
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
                say(line)
            say(verify.table_line(row, width))
            rows.append(row)
    except (emulator.Fault, emulator.VmError) as error:
        fault = str(error)
        say(f"FAULT: {fault}")
    for line in ("", *verify.EXPLANATION.splitlines(), ""):
        say(line)
    missed = sum(not row.comparison.passed for row in rows)
    verdict = "FAILED" if missed or fault or not rows else "passed"
    judged = f"{len(rows) - missed} of {counted(len(rows), 'result')} within tolerance"
    if fault:
        judged = f"{judged}, then a fault" if rows else "a fault before the first result"
    seconds = time.perf_counter() - start
    say(f"{verdict}: {judged}, {counted(len(cases), 'case')}, {seconds:.1f} s")
    return EXIT_OK if verdict == "passed" else EXIT_MISS


def _cases(options: argparse.Namespace) -> tuple[dict[str, BoundCall], str]:
    """The calls to verify on, and a description of them."""
    if options.normalized_shape is not None:
        if options.data is not None:
            raise ValueError("normalized-shape: expected no --data beside it")
        return _random_cases(
            _random_spec(options),
            (1, 7, 64) if options.rows is None else options.rows,
        )
    for name in ("op", "dtype", "rows", "from_output", "gate", "weight_sets", "strided_rows"):
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
        gate=options.gate,
        weight_sets=options.weight_sets,
        strided_rows=options.strided_rows,
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
        raise ValueError(f"rows: expected different ints from 0 to {MOST_ROWS}, got {rows}")
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
    target, show = find_target(options.target), _launch_shower()
    emulated_norm.check_target(target)

    def load(spec: NormSpec) -> Runs:
        name = artifact.stem(spec, target.name)
        if options.modules is None:
            vmfb, _ = compiler.build(spec, target, extra_flags=options.extra_flags)
            return emulated_norm.EmulatedNorm(vmfb, source=name, progress=show)
        path = options.modules / f"{name}.vmfb"
        if is_bundle(options.modules):
            vmfb = serving.read(BundleFile(options.modules), spec, target)
        else:
            vmfb, _ = artifact.read(path)
        op = emulated_norm.EmulatedNorm(vmfb, source=str(path), progress=show)
        _expect_module(path, op.spec, op.target)
        return op

    return load, f"for {target.name} in the emulator"


def _expect_module(path: Path, spec: NormSpec, target: str) -> None:
    """Expects a module to compute what its file's name says."""
    if (name := artifact.stem(spec, target)) != path.stem:
        raise ArtifactError(f"{path}: expected the module that it is named after, got {name}")


def _launch_shower() -> Callable[[emulator.Launch], None]:
    """What shows each launch on a terminal, and in a log one when nothing was said for long."""
    said_at = time.perf_counter()

    def show(launch: emulator.Launch) -> None:
        nonlocal said_at
        now = time.perf_counter()
        if sys.stderr.isatty() or now - said_at > _SILENT_S:
            threads = f"{launch.workgroups} workgroups of {launch.threads} threads"
            show_progress(f"emulating {launch.kernel}: {threads}")
            said_at = now

    return show


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
