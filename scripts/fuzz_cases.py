"""The cases of `scripts/fuzz`, one for each seed and number, and their expected results.

A case calls a public function with random arguments. There are two good outcomes. The results are
right by the f64 reference, for any layout, library or storage. Or the call is refused in one line
that begins with the name of an argument, and nothing has changed. All else is a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec, compiler, reference, schedules
from iree_lnbwd.arguments import Array, BoundCall, Results, bind, results_type, rms_eps
from iree_lnbwd.description import describe
from iree_lnbwd.devices import DeviceUri
from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.emulated import EmulatedNorm
from iree_lnbwd.errors import ArtifactError, CompileError, DeviceError
from iree_lnbwd.functional import loaded
from iree_lnbwd.operands import (
    FROM_OUTPUT,
    GIVEN_OUTPUT,
    INPUT,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    OPS,
    RMS_NORM_BACKWARD,
    Access,
    Element,
    Kind,
    Op,
    names,
)
from iree_lnbwd.runtime import Norm
from iree_lnbwd.runtime.ops import CLASSES
from iree_lnbwd.schedules import FewRows, Forward, OnePass, Schedule, TwoPass
from iree_lnbwd.spec import LEAST_WEIGHT
from iree_lnbwd.targets import Target, targets

torch: Any = None
with contextlib.suppress(ImportError):
    torch = importlib.import_module("torch")

REFUSALS = (TypeError, ValueError, ArtifactError, CompileError, DeviceError)
DEVICES: Mapping[str, str] = MappingProxyType({"cpu": "local-task", "gpu": "cuda"})
EMULATED = tuple(t for t in targets() if t.backend != "cpu")

_CASES_OF_A_SPEC = 6  # about: a new spec takes a compilation
_MOST_ELEMENTS = 1 << 17
_MOST_EMULATED = 1 << 13
_LONGEST_MESSAGE = 2000
_UNTOUCHED = -77.0  # what storage holds before a call; no result does


class Failure(Exception):  # noqa: N818 - of what is tried, not of the script
    """Something else than what must come of a case."""


@dataclass
class Case:
    """One case, as it is drawn and tried.

    Attributes:
        where: "cpu", "gpu" or "emulator".
        rng: Decides all of it.
        spec_rng: Decides the spec, which cases share.
        said: What was drawn, for the line that tells of a failure.
        tried: Public callables, their arguments, and whether these were "good" or "bad".
        refused: How the call was refused, if it was.
    """

    where: str
    rng: np.random.Generator
    spec_rng: np.random.Generator
    said: list[str] = field(default_factory=list)
    tried: set[tuple[str, str, str]] = field(default_factory=set)
    refused: str = ""

    def pick(self, *choices: Any) -> Any:
        """One of these."""
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        """True that often."""
        return bool(self.rng.random() < probability)

    def call(self, name: str, /, *, bad: str = "", **arguments: Any) -> Any:
        """Calls something public, and remembers with what."""
        for argument in arguments:
            self.tried.add((name, argument, "bad" if argument == bad else "good"))
        return PUBLIC[name](**arguments)

    def judge(self, results: Results, call: BoundCall) -> None:
        """The results are those of a call."""
        judgement = reference.judge(call)
        types = {} if call.spec is None else {r.name: r.dtype for r in call.spec.results}
        for name, got in results._asdict().items():
            if name not in types:
                if got is not None:
                    raise Failure(f"{name} was not asked for")
                continue
            expected = judgement.expected[name]
            if got is None or got.shape != expected.shape:
                raise Failure(f"{name}: {None if got is None else got.shape}, not {expected.shape}")
            if got.dtype != DTYPES[types[name]].numpy:
                raise Failure(f"{name}: {got.dtype}, not {types[name]}")
            comparison = reference.compare(got, expected, judgement.tolerance[name])
            if not comparison.passed:
                raise Failure(f"{name} is wrong: {comparison}")


def run(where: str, seed: int, number: int, kind: str | None = None) -> Case:
    """Tries a case.

    Raises:
        Failure: Or anything else: what was tried did not do what it must.
    """
    rng = np.random.default_rng((seed, number))
    of_spec = int(rng.integers(8 + number // _CASES_OF_A_SPEC))
    case = Case(where, rng, np.random.default_rng((seed, of_spec, 1)))
    kinds = KINDS[where]
    chosen = kind or case.pick(*kinds)
    case.said.append(chosen)
    try:
        kinds[chosen](case)
    except Exception as error:
        error.__notes__ = [", ".join(case.said)]  # Python 3.10 has no add_note
        raise
    return case


# --- what is drawn ------------------------------------------------------------------------------


def draw_spec(case: Case, *ops: Op) -> NormSpec:
    """Widths of every kind, types and their mixtures, masks and options; of any op, or of these."""
    rng = case.spec_rng

    def pick(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    width = pick(
        int(rng.integers(1, 40)),
        int(rng.integers(1, 1200)),
        8 * int(rng.integers(1, 300)),
        pick(64, 128, 256, 768, 1000, 1023, 1024, 2049, 4096),
        int(rng.integers(4000, 21000)),
    )
    dims = (width,)
    if width % 6 == 0 and rng.random() < 0.3:
        dims = pick((6, width // 6), (2, 3, width // 6), (width, 1))
    op = pick(*(ops or OPS.values()))
    dtype = pick("f32", "f32", "bf16", "f16", "f64")
    narrow = [None] if dtype == "f64" else [None, None, "f32", "bf16", "f16"]
    has_weight = bool(rng.random() < 0.8)
    gradients = names(op.masked)
    masks = [
        mask
        for mask in itertools.product((True, False), repeat=len(gradients))
        if any(
            mask[i] and (has_weight or name != "grad_weight") for i, name in enumerate(gradients)
        )
    ]
    from_output = op.is_backward and bool(rng.random() < 0.3)
    statistics = [None, None] if op.is_backward else [rms_eps(dtype)]
    reads_bias = (FROM_OUTPUT if from_output else OPS)[op.name].reads_bias
    has_bias = pick(None, True, False) if reads_bias else None
    # Without a bias, a caller cannot say which type its gradient has.
    tells_type = not (from_output and has_bias is False)
    return NormSpec(
        dims,
        dtype,
        grad_output_dtype=pick(*narrow) if op.is_backward else None,
        weight_dtype=pick(*narrow) if has_weight else None,
        bias_dtype=pick(*narrow) if tells_type else None,
        has_weight=has_weight,
        output_mask=pick((), (), *masks),
        eps=None if from_output else pick(*statistics, 1e-5, 0.5, 1e-12),
        op=op.name,
        has_bias=has_bias,
        residual_dtype=pick(None, None, dtype, *narrow),
        weight_offset=pick(0.0, 0.0, 1.0, -0.25) if has_weight else 0.0,
        from_output=from_output,
    )


def draw_rows(case: Case, spec: NormSpec, most_elements: int = _MOST_ELEMENTS) -> int:
    """Few, many, and none."""
    most = max(1, most_elements // spec.columns)
    rows = case.pick(0, 1, 2, 3, int(case.rng.integers(1, 70)), int(case.rng.integers(1, most + 1)))
    return int(min(rows, most))


def draw_values(case: Case, dtype: str, shape: tuple[int, ...], *, plain: bool = False) -> Array:
    """Numbers of an element type: random, constant, tiny, far from zero, not finite."""
    rng, of = case.rng, DTYPES[dtype]
    how = (
        "normal"
        if plain
        else case.pick(*["normal"] * 4, "far", "equal", "subnormal", "scaled", "least")
    )
    values: Array = rng.standard_normal(shape)
    if how == "far":
        values += case.pick(-1, 1) * 2.0 ** rng.integers(1, 10)
    elif how == "equal":
        values = np.full(shape, rng.standard_normal())
    elif how == "subnormal":
        values = rng.integers(-99, 99, shape) * of.smallest_subnormal
    elif how == "scaled":
        values *= 2.0 ** rng.integers(-6 if dtype == "f16" else -20, 6 if dtype == "f16" else 20)
    elif how == "least":  # about the least weight that an output is divided by, and zeros
        values = rng.choice([0.0, -0.0, *(LEAST_WEIGHT * rng.uniform(-2, 2, 8)), 1.0], shape)
    if not plain and values.size and case.chance(0.05):
        values.flat[int(rng.integers(values.size))] = case.pick(np.inf, -np.inf, np.nan)
    case.said.append(how)
    with np.errstate(over="ignore"):
        return values.astype(of.numpy)


def draw_arrays(case: Case, spec: NormSpec, rows: int, *, plain: bool = False) -> dict[str, Any]:
    """The arrays of a call for a spec, NumPy's and in order."""
    leading: tuple[int, ...] = (rows,)
    if rows and case.chance(0.3):
        divisor = next(d for d in range(math.isqrt(rows), 0, -1) if rows % d == 0)
        leading = (divisor, rows // divisor)
    if rows == 1 and case.chance(0.3):
        leading = ()
    op, dims = spec.family, spec.normalized_shape
    shapes = {Kind.CELLS: (*leading, *dims), Kind.COLUMNS: dims}
    given: dict[str, Any] = {}
    for operand in op.arguments:
        only_its_type = operand.access is Access.TYPE_ALONE
        there = operand.kind in shapes and (only_its_type or spec.has(operand))
        given[operand.name] = (
            draw_values(
                case,
                spec.element_type(operand.element),
                shapes[operand.kind],
                plain=plain or only_its_type,
            )
            if there
            else None
        )
    if op.from_output:
        given[INPUT.name] = None
    if op.is_backward and spec.eps is None:
        ones = (1,) * len(dims) if case.chance(0.5) else ()
        flat = given[op.data.name].reshape(*leading, spec.columns).astype(np.float64)
        with np.errstate(all="ignore"):
            square = flat.var(axis=-1) if op.centres else (flat * flat).mean(axis=-1)
            true = {"mean": flat.mean(axis=-1), "rstd": 1 / np.sqrt(square + 1e-5)}
        if case.chance(0.2):  # the caller's affair
            true["rstd"] = case.rng.standard_normal(leading)
        for statistic in op.statistics:
            values = np.asarray(true[statistic.name], DTYPES[spec.acc_dtype].numpy)
            given[statistic.name] = values.reshape((*leading, *ones))
    case.said += [spec.name, f"{op.data.name} {given[op.data.name].shape}"]
    return given


def bound(spec: NormSpec, given: Mapping[str, Any]) -> BoundCall:
    """The call that arrays come to, of copies: what is done to the arrays does not show."""
    copies: dict[str, Any] = {
        name: None if array is None else np.array(array) for name, array in given.items()
    }
    return bind(
        spec.op,
        copies,
        spec.normalized_shape,
        spec.output_mask,
        eps=spec.eps or 0.0,
        weight_offset=spec.weight_offset,
    )


# --- layouts and libraries ----------------------------------------------------------------------


def _at_an_odd_address(array: Array) -> Array:
    moved = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def _past_an_element(array: Array) -> Array:
    moved = np.zeros(array.size + 1, array.dtype)[1:].reshape(array.shape)
    moved[...] = array
    return moved


def _in_fortrans_order(array: Array) -> Array:
    return np.asfortranarray(array).reshape(array.shape)


def _read_only(array: Array) -> Array:
    frozen = array.copy()
    frozen.flags.writeable = False
    return frozen


def _spread(array: Array) -> Array:
    return np.repeat(array[..., None], 2, -1)[..., 0]


def _backwards(array: Array) -> Array:
    return np.ascontiguousarray(array[..., ::-1])[..., ::-1] if array.ndim else array


LAYOUTS: tuple[Callable[[Array], Array], ...] = (
    np.copy,
    _in_fortrans_order,
    _at_an_odd_address,
    _past_an_element,
    _read_only,
    _spread,
    _backwards,
)


class Exported:
    """An array of a library that nobody knows, which only gives it away."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        """The CPU."""
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        """NumPy's capsule."""
        return self.array.__dlpack__(**options)


def _tensor(array: Array, device: str) -> Any:
    if array.dtype == DTYPES["bf16"].numpy:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def _lay_out_tensor(case: Case, tensor: Any) -> Any:
    """A tensor of the same values."""

    def past_an_element() -> Any:
        buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        return buffer[1:].view(tensor.shape).copy_(tensor)

    def inference() -> Any:
        with torch.inference_mode():
            return tensor.clone()

    changes: dict[str, Callable[[], Any]] = {
        "plain": tensor.clone,
        "negated": lambda: torch._neg_view(-tensor),
        "spread": lambda: torch.stack((tensor, tensor), -1)[..., 0],
        "shifted": past_an_element,
        "transposed": lambda: tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor.clone(),
        "differentiated": lambda: tensor.clone().requires_grad_(),
        "inference": inference,
    }
    name = case.pick(*changes)
    case.said.append(name)
    return changes[name]()


def lay_out(case: Case, library: str, array: Any) -> Any:
    """The same values in some layout, as an array of a library."""
    if array is None:
        return None
    if library in ("numpy", "dlpack"):
        layout = case.pick(*LAYOUTS)
        case.said.append(layout.__name__.strip("_"))
        laid_out = layout(array)
        if library == "dlpack" and array.dtype != DTYPES["bf16"].numpy and laid_out.flags.aligned:
            return Exported(laid_out)
        return laid_out
    if library == "torch":
        return _lay_out_tensor(case, _tensor(array, "cuda" if case.where == "gpu" else "cpu"))
    return importlib.import_module(library).asarray(array)


def array_of(array: Any) -> Any:
    """An array of any library as NumPy's."""
    if array is None or isinstance(array, np.ndarray):
        return array
    if isinstance(array, Exported):
        return array.array
    if torch is not None and isinstance(array, torch.Tensor):
        host = array.detach().cpu().resolve_neg().contiguous()
        if host.dtype == torch.bfloat16:
            return host.view(torch.uint16).numpy().view(DTYPES["bf16"].numpy)
        return host.numpy()
    return array.get() if hasattr(array, "get") else np.asarray(array)


def on_host(results: Results) -> Results:
    """Results of any library as NumPy's."""
    return type(results)(*map(array_of, results))


@functools.cache
def libraries(where: str) -> tuple[str, ...]:
    """Whose arrays can be had."""
    found = ["numpy", "numpy"]
    if where == "cpu":
        found.append("dlpack")
    if torch is not None and (where == "cpu" or torch.cuda.is_available()):
        found += ["torch", "torch"]
    if where == "gpu":
        with contextlib.suppress(ImportError):
            import cupy  # noqa: F401

            found.append("cupy")
    return tuple(found)


# --- kinds of cases -----------------------------------------------------------------------------


def values(case: Case) -> None:
    """Good arguments, of any values, layouts and libraries: the results are right."""
    spec = draw_spec(case)
    given = draw_arrays(case, spec, draw_rows(case, spec))
    library = case.pick(*libraries(case.where))
    if spec.dtype == "bf16" and library in ("cupy", "dlpack"):
        library = "numpy"
    bf16 = DTYPES["bf16"].numpy
    if library == "cupy" and any(a is not None and a.dtype == bf16 for a in given.values()):
        library = "numpy"
    case.said.append(library)
    call = bound(spec, given)
    arrays = {name: lay_out(case, library, array) for name, array in given.items()}
    before = on_host_all(arrays)
    device = None if library not in ("numpy", "dlpack") else DEVICES[case.where]
    op, options = spec.family, {}
    if case.chance(0.5) and call.spec is not None:
        module = loaded(call.spec, DeviceUri.parse(DEVICES[case.where]))
        if op.is_backward:
            options["output_mask"] = case.pick(None, spec.output_mask)
        eps = case.pick(None, spec.eps)
        results = case.call(name_of(module), self=module, eps=eps, out=None, **options, **arrays)
    else:
        if op.is_backward:
            options["output_mask"] = spec.output_mask
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


def on_host_all(arrays: Mapping[str, Any]) -> dict[str, bytes]:
    """What arrays hold, to the bit."""
    return {n: array_of(a).tobytes() for n, a in arrays.items() if a is not None}


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
        given = {n: None if a is None else _tensor(np.array(a), device) for n, a in given.items()}
        stored = {n: None if a is None else _tensor(a, device) for n, a in stored.items()}
    good = True
    asked = [result.name for result in spec.results]
    if case.chance(0.5):
        name = case.pick(*asked)
        stored[name] = (
            lay_out(case, library, stored[name])
            if library == "numpy"
            else (_lay_out_tensor(case, stored[name]))
        )
        good = False
    if case.chance(0.5):
        _overlap(case, case.pick(*asked), stored, given)
        good = False
    call = bound(spec, {name: array_of(array) for name, array in given.items()})
    before = on_host_all(given), on_host_all(stored)
    module = loaded(spec, DeviceUri.parse(DEVICES[case.where]))
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


def expect_refusal(error: BaseException, names: tuple[str, ...]) -> str:
    """One line that begins with the name of an argument."""
    said = str(error)
    if "\n" in said or len(said) > _LONGEST_MESSAGE:
        raise Failure(f"refused in other than one line: {type(error).__name__}: {said}") from error
    word = said.partition(":")[0].partition(".")[0]
    if word not in names:
        raise Failure(f"refused without a name: {type(error).__name__}: {said}") from error
    return f"{type(error).__name__}: {said}"


class _Object:
    """Nothing in particular."""


def draw_junk(case: Case) -> Any:
    """What somebody might pass by mistake."""
    rng = case.rng
    simple: tuple[Any, ...] = (
        None, True, False, 0, 1, -1, 2**31, 2**63, 2**200, 0.0, 1e-5, -0.5, math.nan, math.inf,
        1j, "", "cuda", "f32", "8", "\x1b[31m", "ü" * 3, b"", b"8", (), [], {}, set(), range(8),
        ..., NotImplemented, int, len, lambda: 0, _Object(), [1.0] * 8, (8,), [8], (8, 8), ("8",),
        (True, False), [True] * 3, (True,) * 4, {"a": 1}, Path("nowhere"), slice(None),
    )  # fmt: skip
    kind = case.pick("simple", "simple", "array", "scalar", "wrapped")
    if kind == "simple":
        return case.pick(*simple)
    if kind == "scalar":
        return case.pick(np.float32(1e-5), np.int64(8), np.bool_(True), np.float64(np.nan))
    shape = case.pick((), (1,), (8,), (3,), (3, 8), (8, 3), (3, 8, 1), (0, 8), (3, 0), (2, 2))
    dtype = case.pick("f4", "f4", "f8", "f2", "i4", "?", "c16", "O", ">f4", "U3")
    array: Any = np.ones(shape, dtype)
    if kind == "array":
        return array
    masked = np.ma.masked_array(rng.standard_normal((3, 8)).astype(np.float32), mask=False)
    wrapped: list[Any] = [masked, memoryview(b"12345678"), [array], (array,)]
    if torch is not None:
        tensor = torch.ones(3, 8)
        wrapped += [tensor, tensor.to_sparse(), tensor.to("meta"), tensor.to(torch.int32)]
        wrapped += [torch._to_functional_tensor(tensor), torch.float32, torch.device("cpu")]
    return case.pick(*wrapped)


def junk(case: Case) -> None:
    """Good arguments but for one: refused by name, or what it means is right."""
    op = case.pick(*OPS.values())
    if op.is_backward and case.chance(0.3):
        op = FROM_OUTPUT[op.name]
    shapes = {Kind.CELLS: (3, 8), Kind.ROWS: (3,), Kind.COLUMNS: (8,)}
    given: dict[str, Any] = {
        operand.name: np.ones(shapes[operand.kind], np.float32) for operand in op.arguments
    }
    if op.from_output:
        given[INPUT.name] = None
    elif op.is_backward:
        given[GIVEN_OUTPUT.name] = None
    arrays = tuple(given)
    added = "grad_residual" if op.is_backward else "residual"
    if case.chance(0.5):
        given[added] = None
    eps = None if op.is_backward else 1e-5
    mask = (True,) * len(op.masked)
    if op.is_backward:
        given["output_mask"] = mask
    name = case.pick(op.name, CLASSES[op.name].__name__, f"reference.{op.name}")
    is_module = name == CLASSES[op.name].__name__
    if is_module:
        residual = None if given[added] is None else "f32"
        spec = NormSpec(
            (8,), op=op.name, eps=eps, residual_dtype=residual, from_output=op.from_output
        )
        module = loaded(spec, DeviceUri.parse(DEVICES[case.where]))
        given |= {"self": module, "out": None, "eps": eps}
    else:
        given |= {"normalized_shape": 8, "eps": 1e-5, "weight_offset": case.pick(0.0, 1.0)}
        if name == op.name:
            given["device"] = DEVICES[case.where]
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
    spec, target = draw_spec(case), case.pick(*targets())
    if case.chance(0.3):
        spec = dataclasses.replace(spec, rows=int(case.rng.integers(1, 3000)))
    case.said += [spec.name, target.name]
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "spec": spec,
            "target": case.pick(target.name, *target.aliases, target.name.upper()),
            "output_dir": folder,
            "how": case.pick(None, schedules.choose(spec, target)),
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
        if target.name in ("host", "generic") and not bad:
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
            norms = case.call("load_bundle", bad=bad, **words)
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


def autograd(case: Case) -> None:
    """PyTorch's norms, forward and backward, of any layouts and with any gradients asked for."""
    spec = draw_spec(case, LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD)
    # A sum of another type is refused.
    keeps_output = spec.from_output and spec.residual_dtype in (None, spec.dtype)
    spec = dataclasses.replace(spec, from_output=False, has_bias=None)
    given = draw_arrays(case, spec, max(1, draw_rows(case, spec)), plain=True)
    given |= {"mean": None, "rstd": None}
    if case.chance(0.3):
        given["bias"] = None
    device = "cuda" if case.where == "gpu" else "cpu"

    def tensor(array: Array) -> Any:
        laid_out = _lay_out_tensor(case, _tensor(array, device)).detach()
        return laid_out.clone() if laid_out.is_inference() else laid_out

    has_sum = spec.residual_dtype is not None
    if has_sum:
        of_residual = spec.element_type(Element.RESIDUAL)
        given["residual"] = draw_values(case, of_residual, given["input"].shape, plain=True)
    order = ("input", "residual", "weight", "bias")
    names_given = [name for name in order if given.get(name) is not None]
    tensors: dict[str, Any] = {name: tensor(given[name]) for name in names_given}
    asked = {name for name in names_given if case.chance(0.7)} or {"input"}
    if has_sum and "input" in asked:  # of one type, or cast from the residual's
        asked.add("residual")
    for name in asked:
        tensors[name].requires_grad_()
    reached = {"grad_output": tensor(given["grad_output"].astype(given["input"].dtype))}
    if given.get("grad_residual") is not None and case.chance(0.8):
        reached["grad_residual"] = tensor(given["grad_residual"])
    case.said += [f"of {sorted(asked)}", *reached, device]
    dims, eps, offset = spec.normalized_shape, case.pick(1e-5, 0.5), spec.weight_offset
    options: dict[str, Any] = {"normalized_shape": dims, "eps": eps, "weight_offset": offset}
    options["memory_efficient"] = keeps_output
    name = spec.op.removesuffix("_backward")
    if name == LAYER_NORM.name and not has_sum:
        options["own_forward"] = case.chance(0.5)
    outputs = case.call(f"torch.{'add_' if has_sum else ''}{name}", **options, **tensors)
    outputs = outputs[: len(reached)] if has_sum else (outputs,)
    if keeps_output:
        own = {name: array_of(one) for name, one in tensors.items()}
        saved = getattr(lnbwd, name)(normalized_shape=dims, eps=eps, weight_offset=offset, **own)
        given |= {"output": array_of(outputs[0]), "rstd": saved.rstd}
    leaves = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    found = torch.autograd.grad(outputs, list(leaves.values()), list(reached.values()))
    gradients = dict(zip(leaves, found, strict=True))
    if has_sum:
        wide = DTYPES[spec.acc_dtype].numpy
        total = given["input"].astype(wide) + given["residual"].astype(wide)
        given["input"] = total.astype(given["residual"].dtype)
        of_sum, of_input = gradients.pop("residual", None), gradients.pop("input", None)
        if of_input is not None and not torch.equal(of_input, of_sum.to(of_input.dtype)):
            raise Failure("input: another gradient than that of residual")
        if of_sum is not None:
            gradients["input"] = of_sum
    if keeps_output:
        given["input"] = None
    given |= {"grad_residual": None} | {name: array_of(one) for name, one in reached.items()}
    masked = names(spec.family.masked)
    call = bind(
        spec.op,
        {name: array for name, array in given.items() if name != "residual"},
        dims,
        tuple(name.removeprefix("grad_") in gradients for name in masked),
        eps=eps,
        weight_offset=offset,
    )
    results = (gradients.get(name.removeprefix("grad_")) for name in masked)
    case.judge(on_host(results_type(spec.family)(*results)), call)


def torch_junk(case: Case) -> None:
    """PyTorch's functions, with one argument that is junk: an error, by name, and no crash."""
    device = case.pick("cpu", "meta", "meta")  # meta: new options take a compilation
    x, residual = torch.ones(2, 3, 8, device=device)
    weight, bias = torch.ones(2, 8, device=device)
    shared = {"normalized_shape": 8, "weight": weight, "eps": 1e-5}
    shared |= {"weight_offset": 1.0, "memory_efficient": True}
    types = {"dtype": torch.float32, "residual_dtype": torch.float32, "device": "cpu"}
    types |= {"weight_dtype": torch.float32, "tune": False}
    name, given = case.pick(
        ("torch.layer_norm", {"input": x, "bias": bias, "own_forward": True} | shared),
        ("torch.rms_norm", {"input": x} | shared),
        ("torch.add_layer_norm", {"input": x, "residual": residual, "bias": bias} | shared),
        ("torch.add_rms_norm", {"input": x, "residual": residual} | shared),
        ("torch.warmup", {"model": lnbwd_torch().AddRMSNorm(8)} | types),
        ("torch.replace_norms", {"model": torch.nn.LayerNorm(8), "also": [torch.nn.RMSNorm]}),
    )
    if case.chance(0.2):
        case.call(name, **given)
        return
    bad = case.pick(*given)
    given = given | {bad: draw_junk(case)}
    case.said += [name, bad, repr(given[bad])[:80]]
    try:
        case.call(name, bad=bad, **given)
    except (TypeError, ValueError, RuntimeError, OverflowError, AssertionError) as error:
        case.refused = f"{type(error).__name__}: {error}"


def emulated(case: Case) -> None:
    """A legal schedule of any numbers for a GPU, in the emulator: no fault, and right."""
    target = case.pick(*EMULATED)
    spec = draw_spec(case)
    how = draw_schedule(case, spec, target)
    rows = max(1, draw_rows(case, spec, _MOST_EMULATED))
    case.said += [target.name, str(how)]
    given = draw_arrays(case, spec, rows)
    vmfb, _ = compiler.build(spec, target, how=how)
    call = bound(spec, given)
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
        one = OnePass(
            workgroups=workgroups,
            groups=subgroup_rows * case.pick(1, 2, 4) if cluster == 1 else 1,
            warps=warps,
            vector=vector,
            ahead=slots if bulk else case.pick(*range(max(0, slots - 1), max(slots, 1) + 1)),
            slots=slots,
            rereads=slots > 0 and case.chance(0.4),
            stages_weight=case.chance(0.4),
            widens_weight=case.chance(0.3),
            cluster=cluster,
            subgroup_rows=subgroup_rows,
            defers=cluster > 1 and case.chance(0.5),
            bulk=bulk,
            refills=case.pick(1, 2, 3) if bulk else 1,
            **finalize,
        )
        if one.chunks(spec, target) * vector <= 32:
            yield one


def _forwards(case: Case, spec: NormSpec) -> Iterator[Forward]:
    """Of random numbers; many are not legal."""
    for _ in range(400):
        keeps, cluster = case.chance(0.6), case.pick(1, 1, 1, 2, 3, 4, 8)
        yield Forward(
            rows=case.pick(1, 1, 2, 3, 4, 8) if cluster == 1 else 1,
            threads=case.pick(4, 8, 16, 32, 64, 96, 128, 256),
            vector=case.pick(1, 2, 4, 8),
            chunks=case.pick(1, 2, 3, 4, 8),
            keeps=keeps,
            shares=not keeps and case.chance(0.5),
            most_few_rows=case.pick(0, 0, 3, 100) if keeps else 0,
            early=keeps and case.chance(0.5),
            lasts=case.chance(0.5),
            packs=keeps and case.chance(0.3),
            cluster=cluster,
        )


@functools.cache
def lnbwd_torch() -> Any:
    """`iree_lnbwd.torch`."""
    import iree_lnbwd.torch

    return iree_lnbwd.torch


# Functions of `iree_lnbwd.torch` that other cases would not be the same after.
CHANGE_THE_PROCESS = {"enable", "disable", "enabled"}


def _public() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        "NormSpec": NormSpec,
        "bundle": lnbwd.bundle,
        "compile": lnbwd.compile,
        "load": lnbwd.load,
        "load_bundle": lnbwd.load_bundle,
        "tune": lnbwd.tune,
    }
    for op in OPS:
        found |= {op: getattr(lnbwd, op), f"reference.{op}": getattr(reference, op)}
        found[CLASSES[op].__name__] = CLASSES[op].__call__
    if torch is not None:
        ours = lnbwd_torch()
        public = {name: getattr(ours, name) for name in ours.__all__}
        found |= {
            f"torch.{name}": one
            for name, one in public.items()
            if not isinstance(one, type) and name not in CHANGE_THE_PROCESS
        }
    return found


# What is called, by the names that reports have for it.
PUBLIC = _public()

_ON_A_DEVICE: dict[str, Callable[[Case], None]] = {
    "values": values,
    "storage": storage,
    "junk": junk,
}
if torch is not None:
    _ON_A_DEVICE |= {"autograd": autograd, "torch_junk": torch_junk}
KINDS: Mapping[str, Mapping[str, Callable[[Case], None]]] = MappingProxyType(
    {
        "cpu": {
            **_ON_A_DEVICE,
            "specs": specs,
            "compile": compiles,
            "bundle": bundles,
            "tune": tunes,
        },
        "gpu": _ON_A_DEVICE,
        "emulator": {"emulated": emulated},
    }
)
warnings.filterwarnings("ignore", module="torch")
sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))
