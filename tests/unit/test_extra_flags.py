"""Flags that would make a module something else than its manifest says are refused by name."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from iree.compiler.tools.binaries import find_tool

from iree_lnbwd.compiling.extra_flags import check_extra_flags

READS_AND_WRITES = "no flags that decide what iree-compile reads and writes"
TELLS = "no flags that have iree-compile tell something instead of compiling"
TARGET = "no flags that decide the target"
TYPES = "no flags that change the input or its element types"
FILES = "no flags that use other files or tools, for which a manifest does not vouch"
WORDS = "words like --name or --name=value"

REFUSED = {
    "-o": READS_AND_WRITES,
    "-o=x.vmfb": READS_AND_WRITES,
    "--o=x.vmfb": READS_AND_WRITES,
    "--compile-to=input": READS_AND_WRITES,
    "-compile-to=vm": READS_AND_WRITES,
    "--compile-to": READS_AND_WRITES,
    "--compile-from=vm": READS_AND_WRITES,
    "--compile-mode=hal-executable": READS_AND_WRITES,
    "--output-format=vm-c": READS_AND_WRITES,
    "--iree-vm-bytecode-module-output-format=flatbuffer-text": READS_AND_WRITES,
    "--help": TELLS,
    "-h": TELLS,
    "--help-hidden": TELLS,
    "--version": TELLS,
    "--iree-hal-list-target-backends": TELLS,
    "--iree-hal-target-device=local": TARGET,
    "--iree-hal-target-backends=llvm-cpu": TARGET,
    "--iree-hal-local-target-device-backends=vmvx": TARGET,
    "--iree-llvmcpu-target-cpu=znver4": TARGET,
    "--iree-llvmcpu-target-cpu-features=+avx512f": TARGET,
    "--iree-llvmcpu-target-triple=riscv64": TARGET,
    "--iree-rocm-target=gfx1": TARGET,
    "-iree-rocm-target-features=+xnack": TARGET,
    "--iree-cuda-target=sm_90": TARGET,
    "--iree-input-type=stablehlo": TYPES,
    "--iree-input-demote-f32-to-f16": TYPES,
    "--iree-input-demote-f64-to-f32=true": TYPES,
    "--iree-opt-numeric-precision-reduction": TYPES,
    "--mlir-pass-pipeline-crash-reproducer=r.mlir": FILES,
    "--info-output-file=x": FILES,
    "--iree-flow-dump-dispatch-graph": FILES,
    "--iree-hal-substitute-executable-object=rows=x.o": FILES,
    "--iree-hal-preprocess-executables-with=touch x": FILES,
    "--iree-llvmcpu-static-library-output-path=x.o": FILES,
    "--iree-codegen-tuning-spec-path=x.mlir": FILES,
    "--iree-load-plugin=x": FILES,
    "--load=x.so": FILES,
    "": WORDS,
    "-": WORDS,
    "--": WORDS,
    "---o=x": WORDS,
    "x.mlir": WORDS,
    "@x": WORDS,
    "O1": WORDS,
    " --iree-opt-level=O1": WORDS,
    "--iree-opt-level O1": WORDS,
    "--a\0": WORDS,
    "--a=\0": WORDS,
    "--a=\ud800": WORDS,
}


@pytest.mark.parametrize("flag", REFUSED)
def test_refused_flag(flag: str) -> None:
    said = f"extra_flags: expected {REFUSED[flag]}, got {flag!r}"
    for flags in ((flag,), ["--iree-opt-level=O1", flag]):
        with pytest.raises(ValueError, match="extra_flags") as caught:
            check_extra_flags(flags)
        assert str(caught.value) == said
        assert "\n" not in said


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ["--iree-opt-level=O1", "-iree-opt-level=O2"],
        ["--iree-hal-dump-executable-files-to=folder with spaces", "--mlir-timing"],
        ["--dump-compilation-phases-to=-", "--iree-opt-strip-assertions", "--verify-machineinstrs"],
        ["--iree-hal-dump-executable-intermediates-to=ünïcode\udcff\n"],
        ["--enable-vplan-native-path"],
    ],
)
def test_other_flags_stay_as_they_are(flags: Any) -> None:
    assert check_extra_flags(flags) == tuple(flags)


@pytest.mark.parametrize(
    ("flags", "came"),
    [
        (None, "None"),
        (5, "5"),
        ([1], "1 in it"),
        (["--mlir-timing", None], "None in it"),
        (b"x", "b'x'"),
        ([b"--mlir-timing"], "b'--mlir-timing' in it"),
        ("--mlir-timing", "'--mlir-timing'"),
        ({"--mlir-timing": 1}, "{'--mlir-timing': 1}"),
        ({"--mlir-timing"}, "{'--mlir-timing'}"),
        (bytearray(b"x"), r"bytearray\(b'x'\)"),
    ],
)
def test_what_is_no_sequence_of_strings(flags: Any, came: str) -> None:
    with pytest.raises(
        TypeError, match=f"extra_flags: expected a sequence of strings, got {came}$"
    ):
        check_extra_flags(flags)


# What their descriptions call a file, a path or a tool, and what they take for none.
TAKES_NO_FILE = re.compile(
    r"cgscc-inline-replay-format|sample-profile-inline-replay-format|.*-threshold|.*-percent"
    r"|filter-print-source-locs|filter-save-modules|static-func-strip-dirname-prefix"
    r"|max-sched-reorder|max-deopt-or-unreachable-succ-check-depth|dfa-max-.*|gvn-hoist-max-bbs"
    r"|dse-memoryssa-path-check-limit|profile-correlate|lto-embed-bitcode"
    r"|iree-llvmcpu-enable-llvm-ukernels|iree-llvmgpu-prefetch-num-stages"
    r"|iree-hal-benchmark-dispatch-repeat-count"
)
LISTINGS = re.compile(r"iree-hal-dump-executable-\w+-to|dump-compilation-phases-to")


def test_no_option_of_this_compiler_that_takes_a_file_gets_through() -> None:
    tool = find_tool("iree-compile")
    said = subprocess.run([tool, "--help-hidden"], capture_output=True, text=True, check=True)
    option = re.compile(r"^ {2,4}--?(?P<name>\w[\w.-]*)(?P<value>=<.*?>|=|) +- (?P<does>.*)$", re.M)
    found, through = 0, set()
    for match in option.finditer(said.stdout):
        words = f"{match['value']} {match['does']}"
        if match["value"] and re.search(
            r"(?i)\b(files?|filename|paths?|director(y|ies)|commands?|plugins?|tools?)\b", words
        ):
            found += 1
            try:
                check_extra_flags([f"--{match['name']}=x"])
            except ValueError:
                continue
            through.add(match["name"])
    assert found > 50
    assert {name for name in through if not TAKES_NO_FILE.fullmatch(name)} == {
        name for name in through if LISTINGS.fullmatch(name)
    }
