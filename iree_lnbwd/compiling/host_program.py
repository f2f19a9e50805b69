"""A module's public function, and its kernels' layouts and workgroup counts, from the launches.

A kernel's file in ``ir/`` stands with an example of its layout (its bindings) and of the number of
its workgroups along x and y. Both are replaced by what `launches` states. The example has every
operand that the kernel can have; where a spec lacks some, the others are numbered anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from iree_lnbwd.compiling import strided_rows
from iree_lnbwd.ops.operands import (
    ADDED_BIAS,
    BIAS,
    GATE,
    GRAD_INPUT,
    GRAD_OUTPUT,
    MORE_GRAD_OUTPUTS,
    WEIGHT,
    Access,
    Kind,
    Operand,
)
from iree_lnbwd.ops.sets import LEAST_RUN, Sets
from iree_lnbwd.ops.spec import MOST_ROWS, NormSpec
from iree_lnbwd.vmfb.counts import (
    IDLE,
    MOST_COST,
    NEAR,
    PARTIAL,
    SETS_NUMBERS,
    WAVES,
    Count,
    CountInWaves,
    OfSet,
    OfSets,
    Plain,
    RowCount,
    RowShare,
    Shares,
    StridesNumber,
    least_busy,
)
from iree_lnbwd.vmfb.launches import KERNELS, LaunchPlans, Plan, PlannedLaunch
from iree_lnbwd.vmfb.raw_interface import storage_name

_EXECUTABLE = re.compile(
    r"^hal\.executable\.source private @(\w+) \{\n.*?^\}\n+", re.MULTILINE | re.DOTALL
)
_BINDING = re.compile(r"(layout\(#(\w+)_layout\) binding\()(\d+)(?=\))")
_AS_THEY_ARE = "affine_map<()[p] -> (p)>"  # of workgroups that a dispatch has the number of
_OF_SETS = dict(zip(Sets._fields, ("g", "rows_per_set"), strict=True))  # their symbols
_OF_ROWS = (Kind.CELLS, Kind.ROWS, Kind.POSTS)
_VIEW = "!hal.buffer_view"  # memory with a shape and a type, as callers give it


def export_aliases(spec: NormSpec, plans: LaunchPlans) -> dict[str, str]:
    """The layout of each kernel, and its workgroups for M rows, the least of a list."""
    aliases = {}
    for launch in {launch.kernel: launch for p in plans.plans for launch in p.kernels}.values():
        aliases[f"#{launch.kernel}_layout"] = _layout(spec, launch)
        for axis, count in zip("xy", launch.workgroups, strict=False):
            aliases[f"#{launch.kernel}_{axis}"] = (
                _AS_THEY_ARE if isinstance(count, Shares | OfSets) else _map(count)
            )
    return aliases


def launched(text: str, spec: NormSpec, plans: LaunchPlans, *, on_gpu: bool) -> str:
    """A file of kernels without those that no call launches, their bindings numbered.

    An operand that the spec lacks gets the number of the first one. Nothing uses it.
    """
    launches = {launch.kernel: launch for plan in plans.plans for launch in plan.kernels}

    def numbered(binding: re.Match[str]) -> str:
        before, kernel, number = binding.groups()
        symbol = KERNELS[kernel].bindings[int(number)].symbol
        there = [spec.family.named(name).symbol for name in launches[kernel].bindings]
        return f"{before}{there.index(symbol) if symbol in there else 0}"

    def kept(executable: re.Match[str]) -> str:
        launch = launches.get(executable[1])
        if launch is None:
            return ""
        text = executable[0]
        if not spec.strided_rows:
            return text
        return strided_rows.found(text, spec, launch, on_gpu=on_gpu)

    return _BINDING.sub(numbered, _EXECUTABLE.sub(kept, text))


def requirements(cpu_features: Sequence[str]) -> str:
    """What runs when the module is loaded: it refuses a CPU that lacks a feature."""
    if not cpu_features:
        return ""
    lines = ["%c0 = arith.constant 0 : index", "%one = arith.constant 1 : i64"]
    lines.append("%device = hal.devices.get %c0 : !hal.device")
    for n, feature in enumerate(cpu_features):
        lines += [
            f"%known_{n}, %has_{n} = hal.device.query<%device : !hal.device> "
            f'key("hal.cpu" :: "{feature}") : i1, i64 = 0 : i64',
            f"%there_{n} = arith.cmpi eq, %has_{n}, %one : i64",
            f'cf.assert %there_{n}, "device: expected a CPU with {feature}, got one without"',
        ]
    body = "".join(f"  {line}\n" for line in (*lines, "util.return"))
    return f"\nutil.initializer {{\n{body}}}\n"


def entry(
    spec: NormSpec,
    plans: LaunchPlans | None,
    reflection: Mapping[str, str],
    *,
    on_gpu: bool,
) -> str:
    """The public function: views of the caller's memory in, views of the filled storage out.

    It checks every argument before it uses one, because whoever calls a bare module does not: the
    runtime's status names the argument. Without rows it launches nothing and stores zeros.

    Args:
        spec: What the module computes.
        plans: What it launches. None if IREE decides that.
        reflection: The module's description of itself.
        on_gpu: Whether it runs on a GPU.
    """
    arguments = [f"%{_view(operand)}: {_VIEW}" for operand in _arguments(spec)]
    arguments += ["%rows_per_set_given: i64"] if spec.weight_sets else []
    arguments += strided_rows.arguments(spec, _arguments(spec)) if spec.strided_rows else []
    types = ", ".join(_VIEW for _ in _results(spec))
    attributes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in reflection.items())
    body = [*_constants(spec), *_checks(spec, on_gpu=on_gpu), *_sets(spec)]
    if spec.strided_rows:
        body += strided_rows.inverse()
    if spec.rows is None:
        body += [
            "%is_empty = arith.cmpi eq, %m, %c0 : index",
            "cf.cond_br %is_empty, ^empty, ^some",
            "^empty:",
            *_sums_of_nothing(spec),
            "^some:",
        ]
    body += [] if spec.has_weight else ["%gamma = arith.constant dense<1.0> : !gamma_n"]
    if plans is None:
        body += _calls(spec)
    elif len(plans.plans) > 1:
        body += _branches(spec, plans)
    else:
        lines, values = _dispatches(spec, plans.plans[0])
        body += [*lines, *_return(spec, values)]
    lines = [
        "",
        f"util.func public @{spec.op}(",
        ",\n".join(f"    {argument}" for argument in arguments) + ")",
        f"    -> ({types})",
        # A stub: IREE adds no description of its own, which would not know the tensors' types.
        f"    attributes {{iree.abi.stub, iree.reflection = {{{attributes}}}}} {{",
        *(f"  {line}" for line in body),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _inputs(spec: NormSpec) -> tuple[Operand, ...]:
    return tuple(filter(spec.has, spec.family.inputs))


def _arguments(spec: NormSpec) -> tuple[Operand, ...]:
    """Those of the public function: what is read, and the storage of what is written."""
    return (*_inputs(spec), *_results(spec))


def _view(operand: Operand) -> str:
    """The symbol of the caller's memory for it."""
    return ("in_" if operand.access is Access.READ else "out_") + operand.symbol


