"""From a spec and a schedule to a module's text: a file of ``ir/`` specialised.

``ir/README.md`` states the rules. All that they do is visible in the result.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from iree_lnbwd.compiling import host_program, linking, passages, strided_rows
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    ADDED_BIAS,
    GRAD_GATE,
    MORE_GRAD_OUTPUTS,
    PARTIAL_DBETA,
    RESIDUAL,
    Element,
)
from iree_lnbwd.ops.spec import LEAST_WEIGHT, NormSpec
from iree_lnbwd.schedules import (
    FewRows,
    Form,
    Forward,
    OnePass,
    RowBlocks,
    Schedule,
    TwoPass,
    WholeTensors,
    choose_statistics,
    forms,
    schedule_to_dict,
)
from iree_lnbwd.schedules.ir_types import (
    UNROLLED,
    bindings,
    flag,
    itemsize,
    output_types,
    shared,
    storage,
)
from iree_lnbwd.vmfb import raw_interface
from iree_lnbwd.vmfb.launches import LaunchPlans, launches, takes

ONE_PASS = "one_pass.mlir"
FEW_ROWS = "few_rows.mlir"
TWO_PASS = "two_pass.mlir"
ROW_BLOCKS = "row_blocks.mlir"
FINALIZE = "finalize.mlir"
UNSENT = "unsent.mlir"
FORWARD = "forward.mlir"
FORWARD_ROW_BLOCKS = "forward_row_blocks.mlir"
MATH = (
    "math/norm.mlir",
    "math/gate.mlir",
    "math/types.mlir",
    "math/clusters.mlir",
    "math/bulk.mlir",
    "math/memory.mlir",
    "math/posts.mlir",
    "math/environment.mlir",
    "math/sets.mlir",
    "math/rows.mlir",
)
# The parts of one pass that do not depend on the schedule.
PARTS = (
    "thread",
    "numbers",
    "columns",
    "weights",
    "residual",
    "more",
    "row_sums",
    "set_rows",
    "stores",
)
FORWARD_PARTS = (
    "thread",
    "rows",
    "weights",
    "shares",
    "ahead",
    "copies",
)  # likewise, of the forward
_OF_FORWARD = "forward"  # the folder of its parts


_FILES: Mapping[type[Form], tuple[str, ...]] = {
    FewRows: (FEW_ROWS,),
    OnePass: (ONE_PASS, FINALIZE),
    TwoPass: (TWO_PASS, FINALIZE),
    Forward: (FORWARD,),
}

_STABLEHLO = ".stablehlo.mlir"
SETS_OF_ROWS = "sets_of_rows"  # the stem of the files beside an algorithm on whole tensors
# With sets, such an algorithm has a weight for each row, in the type of sums.
_OF_EACH_ROW = (
    (re.compile(r"!(?:acc|gamma|beta)_n\b"), "!acc_mn"),
    (re.compile(r"tensor\.empty\(\) : !acc_mn"), "tensor.empty(%rows) : !acc_mn"),
    (re.compile(r"dims = \[1\] : \(!acc_mn\)"), "dims = [0, 1] : (!acc_mn)"),
)

_HEADER = re.compile(
    r"// What a NormSpec (?:and a Schedule )?decides?\..*?// End of what is replaced\.\n",
    re.DOTALL,
)
_END_OF_HEADER = "// End of what is replaced.\n"
# An alias of a file's own, with the comment above it. MLIR takes none inside a module.
_ALIAS = re.compile(r"(?:^//.*\n)*^[#!]\w+ += .*\n(?:(?:  .*|[\])}>]+)\n)*", re.MULTILINE)
# How many threads share a sum: of a row, or of a tile of few rows.
_SHARING = re.compile(r"cluster\(size = (\d+)\)")
_OF_A_ROW, _OF_A_TILE = "32", "8"  # as the files have it
# Names in the forward's kernel, and in its copy for few rows.
_OF_FEW_ROWS = {
    "#forward_weights_early": "#few_weights_early",
    "#forward_lasts": "#few_lasts",
    "#forward_ahead": "#few_ahead",
    "#forward_packs": "#few_packs",
    "#forward_rereads": "#few_rereads",
    "#forward_resident": "#few_resident",
    "#forward_walks": "#few_walks",
    "#normalize_": "#normalize_few_",
    "@normalize": "@normalize_few",
}
_OF_MANY_ROWS = re.compile("|".join(_OF_FEW_ROWS))
# The names of an output's types: the input's, if it has no type of its own.
_OF_OUTPUT = re.compile(r"(!forward_|!|#|@round_of_|the type of )y(?![a-z0-9])")
# A type with a number of rows that is known where M is fixed.
_OF_ROWS = re.compile(r"(!(?:(?:dy|dy_sum|x|y|residual|z|copy)_mn|acc_m))\{%\w+\}")
_SUBGROUP_SUM = re.compile(
    r"^( *)(%\w+) = gpu\.subgroup_reduce add (%\w+) cluster\(size = (\d+)\) : .*\n", re.MULTILINE
)
_MULTIPLY_ADD = re.compile(r"math\.fma (%\w+, %\w+, %\w+) : (!\w+)")
# The variants of functions in math/norm.mlir, where the mean is not subtracted.
_UNCENTRED = {name: f"{name}_uncentred" for name in ("xhat", "dx", "dx_from_means")}
_WORD_BITS = 32
_OF_WORDS = {32: "word", 64: "two_words", 128: "four_words"}  # by bits
_PAIRS_OF_BF16 = re.compile(r"vector<\d*[02468]xbf16>")


def sources(spec: NormSpec, target: Target, schedule: Schedule) -> tuple[str, ...]:
    """The files of ``ir/`` that `module` takes, in its order."""
    if isinstance(schedule, WholeTensors):
        return _of_whole_tensors(spec, ".mlir")
    if isinstance(schedule, RowBlocks):
        names = [ROW_BLOCKS] if spec.family.is_backward else []
        statistics = FORWARD_ROW_BLOCKS
    else:
        names = [name for form in reversed(forms(schedule, spec)) for name in _FILES[type(form)]]
        names += [UNSENT] * (isinstance(schedule, OnePass) and schedule.posts_sums(spec))
        statistics = FORWARD
    if spec.eps is not None and statistics not in names:
        names.append(statistics)
    parts: list[str] = []
    if isinstance(schedule, OnePass):
        parts += (*PARTS, "gradients" if spec.gate is None else "gate")
        parts += ["copy"] * (spec.grad_input_copy_dtype is not None)
        parts += ["total"] * (spec.grad_input_sum_dtype is not None)
        parts += schedule.parts(spec, target)
    if FORWARD in names and not isinstance(schedule, RowBlocks):
        how = _forward(spec, target, schedule)
        parts += (f"{_OF_FORWARD}/{part}" for part in (*FORWARD_PARTS, *how.parts(spec, target)))
    return (*names, *MATH, *(f"parts/{part}.mlir" for part in parts))


def _is_library(name: str) -> bool:
    """Whether a file has functions that kernels declare, and no kernel."""
    return name.startswith(("math/", "parts/"))


def _library(texts: Mapping[str, str], kernel: str) -> dict[str, linking.Function]:
    """The functions that a file of kernels may declare: those of ``math/``, and of its parts."""
    of_forward = f"parts/{_OF_FORWARD}/"
    return linking.functions(
        text
        for name, text in texts.items()
        if name.startswith("math/")
        or (_is_library(name) and name.startswith(of_forward) == (kernel == FORWARD))
    )


def oracle(spec: NormSpec) -> tuple[str, ...]:
    """The files of ``ir/`` with the op in StableHLO."""
    return _of_whole_tensors(spec, _STABLEHLO)


def _of_whole_tensors(spec: NormSpec, ending: str) -> tuple[str, ...]:
    """The files with the op on whole tensors."""
    stems = (_stem(spec), *([SETS_OF_ROWS] if spec.weight_sets else []))
    return tuple(stem + ending for stem in stems)


def _stem(spec: NormSpec) -> str:
    kind = "_from_output" if spec.from_output else "" if spec.gate is None else "_gated"
    return spec.op + kind


def module(
    texts: Mapping[str, str],
    spec: NormSpec,
    target: Target,
    schedule: Schedule,
    *,
    host_cpu: str | None = None,
    cpu_features: Sequence[str] = (),
) -> str:
    """The module that computes ``spec`` by ``schedule``.

    Args:
        texts: What the files of `sources` say, by name and in that order; or that of `oracle`,
            which needs ``spec.rows``.
        spec: What is computed.
        target: Where.
        schedule: How; legal for the two.
        host_cpu: Which CPU this is, where the target is this CPU.
        cpu_features: What the CPU must have, as IREE's runtime names it.

    Returns:
        MLIR text with one public function, ``spec.op``, of the spec's arguments and results, in a
        module of the name `raw_interface.symbol`.
    """
    if isinstance(schedule, WholeTensors) and target.backend != "cpu":
        # To tile some numbers of rows, 2546 say, takes IREE minutes. M stays open there.
        typed = replace(spec, rows=None)
    else:
        typed = spec
    if spec.output_dtype is None:
        texts = {name: _OF_OUTPUT.sub(r"\1x", text) for name, text in texts.items()}
    texts = {name: _passages(text, spec) for name, text in texts.items()}
    aliases = _spec_aliases(typed)
    if spec.weight_sets and isinstance(schedule, WholeTensors):
        aliases |= _sets_of_rows_aliases(typed)
        texts = {name: _with_a_weight_of_each_row(name, text) for name, text in texts.items()}
    lasts = isinstance(schedule, OnePass) and schedule.copies_last(spec, target)
    texts = {
        name: passages.with_lines("policies", text, are_there=lasts) for name, text in texts.items()
    }
    plans = launches(spec, target, schedule)
    has_gate, on_gpu = spec.gate is not None, target.backend != "cpu"
    texts = {name: passages.chosen(text, has_gate=has_gate) for name, text in texts.items()}
    if isinstance(schedule, RowBlocks):
        aliases |= schedule.aliases(spec)
    elif not isinstance(schedule, WholeTensors):
        aliases |= _gpu_aliases(spec, target, schedule)
        texts = {
            name: _literals(name, text, spec, target, schedule) for name, text in texts.items()
        }
    if spec.strided_rows:
        aliases |= strided_rows.aliases(spec)
    if plans is not None:
        aliases |= host_program.export_aliases(spec, plans)
    title = _HEADER.split(next(iter(texts.values())))[0]
    header = title + "".join(f"{name} = {value}\n" for name, value in aliases.items())
    choose = functools.partial(_overload, spec, target)
    kernels = {
        name: linking.link(_HEADER.split(body)[-1], aliases, _library(texts, name), choose)
        for name, body in texts.items()
        if not _is_library(name)
    }
    if FORWARD in kernels:
        kernels[FORWARD] += "\n" + _of_few_rows(kernels[FORWARD])
    text = "\n".join(kernels.values())
    if plans is not None:
        text = host_program.launched(text, spec, plans, on_gpu=on_gpu)
    if typed.rows is not None:
        text = text.replace("tensor.empty(%rows)", "tensor.empty()")
        text = _OF_ROWS.sub(r"\1", text)
    reflection = _reflection(spec, target, schedule, plans, host_cpu)
    text += host_program.requirements(cpu_features)
    text += host_program.entry(spec, plans, reflection, on_gpu=on_gpu)
    header += "".join(alias[0] for alias in _ALIAS.finditer(text))
    text = re.sub(r"\n{3,}", "\n\n", _ALIAS.sub("", text)).strip("\n")
    return f"{header}\nmodule @{raw_interface.symbol(spec, target)} {{\n\n{text}\n\n}}\n"


def _passages(text: str, spec: NormSpec) -> str:
    """A file without what is for specs of other kinds."""
    has_copies = spec.grad_input_copy_dtype is not None
    has_totals = spec.grad_input_sum_dtype is not None
    text = passages.with_lines("sets", text, are_there=spec.weight_sets)
    text = passages.with_lines("copies", text, are_there=has_copies)
    text = passages.with_lines("totals", text, are_there=has_totals)
    return passages.with_strides(text, has_strides=spec.strided_rows)


def _with_a_weight_of_each_row(name: str, text: str) -> str:
    """An algorithm on whole tensors whose parameters, and their gradients, are M x N."""
    if name.startswith(SETS_OF_ROWS):
        return text
    header, mark, body = text.rpartition(_END_OF_HEADER)
    for found, instead in _OF_EACH_ROW:
        body = found.sub(instead, body)
    return header + mark + body


def _overload(spec: NormSpec, target: Target, function: str, types: tuple[str, ...]) -> str:
    """Which function of the library a declaration stands for.

    Those of ``math/types.mlir`` widen or round from the first type to the last.
    """
    if function == "away_from_zero":
        crashes = target.backend == "rocm" and types[0] == "vector<1xf64>"
        return "away_from_zero_by_reciprocal" if crashes else function
    if function == "exp_minus":
        if spec.acc_dtype == "f64":
            return f"{function}_in_f64"
        if target.backend == "cpu":
            return function
        is_short = spec.element_type(Element.GATE) != spec.acc_dtype
        return f"{function}_of_16_bits" if is_short else f"{function}_by_power"
    if function == "power":
        return f"{function}_on_nvidia" if target.backend == "cuda" else f"{function}_on_amd"
    if function == "reciprocal_from_1_to_2":
        if target.backend == "cuda" and spec.acc_dtype == "f32":
            return function
        function = "reciprocal"
    if function == "reciprocal":
        on_gpu = target.backend != "cpu" and spec.acc_dtype == "f32"
        return "reciprocal_on_gpu" if on_gpu else function
    if function == "settled_on_amd":
        is_word = linking.bits(types[-1]) == _WORD_BITS
        return f"{function}_word" if is_word else function
    if function in ("settled", "load_lasting"):
        in_words = _OF_WORDS.get(linking.bits(types[-1]))
        of_words = target.backend == "cuda" if function == "settled" else target.has_cache_policies
        return f"{function}_{in_words}" if in_words and of_words else function
    if function == "store":
        in_words = _OF_WORDS.get(linking.bits(types[-1]))
        is_gated = spec.gate is not None and target.backend == "cuda"
        return f"{function}_{in_words}" if in_words and is_gated else function
    if function == "zero_first":
        in_whole_words = linking.bits(types[0]) % _WORD_BITS == 0
        return function if in_whole_words else f"{function}_without_words"
    if function in ("set_ieee_rules", "restore_rules"):
        return f"{function}_on_aarch64" if target.architecture == "aarch64" else function
    if function == "round_apart":
        is_dropped = target.backend == "cpu" and types[0] != types[-1] and "bf16" in types[-1]
        function = function if is_dropped else "round"
    if function not in ("widen", "round"):
        return function if spec.family.centres else _UNCENTRED.get(function, function)
    on_cpu = target.backend == "cpu"
    variants = {
        f"{function}_equal": types[0] == types[-1],
        "widen_pairs": not on_cpu and _PAIRS_OF_BF16.fullmatch(types[0]) is not None,
        "round_on_cpu": on_cpu and function == "round",
    }
    return next((variant for variant, fits in variants.items() if fits), function)


def _literals(
    name: str, text: str, spec: NormSpec, target: Target, schedule: OnePass | TwoPass | Forward
) -> str:
    """A file of kernels with its literals that MLIR takes no alias for."""
    sharing = {_OF_A_ROW: target.subgroup_size}
    if isinstance(schedule, OnePass) and name == FEW_ROWS and (few := schedule.few_rows):
        sharing[_OF_A_TILE] = few.parts(target)
    if isinstance(schedule, OnePass) and name == ONE_PASS and schedule.in_cluster:
        text = _clustered(text, "rows", schedule.cluster)
    if name == FORWARD or name.startswith(f"parts/{_OF_FORWARD}/"):
        how = _forward(spec, target, schedule)
        sharing[_OF_A_ROW] = how.lanes(target)
        text = _clustered(text, "normalize", how.cluster)
    elif isinstance(schedule, OnePass) and _is_library(name):
        text = _past_l1(text, spec, schedule)
        sharing[_OF_A_ROW] = schedule.lanes(target)
    # All at once: a number that was put in may be one that stands for another.
    text = _SHARING.sub(lambda found: f"cluster(size = {sharing[found[1]]})", text)
    if spec.acc_dtype == "f64":
        return _shuffled(text, target)
    return _with_whole_multiply_adds(text) if target.has_f32_pairs else text


def _clustered(text: str, kernel: str, cluster: int) -> str:
    """A kernel whose workgroups along y are clusters."""
    if cluster == 1:
        return text
    size = f"nvvm.cluster_dim = array<i32: 1, {cluster}, 1>"
    return text.replace(f"@{kernel}() attributes {{", f"@{kernel}() attributes {{{size}, ")


def _of_few_rows(text: str) -> str:
    """The forward's kernel once more, for few rows, under a name of its own."""
    text = text[text.index("hal.executable.source") :]
    return _OF_MANY_ROWS.sub(lambda found: _OF_FEW_ROWS[found[0]], text)


