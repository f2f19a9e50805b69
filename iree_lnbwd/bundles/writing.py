"""Compiles many specs for many targets into one file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from iree_lnbwd.bundles.container import BundleFile, is_bundle, packed
from iree_lnbwd.bundles.index import MOST_MEMBERS, name_of
from iree_lnbwd.compiling import compiler
from iree_lnbwd.compiling.extra_flags import check_extra_flags
from iree_lnbwd.disk import files
from iree_lnbwd.errors import ArtifactError, counted, one_line, shown
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.stores import cache, shipping
from iree_lnbwd.vmfb.artifact import Manifest

Progress = Callable[[str], None]


class _Module(NamedTuple):
    """One module of a bundle: the name of its target or product, its bytes, and its manifest."""

    made_for: str
    vmfb: bytes
    manifest: Manifest


def bundle(
    specs: NormSpec | Sequence[NormSpec],
    targets: str | Sequence[str],
    path: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    extra_flags: Sequence[str] = (),
    include: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> BundleFile:
    """Compiles every spec for every target, and writes the modules into one file.

    Each module goes through the user's cache (``$IREE_LNBWD_CACHE``) when it is compiled. So an
    interruption or an error loses only the modules that were being compiled: the same call again
    takes the others from there.

    Args:
        specs: What to compute, with any number of rows.
        targets: Names of `iree_lnbwd.targets`, or of products. A module for a product has the
            schedule that `compile` takes for it, and GPUs of that product take it before others.
        path: The file, named ``*.lnb``. It appears whole or not at all; its folder is made if need
            be.
        jobs: How many modules are compiled at once; None means one for each CPU.
        extra_flags: Further flags for iree-compile, recorded in the manifests.
        include: A bundle whose members are taken over, except those that are compiled anew. It may
            be the file itself.
        progress: Is told of each module, a line at a time.

    Returns:
        The file. The same arguments, and the same content of the user's tuning folder, give the
        same bytes, in any order.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
        CompileError: The compiler is missing or failed.
        ArtifactError: ``include`` is no bundle, the file cannot be written, or there is too much
            for one file.
    """
    norms, names = _checked_specs(specs), _checked_targets(targets)
    place = _checked_path(path)
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise ValueError(f"jobs: expected None or an int of at least 1, got {shown(jobs)}")
    flags = check_extra_flags(extra_flags)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a function or None, got {shown(progress)}")
    if len(norms) * len(names) > MOST_MEMBERS:
        raise ValueError(
            f"specs: expected at most {MOST_MEMBERS} modules, got {len(norms) * len(names)}"
        )
    compiler.compiler_version()
    modules = {} if include is None else _members(include)
    wanted = [(norm, name) for name in names for norm in norms]
    threads = len(os.sched_getaffinity(0)) if jobs is None else jobs
    tell = progress or (lambda line: None)
    with contextlib.closing(_made(wanted, flags, threads)) as made:
        for number, (module, how) in enumerate(made, 1):
            name = name_of(module.made_for, module.manifest.spec)
            modules[name] = module
            tell(f"{number} of {counted(len(wanted), 'module')}: {name}, {how}")
    content = packed(modules.values())
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write({place: content})
    except (OSError, ValueError) as error:
        raise ArtifactError(f"path: cannot write {place}: {one_line(error)}") from error
    return BundleFile(place)


def _made(
    wanted: Sequence[tuple[NormSpec, str]], flags: Sequence[str], threads: int
) -> Generator[tuple[_Module, str], None, None]:
    """The modules in any order, side by side, and where each comes from, in words.

    Raises:
        CompileError: The compiler failed.
    """

    def make(spec: NormSpec, name: str) -> tuple[_Module, str]:
        tuned = shipping.tuned_for(spec, name)
        entry = cache.Entry(spec, find_target(name), tuned, extra_flags=flags)
        how = "compiled" if entry.kept is None else "compiled before"
        return _Module(name, *entry.build()), how

    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(make, spec, name) for spec, name in wanted]
        try:
            for done in as_completed(jobs):
                yield done.result()
        except BaseException:  # interrupted, closed, or something cannot be compiled
            pool.shutdown(cancel_futures=True)
            raise


def _members(path: str | os.PathLike[str]) -> dict[str, _Module]:
    """All modules of a bundle, by the names of its members."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"include: expected a path or None, got {type(path).__name__}")
    try:
        file = BundleFile(path)
        return {each.name: _Module(each.made_for, *file.read(each)) for each in file.members}
    except ArtifactError as error:
        raise ArtifactError(f"include: {error}") from error


def _checked_specs(specs: object) -> tuple[NormSpec, ...]:
    given = (specs,) if isinstance(specs, NormSpec) else specs
    if not isinstance(given, Sequence) or not all(isinstance(spec, NormSpec) for spec in given):
        raise TypeError(f"specs: expected NormSpecs, got {shown(specs)}")
    if not given:
        raise ValueError("specs: expected one or more, got none")
    for spec in given:
        if spec.rows is not None:
            raise ValueError(f"specs: expected rows of None, got {spec.rows} of {spec.name}")
    return tuple(dict.fromkeys(given))


def _checked_targets(targets: object) -> tuple[str, ...]:
    given = (targets,) if isinstance(targets, str) else targets
    if not isinstance(given, Sequence):
        raise TypeError(f"targets: expected names, got {shown(targets)}")
    for name in given:
        find_target(name)
    if not given:
        raise ValueError("targets: expected one or more, got none")
    return tuple(dict.fromkeys(name.lower() for name in given))


def _checked_path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected a path, got {shown(path)}")
    place = Path(path)
    try:
        os.fsencode(place)
        unusable = "\0" in str(place) or (place.exists() and not place.is_file())
    except (OSError, ValueError):
        unusable = True
    if unusable or not is_bundle(place):
        raise ValueError(f"path: expected the name of a file *.lnb, got {shown(str(place))}")
    return place
