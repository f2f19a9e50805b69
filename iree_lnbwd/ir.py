"""From a spec and a schedule to a module's text: a file of ``ir/`` specialised.

``ir/README.md`` states the rules. All that they do is visible in the result.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from iree_lnbwd import host_program, linking, raw_interface
from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.launches import LaunchPlans, launches
from iree_lnbwd.operands import (
    GRAD_BIAS,
    GRAD_INPUT,
    MORE_GRAD_OUTPUTS,
    OPS,
    RESIDUAL,
    Element,
    Kind,
)
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
from iree_lnbwd.spec import LEAST_WEIGHT, NormSpec
from iree_lnbwd.targets import Target

ONE_PASS = "one_pass.mlir"
FEW_ROWS = "few_rows.mlir"
TWO_PASS = "two_pass.mlir"
ROW_BLOCKS = "row_blocks.mlir"
FINALIZE = "finalize.mlir"
FORWARD = "forward.mlir"
FORWARD_ROW_BLOCKS = "forward_row_blocks.mlir"
MATH = (
    "math/norm.mlir",
    "math/types.mlir",
    "math/clusters.mlir",
    "math/bulk.mlir",
    "math/memory.mlir",
    "math/environment.mlir",
)
# The parts of one pass that do not depend on the schedule.
PARTS = ("thread", "numbers", "columns", "weights", "gradients", "row_sums")
FORWARD_PARTS = ("thread", "rows", "shares")  # likewise, of the forward
_OF_FORWARD = "forward"  # the folder of its parts


_FILES: Mapping[type[Form], tuple[str, ...]] = {
    FewRows: (FEW_ROWS,),
    OnePass: (ONE_PASS, FINALIZE),
    TwoPass: (TWO_PASS, FINALIZE),
    Forward: (FORWARD,),
}

_HEADER = re.compile(
    r"// What a NormSpec (?:and a Schedule )?decides?\..*?// End of what is replaced\.\n",
    re.DOTALL,
)
# An alias of a file's own, with the comment above it. MLIR takes none inside a module.
_ALIAS = re.compile(r"(?:^//.*\n)*^[#!]\w+ += .*\n(?:(?:  .*|[\])}>]+)\n)*", re.MULTILINE)
# How many threads share a sum: of a row, or of a tile of few rows.
_SHARING = re.compile(r"cluster\(size = (\d+)\)")
_OF_A_ROW, _OF_A_TILE = "32", "8"  # as the files have it
# Names in the forward's kernel, and in its copy for few rows.
_OF_FEW_ROWS = {
    "#forward_weights_early": "#few_weights_early",
    "#forward_lasts": "#few_lasts",
    "#forward_packs": "#few_packs",
    "#forward_resident": "#few_resident",
    "#normalize_": "#normalize_few_",
    "@normalize": "@normalize_few",
}
_OF_MANY_ROWS = re.compile("|".join(_OF_FEW_ROWS))
_SUBGROUP_SUM = re.compile(
    r"^( *)(%\w+) = gpu\.subgroup_reduce add (%\w+) cluster\(size = (\d+)\) : .*\n", re.MULTILINE
)
# The variants of functions in math/norm.mlir, where the mean is not subtracted.
_UNCENTRED = {name: f"{name}_uncentred" for name in ("xhat", "dx", "dx_from_means")}
_UNROLLED = "#llvm.loop_annotation<unroll = <full = true>>"
_SUM_BYTES = 4  # of a sum that workgroups send to each other
_LINE_BYTES = 64  # of a CPU's caches
_LEGAL_TO_COPY = {"f32": 4, "f64": 2}  # elements, by the type of sums
_WORD_BITS = 32
_OF_WORDS = {32: "word", 64: "two_words", 128: "four_words"}  # by bits
_PAIRS_OF_BF16 = re.compile(r"vector<\d*[02468]xbf16>")


def sources(spec: NormSpec, target: Target, schedule: Schedule) -> tuple[str, ...]:
    """The files of ``ir/`` that `module` takes, in its order."""
    if isinstance(schedule, WholeTensors):
        return (f"{_stem(spec)}.mlir",)
    if isinstance(schedule, RowBlocks):
        names = [ROW_BLOCKS] if spec.family.is_backward else []
        statistics = FORWARD_ROW_BLOCKS
    else:
        names = [name for form in reversed(forms(schedule, spec)) for name in _FILES[type(form)]]
        statistics = FORWARD
    if spec.eps is not None and statistics not in names:
        names.append(statistics)
    parts: list[str] = []
    if isinstance(schedule, OnePass):
        parts += (*PARTS, *schedule.parts(spec, target))
    if FORWARD in names and not isinstance(schedule, RowBlocks):
        how = _forward(spec, target, schedule)
        parts += (f"{_OF_FORWARD}/{part}" for part in (*FORWARD_PARTS, *how.parts(target)))
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


def oracle(spec: NormSpec) -> str:
    """The file of ``ir/`` with the op in StableHLO."""
    return f"{_stem(spec)}.stablehlo.mlir"


def _stem(spec: NormSpec) -> str:
    return spec.op + ("_from_output" if spec.from_output else "")


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
    aliases = _spec_aliases(typed)
    plans = launches(spec, target, schedule)
    if isinstance(schedule, RowBlocks):
        aliases |= _row_blocks_aliases(spec, schedule)
    elif not isinstance(schedule, WholeTensors):
        aliases |= _gpu_aliases(spec, target, schedule)
        texts = {
            name: _literals(name, text, spec, target, schedule) for name, text in texts.items()
        }
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
        text = host_program.launched(text, spec, plans)
    if typed.rows is not None:
        text = text.replace("tensor.empty(%rows)", "tensor.empty()")
        text = re.sub(r"(!(?:dy_mn|dy_sum_mn|x_mn|residual_mn|acc_m))\{%\w+\}", r"\1", text)
    reflection = _reflection(spec, target, schedule, plans, host_cpu)
    text += host_program.requirements(cpu_features)
    text += host_program.entry(spec, plans, reflection)
    header += "".join(alias[0] for alias in _ALIAS.finditer(text))
    text = re.sub(r"\n{3,}", "\n\n", _ALIAS.sub("", text)).strip("\n")
    return f"{header}\nmodule @{raw_interface.symbol(spec, target)} {{\n\n{text}\n\n}}\n"


def _overload(spec: NormSpec, target: Target, function: str, types: tuple[str, ...]) -> str:
    """Which function of the library a declaration stands for.

    Those of ``math/types.mlir`` widen or round from the first type to the last.
    """
    if function == "away_from_zero":
        crashes = target.backend == "rocm" and types[0] == "vector<1xf64>"
        return "away_from_zero_by_reciprocal" if crashes else function
    if function == "reciprocal":
        on_gpu = target.backend != "cpu" and spec.acc_dtype == "f32"
        return "reciprocal_on_gpu" if on_gpu else function
    if function in ("settled", "load_lasting"):
        in_words = _OF_WORDS.get(linking.bits(types[-1]))
        of_words = target.backend == "cuda" if function == "settled" else target.has_cache_policies
        return f"{function}_{in_words}" if in_words and of_words else function
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
    if isinstance(schedule, OnePass) and name == ONE_PASS:
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
    return _shuffled(text, target) if spec.acc_dtype == "f64" else text


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
        "!gamma_n": f"tensor<{cols}x!gamma>",
        "!beta_n": f"tensor<{cols}x!beta>",
        "#inv_n": f"{1.0 / cols:.17e} : !acc",
        "#eps": f"{eps:.17e} : !acc",
        "#weight_offset": f"{offset:.17e} : !acc",
        "#centres": _flag(spec.family.centres),
        "#sums_dbeta": _flag(GRAD_BIAS in spec.family.rows),
        **{f"#has_{more.symbol}": _flag(spec.has(more)) for more in MORE_GRAD_OUTPUTS},
        "#adds_residual": _flag(spec.residual_dtype is not None),
        "#takes_residual": _flag(spec.has(RESIDUAL)),
        "#adds_bias": _flag(bool(spec.has_bias)),
        "#writes_output": _flag(not spec.family.is_backward),
        "#from_output": _flag(spec.from_output),
        "#least_weight": f"{LEAST_WEIGHT:.17e} : !acc",
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


def _private(shape: str) -> str:
    return f"memref<{shape}, #gpu.address_space<private>>"


def _bindings(cols: int) -> dict[str, str]:
    """The tensors as kernels see them, partial rows of sums among them."""
    seen = {
        Kind.CELLS: ("rows", f"?x{cols}x"),
        Kind.ROWS: ("column", "?x"),
        Kind.COLUMNS: ("row", f"{cols}x"),
    }
    tensors = [(operand.kind, operand.element) for op in OPS.values() for operand in op.rows]
    return {
        f"!{element.value}_{called}": _storage(f"{dims}!{element.value}")
        for kind, (called, dims) in seen.items()
        for of_kind, element in (*tensors, (Kind.CELLS, Element.ACC))
        if of_kind is kind
    }


def _chunks(vector: int) -> dict[str, str]:
    """Neighbouring elements of a row."""
    return {
        "!dy_chunk": f"vector<{vector}x!dy>",
        "!dy_sum_chunk": f"vector<{vector}x!dy_sum>",
        "!x_chunk": f"vector<{vector}x!x>",
        "!gamma_chunk": f"vector<{vector}x!gamma>",
        "!beta_chunk": f"vector<{vector}x!beta>",
        "!residual_chunk": f"vector<{vector}x!residual>",
        "!chunk": f"vector<{vector}x!acc>",
    }


def _gpu_aliases(
    spec: NormSpec, target: Target, schedule: OnePass | TwoPass | Forward
) -> dict[str, str]:
    """The aliases of all kernels of a module for a GPU."""
    aliases = {
        "#columns": f"{spec.columns} : index",
        "#subgroup": f"{target.subgroup_size} : index",
        "#unrolled": _UNROLLED,
        "#rolled": "#llvm.loop_annotation<unroll = <disable = true>>",
        "!mbarriers": _shared("2xi64"),
        "!pointer": "!llvm.ptr<1>",
        **_bindings(spec.columns),
    }
    if spec.eps is not None:
        aliases |= _forward_aliases(spec, target, _forward(spec, target, schedule))
    if isinstance(schedule, Forward):
        return aliases
    aliases |= _partial_rows_aliases(spec, target, schedule)
    if isinstance(schedule, TwoPass):
        return aliases | _two_pass_aliases(spec, target, schedule)
    aliases |= _one_pass_aliases(spec, target, schedule)
    if schedule.few_rows:
        aliases |= _few_rows_aliases(spec, target, schedule, schedule.few_rows)
    return aliases


def _forward(spec: NormSpec, target: Target, schedule: OnePass | TwoPass | Forward) -> Forward:
    """How rows are normalized, or how a backward recomputes their statistics."""
    return schedule if isinstance(schedule, Forward) else choose_statistics(spec, target)


def _partial_rows_aliases(
    spec: NormSpec, target: Target, schedule: OnePass | TwoPass
) -> dict[str, str]:
    """The aliases that the kernels of one pass and of two passes share."""
    cols, vector = spec.columns, schedule.vector
    return {
        "#vector": f"{vector} : index",
        "#threads": f"{schedule.threads(target)} : index",
        "#resident": f"{schedule.resident} : i32",
        "#wants_dx": _flag(spec.has(GRAD_INPUT)),
        "#partials_at_once": f"{schedule.finalize_rows} : index",
        "#width": f"{schedule.finalize_columns} : index",
        "#slices": f"{schedule.finalize_slices} : index",
        "#finalize_kernel": _kernel(schedule.finalize_columns * schedule.finalize_slices, target),
        "!slices": _shared(f"{schedule.finalize_slices}x{schedule.finalize_columns}x!acc"),
        "!shares": f"vector<{schedule.finalize_slices}x1x!acc>",
        "!acc_pn": f"tensor<{schedule.workgroups}x{cols}x!acc>",
        "!warp_sums": f"vector<{schedule.warps}x2x!acc>",
        **_chunks(vector),
        "!gamma_cell": "vector<1x!gamma>",
        "!beta_cell": "vector<1x!beta>",
        "!cell": "vector<1x!acc>",
    }


def _row_blocks_aliases(spec: NormSpec, schedule: RowBlocks) -> dict[str, str]:
    cols, vector, block = spec.columns, schedule.vector, schedule.block
    return {
        "#columns": f"{cols} : index",
        "#vector": f"{vector} : index",
        "#fetches_ahead": _flag(schedule.fetches_ahead),
        **{
            f"#{element.value}_line": f"{_LINE_BYTES // _itemsize(spec, element)} : index"
            for element in (Element.DY, Element.X, Element.RESIDUAL)
        },
        "#unrolled": _UNROLLED,
        "#span": f"{schedule.span} : index",
        "#block": f"{block} : index",
        "#scales": _flag(spec.has_weight),
        "#tile": f"{schedule.finalize_columns} : index",
        "#wants_dx": _flag(spec.has(GRAD_INPUT)),
        "#single_column": _flag(cols == 1),
        "!acc_pn": f"tensor<?x{cols}x!acc>",
        **_bindings(cols),
        "!means": f"memref<{block}x2x!acc>",
        **_chunks(vector),
        "!lanes": f"vector<{vector}xi1>",
    }


def _itemsize(spec: NormSpec, element: Element) -> int:
    return DTYPES[spec.element_type(element)].numpy.itemsize


def _one_pass_aliases(spec: NormSpec, target: Target, schedule: OnePass) -> dict[str, str]:
    padded, groups = schedule.padded_columns(spec, target), schedule.groups
    slots, chunks = schedule.slots, schedule.chunks(spec, target)
    dy_bytes, x_bytes = schedule.row_bytes(spec, target)
    padding = schedule.padding(spec, target)
    senders = schedule.warps * schedule.cluster
    own = schedule.own_columns(spec)
    defers = schedule.defers and spec.has(GRAD_INPUT)
    return {
        "#least_last": f"{schedule.least_last(spec, target)} : index",
        "#dy_bits": f"{8 * _itemsize(spec, Element.DY)} : index",
        "#x_bits": f"{8 * _itemsize(spec, Element.X)} : index",
        **{
            f"!{element.value}_lines": _storage(f"?x{schedule.line(spec)}x!{element.value}")
            for element in (Element.DY, Element.X, Element.RESIDUAL)
        },
        "#groups": f"{groups} : index",
        "#workgroups_i32": f"{schedule.workgroups} : i32",
        "#ahead_i32": f"{schedule.ahead} : i32",
        "#slots": f"{slots} : index",
        "#chunks": f"{chunks} : index",
        "#copied": f"{_copied(spec, schedule)} : index",
        "#dy_pitch": f"{schedule.staged(spec, target, spec.dy_dtype) // schedule.warps} : index",
        "#x_pitch": f"{schedule.staged(spec, target, spec.dtype) // schedule.warps} : index",
        "#lines_behind": f"{schedule.lines_behind(spec, target)} : index",
        **{
            f"#{element.value}_chunk_bytes": f"{schedule.vector * _itemsize(spec, element)} : i64"
            for element in (Element.DY, Element.X)
        },
        "#may_have_none": _flag(schedule.has_idle_subgroups(spec, target)),
        "#chunks_a_load": f"{schedule.chunks_a_load} : index",
        "#refills": f"{schedule.refills} : index",
        "#x_later": _flag(schedule.x_later),
        "#pending_i32": f"{max(slots - 1 - defers, 0)} : i32",
        "#pending_first_i32": f"{max(schedule.ahead - 1, 0)} : i32",
        "#defers": _flag(defers),
        "#buffers": f"{schedule.buffers} : index",
        "#rereads": _flag(schedule.rereads and spec.has(GRAD_INPUT)),
        "#gamma_copied": f"{_gamma_copied(spec, schedule)} : index",
        "#warps": f"{schedule.warps} : index",
        "!warp_sums": f"vector<{schedule.warps}x2x!acc>",
        "#own_columns": f"{own} : index",
        "#cluster": f"{schedule.cluster} : index",
        "#rows_kernel": _kernel(groups * schedule.threads(target), target),
        "!dy_bytes": _shared(f"{dy_bytes + padding}xi8"),
        "!x_bytes": _shared(f"{x_bytes}xi8"),
        "!exchange": _shared(f"{schedule.buffers}x{groups}x{senders}x2x!acc"),
        "!mbarriers": _shared(f"{schedule.mbarriers(spec, target)}xi64"),
        "!group_sums": _shared(f"{groups}x{padded}x!acc"),
        "!dy_held": _private(f"{chunks}x!dy_chunk"),
        "!more_dy_held": _private(f"{len(MORE_GRAD_OUTPUTS)}x{chunks}x!dy_chunk"),
        "!x_held": _private(f"{chunks}x!x_chunk"),
        "!gamma_held": _private(f"{chunks}x!gamma_chunk"),
        "!residual_held": _private(f"{chunks}x!residual_chunk"),
        "!held": _private(f"{chunks}x!chunk"),
        "!thread": "vector<9xindex>",
        "!begin": "vector<3xindex>",
        "!rows_ahead": "vector<2xindex>",
        "!are_live": "vector<2xi1>",
        "!pair": "vector<2x!acc>",
        "!statistics": "vector<3x!acc>",
        **_rooms(spec, target, schedule),
    }


def _rooms(spec: NormSpec, target: Target, schedule: OnePass) -> dict[str, str]:
    """Where a kernel of one pass keeps rows, and what it keeps of its columns."""
    chunks, groups = schedule.chunks(spec, target), schedule.groups
    columns = f"{groups}x{schedule.padded_columns(spec, target)}"
    if schedule.slots:
        dy, x = (
            _shared(f"{slots}x{groups}x{schedule.staged(spec, target, dtype)}x!{name}")
            for slots, dtype, name in (
                (schedule.slots, spec.dy_dtype, "dy"),
                (schedule.x_slots, spec.dtype, "x"),
            )
        )
    else:
        rows = f"2x{chunks}" if schedule.ahead else f"{chunks}"
        dy, x = _private(f"{rows}x!dy_chunk"), _private(f"{rows}x!x_chunk")
    weight = _shared(f"{columns}x!{'acc' if schedule.widens_weight else 'gamma'}")
    stages_bias = schedule.stages_bias(spec, target)
    stages_inverse = schedule.stages_inverse(spec, target)
    return {
        "!dy_room": dy,
        "!x_room": x,
        "!weight_room": weight if schedule.stages_weight else _private(f"{chunks}x!gamma_chunk"),
        "!bias_room": _shared(f"{columns}x!beta")
        if stages_bias
        else _private(f"{chunks}x!beta_chunk"),
        "!inverse_room": _shared(f"{columns}x!acc")
        if stages_inverse
        else _private(f"{chunks}x!chunk"),
    }


def _copied(spec: NormSpec, schedule: OnePass) -> int:
    """Elements of dy and x in one copy. A schedule without copies gets a number that is legal."""
    copied = schedule.slots > 0 and not schedule.bulk
    return schedule.vector if copied else _LEGAL_TO_COPY[spec.acc_dtype]


def _gamma_copied(spec: NormSpec, schedule: OnePass) -> int:
    """Elements of the weight in one copy. A schedule without copies gets a number that is legal."""
    copied = schedule.stages_weight and not schedule.widens_weight and not schedule.bulk
    return schedule.vector if copied else _LEGAL_TO_COPY[spec.acc_dtype]


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _few_rows_aliases(
    spec: NormSpec, target: Target, schedule: OnePass, few: FewRows
) -> dict[str, str]:
    vector, slices = few.tile_vector, few.slices(target)
    of_a_row = schedule.few_vector(spec)
    chunks = few.chunks(spec, target, of_a_row)
    return {
        "#few_vector": f"{of_a_row} : index",
        **{f"!few_{alias[1:]}": shape for alias, shape in _chunks(of_a_row).items()},
        "#few_threads": f"{few.threads(target)} : index",
        "#few_chunks": f"{chunks} : index",
        "#tiles": f"{few.tiles(spec)} : index",
        "#tile": f"{few.tile} : index",
        "#tile_vector": f"{vector} : index",
        "#tile_slices": f"{slices} : index",
        "#few_rows_kernel": _kernel(few.threads(target), target),
        "!few_exchange": _shared(f"{few.warps}x2x!acc"),
        "!few_warp_sums": f"vector<{few.warps}x2x!acc>",
        "!tile_sums": _shared(f"2x{slices}x{few.padded_tile(target)}x!acc"),
        "!few_dy": _private(f"{chunks}x!few_dy_chunk"),
        "!few_more_dy": _private(f"{len(MORE_GRAD_OUTPUTS)}x{chunks}x!few_dy_chunk"),
        "!few_x": _private(f"{chunks}x!few_x_chunk"),
        "!few_gamma": _private(f"{chunks}x!few_gamma_chunk"),
        "!few_beta": _private(f"{chunks}x!few_beta_chunk"),
        "!few_residual": _private(f"{chunks}x!few_residual_chunk"),
        "!few_held": _private(f"{chunks}x!few_chunk"),
        "!dy_cells": f"vector<{vector}x!dy>",
        "!dy_sum_cells": f"vector<{vector}x!dy_sum>",
        "!x_cells": f"vector<{vector}x!x>",
        "!gamma_cells": f"vector<{vector}x!gamma>",
        "!beta_cells": f"vector<{vector}x!beta>",
        "!cells": f"vector<{vector}x!acc>",
    }


def _two_pass_aliases(spec: NormSpec, target: Target, schedule: TwoPass) -> dict[str, str]:
    at_once = schedule.tile(target) * schedule.chunks
    return {
        "#chunks_at_once": f"{schedule.chunks} : index",
        "#whole": _flag(spec.columns % at_once == 0),
        "#rows_at_once": f"{schedule.rows} : index",
        "#span_steps": f"{schedule.span_steps} : index",
        "#workgroups_index": f"{schedule.workgroups} : index",
        "#tile": f"{schedule.tile(target)} : index",
        "#two_pass_kernel": _kernel(schedule.threads(target), target),
        "!exchange": _shared(f"1x1x{schedule.warps}x2x!acc"),
        "!dy_read": _private(f"{schedule.chunks}x!dy_chunk"),
        "!more_dy_read": _private(f"{len(MORE_GRAD_OUTPUTS)}x{schedule.chunks}x!dy_chunk"),
        "!x_read": _private(f"{schedule.chunks}x!x_chunk"),
        "!gamma_read": _private(f"{schedule.chunks}x!gamma_chunk"),
        "!beta_read": _private(f"{schedule.chunks}x!beta_chunk"),
    }


def _forward_aliases(spec: NormSpec, target: Target, how: Forward) -> dict[str, str]:
    vector, chunks, warps = how.vector, how.chunks, how.warps(target)
    senders = warps * how.cluster
    is_forward = not spec.family.is_backward
    few, many = how.forms(spec)[0], how.forms(spec)[-1]
    named = ("x", "residual", "gamma", "beta")
    return {
        "#forward_columns": f"{how.own_columns(spec)} : index",
        "#forward_parts_alike": _flag(how.cluster * how.own_columns(spec) == spec.columns),
        "#forward_cluster": f"{how.cluster} : index",
        "#forward_in_clusters": _flag(how.cluster > 1),
        "#forward_senders": f"{senders} : index",
        "#forward_received": f"{-(-senders // target.subgroup_size)} : index",
        "#forward_sent_bytes": f"{senders * how.sums(spec) * _SUM_BYTES} : i32",
        "#forward_vector": f"{vector} : index",
        "#forward_chunks": f"{chunks} : index",
        "#forward_threads": f"{how.threads} : index",
        "#forward_warps": f"{warps} : index",
        "#forward_rows": f"{how.rows} : index",
        "#forward_steps": f"{how.steps(spec)} : index",
        "#forward_span": f"{how.span(spec)} : index",
        "#forward_whole": _flag(how.whole(spec)),
        "#forward_keeps": _flag(how.keeps),
        "#forward_shares": _flag(how.shares),
        "#forward_weights_early": _flag(many.early),
        "#forward_lasts": _flag(many.lasts),
        "#forward_packs": _flag(many.packs),
        "!forward_thread": "vector<6xindex>",
        "#forward_resident": f"{many.resident} : i32",
        "#few_weights_early": _flag(few.early),
        "#few_lasts": _flag(few.lasts),
        "#few_packs": _flag(few.packs),
        "#few_resident": f"{few.resident} : i32",
        "#scales": _flag(spec.has_weight and is_forward),
        "#forward_kernel": _kernel(how.rows * how.threads, target),
        "!forward_exchange": _shared(f"{how.sums(spec)}x{how.rows}x{senders}x!acc"),
        "!forward_warps": f"vector<{warps}x!acc>",
        "!forward_chunk": f"vector<{vector}x!acc>",
        "!forward_held": _private(f"{chunks}x!forward_chunk"),
        **{f"!forward_{name}": f"vector<{vector}x!{name}>" for name in named},
        **{f"!forward_{name}_held": _private(f"{chunks}x!forward_{name}") for name in named},
        **{
            f"!forward_{name}_kept": _shared(f"{how.rows}x{how.padded_columns(spec)}x!{name}")
            for name in ("x", "residual")
        },
    }


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
