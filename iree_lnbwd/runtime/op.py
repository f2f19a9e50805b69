"""Runs a module: loads it on a device, hands it the caller's arrays, returns the gradients."""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from iree_lnbwd import dtypes
from iree_lnbwd.arguments import (
    ARGUMENTS,
    Array,
    BoundCall,
    Extent,
    GpuArray,
    LayerNormGrads,
    bind,
    check_apart,
)
from iree_lnbwd.description import Description
from iree_lnbwd.devices import DeviceUri
from iree_lnbwd.operands import BACKWARD, Kind
from iree_lnbwd.runtime import interop
from iree_lnbwd.runtime.gpu_driver import Driver
from iree_lnbwd.runtime.interop import Framework
from iree_lnbwd.runtime.iree_module import IreeModule, aligned_empty
from iree_lnbwd.runtime.stream_module import ACCESS_BYTES, StreamCall, StreamModule, are_aligned
from iree_lnbwd.schedule import host_alignment
from iree_lnbwd.spec import (
    GRADIENTS,
    TensorType,
    check_eps,
    check_output_mask,
)

_KINDS_KEPT = 1024  # kinds of call, by shapes and the like, that are not checked again
_BYTE = np.dtype(np.uint8)
_INPUT = ARGUMENTS.index("input")


@dataclass(frozen=True)
class _GpuCall:
    """A kind of call that was checked: everything but the addresses.

    Attributes:
        rows: M.
        inputs: Picks what the module reads from the arguments of a call.
        copied: Which of these it cannot use where they are.
        sizes: Bytes of what it reads, and of the gradients that it computes.
        results: Makes an array for each gradient that is computed, from the arguments of a call.
        output_mask: Which these are.
        launches: Of the module's kernels; None where IREE runs it.
    """

    rows: int
    inputs: Callable[[Sequence[Any]], Sequence[Any]]
    copied: tuple[int, ...]
    sizes: tuple[int, ...]
    results: tuple[Callable[[Sequence[Any]], Any], ...]
    output_mask: tuple[bool, bool, bool]
    launches: StreamCall | None

    def gradients(self, results: Sequence[Any]) -> LayerNormGrads:
        """The computed gradients in ATen's places."""
        if len(results) == len(self.output_mask):
            return LayerNormGrads(*results)
        computed = iter(results)
        return LayerNormGrads(*[next(computed) if asked else None for asked in self.output_mask])


class _Scratch(NamedTuple):
    """Memory that the kernels of a stream use, one call after another.

    It is kept for the stream. A graph's kernels run when we do not know, so they get memory of
    their own, which the framework keeps with the graph.
    """

    size: int
    address: int
    keeper: object


def _new_scratch(framework: Framework, like: Any, size: int) -> _Scratch:
    (address,), keeper = framework.addresses((framework.empty(like, (size,), _BYTE),))
    return _Scratch(size, address, keeper)