def _named(operand: Operand) -> str:
    """The name that messages have for it."""
    read = operand.access is Access.READ
    return operand.name if read else storage_name(operand.name)


def _constants(spec: NormSpec) -> list[str]:
    """The numbers that checks and counts need, M among them."""
    if spec.rows is not None:
        m = f"%m = arith.constant {spec.rows} : index"
    elif spec.strided_rows:
        m = "%m = arith.index_cast %rows_given : i64 to index"
    else:
        m = f"%m = hal.buffer_view.dim<%{_view(spec.family.data)} : {_VIEW}>[0] : index"
    lines = ["%c0 = arith.constant 0 : index", f"%n = arith.constant {spec.columns} : index", m]
    if spec.weight_sets:
        lines.append(f"%g = hal.buffer_view.dim<%{_view(WEIGHT)} : {_VIEW}>[0] : index")
    return lines


def _sets(spec: NormSpec) -> list[str]:
    """The numbers of a weight's sets, and how many rows the first set has."""
    if not spec.weight_sets:
        return []
    return [
        "%c1 = arith.constant 1 : index",
        "%one_row = arith.constant 1 : i64",
        "%have_rows = arith.cmpi sge, %rows_per_set_given, %one_row : i64",
        'cf.assert %have_rows, "rows_per_set: expected 1 or more"',
        "%have_sets = arith.cmpi uge, %g, %c1 : index",
        'cf.assert %have_sets, "weight: expected one set or more"',
        "%m_or_one = arith.maxui %m, %c1 : index",
        "%given = arith.index_cast %rows_per_set_given : i64 to index",
        "%rows_per_set = arith.minui %given, %m_or_one : index",
        "%round = arith.muli %g, %rows_per_set : index",
        "%rounds = arith.divui %m, %round : index",
        "%rest = arith.remui %m, %round : index",
        "%in_last = arith.minui %rest, %rows_per_set : index",
        "%in_others = arith.muli %rounds, %rows_per_set : index",
        "%set_rows = arith.addi %in_others, %in_last : index",
    ]


