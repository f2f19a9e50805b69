"""The cases of `scripts/fuzz`, one for each seed and number, and their expected results.

A case calls a public function with random arguments. There are two good outcomes. The results are
right by the f64 reference, for any layout, library or storage. Or the call is refused in one line
that begins with the name of an argument, and nothing has changed. All else is a failure.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from fuzz_draw import (
    DEVICES,
    REFUSALS,
    Case,
    Failure,
    array_of,
    bound,
    draw_arrays,
    draw_junk,
    draw_rows,
    draw_spec,
    expect_refusal,
    lay_out,
    lay_out_tensor,
    libraries,
    on_host,
    on_host_all,
    tensor_of,
    torch,
)
from fuzz_turns import emulated_turns, turns

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.calls.modules import loaded
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import Target, targets
from iree_lnbwd.ops.arguments import Array, bind, results_type, rms_eps
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    FROM_OUTPUT,
    GATE,
    GIVEN_OUTPUT,
    INPUT,
    MORE_GRAD_OUTPUTS,
    OPS,
    Kind,
)
from iree_lnbwd.runtime import Norm
from iree_lnbwd.runtime.ops import CLASSES
from iree_lnbwd.schedules import FewRows, Forward, OnePass, Schedule, TwoPass
from iree_lnbwd.schedules.ir_types import reads_more
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.vmfb.description import describe

EMULATED = tuple(t for t in targets() if t.backend != "cpu")
LOADED = tuple(t for t in targets() if t.name in ("host", "generic"))
_CASES_OF_A_SPEC = 6  # about: a new spec takes a compilation
_OF_RARE = 0.05  # of cases, for they take seconds where others take milliseconds
_MOST_EMULATED = 1 << 13
_UNTOUCHED = -77.0  # what storage holds before a call; no result does


def run(where: str, seed: int, number: int, kind: str | None = None) -> Case:
    """Tries a case.

    Raises:
        Failure: Or anything else: what was tried did not do what it must.
    """
    rng = np.random.default_rng((seed, number))
    of_spec = int(rng.integers(8 + number // _CASES_OF_A_SPEC))
    case = Case(where, rng, np.random.default_rng((seed, of_spec, 1)))
    chosen = kind or draw_kind(case)
    case.said.append(chosen)
    try:
        KINDS[where][chosen](case)
    except Exception as error:
        error.__notes__ = [", ".join(case.said)]  # Python 3.10 has no add_note
        raise
    return case


def draw_kind(case: Case) -> str:
    """Of the cases for where it runs; those that take seconds are rare."""
    rare = [name for name in KINDS[case.where] if name in RARE]
    usual = [name for name in KINDS[case.where] if name not in RARE]
    chosen: str = case.pick(*(rare if rare and case.chance(_OF_RARE) else usual))
    return chosen


# --- kinds of cases -----------------------------------------------------------------------------


def values(case: Case) -> None:
    """Good arguments, of any values, layouts and libraries: the results are right."""
    spec = draw_spec(case, may_have_all=True)
    given = draw_arrays(case, spec, draw_rows(case, spec))
    library = case.pick(*libraries(case.where))
    if spec.dtype == "bf16" and library in ("cupy", "dlpack"):
        library = "numpy"
    bf16 = DTYPES["bf16"].numpy
    if library == "cupy" and any(a is not None and a.dtype == bf16 for a in given.values()):
        library = "numpy"
    case.said.append(library)
    call = bound(spec, given, case.rows_per_set)
    arrays = {name: lay_out(case, library, array) for name, array in given.items()}
    before = on_host_all(arrays)
    device = None if library not in ("numpy", "dlpack") else DEVICES[case.where]
    op = spec.family
    options: dict[str, Any] = {"rows_per_set": case.rows_per_set}
    if case.chance(0.5) and call.spec is not None:
        module = _loaded(case, call.spec)
        if op.is_backward:
            options["output_mask"] = case.pick(None, spec.output_mask)
        eps = case.pick(None, spec.eps)
        results = case.call(name_of(module), self=module, eps=eps, out=None, **options, **arrays)
    else:
        if op.is_backward:
            options["output_mask"] = spec.output_mask
            options["grad_input_copy_dtype"] = spec.grad_input_copy_dtype
            options["grad_input_sum_dtype"] = spec.grad_input_sum_dtype
        else:
            options["output_dtype"] = spec.output_dtype
        options["gate_first"] = spec.gate == "before"
        is_default = not op.centres and spec.eps == rms_eps(spec.dtype)
        results = case.call(
            spec.op,
            normalized_shape=spec.normalized_shape,
            eps=None if is_default and case.chance(0.5) else spec.eps or 0.0,
            weight_offset=spec.weight_offset,
            device=device,
            **options,
            **arrays,
        )
    for result in results:
        if library in ("numpy", "torch") and result is not None:
            _expect_kind(result, arrays[op.data.name])
    case.judge(on_host(results), call)
    if on_host_all(arrays) != before:
        raise Failure("an argument was written to")


def name_of(module: Norm) -> str:
    """By which its call is `PUBLIC`."""
    return type(module).__name__


def _expect_kind(result: Any, like: Any) -> None:
    """A contiguous array of the caller's library."""
    is_tensor = torch is not None and isinstance(like, torch.Tensor)
    if not isinstance(result, torch.Tensor if is_tensor else np.ndarray):
        raise Failure(f"a result is {type(result)}")
    made: Any = result
    if not (made.is_contiguous() if is_tensor else made.flags.c_contiguous):
        raise Failure("a result is not contiguous")