def _spec_aliases(spec: NormSpec) -> dict[str, str]:
    rows = "?" if spec.rows is None else str(spec.rows)
    cols = spec.columns
    eps = 0.0 if spec.eps is None else spec.eps
    sets = "?x" if spec.weight_sets else ""
    offset = spec.weight_offset or -0.0  # adding -0.0 changes no number, and leaves no code
    return {
        "!dy": spec.dy_dtype,
        "!dy_sum": spec.dy_sum_dtype,
        "!x": spec.dtype,
        "!gamma": spec.gamma_dtype,
        "!beta": spec.beta_dtype,
        "!residual": spec.element_type(Element.RESIDUAL),
        "!acc": spec.acc_dtype,
        "!dy_mn": f"tensor<{rows}x{cols}x!dy>",
        "!dy_sum_mn": f"tensor<{rows}x{cols}x!dy_sum>",
        "!x_mn": f"tensor<{rows}x{cols}x!x>",
        "!residual_mn": f"tensor<{rows}x{cols}x!residual>",
        "!acc_mn": f"tensor<{rows}x{cols}x!acc>",
        "!acc_m": f"tensor<{rows}x!acc>",
        "!acc_n": f"tensor<{cols}x!acc>",
        "!lanes_n": f"tensor<{cols}xi1>",
        "!gamma_n": f"tensor<{sets}{cols}x!gamma>",
        "!beta_n": f"tensor<{sets}{cols}x!beta>",
        "#inv_n": f"{1.0 / cols:.17e} : !acc",
        "#eps": f"{eps:.17e} : !acc",
        "#weight_offset": f"{offset:.17e} : !acc",
        "#centres": flag(spec.family.centres),
        "#sums_dbeta": flag(takes(spec, PARTIAL_DBETA)),
        **{f"#has_{more.symbol}": flag(spec.has(more)) for more in MORE_GRAD_OUTPUTS},
        "#adds_residual": flag(spec.residual_dtype is not None),
        "#takes_residual": flag(spec.has(RESIDUAL)),
        "#adds_bias": flag(spec.has(ADDED_BIAS)),
        "#writes_output": flag(not spec.family.is_backward),
        "#from_output": flag(spec.from_output),
        "#least_weight": f"{LEAST_WEIGHT:.17e} : !acc",
        **output_types(
            spec, {"!y": spec.element_type(Element.Y), "!y_mn": f"tensor<{rows}x{cols}x!y>"}
        ),
        **(_sets_aliases(spec) if spec.weight_sets else {}),
        **({} if spec.gate is None else _gate_aliases(spec, rows)),
        **({} if (copy := spec.grad_input_copy_dtype) is None else _copy_aliases(copy, rows, cols)),
        **({} if (total := spec.grad_input_sum_dtype) is None else _total_aliases(total, cols)),
    }


