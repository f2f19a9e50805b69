"""A bundle on a device, which answers calls: of what is in it, only what they need is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from iree_lnbwd.bundles import serving
from iree_lnbwd.bundles.container import BundleFile
from iree_lnbwd.bundles.index import Member
from iree_lnbwd.calls.calling import call
from iree_lnbwd.calls.modules import Modules
from iree_lnbwd.calls.norms import Norms
from iree_lnbwd.errors import ArtifactError, shown
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri, target_of
from iree_lnbwd.ops.arguments import Options, Results
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime import Norm


class Bundle(Norms):
    """The norms of a bundle on a device: functions that compile nothing, and need no compiler.

    Its functions are those of `iree_lnbwd`; ``device`` is None or the bundle's. A call is answered
    by the member for exactly its spec: op, ``normalized_shape``, element types, options and mask.
    Of several that the device runs, it takes the best (``bundles.choosing.ranked``), and reads it
    at the first such call. Where there is none, an `ArtifactError` has the command that adds it.

    Any number of threads may call.

    Attributes:
        file: The bundle.
        device: Where it runs.
    """

    def __init__(self, path: str | os.PathLike[str], device: str = DEFAULT_DEVICE) -> None:
        """Opens a bundle for a device.

        Args:
            path: The file that `bundle` wrote. Only its index is read now.
            device: As `load`.

        Raises:
            TypeError, ValueError: ``path`` is no path, or ``device`` no such URI.
            ArtifactError: The file is missing, truncated, altered, or no bundle.
            DeviceError: The device is absent, or no target fits it.
        """
        self.device = DeviceUri.parse(device)
        self.file = BundleFile(path)
        target_of(self.device)
        self._loaded: dict[NormSpec, Norm] = {}
        self._modules = Modules(lambda spec, _: self.module(spec), WeakValueDictionary(), set())

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

    def _compute(self, given: Sequence[Any], options: Options, device: str | None) -> Results:
        if device is not None and DeviceUri.parse(device) != self.device:
            raise ValueError(f"device: expected {self.device}, the bundle's, or None, got {device}")
        return call(given, options, self.device, self._modules)[0]