def storage(case: Case) -> None:
    """Storage of any layout, that may overlap anything: filled with what is right, or refused."""
    spec = draw_spec(case)
    given = draw_arrays(case, spec, draw_rows(case, spec))
    call = bound(spec, given)
    if call.spec is None:
        return
    library = case.pick(*(name for name in libraries(case.where) if name in ("numpy", "torch")))
    case.said.append(library)
    grouped = results_type(spec.family)
    stored: dict[str, Any] = dict.fromkeys(grouped._fields)
    for result in spec.results:
        shape = call.shape_of(spec.family.named(result.name))
        stored[result.name] = np.full(shape, _UNTOUCHED, DTYPES[result.dtype].numpy)
    device = "cuda" if case.where == "gpu" else "cpu"
    if library == "torch":
        given = {n: None if a is None else tensor_of(np.array(a), device) for n, a in given.items()}
        stored = {n: None if a is None else tensor_of(a, device) for n, a in stored.items()}
    good, overlaps = True, False
    asked = [result.name for result in spec.results]
    if case.chance(0.5):
        name = case.pick(*asked)
        stored[name] = (
            lay_out(case, library, stored[name])
            if library == "numpy"
            else (lay_out_tensor(case, stored[name]))
        )
        good = False
    if case.chance(0.5):
        _overlap(case, case.pick(*asked), stored, given)
        good, overlaps = False, True
    call = bound(spec, {name: array_of(array) for name, array in given.items()})
    before = on_host_all(given), on_host_all(stored)
    module = _loaded(case, spec)
    beside = {name: _beside(array) for name, array in stored.items()}
    out = case.pick(grouped, lambda **named: tuple(named.values()))(**stored)
    try:
        case.call(name_of(module), self=module, out=out, bad="" if good else "out", **given)
    except (TypeError, ValueError) as error:
        case.refused = expect_refusal(error, ("out",))
        if good:
            raise Failure(f"good storage was refused: {error}") from error
        if (on_host_all(given), on_host_all(stored)) != before:
            raise Failure(f"refused, and something has changed: {error}") from error
        return
    case.judge(on_host(grouped(**stored)), call)
    if not overlaps and {name: _beside(array) for name, array in stored.items()} != beside:
        raise Failure("what lies beside a result was written")


def _loaded(case: Case, spec: NormSpec) -> Norm:
    """A module for a spec, with strides of rows or without."""
    if case.chance(0.5):
        spec = dataclasses.replace(spec, strided_rows=True)
        case.said.append("strided")
    return loaded(spec, DeviceUri.parse(DEVICES[case.where]))