def _checks(spec: NormSpec, *, on_gpu: bool) -> list[str]:
    """Expects of every argument its type and a shape that fits the others', and imports inputs."""
    lines = ["%dense = hal.encoding_type<dense_row_major> : i32"]
    elements = dict.fromkeys(operand.element for operand in _arguments(spec))
    lines += [f"%type_{e.value} = hal.element_type<!{e.value}> : i32" for e in elements]
    # The rank of what gives M comes first; its own message would speak of M otherwise.
    data = spec.family.data
    for operand in sorted(_arguments(spec), key=lambda operand: operand is not data):
        shape = ", ".join(f"%{letter}" for letter in spec.kind_of(operand).value)
        if spec.is_strided(operand):
            shape = strided_rows.length(operand)
            lines.append(f"{shape} = hal.buffer_view.dim<%{_view(operand)} : {_VIEW}>[0] : index")
        lines.append(
            f'hal.buffer_view.assert<%{_view(operand)} : {_VIEW}> message("{_named(operand)}")\n'
            f"      shape([{shape}]) type(%type_{operand.element.value}) encoding(%dense)"
        )
    if spec.rows is None:
        lines += [
            f"%most = arith.constant {MOST_ROWS} : index",
            "%are_countable = arith.cmpi ule, %m, %most : index",
            f'cf.assert %are_countable, "{data.name}: expected at most {MOST_ROWS} rows"',
        ]
    if spec.strided_rows:
        named = {operand: _named(operand) for operand in _arguments(spec)}
        lines += strided_rows.checks(spec, named, on_gpu=on_gpu)
    for operand in _inputs(spec):
        lines.append(
            f'%{operand.symbol} = hal.tensor.import %{_view(operand)} "{operand.name}" '
            f": {_VIEW} -> {_sized(spec, operand)}"
        )
    return lines


def _sums_of_nothing(spec: NormSpec) -> list[str]:
    """The results without rows: sums over rows are zeros, all else is empty."""
    lines, views = [], []
    for result in _results(spec):
        if result.kind is not Kind.COLUMNS:
            views.append(f"%{_view(result)}")
            continue
        zeros = f"%{result.symbol}_zeros"
        if spec.weight_sets:
            element = f"!{result.element.value}"
            lines += [
                f"{zeros}_each = arith.constant 0.0 : {element}",
                f"{zeros} = flow.tensor.splat {zeros}_each : {_sized(spec, result)}",
            ]
        else:
            lines.append(f"{zeros} = arith.constant dense<0.0> : {result.alias}")
        exported, view = _exported(spec, result, zeros, "_zeros")
        lines += exported
        views.append(view)
    return [*lines, f"util.return {', '.join(views)} : {', '.join(_VIEW for _ in views)}"]


def _results(spec: NormSpec) -> tuple[Operand, ...]:
    return tuple(result for result in spec.family.results if spec.has(result))


def _return(spec: NormSpec, values: Mapping[str, str], suffix: str = "") -> list[str]:
    """Of the asked results, by their names, in the caller's storage."""
    lines, views = [], []
    for result in _results(spec):
        exported, view = _exported(spec, result, values[result.name], suffix)
        lines += exported
        views.append(view)
    return [*lines, f"util.return {', '.join(views)} : {', '.join(_VIEW for _ in views)}"]