def _sets_aliases(spec: NormSpec) -> dict[str, str]:
    """Sets as kernels see them, and the bytes of one."""
    elements = (Element.GAMMA, Element.BETA)
    return {
        **{f"!{e.value}_sets": storage(f"?x{spec.columns}x!{e.value}") for e in elements},
        **{
            f"#{e.value}_bytes": f"{spec.columns * itemsize(spec, e)} : index"
            for e in (*elements, Element.ACC)
        },
    }


def _sets_of_rows_aliases(spec: NormSpec) -> dict[str, str]:
    """What spreads sets to rows, and sums rows up to sets, beside an algorithm on whole tensors."""
    m, n = "?" if spec.rows is None else spec.rows, spec.columns
    return {
        "!acc_sets": f"tensor<?x{n}x!acc>",
        "!gamma_mn": f"tensor<{m}x{n}x!gamma>",
        "!beta_mn": f"tensor<{m}x{n}x!beta>",
        "!acc_mmn": f"tensor<{m}x{m}x{n}x!acc>",
        "!set_m": f"tensor<{m}xi64>",
        "!set_mm": f"tensor<{m}x{m}xi64>",
        "!lanes_n": f"tensor<{m}x{n}xi1>",
        "!lanes_mm": f"tensor<{m}x{m}xi1>",
        "!lanes_mmn": f"tensor<{m}x{m}x{n}xi1>",
        "#one_set": f"array<i64: 1, {n}>",
        "#columns": f"{n} : index",
    }


