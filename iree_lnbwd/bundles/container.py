"""The file of a bundle: a ZIP whose every byte follows from its modules.

Its files are stored, not compressed, one after the other: first the index, then two for each
member. There is one way to write the same modules, and nothing else is read: the reader knows the
place and the size of each file before it opens any, and no name in the ZIP is taken at its word.
"""

from __future__ import annotations

import io
import os
import struct
import weakref
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from iree_lnbwd.bundles import index
from iree_lnbwd.bundles.index import Member, StoredFile
from iree_lnbwd.disk import files
from iree_lnbwd.errors import ArtifactError, one_line, shown
from iree_lnbwd.vmfb import artifact
from iree_lnbwd.vmfb.artifact import Manifest

_INDEX = "index.json"
_MOST_INDEX_BYTES = 1 << 26
_MOST_BYTES = (1 << 31) - 1  # beyond this, `zipfile` writes extra fields
_LONGEST_NAME = 1 << 10
_DIRECTORY_ENTRY = 46  # bytes, before its name (PKWARE's APPNOTE 4.3.12)
_LOCAL_HEADER = 30  # bytes, before its name (APPNOTE 4.3.7)
# The last bytes of a ZIP (APPNOTE 4.3.16): signature, number of this disk, disk of the directory,
# files on this disk, files, bytes and place of the directory, bytes of the comment that follows.
_END = struct.Struct("<4s4H2LH")
_LENGTHS = struct.Struct("<3H")  # in a directory entry: of the name, the extra field, the comment
_LENGTHS_AT = 28
_END_SIGNATURE = b"PK\5\6"
# What a ZIP says of a file besides its name, size and checksum: the same of each.
_SAID = (
    "flag_bits", "date_time", "create_system", "create_version", "extract_version", "reserved",
    "volume", "internal_attr", "external_attr",
)  # fmt: skip


