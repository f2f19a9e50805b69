"""Runs a module: loads it on a device, hands it the caller's arrays, returns the gradients."""

from __future__ import annotations

import io
import json
import os
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import iree.runtime as rt
import numpy as np
from iree.runtime.dtypes import map_dtype_to_hal_element_type

from iree_lnbwd import artifact, dtypes
from iree_lnbwd.arguments import Array, Call, LayerNormGrads, bind
from iree_lnbwd.artifact import Manifest
from iree_lnbwd.devices import DEFAULT_DEVICE, DeviceUri, host_cpu
from iree_lnbwd.errors import ZIP_ERRORS, ArtifactError, DeviceError
from iree_lnbwd.schedule import Schedule
from iree_lnbwd.schedule import from_dict as schedule_from_dict
from iree_lnbwd.spec import ENTRY, GRADIENTS, LayerNormSpec, TensorType
from iree_lnbwd.targets import Target, find_target

# What IREE's CPU code may assume of a buffer (IREE_HAL_HEAP_BUFFER_ALIGNMENT); an aligned load
# from less than that ends the process.
_ALIGNMENT = 64


class _Buffer(NamedTuple):
    """An array as a device sees it.

    Attributes:
        view: What the module gets.
        array: The host's side. Where it is the memory behind ``view``, nothing else keeps it.
    """

    view: rt.HalBufferView
    array: Array


class _Memory(Protocol):
    """How arrays get to a device and back."""

    def send(self, array: Array) -> _Buffer:
        """A buffer with the array's content."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Buffer:
        """A buffer for a result."""

    def receive(self, buffer: _Buffer) -> Array:
        """The buffer's content on the host."""


class _HostMemory:
    """The CPU sees the arrays where they are; only misaligned or read-only ones are copied."""

    def __init__(self, device: rt.HalDevice) -> None:
        self._device = device

    def send(self, array: Array) -> _Buffer:
        if array.ctypes.data % _ALIGNMENT == 0 and array.flags.writeable:
            return self._import(array)
        aligned = _aligned_empty(array.shape, array.dtype)
        np.copyto(aligned, array)
        return self._import(aligned)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Buffer:
        return self._import(_aligned_empty(shape, dtype))

    def receive(self, buffer: _Buffer) -> Array:
        return buffer.array

    def _import(self, array: Array) -> _Buffer:
        buffer = self._device.allocator.import_host_allocation(
            array,
            memory_type=int(rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE),
            allowed_usage=int(rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING),
        )
        return _Buffer(_view(buffer, array.shape, array.dtype), array)


