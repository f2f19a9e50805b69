"""The index of a bundle: what its members are. Values only; `container` has the file."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iree_lnbwd.disk.json_values import int_of, object_of, of_type, parsed, wrong
from iree_lnbwd.errors import ArtifactError, one_line, shown
from iree_lnbwd.hardware.products import PRODUCTS
from iree_lnbwd.hardware.targets import TARGETS, Target, find_target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.vmfb import artifact

FORMAT = "iree-lnbwd bundle"
VERSION = 1
MOST_MEMBERS = 1 << 14  # two files each, so that a ZIP counts them in 16 bits

_FIELDS = ("format", "version", "members", "index_sha256")
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredFile:
    """One file in a bundle.

    Attributes:
        size: In bytes.
        sha256: Of its content, in hexadecimal.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class Member:
    """One module in a bundle, with its manifest.

    Attributes:
        made_for: Name of the target or product that was asked for, such as "sm_90" or "h200".
        spec: What it computes.
        host_cpu: The CPU that a module for "host" needs; None for other targets.
        vmfb: The module.
        manifest: What ``compile`` writes beside it.
    """

    made_for: str
    spec: NormSpec
    host_cpu: str | None
    vmfb: StoredFile
    manifest: StoredFile

    @property
    def target(self) -> Target:
        """What it was compiled for."""
        return find_target(self.made_for)

    @property
    def name(self) -> str:
        """Its name in the bundle: the names of its two files, without their endings."""
        return name_of(self.made_for, self.spec)

    @property
    def files(self) -> tuple[tuple[str, StoredFile], tuple[str, StoredFile]]:
        """Its two files by name, in the order in which they are in the bundle."""
        return (f"{self.name}.json", self.manifest), (f"{self.name}.vmfb", self.vmfb)


def name_of(made_for: str, spec: NormSpec) -> str:
    """The name of the member for a spec and the name of a target or product."""
    return f"{made_for}/{artifact.stem(spec, find_target(made_for).name)}"


def to_json(members: Sequence[Member]) -> str:
    """The same text for the same members, ending in its own SHA-256."""
    values = {
        "format": FORMAT,
        "version": VERSION,
        "members": [
            {
                "made_for": member.made_for,
                "spec": member.spec.to_dict(),
                "host_cpu": member.host_cpu,
                "vmfb": {"bytes": member.vmfb.size, "sha256": member.vmfb.sha256},
                "manifest": {"bytes": member.manifest.size, "sha256": member.manifest.sha256},
            }
            for member in members
        ],
    }
    return json.dumps(values | {"index_sha256": _digest(values)}, indent=1) + "\n"


def from_json(text: str, *, path: Path) -> tuple[Member, ...]:
    """The inverse of `to_json`.

    Args:
        text: The index.
        path: The bundle, for messages.

    Raises:
        ArtifactError: It is no index, of another version, or was altered.
    """
    try:
        values = parsed(text)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"expected the format {FORMAT!r}")
        if values.get("version") != VERSION:
            raise ValueError(f"expected version {VERSION}, got {shown(values.get('version'))}")
        fields = object_of(values, "index", _FIELDS)
        if fields.pop("index_sha256") != _digest(fields):
            raise ValueError("altered: its index_sha256 does not match its content")
        listed = of_type(list, fields["members"], "index.members")
        if not 1 <= len(listed) <= MOST_MEMBERS:
            raise ValueError(f"members: expected 1 to {MOST_MEMBERS}, got {len(listed)}")
        members = tuple(_member(each, f"members[{i}]") for i, each in enumerate(listed))
        for before, after in itertools.pairwise(members):
            if before.name >= after.name:
                how = "comes twice" if before.name == after.name else "is out of order"
                raise ValueError(f"the member {after.name} {how}")
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: index.json: {one_line(error)}") from error
    return members


def _member(values: Any, place: str) -> Member:
    names = ("made_for", "spec", "host_cpu", "vmfb", "manifest")
    fields = object_of(values, place, names)
    made_for = of_type(str, fields["made_for"], f"{place}.made_for")
    if made_for not in TARGETS and made_for not in PRODUCTS:
        raise wrong(f"{place}.made_for", "a target or product that this version knows", made_for)
    host_cpu = fields["host_cpu"]
    if find_target(made_for).is_this_cpu or host_cpu is not None:
        of_type(str, host_cpu, f"{place}.host_cpu")
    return Member(
        made_for=made_for,
        spec=NormSpec.from_dict(of_type(dict, fields["spec"], f"{place}.spec")),
        host_cpu=host_cpu,
        vmfb=_stored_file(fields["vmfb"], f"{place}.vmfb", artifact.MOST_VMFB_BYTES),
        manifest=_stored_file(
            fields["manifest"], f"{place}.manifest", artifact.MOST_MANIFEST_BYTES
        ),
    )


def _stored_file(values: Any, place: str, most: int) -> StoredFile:
    fields = object_of(values, place, ("bytes", "sha256"))
    size = int_of(fields["bytes"], f"{place}.bytes", least=1)
    if size > most:
        raise wrong(f"{place}.bytes", f"at most {most}", size)
    sha256 = of_type(str, fields["sha256"], f"{place}.sha256")
    if not _SHA256.fullmatch(sha256):
        raise wrong(f"{place}.sha256", "64 hexadecimal digits", sha256)
    return StoredFile(size, sha256)


def _digest(values: dict[str, Any]) -> str:
    return artifact.digest(json.dumps(values, sort_keys=True).encode())