class BundleFile:
    """A bundle on disk, of which only the index was read.

    The file is open as long as this object lives, so replacing it changes nothing here.

    Attributes:
        path: Where it is.
        members: What is in it, in the order of their names.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the index.

        Args:
            path: The bundle.

        Raises:
            TypeError: ``path`` is no path.
            ArtifactError: The file is missing, truncated, altered, or no bundle.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path: expected a str or a path, got {type(path).__name__}")
        self.path = Path(path)
        try:
            with files.opened(self.path) as file:
                listed = self._listed(file)
                self._descriptor = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._descriptor)
        except ArtifactError:
            raise
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{self.path}: cannot be read: {one_line(error)}") from error
        self._places = {info.filename: info for info in listed}
        first = listed[0]
        if first.filename != _INDEX:
            raise self._error(f"expected the file {_INDEX} first, got {shown(first.filename)}")
        if first.file_size > _MOST_INDEX_BYTES:
            raise self._error(
                f"{_INDEX}: expected at most {_MOST_INDEX_BYTES} bytes, got {first.file_size}"
            )
        try:
            text = self._content(first).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{_INDEX}: {one_line(error)}") from error
        self.members = index.from_json(text, path=self.path)
        expected = [stored for member in self.members for stored in member.files]
        for info, (name, stored) in zip(listed[1:], expected, strict=False):
            if info.filename != name:
                raise self._error(f"expected the file {name}, got {shown(info.filename)}")
            if info.file_size != stored.size:
                raise self._error(
                    f"{name}: expected {stored.size} bytes as in the index, got {info.file_size}"
                )
        if len(listed) - 1 != len(expected):
            raise self._error(
                f"expected {len(expected)} files beside the index, got {len(listed) - 1}"
            )

    def read(self, member: Member) -> tuple[bytes, Manifest]:
        """A member's module and manifest, checked against the index and each other.

        Raises:
            ArtifactError: Naming the member: it is truncated or altered.
        """
        (text_name, text), (vmfb_name, vmfb) = (
            (name, self._checked(name, stored)) for name, stored in member.files
        )
        place = self.path / text_name
        manifest = artifact.checked(vmfb, text, path=self.path / vmfb_name, manifest_path=place)
        said = (manifest.spec, manifest.target, manifest.host_cpu)
        if said != (member.spec, member.target.name, member.host_cpu):
            raise ArtifactError(f"{place}: it describes another module than the index does")
        return vmfb, manifest

    def _checked(self, name: str, stored: StoredFile) -> bytes:
        content = self._content(self._places[name])
        if (got := artifact.digest(content)) != stored.sha256:
            raise self._error(
                f"{name}: altered: its SHA-256 is {got}, the index expects {stored.sha256}"
            )
        return content

    def _content(self, info: zipfile.ZipInfo) -> bytes:
        """The content of a file, by its place: threads and forked processes may read together."""
        header = info.FileHeader(zip64=False)
        data = os.pread(self._descriptor, len(header) + info.file_size, info.header_offset)
        if len(data) != len(header) + info.file_size:
            raise self._error(f"{info.filename}: truncated")
        if data[: len(header)] != header:
            raise self._error(f"{info.filename}: altered: its header is not as in the directory")
        content = data[len(header) :]
        if zlib.crc32(content) != info.CRC:
            raise self._error(f"{info.filename}: altered: its checksum does not match")
        return content

    def _listed(self, file: BinaryIO) -> list[zipfile.ZipInfo]:
        """The files that the ZIP has, in order, if it is one as `packed` makes it."""
        size = os.fstat(file.fileno()).st_size
        self._expect_end(file, size)
        try:
            archive = zipfile.ZipFile(file)
        except Exception as error:  # zipfile may raise anything on damaged files
            raise self._error(f"truncated, altered or no bundle: {one_line(error)}") from error
        listed = archive.infolist()
        for name, count in Counter(info.orig_filename for info in listed).items():
            if count > 1:
                raise self._error(f"the file {shown(name)} comes {count} times")
        file.seek(archive.start_dir)
        directory = file.read()
        place = entry = 0
        for info in listed:
            name, expected = shown(info.orig_filename), _info(info.filename)
            # zipfile takes a last entry that is longer than the directory.
            lengths = _LENGTHS.unpack_from(directory, entry + _LENGTHS_AT)
            if (
                lengths != (len(info.filename), 0, 0)
                or info.orig_filename != info.filename
                or not info.filename.isascii()
            ):
                raise self._error(f"{name}: expected a plain name, no extra field and no comment")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise self._error(
                    f"{name}: expected it stored, got {info.compress_size} bytes that unpack to "
                    f"{info.file_size}"
                )
            if info.header_offset != place:
                raise self._error(f"{name}: expected it at byte {place}, not {info.header_offset}")
            for field in _SAID:
                if getattr(info, field) != getattr(expected, field):
                    raise self._error(f"{name}: altered: unexpected {field} in the directory")
            place += _LOCAL_HEADER + len(info.filename) + info.file_size
            entry += _DIRECTORY_ENTRY + len(info.filename)
        if archive.start_dir != place:
            raise self._error(f"expected its directory at byte {place}, not {archive.start_dir}")
        return listed

    def _expect_end(self, file: BinaryIO, size: int) -> None:
        """Expects the end of a ZIP, whose directory is no larger than one of ours can be."""
        file.seek(max(0, size - _END.size))
        end = file.read(_END.size)
        if len(end) != _END.size or not end.startswith(_END_SIGNATURE):
            raise self._error("truncated, or no bundle: it does not end as a ZIP")
        _, *disks, here, count, listed_bytes, place, comment = _END.unpack(end)
        if disks != [0, 0] or here != count or comment:
            raise self._error("altered: its last bytes are not those of a bundle")
        if not 1 <= count <= 1 + 2 * index.MOST_MEMBERS:
            raise self._error(f"expected at most {index.MOST_MEMBERS} members, got {count} files")
        if listed_bytes > count * (_DIRECTORY_ENTRY + _LONGEST_NAME):
            raise self._error(f"expected a directory of {count} files, got {listed_bytes} bytes")
        if place + listed_bytes + _END.size != size:
            raise self._error("truncated or altered: its directory is not where it should be")

    def _error(self, what: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {what}")


def is_bundle(path: Path) -> bool:
    """Whether a path is named as bundles are."""
    return path.suffix == artifact.BUNDLE_SUFFIX


def packed(modules: Iterable[tuple[str, bytes, Manifest]]) -> memoryview:
    """The bytes of a bundle; the same for the same modules, in any order.

    Args:
        modules: For each the name of its target or product, its bytes, and its manifest; no two
            are for one spec and name.

    Raises:
        ArtifactError: There are too many, or they are too large.
    """
    contents: dict[Member, tuple[bytes, bytes]] = {}
    for made_for, vmfb, manifest in modules:
        text = manifest.to_json().encode()
        stored = (StoredFile(len(data), artifact.digest(data)) for data in (vmfb, text))
        member = Member(made_for, manifest.spec, manifest.host_cpu, *stored)
        contents[member] = (text, vmfb)
    members = sorted(contents, key=lambda member: member.name)
    if len(members) > index.MOST_MEMBERS:
        raise ArtifactError(
            f"members: expected at most {index.MOST_MEMBERS}, got {len(members)}; make several "
            "bundles"
        )
    listed = [(_INDEX, index.to_json(members).encode())]
    for member in members:
        for (name, _), data in zip(member.files, contents[member], strict=True):
            listed.append((name, data))
    longest = max((name for name, _ in listed), key=len)
    if len(longest) > _LONGEST_NAME:
        raise ArtifactError(f"{shown(longest)}: expected at most {_LONGEST_NAME} letters in a name")
    size = sum(len(data) + 2 * (_DIRECTORY_ENTRY + len(name)) for name, data in listed)
    if size > _MOST_BYTES:
        raise ArtifactError(f"expected at most {_MOST_BYTES} bytes, got {size}; make several")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in listed:
            archive.writestr(_info(name), data)
    return buffer.getbuffer()


def _info(name: str) -> zipfile.ZipInfo:
    """What the ZIP says of a file: nothing of when and where it was written."""
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.create_system = 3  # Unix, so that the mode counts
    info.external_attr = 0o100644 << 16
    return info
