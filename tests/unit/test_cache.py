"""The cache serves what would be compiled now, from where nobody else can have put it."""

from __future__ import annotations

import functools
import json
import os
import stat
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iree_lnbwd import CompileError, LayerNormBackward, Manifest, NormSpec
from iree_lnbwd.calls import modules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.schedules import WholeTensors
from iree_lnbwd.stores import cache, shipping
from iree_lnbwd.vmfb import artifact

SPEC, TARGET = NormSpec((8,)), find_target("generic")


def unused(columns: int) -> NormSpec:
    """What no other test of this process has loaded."""
    return NormSpec((columns,), eps=0.0625)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
SOMEBODY = 12345


_compile_once = functools.cache(compiler.build_planned)


@pytest.fixture(autouse=True)
def each_module_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same module, without the wait: what is tested here is where it comes from."""
    monkeypatch.setattr(compiler, "build_planned", _compile_once)


@pytest.fixture(scope="module")
def built() -> tuple[bytes, Manifest]:
    return compiler.build(SPEC, TARGET)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache: not there yet."""
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entry(folder: Path) -> tuple[Path, Path]:
    """The files of the only entry."""
    (vmfb,), (manifest,) = folder.rglob("*.vmfb"), folder.rglob("*.json")
    return vmfb, manifest


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    """What writing would change."""
    return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in (folder, *folder.rglob("*"))}


# --- what is served --------------------------------------------------------------------------

