"""The module of a bundle for a spec on a device, loaded; or what is missing, and how to add it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path

from iree_lnbwd.bundles import choosing, commands
from iree_lnbwd.bundles.container import BundleFile
from iree_lnbwd.bundles.index import Member
from iree_lnbwd.errors import ArtifactError
from iree_lnbwd.hardware.devices import DeviceUri, target_of
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime import Norm
from iree_lnbwd.runtime.loading import load_opened, shared_bytes
from iree_lnbwd.vmfb.description import open_module

VARIABLE = "IREE_LNBWD_BUNDLE"


def find(
    file: BundleFile, spec: NormSpec, uri: DeviceUri, only: Target | None = None
) -> Norm | None:
    """The best member for a spec on a device, loaded; None if there is none that it runs.

    Args:
        file: The bundle.
        spec: What to compute.
        uri: The device.
        only: Take a member for this target, and no other.

    Raises:
        ArtifactError: The member is damaged.
        DeviceError: The device is absent, or does not take the member.
    """
    for member in choosing.ranked(_members(file, spec, only), uri):
        if why_not(file, member, uri) is None:
            return load(file, member, uri)
    return None


def load(file: BundleFile, member: Member, uri: DeviceUri) -> Norm:
    """A member on a device.

    Raises:
        ArtifactError: It is damaged.
        DeviceError: The device is absent, or does not take it.
    """
    vmfb, manifest = file.read(member)
    path = file.path / f"{member.name}.vmfb"
    return load_opened(open_module(vmfb, source=str(path)), manifest, path, uri)


def why_not(file: BundleFile, member: Member, uri: DeviceUri) -> str | None:
    """Why a device does not run a member, in words; None if it does.

    Raises:
        ArtifactError: It is damaged.
        DeviceError: The device is absent, or no target fits it.
    """
    if (why := choosing.why_not(member, uri)) is not None:
        return why
    has = target_of(uri).shared_bytes
    if member.target.shared_bytes > has:  # an older GPU that has more
        vmfb, _ = file.read(member)
        if (needed := shared_bytes(vmfb)) > has:
            return f"it needs {needed} bytes of shared memory for a workgroup, this GPU has {has}"
    return None


def read(file: BundleFile, spec: NormSpec, target: Target) -> bytes:
    """The module for a spec and a target, or for one of its products, whatever runs it.

    Raises:
        ArtifactError: There is none, or it is damaged.
    """
    for member in _members(file, spec, target):
        return file.read(member)[0]
    raise ArtifactError(_missing(file, spec, target, f"for {target.name}"))


def missing(file: BundleFile, spec: NormSpec, uri: DeviceUri, only: Target | None = None) -> str:
    """The message where `find` found nothing.

    Raises:
        DeviceError: The device is absent, or no target fits it.
    """
    target = only or choosing.target_to_ship(uri)
    reasons = [
        f"that for {member.made_for} does not run: {why}"
        for member in _members(file, spec, only)
        if member.target.backend == uri.backend and (why := why_not(file, member, uri)) is not None
    ]
    return _missing(file, spec, target, f"that {uri} runs", reasons)


def _missing(
    file: BundleFile, spec: NormSpec, target: Target, which: str, reasons: Iterable[str] = ()
) -> str:
    others = ", ".join(member.made_for for member in _members(file, spec, None))
    there = f"there is one for {others}" if others else "there is none for any target"
    return (
        f"{file.path}: no module of {spec.name} {which} ({'; '.join((there, *reasons))}); this "
        f"adds it: {commands.adding(spec, target.name, file.path)}"
    )


def _members(file: BundleFile, spec: NormSpec, only: Target | None) -> list[Member]:
    return [m for m in file.members if m.spec == spec and only in (None, m.target)]


def named_by_user() -> BundleFile | None:
    """The bundle that ``$IREE_LNBWD_BUNDLE`` names, if it names one; a process opens it once.

    Raises:
        ArtifactError: It is missing, damaged or no bundle.
    """
    named = os.environ.get(VARIABLE)
    return _opened(Path(named)) if named else None


@functools.lru_cache(maxsize=4)
def _opened(path: Path) -> BundleFile:
    try:
        return BundleFile(path)
    except ArtifactError as error:
        raise ArtifactError(f"{VARIABLE}: {error}") from error
