"""Which members of a bundle run on a device, and which of them is the best."""

from __future__ import annotations

from collections.abc import Iterable

from iree_lnbwd.bundles.index import Member
from iree_lnbwd.hardware.devices import DeviceUri, cpu_features, gpu_of, host_cpu, target_of
from iree_lnbwd.hardware.products import product_of_device
from iree_lnbwd.hardware.targets import TARGETS, Target, generic_targets
from iree_lnbwd.stores.cache import standing_in

_NO_RANK = len(TARGETS)


def ranked(members: Iterable[Member], uri: DeviceUri) -> tuple[Member, ...]:
    """The members that a device runs, the best first.

    A CPU takes a module for "host", if it was compiled on such a CPU, before those for any CPU, of
    which it takes that with the most features first. A GPU takes modules for its own target before
    those for older ones, and among those for one target, that for the very product, that for the
    target, and those for other products. The last are those for older GPUs with more shared memory:
    they run if they do not need that much.

    Raises:
        DeviceError: The device is absent, or no target fits it.
    """
    here = target_of(uri)
    fitting = [member for member in members if _why_not(member, here) is None]
    named = any(member.made_for != member.target.name for member in fitting)
    product = _product(uri) if named else None

    def rank(member: Member) -> tuple[int, int, int, str]:
        target, name = member.target, member.made_for
        order = [other.name for other in (here, *standing_in(here))]
        place = order.index(target.name) if target.name in order else _NO_RANK
        return place, -target.capability, (product, target.name, name).index(name), name

    return tuple(sorted(fitting, key=rank))


def why_not(member: Member, uri: DeviceUri) -> str | None:
    """Why a device does not run a member, in words; None if it does.

    Raises:
        DeviceError: The device is absent, or no target fits it.
    """
    return _why_not(member, target_of(uri))


def target_to_ship(uri: DeviceUri) -> Target:
    """The target to compile for, for machines like this: not for this very CPU, if that can be.

    Raises:
        DeviceError: The device is absent, or no target fits it.
    """
    here = target_of(uri)
    return next(iter(generic_targets(here.architecture)), here) if here.is_this_cpu else here


def _why_not(member: Member, here: Target) -> str | None:
    """Why machines of a target do not run a member.

    Args:
        member: The member.
        here: The best target for the device.
    """
    target = member.target
    if target.backend != here.backend:
        return f"it is for {target.name}, this device is {here.name}"
    if target.is_this_cpu:
        same = member.host_cpu == host_cpu()
        return None if same else f"it is for the CPU {member.host_cpu}, this one is {host_cpu()}"
    if target.backend == "cpu":
        if target.architecture != here.architecture:
            return f"it is for {target.architecture} CPUs, this one is {here.architecture}"
        lacking = set(target.cpu_features) - set(cpu_features())
        return f"this CPU has no {' and no '.join(sorted(lacking))}" if lacking else None
    if target == here or 0 < target.capability < here.capability:
        return None
    return f"it is for {target.name}, this GPU is {here.name}"


def _product(uri: DeviceUri) -> str | None:
    """The name of a GPU's product, if it is known."""
    gpu = gpu_of(uri)
    try:
        return product_of_device(gpu.name, gpu.processors).name
    except ValueError:
        return None
