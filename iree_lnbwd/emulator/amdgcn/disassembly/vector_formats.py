"""Vector instructions as text: VOP1, VOP2, VOPC, VOP3, VOP3P, VOPD; with DPP and SDWA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from iree_lnbwd.emulator.amdgcn.disassembly.encoded import ACCUMULATOR, Encoded
from iree_lnbwd.emulator.amdgcn.opcodes import WITH_A_CONSTANT
from iree_lnbwd.emulator.amdgcn.operands import width
from iree_lnbwd.emulator.amdgcn.vector_table import VECTOR

DPP, SDWA, _ZERO = 250, 249, 128  # numbers of a source
_SELECTORS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
_BY_TABLE = "v_bitop3_b32"  # a table of eight bits is where others have signs and factors
# Vector instructions with operands of their own kind; "s32" is in a scalar register.
_SIGNATURES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "v_readlane_b32": (("s32",), ("b32", "s32")),
    "v_readfirstlane_b32": (("s32",), ("b32",)),
    "v_writelane_b32": (("b32",), ("s32", "s32")),
    "v_permlane16_b32": (("b32",), ("b32", "s32", "s32")),
    "v_permlanex16_b32": (("b32",), ("b32", "s32", "s32")),
    "v_permlane16_swap_b32": (("b32",), ("b32",)),
    "v_permlane32_swap_b32": (("b32",), ("b32",)),
    "v_mbcnt_lo_u32_b32": (("b32",), ("b32", "b32")),
    "v_mbcnt_hi_u32_b32": (("b32",), ("b32", "b32")),
    "v_accvgpr_read_b32": (("b32",), (ACCUMULATOR,)),
    "v_accvgpr_write_b32": ((ACCUMULATOR,), ("b32",)),
    _BY_TABLE: (("b32",), ("b32", "b32", "b32")),
    "v_pk_add_f32": (("b64",), ("b64", "b64")),
    "v_pk_mul_f32": (("b64",), ("b64", "b64")),
    "v_pk_fma_f32": (("b64",), ("b64", "b64", "b64")),
    "v_pk_mov_b32": (("b64",), ("b64", "b64")),
    "v_pk_add_f16": (("b32",), ("b32", "b32")),
    "v_pk_mul_f16": (("b32",), ("b32", "b32")),
    "v_pk_fma_f16": (("b32",), ("b32", "b32", "b32")),
    "v_fma_mix_f32": (("b32",), ("b32", "b32", "b32")),
    "v_fma_mixlo_f16": (("b32",), ("b32", "b32", "b32")),
    "v_fma_mixhi_f16": (("b32",), ("b32", "b32", "b32")),
    "v_div_fmas_f32": (("f32",), ("f32", "f32", "f32")),  # VCC goes without saying
    "v_div_fmas_f64": (("f64",), ("f64", "f64", "f64")),
    **{f"v_s_{name}_f32": (("s32",), ("f32",)) for name in ("rcp", "rsq", "sqrt")},
}
_DUAL_X = {0: "fmac_f32", 1: "fmaak_f32", 2: "fmamk_f32", 3: "mul_f32", 4: "add_f32", 5: "sub_f32"}
_DUAL_X |= {6: "subrev_f32", 8: "mov_b32", 9: "cndmask_b32", 10: "max_f32", 11: "min_f32"}
_DUAL_Y = {16: "add_nc_u32", 17: "lshlrev_b32", 18: "and_b32"}
_DUAL_GFX12 = {10: "max_num_f32", 11: "min_num_f32"}


def vop1(encoded: Encoded) -> str:
    """A vector instruction of one source."""
    name = encoded.tables["vop1"][encoded.bits(16, 9)]
    results, kinds = _vector_signature(name)
    number = encoded.bits(24, 17)
    is_scalar = results == ("s32",)
    target = encoded.scalar(number) if is_scalar else encoded.vector(number, results[0])
    return _short(encoded, name, [target], kinds, second=None)


def vop2(encoded: Encoded) -> str:
    """A vector instruction of two sources."""
    name = encoded.tables["vop2"][encoded.bits(30, 25)]
    results, kinds = _vector_signature(name)
    targets = [encoded.vector(encoded.bits(24, 17), results[0])]
    targets += [_implicit_mask(encoded)] * (len(results) - 1)
    if name in WITH_A_CONSTANT:
        sources = [
            encoded.source(encoded.bits(8, 0), kinds[0]),
            encoded.vector(encoded.bits(16, 9), kinds[1]),
        ]
        sources.insert(WITH_A_CONSTANT[name], encoded.literal())
        return f"{name} {', '.join(targets + sources)}"
    return _short(encoded, name, targets, kinds, second=encoded.bits(16, 9))


def vopc(encoded: Encoded) -> str:
    """A vector comparison."""
    name = encoded.tables["vopc"][encoded.bits(24, 17)]
    results, kinds = _vector_signature(name)
    targets = [_implicit_mask(encoded)] if results else []
    return _short(encoded, name, targets, kinds, second=encoded.bits(16, 9))


def vop3(encoded: Encoded) -> str:
    """A vector instruction in the long encoding."""
    encoded.more()
    name = encoded.tables["vop3"][encoded.bits(25, 16)]
    results, kinds = _vector_signature(name)
    number = encoded.bits(7, 0)
    selected = 0
    sixteen = [kind != "mask" and width(kind) == 16 for kind in (*kinds, *results)]
    if len(results) < 2:
        if any(sixteen) or "permlane" in name:
            selected = encoded.bits(14, 11)
        absolute = encoded.bits(10, 8)
    else:
        absolute = 0
    targets = []
    if results and results[0] in ("mask", "s32"):
        targets = [encoded.scalar(number, encoded.lanes // 32 if results[0] == "mask" else 1)]
    elif results:
        targets = [encoded.vector(number, results[0], half=selected >> 3)]
    elif number != 126:
        raise KeyError(f"compares to {number}")
    if len(results) == 2:
        targets.append(encoded.scalar(encoded.bits(14, 8), encoded.lanes // 32))
    modifiers = " clamp" if encoded.bits(15, 15) else ""
    factor, negated = encoded.bits(60, 59), encoded.bits(63, 61)
    if name == _BY_TABLE:
        modifiers += f" bitop3:{factor << 6 | absolute << 3 | negated:#x}"
        factor = absolute = negated = 0
    modifiers += ("", " mul:2", " mul:4", " div:2")[factor]
    sources = []
    for n, kind in enumerate(kinds):
        code = encoded.bits(40 + 9 * n, 32 + 9 * n)
        if code >= 256 and sixteen[n]:
            text = encoded.vector(code - 256, kind, half=selected >> n & 1)
        else:
            text = encoded.source(code, kind)
        sources.append(_signed(text, negated >> n & 1, absolute >> n & 1))
    if selected and (encoded.gfx9 or "permlane" in name):
        count = 2 if "permlane" in name else len(kinds) + 1
        chosen = [selected >> n & 1 for n in range(count - 1)]
        chosen.append(selected >> 1 & 1 if "permlane" in name else selected >> 3)
        modifiers += f" op_sel:[{','.join(map(str, chosen))}]"
    _unused(encoded, len(kinds))
    short = any(name in encoded.tables[form].values() for form in ("vop1", "vop2", "vopc"))
    return f"{name}{'_e64' if short else ''} {', '.join(targets + sources)}{modifiers}"


def vop3p(encoded: Encoded) -> str:
    """A vector instruction of packed or mixed types."""
    encoded.more()
    name = encoded.tables["vop3p"][encoded.bits(22, 16)]
    (result,), kinds = _vector_signature(name)
    count = len(kinds)
    target = encoded.vector(encoded.bits(7, 0), result)
    low = [encoded.bits(11 + n, 11 + n) for n in range(3)]
    high = [encoded.bits(59, 59), encoded.bits(60, 60), encoded.bits(14, 14)]
    negated_high, negated = encoded.bits(10, 8), encoded.bits(63, 61)
    sources = [encoded.source(encoded.bits(40 + 9 * n, 32 + 9 * n), kinds[n]) for n in range(count)]
    _unused(encoded, count)
    mixed = "_mix" in name
    if mixed:
        sources = [
            _signed(text, negated >> n & 1, negated_high >> n & 1) for n, text in enumerate(sources)
        ]
    modifiers = f" op_sel:{_list(low[:count])}" if any(low[:count]) else ""
    if high[:count] != [int(not mixed)] * count:
        modifiers += f" op_sel_hi:{_list(high[:count])}"
    for label, bits in (("neg_lo", negated), ("neg_hi", negated_high)):
        if bits and not mixed:
            modifiers += f" {label}:{_list(bits >> n & 1 for n in range(count))}"
    modifiers += " clamp" if encoded.bits(15, 15) else ""
    return f"{name} {', '.join([target, *sources])}{modifiers}"


def vopd(encoded: Encoded) -> str:
    """Two vector instructions in one."""
    encoded.more()
    halves_of_x = _DUAL_X | (_DUAL_GFX12 if encoded.gfx12 else {})
    x, y = halves_of_x[encoded.bits(25, 22)], (halves_of_x | _DUAL_Y)[encoded.bits(21, 17)]
    target_x, target_y = encoded.bits(63, 56), encoded.bits(55, 49)
    target_y = target_y << 1 | (target_x & 1 ^ 1)
    halves = []
    for name, target, code, second in (
        (x, target_x, encoded.bits(8, 0), encoded.bits(16, 9)),
        (y, target_y, encoded.bits(40, 32), encoded.bits(48, 41)),
    ):
        sources = [encoded.source(code, "b32")]
        if name != "mov_b32":
            sources.append(f"v{second}")
        if (place := WITH_A_CONSTANT.get(f"v_{name}")) is not None:
            sources.insert(place, encoded.literal())  # the halves share one
        halves.append(f"v_dual_{name} v{target}, {', '.join(sources)}")
    return " :: ".join(halves)


def _vector_signature(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if name in _SIGNATURES:
        return _SIGNATURES[name]
    operation = VECTOR[name.replace("v_cmpx_", "v_cmp_")]
    sources = operation.sources[:-1] if operation.accumulates else operation.sources
    return (() if name.startswith("v_cmpx_") else operation.results), sources


def _implicit_mask(encoded: Encoded) -> str:
    return "vcc" if encoded.lanes == 64 else "vcc_lo"


def _short(
    encoded: Encoded, name: str, targets: list[str], kinds: tuple[str, ...], *, second: int | None
) -> str:
    """VOP1, VOP2 or VOPC, perhaps with DPP or SDWA behind it."""
    code = encoded.bits(8, 0)
    numbers = [] if second is None else [second]
    if code == DPP:
        encoded.more()
        form, modifiers = "dpp", _dpp(encoded)
        numbers = [encoded.bits(39, 32), *numbers]
        sources = [
            _signed(encoded.vector(number, kind), *_signs(encoded, 52 + 2 * n))
            for n, (number, kind) in enumerate(zip(numbers, kinds, strict=False))
        ]
    elif code == SDWA and encoded.gfx9:
        encoded.more()
        numbers = [encoded.bits(39, 32), *numbers]
        form, modifiers = "sdwa", _sdwa(encoded, targets, len(numbers))
        sources = [
            _signed(_sdwa_source(encoded, n, number, kind), *_signs(encoded, 52 + 8 * n))
            for n, (number, kind) in enumerate(zip(numbers, kinds, strict=False))
        ]
    else:
        form, modifiers = "e32", ""
        sources = [encoded.source(code, kinds[0])]
        sources += [encoded.vector(number, kinds[1]) for number in numbers]
    sources += [_implicit_mask(encoded)] * (len(kinds) - len(sources))
    return f"{name}_{form} {', '.join(targets + sources)}{modifiers}"


def _signs(encoded: Encoded, low: int) -> tuple[int, int]:
    """Whether a source is negated, and whether its absolute value is taken before."""
    return encoded.bits(low, low), encoded.bits(low + 1, low + 1)


def _dpp(encoded: Encoded) -> str:
    control = encoded.bits(48, 40)
    text = f"{_dpp_control(control, encoded.gfx9)} row_mask:{encoded.bits(63, 60):#x}"
    text += f" bank_mask:{encoded.bits(59, 56):#x}"
    text += " bound_ctrl:1" if encoded.bits(51, 51) else ""
    if not encoded.gfx9 and encoded.bits(50, 50):
        text += " fi:1"
    return f" {text}"


def _sdwa(encoded: Encoded, targets: list[str], sources: int) -> str:
    """Which parts of registers are read and written; a comparison may name its target here."""
    if targets == [_implicit_mask(encoded)]:
        if encoded.bits(47, 47):
            targets[0] = encoded.scalar(encoded.bits(46, 40), encoded.lanes // 32)
        text = ""
    else:
        selector = _SELECTORS[encoded.bits(42, 40)]
        unused = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")[encoded.bits(44, 43)]
        text = f" dst_sel:{selector} dst_unused:{unused}"
    for n in range(sources):
        text += f" src{n}_sel:{_SELECTORS[encoded.bits(50 + 8 * n, 48 + 8 * n)]}"
    return text


def _sdwa_source(encoded: Encoded, number: int, code: int, kind: str) -> str:
    """A vector register; or, as a bit says, a scalar one."""
    scalar = 55 + 8 * number
    return (
        encoded.source(code, kind) if encoded.bits(scalar, scalar) else encoded.vector(code, kind)
    )


def _unused(encoded: Encoded, sources: int) -> None:
    """What stands where sources are not there: nothing, or the constant 0."""
    for n in range(sources, 3):
        if encoded.peek(40 + 9 * n, 32 + 9 * n) in (0, _ZERO):
            encoded.bits(40 + 9 * n, 32 + 9 * n)


def _list(bits: Iterable[int]) -> str:
    return f"[{','.join(map(str, bits))}]"


def _signed(text: str, negated: int, absolute: int) -> str:
    if absolute:
        text = f"|{text}|"
    if not negated:
        return text
    return f"-{text}" if text[0] in "sv|" else f"neg({text})"


def _dpp_control(control: int, gfx9: bool) -> str:
    if control < 0x100:
        return f"quad_perm:{_list(control >> 2 * n & 3 for n in range(4))}"
    fixed = {0x140: "row_mirror", 0x141: "row_half_mirror"}
    if gfx9:
        fixed |= {0x142: "row_bcast:15", 0x143: "row_bcast:31"}
    if control in fixed:
        return fixed[control]
    ranges = {0x10: "row_shl", 0x11: "row_shr", 0x12: "row_ror"}
    ranges |= {0x15: "row_newbcast"} if gfx9 else {0x15: "row_share", 0x16: "row_xmask"}
    return f"{ranges[control >> 4]}:{control & 15}"
