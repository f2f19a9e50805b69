"""A module's public function, and its kernels' layouts and workgroup counts, from the launches.

A kernel's file in ``ir/`` stands with an example of its layout (its bindings) and of the number of
its workgroups along x and y. Both are replaced by what `launches` states. The example has every
operand that the kernel can have; where a spec lacks some, the others are numbered anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from iree_lnbwd.launches import KERNELS, Count, LaunchPlans, Plan, PlannedLaunch
from iree_lnbwd.operands import ADDED_BIAS, Kind, Operand
from iree_lnbwd.spec import NormSpec

_EXECUTABLE = re.compile(
    r"^hal\.executable\.source private @(\w+) \{\n.*?^\}\n+", re.MULTILINE | re.DOTALL
)
_BINDING = re.compile(r"(layout\(#(\w+)_layout\) binding\()(\d+)(?=\))")
_VIEW = "!hal.buffer_view"  # storage with a shape; its content is no tensor yet


def export_aliases(spec: NormSpec, plans: LaunchPlans) -> dict[str, str]:
    """The layout of each kernel, and its workgroups for M rows, the least of a list."""
    aliases = {}
    for launch in {launch.kernel: launch for p in plans.plans for launch in p.kernels}.values():
        aliases[f"#{launch.kernel}_layout"] = _layout(spec, launch)
        for axis, count in zip("xy", launch.workgroups, strict=False):
            aliases[f"#{launch.kernel}_{axis}"] = _map(count)
    return aliases


def launched(text: str, spec: NormSpec, plans: LaunchPlans) -> str:
    """A file of kernels without those that no call launches, their bindings numbered.

    An operand that the spec lacks gets the number of the first one. Nothing uses it.
    """
    launches = {launch.kernel: launch for plan in plans.plans for launch in plan.kernels}

    def numbered(binding: re.Match[str]) -> str:
        before, kernel, number = binding.groups()
        symbol = KERNELS[kernel].bindings[int(number)].symbol
        there = [spec.family.named(name).symbol for name in launches[kernel].bindings]
        return f"{before}{there.index(symbol) if symbol in there else 0}"

    text = _EXECUTABLE.sub(lambda found: found[0] if found[1] in launches else "", text)
    return _BINDING.sub(numbered, text)


def entry(
    spec: NormSpec,
    plans: LaunchPlans | None,
    reflection: Mapping[str, str],
    algorithm: tuple[str, str],
) -> str:
    """The public function: arguments in, the asked results out.

    Args:
        spec: What the module computes.
        plans: What it launches. None if IREE decides that.
        reflection: The module's description of itself.
        algorithm: Without plans, the functions in the text that compute the op, and recompute
            statistics.
    """
    branches = plans is not None and len(plans.plans) > 1
    body = [] if spec.has_weight else ["%gamma = arith.constant dense<1.0> : !gamma_n"]
    if plans is None:
        body += _calls(spec, *algorithm)
    elif branches:
        body += _branches(spec, plans)
    else:
        lines, values = _dispatches(spec, plans.plans[0])
        body += [*_rows(), *lines, _return(spec, values)]
    if branches:
        storage = [f"%out_{result.symbol}: {_VIEW}" for result in _results(spec)]
        types = ", ".join(_VIEW for _ in storage)
    else:
        storage = [
            f"%out_{result.symbol}: {result.alias} {{iree.abi.output = {place} : index}}"
            for place, result in enumerate(_results(spec))
        ]
        types = ", ".join(result.alias for result in _results(spec))
    given = filter(spec.has, spec.family.inputs)
    inputs = [f"%{operand.symbol}: {operand.alias}" for operand in given]
    attributes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in reflection.items())
    lines = [
        "",
        f"func.func @{spec.op}(",
        ",\n".join(f"    {parameter}" for parameter in (*inputs, *storage)) + ")",
        f"    -> ({types})",
        f"    attributes {{iree.reflection = {{{attributes}}}}} {{",
        *(f"  {line}" for line in body),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _results(spec: NormSpec) -> tuple[Operand, ...]:
    return tuple(result for result in spec.family.results if spec.has(result))


def _return(spec: NormSpec, values: Mapping[str, str]) -> str:
    """Of the asked results, by their names."""
    results = _results(spec)
    types = ", ".join(result.alias for result in results)
    return f"return {', '.join(values[result.name] for result in results)} : {types}"


def _calls(spec: NormSpec, algorithm: str, statistics: str) -> list[str]:
    """Calls of what a file of ``ir/`` defines."""
    family = spec.family
    lines = []
    if family.is_backward and spec.eps is not None:
        saved = family.statistics
        computed = ", ".join(f"%{statistic.symbol}" for statistic in saved)
        types = ", ".join(statistic.alias for statistic in saved)
        lines.append(f"{computed} = call @{statistics}(%x) : (!x_mn) -> ({types})")
    if family.is_backward and family.reads_bias and not spec.has_bias:
        lines.append(f"%{ADDED_BIAS.symbol} = arith.constant dense<0.0> : {ADDED_BIAS.alias}")
    results = ", ".join(f"%{result.symbol}" for result in family.results)
    read = ", ".join(f"%{_stand_in(spec, given)}" for given in family.inputs)
    types = ", ".join(given.alias for given in family.inputs)
    computed = ", ".join(result.alias for result in family.results)
    lines.append(f"{results} = call @{algorithm}({read})\n      : ({types}) -> ({computed})")
    return [*lines, _return(spec, {result.name: f"%{result.symbol}" for result in _results(spec)})]


def _stand_in(spec: NormSpec, given: Operand) -> str:
    """The symbol of an operand, or of one of its type where the spec lacks it."""
    if spec.has(given) or not given.is_option or (spec.from_output and given is ADDED_BIAS):
        return given.symbol
    return "x" if given.kind is Kind.CELLS else "gamma"


def _rows() -> list[str]:
    """M."""
    return ["%c0 = arith.constant 0 : index", "%m = tensor.dim %x, %c0 : !x_mn"]


def _branches(spec: NormSpec, plans: LaunchPlans) -> list[str]:
    """One plan or the other; M decides.

    Each branch ties its gradients to the caller's storage itself. If they were tied only after the
    branches meet, IREE would copy them there.
    """
    few, many = plans.plans
    lines = [
        *_rows(),
        f"%most = arith.constant {few.most_rows} : index",
        "%are_few = arith.cmpi ule, %m, %most : index",
        "cf.cond_br %are_few, ^few, ^many",
    ]
    for label, plan in (("few", few), ("many", many)):
        dispatches, values = _dispatches(spec, plan, suffix=f"_{label}")
        lines += [f"^{label}:", *dispatches]
        views = []
        for result in _results(spec):
            value, view = values[result.name], f"%{result.symbol}_view_{label}"
            type_, there = _sized(spec, result), f"%{result.symbol}_there_{label}"
            lines += [
                f"{there} = hal.tensor.alias {value} : {type_} to %out_{result.symbol} : {_VIEW}",
                f"{view} = hal.tensor.export {there} : {type_} -> {_VIEW}",
            ]
            views.append(view)
        lines.append(f"return {', '.join(views)} : {', '.join(_VIEW for _ in views)}")
    return lines


def _dispatches(spec: NormSpec, plan: Plan, suffix: str = "") -> tuple[list[str], dict[str, str]]:
    """A plan's kernels, in order, and the value of each operand after them."""
    values = {given.name: f"%{given.symbol}" for given in spec.family.inputs}
    lines = []
    for launch in plan.kernels:
        constants = [f"%{launch.kernel}_{n}{suffix}" for n, _ in enumerate(launch.constants)]
        for name, count in zip(constants, launch.constants, strict=True):
            lines += [
                f"{name}_index = affine.min {_map(count)}()[%m]",
                f"{name} = arith.index_cast {name}_index : index to i32",
            ]
        reads, writes = (list(map(spec.family.named, n)) for n in (launch.reads, launch.writes))
        given = ", ".join([*constants, *(values[operand.name] for operand in reads)])
        types = ", ".join([*("i32" for _ in constants), *(_sized(spec, read) for read in reads)])
        computed = []
        for operand in writes:
            type_ = _sized(spec, operand)
            if operand.kind is Kind.CELLS and not spec.has(operand) and spec.rows is None:
                type_ = f"{operand.alias}{{%c0}}"  # not asked for, not written
            computed.append(type_)
            values[operand.name] = f"%{operand.symbol}{suffix}"
        results = ", ".join(values[operand.name] for operand in writes)
        lines.append(
            f"{results} = flow.dispatch @{launch.kernel}::@{launch.kernel}[%m]({given})\n"
            f"      : ({types}) -> ({', '.join(computed)})"
        )
    return lines, values


