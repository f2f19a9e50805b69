"""Where measurements are kept: a file for each product that was measured, read when needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from iree_lnbwd import files
from iree_lnbwd.schedules.measured import Key, Run, merged
from iree_lnbwd.schedules.measured_json import from_text, to_text
from iree_lnbwd.schedules.one_pass import OnePass

DATA = Path(__file__).parent / "data"  # the package's own files

_MOST_BYTES = 1 << 24  # of such a file: thousands of times what it has; a rule of thumb


@functools.cache
def fastest(product: str) -> Mapping[Key, OnePass]:
    """The schedules that were measured on a product; none where nobody has.

    Raises:
        OSError: The package's file of it cannot be read.
        ValueError: It is damaged; the message names the file and the field.
    """
    found = {m.key: m.schedule for run in read(DATA, product) for m in run.measurements}
    return MappingProxyType(found)


def read(folder: Path, product: str) -> tuple[Run, ...]:
    """What a folder has of a product; nothing where it has no file of it.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged; the message names the file and the field.
    """
    path = _path(folder, product)
    try:
        text = files.read(path, most=_MOST_BYTES).decode()
    except FileNotFoundError:
        return ()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from error
    return from_text(text, product, str(path))


def merge(folder: Path, product: str, run: Run) -> Path:
    """Adds a run to a folder's file of a product, which is then there whole, or as it was.

    Args:
        folder: `DATA`, or one like it.
        product: Name of the product that it was measured on.
        run: What it measured replaces what the file says of that.

    Returns:
        The file.

    Raises:
        OSError: The file cannot be read or written.
        ValueError: What is there is damaged; the message names the file and the field.
    """
    path = _path(folder, product)
    runs = merged(read(folder, product), run)
    files.write({path: to_text(product, runs).encode()})
    return path


def _path(folder: Path, product: str) -> Path:
    return folder / f"{product}.json"
