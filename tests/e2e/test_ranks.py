"""Processes that start at once on one empty cache: all are right, and each module is compiled once.

The C++ operators are `pytorch/test_native_ranks.py`'s.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import can_mount, ended, go, mounted, run, start

from iree_lnbwd import NormSpec
from iree_lnbwd.disk.user_folders import UserFolder
from iree_lnbwd.stores import shipping
from iree_lnbwd.vmfb import artifact

RANKS = 8
MOUNTS = pytest.mark.skipif(not can_mount(), reason="this user cannot mount file systems")

# Two modules, forward and backward, judged; then how many were compiled here, or the error.
WORK = """
from iree_lnbwd import reference
from iree_lnbwd.ops.arguments import bind

x = np.random.default_rng(0).standard_normal((33, 48), dtype=np.float32)
weight = x[0] + 2
try:
    found = [lnbwd.layer_norm(x, 48, weight, x[1])]
    found.append(lnbwd.layer_norm_backward(x, x, 48, weight=weight))
    asked = (
        bind("layer_norm", {"input": x, "weight": weight, "bias": x[1]}, 48),
        bind("layer_norm_backward", {"grad_output": x, "input": x, "weight": weight}, 48),
    )
    for results, call in zip(found, asked):
        judgement = reference.judge(call)
        for name, expected in judgement.expected.items():
            got = getattr(results, name)
            assert reference.compare(got, expected, judgement.tolerance[name]).passed, name
    print(json.dumps(len(compiled)))
except lnbwd.CompileError as error:
    print(json.dumps(str(error)))