def _sized(spec: NormSpec, operand: Operand) -> str:
    """The type of its tensor, with the number of rows if M decides that."""
    of_rows = operand.kind in (Kind.CELLS, Kind.ROWS) and spec.rows is None
    return operand.alias + ("{%m}" if of_rows else "")


def _layout(spec: NormSpec, launch: PlannedLaunch) -> str:
    """Constants and bindings of a kernel."""
    lines = []
    last = len(launch.bindings) - 1
    for place, name in enumerate(launch.bindings):
        only_read = place < len(launch.reads) and name not in launch.ahead
        comma = "" if place == last else ","
        operand = spec.family.named(name)
        binding = f"#hal.pipeline.binding<storage_buffer{', ReadOnly' if only_read else ''}>{comma}"
        lines.append(f"  {binding:<48}  // {operand.symbol} {operand.kind}")
    constants = f"constants = {len(launch.constants)}"
    return f"#hal.pipeline.layout<{constants}, bindings = [\n" + "\n".join(lines) + "\n]>"


def _map(count: Count) -> str:
    """A count as a map from M to several numbers; the count is the least of them."""
    if isinstance(count, int):
        return f"affine_map<()[m] -> ({count})>"
    numbers = ["m" if count.per == 1 else f"m ceildiv {count.per}"]
    if count.most is not None:
        numbers.append(str(count.most))
    more = f" + {count.more}" if count.more else ""
    return f"affine_map<()[m] -> ({', '.join(number + more for number in numbers)})>"