def _exported(
    spec: NormSpec, result: Operand, value: str, suffix: str = ""
) -> tuple[list[str], str]:
    """Stores a result in the caller's storage; the lines, and the symbol of its view."""
    type_, there = _sized(spec, result), f"%{result.symbol}_there{suffix}"
    view = f"%{result.symbol}_view{suffix}"
    lines = [
        f"{there} = hal.tensor.alias {value} : {type_} to %{_view(result)} : {_VIEW}",
        f"{view} = hal.tensor.export {there} : {type_} -> {_VIEW}",
    ]
    return lines, view


def _calls(spec: NormSpec) -> list[str]:
    """Calls of what a file of ``ir/`` with the op in linalg defines."""
    family = spec.family
    lines = []
    if family.is_backward and spec.eps is not None:
        saved = family.statistics
        computed = ", ".join(f"%{statistic.symbol}" for statistic in saved)
        types = ", ".join(statistic.alias for statistic in saved)
        seen = (family.data, *([] if family.gate is None else [GATE]))
        given = ", ".join(f"%{operand.symbol}" for operand in seen)
        of = ", ".join(operand.alias for operand in seen)
        lines.append(f"{computed} = func.call @statistics({given}) : ({of}) -> ({types})")
    inputs, has_beta = family.inputs, family.from_output and family.reads_bias
    if family.gate is not None:  # always after the weight, though only its type may count
        inputs = tuple(ADDED_BIAS if row is BIAS else row for row in family.arguments)
        has_beta = True
    if spec.weight_sets:
        return [*lines, *_calls_of_rows(spec, inputs)]
    if has_beta and not spec.has(ADDED_BIAS):
        lines.append(f"%{ADDED_BIAS.symbol} = arith.constant dense<0.0> : {ADDED_BIAS.alias}")
    results = ", ".join(f"%{result.symbol}" for result in family.results)
    read = ", ".join(f"%{_stand_in(spec, given)}" for given in inputs)
    types = ", ".join(given.alias for given in inputs)
    computed = ", ".join(result.alias for result in family.results)
    lines.append(f"{results} = func.call @algorithm({read})\n      : ({types}) -> ({computed})")
    values = {result.name: f"%{result.symbol}" for result in _results(spec)}
    return [*lines, *_return(spec, values)]


def _calls_of_rows(spec: NormSpec, inputs: Sequence[Operand]) -> list[str]:
    """The call of an algorithm that sees a weight for each row, between those that are about sets.

    Args:
        spec: With sets.
        inputs: What the algorithm takes.
    """
    symbols: dict[Operand, str] = {}
    lines: list[str] = []
    for given in inputs:
        symbols[given] = f"%{_stand_in(spec, given)}"
        if spec.kind_of(given) is not Kind.SETS:
            continue
        symbols[given] = rows = f"%{given.symbol}_of_rows"
        if spec.has(given):
            call = f"@{given.symbol}_of_rows(%{given.symbol}, %m, %rows_per_set)"
            takes = f"({given.alias}, index, index)"
        else:
            call, takes = "@no_beta_of_rows(%m)", "(index)"
        lines.append(f"{rows} = func.call {call} : {takes} -> !acc_mn")
    results = spec.family.results
    computed = {
        result: f"%{result.symbol}" + ("_of_rows" if spec.kind_of(result) is Kind.SETS else "")
        for result in results
    }
    types = [
        ", ".join("!acc_mn" if spec.kind_of(o) is Kind.SETS else o.alias for o in operands)
        for operands in (inputs, results)
    ]
    lines.append(
        f"{', '.join(computed.values())} = func.call @algorithm({', '.join(symbols.values())})\n"
        f"      : ({types[0]}) -> ({types[1]})"
    )
    for result in _results(spec):
        if spec.kind_of(result) is Kind.SETS:
            name = f"{result.symbol}_of_sets"
            lines.append(
                f"%{result.symbol} = func.call @{name}({computed[result]}, %g, %rows_per_set)\n"
                f"      : (!acc_mn, index, index) -> {result.alias}"
            )
    return [*lines, *_return(spec, {result.name: f"%{result.symbol}" for result in results})]


def _stand_in(spec: NormSpec, given: Operand) -> str:
    """The symbol of an operand, or of one of its type where the spec lacks it."""
    has_beta = spec.from_output or spec.gate is not None
    if spec.has(given) or not given.is_option or (has_beta and given is ADDED_BIAS):
        return given.symbol
    if given in MORE_GRAD_OUTPUTS:
        return GRAD_OUTPUT.symbol
    return "x" if given.kind is Kind.CELLS else "gamma"


