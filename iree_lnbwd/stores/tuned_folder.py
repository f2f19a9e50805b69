"""The user's tuning folder: a file for each norm and GPU, and files to share what is in it.

It decides which code runs. So only files count that nobody else can have written. Files are written
whole, one for each norm: processes that tune at the same time do not lose each other's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePath

from iree_lnbwd.disk import files
from iree_lnbwd.disk.user_folders import UserFolder
from iree_lnbwd.errors import one_line, plain
from iree_lnbwd.hardware.devices import Gpu
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.stores.tuned import Tuned
from iree_lnbwd.stores.tuned_json import MOST_BYTES, from_text, to_text
from iree_lnbwd.vmfb.artifact import digest, stem

_FOLDER = UserFolder("IREE_LNBWD_TUNING", "XDG_DATA_HOME", ".local/share")
_ITSELF = PurePath()
_END = ".json"
_KEY_LETTERS = 16


def directory() -> Path:
    """``$IREE_LNBWD_TUNING``, else ``iree-lnbwd`` in the user's folder of data.

    Raises:
        UnusableError: It is relative, or the user has no folder.
    """
    return _FOLDER.path()


def make() -> None:
    """Makes the folder, if it is not there.

    Raises:
        UnusableError: Others can write to it, or it cannot be made.
    """
    _FOLDER.make()


def file_of(tuned: Tuned) -> Path:
    """Where `keep` keeps it.

    Raises:
        UnusableError: As `directory`.
    """
    return directory() / _name(*tuned.key)


def keep(tuned: Tuned) -> None:
    """Keeps what was found, in place of what was found before about the same norm and GPU.

    Raises:
        UnusableError: Others can write to the folder, or we cannot.
    """
    _FOLDER.write(_ITSELF, {_name(*tuned.key): to_text((tuned,)).encode()})


def find(spec: NormSpec, target: Target, gpu: Gpu) -> Tuned | None:
    """What was found about a norm, which is a `tuned.subject`, on a kind of GPU, if anything.

    Raises:
        UnusableError: Others can write to the folder, or it cannot be read.
        ValueError: The file is damaged; the message names it and the field.
    """
    key = (spec, target.name, gpu.name, gpu.processors)
    tuned = _read(_name(*key))
    return tuned if tuned is not None and tuned.key == key else None


def kept(damaged: Callable[[ValueError], None]) -> tuple[Tuned, ...]:
    """All that was found, on any GPU.

    Args:
        damaged: Is told of each file that is no such file.

    Raises:
        UnusableError: Others can write to the folder, or it cannot be read.
    """
    found = []
    for name in _FOLDER.names():
        if not name.endswith(_END) or name.startswith("."):
            continue
        try:
            tuned = _read(name)
        except ValueError as error:
            damaged(error)
            continue
        if tuned is not None and name == _name(*tuned.key):
            found.append(tuned)
    return tuple(found)


def export(path: Path) -> int:
    """Writes all that was found into a file, which another machine can `take`.

    Returns:
        The number of entries.

    Raises:
        UnusableError: As `kept`.
        ValueError: A file of the folder is damaged, or there is nothing to export.
        OSError: The file cannot be written.
    """
    found = kept(_refuse)
    if not found:
        raise ValueError(f"export: expected something tuned in {directory()}, got nothing")
    files.write({path: to_text(found).encode()})
    return len(found)


def take(path: Path) -> tuple[Tuned, ...]:
    """Keeps all that is in a file that `export` wrote; all of it is checked first.

    Raises:
        UnusableError: As `keep`.
        ValueError: It is no such file, or a schedule in it is illegal.
        OSError: The file cannot be read.
    """
    name = plain(path)
    try:
        text = files.read(path, most=MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected JSON: {one_line(error)}") from error
    except OSError as error:
        raise OSError(f"{name}: cannot be read: {one_line(error)}") from error
    found = from_text(text, name)
    _FOLDER.write(_ITSELF, {_name(*t.key): to_text((t,)).encode() for t in found})
    return found


def _read(name: str) -> Tuned | None:
    content = _FOLDER.read(_ITSELF, name)
    if content is None:
        return None
    path = plain(directory() / name)
    try:
        text = content[0].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected JSON: {one_line(error)}") from error
    found = from_text(text, path)
    if len(found) != 1:
        raise ValueError(f"{path}: $.tuned: expected one entry, got {len(found)}")
    return found[0]


def _name(spec: NormSpec, target: str, gpu: str, processors: int) -> str:
    key = json.dumps((spec.to_dict(), target, gpu, processors), sort_keys=True)
    return f"{stem(spec, target)}_{digest(key.encode())[:_KEY_LETTERS]}{_END}"


def _refuse(error: ValueError) -> None:
    raise error
