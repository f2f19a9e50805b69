"""What evidence is bound to: a comment leaves it standing, whatever changes what runs does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from iree_lnbwd import NormSpec
from iree_lnbwd.compiling import compiler, iree_compile
from iree_lnbwd.errors import ArtifactError
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.verification import fingerprint
from iree_lnbwd.vmfb import artifact

SPEC = NormSpec((769,), "bf16")  # few rows, rows, and a last kernel that adds up


def built(text: str, target: str) -> bytes:
    flags = compiler.plan(SPEC, find_target(target))[1].flags
    return iree_compile.run(text, "none", flags, SPEC.name)


@pytest.fixture(scope="module", params=["sm_90", "gfx942"])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def text(target: str) -> str:
    return compiler.source_text(SPEC, find_target(target))


@pytest.fixture(scope="module")
def module(text: str, target: str) -> bytes:
    return built(text, target)


@pytest.mark.drawn
def test_comments_leave_it_as_it_is(text: str, target: str, module: bytes) -> None:
    commented = "// One more line.\n" + re.sub(
        r"^( *)(%\w+ = arith\.mulf)", r"\1// Two more lines,\n\n\1\2", text, flags=re.MULTILINE
    )
    assert commented.count("Two more") > 3
    other = built(commented, target)
    assert artifact.digest(other) != artifact.digest(module)  # as locations are in it
    assert fingerprint.of(other, source="it") == fingerprint.of(module, source="it")


@pytest.mark.drawn
def test_checks_of_arguments_and_names_leave_it_as_it_is(
    text: str, target: str, module: bytes
) -> None:
    """The host program differs, and launches the same."""
    unchecked, count = re.subn(
        r"^  hal\.buffer_view\.assert<.*\n.*\n", "", text, flags=re.MULTILINE
    )
    assert count == len(SPEC.arguments)
    other = built(unchecked.replace("\nmodule @", "\nmodule @another_"), target)
    assert artifact.digest(other) != artifact.digest(module)
    assert fingerprint.of(other, source="it") == fingerprint.of(module, source="it")


Change = Callable[[str], str]


def replaced(pattern: str, by: str) -> Change:
    return lambda text: re.sub(pattern, by, text, count=1)


def in_the_plan(change: Callable[[dict[str, Any]], None]) -> Change:
    """Of many rows."""

    def changed(text: str) -> str:
        found = re.search(r'(iree_lnbwd\.launches = )("(?:[^"\\]|\\.)*")', text)
        assert found
        launches = json.loads(json.loads(found[2]))
        change(launches["plans"][-1])
        words = found[1] + json.dumps(json.dumps(launches))
        return text[: found.start()] + words + text[found.end() :]

    return changed


CHANGES: dict[str, Change] = {
    "an instruction": replaced(r"arith\.subf (%x), (%mean_v)", r"arith.subf \2, \1"),
    "a constant of a kernel": replaced(r"(#inv_n = )\S+", r"\g<1>1.5e-3"),
    "a constant of a launch": replaced(r"(%rows_0_many = arith\.index_cast %)\w+", r"\1c0"),
    "bindings of a launch": replaced(
        r"(%partial_dgamma_many), (%partial_dbeta_many)\)", r"\2, \1)"
    ),
    "workgroups of a kernel": replaced(r"(#rows_x = .*, )\d+", r"\g<1>7"),
    "the plan's order": in_the_plan(lambda plan: plan["kernels"].reverse()),
    "the plan's bindings": in_the_plan(lambda plan: plan["kernels"][0]["reads"].reverse()),
    "the plan's scratch": in_the_plan(lambda plan: plan["scratch"][0].update(bytes=4)),
}


@pytest.mark.drawn
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_what_runs_changes_it(
    change: str, text: str, target: str, module: bytes
) -> None:
    changed = CHANGES[change](text)
    assert changed != text
    other = built(changed, target)
    assert fingerprint.of(other, source="it") != fingerprint.of(module, source="it")


def test_what_is_no_module() -> None:
    with pytest.raises(ArtifactError, match=r"^it: truncated, altered or not a .vmfb"):
        fingerprint.of(b"nothing", source="it")