def _branches(spec: NormSpec, plans: LaunchPlans) -> list[str]:
    """One plan or the other; M decides.

    Each branch ties its gradients to the caller's storage itself. If they were tied only after the
    branches meet, IREE would copy them there.
    """
    few, many = plans.plans
    lines = [
        f"%most_few = arith.constant {few.most_rows} : index",
        "%are_few = arith.cmpi ule, %m, %most_few : index",
        "cf.cond_br %are_few, ^few, ^many",
    ]
    for label, plan in (("few", few), ("many", many)):
        dispatches, values = _dispatches(spec, plan, suffix=f"_{label}")
        lines += [f"^{label}:", *dispatches, *_return(spec, values, f"_{label}")]
    return lines


def _dispatches(spec: NormSpec, plan: Plan, suffix: str = "") -> tuple[list[str], dict[str, str]]:
    """A plan's kernels, in order, and the value of each operand after them."""
    values = {given.name: f"%{given.symbol}" for given in spec.family.inputs}
    lines, shares = _of_all_sets(plan, suffix) if spec.weight_sets else _shares(plan, suffix)
    partials = {p.name: shares[p.count] for p in plan.scratch if p.count in shares}
    for launch in plan.kernels:
        constants = [f"%{launch.kernel}_{n}{suffix}" for n, _ in enumerate(launch.constants)]
        for name, count in zip(constants, launch.constants, strict=True):
            if isinstance(count, StridesNumber):
                index = strided_rows.symbol(count, spec)
            elif (known := shares.get(count)) is not None:
                index = known
            else:
                index = f"{name}_index"
                lines.append(f"{index} = affine.min {_map(count)}()[%m]")
            lines.append(f"{name} = arith.index_cast {index} : index to i32")
        workload = shares.get(launch.workgroups[0], "%m")
        reads, writes = (list(map(spec.family.named, n)) for n in (launch.reads, launch.writes))
        given = ", ".join([*constants, *(values[operand.name] for operand in reads)])
        types = ", ".join(
            [*("i32" for _ in constants), *(_sized(spec, read, partials) for read in reads)]
        )
        # A kernel may change scratch that it reads. IREE need not know, as nothing reads it later:
        # told by a tied result, IREE 3.13 gives dx memory of its own, and copies it.
        computed = []
        for operand in writes:
            type_ = _sized(spec, operand, partials)
            unasked = operand.kind is Kind.CELLS and not spec.has(operand)
            is_written = operand == GRAD_INPUT and spec.wants_dx
            if unasked and not is_written and (spec.rows is None or spec.strided_rows):
                type_ = f"{operand.alias}{{%c0}}"
            computed.append(type_)
            values[operand.name] = f"%{operand.symbol}{suffix}"
        results = ", ".join(values[operand.name] for operand in writes)
        lines.append(
            f"{results} = flow.dispatch @{launch.kernel}::@{launch.kernel}[{workload}]({given})\n"
            f"      : ({types}) -> ({', '.join(computed)})"
        )
    return lines, values


def _sized(spec: NormSpec, operand: Operand, partials: Mapping[str, str] | None = None) -> str:
    """The type of its tensor, with the number of rows if M decides that.

    Args:
        spec: What the module computes.
        operand: One of its operands.
        partials: The symbols of such numbers of partial rows.
    """
    if partials is not None and operand.name in partials:
        return f"{operand.alias}{{{partials[operand.name]}}}"
    if spec.is_strided(operand):
        length = strided_rows.length(operand) if spec.has(operand) else "%cells"
        return f"{operand.alias}{{{length}}}"
    of_rows = operand.kind in _OF_ROWS and (spec.rows is None or operand.kind is Kind.POSTS)
    of_sets = spec.kind_of(operand) is Kind.SETS
    return operand.alias + ("{%m}" if of_rows else "{%g}" if of_sets else "")