def _beside(array: Any) -> bytes | None:
    """The memory that an array is a view of, but for its own."""
    is_tensor = torch is not None and isinstance(array, torch.Tensor)
    whole = None if array is None else array._base if is_tensor else array.base
    if whole is None or (not is_tensor and not isinstance(whole, np.ndarray)):
        return None
    if is_tensor:
        copy = whole.detach().cpu().clone()
        steps = (array.shape, array.stride(), array.storage_offset() - whole.storage_offset())
        if copy.dtype == array.dtype and whole.is_contiguous():
            copy.as_strided(*steps).zero_()
            return bytes(copy.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return None
    if whole.dtype != array.dtype or not whole.flags.c_contiguous:
        return None
    copied = whole.copy()
    begin = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    content = copied.reshape(-1).view(np.uint8).data  # bf16 has no buffers
    own: Array = np.ndarray(array.shape, array.dtype, content, begin, array.strides)
    own[...] = 0
    return bytes(copied.tobytes())


def _overlap(case: Case, result: str, stored: dict[str, Any], given: dict[str, Any]) -> None:
    """Puts a result's storage into the memory of something else of the call, or near it."""
    others = {f"out.{n}": a for n, a in stored.items() if a is not None and n != result}
    others |= {name: array for name, array in given.items() if array is not None}
    name = case.pick(*others)
    other, one = others[name], stored[result]
    case.said.append(f"{result} in {name}")
    itemsize = max(other.itemsize, one.itemsize)
    size, taken = math.prod(one.shape) * one.itemsize, math.prod(other.shape) * other.itemsize
    gap = itemsize * int(case.rng.integers(0, 1 + (size + taken) // itemsize))
    total = size + taken + gap + 64
    flip = case.chance(0.5)
    first, second = (gap, 0) if flip else (0, gap)
    if torch is not None and isinstance(one, torch.Tensor):
        room = torch.zeros(total, dtype=torch.uint8, device=one.device)
        first, second = (n // 64 * 64 for n in (first, second))
        new_other = room[first : first + taken].view(other.dtype).view(other.shape)
        new_one = room[second : second + size].view(one.dtype).view(one.shape)
        new_other.copy_(other)
    else:
        room = np.zeros(total, np.uint8)
        new_other = room[first : first + taken].view(other.dtype).reshape(other.shape)
        new_one = room[second : second + size].view(one.dtype).reshape(one.shape)
        new_other[...] = other
    stored[result] = new_one
    if name.startswith("out."):
        stored[name.removeprefix("out.")] = new_other
    else:
        given[name] = new_other


def junk(case: Case) -> None:
    """Good arguments but for one: refused by name, or what it means is right."""
    op = case.pick(*OPS.values())
    if op.is_backward and case.chance(0.3):
        op = FROM_OUTPUT[op.name]
    shapes = {Kind.CELLS: (3, 8), Kind.ROWS: (3,), Kind.COLUMNS: (8,)}
    given: dict[str, Any] = {
        operand.name: np.ones(shapes[operand.kind], np.float32)
        for operand in op.arguments
        if operand not in MORE_GRAD_OUTPUTS
    }
    if op.from_output:
        given[INPUT.name] = None
    elif op.is_backward:
        given[GIVEN_OUTPUT.name] = None
    given[GATE.name] = None
    arrays = tuple(given)
    added = "grad_residual" if op.is_backward else "residual"
    if case.chance(0.5):
        given[added] = None
    eps = None if op.is_backward else 1e-5
    mask = (True,) * len(op.gradients)  # with a bias
    if op.is_backward:
        given["output_mask"] = mask
    name = case.pick(op.name, CLASSES[op.name].__name__, f"reference.{op.name}")
    is_module = name == CLASSES[op.name].__name__
    if is_module:
        residual = None if given[added] is None else "f32"
        spec = NormSpec(
            (8,),
            op=op.name,
            eps=eps,
            has_bias=op.takes_bias,
            residual_dtype=residual,
            from_output=op.from_output,
        )
        module = loaded(spec, DeviceUri.parse(DEVICES[case.where]))
        given |= {"self": module, "out": None, "eps": eps, "rows_per_set": 1}
    else:
        given |= {"normalized_shape": 8, "eps": 1e-5, "weight_offset": case.pick(0.0, 1.0)}
        given["device"] = DEVICES[case.where] if name == op.name else None
        given |= {"rows_per_set": 1, "gate_first": False}
        beside = ("grad_input_copy_dtype", "grad_input_sum_dtype")
        given |= dict.fromkeys(beside if op.is_backward else ("output_dtype",))
    bad = case.pick(*(argument for argument in given if argument != "self"))
    given[bad] = draw_junk(case)
    case.said += [name, bad, repr(given[bad])[:80]]
    try:
        results = case.call(name, bad=bad, **given)
    except REFUSALS as error:
        case.refused = expect_refusal(error, tuple(given))
        return
    # A tensor among arrays is one, too.
    known = {argument: array_of(given[argument]) for argument in arrays}
    call = bind(
        op.name,
        known,
        given.get("normalized_shape", 8),
        mask if given.get("output_mask") is None else given["output_mask"],
        eps=1e-5 if is_module else given["eps"],
        weight_offset=given.get("weight_offset", 0.0),
        rows_per_set=None if is_module else given["rows_per_set"],
        output_dtype=given.get("output_dtype"),
        grad_input_copy_dtype=given.get("grad_input_copy_dtype"),
        grad_input_sum_dtype=given.get("grad_input_sum_dtype"),
        gate_first=given.get("gate_first", False),
    )
    if not name.startswith("reference."):
        case.judge(on_host(results), call)


def specs(case: Case) -> None:
    """The fields of a spec, of which one is junk: refused by name, or a spec with a name."""
    good = draw_spec(case)
    fields = {f.name: getattr(good, f.name) for f in dataclasses.fields(good)}
    bad = case.pick("", *fields)
    if bad:
        fields[bad] = draw_junk(case)
        case.said += [bad, repr(fields[bad])[:80]]
    try:
        spec = case.call("NormSpec", bad=bad, **fields)
    except REFUSALS as error:
        case.refused = expect_refusal(error, tuple(fields))
        if not bad:
            raise Failure(f"a good spec was refused: {error}") from error
        return
    if NormSpec.from_dict(spec.to_dict()) != spec or "/" in spec.name:
        raise Failure(f"{spec} is not what its fields say")


def compiles(case: Case) -> None:
    """A spec for a target, in good words or bad: a module that says what it is, or a refusal."""
    # What is for this CPU is loaded, too.
    spec, target = draw_spec(case), case.pick(case.pick(*targets()), case.pick(*LOADED))
    if case.chance(0.3):
        spec = dataclasses.replace(spec, rows=int(case.rng.integers(1, 3000)))
    case.said += [spec.name, target.name]
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "spec": spec,
            "target": case.pick(target.name, *target.aliases, target.name.upper()),
            "output_dir": folder,
            "schedule": case.pick(None, schedules.choose(spec, target)),
            "extra_flags": case.pick((), [], ("--iree-opt-level=O2",)),
        }
        bad = case.pick("", "", *given)
        if bad:
            given[bad] = draw_junk(case)
            case.said += [bad, repr(given[bad])[:80]]
        if bad == "output_dir" and isinstance(given[bad], str | Path):
            given[bad] = str(Path(folder) / "below" / str(given[bad]).replace("/", ""))
        try:
            made = case.call("compile", bad=bad, **given)
        except REFUSALS as error:
            if not bad:
                raise Failure(f"does not compile: {error}") from error
            case.refused = expect_refusal(error, (*given, "schedule", "compiling"))
            if list(Path(folder).rglob("*.*")):
                raise Failure("refused, and something was written") from error
            return
        described = describe(made.path.read_bytes(), source="made")
        if (described.spec, described.target.name) != (given["spec"], made.manifest.target):
            raise Failure(f"it is {described.spec} for {described.target.name}")
        if target in LOADED and not bad:
            _loads(case, made.path, spec)


def tunes(case: Case) -> None:
    """A spec to tune where that is not possible, in good words or bad: refused by name."""
    given: dict[str, Any] = {
        "specs": case.pick(draw_spec(case), [draw_spec(case)], ()),
        "device": case.pick("local-task", "local-sync"),
        "candidates": case.pick(1, 48),
        "seed": case.pick(0, 7),
        "again": case.pick(True, False),
        "progress": case.pick(None, print),
    }
    bad = case.pick("", *given)
    if bad:
        given[bad] = draw_junk(case)
        case.said += [bad, repr(given[bad])[:80]]
    if isinstance(given["device"], str) and given["device"] == "cuda":  # it would be tuned on
        return
    try:
        case.call("tune", bad=bad, **given)
    except REFUSALS as error:
        case.refused = expect_refusal(error, tuple(given))
        return
    raise Failure("it was not refused")


def bundles(case: Case) -> None:
    """A spec in a bundle, in good words or bad: a bundle that computes it, or a refusal."""
    spec = NormSpec((8,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "norms.lnb"
        given: dict[str, Any] = {
            "specs": case.pick(spec, [spec]),
            "targets": case.pick("generic", ("generic",)),
            "path": case.pick(path, str(path)),
            "jobs": case.pick(None, 1),
            "extra_flags": case.pick((), []),
            "include": None,
            "progress": case.pick(None, case.said.append),
        }
        bad = case.pick("", *given)
        if bad:
            given[bad] = draw_junk(case)
            case.said += [bad, repr(given[bad])[:80]]
        if bad == "progress" and callable(given[bad]):  # its own errors are not ours
            return
        try:
            made = case.call("bundle", bad=bad, **given)
        except REFUSALS as error:
            if not bad:
                raise Failure(f"makes no bundle: {error}") from error
            case.refused = expect_refusal(error, (*given, "target"))
            if list(Path(folder).iterdir()):
                raise Failure("refused, and something was written") from error
            return
        words: dict[str, Any] = {"path": made.path, "device": "local-sync"}
        bad = case.pick("", *words)
        if bad:
            words[bad] = draw_junk(case)
        try:
            norms = case.call("Bundle", bad=bad, **words)
        except REFUSALS as error:
            case.refused = str(error)
            if not bad or "\n" in case.refused:
                raise
            return
        x, row = np.ones((3, 8), np.float32), np.ones(3, np.float32)
        given = {"grad_output": x, "input": x, "mean": row, "rstd": row, "weight": x[0]}
        case.judge(norms.layer_norm_backward(**given, normalized_shape=8), bound(spec, given))


def _loads(case: Case, path: Path, spec: NormSpec) -> None:
    """What was compiled, loaded: its results are right."""
    given = draw_arrays(case, spec, spec.rows or draw_rows(case, spec))
    bad = case.pick("", "path", "device")
    words: dict[str, Any] = {"path": case.pick(path, str(path)), "device": "local-sync"}
    if bad:
        words[bad] = draw_junk(case)
        if isinstance(words["path"], str | Path) and bad == "path":
            words["path"] = path.parent / f"no{str(words['path']).replace('/', '')[:9]}"
    try:
        module = case.call("load", bad=bad, **words)
    except REFUSALS as error:
        case.refused = str(error)
        if not bad or "\n" in case.refused:
            raise
        return
    case.judge(case.call(name_of(module), self=module, **given), bound(spec, given))


def emulated(case: Case) -> None:
    """A legal schedule of any numbers for a GPU, in the emulator: no fault, and right."""
    target = case.pick(*EMULATED)
    spec = draw_spec(case, may_have_all=True)
    spec = dataclasses.replace(spec, strided_rows=case.chance(0.4))
    how = draw_schedule(case, spec, target)
    rows = max(1, draw_rows(case, spec, _MOST_EMULATED))
    case.said += [target.name, str(how)]
    given = draw_arrays(case, spec, rows)
    vmfb, _ = compiler.build(spec, target, schedule=how)
    call = bound(spec, given, case.rows_per_set)
    if call.spec is not None:
        call = call._replace(spec=spec)
    case.judge(EmulatedNorm(vmfb).run(call), call)


def draw_schedule(case: Case, spec: NormSpec, target: Target) -> Schedule:
    """The chosen one, or one of random numbers that is legal."""
    chosen = schedules.choose(spec, target)
    if case.chance(0.3) or spec.acc_dtype == "f64":
        return chosen
    drawn = _schedules(case, spec, target) if spec.family.is_backward else _forwards(case, spec)
    for one in drawn:
        if one.illegal(spec, target) is None:
            if isinstance(one, OnePass) and case.chance(0.5):
                forms = (dataclasses.replace(one, few_rows=few) for few in _few_rows(case))
                return next((f for f in forms if f.illegal(spec, target) is None), one)
            return one
    return chosen


def _few_rows(case: Case) -> Iterator[FewRows]:
    """Of random numbers; many are not legal."""
    for _ in range(20):
        yield FewRows(
            rows=case.pick(1, 16, 500),
            warps=case.pick(1, 2, 4, 8, 16),
            tile=case.pick(1, 2, 4, 8, 16, 32, 64, 128),
            tile_vector=case.pick(1, 2, 4, 8),
        )


def _schedules(case: Case, spec: NormSpec, target: Target) -> Iterator[OnePass | TwoPass]:
    """Of random numbers; many are not legal."""
    for _ in range(400):
        finalize: dict[str, Any] = {
            "finalize_slices": case.pick(1, 2, 4, 8),
            "finalize_rows": case.pick(1, 2, 4),
            "finalize_columns": case.pick(16, 32, 64),
        }
        vector, warps = case.pick(1, 2, 4, 8), case.pick(1, 2, 3, 4, 8)
        workgroups = case.pick(1, 2, 3, 7)
        if case.chance(0.15):
            yield TwoPass(
                workgroups, warps, vector, case.pick(1, 2, 4), case.pick(1, 2, 3),
                span_steps=case.pick(1, 2, 256), **finalize,
            )  # fmt: skip
            continue
        slots = case.pick(0, 0, 1, 2, 3)
        bulk = slots > 0 and case.chance(0.4)
        cluster = case.pick(1, 1, 1, 2, 3, 4, 8)
        alone = cluster == 1 and not bulk
        subgroup_rows = case.pick(1, 1, 2, 4, 8) if alone and warps == 1 else 1
        rereads = case.chance(0.4)
        one = OnePass(
            workgroups=workgroups,
            groups=subgroup_rows * case.pick(1, 2, 4) if cluster == 1 else 1,
            warps=warps,
            vector=vector,
            ahead=slots if bulk else case.pick(*range(max(0, slots - 1), max(slots, 1) + 1)),
            slots=slots,
            rereads=rereads,
            stages_weight=case.chance(0.4),
            widens_weight=case.chance(0.3),
            cluster=cluster,
            subgroup_rows=subgroup_rows,
            defers=cluster > 1 and case.chance(0.5),
            bulk=bulk,
            x_later=bulk and slots == 2 and case.chance(0.5),
            posts=cluster > 1 and not bulk and case.chance(0.5),
            loads_late=rereads and reads_more(spec) and case.chance(0.7),
            **finalize,
        )
        if one.chunks(spec, target) * vector <= 32:
            yield one


def _forwards(case: Case, spec: NormSpec) -> Iterator[Forward]:
    """Of random numbers; many are not legal."""
    for _ in range(400):
        in_registers, cluster = case.chance(0.6), case.pick(1, 1, 1, 2, 3, 4, 8)
        yield Forward(
            rows=case.pick(1, 1, 2, 3, 4, 8) if cluster == 1 else 1,
            threads=case.pick(4, 8, 16, 32, 64, 96, 128, 256),
            vector=case.pick(1, 2, 4, 8),
            chunks=case.pick(1, 2, 3, 4, 8),
            in_registers=in_registers,
            in_shared_memory=not in_registers and case.chance(0.5),
            most_few_rows=case.pick(0, 0, 3, 100) if in_registers else 0,
            early=in_registers and case.chance(0.5),
            lasts=case.chance(0.5),
            packs=in_registers and case.chance(0.3),
            cluster=cluster,
            rereads=case.chance(0.2),
            ahead=case.pick(0, 0, 1, 5),
            walks=case.pick(0, 0, 0, 8, 24) if in_registers else 0,
            slots=case.pick(1, 2, 3, 4),
        )


_ON_A_DEVICE: dict[str, Callable[[Case], None]] = {
    "values": values,
    "turns": turns,
    "storage": storage,
    "junk": junk,
}
_ON_A_GPU: dict[str, Callable[[Case], None]] = {}
if torch is not None:
    import fuzz_torch
    from fuzz_models import replaced

    _ON_A_DEVICE |= {
        "autograd": fuzz_torch.autograd,
        "torch_junk": fuzz_torch.torch_junk,
        "torch_turns": fuzz_torch.torch_turns,
        "compiled": fuzz_torch.compiled,
        "replaced": replaced,
    }
    _ON_A_GPU |= {"captured": fuzz_torch.captured}
RARE = frozenset({"compiled", "replaced"})
KINDS: Mapping[str, Mapping[str, Callable[[Case], None]]] = MappingProxyType(
    {
        "cpu": {
            **_ON_A_DEVICE,
            "specs": specs,
            "compile": compiles,
            "bundle": bundles,
            "tune": tunes,
        },
        "gpu": {**_ON_A_DEVICE, **_ON_A_GPU},
        "emulator": {"emulated": emulated, "emulated_turns": emulated_turns},
    }
)
warnings.filterwarnings("ignore", module="torch")
sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))
