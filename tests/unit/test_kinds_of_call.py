"""Kinds of call on a GPU: which calls take the module that another one has found, and which do not.

The arrays are those of an emulated GPU. Modules only tell which spec and device they were loaded
for: nothing is compiled, and nothing runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from emulated_arrays import EmulatedArray, Namespace
from emulated_driver import EmulatedDriver
from support import random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.calls import calling
from iree_lnbwd.calls.calling import HostCall
from iree_lnbwd.calls.modules import Modules
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops.arguments import (
    Array,
    BoundCall,
    GpuArray,
    Results,
    check_options,
    results_of,
    variant,
)
from iree_lnbwd.ops.operands import OPS, Op, names
from iree_lnbwd.runtime import Norm
from iree_lnbwd.runtime.frameworks.framework import Framework
from iree_lnbwd.runtime.gpu_module import KnownCall
from iree_lnbwd.verification.matrix import random_call


class Known:
    """A known call: its result is the spec of its module."""

    def __init__(self, spec: NormSpec, framework: Framework, views: Mapping[str, Any]) -> None:
        self.spec, self.framework, self.views = spec, framework, views

    def run(self, framework: Framework, given: Sequence[Any], out: Any = None) -> Results:
        """As `KnownCall.run`."""
        assert framework is self.framework
        there = {name for name, view in self.views.items() if view is not None}
        arguments = names(self.spec.family.arguments)
        assert there == {n for n, a in zip(arguments, given, strict=True) if a is not None}
        return results_of(self.spec.family, dict.fromkeys(("output", "grad_input"), self.spec))


class Module:
    """A module that learns kinds of call.

    Attributes:
        asked: How often it was asked about one.
    """

    def __init__(self, spec: NormSpec, uri: DeviceUri) -> None:
        self.spec, self.uri = spec, uri
        self.learned: dict[Hashable, Known] = {}
        self.asked = 0

    def learn(
        self, kind: Hashable, framework: Framework, views: Mapping[str, Any], call: BoundCall
    ) -> Known:
        """As `Norm.learn`."""
        assert call.spec == self.spec
        self.asked += 1
        return self.learned.setdefault(kind, Known(self.spec, framework, views))

    def run(self, call: BoundCall) -> Results:
        """As `Norm.run`."""
        rows = np.zeros(call.shape, np.float32)
        return results_of(self.spec.family, {"grad_input": rows, "output": rows})


class Loaded:
    """Where calls get their modules from.

    Attributes:
        modules: All that were loaded, by spec and device.
    """

    def __init__(self) -> None:
        self.modules: dict[tuple[NormSpec, DeviceUri], Module] = {}
        self._known: weakref.WeakValueDictionary[Hashable, KnownCall] = (
            weakref.WeakValueDictionary()
        )

    def load(self, spec: NormSpec, uri: DeviceUri) -> Norm:
        """As `modules.loaded`."""
        return cast(Norm, self.modules.setdefault((spec, uri), Module(spec, uri)))

    def call(
        self, op: Op, arrays: Mapping[str, Any], uri: DeviceUri | None = None, **options: Any
    ) -> tuple[NormSpec, object]:
        """The spec of the module that a call takes, and its kind."""
        asked = {"normalized_shape": (4,), "output_mask": (True,) * len(op.masked), **options}
        given = [arrays.get(name) for name in names(op.arguments)]
        results, known = calling.call(
            given, check_options(op, **asked), uri, Modules(self.load, self._known)
        )
        return next(result for result in results if result is not None), known


EPS = 1e-3
EVERY = [*OPS.values()]
EVERY += [variant(op, None, "given", None, "given") for op in OPS.values() if op.is_backward]
every_op = pytest.mark.parametrize(
    "op", EVERY, ids=lambda op: op.name + "_from_output" * op.from_output
)


@pytest.fixture
def gpu() -> Namespace:
    return Namespace(EmulatedDriver("cuda"))


def arrays_of(
    gpu: Namespace, op: Op, *, statistics: bool = True, **more: Any
) -> dict[str, EmulatedArray]:
    """The arguments of a call with weights, in a GPU's memory: [3, 4]."""
    eps = EPS if not op.is_backward or not statistics else None
    spec = NormSpec((4,), op=op.name, from_output=op.from_output, eps=eps, **more)
    call = random_call(spec, 3, random_generator())
    return {name: gpu.asarray(array) for name, array in call.arrays.items()}


