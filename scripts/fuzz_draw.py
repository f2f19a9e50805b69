"""What the cases of `scripts/fuzz` draw: specs, values, arrays and their layouts, and junk."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec, reference
from iree_lnbwd.errors import ArtifactError, CompileError, DeviceError
from iree_lnbwd.ops.arguments import Array, BoundCall, Results, bind, rms_eps
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    FROM_OUTPUT,
    GRAD_INPUT,
    INPUT,
    MORE_GRAD_OUTPUTS,
    MOST_GRAD_OUTPUTS,
    OPS,
    Access,
    Kind,
    Op,
    names,
)
from iree_lnbwd.ops.spec import LEAST_WEIGHT
from iree_lnbwd.runtime.ops import CLASSES

torch: Any = None
with contextlib.suppress(ImportError):
    torch = importlib.import_module("torch")

REFUSALS = (TypeError, ValueError, ArtifactError, CompileError, DeviceError)
DEVICES: Mapping[str, str] = MappingProxyType({"cpu": "local-task", "gpu": "cuda"})

EPS = (1e-5, 0.5, 1e-12)
OFFSETS = (0.0, 1.0, -0.25)
_OF_SETS = 0.3  # of the specs that may have sets of weights
_OF_GATES = 0.2  # of those that may have a gate
_MOST_ELEMENTS = 1 << 17
_LONGEST_MESSAGE = 2000


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
        rows_per_set: Of the call, whose weight has sets.
    """

    where: str
    rng: np.random.Generator
    spec_rng: np.random.Generator
    said: list[str] = field(default_factory=list)
    tried: set[tuple[str, str, str]] = field(default_factory=set)
    refused: str = ""
    rows_per_set: int = 1

    def pick(self, *choices: Any) -> Any:
        """One of these."""
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        """True that often."""
        return bool(self.rng.random() < probability)

    def call(self, name: str, /, *, bad: str = "", **arguments: Any) -> Any:
        """Calls something public, and remembers with what."""
        more = [arguments.pop(other, None) for other in names(MORE_GRAD_OUTPUTS)]
        if any(
            array is not None for array in more
        ):  # those beside the first come in a list with it
            there = (array for array in more if array is not None)
            arguments["grad_output"] = self.pick(list, tuple)((arguments["grad_output"], *there))
        for argument in arguments:
            self.tried.add((name, argument, "bad" if argument == bad else "good"))
        return PUBLIC[name](**arguments)

    def judge(
        self,
        results: Results,
        call: BoundCall,
        *,
        but: Collection[str] = (),
        more_off: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """The results are those of a call.

        Args:
            results: What was computed.
            call: Of what.
            but: The names of results that are not told.
            more_off: How much further than the judge says results may be off, by their names.
        """
        judgement = reference.judge(call)
        types = {} if call.spec is None else {r.name: r.dtype for r in call.spec.results}
        for name, got in results._asdict().items():
            if name in but:
                continue
            if name not in types:
                if got is not None:
                    raise Failure(f"{name} was not asked for")
                continue
            expected = judgement.expected[name]
            if got is None or got.shape != expected.shape:
                raise Failure(f"{name}: {None if got is None else got.shape}, not {expected.shape}")
            if got.dtype != DTYPES[types[name]].numpy:
                raise Failure(f"{name}: {got.dtype}, not {types[name]}")
            tolerance = judgement.tolerance[name] + more_off.get(name, 0.0)
            comparison = reference.compare(got, expected, tolerance)
            if not comparison.passed:
                raise Failure(f"{name} is wrong: {comparison}")


# --- what is drawn ------------------------------------------------------------------------------


def draw_spec(case: Case, *ops: Op, may_have_all: bool = False) -> NormSpec:
    """Widths of every kind, types and their mixtures, masks and options; of any op, or of these.

    Sets of weights and gates are drawn only where ``may_have_all``: not every face takes them.
    """
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
    from_output = op.is_backward and bool(rng.random() < 0.3)
    family = (FROM_OUTPUT if from_output else OPS)[op.name]
    has_bias = pick(None, True, False) if family.takes_bias else None
    gradients = names(family.gradients if has_bias else family.masked)
    masks = [
        mask
        for mask in itertools.product((True, False), repeat=len(gradients))
        if any(
            mask[i] and (has_weight or name != "grad_weight") for i, name in enumerate(gradients)
        )
    ]
    statistics = [None, None] if op.is_backward else [rms_eps(dtype)]
    # Without a bias, a caller cannot say which type its gradient has.
    tells_type = not (from_output and has_bias is False)
    spec = NormSpec(
        dims,
        dtype,
        grad_output_dtype=pick(*narrow) if op.is_backward else None,
        weight_dtype=pick(*narrow) if has_weight else None,
        bias_dtype=pick(*narrow) if tells_type else None,
        has_weight=has_weight,
        output_mask=pick((), (), *masks),
        eps=None if from_output else pick(*statistics, *EPS),
        op=op.name,
        has_bias=has_bias,
        residual_dtype=pick(None, None, dtype, *narrow),
        weight_offset=pick(0.0, *OFFSETS) if has_weight else 0.0,
        from_output=from_output,
        grad_outputs=pick(1, 1, 1, 2, 3, MOST_GRAD_OUTPUTS) if op.is_backward else 1,
        output_dtype=None if op.is_backward else pick(*narrow),
        weight_sets=may_have_all and has_weight and bool(rng.random() < _OF_SETS),
    )
    if not may_have_all or from_output or rng.random() >= _OF_GATES:
        may_have_copy = op.is_backward and dtype == "f32" and spec.has(GRAD_INPUT)
        copied = pick(None, "bf16", "f16") if may_have_copy else None
        may_have_sum = op.is_backward and spec.has(GRAD_INPUT) and not spec.weight_sets
        summed = pick(None, None, dtype, *narrow) if may_have_sum and copied is None else None
        return replace(spec, grad_input_copy_dtype=copied, grad_input_sum_dtype=summed)
    return replace(
        spec,
        gate=pick("after", "before"),
        gate_dtype=pick(*narrow),
        output_mask=(),
        residual_dtype=None,
        grad_outputs=1,
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
    case.rows_per_set = 1
    if spec.weight_sets:
        sets = case.pick(1, 2, int(case.rng.integers(1, 9)), max(rows, 1))
        case.rows_per_set = case.pick(1, 1, 2, int(case.rng.integers(1, rows + 3)), max(rows, 1))
        shapes[Kind.COLUMNS] = (sets, *dims)
        case.said.append(f"{sets} sets of {case.rows_per_set}")
    given: dict[str, Any] = {}
    for operand in op.arguments:
        only_its_type = operand.access is Access.TYPE_ALONE
        counts = only_its_type and (op.atens_bias or spec.has_bias)
        there = operand.kind in shapes and (counts or spec.has(operand))
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


def bound(spec: NormSpec, given: Mapping[str, Any], rows_per_set: int = 1) -> BoundCall:
    """The call that arrays come to, of copies: what is done to the arrays does not show."""
    return bind(
        spec.op,
        copies(given),
        spec.normalized_shape,
        spec.output_mask,
        eps=spec.eps or 0.0,
        weight_offset=spec.weight_offset,
        output_dtype=spec.output_dtype,
        grad_input_copy_dtype=spec.grad_input_copy_dtype,
        grad_input_sum_dtype=spec.grad_input_sum_dtype,
        gate_first=spec.gate == "before",
        rows_per_set=rows_per_set if spec.weight_sets else None,
    )


def copies(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of arrays, where there are any."""
    return {name: None if array is None else np.array(array) for name, array in given.items()}


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


def _swapped(array: Array) -> Array:
    """Sequences of batches, as batches of sequences."""
    if array.ndim < 3:
        return array.copy()
    return np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1)


def _beside_others(array: Array) -> Array:
    """A part of each of the first ones, as q of a packed [B, S, 3, H, D]; NaNs are beside it."""
    return _among_nans(array, max(0, array.ndim - 2))


def _slice_of_rows(array: Array) -> Array:
    """A slice of longer rows."""
    if array.ndim < 2:
        return array.copy()
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1] + 8), np.nan, array.dtype)
    wide[..., 8 : 8 + array.shape[-1]] = array
    return wide[..., 8 : 8 + array.shape[-1]]


def _every_third(array: Array) -> Array:
    """Of the first dimension."""
    return _among_nans(array, 1) if array.ndim > 1 else array.copy()


def _among_nans(array: Array, axis: int) -> Array:
    room = np.full((*array.shape[:axis], 3, *array.shape[axis:]), np.nan, array.dtype)
    part: Array = np.moveaxis(room, axis, 0)[1, ...]
    part[...] = array
    return part


LAYOUTS: tuple[Callable[[Array], Array], ...] = (
    np.copy,
    _swapped,
    _beside_others,
    _slice_of_rows,
    _every_third,
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


def tensor_of(array: Array, device: str) -> Any:
    """An array as PyTorch's; on the CPU it shares the memory."""
    if array.dtype == DTYPES["bf16"].numpy:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def lay_out_tensor(case: Case, tensor: Any) -> Any:
    """A tensor of the same values, in some layout."""

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
        "beside others": lambda: (
            torch.stack((tensor * 0, tensor, tensor * 0), -2)[..., 1, :]
            if tensor.ndim
            else tensor.clone()
        ),
        "sliced": lambda: (
            torch.cat((tensor * 0, tensor), -1)[..., tensor.shape[-1] :]
            if tensor.ndim
            else tensor.clone()
        ),
        "swapped": lambda: (
            tensor.transpose(0, 1).contiguous().transpose(0, 1)
            if tensor.ndim > 2
            else tensor.clone()
        ),
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
        return lay_out_tensor(case, tensor_of(array, "cuda" if case.where == "gpu" else "cpu"))
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
    to_host = getattr(array, "get", getattr(array, "numpy", None))  # CuPy's, or an emulated GPU's
    return np.asarray(array) if to_host is None else to_host()


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


def on_host_all(arrays: Mapping[str, Any]) -> dict[str, bytes]:
    """What arrays hold, to the bit."""
    return {n: array_of(a).tobytes() for n, a in arrays.items() if a is not None}


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


@functools.cache
def lnbwd_torch() -> Any:
    """`iree_lnbwd.torch`."""
    import iree_lnbwd.torch

    return iree_lnbwd.torch


# Functions of `iree_lnbwd.torch` that other cases would not be the same after.
CHANGE_THE_PROCESS = {"enable", "disable", "enabled", "use_inductor_pass"}


def _public() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        "NormSpec": NormSpec,
        "bundle": lnbwd.bundle,
        "compile": lnbwd.compile,
        "load": lnbwd.load,
        "Bundle": lnbwd.Bundle,
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