"""
NO_COMPILER = """
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "iree.compiler" or name.startswith("iree.compiler."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from importlib import metadata
version = metadata.version
def absent(name):
    if name == "iree-base-compiler":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = absent
"""
WARNED = re.compile("RuntimeWarning: (.*)")


def files_of(folder: Path) -> list[str]:
    return sorted(path.suffix or path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.drawn
def test_each_module_is_compiled_once(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    ranks = run(WORK, RANKS, IREE_LNBWD_CACHE=str(cache))
    assert [rank.stderr for rank in ranks] == [""] * RANKS
    assert sum(rank.said for rank in ranks) == 2
    assert files_of(cache) == [".json", ".json", ".vmfb", ".vmfb"]
    assert all(artifact.read(path)[1] is not None for path in cache.rglob("*.vmfb"))


def test_without_a_compiler(tmp_path: Path) -> None:
    """Each has the same error, in one line; with modules that were put there, all are right."""
    cache = tmp_path / "cache"
    for rank in run(WORK, RANKS, imports=NO_COMPILER, IREE_LNBWD_CACHE=str(cache)):
        assert re.fullmatch("compiling needs iree-base-compiler, which is not .*", rank.said)
        assert rank.stderr == ""
    assert not list(tmp_path.rglob("*"))
    for op, eps in (("layer_norm", 1e-5), ("layer_norm_backward", 1e-5)):
        shipping.compile(NormSpec((48,), op=op, eps=eps), "host", cache)
    ranks = run(WORK, 3, imports=NO_COMPILER, IREE_LNBWD_CACHE=str(cache))
    assert ranks == [(0, "")] * 3


# The first that compiles says so, and stays there.
STAYS = """
def counted(*words):
    open(os.environ["COMPILING"], "w").close()
    time.sleep(600)

iree_compile.run = counted
"""


@pytest.mark.drawn
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_never_gives_its_lock_back(how: signal.Signals, tmp_path: Path) -> None:
    """A killed process holds none; one that was stopped is not waited for without end."""
    compiling = tmp_path / "compiling"
    variables = {"IREE_LNBWD_CACHE": str(tmp_path / "cache"), "COMPILING": str(compiling)}
    (first,) = start(STAYS + WORK, 1, **variables)
    impatient = "from iree_lnbwd.stores import cache\ncache._LONGEST_COMPILATION = 0.5\n"
    others = start(WORK, 3, imports=impatient if how == signal.SIGSTOP else "", **variables)
    go([first])
    while not compiling.exists():
        time.sleep(0.01)
    first.send_signal(how)
    began = time.monotonic()
    go(others)
    ranks = ended(others, seconds=40)
    assert time.monotonic() - began < 40
    first.kill()
    first.communicate()
    assert [rank.stderr for rank in ranks] == [""] * 3
    assert sum(rank.said for rank in ranks) >= 2
    assert files_of(tmp_path / "cache") == [".json", ".json", ".vmfb", ".vmfb"]


@pytest.mark.drawn
@MOUNTS
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("ro,mode=0700", "Read-only file system"),
        ("size=4k,mode=0700", "No space left on device"),
    ],
)
def test_a_cache_that_cannot_be_written_to(options: str, said: str, tmp_path: Path) -> None:
    """Each compiles for itself, and says why it keeps nothing."""
    place = tmp_path / "cache"
    place.mkdir(mode=0o700)
    script = f"""{WORK}
print(json.dumps([len(compiled), [p for _, _, names in os.walk({str(place)!r}) for p in names]]))
"""
    # One namespace of all: the first process of it starts the others.
    alone = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import json, ranks
print(json.dumps(ranks.run({script!r}, 3, IREE_LNBWD_CACHE={str(place)!r})))
"""
    words = ["/bin/sh", "-c", mounted({str(place): options}), "sh", sys.executable, "-c", alone]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for (compiled, left), stderr in json.loads(ran.stdout):
        assert (compiled, left) == (2, [])
        for warning in (warnings := WARNED.findall(stderr)):
            assert re.fullmatch(f"compiled module not cached: {place}.*: {said}; IREE_.*", warning)
        assert warnings


@pytest.mark.drawn
def test_without_a_home(tmp_path: Path) -> None:
    for rank in run(WORK, 2, IREE_LNBWD_CACHE="", XDG_CACHE_HOME="", HOME=""):
        assert rank.said == 2
        (warning,) = WARNED.findall(rank.stderr)
        assert "HOME: expected an absolute path, got ''" in warning


LATER = """
x = np.ones((2, 8), np.float32)
came = []
for columns in (7, 8):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lnbwd.rms_norm(x[:, :columns], columns)
    came.append(len(caught))
    if columns == 7:
        os.unlink(os.path.dirname(os.environ["IREE_LNBWD_CACHE"]))
print(json.dumps(came))
"""


def test_a_place_that_appears_later(tmp_path: Path) -> None:
    """A file is in its way at the first call."""
    (tmp_path / "place").touch()
    (rank,) = run(LATER, 1, IREE_LNBWD_CACHE=str(tmp_path / "place" / "cache"))
    assert rank == ([1, 0], "")
    assert files_of(tmp_path / "place") == [".json", ".vmfb"]


FOLDER = UserFolder("IREE_LNBWD_CACHE", "XDG_CACHE_HOME", ".cache")


def test_a_lock_leaves_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "cache"))
    entry = Path("torch", "0123")
    with FOLDER.locked(entry, seconds=1) as waited:
        assert not waited
        assert (tmp_path / "cache" / entry).is_dir()
        began, told = time.monotonic(), []
        with FOLDER.locked(entry, seconds=0.2, waiting=lambda: told.append(1)) as also:
            assert also  # in vain
        assert 0.2 <= time.monotonic() - began < 5
        assert told == [1]
        assert (tmp_path / "cache" / entry).is_dir()  # it is not the one's who waited
    assert not list((tmp_path / "cache").iterdir())
    with FOLDER.locked(entry, seconds=1) as waited:
        assert not waited
        FOLDER.write(entry, {"file": b"content"})
    assert FOLDER.read(entry, "file") == (b"content",)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12's
# The child takes no lock of threads. PyTorch or JAX, of tests before, may have some of those.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_fork_does_not_keep_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the descriptor, too."""
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "cache"))
    with FOLDER.locked(Path("entry"), seconds=1):
        read, write = os.pipe()
        forked = os.fork()
        if forked == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        os.close(read)
    try:
        with FOLDER.locked(Path("entry"), seconds=1) as waited:
            assert not waited
    finally:
        os.close(write)
        os.waitpid(forked, 0)
