"""The machine code of our modules for AMD GPUs, in the emulator: it passes, and broken it fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from support import built, random_generator, without_few_rows

from iree_lnbwd.emulator import Fault
from iree_lnbwd.emulator.amdgcn import disassemble
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Forward, OnePass, Schedule, choose
from iree_lnbwd.verification import matrix, verify
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.vmfb import executables

TARGETS = ("gfx942", "gfx1100")
ROWS = (1, 7, 64)
Edit = Callable[[str], str]


def schedule_of(spec: NormSpec, target: str) -> Schedule:
    """Without the kernel for few rows; or with that one alone, where rows are fixed."""
    found = find_target(target)
    return choose(spec, found) if spec.rows else without_few_rows(spec, found)


def passes(
    spec: NormSpec,
    target: str,
    *rows: int,
    how: Schedule | None = None,
    edit: Edit = lambda text: text,
) -> bool:
    """Every gradient is within its tolerance, and nothing is a fault."""
    vmfb, _ = built(spec, find_target(target), how or schedule_of(spec, target))
    op = EmulatedNorm(vmfb, edit=edit)
    rng = random_generator()
    calls = {str(count): matrix.random_call(spec, count, rng) for count in rows}
    try:
        results = list(verify.verify(calls, lambda _: op))
    except Fault as fault:
        print(fault)
        return False
    for result in results:
        print(result.case, result.result, result.comparison.ratio)
    return all(result.comparison.ratio <= 1 for result in results)


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("columns", [64, 769, 1000, 1024, 4096])
def test_one_pass(columns: int, dtype: str, target: str) -> None:
    assert passes(NormSpec((columns,), dtype), target, *ROWS)


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "spec",
    [
        NormSpec((16384,), "f32"),
        NormSpec((65536,), "bf16"),
        NormSpec((769,), "f16"),
        NormSpec((1024,), "f32", grad_output_dtype="bf16", weight_dtype="f16"),
        NormSpec((769,), "f32", has_weight=False),
        NormSpec((769,), "f32", output_mask=(True, False, False)),
        NormSpec((64,), "bf16", output_mask=(True, False, True)),
        NormSpec((769,), "f32", output_mask=(False, True, True)),
        NormSpec((769,), "bf16", eps=1e-5),
        NormSpec((192,), "f32", rows=7),
    ],
    ids=lambda spec: spec.name,
)
def test_other_homes(spec: NormSpec, target: str) -> None:
    assert passes(spec, target, *((7,) if spec.rows or spec.columns > 4096 else (1, 7)))


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["gfx90a", "gfx950", "gfx1201"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_relatives(dtype: str, target: str) -> None:
    assert passes(NormSpec((769,), dtype), target, 7)


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_inf_and_nan_stay_in_their_rows(dtype: str, target: str) -> None:
    spec = NormSpec((1000,), dtype)
    op = EmulatedNorm(built(spec, find_target(target), schedule_of(spec, target))[0])
    calls = {"adversarial": matrix.adversarial_call(spec, random_generator())}
    assert all(row.comparison.ratio <= 1 for row in verify.verify(calls, lambda _: op))


def code_of(spec: NormSpec, target: str, how: Schedule) -> str:
    """All kernels of a module."""
    vmfb, _ = built(spec, find_target(target), how)
    return "".join(map(disassemble, {export.code for export in executables.exports(vmfb)}))


@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950"])
def test_what_vector_registers_cannot_hold_is_in_accumulation_registers(target: str) -> None:
    spec = NormSpec((1000,), "f16", from_output=True, has_weight=False, residual_dtype="f32")
    how = OnePass(1, groups=8, warps=1, vector=4, subgroup_rows=2)
    assert passes(spec, target, 7, how=how)
    assert "v_accvgpr_read_b32" in code_of(spec, target, how)


def test_bits_of_three_registers_at_once() -> None:
    spec = NormSpec((1023,), "bf16", op="rms_norm", eps=1e-5, residual_dtype="bf16")
    how = Forward(rows=1, threads=64, vector=1, chunks=4, in_registers=False)
    assert passes(spec, "gfx950", 7, how=how)
    assert "v_bitop3_b32" in code_of(spec, "gfx950", how)


def test_firmware_that_does_not_preload_arguments() -> None:
    """The code ahead of the entry loads them."""

    def edit(text: str) -> str:
        text, count = re.subn(r"(kernarg_preload_length) [1-9]\d*", r"\1 0", text)
        assert count == 2
        return text

    assert passes(NormSpec((1000,), "f32"), "gfx942", 7, edit=edit)


@pytest.mark.parametrize("target", TARGETS)
def test_more_rows_than_workgroups(target: str) -> None:
    assert passes(NormSpec((64,), "f32"), target, 5000)


# Each is a small change of what the machine code says, and N of a module that has such code. What a
# wave32 target writes otherwise is written for it.
# 769 columns: 448 or 416 threads have one each, and the first of them another.
COLUMNS_LEFT = r"(s_movk_i32 s\d+, |v_cmp_gt_u32_e32 vcc\w*, )(0x14|0x16)1"
COLUMNS = r"(s_movk_i32 s0, |v_cmp_gt_u32_e32 vcc\w*, )(0x30)1"
BROKEN: dict[str, tuple[int, str, str]] = {
    "a barrier is dropped": (4096, r"\ts_barrier\n", ""),
    "rows are done twice": (4096, r"(s_add_i32 s\d+, s\d+), (0x260|0x60)\b", r"\1, 0x1"),
    "a column too many": (769, COLUMNS_LEFT, r"\g<1>\g<2>2"),
    "a column too many at the end": (769, COLUMNS, r"\g<1>\g<2>2"),
    "a column too few at the end": (769, COLUMNS, r"\g<1>\g<2>0"),
    "a store is truncated": (
        4096,
        r"global_store_(?:dwordx4|b128) (v\[\d+:\d+\]), v\[(\d+):\d+\], off",
        r"GLOBAL_STORE \1, v\2, off",
    ),
    "lanes exchange with their own": (4096, r"quad_perm:\[1,0,3,2\]", "quad_perm:[0,1,2,3]"),
    "lanes exchange with others": (4096, r"row_mirror", "row_half_mirror"),
    "lanes that were off stay off": (4096, r"\ts_or_b\d\d EXEC, EXEC, \S+\n", ""),
    "lanes that must be off stay on": (
        769,
        r"s_and_saveexec_(b\d\d) (\S+), \S+",
        r"s_mov_\1 \2, EXEC",
    ),
    "another lane is read (wave64)": (4096, r"(v_readlane_b32\w* \S+ v\d+), 63", r"\1, 30"),
    "rows of lanes are not exchanged (wave32)": (4096, r"v_permlanex16_b32", "v_permlane16_b32"),
    "the sum of a wave is not shared": (
        4096,
        r"\t(ds_write2_b32|ds_store_2addr_b32) [^\n]*\n",
        "",
    ),
    "a mean is scaled wrongly": (4096, r"0xb9800000", "0xb9a00000"),
    "a sum is a difference": (
        4096,
        r"v_add_f32_e32 (v\d+), (v\d+), (v\d+)",
        r"v_sub_f32_e32 \1, \2, \3",
    ),
    "an instruction is not known": (4096, r"v_add_f32_e32", "v_add_f33_e32"),
}
_WORDS = {
    "gfx942": {"EXEC": "exec", "GLOBAL_STORE": "global_store_dword"},
    "gfx1100": {"EXEC": "exec_lo", "GLOBAL_STORE": "global_store_b32"},
    "gfx1201": {},
}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("what", "target"),
    [
        (what, target)
        for what in BROKEN
        for target, other in (("gfx942", "(wave32)"), ("gfx1100", "(wave64)"))
        if other not in what
    ],
)
def test_broken_code_is_caught(what: str, target: str) -> None:
    columns, pattern, changed = BROKEN[what]
    check_broken(NormSpec((columns,), "f32"), target, pattern, changed)


@pytest.mark.parametrize(
    ("pattern", "changed"),
    [
        (r"\ts_barrier_signal -1\n", ""),
        (r"\ts_barrier_wait -1\n", ""),
        (r"\ts_barrier_signal -1\n(?:.*\n)*?\ts_barrier_wait -1\n", ""),
        (r"\ts_wait_dscnt 0x0\n((?:.*\n)?\ts_barrier_signal)", r"\1"),
        (r"quad_perm:\[1,0,3,2\]", "quad_perm:[0,1,2,3]"),
    ],
)
def test_broken_code_for_gfx1201_is_caught(pattern: str, changed: str) -> None:
    check_broken(NormSpec((4096,), "f32"), "gfx1201", pattern, changed)


# Of both kinds of workgroups, the one whose code comes first.
BROKEN_FEW: dict[str, tuple[str, str]] = {
    what: BROKEN[what][1:]
    for what in (
        "a barrier is dropped",
        "a store is truncated",
        "lanes exchange with their own",
        "a mean is scaled wrongly",
    )
}


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("what", BROKEN_FEW)
def test_broken_code_for_few_rows_is_caught(what: str, target: str) -> None:
    check_broken(NormSpec((4096,), "f32", rows=7), target, *BROKEN_FEW[what])


def check_broken(spec: NormSpec, target: str, pattern: str, changed: str) -> None:
    """With the first place that a pattern matches changed, the module does not pass."""
    for word, meaning in _WORDS[target].items():
        pattern, changed = pattern.replace(word, meaning), changed.replace(word, meaning)
    broken = 0

    def edit(text: str) -> str:
        nonlocal broken
        text, broken = re.subn(pattern, changed, text, count=1)
        return text

    assert not passes(spec, target, 7, edit=edit)
    assert broken == 1


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("spec", "target"),
    [
        *((NormSpec((769,), "bf16"), target) for target in (*TARGETS, "gfx1201")),
        *((NormSpec((1024,), "bf16"), target) for target in TARGETS),
        (NormSpec((769,), "bf16", rows=3), "gfx1201"),
    ],
    ids=lambda value: value.name if isinstance(value, NormSpec) else value,
)
def test_waits_are_needed(spec: NormSpec, target: str) -> None:
    """Without a wait for loads, something touches a register too early.

    The compiler waits now and then for what it has waited for already: one time in twenty at most.
    """
    # Those ahead of the padding for preloaded arguments are never come by.
    waits = r"\ts_wait(?:cnt (?:vmcnt|lgkmcnt)|_(?:load|ds|km|loadcnt_ds)cnt )[^\n]*\n"
    waits += r"(?!\ts_branch \S+\n\ts_nop)"
    texts: list[str] = []

    def look(text: str) -> str:
        texts.append(text)
        return text

    how, rows = schedule_of(spec, target), 3
    if isinstance(how, OnePass) and not spec.rows:
        # So that few rows come by both loops of the last kernel.
        how = replace(how, finalize_slices=4, finalize_rows=2, finalize_columns=32)
        rows = 17 * how.groups
    assert passes(spec, target, rows, how=how, edit=look)
    places = [match.span() for match in re.finditer(waits, texts[0])]
    unneeded = [
        texts[0][start:stop]
        for start, stop in places
        if passes(spec, target, rows, how=how, edit=lambda text: text[:start] + text[stop:])  # noqa: B023
    ]
    assert len(unneeded) <= len(places) // 20
