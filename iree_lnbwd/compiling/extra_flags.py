"""The flags of iree-compile that are compatible with a module's manifest."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from iree_lnbwd.errors import shown

_FLAG = re.compile(r"--?(?P<name>\w[\w.-]*)(?P<value>=.*)?", re.ASCII | re.DOTALL)

_FILES = "use other files or tools, for which a manifest does not vouch"
# Effects that are not allowed, and the flags that have them; prefixes of names end in "-".
_REFUSED: Mapping[str, tuple[str, ...]] = {
    "decide what iree-compile reads and writes": (
        *("o", "output-format", "compile-from", "compile-mode", "compile-to", "split-input-file"),
        *("emit-mlir-bytecode", "emit-mlir-bytecode-version", "iree-vm-c-module-output-format"),
        "iree-vm-bytecode-module-output-format",
    ),
    "have iree-compile tell something instead of compiling": (
        *("h", "help", "help-hidden", "help-list", "help-list-hidden", "version"),
        *("iree-hal-list-target-backends", "iree-list-plugins", "iree-llvmcpu-list-targets"),
    ),
    "decide the target": (
        *("iree-hal-target-", "iree-hal-local-", "iree-hal-default-device", "iree-cuda-target"),
        *("iree-cuda-target-", "iree-rocm-target", "iree-rocm-target-", "iree-rocm-use-spirv"),
        *("iree-rocm-container-type", "iree-llvmcpu-target-", "iree-llvmcpu-link-embedded"),
        "iree-llvmcpu-link-static",
    ),
    "change the input or its element types": (
        *("iree-input-", "iree-opt-numeric-precision-reduction"),
    ),
    _FILES: (
        *("iree-cuda-use-ptxas", "iree-cuda-use-ptxas-", "iree-flow-dump-dispatch-graph"),
        *("iree-hal-preprocess-executables-with", "iree-hal-substitute-executable-"),
        *("iree-link-bitcode", "iree-load-plugin", "iree-opt-export-parameters"),
        *("iree-opt-import-parameters", "iree-opt-splat-parameters", "iree-parameter-"),
        *("iree-plugin", "iree-vm-bytecode-source-listing", "load"),
    ),
}
# Options that take the path of a file have names with such ends, in IREE, MLIR and LLVM.
_TAKES_A_PATH = re.compile(
    r"(?:.*-)?(?:files?|filename|file-name|filename-prefix|file-path-prefix|path|dir|directory"
    r"|dotcfg|mssa|to|from|library|plugin|reproducer|replay|summary|summaries|channel-base|abilist"
    r"|(?:function|module)-list|workload-def|ctx-profile)"
)
# These flags write further files beside the module.
_LISTINGS = re.compile(r"iree-hal-dump-executable-.*-to|dump-compilation-phases-to")


def check_extra_flags(extra_flags: object) -> tuple[str, ...]:
    """The flags as a tuple.

    Args:
        extra_flags: The flags that iree-compile is to be given besides ours.

    Raises:
        TypeError: They are no sequence of strings. A single string is refused, because its letters
            would be taken for flags.
        ValueError: One of them is no flag, or would make the module differ from its manifest.
    """
    if not isinstance(extra_flags, Sequence) or isinstance(extra_flags, str | bytes | bytearray):
        raise TypeError(f"extra_flags: expected a sequence of strings, got {shown(extra_flags)}")
    for flag in extra_flags:
        if not isinstance(flag, str):
            raise TypeError(f"extra_flags: expected a sequence of strings, got {shown(flag)} in it")
        if (expected := _expected_instead(flag)) is not None:
            raise ValueError(f"extra_flags: expected {expected}, got {shown(flag)}")
    return tuple(extra_flags)


def _expected_instead(flag: str) -> str | None:
    """The expectation that a flag breaks; None if the flag is allowed."""
    match = _FLAG.fullmatch(flag)
    if match is None or not _is_argument(flag):
        return "words like --name or --name=value"
    name = match["name"]
    for what, names in _REFUSED.items():
        if any(name == known or (known[-1] == "-" and name.startswith(known)) for known in names):
            return f"no flags that {what}"
    if match["value"] and _TAKES_A_PATH.fullmatch(name) and not _LISTINGS.fullmatch(name):
        return f"no flags that {_FILES}"
    return None


def _is_argument(word: str) -> bool:
    """Whether a process can be given this text as an argument."""
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False