@every_op
def test_a_call_like_another_takes_what_that_one_found(op: Op, gpu: Namespace) -> None:
    """With other arrays of the same kind."""
    loaded = Loaded()
    spec, known = loaded.call(op, arrays_of(gpu, op), eps=EPS)
    assert (spec.op, spec.from_output, spec.normalized_shape) == (op.name, op.from_output, (4,))
    again, same = loaded.call(op, arrays_of(gpu, op), eps=EPS)
    assert again is spec
    assert same is known
    (module,) = loaded.modules.values()
    assert module.asked == 1


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_another_eps_takes_another_module(op: Op, gpu: Namespace) -> None:
    """On the same arrays, where statistics are computed: in turn, so that both are known, too."""
    loaded = Loaded()
    arrays = arrays_of(gpu, op, statistics=False)
    for eps in (1e-3, 1e-5, 1e-3, 1e-5):
        spec, _ = loaded.call(op, arrays, eps=eps)
        assert spec.eps == eps
    assert len(loaded.modules) == 2


@pytest.mark.parametrize("op", [op for op in EVERY if op.is_backward], ids=lambda op: op.name)
def test_eps_is_nothing_to_a_kind_of_call_with_statistics(op: Op, gpu: Namespace) -> None:
    loaded = Loaded()
    arrays = arrays_of(gpu, op)
    kinds = {id(loaded.call(op, arrays, eps=eps)[1]) for eps in (1e-3, 1e-5, 1e-2)}
    assert len(kinds) == 1
    (module,) = loaded.modules.values()
    assert module.asked == 1


@every_op
def test_another_weight_offset_takes_another_module(op: Op, gpu: Namespace) -> None:
    loaded = Loaded()
    arrays = arrays_of(gpu, op)
    for offset in (0.0, 1.0, 0.5, 0.0, 1.0):
        spec, _ = loaded.call(op, arrays, eps=EPS, weight_offset=offset)
        assert spec.weight_offset == offset
    assert len(loaded.modules) == 3


@pytest.mark.parametrize("op", [op for op in EVERY if op.is_backward], ids=lambda op: op.name)
def test_another_mask_takes_another_module(op: Op, gpu: Namespace) -> None:
    loaded = Loaded()
    arrays = arrays_of(gpu, op)
    every = (True,) * len(op.masked)
    for mask in (every, (*every[:-1], False), every):
        spec, _ = loaded.call(op, arrays, eps=EPS, output_mask=mask)
        assert spec.output_mask == mask


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_the_same_arrays_normalized_otherwise_take_another_module(op: Op, gpu: Namespace) -> None:
    """Where nothing but the option tells how many dimensions are."""
    loaded = Loaded()
    given = arrays_of(gpu, op, statistics=False)
    arrays = {name: array for name, array in given.items() if name in ("input", "grad_output")}
    for dims in ((4,), (3, 4), (4,)):
        spec, _ = loaded.call(op, arrays, eps=EPS, normalized_shape=dims)
        assert spec.normalized_shape == dims


@every_op
@pytest.mark.parametrize("change", ["type", "shape", "without the weight"])
def test_other_arrays_are_of_another_kind(op: Op, change: str, gpu: Namespace) -> None:
    loaded = Loaded()
    plain = arrays_of(gpu, op)
    other = arrays_of(gpu, op, dtype="bf16") if change == "type" else arrays_of(gpu, op)
    if change == "shape":
        rows = {"input", "output", "grad_output"}
        other = {k: a.reshape((3, 1, 4)) if k in rows else a for k, a in other.items()}
        other |= {k: other[k].reshape((3, 1)) for k in ("mean", "rstd") if k in other}
    elif change == "without the weight":
        del other["weight"]
    first, known = loaded.call(op, plain, eps=EPS)
    second, also = loaded.call(op, other, eps=EPS)
    assert also is not known
    assert (second == first) == (change == "shape")
    assert loaded.call(op, plain, eps=EPS)[1] is known


@every_op
def test_a_new_kind_tells_its_module_of_every_array(op: Op, gpu: Namespace) -> None:
    arrays = arrays_of(gpu, op)
    _, known = Loaded().call(op, arrays, eps=EPS)
    assert isinstance(known, Known)
    views = {name: view for name, view in known.views.items() if view is not None}
    assert views.keys() == arrays.keys()
    for name, array in arrays.items():
        assert isinstance(views[name], GpuArray)
        assert (views[name].shape, views[name].dtype) == (array.shape, array.dtype), name