def _shares(plan: Plan, suffix: str) -> tuple[list[str], dict[Count, str]]:
    """The lines that share out rows to workgroups, and the symbols of what they compute."""
    lines: list[str] = []
    symbols: dict[Count, str] = {}
    for launch in plan.kernels:
        if not isinstance(count := launch.workgroups[0], Shares):
            continue
        share, groups = (f"%{launch.kernel}_{what}{suffix}" for what in ("share", "workgroups"))
        lines += _shared_out(count.share, "%m", share, groups)
        symbols |= {count.share: share, count: groups}
    return lines, symbols


def _shared_out(of: RowShare, rows: str, share: str, groups: str) -> list[str]:
    """The lines that compute the rows of a workgroup, and the number of workgroups.

    Args:
        of: How rows are shared out.
        rows: The symbol of their number.
        share: A new symbol, for the rows of a workgroup.
        groups: Likewise, for the number of workgroups.
    """
    few, many = (
        f"(m ceildiv {of.block}) ceildiv {each} * {of.block}"
        for each in (of.workgroups, of.most_workgroups)
    )
    return [
        f"{share}_few = affine.max affine_map<()[m] -> ({of.least}, {few})>()[{rows}]",
        f"{share}_many = affine.max affine_map<()[m] -> ({of.most}, {many})>()[{rows}]",
        f"{share} = arith.minui {share}_few, {share}_many : index",
        f"{groups} = arith.ceildivui {rows}, {share} : index",
    ]


def _of_all_sets(plan: Plan, suffix: str) -> tuple[list[str], dict[Count, str]]:
    """As `_shares`, where the weight has sets: all of a plan's numbers that follow from them."""
    lines, symbols = _shares(plan, suffix)
    symbols |= {number: f"%{_OF_SETS[number.of_call]}" for number in SETS_NUMBERS}
    kernels, scratch = plan.kernels, plan.scratch
    counts = dict.fromkeys(
        (
            *(count for launch in kernels for count in (*launch.workgroups, *launch.constants)),
            *(piece.count for piece in scratch),
        )
    )
    of_one: dict[Plain, str] = {}
    for count in counts:
        if not isinstance(count, OfSet | OfSets):
            continue
        plain = count.of_set if isinstance(count, OfSet) else count.of_sets
        if plain not in of_one:
            name = f"%of_set_{len(of_one)}{suffix}"
            if isinstance(plain, Shares | RowShare):
                share = plain.share if isinstance(plain, Shares) else plain
                lines += _shared_out(share, "%set_rows", f"{name}_share", f"{name}_workgroups")
                of_one |= {share: f"{name}_share", Shares(share): f"{name}_workgroups"}
            elif isinstance(plain, RowCount) and plain.most is not None:
                assert not plain.more
                lines += [
                    f"{name}_few = affine.min {_map(RowCount(plain.per))}()[%set_rows]",
                    *_each_set(plain, f"{name}_many"),
                    f"{name} = arith.minui {name}_few, {name}_many : index",
                ]
                of_one[plain] = name
            else:
                lines.append(f"{name} = affine.min {_map(plain)}()[%set_rows]")
                of_one[plain] = name
        symbols[count] = of_one[plain]
        if isinstance(count, OfSets):
            symbols[count] = f"{of_one[plain]}_of_all"
            lines.append(f"{symbols[count]} = arith.muli {of_one[plain]}, %g : index")
    return lines, symbols


def _each_set(count: RowCount, name: str) -> list[str]:
    """The lines that compute `of_each_set`.

    Args:
        count: Of workgroups; its upper bound is how many run at once.
        name: A new symbol, for how many each set has at most.
    """
    at_once = count.most
    assert at_once is not None, count
    lines, found = _of_busy_waves(at_once, f"{name}_busy")
    if isinstance(count, CountInWaves):
        more, cheap = _of_least_cost(at_once, count.lost, f"{name}_cheap")
        lines += [
            *more,
            f"{name}_run = arith.constant {LEAST_RUN} : index",
            f"{name}_has_runs = arith.cmpi uge, %{_OF_SETS['rows_per_set']}, {name}_run : index",
            f"{name}_found = arith.select {name}_has_runs, {cheap}, {found} : index",
        ]
        found = f"{name}_found"
    return [
        *lines,
        f"{name}_once = arith.constant {at_once} : index",
        f"{name}_or_one = arith.maxui {found}, %c1 : index",
        f"{name} = arith.minui {name}_or_one, {name}_once : index",
    ]


