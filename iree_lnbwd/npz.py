"""Arrays by name in an .npz file, bf16 too.

NumPy's format has no bf16: such an array is stored as its uint16 bits under a key that ends in
":bf16". A key is an argument's name, or ``<case>/<argument>`` where a file holds several cases.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from iree_lnbwd import dtypes
from iree_lnbwd.arguments import Array
from iree_lnbwd.artifact import write_atomically
from iree_lnbwd.errors import ZIP_ERRORS

_BF16_SUFFIX = ":bf16"
_BF16 = dtypes.DTYPES["bf16"].numpy


def read(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The arrays of a file, by key.

    Raises:
        ValueError: The file cannot be read or is no .npz.
    """
    try:
        with Path(path).open("rb") as file:  # np.load itself leaves a damaged file open
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise ValueError("it is an .npy file, a single array")
            with loaded:
                stored = {key: loaded[key] for key in loaded.files}
    except (OSError, *ZIP_ERRORS) as error:
        raise ValueError(f"{path}: expected a readable .npz file: {error}") from error
    arrays = {}
    for key, array in stored.items():
        if key.endswith(_BF16_SUFFIX):
            if array.dtype != np.uint16:
                raise ValueError(f"{path}: {key}: expected uint16 bits of bf16, got {array.dtype}")
            array = array.view(_BF16)
        arrays[key.removesuffix(_BF16_SUFFIX)] = array
    return arrays


def read_cases(path: str | os.PathLike[str]) -> dict[str, dict[str, Array]]:
    """The arrays of a file by case and argument; keys without a case form the case ""."""
    cases: dict[str, dict[str, Array]] = {}
    for key, array in read(path).items():
        case, _, argument = key.rpartition("/")
        if array.dtype.kind != "U":  # provenance
            cases.setdefault(case, {})[argument] = array
    return cases


def write(path: str | os.PathLike[str], arrays: Mapping[str, Array]) -> None:
    """Writes the arrays; the file appears whole or not at all.

    Raises:
        ValueError: The file cannot be written.
    """
    stored = {
        name + _BF16_SUFFIX if array.dtype == _BF16 else name: array.view(np.uint16)
        if array.dtype == _BF16
        else array
        for name, array in arrays.items()
    }
    buffer = io.BytesIO()
    np.savez(buffer, **stored)  # type: ignore[arg-type]
    try:
        write_atomically(Path(path), buffer.getvalue())
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from error
