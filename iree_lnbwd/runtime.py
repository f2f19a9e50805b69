"""Runs a module: loads it on a device, hands it the caller's arrays, returns the gradients."""

from __future__ import annotations

import functools
import operator
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from iree_lnbwd import artifact, dtypes, interop
from iree_lnbwd.arguments import Call, GpuArray, LayerNormGrads, bind
from iree_lnbwd.description import Description, describe
from iree_lnbwd.devices import DEFAULT_DEVICE, DeviceUri, host_cpu
from iree_lnbwd.errors import ArtifactError, DeviceError
from iree_lnbwd.gpu_driver import Driver
from iree_lnbwd.interop import Framework
from iree_lnbwd.iree_module import IreeModule, aligned_empty, open_device
from iree_lnbwd.schedule import host_alignment
from iree_lnbwd.spec import GRADIENTS, LayerNormSpec, TensorType
from iree_lnbwd.stream_call import ACCESS_BYTES, StreamCall, StreamModule, are_aligned

_KINDS_KEPT = 1024  # kinds of call, by shapes and the like, that are not checked again
_BYTE = np.dtype(np.uint8)
_ARRAYS = ("grad_output", "input", "mean", "rstd", "weight", "bias")
_INPUT = _ARRAYS.index("input")


@dataclass(frozen=True)
class _GpuCall:
    """A kind of call that was checked: everything but the addresses.

    Attributes:
        rows: M.
        inputs: Picks what the module reads from the arguments of a call.
        results: Makes an array for each gradient that is computed, from the arguments of a call.
        output_mask: Which these are.
        launches: Of the module's kernels; None where IREE runs it.
    """

    rows: int
    inputs: Callable[[Sequence[Any]], Sequence[Any]]
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
    used where it is; a GPU's module takes NumPy arrays too and copies them.

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
        out: LayerNormGrads | None = None,
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
            out: Arrays to write the gradients to; None makes new ones, of ``input``'s library.

        Returns:
            The gradients; None where the module computes none.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected: also a
                GPU's array that is on another device, not contiguous, or misaligned.
            DeviceError: The GPU's driver refuses.
        """
        given = (grad_output, input, mean, rstd, weight, bias)
        framework = interop.on_gpu("input", input)
        if framework is not None:
            return self._on_gpu(framework, given, output_mask, eps, out)
        arrays = dict(zip(_ARRAYS, given, strict=True))
        call = self._bind(interop.views(None, arrays), output_mask, eps)
        if out is not None:
            storage = self._checked_storage(None, out, self._shapes(call))
            self.run(call, storage)
            return out
        return interop.from_numpy(self.run(call), like=input)

    def stream_call(self, rows: int) -> StreamCall | None:
        """What a call with M rows, M >= 1, puts on a stream; None where IREE's device runs it."""
        return None if self._streamed is None else self._streamed.call(rows)

    def run(self, call: Call, out: LayerNormGrads | None = None) -> LayerNormGrads:
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
        output_mask: tuple[bool, bool, bool] | None,
        eps: float | None,
        out: LayerNormGrads | None,
    ) -> LayerNormGrads:
        kind = (output_mask, eps, framework.signature(given if out is None else (*given, *out)))
        known = self._kinds.get(kind)
        if known is None:
            known = self._checked(framework, given, output_mask, eps, out)
            if len(self._kinds) >= _KINDS_KEPT:
                self._kinds.clear()
            self._kinds[kind] = known
        results = (
            [make(given) for make in known.results]
            if out is None
            else [g for g, asked in zip(out, self.spec.output_mask, strict=True) if asked]
        )
        used = [*known.inputs(given), *results]
        if known.rows == 0:
            for result in results:
                framework.clear(result)
            return known.gradients(results)
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
        addresses, keeper = framework.addresses(used)
        if not are_aligned(addresses):
            raise ValueError(_misaligned(self.spec, addresses))
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

    def _checked(
        self,
        framework: Framework,
        given: tuple[Any, ...],
        output_mask: tuple[bool, bool, bool] | None,
        eps: float | None,
        out: LayerNormGrads | None,
    ) -> _GpuCall:
        arrays = dict(zip(_ARRAYS, given, strict=True))
        views = interop.views(framework, arrays)
        call = self._bind(views, output_mask, eps)
        where = call.arrays["input"].device
        if where != str(self.device):
            raise ValueError(f"input: this module is on {self.device}, got an array on {where}")
        shapes = self._shapes(call)
        if out is not None:
            self._checked_storage(framework, out, shapes)
        return _GpuCall(
            rows=call.rows,
            inputs=operator.itemgetter(*(_ARRAYS.index(a.name) for a in self.spec.inputs)),
            results=tuple(
                _maker(framework, views, (shapes[r.name], dtypes.DTYPES[r.dtype].numpy))
                for r in self.spec.results
            ),
            output_mask=self.spec.output_mask,
            launches=self.stream_call(call.rows) if call.rows else None,
        )

    def _bind(
        self,
        arrays: Mapping[str, Any],
        output_mask: tuple[bool, bool, bool] | None,
        eps: float | None,
    ) -> Call:
        """The arguments checked against each other, and against what this module computes."""
        for name, asked, ours in (
            ("output_mask", output_mask, self.spec.output_mask),
            ("eps", eps, self.spec.recompute_eps),
        ):
            if asked is not None and asked != ours:
                raise ValueError(f"{name}: this module was compiled for {ours}, got {asked}")
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

    def _shapes(self, call: Call) -> dict[str, tuple[int, ...]]:
        """Of the gradients, as the caller sees them."""
        return {
            result.name: call.shape if result.name == "grad_input" else self.spec.normalized_shape
            for result in self.spec.results
        }

    def _checked_storage(
        self,
        framework: Framework | None,
        out: LayerNormGrads,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> LayerNormGrads:
        """The caller's arrays for the gradients, as `interop.views` has them."""
        named = {f"out.{name}": array for name, array in out._asdict().items()}
        arrays = interop.views(framework, named)
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
            if isinstance(array, GpuArray):
                if not array.contiguous:
                    raise ValueError(f"{name}: expected a contiguous array")
                if array.device != str(self.device):
                    raise ValueError(f"{name}: expected one on {self.device}, got {array.device}")
            elif not array.flags.writeable:
                raise ValueError(f"{name}: expected an array that can be written")
        return LayerNormGrads(*arrays.values())

    def _expect(self, call: Call, *, bias_given: bool) -> None:
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


def load(path: str | os.PathLike[str], device: str = DEFAULT_DEVICE) -> LayerNormBackward:
    """Loads a compiled module on a device. Needs the runtime alone, no compiler.

    Args:
        path: The .vmfb (or the .json beside it). A .vmfb without its manifest is enough: it
            describes itself.
        device: IREE device URI: "local-task", "local-sync", "cuda", "hip", "cuda://1".

    Raises:
        ValueError: ``device`` is no such URI.
        ArtifactError: The file is missing, truncated, altered, or no module of this package.
        DeviceError: The device is absent or not the kind that the module is for.
    """
    uri = DeviceUri.parse(device)
    vmfb, manifest = artifact.read(path)
    module = describe(vmfb, source=str(path))
    target = module.target
    if manifest is not None and (
        (manifest.spec, manifest.target, manifest.schedule, manifest.host_cpu)
        != (module.spec, target.name, module.schedule, module.host_cpu)
    ):
        raise ArtifactError(f"{path}: the manifest describes another module than the .vmfb holds")
    if target.backend != uri.backend:
        raise DeviceError(
            f"device: {path} was compiled for {target.name} ({target.backend}), got {uri}"
        )
    _check_host_cpu(module, Path(path).name)
    return LayerNormBackward(module, uri, vmfb)


def load_built(vmfb: bytes, device: str = DEFAULT_DEVICE) -> LayerNormBackward:
    """As `load`, for a module in memory."""
    module = describe(vmfb, source="module")
    _check_host_cpu(module, module.spec.name)
    return LayerNormBackward(module, DeviceUri.parse(device), vmfb)


def probe(device: DeviceUri) -> None:
    """Opens a device.

    Raises:
        DeviceError: It is absent.
    """
    open_device(device)


def _check_host_cpu(module: Description, name: str) -> None:
    if module.host_cpu not in (None, host_cpu()):
        raise DeviceError(
            f"device: {name} was compiled for the CPU {module.host_cpu}, this one is "
            f"{host_cpu()}; compile it here, or ship one for the target 'generic'"
        )


def _flat(argument: TensorType, rows: int) -> tuple[int, ...]:
    """Its shape, as the module sees it."""
    return tuple(rows if dim is None else dim for dim in argument.shape)


def _maker(
    framework: Framework,
    views: Mapping[str, Any],
    kind: tuple[tuple[int, ...], np.dtype[Any]],
) -> Callable[[Sequence[Any]], Any]:
    """What makes a gradient from the arguments of a call: like one of them, if one is alike."""
    for place, name in enumerate(_ARRAYS):
        if views[name] is not None and (views[name].shape, views[name].dtype) == kind:
            return lambda given: framework.empty_like(given[place])
    return lambda given: framework.empty(given[_INPUT], *kind)


def _misaligned(spec: LayerNormSpec, addresses: Sequence[int]) -> str:
    name = next(
        argument.name
        for argument, address in zip(spec.arguments, addresses, strict=False)
        if not are_aligned([address])
    )
    return (
        f"{name}: expected memory that begins at a multiple of {ACCESS_BYTES} bytes, got one that "
        "would have to be copied"
    )
