"""A .vmfb's description of itself, read from its bytes, without a manifest or a device."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import NamedTuple

import iree.runtime as rt

from iree_lnbwd.disk.json_values import parsed
from iree_lnbwd.errors import IREE_ERRORS, ArtifactError, one_line, reason, shown
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Schedule, schedule_from_dict
from iree_lnbwd.vmfb.launches import LaunchPlans
from iree_lnbwd.vmfb.raw_interface import DECLARATION


class Description(NamedTuple):
    """A module's description of itself.

    Attributes:
        spec: What it computes.
        target: The name of the target that it was compiled for.
        schedule: How it computes the spec.
        launches: The launches of its kernels, if a caller's stream can run them.
        host_cpu: The CPU that a module for "host" needs; None for other targets.
        name: Its name in IREE's runtime.
        declaration: Its function, as IREE's tools show it.
    """

    spec: NormSpec
    target: Target
    schedule: Schedule
    launches: LaunchPlans | None
    host_cpu: str | None
    name: str
    declaration: str


class OpenedModule(NamedTuple):
    """A module that was read and is not on a device yet.

    Attributes:
        description: What it says of itself.
        vmfb: Its bytes.
        instance: An instance of IREE's virtual machine; contexts with the module need it.
        module: The module in that instance.
    """

    description: Description
    vmfb: bytes
    instance: rt.VmInstance
    module: rt.VmModule


def describe(vmfb: bytes, *, source: str) -> Description:
    """What a module says of itself.

    Args:
        vmfb: The module.
        source: Where it came from, for messages.

    Raises:
        ArtifactError: It is damaged or no module of this package.
    """
    return open_module(vmfb, source=source).description


def open_module(vmfb: bytes, *, source: str) -> OpenedModule:
    """Checks a module's bytes and reads what it says of itself.

    Raises:
        ArtifactError: It is damaged or no module of this package.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:  # a .vmfb is a ZIP with checksums
            for info in archive.infolist():  # IREE maps its members, and compresses none
                if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(vmfb):
                    raise ValueError(f"{shown(info.filename)} is compressed")
            damaged = archive.testzip()
    except Exception as error:  # zipfile may raise anything on damaged files
        raise ArtifactError(
            f"{source}: truncated, altered or not a .vmfb: {one_line(error)}"
        ) from error
    if damaged is not None:
        raise ArtifactError(f"{source}: altered: the checksum of {shown(damaged)} does not match")
    instance = rt.VmInstance()
    module = vm_module(instance, vmfb, source=source)
    try:
        entries = [name for name in OPS if name in module.function_names]
        reflection: Mapping[str, str] = (
            module.lookup_function(entries[0]).reflection if len(entries) == 1 else {}
        )
    except IREE_ERRORS as error:
        raise ArtifactError(f"{source}: altered: {reason(error)}") from error
    if len(entries) != 1:
        raise ArtifactError(
            f"{source}: no module of iree-lnbwd: it has {len(entries) or 'no'} functions of "
            f"{', '.join(OPS)}"
        )
    launches = reflection.get("iree_lnbwd.launches")
    try:
        spec = NormSpec.from_dict(parsed(reflection["iree_lnbwd.spec"]))
        if spec.op != entries[0]:
            raise ValueError(f"it computes {spec.op} in a function {entries[0]}")
        target = find_target(reflection["iree_lnbwd.target"])
        description = Description(
            spec,
            target,
            schedule_from_dict(parsed(reflection["iree_lnbwd.schedule"])),
            None if launches is None else LaunchPlans.from_dict(parsed(launches), spec),
            reflection["iree_lnbwd.host_cpu"] if target.is_this_cpu else None,
            module.name,
            reflection.get(DECLARATION, ""),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{source}: no module of iree-lnbwd: {one_line(error)}") from error
    return OpenedModule(description, vmfb, instance, module)


def vm_module(instance: rt.VmInstance, vmfb: bytes, *, source: str) -> rt.VmModule:
    """A module as IREE's virtual machine has it.

    Raises:
        ArtifactError: It is damaged.
    """
    try:
        return rt.VmModule.copy_buffer(instance, vmfb)
    except IREE_ERRORS as error:
        raise ArtifactError(f"{source}: truncated or altered: {reason(error)}") from error