def _of_busy_waves(at_once: int, name: str) -> tuple[list[str], str]:
    """For the first busy wave: from the last one on, as the first takes precedence."""
    lines: list[str] = []
    found = ""
    for waves in reversed(WAVES):
        each, work = f"{name}_in_{waves}", f"{name}_of_{waves}"
        lines += [
            f"{work} = arith.constant {waves * at_once} : index",
            f"{each} = arith.divui {work}, %g : index",
        ]
        if found:
            lines += [
                f"{work}_least = arith.constant {least_busy(waves * at_once)} : index",
                f"{work}_busy = arith.muli {each}, %g : index",
                f"{work}_do = arith.cmpi uge, {work}_busy, {work}_least : index",
                f"{each}_or_more = arith.select {work}_do, {each}, {found} : index",
            ]
        found = f"{each}_or_more" if found else each
    return lines, found


def _of_least_cost(at_once: int, lost: int, name: str) -> tuple[list[str], str]:
    """For the waves that cost the least."""
    found, least = "%c0", f"{name}_most"
    lines = [
        f"{least} = arith.constant {MOST_COST} : index",
        f"{name}_lost = arith.constant {PARTIAL * lost} : index",
        f"{name}_idle = arith.constant {IDLE} : index",
    ]
    for waves, near in enumerate(NEAR, 1):
        each, cost, is_less = (f"{name}_{what}_{waves}" for what in ("in", "cost", "is_less"))
        lines += [
            f"{each}_places = arith.constant {waves * at_once} : index",
            f"{each}_waves = arith.constant {waves} : index",
            f"{each}_near = arith.constant {near} : index",
            f"{each} = arith.divui {each}_places, %g : index",
            f"{each}_have = arith.cmpi uge, {each}, %c1 : index",
            f"{each}_are_few = arith.cmpi ule, {each}_waves, %g : index",
            f"{each}_do = arith.andi {each}_have, {each}_are_few : i1",
            f"{each}_all = arith.muli {each}, %g : index",
            f"{each}_all_or_one = arith.maxui {each}_all, %c1 : index",
            f"{each}_free = arith.subi {each}_places, {each}_all : index",
            f"{each}_free_cost = arith.muli {each}_free, {name}_idle : index",
            f"{each}_idle = arith.divui {each}_free_cost, {each}_all_or_one : index",
            f"{each}_partial = arith.muli {each}_all, {name}_lost : index",
            f"{each}_partials = arith.divui {each}_partial, %m_or_one : index",
            f"{each}_both = arith.addi {each}_idle, {each}_partials : index",
            f"{cost} = arith.subi {each}_both, {each}_near : index",
            f"{cost}_less = arith.cmpi slt, {cost}, {least} : index",
            f"{is_less} = arith.andi {cost}_less, {each}_do : i1",
            f"{cost}_least = arith.select {is_less}, {cost}, {least} : index",
            f"{each}_found = arith.select {is_less}, {each}, {found} : index",
        ]
        found, least = f"{each}_found", f"{cost}_least"
    return lines, found


def _layout(spec: NormSpec, launch: PlannedLaunch) -> str:
    """Constants and bindings of a kernel."""
    lines = []
    last = len(launch.bindings) - 1
    for place, name in enumerate(launch.bindings):
        only_read = place < len(launch.reads) and name not in launch.ahead
        comma = "" if place == last else ","
        operand = spec.family.named(name)
        binding = f"#hal.pipeline.binding<storage_buffer{', ReadOnly' if only_read else ''}>{comma}"
        lines.append(f"  {binding:<48}  // {operand.symbol} {spec.kind_of(operand)}")
    constants = f"constants = {len(launch.constants)}"
    return f"#hal.pipeline.layout<{constants}, bindings = [\n" + "\n".join(lines) + "\n]>"


def _map(count: Count) -> str:
    """A count as a map from M to several numbers; the count is the least of them."""
    assert isinstance(count, int | RowCount)
    if isinstance(count, int):
        return f"affine_map<()[m] -> ({count})>"
    numbers = ["m" if count.per == 1 else f"m ceildiv {count.per}"]
    if count.most is not None:
        numbers.append(str(count.most))
    more = f" + {count.more}" if count.more else ""
    return f"affine_map<()[m] -> ({', '.join(number + more for number in numbers)})>"
