"""From a spec and a schedule to a module's text: a file of ``ir/`` specialised.

``ir/README.md`` states the rules. All that they do is visible in the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.launches import launches
from iree_lnbwd.schedule import OnePass, RowBlocks, Schedule, TwoPass, WholeTensors
from iree_lnbwd.schedule import to_dict as schedule_to_dict
from iree_lnbwd.spec import ENTRY, LayerNormSpec, TensorType
from iree_lnbwd.targets import Target

LINALG = "layer_norm_backward.mlir"
STABLEHLO = "layer_norm_backward.stablehlo.mlir"
ONE_PASS = "one_pass.mlir"
TWO_PASS = "two_pass.mlir"
ROW_BLOCKS = "row_blocks.mlir"
FINALIZE = "finalize.mlir"

_HEADER = re.compile(
    r"// What a LayerNormSpec (?:and a Schedule )?decides?\..*?// End of what is replaced\.\n",
    re.DOTALL,
)
_CHUNKS = re.compile(r" *// Each chunk\n(.*?) *// End\n", re.DOTALL)
_STATISTICS = re.compile(r"// mean and rstd = .*\Z", re.DOTALL)
_CAST = re.compile(
    r" *%(\w+) = (?:arith\.extf|arith\.truncf|llvm\.fptrunc) %([\w#]+) : (!\w+) to (!\w+)\n"
)
_VALUE = re.compile(r"%(\w+)")
_DEFINED = re.compile(r" *%[\w:]+(?:, %[\w:]+)* =")
_ALIAS = re.compile(r"![a-z_]+")

_FINALIZE_THREADS = 1024

# What the entry point calls each argument and result, and the alias of its type.
_KERNEL_NAMES = {
    "grad_output": ("dy", "!dy_mn"),
    "input": ("x", "!x_mn"),
    "mean": ("mean", "!acc_m"),
    "rstd": ("rstd", "!acc_m"),
    "weight": ("gamma", "!gamma_n"),
    "grad_input": ("dx", "!x_mn"),
    "grad_weight": ("dgamma", "!gamma_n"),
    "grad_bias": ("dbeta", "!beta_n"),
}


def sources(spec: LayerNormSpec, schedule: Schedule) -> tuple[str, ...]:
    """The files of ``ir/`` that `module` takes, in its order."""
    if isinstance(schedule, WholeTensors):
        return (LINALG,)
    if isinstance(schedule, RowBlocks):
        return (ROW_BLOCKS,)
    kernels = ONE_PASS if isinstance(schedule, OnePass) else TWO_PASS
    return (kernels, FINALIZE) if spec.recompute_eps is None else (kernels, FINALIZE, LINALG)


def module(texts: tuple[str, ...], spec: LayerNormSpec, target: Target, schedule: Schedule) -> str:
    """The module that computes ``spec`` by ``schedule``.

    Args:
        texts: What the files of `sources` say; or that of `STABLEHLO`, which needs ``spec.rows``.
        spec: What is computed.
        target: Where.
        schedule: How; legal for the two.

    Returns:
        MLIR text with one public function, `spec.ENTRY`, of the spec's arguments and results.
    """
    aliases = _spec_aliases(spec)
    text = texts[0]
    if isinstance(schedule, RowBlocks):
        aliases |= _row_blocks_aliases(spec, schedule)
    elif not isinstance(schedule, WholeTensors):
        if isinstance(schedule, OnePass):
            chunks = schedule.chunks(spec, target)
            aliases |= _one_pass_aliases(spec, target, schedule)
            text = _one_pass(text, spec, schedule)
        else:
            chunks = schedule.chunks
            aliases |= _two_pass_aliases(target, schedule)
        aliases |= _kernel_aliases(spec, target, schedule, chunks)
        text = _repeat_chunks(text, chunks)
        text = text.replace("cluster(size = 32)", f"cluster(size = {target.subgroup_size})")
        text += "\n" + _HEADER.split(texts[1])[-1].lstrip()
        if len(texts) > 2:  # the statistics, which are computed ahead of the pass
            text += _statistics(texts[2])
    header = "".join(f"{name} = {value}\n" for name, value in aliases.items())
    text = _HEADER.sub(lambda _: header, text)
    text = _drop_identity_casts(text, aliases)
    if spec.rows is not None:
        text = text.replace("tensor.empty(%rows)", "tensor.empty()")
        text = re.sub(r"(!(?:dy_mn|x_mn|acc_m))\{%m\}", r"\1", text)
    return text + _entry(spec, target, schedule)


def _spec_aliases(spec: LayerNormSpec) -> dict[str, str]:
    rows = "?" if spec.rows is None else str(spec.rows)
    cols = spec.columns
    eps = 0.0 if spec.recompute_eps is None else spec.recompute_eps
    return {
        "!dy": spec.dy_dtype,
        "!x": spec.dtype,
        "!gamma": spec.gamma_dtype,
        "!beta": spec.beta_dtype,
        "!acc": spec.acc_dtype,
        "!dy_mn": f"tensor<{rows}x{cols}x!dy>",
        "!x_mn": f"tensor<{rows}x{cols}x!x>",
        "!acc_mn": f"tensor<{rows}x{cols}x!acc>",
        "!acc_m": f"tensor<{rows}x!acc>",
        "!acc_n": f"tensor<{cols}x!acc>",
        "!gamma_n": f"tensor<{cols}x!gamma>",
        "!beta_n": f"tensor<{cols}x!beta>",
        "#inv_n": f"{1.0 / cols:.17e} : !acc",
        "#eps": f"{eps:.17e} : !acc",
    }


def _kernel(threads: int, target: Target) -> str:
    return (
        "#iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline "
        f"workgroup_size = [{threads}, 1, 1] subgroup_size = {target.subgroup_size}>"
    )


def _storage(shape: str) -> str:
    return f"memref<{shape}, #hal.descriptor_type<storage_buffer>>"


def _shared(shape: str) -> str:
    return f"memref<{shape}, #gpu.address_space<workgroup>>"


def _bindings(cols: int) -> dict[str, str]:
    """The tensors as kernels see them."""
    return {
        "!dy_rows": _storage(f"?x{cols}x!dy"),
        "!x_rows": _storage(f"?x{cols}x!x"),
        "!acc_rows": _storage(f"?x{cols}x!acc"),
        "!acc_column": _storage("?x!acc"),
        "!gamma_row": _storage(f"{cols}x!gamma"),
        "!beta_row": _storage(f"{cols}x!beta"),
    }


def _chunks(vector: int) -> dict[str, str]:
    """Neighbouring elements of a row."""
    return {
        "!dy_chunk": f"vector<{vector}x!dy>",
        "!x_chunk": f"vector<{vector}x!x>",
        "!gamma_chunk": f"vector<{vector}x!gamma>",
        "!chunk": f"vector<{vector}x!acc>",
    }


def _kernel_aliases(
    spec: LayerNormSpec, target: Target, schedule: OnePass | TwoPass, chunks: int
) -> dict[str, str]:
    """What the kernels of both forms for GPUs speak of."""
    cols, vector = spec.columns, schedule.vector
    return {
        "#columns": f"{cols} : index",
        "#vector": f"{vector} : index",
        "#threads": f"{schedule.threads(target)} : index",
        "#subgroup": f"{target.subgroup_size} : index",
        "#finalize_kernel": _kernel(_FINALIZE_THREADS, target),
        "!partials_pn": f"tensor<{schedule.workgroups}x{cols}x!acc>",
        **_bindings(cols),
        "!warp_sums": f"vector<{schedule.warps}x2x!acc>",
        **_chunks(vector),
        "!share": f"vector<{chunks}x{vector}x!acc>",
    }


def _row_blocks_aliases(spec: LayerNormSpec, schedule: RowBlocks) -> dict[str, str]:
    cols, vector, block = spec.columns, schedule.vector, schedule.block
    share = f"(m ceildiv {block}) ceildiv {schedule.workgroups} * {block}"
    return {
        "#columns": f"{cols} : index",
        "#vector": f"{vector} : index",
        "#block": f"{block} : index",
        "#share": f"affine_map<()[m] -> ({share})>",
        "!partials_pn": f"tensor<{schedule.workgroups}x{cols}x!acc>",
        **_bindings(cols),
        "!means": f"memref<{block}x2x!acc>",
        **_chunks(vector),
        "!beta_chunk": f"vector<{vector}x!beta>",
        "!lanes": f"vector<{vector}xi1>",
    }


def _one_pass_aliases(spec: LayerNormSpec, target: Target, schedule: OnePass) -> dict[str, str]:
    padded, groups = schedule.padded_columns(spec, target), schedule.groups
    slots = schedule.ahead + 1
    dy_bytes = slots * groups * padded * DTYPES[spec.dy_dtype].numpy.itemsize
    return {
        "#workgroups": f"affine_map<()[m] -> (m ceildiv {groups}, {schedule.workgroups})>",
        "#groups": f"{groups} : index",
        "#ahead": f"{schedule.ahead} : index",
        "#ahead_i32": f"{schedule.ahead} : i32",
        "#workgroups_i32": f"{schedule.workgroups} : i32",
        "#groups_i32": f"{groups} : i32",
        "#resident": f"{schedule.resident} : i32",
        "#rows_kernel": _kernel(groups * schedule.threads(target), target),
        "!dy_bytes": _shared(f"{dy_bytes}xi8"),
        "!dy_staged": _shared(f"{slots}x{groups}x{padded}x!dy"),
        "!x_staged": _shared(f"{slots}x{groups}x{padded}x!x"),
        "!gamma_staged": _shared(f"{padded}x!gamma"),
        "!exchange": _shared(f"2x{groups}x{schedule.warps}x2x!acc"),
        "!group_sums": _shared(f"{groups}x{padded}x!acc"),
    }


def _two_pass_aliases(target: Target, schedule: TwoPass) -> dict[str, str]:
    return {
        "#workgroups": f"affine_map<()[m] -> (m, {schedule.workgroups})>",
        "!exchange": _shared(f"1x1x{schedule.warps}x2x!acc"),
        "#workgroups_index": f"{schedule.workgroups} : index",
        "#tile": f"{schedule.tile(target)} : index",
        "#two_pass_kernel": _kernel(schedule.threads(target), target),
    }


def _one_pass(text: str, spec: LayerNormSpec, schedule: OnePass) -> str:
    """The body with the schedule's kernel, and what that kernel does not do dropped."""
    kept, dropped = ("rows_cp_async", "rows") if schedule.ahead else ("rows", "rows_cp_async")
    text = _without(text, rf"hal\.executable\.source private @{dropped} \{{\n.*?\n\}}\n\n")
    text = text.replace("@rows::@rows", f"@{kept}::@{kept}")
    if schedule.ahead and not schedule.rereads:
        text = _reuse(text, r"(dy|x|gamma)_again_0", r"\1_0")
        text = _without(text, r" *nvvm\.bar\.warp\.sync.*?\n")
    if schedule.ahead and not schedule.stages_weight:
        text = _without(text, r" *// The weight is the same for all groups.*?gpu\.barrier\n")
        text = _without(text, r" *%gamma_staged = .*?\n")
        text = _reuse(text, r"gamma(?:_again)?_0", r"gamma_read_0", from_memory="gamma_staged")
    if schedule.warps == 1:
        text = _without(text, r" *// Across warps.*?// End\n")
        text = re.sub(r"%row_(h|hx)\b", r"%warp_\1", text)
    else:
        text = re.sub(r"( *// Across warps.*?) *// End\n", r"\1", text, flags=re.DOTALL)
    for name, dtype in (("dy", spec.dy_dtype), ("x", spec.dtype)):
        if schedule.vector * DTYPES[dtype].numpy.itemsize < 16:
            copy = rf'("nvgpu.device_async_copy"\(%{name}_staged[^<]*<\{{)bypassL1, '
            text = re.sub(copy, r"\1", text)
    return text


