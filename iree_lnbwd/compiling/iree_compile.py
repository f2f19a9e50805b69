"""Runs iree-compile and iree-opt as processes. This is the only module that uses the compiler.

iree-compile runs its linker through a shell, and both write to files whose names can be guessed. So
it gets a folder for us alone, whose path a shell would not split, and finds the linker there.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from iree_lnbwd import notices
from iree_lnbwd.disk import folders
from iree_lnbwd.errors import CompileError

_PACKAGE = "iree-base-compiler"
_RUNTIME = "iree-base-runtime"
# Variables that would make it load other code, or link differently than the manifest says.
_NOT_HANDED_ON = ("IREE_LOAD_", "IREE_LLVM_", "LLD_")
_WITHOUT_THREADS = "--mlir-disable-threading"  # a module is too small to gain what they cost
# Passes of MLIR's own: functions inlined, branches on constants taken, what is dead left out.
_FOLDING = ("--inline", "--canonicalize", "--cse", "--symbol-dce")
_LINKER = "IREE_LLVM_EMBEDDED_LINKER_PATH"
# SIGCHLD, which must not be ignored if children are waited for, and signals that Python ignores.
_SIGNALS = (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)
# Messages of the tools and of LLVM, without the IR and the stack that follow them.
_TELLING = re.compile(r"(?i:\berror\b)|^iree-\w+: |^Linking failed|\bAssertion\b")
# An error, after its place in the text if it has one. LLVM's backends go on after one, and the tool
# ends with 0: LLVMContext::diagnose returns to "a self-consistent state, even though the generated
# code need not be correct" (LLVM's LLVMContext.h).
_ERROR = re.compile(r"^(?:\S+: )?error: ", re.MULTILINE)
_VERSION = re.compile(r"compiler version (\S+(?: @ \w+)?)")
_MOST_LINES, _MOST_LETTERS = 3, 300


def is_installed() -> bool:
    """Whether there is a compiler; it may fail."""
    try:
        metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


def version() -> str:
    """The version of iree-base-compiler, or of the other compiler that IREE is told to use.

    Raises:
        CompileError: It is not installed.
    """
    try:
        installed = metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise CompileError(_absent()) from error
    if not os.environ.get("IREE_TOOL_PATH"):
        return installed
    try:
        command = (_tool("iree-compile"), "--version")
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise CompileError(f"IREE_TOOL_PATH: {folders.why(error, Path(command[0]))}") from error
    match = _VERSION.search(said.stdout.decode(errors="replace"))
    if match is None:
        raise CompileError(f"IREE_TOOL_PATH: {command[0]} does not say which version it is")
    return match[1]


def words(input_type: str, flags: Sequence[str], output: str) -> tuple[str, ...]:
    """The command that compiles the text on its standard input."""
    own = (f"--iree-input-type={input_type}", _WITHOUT_THREADS, "-o", output)
    return ("iree-compile", "-", *own, *flags)


def run(text: str, input_type: str, flags: Sequence[str], what: str) -> bytes:
    """The output of iree-compile for a text.

    Args:
        text: MLIR.
        input_type: The dialects of the text, as iree-compile names them.
        flags: Further flags.
        what: What is compiled, for messages.

    Raises:
        CompileError: The compiler is missing, failed, or had nowhere to work.
    """

    def arguments(output: str) -> tuple[str, ...]:
        return words(input_type, flags, output)[1:]

    return _written_by("iree-compile", arguments, text, f"compiling {what}")


def fold(text: str, what: str) -> str:
    """A text after the compiler's inlining and folding, without what is dead then.

    Args:
        text: MLIR, as `run` takes it.
        what: What it computes, for messages.

    Raises:
        CompileError: iree-opt is missing, failed, or had nowhere to work.
    """

    def arguments(output: str) -> tuple[str, ...]:
        return ("-", *_FOLDING, _WITHOUT_THREADS, "-o", output)

    return _written_by("iree-opt", arguments, text, f"folding {what}").decode()


def _written_by(
    name: str, arguments: Callable[[str], tuple[str, ...]], text: str, doing: str
) -> bytes:
    """What a tool of the compiler writes to a file, given a text on its standard input.

    Args:
        name: The tool.
        arguments: Its arguments, for the path of that file.
        text: MLIR.
        doing: What for, for messages.
    """
    tool, linker = _tool(name), _tool("iree-lld")
    try:
        with folders.temporary() as temporary:
            folder = Path(temporary)
            source, output, said = (folder / file for file in ("module.mlir", "output", "said.txt"))
            source.write_bytes(text.encode())
            (folder / "iree-lld").symlink_to(linker)
            handed_on = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_HANDED_ON)}
            environment = {**handed_on, "TMPDIR": temporary, _LINKER: str(folder / "iree-lld")}
            ended = _ended((tool, *arguments(str(output))), environment, source, said)
            remarks = said.read_text(encoding="utf-8", errors="replace")
            if ended or not output.exists() or _ERROR.search(remarks):
                raise CompileError(f"{doing} failed: {_failure(name, ended, remarks)}")
            written = output.read_bytes()
    except OSError as error:
        raise CompileError(f"{doing} failed: {folders.why(error, Path(tool))}") from error
    notices.show(remarks)
    return written


def _tool(name: str) -> str:
    try:
        from iree.compiler.tools import binaries

        return str(Path(binaries.find_tool(name)).resolve())
    except ModuleNotFoundError as error:
        raise CompileError(
            f"{_absent()}; loading and running compiled modules does not need it"
        ) from error
    except ImportError as error:
        raise CompileError(f"{_PACKAGE} cannot be imported: {error}") from error
    except ValueError as error:
        raise CompileError(f"{_absent()}, for {name} is missing") from error


def _absent() -> str:
    """How to get the compiler: of the runtime's release, because they are one pair."""
    try:
        release = f"=={metadata.version(_RUNTIME)}"
    except metadata.PackageNotFoundError:
        release = ""
    return f"compiling needs {_PACKAGE}, which is not installed: pip install {_PACKAGE}{release}"


def _ended(
    command: tuple[str, ...], environment: Mapping[str, str], source: Path, said: Path
) -> int | None:
    """The exit code of a command, negative for a signal; None if the system does not tell."""
    # Not `subprocess`: it cannot make a child wait for its children again if we ignore ours, and
    # a linker that nobody can wait for counts as failed.
    process = os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=(
            (os.POSIX_SPAWN_OPEN, 0, str(source), os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(said), os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ),
        setsigdef=_SIGNALS,
    )
    try:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    except ChildProcessError:
        return None
    except BaseException:  # interrupted
        with contextlib.suppress(ChildProcessError, ProcessLookupError):  # if it is still there
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        raise


def _failure(tool: str, ended: int | None, remarks: str) -> str:
    """How it ended, and the first lines that say why."""
    telling = [line.strip() for line in remarks.splitlines() if _TELLING.search(line)]
    lines = [
        "".join(letter if letter.isprintable() else " " for letter in line[:_MOST_LETTERS])
        for line in telling[:_MOST_LINES]
    ]
    if ended is not None and ended < 0:
        lines.insert(0, f"{tool} was killed by {_signal_name(-ended)}")
    return "; ".join(lines) or f"{tool} ended with code {ended or 0} and said nothing of use"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
