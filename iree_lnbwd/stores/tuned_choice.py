"""What was tuned, where a module is about to be compiled: it comes before any other choice.

What cannot be used is not used: the choice without tuning is right, too. A folder or a file that is
there but cannot be read leads to a warning.
"""

from __future__ import annotations

from collections.abc import Callable

from iree_lnbwd import notices
from iree_lnbwd.disk.user_folders import UnusableError
from iree_lnbwd.errors import CompileError
from iree_lnbwd.hardware.devices import DeviceUri, gpu_of
from iree_lnbwd.hardware.products import Product, product_of_device
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.stores import tuned_folder
from iree_lnbwd.stores.tuned import Tuned, subject, why_stale


def for_device(spec: NormSpec, target: Target, uri: DeviceUri) -> Tuned | None:
    """What was tuned for a spec on a GPU of this machine, if it still holds.

    Raises:
        DeviceError: The GPU is absent.
    """
    return _usable(spec, target, lambda norm: tuned_folder.find(norm, target, gpu_of(uri)))


def for_product(spec: NormSpec, target: Target, product: Product) -> Tuned | None:
    """What was tuned for a spec on a GPU of exactly this product, if it still holds.

    A GPU that its driver names otherwise, or that has another number of processors, is another
    product. Of several names of a product, the last tuning counts.
    """

    def find(norm: NormSpec) -> Tuned | None:
        found = [
            tuned
            for tuned in tuned_folder.kept(lambda error: _warn(error))
            if (tuned.spec, tuned.target) == (norm, target.name) and _is_of(tuned, product)
        ]
        return max(found, key=lambda tuned: (tuned.date, tuned.gpu), default=None)

    return _usable(spec, target, find)


def _usable(
    spec: NormSpec, target: Target, find: Callable[[NormSpec], Tuned | None]
) -> Tuned | None:
    """What is found about a spec's subject, unless it is stale or cannot be read."""
    if target.backend == "cpu" or spec.rows is not None:  # such are not tuned
        return None
    try:
        if not tuned_folder.directory().is_dir():
            return None
    except UnusableError:  # the user has no such folder
        return None
    try:
        tuned = find(subject(spec))
        return None if tuned is None or why_stale(tuned) else tuned
    except CompileError:  # nothing can be compiled by it either
        return None
    except (UnusableError, ValueError) as error:
        _warn(error)
        return None


def _is_of(tuned: Tuned, product: Product) -> bool:
    try:
        return product_of_device(tuned.gpu, tuned.processors) == product
    except ValueError:
        return False


def _warn(error: Exception) -> None:
    notices.warn(f"tuned schedule not used: {error}")