@every_op
def test_the_device_is_that_of_the_data(op: Op, gpu: Namespace) -> None:
    """Whoever names another is told, the first time and the next one."""
    loaded = Loaded()
    arrays = arrays_of(gpu, op)
    here = DeviceUri.parse("cuda://0")
    for uri in (None, here, None):
        loaded.call(op, arrays, uri, eps=EPS)
    assert {uri for _, uri in loaded.modules} == {here}
    for device in ("cuda://1", "local-task"):
        elsewhere = DeviceUri.parse(device)
        said = f"^device: expected {here}, where {op.data.name} is, or None, got {elsewhere}$"
        for _ in range(2):
            with pytest.raises(ValueError, match=said):
                loaded.call(op, arrays, elsewhere, eps=EPS)
    assert len(loaded.modules) == 1


@every_op
def test_arrays_of_the_host_are_of_no_kind(op: Op, gpu: Namespace) -> None:
    """Each call is bound anew, for the CPU or the device that is named; C++ may learn of it."""
    loaded = Loaded()
    arrays = {name: array.numpy() for name, array in arrays_of(gpu, op).items()}
    for device in ("local-task", "cuda://1"):
        uri = DeviceUri.parse(device)
        result, known = loaded.call(op, arrays, None if uri.backend == "cpu" else uri, eps=EPS)
        assert isinstance(result, np.ndarray)
        assert isinstance(known, HostCall)
    assert {str(uri) for _, uri in loaded.modules} == {"local-task", "cuda://1"}


@pytest.mark.parametrize("place", ["gpu", "host"])
@pytest.mark.parametrize("op", [op for op in EVERY if op.is_backward], ids=lambda op: op.name)
def test_what_computes_nothing_loads_nothing(op: Op, place: str, gpu: Namespace) -> None:
    arrays: dict[str, Any] = dict(arrays_of(gpu, op))
    if place == "host":
        arrays = {name: array.numpy() for name, array in arrays.items()}
    nothing = (False,) * len(op.masked)
    loaded = Loaded()
    given = [arrays.get(name) for name in names(op.arguments)]
    options = check_options(op, (4,), nothing, EPS)
    results, known = calling.call(
        given, options, None, Modules(loaded.load, weakref.WeakValueDictionary())
    )
    assert set(results) == {None}
    assert known is None
    assert not loaded.modules


@every_op
def test_what_is_no_array_is_named(op: Op) -> None:
    said = f"^{op.data.name}: expected a NumPy array, .*, got list$"
    with pytest.raises(TypeError, match=said):
        Loaded().call(op, {op.data.name: [[1.0]]}, eps=EPS)


@pytest.mark.parametrize("place", ["gpu", "host"])
@every_op
def test_no_argument_is_lost(op: Op, place: str, gpu: Namespace) -> None:
    """There is one for each of the op's, though it be None."""
    arrays: dict[str, Any] = dict(arrays_of(gpu, op))
    if place == "host":
        arrays = {name: array.numpy() for name, array in arrays.items()}
    given = [arrays.get(name) for name in names(op.arguments)]
    options = check_options(op, (4,), (True,) * len(op.masked), EPS)
    loaded = Loaded()
    for wrong in ([*given, None], given[:-1]):
        with pytest.raises(ValueError, match="zip"):
            calling.call(wrong, options, None, Modules(loaded.load, weakref.WeakValueDictionary()))


class HostArray:
    """An array of another library, in the host's memory."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU

    def __dlpack__(self, **options: Any) -> object:
        return self.array.__dlpack__(**options)

    def __array_namespace__(self) -> SimpleNamespace:
        return SimpleNamespace(asarray=HostArray)


@every_op
def test_results_on_the_host_are_arrays_of_the_datas_library(op: Op, gpu: Namespace) -> None:
    arrays = {name: HostArray(array.numpy()) for name, array in arrays_of(gpu, op).items()}
    result, known = Loaded().call(op, arrays, eps=EPS)
    assert isinstance(result, HostArray)
    assert isinstance(known, HostCall)


def test_a_call_on_the_cpu_is_known_by_its_module_and_its_rows() -> None:
    op, loaded, x = OPS["rms_norm"], Loaded(), np.ones((3, 4), np.float32)
    _, known = loaded.call(op, {"input": x}, eps=EPS)
    assert isinstance(known, HostCall)
    assert known[:2] == (*loaded.modules.values(), 3)
    assert loaded.call(op, {"input": x[:0]}, eps=EPS)[1] is None
