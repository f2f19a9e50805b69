"""Modules that were compiled before, on disk.

This process runs their code. So it takes only files that nobody else can have written, and only
modules that it would compile in the same way now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from iree_lnbwd import notices
from iree_lnbwd.compiling import compiler
from iree_lnbwd.disk.user_folders import UnusableError, UserFolder
from iree_lnbwd.errors import ArtifactError, CompileError
from iree_lnbwd.hardware.devices import cpu_features, host_cpu
from iree_lnbwd.hardware.targets import Target, generic_targets, older_targets
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.stores.tuned import Tuned
from iree_lnbwd.vmfb import artifact
from iree_lnbwd.vmfb.artifact import Manifest

_FOLDER = UserFolder("IREE_LNBWD_CACHE", "XDG_CACHE_HOME", ".cache")
_ITSELF = PurePath()
_KEY_LETTERS = 16
_LONGEST_COMPILATION = 60.0  # seconds that another process is waited for
_WHAT_STANDS_IN = {
    "cpu": "which was compiled for any CPU of its architecture",
    "cuda": "whose schedule was chosen for another GPU",
}


class Entry:
    """The facts known about the module for a spec and a target, before anything is compiled.

    Attributes:
        kept: The module that was built before and can be used, and its manifest; None if there is
            none.
    """

    def __init__(
        self,
        spec: NormSpec,
        target: Target,
        tuned: Tuned | None = None,
        *,
        extra_flags: Sequence[str] = (),
    ) -> None:
        """Plans the module, and looks for it.

        Args:
            spec: What it computes.
            target: Where.
            tuned: What was tuned for them, which comes before the choice.
            extra_flags: Further flags for iree-compile.
        """
        self.kept: tuple[bytes, Manifest] | None = None
        self._names = _names(spec, target)
        self._planned: tuple[str, Manifest] | CompileError
        self._unusable: UnusableError | None = None
        try:
            self._planned = compiler.plan(
                spec,
                target,
                schedule=None if tuned is None else tuned.schedule,
                source=None if tuned is None else tuned.source,
                extra_flags=extra_flags,
            )
        except CompileError as error:  # without a compiler, nothing says what it would compile
            self._planned = error
        try:
            if isinstance(self._planned, CompileError):
                self.kept = _put_there(spec, target)
            else:
                self.kept = _kept(self._planned[1], self._names)
        except UnusableError as error:
            self._unusable = error

    @property
    def can_be_compiled(self) -> bool:
        """Whether it is not there yet, and a compiler is."""
        return self.kept is None and not isinstance(self._planned, CompileError)

    def build(self) -> tuple[bytes, Manifest]:
        """As `build`; of processes that need the same module at once, one compiles it."""
        if self.kept is not None:
            return self.kept
        if self._unusable is not None or isinstance(self._planned, CompileError):
            return self._compiled()
        _, manifest = self._planned
        with locked(_entry(manifest), seconds=_LONGEST_COMPILATION) as waited:
            try:
                self.kept = _kept(manifest, self._names)
            except UnusableError as error:
                self._unusable = error
            if self.kept is not None or not waited:
                return self.kept or self._compiled()
        return self._compiled()

    def _compiled(self) -> tuple[bytes, Manifest]:
        """By the compiler, and kept from then on."""
        try:
            if isinstance(self._planned, CompileError):
                raise self._planned
            vmfb, manifest = compiler.build_planned(*self._planned)
        except CompileError as error:
            if self._unusable is None:
                raise
            said = f"{error}; the cache is of no use: {self._unusable}"
            raise CompileError(said) from error
        unusable = self._unusable
        if unusable is None:
            content = (vmfb, manifest.to_json().encode())
            try:
                write(_entry(manifest), dict(zip(self._names, content, strict=True)))
            except UnusableError as error:
                unusable = error
        if unusable is not None:
            notices.warn(f"compiled module not cached: {unusable}")
        return vmfb, manifest


def build(spec: NormSpec, target: Target) -> tuple[bytes, Manifest]:
    """As `compiler.build`, once for each spec, target, schedule, compiler version, flags and IR.

    An entry is compiled again if it is damaged, or if it would be compiled differently now. Without
    a compiler, a module that `compile` wrote into the folder is used for its spec and target; if
    there is none, one for the newest older GPU whose modules the target's GPUs run, or for any CPU
    in place of this one, with a warning.

    A folder that cannot be used leads to a warning only: nothing is read from it or written to it.

    Raises:
        CompileError: The compiler is missing or failed.
    """
    return Entry(spec, target).build()


def read(entry: PurePath, *names: str) -> tuple[bytes, ...] | None:
    """The files of an entry, which only we can have written; None if one is missing.

    Raises:
        UnusableError: Others can write to them, or they cannot be read.
    """
    return _FOLDER.read(entry, *names)


def write(entry: PurePath, contents: Mapping[str, bytes]) -> None:
    """Writes the files of an entry, by name; each appears whole or not at all.

    Raises:
        UnusableError: Others can write to the folder, or we cannot.
    """
    _FOLDER.write(entry, contents)


def locked(
    entry: PurePath, *, seconds: float, waiting: Callable[[], None] | None = None
) -> contextlib.AbstractContextManager[bool]:
    """As `UserFolder.locked`: one process at a time makes an entry."""
    return _FOLDER.locked(entry, seconds=seconds, waiting=waiting)


def directory() -> Path:
    """``$IREE_LNBWD_CACHE``, else ``iree-lnbwd`` in the user's cache folder.

    Raises:
        UnusableError: It is relative, or the user has no folder.
    """
    return _FOLDER.path()


def _kept(planned: Manifest, names: tuple[str, str]) -> tuple[bytes, Manifest] | None:
    kept = read(_entry(planned), *names)
    if kept is None:
        return None
    vmfb, text = kept
    manifest = replace(planned, vmfb_sha256=artifact.digest(vmfb))
    return (vmfb, manifest) if text == manifest.to_json().encode() else None


def _put_there(spec: NormSpec, target: Target) -> tuple[bytes, Manifest] | None:
    """The best module that `compile` wrote into the folder itself, of those that fit."""
    for each in (target, *standing_in(target)):
        found = _written_for(spec, each)
        if found is not None:
            if each != target:
                notices.warn(
                    f"{_FOLDER.variable}: no compiler, and no {_names(spec, target)[0]}: took "
                    f"{_names(spec, each)[0]}, {_WHAT_STANDS_IN[each.backend]}"
                )
            return found
    return None


def standing_in(target: Target) -> tuple[Target, ...]:
    """The targets whose modules the machines of a target run, too; the best of them first."""
    if target.is_this_cpu:
        here = set(cpu_features())
        fitting = (t for t in generic_targets(target.architecture) if here >= set(t.cpu_features))
        return tuple(reversed(tuple(fitting)))
    return older_targets(target)


def written() -> tuple[str, ...]:
    """The names of the modules that `compile` wrote into the folder; none if it is unusable."""
    try:
        return tuple(name for name in _FOLDER.names() if PurePath(name).suffix == ".vmfb")
    except UnusableError:
        return ()


def _written_for(spec: NormSpec, target: Target) -> tuple[bytes, Manifest] | None:
    """The module that `compile` wrote into the folder itself for exactly this target."""
    kept = read(_ITSELF, *(names := _names(spec, target)))
    if kept is None:
        return None
    vmfb, text = kept
    try:
        manifest = Manifest.from_json(text.decode(), path=directory() / names[1])
    except (ArtifactError, UnicodeDecodeError):
        return None
    is_it = (spec, target.name, artifact.digest(vmfb))
    if (manifest.spec, manifest.target, manifest.vmfb_sha256) != is_it:
        return None
    return (vmfb, manifest) if manifest.host_cpu in (None, host_cpu()) else None


def _entry(manifest: Manifest) -> PurePath:
    """The name of an entry, which depends on everything that decides what the module is."""
    planned = replace(manifest, vmfb_sha256="")
    return PurePath(artifact.digest(planned.to_json().encode())[:_KEY_LETTERS])


def _names(spec: NormSpec, target: Target) -> tuple[str, str]:
    stem = artifact.stem(spec, target.name)
    return f"{stem}.vmfb", f"{stem}.json"