def _gate_aliases(spec: NormSpec, rows: str) -> dict[str, str]:
    return {
        "!z": spec.element_type(Element.GATE),
        "!residual": spec.element_type(Element.GATE),  # whose place it takes in forward.mlir
        "!z_mn": f"tensor<{rows}x{spec.columns}x!z>",
        "#gates_first": flag(spec.gate_first),
        "#wants_dz": flag(spec.has(GRAD_GATE)),
    }


def _total_aliases(dtype: str, columns: int) -> dict[str, str]:
    return {"!total": dtype, "!total_n": f"tensor<{columns}x!total>"}


def _copy_aliases(dtype: str, rows: str, columns: int) -> dict[str, str]:
    return {"!copy": dtype, "!copy_mn": f"tensor<{rows}x{columns}x!copy>"}


def _gpu_aliases(
    spec: NormSpec, target: Target, schedule: OnePass | TwoPass | Forward
) -> dict[str, str]:
    """The aliases of all kernels of a module for a GPU."""
    aliases = {
        "#columns": f"{spec.columns} : index",
        "#subgroup": f"{target.subgroup_size} : index",
        "#unrolled": UNROLLED,
        "#rolled": "#llvm.loop_annotation<unroll = <disable = true>>",
        "!mbarriers": shared("2xi64"),
        "!pointer": "!llvm.ptr<1>",
        **bindings(spec),
    }
    if spec.eps is not None:
        aliases |= _forward(spec, target, schedule).aliases(spec, target)
    return aliases if isinstance(schedule, Forward) else aliases | schedule.aliases(spec, target)


