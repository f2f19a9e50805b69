"""Modules that cannot be had: PyTorch's operators compute in their place, which is logged."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from iree_lnbwd import notices
from iree_lnbwd.calls import modules
from iree_lnbwd.calls.modules import Compiling
from iree_lnbwd.compiling import iree_compile
from iree_lnbwd.errors import ArtifactError, CompileError, DeviceError, one_line
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime import Norm

_log = logging.getLogger(__package__)


class _Calls(threading.local):
    number = 0
    asked: list[NormSpec] | None = None  # while they are only recorded


class Refusals:
    """The modules of this process that could not be had. Any number of threads may call."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[NormSpec, DeviceUri], str] = {}
        self._told: set[str] = set()
        self._computed = _Calls()

    def load(self, spec: NormSpec, uri: DeviceUri, compiling: Compiling) -> Norm:
        """`modules.loaded`, which is not asked again for what it did not have.

        Raises:
            CompileError: There is no such module.
        """
        if self._computed.asked is not None:
            self._computed.asked.append(spec)
            raise CompileError("modules are only asked for")
        key = (spec, uri)
        if (reason := self._reasons.get(key)) is not None:
            raise CompileError(reason)
        try:
            return modules.loaded(spec, uri, compiling)
        except CompileError as error:
            self._reasons[key] = str(error)
            raise

    def expects(self, spec: NormSpec, uri: DeviceUri, compiling: Compiling) -> bool:
        """Whether a call may find a module. Where there is no compiler, it is loaded now."""
        if (spec, uri) in self._reasons:
            return False
        if iree_compile.is_installed():
            return True
        with contextlib.suppress(ArtifactError, DeviceError):  # the call says so
            try:
                self.load(spec, uri, compiling)
            except CompileError:
                return False
        return True

    def say(self, spec: NormSpec, uri: DeviceUri) -> None:
        """Tells why there is no module that was not expected."""
        if (reason := self._reasons.get((spec, uri))) is not None:
            self._tell(CompileError(reason))

    def count(self, error: CompileError) -> None:
        """Counts a call that PyTorch's operators compute; a new reason is told."""
        if self._computed.asked is not None:
            return
        self._computed.number += 1
        self._tell(error)

    def _tell(self, error: CompileError) -> None:
        reason = one_line(error)
        if reason not in self._told:
            self._told.add(reason)
            notices.log(_log, "PyTorch's operators compute norms without a module: %s", reason)

    @contextlib.contextmanager
    def asked(self) -> Iterator[list[NormSpec]]:
        """A block in which this thread loads no module; what it would load, in order."""
        asked: list[NormSpec] = []
        before, self._computed.asked = self._computed.asked, asked
        try:
            yield asked
        finally:
            self._computed.asked = before

    @property
    def number(self) -> int:
        """How many calls of this thread PyTorch's operators have computed."""
        return self._computed.number

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why modules could not be had, without those in whose place a call copies."""
        reasons = self._reasons.items()
        return tuple(reason for (spec, _), reason in reasons if not spec.strided_rows)

    def forget(self) -> None:
        """Modules are asked for again, and reasons told again."""
        self._reasons.clear()
        self._told.clear()


REFUSALS = Refusals()
