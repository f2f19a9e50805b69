"""A bundle on a device, which answers calls: of what is in it, only what they need is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from iree_lnbwd import functional
from iree_lnbwd.arguments import (
    DEFAULT_EPS,
    LayerNormGrads,
    NormOutput,
    Results,
    RmsNormGrads,
    check_options,
    named_gradients,
    variant,
)
from iree_lnbwd.bundles import serving
from iree_lnbwd.bundles.container import BundleFile
from iree_lnbwd.bundles.index import Member
from iree_lnbwd.devices import DEFAULT_DEVICE, DeviceUri, target_of
from iree_lnbwd.errors import ArtifactError, shown
from iree_lnbwd.operands import (
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    Op,
    names,
)
from iree_lnbwd.runtime import Norm
from iree_lnbwd.spec import NormSpec


def load_bundle(path: str | os.PathLike[str], device: str = DEFAULT_DEVICE) -> Bundle:
    """Opens a bundle for a device. This needs only the runtime, no compiler.

    Args:
        path: The file that `bundle` wrote. Only its index is read now.
        device: As `load`.

    Raises:
        TypeError, ValueError: ``path`` is no path, or ``device`` no such URI.
        ArtifactError: The file is missing, truncated, altered, or no bundle.
        DeviceError: The device is absent, or no target fits it.
    """
    uri = DeviceUri.parse(device)
    file = BundleFile(path)
    target_of(uri)
    return Bundle(file, uri)


class Bundle:
    """The norms of a bundle on a device: functions that compile nothing.

    Its functions are those of `iree_lnbwd`, without ``device``. A call is answered by the member
    for exactly its spec: op, ``normalized_shape``, element types, options and mask. Of several that
    the device runs, it takes the best (``bundles.choosing.ranked``), and reads it at the first such
    call. Where there is none, an `ArtifactError` has the command that adds it.

    Any number of threads may call.

    Attributes:
        file: The bundle.
        device: Where it runs.
    """

    def __init__(self, file: BundleFile, device: DeviceUri) -> None:
        """Use `load_bundle`, which checks its arguments."""
        self.file = file
        self.device = device
        self._loaded: dict[NormSpec, Norm] = {}
        self._modules = functional.Modules(lambda spec, _: self.module(spec), WeakValueDictionary())

    @property
    def members(self) -> tuple[Member, ...]:
        """What is in the bundle, for any device."""
        return self.file.members

    def module(self, spec: NormSpec) -> Norm:
        """The loaded module for a spec.

        Raises:
            TypeError: It is no spec.
            ArtifactError: No member that the device runs computes it, or that member is damaged.
            DeviceError: The device does not take the member.
        """
        if not isinstance(spec, NormSpec):
            raise TypeError(f"spec: expected a NormSpec, got {shown(spec)}")
        if (norm := self._loaded.get(spec)) is None:
            norm = serving.find(self.file, spec, self.device)
            if norm is None:
                raise ArtifactError(serving.missing(self.file, spec, self.device))
            norm = self._loaded.setdefault(spec, norm)  # of several threads, the first counts
        return norm

    def layer_norm(
        self,
        input: Any,
        normalized_shape: int | Sequence[int],
        weight: Any = None,
        bias: Any = None,
        eps: float = DEFAULT_EPS,
        *,
        residual: Any = None,
        weight_offset: float = 0.0,
    ) -> NormOutput:
        """As `iree_lnbwd.layer_norm`."""
        given = {"input": input, "residual": residual, "weight": weight, "bias": bias}
        results = self._call(LAYER_NORM, given, normalized_shape, (), eps, weight_offset)
        return results  # type: ignore[return-value]

    def rms_norm(
        self,
        input: Any,
        normalized_shape: int | Sequence[int],
        weight: Any = None,
        eps: float | None = None,
        *,
        residual: Any = None,
        weight_offset: float = 0.0,
    ) -> NormOutput:
        """As `iree_lnbwd.rms_norm`."""
        given = {"input": input, "residual": residual, "weight": weight}
        results = self._call(RMS_NORM, given, normalized_shape, (), eps, weight_offset)
        return results  # type: ignore[return-value]

    def layer_norm_backward(
        self,
        grad_output: Any,
        input: Any,
        normalized_shape: int | Sequence[int],
        mean: Any = None,
        rstd: Any = None,
        weight: Any = None,
        bias: Any = None,
        output_mask: tuple[bool, bool, bool] = (True, True, True),
        *,
        eps: float = DEFAULT_EPS,
        grad_residual: Any = None,
        output: Any = None,
        weight_offset: float = 0.0,
    ) -> LayerNormGrads:
        """As `iree_lnbwd.layer_norm_backward`."""
        op = variant(LAYER_NORM_BACKWARD, input, output, mean, rstd)
        given = {
            **named_gradients(grad_output),
            "input": input,
            "mean": mean,
            "rstd": rstd,
            "weight": weight,
            "bias": bias,
            "grad_residual": grad_residual,
            "output": output,
        }
        results = self._call(op, given, normalized_shape, output_mask, eps, weight_offset)
        return results  # type: ignore[return-value]

    def rms_norm_backward(
        self,
        grad_output: Any,
        input: Any,
        normalized_shape: int | Sequence[int],
        rstd: Any = None,
        weight: Any = None,
        output_mask: tuple[bool, bool] = (True, True),
        *,
        eps: float | None = None,
        grad_residual: Any = None,
        output: Any = None,
        weight_offset: float = 0.0,
    ) -> RmsNormGrads:
        """As `iree_lnbwd.rms_norm_backward`."""
        op = variant(RMS_NORM_BACKWARD, input, output, None, rstd)
        given = {
            **named_gradients(grad_output),
            "input": input,
            "rstd": rstd,
            "weight": weight,
            "grad_residual": grad_residual,
            "output": output,
        }
        results = self._call(op, given, normalized_shape, output_mask, eps, weight_offset)
        return results  # type: ignore[return-value]

    def _call(
        self,
        op: Op,
        given: Mapping[str, Any],
        normalized_shape: int | Sequence[int],
        output_mask: Sequence[bool],
        eps: float | None,
        weight_offset: float,
    ) -> Results:
        options = check_options(op, normalized_shape, output_mask, eps, weight_offset)
        arrays = tuple(given[name] for name in names(op.arguments))
        return functional.call(arrays, options, self.device, self._modules)[0]
