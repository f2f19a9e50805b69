"""From a spec and a target to an artifact, by iree-compile. The only user of the compiler."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from iree_lnbwd import artifact, ir
from iree_lnbwd.artifact import Artifact, Manifest
from iree_lnbwd.devices import host_cpu
from iree_lnbwd.errors import CompileError
from iree_lnbwd.spec import LayerNormSpec
from iree_lnbwd.targets import Target, find_target

_PACKAGE = "iree-base-compiler"

# f64 data must stay f64.
_COMMON_FLAGS = ("--iree-input-demote-f64-to-f32=false",)
_INPUT_TYPES = {ir.LINALG: "none", ir.STABLEHLO: "stablehlo"}


def compile(
    spec: LayerNormSpec,
    target: str = "host",
    output_dir: str | os.PathLike[str] = ".",
    *,
    extra_flags: Sequence[str] = (),
) -> Artifact:
    """Compiles a spec for a target and writes the .vmfb and its manifest.

    Args:
        spec: What to compute.
        target: A name or alias of `iree_lnbwd.targets`.
        output_dir: Made if need be. Both files appear whole or not at all.
        extra_flags: Further flags for iree-compile, recorded in the manifest.

    Returns:
        The artifact; the same arguments give the same bytes.

    Raises:
        ValueError: ``target`` is unknown.
        CompileError: The compiler is missing or failed.
        ArtifactError: ``output_dir`` cannot be written.
    """
    vmfb, manifest = build(spec, find_target(target), extra_flags=extra_flags)
    return artifact.write(Path(output_dir), vmfb, manifest)


def build(
    spec: LayerNormSpec,
    target: Target,
    *,
    source: str = ir.LINALG,
    extra_flags: Sequence[str] = (),
) -> tuple[bytes, Manifest]:
    """The module in memory: its bytes and its manifest.

    Args:
        spec: What to compute.
        target: What to compile for.
        source: The file of ``ir/`` to specialise; `ir.STABLEHLO` needs ``spec.rows``.
        extra_flags: Further flags for iree-compile.

    Raises:
        CompileError: The compiler is missing or failed.
    """
    try:
        from iree.compiler.tools import CompilerToolError, compile_str
    except ImportError as error:
        raise CompileError(
            f"compiling needs {_PACKAGE}, which is not installed; loading and running compiled "
            "modules does not"
        ) from error
    text = source_text(spec, target, source=source)
    compile_flags = flags(target, extra_flags=extra_flags)
    try:
        vmfb = compile_str(text, input_type=_INPUT_TYPES[source], extra_args=list(compile_flags))
    except CompilerToolError as error:
        raise CompileError(_first_errors(spec, target, str(error))) from error
    manifest = Manifest(
        spec=spec,
        target=target.name,
        compiler_version=compiler_version(),
        flags=compile_flags,
        ir_sha256=artifact.digest(text.encode()),
        vmfb_sha256=artifact.digest(vmfb),
        host_cpu=host_cpu() if target.name == "host" else None,
    )
    return vmfb, manifest


def source_text(spec: LayerNormSpec, target: Target, *, source: str = ir.LINALG) -> str:
    """The MLIR text that iree-compile is given."""
    return ir.specialize(read_ir(source), spec, target=target.name)


def flags(target: Target, *, extra_flags: Sequence[str] = ()) -> tuple[str, ...]:
    """What iree-compile is given besides the text."""
    return (*target.flags, *_COMMON_FLAGS, *extra_flags)


def command_line(spec: LayerNormSpec, target: Target, *, extra_flags: Sequence[str] = ()) -> str:
    """A shell command that compiles the text of `source_text`, given on its standard input."""
    words = (
        "iree-compile",
        "-",
        f"--iree-input-type={_INPUT_TYPES[ir.LINALG]}",
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


def _first_errors(spec: LayerNormSpec, target: Target, diagnostics: str) -> str:
    """iree-compile's own words, without the IR dump and the command that come after them."""
    said = [line for line in diagnostics.splitlines() if "error:" in line]
    code = re.search(r"Error code: (-?\d+)", diagnostics)
    detail = "\n".join(said[:3]) or f"iree-compile ended with {code[1] if code else 'no'} code"
    return f"compiling {spec.name} for {target.name} failed:\n{detail}"
