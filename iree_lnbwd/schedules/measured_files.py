"""The files of measurements: one for each product that was measured, read when needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from iree_lnbwd.disk import files
from iree_lnbwd.hardware.products import Product, lenders
from iree_lnbwd.schedules.measured import Key, Measurement, Run, merged
from iree_lnbwd.schedules.measured_csv import from_text, to_text
from iree_lnbwd.schedules.one_pass import OnePass

DATA = Path(__file__).parent / "data"  # the package's own files

_MOST_BYTES = 1 << 24  # of such a file, thousands of times its real size: a rule of thumb


@functools.cache
def fastest(product: str) -> Mapping[Key, OnePass]:
    """The schedules that were measured on a product, if any.

    Raises:
        OSError: The package's file of the product cannot be read.
        ValueError: It is damaged; the message names the file and the line.
    """
    return MappingProxyType({m.key: m.schedule for m in _measurements(product)})


@functools.cache
def shares(product: Product) -> Mapping[Key, float]:
    """What the schedules of `serving` reached where they were measured, as shares of its ceiling.

    Raises:
        OSError, ValueError: As `fastest`.
    """
    found: dict[Key, float] = {}
    for one in lenders(product):
        for m in _measurements(one.name):
            found.setdefault(m.key, m.share)
    return MappingProxyType(found)


@functools.cache
def serving(product: Product) -> Mapping[Key, OnePass]:
    """The measured schedules to choose from for a product.

    They are its own and, where it has none of a kind, those of the nearest of its `lenders`. If the
    numbers of processors differ, each processor gets as many workgroups as there.

    Raises:
        OSError, ValueError: As `fastest`.
    """
    known: dict[Key, OnePass] = {}
    for other in lenders(product):
        for key, one in fastest(other.name).items():
            known.setdefault(key, _spread(one, key, other, product))
    return MappingProxyType(known)


@functools.cache
def _measurements(product: str) -> tuple[Measurement, ...]:
    return tuple(m for run in read(DATA, product) for m in run.measurements)


def read(folder: Path, product: str) -> tuple[Run, ...]:
    """The measurements of a product in a folder; none if it has no file of the product.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged; the message names the file and the line.
    """
    path = _path(folder, product)
    try:
        text = files.read(path, most=_MOST_BYTES).decode()
    except FileNotFoundError:
        return ()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text: {error}") from error
    return from_text(text, product, str(path))


def merge(folder: Path, product: str, run: Run) -> Path:
    """Adds a run to a folder's file of a product; the file changes completely or not at all.

    Args:
        folder: `DATA`, or one like it.
        product: Name of the product that it was measured on.
        run: The run; its measurements replace those in the file of the same keys.

    Returns:
        The file.

    Raises:
        OSError: The file cannot be read or written.
        ValueError: The file is damaged; the message names the file and the line.
    """
    path = _path(folder, product)
    runs = merged(read(folder, product), run)
    files.write({path: to_text(product, runs).encode()})
    return path


def _spread(one: OnePass, key: Key, measured: Product, product: Product) -> OnePass:
    if measured.processors == product.processors:
        return one
    return one.all_at_once(key.columns, product)


def _path(folder: Path, product: str) -> Path:
    return folder / f"{product}.csv"