def _forward(spec: NormSpec, target: Target, schedule: OnePass | TwoPass | Forward) -> Forward:
    """How rows are normalized, or how a backward recomputes their statistics."""
    return schedule if isinstance(schedule, Forward) else choose_statistics(spec, target)


def _past_l1(text: str, spec: NormSpec, schedule: OnePass) -> str:
    """With the copies that a schedule makes past the L1 cache; the weight is one row."""
    copies_weight = schedule.stages_weight and not schedule.widens_weight and not schedule.bulk
    copies_rows = schedule.slots > 0 and not schedule.bulk
    for room, dtype, is_copied, columns in (
        ("dy_rows", spec.dy_dtype, copies_rows, spec.columns),
        ("x_rows", spec.dtype, copies_rows, spec.columns),
        ("weight", spec.gamma_dtype, copies_weight, 0),
    ):
        size = DTYPES[dtype].numpy.itemsize
        if is_copied and schedule.past_l1(columns * size, size):
            copy = rf'("nvgpu.device_async_copy"\(%{room}[^<]*<\{{)'
            text = re.sub(copy, r"\1bypassL1, ", text)
    return text


def _with_whole_multiply_adds(text: str) -> str:
    """With multiply-adds that LLVM makes pairs of: IREE takes those of math apart."""
    return _MULTIPLY_ADD.sub(r"llvm.intr.fma(\1) : (\2, \2, \2) -> \2", text)


