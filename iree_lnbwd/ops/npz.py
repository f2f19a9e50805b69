"""Arrays by name in an .npz file, bf16 too.

NumPy's format has no bf16: such an array is stored as its uint16 bits under a key that ends in
":bf16". A key is an argument's name, or ``<case>/<argument>`` where a file holds several cases.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from iree_lnbwd.disk import files
from iree_lnbwd.errors import one_line, plain
from iree_lnbwd.ops import dtypes
from iree_lnbwd.ops.arguments import Array

_BF16_SUFFIX = ":bf16"
_LONGEST_KEY = 120  # characters of it in a message
# What a file may inflate to: so many bytes, and as many times its own size. Numbers that were
# computed compress to half; zeros to a thousandth.
_MOST_INFLATED = 1 << 26
_MOST_TIMES = 16
_PROVENANCE = "provenance"  # a text that says where a file comes from
_LOST = np.dtype("V2")  # what np.savez makes of bf16
_BF16 = dtypes.DTYPES["bf16"].numpy


def read(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The arrays of a file, by key.

    Raises:
        ValueError: The file cannot be read or is no .npz, holds something that is no array, or two
            arrays under one key.
    """
    try:
        with files.opened(Path(path)) as file:
            stored = list(_members(file))
    except Exception as error:  # NumPy and zipfile may raise anything on hostile files
        raise ValueError(
            f"{plain(path)}: expected a readable .npz file: {one_line(error)}"
        ) from error
    arrays: dict[str, Array] = {}
    for key, array in stored:
        name = key.removesuffix(_BF16_SUFFIX)
        called = plain(key, _LONGEST_KEY)
        place = f"{plain(path)}: {called}"
        if name in arrays:
            shared = plain(name, _LONGEST_KEY)
            raise ValueError(
                f"{plain(path)}: {shared}: expected one array of that name, got several"
            )
        if name != key and array.dtype != np.uint16:
            raise ValueError(f"{place}: expected uint16 bits of bf16, got {plain(array.dtype)}")
        if array.dtype == _LOST:
            raise ValueError(
                f"{place}: expected an element type, got {array.dtype.str}, NumPy's stand-in "
                f"for bf16: store {called}.view(np.uint16) under the key {called + _BF16_SUFFIX!r}"
            )
        arrays[name] = array if name == key else array.view(_BF16)
    return arrays


def read_cases(path: str | os.PathLike[str]) -> dict[str, dict[str, Array]]:
    """The arrays of a file by case and argument; keys without a case form the case "".

    Raises:
        ValueError: As `read`.
    """
    cases: dict[str, dict[str, Array]] = {}
    for key, array in read(path).items():
        case, _, argument = key.rpartition("/")
        if argument == _PROVENANCE:
            continue
        arguments = cases.setdefault(case, {})
        if argument in arguments:  # "/input" and "input"
            place = f"{plain(path)}: {plain(key, _LONGEST_KEY)}"
            raise ValueError(f"{place}: expected one array of that name, got several")
        arguments[argument] = array
    return cases


def _members(file: BinaryIO) -> Iterator[tuple[str, Array]]:
    """The arrays of an .npz file with their keys; a key may come twice."""
    magic: bytes = np.lib.format.MAGIC_PREFIX
    if file.read(len(magic)) == magic:
        raise ValueError("it is an .npy file, a single array")
    with zipfile.ZipFile(file) as archive:
        _expect_no_bomb(archive, os.fstat(file.fileno()).st_size)
        for info in archive.infolist():
            key = info.filename.removesuffix(".npy")
            try:
                with archive.open(info) as member:
                    array: Array = np.lib.format.read_array(member, allow_pickle=False)
                    if member.read(1):  # the checksum is compared only at the end
                        raise ValueError("more bytes than its array has")
            except Exception as error:
                name = plain(info.filename, _LONGEST_KEY)
                raise ValueError(f"{name}: no array: {one_line(error)}") from error
            yield key, array


def _expect_no_bomb(archive: zipfile.ZipFile, size: int) -> None:
    """Expects arrays that are not many times as large as the file; no member gives more bytes."""
    inflated = sum(info.file_size for info in archive.infolist())
    most = _MOST_INFLATED + _MOST_TIMES * size
    if inflated > most:
        raise ValueError(
            f"its arrays have {inflated} bytes, at most {most} may be compressed into {size}; "
            "np.savez stores them uncompressed"
        )


def write(path: str | os.PathLike[str], arrays: Mapping[str, Array]) -> None:
    """Writes the arrays as `files.write` does; a file appears whole or not at all.

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
        files.write({Path(path): buffer.getbuffer()})
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be written: {one_line(error)}") from error
