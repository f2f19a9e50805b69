"""The modules that answer calls: loaded once for each spec and device, wherever they come from."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple
from weakref import WeakValueDictionary

from iree_lnbwd import runtime
from iree_lnbwd.bundles import serving
from iree_lnbwd.errors import ArtifactError, CompileError
from iree_lnbwd.hardware.devices import DeviceUri, target_of
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime import Norm
from iree_lnbwd.runtime.gpu_module import KnownCall
from iree_lnbwd.stores import cache, tuned_choice

_LOADED_MODULES = 256

_Key = tuple[NormSpec, DeviceUri]
# A function that is told of each module that is about to be compiled.
Compiling = Callable[[NormSpec, Target], None]


class Modules(NamedTuple):
    """Where calls get their modules from.

    Attributes:
        load: The module for a spec on a device.
        known: Known kinds of call on a GPU; they are kept as long as their modules are loaded.
        missing: What there was no module for, of specs with strided rows: calls copy instead, and
            do not ask again. None where they always ask.
    """

    load: Callable[[NormSpec, DeviceUri], Norm]
    known: WeakValueDictionary[Hashable, KnownCall]
    missing: set[_Key] | None = None


_loading: dict[_Key, threading.RLock] = {}
_alive: WeakValueDictionary[_Key, Norm] = WeakValueDictionary()
_known: WeakValueDictionary[Hashable, KnownCall] = WeakValueDictionary()
# A thread that is loading does not exist in a forked process, and would never release its lock.
os.register_at_fork(after_in_child=_loading.clear)


@functools.lru_cache(maxsize=_LOADED_MODULES)
def loaded(spec: NormSpec, uri: DeviceUri, compiling: Compiling | None = None) -> Norm:
    """The module for a spec on a device: from memory, a bundle, the cache, or the compiler.

    The bundle is the one that ``$IREE_LNBWD_BUNDLE`` names, if any. What is not in it comes from
    the cache on disk or the compiler, with the schedule that was tuned on such a device, if any
    was, and otherwise the choice.

    Threads that need the same module wait for the first of them; if it fails, the next tries.

    Args:
        spec: What it computes.
        uri: The device.
        compiling: Is called if it has to be compiled.
    """
    key = (spec, uri)
    with _loading.setdefault(key, threading.RLock()):
        if (op := _alive.get(key)) is None:
            bundle = serving.named_by_user()
            op = None if bundle is None else serving.find(bundle, spec, uri)
            if op is None:
                try:
                    op = _compiled(spec, uri, compiling)
                except CompileError as error:
                    if bundle is None:
                        raise
                    said = serving.missing(bundle, spec, uri)
                    raise CompileError(f"{error}; {serving.VARIABLE}: {said}") from error
            _alive[key] = op
        return op


def _compiled(spec: NormSpec, uri: DeviceUri, compiling: Compiling | None) -> Norm:
    """As `loaded`, from the cache on disk or the compiler."""
    planned = entry(spec, uri)
    if planned.can_be_compiled and compiling is not None:
        compiling(spec, target_of(uri))
    vmfb, _ = planned.build()
    return runtime.load_built(vmfb, str(uri))


def entry(spec: NormSpec, uri: DeviceUri) -> cache.Entry:
    """What the cache knows of the module that a device gets, if no bundle has one.

    Raises:
        DeviceError: The device is absent, or no target fits it.
    """
    target = target_of(uri)
    return cache.Entry(spec, target, tuned_choice.for_device(spec, target, uri))


class Origin(NamedTuple):
    """Where a module comes from.

    Attributes:
        target: What it was compiled for.
        schedule: Where its schedule comes from, in words; or the bundle that the module is in.
    """

    target: str
    schedule: str


def origin(spec: NormSpec, uri: DeviceUri) -> Origin:
    """Where `loaded` takes the module for a spec from, on a device.

    Raises:
        ArtifactError, CompileError, DeviceError: As calls.
    """
    bundle = serving.named_by_user()
    found = None if bundle is None else serving.find(bundle, spec, uri)
    if bundle is not None and found is not None:
        return Origin(found.target, f"that of the bundle {bundle.path}")
    _, manifest = entry(spec, uri).build()
    return Origin(manifest.target, manifest.schedule_source)


_missing: set[_Key] = set()
MODULES = Modules(loaded, _known, _missing)


def there() -> tuple[str, ...]:
    """The names of the modules that calls find without a compiler."""
    try:
        bundle = serving.named_by_user()
    except ArtifactError:  # calls say so
        bundle = None
    members = () if bundle is None else tuple(member.name for member in bundle.members)
    return (*members, *cache.written())


def telling(compiling: Compiling) -> Modules:
    """`MODULES`, which tell of each that has to be compiled."""
    return MODULES._replace(load=functools.partial(loaded, compiling=compiling))


def forget(specs: Collection[NormSpec], uri: DeviceUri) -> None:
    """Lets go of loaded modules, so that the next calls load them anew; running calls go on."""
    loaded.cache_clear()
    for spec in specs:
        _alive.pop((spec, uri), None)
        _missing.discard((spec, uri))
    for key, known in tuple(_known.items()):
        if known.module.spec in specs:
            _known.pop(key, None)


def in_use() -> tuple[tuple[NormSpec, DeviceUri], ...]:
    """What this process has modules for, and on which devices."""
    return tuple(_alive)