def _shuffled(text: str, target: Target) -> str:
    """With the sums over a subgroup's threads spelled out: IREE's own knows no f64 on CUDA."""

    def spelled_out(reduction: re.Match[str]) -> str:
        indent, result, value, size = reduction.groups()
        name = result[1:]
        lines = [f"%{name}_lanes = arith.constant {target.subgroup_size} : i32"]
        for distance in (1 << k for k in range(int(size).bit_length() - 1)):
            there, after = f"%{name}_there{distance}", f"%{name}_of{2 * distance}"
            lines += [
                f"%{name}_by{distance} = arith.constant {distance} : i32",
                f"{there}, %{name}_valid{distance} = gpu.shuffle xor {value}, "
                f"%{name}_by{distance}, %{name}_lanes : !acc",
                f"{after} = arith.addf {value}, {there} : !acc",
            ]
            value = after
        lines[-1] = lines[-1].replace(f"{value} =", f"{result} =")
        return "".join(f"{indent}{line}\n" for line in lines)

    return _SUBGROUP_SUM.sub(spelled_out, text)


def _reflection(
    spec: NormSpec,
    target: Target,
    schedule: Schedule,
    plans: LaunchPlans | None,
    host_cpu: str | None,
) -> dict[str, str]:
    """The values that a module's function carries as ``iree.reflection``."""
    reflection = {
        raw_interface.DECLARATION: raw_interface.declaration(spec),
        "iree_lnbwd.spec": json.dumps(spec.to_dict(), sort_keys=True),
        "iree_lnbwd.schedule": json.dumps(schedule_to_dict(schedule), sort_keys=True),
        "iree_lnbwd.target": target.name,
    }
    if host_cpu is not None:
        reflection["iree_lnbwd.host_cpu"] = host_cpu
    if plans is not None:
        reflection["iree_lnbwd.launches"] = json.dumps(plans.to_dict(), sort_keys=True)
    return reflection