def _without(text: str, pattern: str) -> str:
    return re.sub(pattern, "", text, flags=re.DOTALL)


def _reuse(text: str, name: str, replacement: str, from_memory: str = r"\w+_staged") -> str:
    """Without the loads of ``name`` from shared memory: its uses take another value."""
    text = re.sub(rf" *%{name} = vector\.load %{from_memory}.*?\n", "", text)
    return re.sub(rf"%{name}\b", rf"%{replacement}", text)


def _repeat_chunks(text: str, chunks: int) -> str:
    """Every block of one chunk as often as a thread has chunks.

    In copy k, what ends in _0 ends in _k, what ends in _1 in _(k+1), and 0 is k. Outside of the
    blocks, _1 is what the last copy left.
    """

    def numbered(match: re.Match[str]) -> str:
        copies = []
        for k in range(chunks):
            names = {"0": str(k), "1": str(k + 1)}
            copy = re.sub(r"(%\w+)_([01])\b", lambda v: f"{v[1]}_{names[v[2]]}", match[1])  # noqa: B023
            copies.append(copy.replace("[0]", f"[{k}]").replace("constant 0 :", f"constant {k} :"))
        return "".join(copies)

    parts = []
    end = 0
    for block in _CHUNKS.finditer(text):
        outside = text[end : block.start()]
        parts += [re.sub(r"(%\w+)_1\b", rf"\1_{chunks}", outside), numbered(block)]
        end = block.end()
    parts.append(re.sub(r"(%\w+)_1\b", rf"\1_{chunks}", text[end:]))
    return "".join(parts)


