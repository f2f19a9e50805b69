"""From a spec and a target to an artifact, by iree-compile. The only user of the compiler."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from iree_lnbwd import artifact, ir, schedule
from iree_lnbwd.artifact import Artifact, Manifest
from iree_lnbwd.devices import host_cpu
from iree_lnbwd.errors import CompileError
from iree_lnbwd.schedule import Schedule, WholeTensors
from iree_lnbwd.spec import LayerNormSpec
from iree_lnbwd.targets import Target, find_target

_PACKAGE = "iree-base-compiler"

# f64 data must stay f64.
_COMMON_FLAGS = ("--iree-input-demote-f64-to-f32=false",)
_INPUT_TYPE = "none"  # linalg and what is below it


def compile(
    spec: LayerNormSpec,
    target: str = "host",
    output_dir: str | os.PathLike[str] = ".",
    *,
    how: Schedule | None = None,
    extra_flags: Sequence[str] = (),
) -> Artifact:
    """Compiles a spec for a target and writes the .vmfb and its manifest.

    Args:
        spec: What to compute.
        target: A name or alias of `iree_lnbwd.targets`.
        output_dir: Made if need be. Both files appear whole or not at all.
        how: The schedule; None takes `schedule.choose`'s.
        extra_flags: Further flags for iree-compile, recorded in the manifest.

    Returns:
        The artifact; the same arguments give the same bytes.

    Raises:
        ValueError: ``target`` is unknown, or the schedule is illegal for it and the spec.
        CompileError: The compiler is missing or failed.
        ArtifactError: ``output_dir`` cannot be written.
    """
    vmfb, manifest = build(spec, find_target(target), how=how, extra_flags=extra_flags)
    return artifact.write(Path(output_dir), vmfb, manifest)


def build(
    spec: LayerNormSpec,
    target: Target,
    *,
    how: Schedule | None = None,
    extra_flags: Sequence[str] = (),
) -> tuple[bytes, Manifest]:
    """The module in memory: its bytes and its manifest.

    Args:
        spec: What to compute.
        target: What to compile for.
        how: The schedule; None takes `schedule.choose`'s.
        extra_flags: Further flags for iree-compile.

    Raises:
        ValueError: The schedule is illegal for the spec and the target.
        CompileError: The compiler is missing or failed.
    """
    how = schedule.choose(spec, target) if how is None else how
    text = source_text(spec, target, how=how)
    all_flags = flags(target, extra_flags=extra_flags)
    vmfb = _iree_compile(text, _INPUT_TYPE, all_flags, f"{spec.name} for {target.name}")
    manifest = Manifest(
        spec=spec,
        target=target.name,
        schedule=how,
        compiler_version=compiler_version(),
        flags=all_flags,
        ir_sha256=artifact.digest(text.encode()),
        vmfb_sha256=artifact.digest(vmfb),
        host_cpu=_host_cpu(target),
    )
    return vmfb, manifest


def build_oracle(spec: LayerNormSpec, target: Target) -> bytes:
    """The module that the StableHLO specification of the op compiles to; needs ``spec.rows``.

    Raises:
        CompileError: The compiler is missing or failed.
    """
    if spec.rows is None:
        raise ValueError("rows: expected a fixed number for StableHLO, got None")
    oracle = (read_ir(ir.STABLEHLO),)
    text = ir.module(oracle, spec, target, WholeTensors(), host_cpu=_host_cpu(target))
    return _iree_compile(text, "stablehlo", flags(target), f"{spec.name}, StableHLO")


def source_text(spec: LayerNormSpec, target: Target, *, how: Schedule | None = None) -> str:
    """The MLIR text that iree-compile is given.

    Raises:
        ValueError: The schedule is illegal for the spec and the target.
    """
    how = schedule.choose(spec, target) if how is None else how
    if not isinstance(how, WholeTensors) and (why := how.illegal(spec, target)) is not None:
        raise ValueError(f"schedule: illegal for {spec.name} on {target.name}: {why}; got {how}")
    texts = tuple(read_ir(name) for name in ir.sources(spec, how))
    return ir.module(texts, spec, target, how, host_cpu=_host_cpu(target))


def flags(target: Target, *, extra_flags: Sequence[str] = ()) -> tuple[str, ...]:
    """What iree-compile is given besides the text.

    Raises:
        TypeError: ``extra_flags`` is a single string, whose letters would be taken for flags.
    """
    if isinstance(extra_flags, str):
        raise TypeError(f"extra_flags: expected a sequence of strings, got {extra_flags!r}")
    return (*target.flags, *_COMMON_FLAGS, *extra_flags)


def command_line(spec: LayerNormSpec, target: Target, *, extra_flags: Sequence[str] = ()) -> str:
    """A shell command that compiles the text of `source_text`, given on its standard input."""
    words = (
        "iree-compile",
        "-",
        f"--iree-input-type={_INPUT_TYPE}",
        *flags(target, extra_flags=extra_flags),
        "-o",
        f"{artifact.stem(spec, target.name)}.vmfb",
    )
    return shlex.join(words)


def read_ir(name: str) -> str:
    """The text of a file of ``ir/``: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent
    for folder in (package / "_ir", package.parent / "ir"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    raise FileNotFoundError(f"{name}: not in {package / '_ir'} and not in {package.parent / 'ir'}")


def compiler_version() -> str:
    """Of the installed iree-base-compiler.

    Raises:
        CompileError: It is not installed.
    """
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise CompileError(f"compiling needs {_PACKAGE}, which is not installed") from error


def _host_cpu(target: Target) -> str | None:
    return host_cpu() if target.is_this_cpu else None


def _iree_compile(text: str, input_type: str, all_flags: Sequence[str], what: str) -> bytes:
    try:
        from iree.compiler.tools import CompilerToolError, compile_str
    except ImportError as error:
        raise CompileError(
            f"compiling needs {_PACKAGE}, which is not installed; loading and running compiled "
            "modules does not"
        ) from error
    try:
        vmfb: bytes = compile_str(text, input_type=input_type, extra_args=list(all_flags))
    except CompilerToolError as error:
        raise CompileError(f"compiling {what} failed: {_first_errors(str(error))}") from error
    return vmfb


def _first_errors(diagnostics: str) -> str:
    """iree-compile's own words, without the IR dump and the command that come after them."""
    said = [
        line
        for line in diagnostics.splitlines()
        if "error:" in line or line.startswith("iree-compile: ")
    ]
    code = re.search(r"Error code: (-?\d+)", diagnostics)
    return "; ".join(said[:3]) or f"iree-compile ended with {code[1] if code else 'no'} code"
