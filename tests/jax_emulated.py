"""An emulated GPU that XLA takes the CPU for, for the custom call of `iree_lnbwd.jax`.

Arrays are in the host's memory. For a GPU, nothing but the driver, the stream and the name of the
first stage differs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from native_driver import NativeDriver
from support import built, without_few_rows

from iree_lnbwd import NormSpec, runtime
from iree_lnbwd.calls import modules
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.jax import native as jax_native
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.runtime import gpu_module

NAME = "iree_lnbwd_emulated"  # beside the custom call of the CPU


class EmulatedGpu:
    """The GPU.

    Attributes:
        driver: Its driver.
        loaded: The specs whose modules were loaded.
        platforms: `jax_native.platforms`, which says "cuda" for it.
    """

    def __init__(self, *, has_graphs: bool) -> None:
        self.driver = NativeDriver(has_graphs=has_graphs)
        self.loaded: list[NormSpec] = []
        self.platforms = jax_native.platforms

    def load(self, spec: NormSpec, uri: Any, compiling: Any) -> Any:
        """As `modules.loaded`."""
        assert uri.driver == "cuda"
        self.loaded.append(spec)
        target = find_target("sm_90")
        vmfb, _ = built(spec, target, without_few_rows(spec, target))
        norm = runtime.load_built(vmfb, "cuda")
        launches = norm.launches

        def known(rows: int, sets: Sets | None = None) -> Any:
            sequence = launches(rows, sets)
            sizes = {
                each.name: math.prod(each.dims(rows, sets)) * DTYPES[each.dtype].numpy.itemsize
                for each in spec.arguments
            }
            self.driver.knows(sequence, sizes)
            return sequence

        norm.launches = known  # type: ignore[method-assign]
        return norm

    def forget(self) -> None:
        """As in a new process: no module is loaded, and C++ knows no call."""
        jax_native.load().iree_lnbwd_jax_forget()
        jax_native._module.cache_clear()
        jax_native._are_on.cache_clear()
        jax_native._graphs.clear()
        jax.clear_caches()
        self.loaded.clear()


@contextmanager
def emulated_gpu(*, has_graphs: bool = False) -> Iterator[EmulatedGpu]:
    """Has `iree_lnbwd.jax` run on an emulated GPU for the length of a block."""
    found = EmulatedGpu(has_graphs=has_graphs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_module, "Driver", lambda uri: found.driver)
        patch.setattr(modules, "loaded", found.load)
        patch.setattr(jax_native, "TARGET", NAME)
        patch.setattr(jax_native, "_is_registered", lambda platform: True)
        patch.setattr(jax_native, "_gpus", lambda: (DeviceUri("cuda", 0),))
        patch.setattr(jax_native, "platforms", lambda _, rows: ("cpu",) if rows else ())
        _register()
        found.forget()
        with jax.default_device(jax.devices("cpu")[0]):  # there may be a GPU
            yield found
        found.forget()
    assert not found.driver.errors


@functools.cache
def _register() -> None:
    library = jax_native.load()
    prepare, run = library.iree_lnbwd_jax_prepare_on_host, library.iree_lnbwd_jax_on_host
    jax_native.register("cpu", {"instantiate": prepare, "execute": run})