OTHERS: dict[str, Callable[[Manifest], Manifest]] = {
    "IR": lambda m: replace(m, ir_sha256="0" * 64),
    "flags": lambda m: replace(m, flags=(*m.flags, "--iree-opt-level=O1")),
    "fewer flags": lambda m: replace(m, flags=m.flags[:-1]),
    "compiler": lambda m: replace(m, compiler_version="3.12.0"),
    "schedule": lambda m: replace(m, schedule=WholeTensors()),
    "package": lambda m: replace(m, package_version="0.0.1"),
    "spec": lambda m: replace(m, spec=NormSpec((9,))),
    "target": lambda m: replace(m, target="host", host_cpu="x86_64-000000000000"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_what_would_be_compiled_now_is_compiled_again(
    other: str, folder: Path, built: tuple[bytes, Manifest]
) -> None:
    """Also where all of it is whole and signed, and the module another one that would run."""
    assert cache.build(SPEC, TARGET) == built
    vmfb, manifest = entry(folder)
    whole = (vmfb.read_bytes(), manifest.read_bytes())
    foreign, _ = compiler.build(SPEC, TARGET, schedule=WholeTensors())
    theirs = replace(OTHERS[other](built[1]), vmfb_sha256=artifact.digest(foreign))
    vmfb.write_bytes(foreign)
    manifest.write_text(theirs.to_json())
    assert cache.Entry(SPEC, TARGET).kept is None
    assert cache.build(SPEC, TARGET) == built
    assert (vmfb.read_bytes(), manifest.read_bytes()) == whole
    assert cache.Entry(SPEC, TARGET).kept == built


@pytest.mark.drawn
def test_without_a_compiler_a_module_for_an_older_gpu_is_better_than_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest of those that the GPU runs; that for the very GPU before all."""

    def missing() -> str:
        raise CompileError("none here")

    ours = find_target("sm_100")
    for name in ("sm_80", "sm_90", "gfx942", "sm_120"):
        shipping.compile(SPEC, name, folder)
    best = shipping.compile(SPEC, "sm_100", folder / "best")
    monkeypatch.setattr(compiler, "compiler_version", missing)
    took = r"^IREE_LNBWD_CACHE: no compiler, and no \S+_sm_100.vmfb: took \S+_sm_90.vmfb, whose"
    with pytest.warns(RuntimeWarning, match=took):
        assert cache.build(SPEC, ours)[1].target == "sm_90"
    for path in (best.path, best.manifest_path):
        path.rename(folder / path.name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.build(SPEC, ours)[1].target == "sm_100"
    with pytest.raises(CompileError, match="none here"):
        cache.build(NormSpec((9,)), ours)


def test_without_a_compiler_a_module_for_any_cpu_is_better_than_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is for CPUs of this architecture."""

    def missing() -> str:
        raise CompileError("none here")

    shipping.compile(SPEC, "generic", folder)
    shipping.compile(SPEC, "generic-aarch64", tmp_path)
    monkeypatch.setattr(compiler, "compiler_version", missing)
    intel, arm = (replace(find_target("host"), architecture=a) for a in ("x86_64", "aarch64"))
    with pytest.raises(CompileError, match="none here"):
        cache.build(SPEC, arm)
    for path in tmp_path.glob("*-aarch64.*"):
        path.rename(folder / path.name)
    for here, name in ((intel, "generic"), (arm, "generic-aarch64")):
        took = rf"no compiler, and no \S+_host.vmfb: took \S+_{name}.vmfb, which was compiled for "
        with pytest.warns(RuntimeWarning, match=f"{took}any CPU of its architecture"):
            assert cache.build(SPEC, here)[1].target == name


def test_a_manifest_that_says_more_is_not_ours(folder: Path, built: tuple[bytes, Manifest]) -> None:
    cache.build(SPEC, TARGET)
    _, manifest = entry(folder)
    values: dict[str, Any] = json.loads(manifest.read_text())
    del values["manifest_sha256"]
    values["more"] = SPEC.op
    digest = artifact.digest(json.dumps(values, sort_keys=True).encode())
    manifest.write_text(json.dumps(values | {"manifest_sha256": digest}))
    assert cache.Entry(SPEC, TARGET).kept is None


# --- who can write there ---------------------------------------------------------------------

# What is changed, of the folder, the entry's folder, the module and the manifest.
OPEN: dict[str, tuple[int, int]] = {
    "the folder, to all": (0, 0o777),
    "the folder, to a group": (0, 0o770),
    "the folder, to all but for renaming": (0, 0o1777),
    "an entry, to all": (1, 0o707),
    "an entry, to a group": (1, 0o775),
    "a module, to all": (2, 0o646),
    "a module, to a group": (2, 0o664),
    "a manifest, to all": (3, 0o666),
}


def refused(what: Path, folder: Path, built: tuple[bytes, Manifest], said: str) -> None:
    """It is not read, not written to, and one warning says what to do about it."""
    before = state(folder)
    assert cache.Entry(SPEC, TARGET).kept is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.build(SPEC, TARGET) == built
    (warning,) = caught
    assert warning.category is RuntimeWarning
    message = str(warning.message)
    assert message.startswith(f"compiled module not cached: {what}: {said}"), message
    assert "IREE_LNBWD_CACHE can name a folder of your own" in message
    assert "\n" not in message
    assert state(folder) == before


@pytest.mark.parametrize("which", OPEN)
def test_what_others_can_write_to_is_not_used(
    which: str, folder: Path, built: tuple[bytes, Manifest]
) -> None:
    cache.build(SPEC, TARGET)
    vmfb, manifest = entry(folder)
    what, mode = (folder, vmfb.parent, vmfb, manifest)[OPEN[which][0]], OPEN[which][1]
    what.chmod(mode)
    mend = f"others can write to it, its mode is {mode:04o} (chmod go-w {what})"
    refused(what, folder, built, mend)
    what.chmod(stat.S_IMODE(mode) & ~0o022)  # as it says
    assert cache.Entry(SPEC, TARGET).kept == built


def test_a_planted_entry_in_an_open_folder_is_not_served(
    folder: Path, built: tuple[bytes, Manifest]
) -> None:
    """One that is to the letter what would be there, but for the module's code."""
    cache.build(SPEC, TARGET)
    vmfb, manifest = entry(folder)
    planted, _ = compiler.build(SPEC, TARGET, schedule=WholeTensors())
    vmfb.write_bytes(planted)
    theirs = replace(built[1], vmfb_sha256=artifact.digest(planted))
    manifest.write_text(theirs.to_json())
    assert cache.Entry(SPEC, TARGET).kept == (planted, theirs)  # as long as it is ours alone
    folder.chmod(0o777)
    refused(folder, folder, built, "others can write to it")


@AS_ROOT
@pytest.mark.parametrize("which", range(4))
def test_what_belongs_to_somebody_else_is_not_used(
    which: int, folder: Path, built: tuple[bytes, Manifest]
) -> None:
    cache.build(SPEC, TARGET)
    vmfb, manifest = entry(folder)
    what = (folder, vmfb.parent, vmfb, manifest)[which]
    os.chown(what, SOMEBODY, SOMEBODY)
    mend = f"it belongs to user {SOMEBODY}, expected 0 or root (chown 0 {what})"
    refused(what, folder, built, mend)


@pytest.mark.parametrize("linked", [False, True])
def test_below_a_folder_in_which_all_can_rename(
    linked: bool,
    tmp_path: Path,
    built: tuple[bytes, Manifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache that is there and one that is not; by its own path or by a link's."""
    common = tmp_path / "common"
    common.mkdir()
    folder = tmp_path / "link" if linked else common / "deep" / "cache"
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(folder))
    if linked:
        (common / "deep" / "cache").mkdir(mode=0o700, parents=True)
        folder.symlink_to(common / "deep" / "cache")
    cache.build(SPEC, TARGET)
    common.chmod(0o777)
    mend = f"others can write to it, its mode is 0777 (chmod go-w {common})"
    refused(common, folder, built, mend)
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(common / "new"))
    refused(common, common, built, mend)
    common.chmod(0o1777)
    assert cache.build(SPEC, TARGET) == built
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(folder))
    assert cache.Entry(SPEC, TARGET).kept == built


def test_a_pipe_in_place_of_a_file_does_not_make_us_wait(
    folder: Path, built: tuple[bytes, Manifest]
) -> None:
    cache.build(SPEC, TARGET)
    vmfb, _ = entry(folder)
    vmfb.unlink()
    os.mkfifo(vmfb, 0o600)
    refused(vmfb, folder, built, "not a file")


def test_what_we_make_is_for_us_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        cache.build(SPEC, TARGET)
    finally:
        os.umask(before)
    made = list((tmp_path / "new").rglob("*"))
    folders = [path for path in (tmp_path / "new", *made) if path.is_dir()]
    assert len(folders) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert not any(path.stat().st_mode & 0o022 for path in made)


# --- where it is -----------------------------------------------------------------------------

PLACES: dict[str, tuple[dict[str, str | None], str]] = {
    "named": ({"IREE_LNBWD_CACHE": "/named", "XDG_CACHE_HOME": "/xdg"}, "/named"),
    "empty is not named": ({"IREE_LNBWD_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/iree-lnbwd"),
    "a relative XDG path does not count": ({"XDG_CACHE_HOME": "xdg"}, "/home/u/.cache/iree-lnbwd"),
    "an empty XDG path does not count": ({"XDG_CACHE_HOME": ""}, "/home/u/.cache/iree-lnbwd"),
    "home": ({}, "/home/u/.cache/iree-lnbwd"),
}
NOWHERE: dict[str, tuple[dict[str, str | None], str]] = {
    "relative": ({"IREE_LNBWD_CACHE": "cache"}, "IREE_LNBWD_CACHE: .* path, got 'cache'"),
    "unexpanded": ({"IREE_LNBWD_CACHE": "~/cache"}, "IREE_LNBWD_CACHE: .* path, got '~/cache'"),
    "no home": ({"HOME": ""}, "HOME: expected an absolute path, got ''"),
    "relative home": ({"HOME": "home/u"}, "HOME: expected an absolute path, got 'home/u'"),
}
VARIABLES: dict[str, str | None] = {
    "IREE_LNBWD_CACHE": None,
    "XDG_CACHE_HOME": None,
    "HOME": "/home/u",
}


def set_variables(values: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**VARIABLES, **values}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("place", PLACES)
def test_place(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, expected = PLACES[place]
    set_variables(values, monkeypatch)
    assert cache.directory() == Path(expected)


@pytest.mark.parametrize("place", NOWHERE)
def test_no_place(
    place: str,
    tmp_path: Path,
    built: tuple[bytes, Manifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, said = NOWHERE[place]
    monkeypatch.chdir(tmp_path)
    set_variables(values, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"^compiled module not cached: {said}; IREE_LNBWD"):
        assert cache.build(SPEC, TARGET) == built
    assert cache.Entry(SPEC, TARGET).kept is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("below", "said"),
    [("file", "Not a directory"), ("file/cache", "Not a directory"), ("x" * 5000, "name too long")],
)
def test_a_place_that_can_be_no_folder(
    below: str,
    said: str,
    tmp_path: Path,
    built: tuple[bytes, Manifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / below))
    with pytest.warns(RuntimeWarning, match=f"^compiled module not cached: [^\n]*{said}; IREE_"):
        assert cache.build(SPEC, TARGET) == built
    assert cache.Entry(SPEC, TARGET).kept is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_dangling_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "gone")
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "cache" / "below"))
    with pytest.warns(RuntimeWarning, match="^compiled module not cached: .*File exists"):
        cache.build(SPEC, TARGET)
    assert not (tmp_path / "gone").exists()


# --- several at once -------------------------------------------------------------------------


class Builds:
    """Counts what `compiler.build_planned` is asked for, and does it; `before` sees it first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[NormSpec] = []
        self.before: Callable[[NormSpec], None] = lambda spec: None
        self._build = compiler.build_planned
        monkeypatch.setattr(compiler, "build_planned", self)

    def __call__(self, text: str, manifest: Manifest) -> tuple[bytes, Manifest]:
        self.asked.append(manifest.spec)
        self.before(manifest.spec)
        return self._build(text, manifest)


def loaded_by_threads(specs: list[NormSpec]) -> list[object]:
    """What `loaded` gives to threads that all start at once: a module, or an error."""
    came: list[object] = [None] * len(specs)
    start = threading.Barrier(len(specs))

    def load(place: int) -> None:
        start.wait()
        try:
            came[place] = modules.loaded(specs[place], DeviceUri("local-task"))
        except Exception as error:
            came[place] = error

    threads = [threading.Thread(target=load, args=(place,)) for place in range(len(specs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return came


def test_threads_wait_for_the_one_that_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(monkeypatch)
    came = loaded_by_threads([unused(23)] * 8)
    assert isinstance(came[0], LayerNormBackward)
    assert all(one is came[0] for one in came)
    assert len(builds.asked) == 1
    assert modules.loaded(unused(23), DeviceUri("local-task")) is came[0]


def test_an_error_of_the_one_that_compiles_is_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(monkeypatch)

    def fail_once(spec: NormSpec) -> None:
        if len(builds.asked) == 1:
            raise CompileError("once")

    builds.before = fail_once
    came = loaded_by_threads([unused(24)] * 4)
    assert sum(isinstance(one, CompileError) for one in came) == 1
    assert len({id(one) for one in came if isinstance(one, LayerNormBackward)}) == 1
    assert len(builds.asked) == 2


def test_threads_that_need_other_modules_do_not_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them goes on once the other is done; else this would time out."""
    builds, done = Builds(monkeypatch), threading.Event()
    slow, quick = unused(25), unused(26)

    def wait(spec: NormSpec) -> None:
        if spec == slow:
            assert done.wait(60)

    builds.before = wait
    first = threading.Thread(target=modules.loaded, args=(slow, DeviceUri("local-task")))
    first.start()
    modules.loaded(quick, DeviceUri("local-task"))
    done.set()
    first.join()
    assert sorted(builds.asked, key=lambda spec: spec.columns) == [slow, quick]