class LayerNormBackward:
    """A module on a device: call it with the arrays, get the gradients.

    Arrays may be NumPy's, PyTorch's, or any that speak DLPack. What is in the device's memory is
    used where it is, if its values follow each other there and begin at a multiple of `alignment`;
    otherwise a call works on a copy. A GPU's module takes NumPy arrays too and copies them.

    On a GPU a call with PyTorch's tensors returns when its kernels are in the queue of PyTorch's
    current stream, and can be captured into a graph. With other libraries' arrays, or where
    `iree-lnbwd inspect` says that calls go through IREE's device, it returns when they are done.

    Any number of threads may call.

    Attributes:
        spec: What it computes.
        target: Name of the target that it was compiled for.
        device: Where it runs.
        alignment: Bytes of which a GPU's array must begin at a multiple.
    """

    def __init__(self, module: Description, device: DeviceUri, vmfb: bytes) -> None:
        """Use `load`, which checks what it is given."""
        self.spec = module.spec
        self.target = module.target.name
        self.device = device
        self._launches = module.launches
        self.alignment = ACCESS_BYTES if self._launches else host_alignment(module.schedule)
        self._vmfb = vmfb
        self._kinds: dict[Any, _GpuCall] = {}
        self._scratch: dict[int, _Scratch] = {}
        self._launching = threading.Lock()
        if self._launches is None:
            self._iree  # noqa: B018 - a device that cannot run the module is found out now
        else:
            self._streamed  # noqa: B018

    def __call__(
        self,
        grad_output: Any,
        input: Any,
        mean: Any = None,
        rstd: Any = None,
        weight: Any = None,
        bias: Any = None,
        output_mask: tuple[bool, bool, bool] | None = None,
        *,
        eps: float | None = None,
        out: LayerNormGrads | Sequence[Any] | None = None,
    ) -> LayerNormGrads:
        """Computes the gradients that the module was compiled for.

        The arguments are those of `iree_lnbwd.layer_norm_backward` less ``normalized_shape``.

        Args:
            grad_output: [..., *normalized_shape]
            input: [..., *normalized_shape]
            mean: [...], with or without trailing ones; None where the module recomputes it.
            rstd: As ``mean``.
            weight: [*normalized_shape]; None where the module has none.
            bias: [*normalized_shape] or None; only its element type matters.
            output_mask: None, or the mask that the module was compiled for.
            eps: None, or the eps that the module was compiled for.
            out: Three arrays to write the gradients to, None among them where the module computes
                none. They are contiguous (on a GPU, aligned as well), and share memory with no
                other argument that is read, nor with each other. None makes new ones, of
                ``input``'s library.

        Returns:
            The gradients; None where the module computes none. With ``out``, these arrays.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected: also an
                array on another device.
            DeviceError: The GPU's driver refuses.
        """
        given = (grad_output, input, mean, rstd, weight, bias)
        if output_mask is not None or eps is not None:
            self._check_options(output_mask, eps)
        storage = None if out is None else _three(out)
        framework = interop.on_gpu("input", input)
        if framework is not None:
            return self._on_gpu(framework, given, storage)
        call = self._bind(interop.views(None, dict(zip(ARGUMENTS, given, strict=True))))
        if storage is not None:
            arrays = self._checked_storage(None, storage, self._shapes(call))
            check_apart(
                [_memory(given.name, call.arrays[given.name]) for given in self.spec.inputs],
                [_memory(f"out.{r.name}", getattr(arrays, r.name)) for r in self.spec.results],
            )
            self.run(call, arrays)
            return storage
        return interop.from_numpy(self.run(call), like=input)

    def stream_call(self, rows: int) -> StreamCall | None:
        """What a call with M rows, M >= 1, puts on a stream; None where IREE's device runs it."""
        return None if self._streamed is None else self._streamed.call(rows)

    def run(self, call: BoundCall, out: LayerNormGrads | None = None) -> LayerNormGrads:
        """Computes a call on NumPy arrays that `arguments.bind` has checked, for this spec."""
        shapes = self._shapes(call)
        gradients = {
            result.name: aligned_empty(
                shapes[result.name], dtypes.DTYPES[result.dtype].numpy, self.alignment
            )
            if out is None
            else getattr(out, result.name)
            for result in self.spec.results
        }
        if call.rows == 0:
            for gradient in gradients.values():
                gradient.fill(0)  # an empty sum
        else:
            self._iree.run(
                [call.arrays[given.name] for given in self.spec.inputs],
                [gradients[r.name].reshape(_flat(r, call.rows)) for r in self.spec.results],
            )
        return LayerNormGrads(*map(gradients.get, GRADIENTS))

    @functools.cached_property
    def _iree(self) -> IreeModule:
        source = f"{self.spec.name} for {self.target}"
        return IreeModule(self.device, self._vmfb, source=source, alignment=self.alignment)

    @functools.cached_property
    def _driver(self) -> Driver:
        return Driver(self.device)

    @functools.cached_property
    def _streamed(self) -> StreamModule | None:
        if self._launches is None:
            return None
        return StreamModule(self.spec, self._launches, self._driver, self._vmfb)

    def _on_gpu(
        self,
        framework: Framework,
        given: tuple[Any, ...],
        out: LayerNormGrads | None,
    ) -> LayerNormGrads:
        kind = framework.signature(given if out is None else (*given, *out))
        known = self._kinds.get(kind)
        if known is None:
            known = self._checked(framework, given, out)
            if len(self._kinds) >= _KINDS_KEPT:
                self._kinds.clear()
            self._kinds[kind] = known
        self._driver.check_process()  # before the library says so, in its words
        results = (
            [make(given) for make in known.results]
            if out is None
            else [g for g, asked in zip(out, self.spec.output_mask, strict=True) if asked]
        )
        used = [*known.inputs(given), *results]
        if known.rows == 0:
            if out is not None:
                self._check_apart(framework.addresses(used)[0], known)
            for result in results:
                framework.clear(result)
            return known.gradients(results)
        for place in known.copied:
            used[place] = framework.copy(self.spec.inputs[place].name, used[place])
        addresses, keeper = framework.addresses(used)
        if not are_aligned(addresses, self.alignment) or 0 in addresses:
            self._move(framework, used, addresses)
            addresses, keeper = framework.addresses(used)
        if out is not None:
            self._check_apart(addresses, known)
        queue = framework.stream(self.device)
        if known.launches is None:
            self._driver.synchronize(queue)
            self._iree.run_in_place(
                [
                    (argument, framework.capsule(array), _flat(argument, known.rows))
                    for argument, array in zip(self.spec.arguments, used, strict=True)
                ],
                len(results),
            )
            return known.gradients(results)
        captured = framework.is_captured()
        with self._launching:
            kept = None if captured else self._scratch.get(queue)
            if kept is None or kept.size < known.launches.scratch_bytes:
                kept = _new_scratch(framework, given[_INPUT], known.launches.scratch_bytes)
                if not captured:
                    self._scratch[queue] = kept
            known.launches.run(addresses, kept.address, queue, captured=captured)
        if framework.waits:
            self._driver.synchronize(queue)
        del keeper  # the kernels are in the queue, or done
        return known.gradients(results)

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        """Of the arguments of the module, as a caller knows them."""
        results = (f"out.{result.name}" for result in self.spec.results)
        return (*(given.name for given in self.spec.inputs), *results)

    def _check_apart(self, addresses: Sequence[int], known: _GpuCall) -> None:
        """Storage shares memory with no other argument."""
        memories = [
            Extent(name, address, size)
            for name, address, size in zip(self._names, addresses, known.sizes, strict=True)
        ]
        inputs = len(self.spec.inputs)
        check_apart(memories[:inputs], memories[inputs:])

    def _move(self, framework: Framework, used: list[Any], addresses: Sequence[int]) -> None:
        """Puts copies in the place of what the module cannot use where it is.

        Raises:
            ValueError: It is storage for a gradient, or has no memory.
        """
        for place, (name, address) in enumerate(zip(self._names, addresses, strict=True)):
            if address and address % self.alignment == 0:
                continue
            if place >= len(self.spec.inputs):
                raise ValueError(
                    f"{name}: expected memory that begins at a multiple of {self.alignment} bytes, "
                    f"got {address:#x}"
                )
            used[place] = framework.copy(name, used[place])

    def _checked(
        self, framework: Framework, given: tuple[Any, ...], out: LayerNormGrads | None
    ) -> _GpuCall:
        arrays = dict(zip(ARGUMENTS, given, strict=True))
        views = interop.views(framework, arrays)
        call = self._bind(views)
        where = call.arrays["input"].device
        if where != str(self.device):
            raise ValueError(f"input: this module is on {self.device}, got an array on {where}")
        shapes = self._shapes(call)
        if out is not None:
            self._checked_storage(framework, out, shapes)
        return _GpuCall(
            rows=call.rows,
            inputs=operator.itemgetter(*(ARGUMENTS.index(a.name) for a in self.spec.inputs)),
            copied=tuple(
                place
                for place, given in enumerate(self.spec.inputs)
                if not call.arrays[given.name].contiguous
            ),
            sizes=tuple(
                math.prod(_flat(argument, call.rows)) * dtypes.DTYPES[argument.dtype].numpy.itemsize
                for argument in self.spec.arguments
            ),
            results=tuple(
                _maker(framework, views, (shapes[r.name], dtypes.DTYPES[r.dtype].numpy))
                for r in self.spec.results
            ),
            output_mask=self.spec.output_mask,
            launches=self.stream_call(call.rows) if call.rows else None,
        )

    def _check_options(self, output_mask: object, eps: object) -> None:
        """They are None, or what the module was compiled for."""
        mask = None if output_mask is None else check_output_mask(output_mask)
        number = None if eps is None else check_eps(eps)
        for name, asked, ours in (
            ("output_mask", mask, self.spec.output_mask),
            ("eps", number, self.spec.recompute_eps),
        ):
            if asked is not None and asked != ours:
                raise ValueError(f"{name}: this module was compiled for {ours}, got {asked}")

    def _bind(self, arrays: Mapping[str, Any]) -> BoundCall:
        """The arguments checked against each other, and against what this module computes."""
        mean = arrays["mean"]
        if (mean is None) != (self.spec.recompute_eps is not None):
            raise ValueError(
                "mean: this module "
                + ("takes mean and rstd, got None" if mean is None else "recomputes mean and rstd")
            )
        call = bind(
            normalized_shape=self.spec.normalized_shape,
            output_mask=self.spec.output_mask,
            eps=self.spec.recompute_eps or 0.0,
            **arrays,
        )
        self._expect(call, bias_given=arrays["bias"] is not None)
        return call

    def _shapes(self, call: BoundCall) -> dict[str, tuple[int, ...]]:
        """Of the gradients, as the caller sees them."""
        return {
            result.name: call.shape if result.kind is Kind.CELLS else self.spec.normalized_shape
            for result in BACKWARD.results
            if self.spec.has(result)
        }

    def _checked_storage(
        self,
        framework: Framework | None,
        out: LayerNormGrads,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> LayerNormGrads:
        """The caller's arrays for the gradients: NumPy's, or what is known of a GPU's."""
        view = interop.memory_of if framework is None else framework.describe
        arrays: dict[str, Any] = {}
        for gradient, array in out._asdict().items():
            name = f"out.{gradient}"
            if interop.is_immutable(array):
                raise ValueError(f"{name}: expected an array that can be written, got JAX's")
            arrays[name] = None if array is None else view(name, array)
        for result in self.spec.results:
            name = f"out.{result.name}"
            array = arrays[name]
            dtype = dtypes.DTYPES[result.dtype].numpy
            if array is None:
                raise ValueError(f"{name}: expected an array, got None")
            if array.shape != shapes[result.name]:
                raise ValueError(f"{name}: expected shape {shapes[result.name]}, got {array.shape}")
            if array.dtype != dtype:
                raise TypeError(f"{name}: expected element type {result.dtype}, got {array.dtype}")
            on_gpu = isinstance(array, GpuArray)
            if not (array.contiguous if on_gpu else array.flags.c_contiguous):
                raise ValueError(
                    f"{name}: expected a contiguous array, got one whose elements do not follow "
                    "each other in memory"
                )
            if on_gpu and array.device != str(self.device):
                raise ValueError(f"{name}: expected one on {self.device}, got {array.device}")
            if not on_gpu and not array.flags.writeable:
                raise ValueError(f"{name}: expected an array that can be written, got another")
        return LayerNormGrads(*arrays.values())

    def _expect(self, call: BoundCall, *, bias_given: bool) -> None:
        """The call's spec is this module's, apart from what a module is free about."""
        if call.spec is None:
            raise ValueError("weight: this module takes a weight, got None")
        spec, theirs = self.spec, call.spec
        if theirs.has_weight != spec.has_weight:
            takes = "takes a weight, got None" if spec.has_weight else "has no weight, got one"
            raise ValueError(f"weight: this module {takes}")
        for name, ours, got in (
            ("input", spec.dtype, theirs.dtype),
            ("grad_output", spec.dy_dtype, theirs.dy_dtype),
            ("weight", spec.gamma_dtype, theirs.gamma_dtype),
            *((("bias", spec.beta_dtype, theirs.beta_dtype),) if bias_given else ()),
        ):
            if ours != got:
                raise TypeError(f"{name}: this module was compiled for {ours}, got {got}")
        if spec.rows is not None and spec.rows != call.rows:
            raise ValueError(
                f"input: this module was compiled for {spec.rows} rows, got {call.rows}"
            )


def _flat(argument: TensorType, rows: int) -> tuple[int, ...]:
    """Its shape, as the module sees it."""
    return tuple(rows if dim is None else dim for dim in argument.shape)


def _three(out: object) -> LayerNormGrads:
    """The caller's storage as gradients, if it is three of something."""
    if isinstance(out, LayerNormGrads):
        return out
    if not isinstance(out, tuple | list) or len(out) != len(GRADIENTS):
        raise TypeError(
            f"out: expected LayerNormGrads or three arrays, got {type(out).__name__}"
            + (f" of {len(out)}" if isinstance(out, tuple | list) else "")
        )
    return LayerNormGrads(*out)


def _memory(name: str, array: Array) -> Extent:
    return Extent(name, array.__array_interface__["data"][0], array.nbytes)


def _maker(
    framework: Framework,
    views: Mapping[str, Any],
    kind: tuple[tuple[int, ...], np.dtype[Any]],
) -> Callable[[Sequence[Any]], Any]:
    """Makes storage for a gradient: like that of an argument with its shape and type, if any."""
    for place, name in enumerate(ARGUMENTS):
        view = views[name]
        if view is not None and view.contiguous and (view.shape, view.dtype) == kind:
            return lambda given: framework.empty_like(given[place])
    return lambda given: framework.empty(given[_INPUT], *kind)