class _DeviceMemory:
    """A GPU gets copies in its own memory."""

    def __init__(self, device: rt.HalDevice) -> None:
        self._device = device

    def send(self, array: Array) -> _Buffer:
        view = self._device.allocator.allocate_buffer_copy(
            memory_type=rt.MemoryType.DEVICE_LOCAL,
            allowed_usage=rt.BufferUsage.DEFAULT,
            device=self._device,
            buffer=array,
            element_type=map_dtype_to_hal_element_type(array.dtype),
        )
        return _Buffer(view, array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Buffer:
        array = np.empty(shape, dtype)
        buffer = self._device.allocator.allocate_buffer(
            memory_type=rt.MemoryType.DEVICE_LOCAL,
            allowed_usage=rt.BufferUsage.DEFAULT,
            allocation_size=array.nbytes,
        )
        return _Buffer(_view(buffer, shape, dtype), array)

    def receive(self, buffer: _Buffer) -> Array:
        received: Array = rt.DeviceArray(self._device, buffer.view).to_host()
        return received


class Description(NamedTuple):
    """What a module says of itself, without its manifest."""

    spec: LayerNormSpec
    target: Target
    schedule: Schedule


class LayerNormBackward:
    """A module on a device: call it with the arrays, get the gradients.

    Calls from several threads take turns.

    Attributes:
        spec: What it computes.
        target: Name of the target that it was compiled for.
        device: Where it runs.
    """

    def __init__(self, spec: LayerNormSpec, target: str, device: DeviceUri, vmfb: bytes) -> None:
        """Use `load`, which checks what it is given."""
        self.spec = spec
        self.target = target
        self.device = device
        self._lock = threading.Lock()
        instance = rt.VmInstance()
        hal_device = _open_device(device)
        module = _open_module(instance, vmfb, source=spec.name)
        memory = _HostMemory if device.backend == "cpu" else _DeviceMemory
        self._memory: _Memory = memory(hal_device)
        try:
            hal_module = rt.create_hal_module(instance, hal_device)
            self._context = rt.VmContext(instance, modules=[hal_module, module])
        except RuntimeError as error:
            raise DeviceError(
                f"device: {device} cannot run this module for {target}: {_reason(error)}"
            ) from error
        self._function = module.lookup_function(ENTRY)

    def __call__(
        self,
        grad_output: Array,
        input: Array,
        mean: Array | None = None,
        rstd: Array | None = None,
        weight: Array | None = None,
        bias: Array | None = None,
        output_mask: tuple[bool, bool, bool] | None = None,
        *,
        eps: float | None = None,
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

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected.
        """
        for name, asked, ours in (
            ("output_mask", output_mask, self.spec.output_mask),
            ("eps", eps, self.spec.recompute_eps),
        ):
            if asked is not None and asked != ours:
                raise ValueError(f"{name}: this module was compiled for {ours}, got {asked}")
        if (mean is None) != (self.spec.recompute_eps is not None):
            raise ValueError(
                "mean: this module "
                + ("takes mean and rstd, got None" if mean is None else "recomputes mean and rstd")
            )
        call = bind(
            grad_output,
            input,
            self.spec.normalized_shape,
            mean,
            rstd,
            weight,
            bias,
            self.spec.output_mask,
            self.spec.recompute_eps or 0.0,
        )
        self._expect(call, bias_given=bias is not None)
        return self.run(call)

    def run(self, call: Call) -> LayerNormGrads:
        """Computes a call that `arguments.bind` has checked and that is for this spec."""
        if call.rows == 0:
            return _of_no_rows(self.spec, call.shape)
        results = self.spec.results
        sent = [self._memory.send(call.arrays[given.name]) for given in self.spec.inputs]
        received = [
            self._memory.empty(_shape(result, call.rows), dtypes.DTYPES[result.dtype].numpy)
            for result in results
        ]
        arguments = rt.VmVariantList(len(sent) + len(received))
        for buffer in (*sent, *received):
            arguments.push_ref(buffer.view)
        with self._lock:
            self._context.invoke(self._function, arguments, rt.VmVariantList(len(results)))
        gradients = {
            result.name: self._memory.receive(buffer)
            for result, buffer in zip(results, received, strict=True)
        }
        return _as_grads(self.spec, gradients, call.shape)

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
    spec, target, how = describe(vmfb, source=str(path))
    if manifest is not None and (
        (manifest.spec, manifest.target, manifest.schedule) != (spec, target.name, how)
    ):
        raise ArtifactError(f"{path}: the manifest describes another module than the .vmfb holds")
    if target.backend != uri.backend:
        raise DeviceError(
            f"device: {path} was compiled for {target.name} ({target.backend}), got {uri}"
        )
    _check_host_cpu(manifest, path)
    return LayerNormBackward(spec, target.name, uri, vmfb)


def load_built(vmfb: bytes, manifest: Manifest, device: str = DEFAULT_DEVICE) -> LayerNormBackward:
    """As `load`, for a module in memory."""
    return LayerNormBackward(manifest.spec, manifest.target, DeviceUri.parse(device), vmfb)


def probe(device: DeviceUri) -> None:
    """Opens a device and lets it go.

    Raises:
        DeviceError: It is absent.
    """
    _open_device(device)


def describe(vmfb: bytes, *, source: str) -> Description:
    """What a module says of itself.

    Args:
        vmfb: The module.
        source: Where it came from, for messages.

    Raises:
        ArtifactError: It is damaged or no module of this package.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:  # a .vmfb is a ZIP with checksums
            damaged = archive.testzip()
    except ZIP_ERRORS as error:
        raise ArtifactError(f"{source}: truncated, altered or not a .vmfb: {error}") from error
    if damaged is not None:
        raise ArtifactError(f"{source}: altered: the checksum of {damaged} does not match")
    module = _open_module(rt.VmInstance(), vmfb, source=source)
    if ENTRY not in module.function_names:
        raise ArtifactError(f"{source}: no module of iree-lnbwd: it has no function {ENTRY}")
    reflection: Mapping[str, str] = module.lookup_function(ENTRY).reflection
    try:
        return Description(
            LayerNormSpec.from_dict(json.loads(reflection["iree_lnbwd.spec"])),
            find_target(reflection["iree_lnbwd.target"]),
            schedule_from_dict(json.loads(reflection["iree_lnbwd.schedule"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{source}: no module of iree-lnbwd: {error}") from error


def _open_device(uri: DeviceUri) -> rt.HalDevice:
    try:
        return rt.get_driver(uri.driver).create_device_by_uri(str(uri))
    except (RuntimeError, ValueError) as error:
        raise DeviceError(f"device: {uri} is absent: {_reason(error)}") from error


def _open_module(instance: rt.VmInstance, vmfb: bytes, *, source: str) -> rt.VmModule:
    try:
        return rt.VmModule.copy_buffer(instance, vmfb)
    except (RuntimeError, ValueError) as error:
        raise ArtifactError(f"{source}: truncated or altered: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """IREE's status message without its file names: "CODE; what happened"."""
    first_line = str(error).strip().splitlines()[0]
    return first_line.rsplit(".c:", 1)[-1].split(";", 1)[-1].strip()[:300]


def _check_host_cpu(manifest: Manifest | None, path: str | os.PathLike[str]) -> None:
    if manifest is not None and manifest.host_cpu not in (None, host_cpu()):
        raise DeviceError(
            f"device: {Path(path).name} was compiled for the CPU {manifest.host_cpu}, this one is "
            f"{host_cpu()}; compile it here, or ship one for the target 'generic'"
        )


def _view(buffer: rt.HalBuffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> rt.HalBufferView:
    return rt.HalBufferView(buffer, shape, map_dtype_to_hal_element_type(dtype))


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = int(np.prod(shape)) * dtype.itemsize
    storage = np.empty(size + _ALIGNMENT, np.uint8)
    start = -storage.ctypes.data % _ALIGNMENT
    return storage[start : start + size].view(dtype).reshape(shape)


def _shape(result: TensorType, rows: int) -> tuple[int, ...]:
    return tuple(rows if dim is None else dim for dim in result.shape)


def _of_no_rows(spec: LayerNormSpec, shape: tuple[int, ...]) -> LayerNormGrads:
    """An empty sum is zero."""
    zeros = {
        result.name: np.zeros(_shape(result, 0), dtypes.DTYPES[result.dtype].numpy)
        for result in spec.results
    }
    return _as_grads(spec, zeros, shape)


def _as_grads(
    spec: LayerNormSpec, gradients: Mapping[str, Array], shape: tuple[int, ...]
) -> LayerNormGrads:
    shapes = {"grad_input": shape}
    return LayerNormGrads(
        *(
            gradients[name].reshape(shapes.get(name, spec.normalized_shape))
            if name in gradients
            else None
            for name in GRADIENTS
        )
    )