def _statistics(text: str) -> str:
    """``@statistics`` and the maps that it uses, from the text of `LINALG`."""
    function = _STATISTICS.search(text)
    maps = re.findall(r"^#(?:mn|m|id) .*\n", text, re.MULTILINE)
    if function is None:
        raise ValueError(f"{LINALG}: @statistics not found")
    return "\n" + "".join(maps) + "\n" + function[0]


def _drop_identity_casts(text: str, aliases: Mapping[str, str]) -> str:
    """Without the casts whose two types are the same, which MLIR does not allow."""

    def resolved(alias: str) -> str:
        return _ALIAS.sub(lambda inner: aliases[inner[0]], aliases[alias])

    renamed: dict[str, str] = {}
    lines = []
    for line in text.splitlines(keepends=True):
        if defined := _DEFINED.match(line):  # another region may use a name again
            for name in _VALUE.findall(defined[0]):
                renamed.pop(name, None)
        cast = _CAST.fullmatch(line)
        if cast and resolved(cast[3]) == resolved(cast[4]):
            renamed[cast[1]] = renamed.get(cast[2], cast[2])
        else:
            lines.append(_VALUE.sub(lambda value: "%" + renamed.get(value[1], value[1]), line))
    return "".join(lines)


def _entry(spec: LayerNormSpec, target: Target, schedule: Schedule) -> str:
    """The public function: arguments in, ``@backward`` called, the asked gradients out."""
    parameters = [_declare(argument) for argument in spec.inputs] + [
        f"{_declare(result, prefix='out_')} {{iree.abi.output = {i} : index}}"
        for i, result in enumerate(spec.results)
    ]
    body = []
    if not spec.has_weight:
        body.append("%gamma = arith.constant dense<1.0> : !gamma_n")
    if spec.recompute_eps is not None:
        body.append("%mean, %rstd = call @statistics(%x) : (!x_mn) -> (!acc_m, !acc_m)")
    body.append(
        "%dx, %dgamma, %dbeta = call @backward(%dy, %x, %mean, %rstd, %gamma)\n"
        "      : (!dy_mn, !x_mn, !acc_m, !acc_m, !gamma_n) -> (!x_mn, !gamma_n, !beta_n)"
    )
    values = ", ".join("%" + _KERNEL_NAMES[r.name][0] for r in spec.results)
    types = ", ".join(_KERNEL_NAMES[r.name][1] for r in spec.results)
    body.append(f"return {values} : {types}")
    reflection = {
        "iree_lnbwd.spec": json.dumps(spec.to_dict(), sort_keys=True),
        "iree_lnbwd.schedule": json.dumps(schedule_to_dict(schedule), sort_keys=True),
        "iree_lnbwd.target": target.name,
    }
    if (kernels := launches(spec, target, schedule)) is not None:
        reflection["iree_lnbwd.launches"] = json.dumps(kernels.to_dict(), sort_keys=True)
    attributes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in reflection.items())
    lines = [
        "",
        f"func.func @{ENTRY}(",
        ",\n".join(f"    {parameter}" for parameter in parameters) + ")",
        f"    -> ({types})",
        f"    attributes {{iree.reflection = {{{attributes}}}}} {{",
        *(f"  {line}" for line in body),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _declare(argument: TensorType, prefix: str = "") -> str:
    name, alias = _KERNEL_NAMES[argument.name]
    return f"%{prefix}{name}: {alias}"
