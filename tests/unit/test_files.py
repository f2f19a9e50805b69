"""Files appear whole or not at all and keep their modes; only files are read or replaced."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iree_lnbwd.disk import files

DATA = bytes(range(256)) * 1000


def write(path: Path, data: bytes = DATA) -> None:
    files.write({path: data})


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- writing ---------------------------------------------------------------------------------


def test_several_files_at_once(tmp_path: Path) -> None:
    files.write({tmp_path / "a": b"one", tmp_path / "b": DATA})
    assert (tmp_path / "a").read_bytes() == b"one"
    assert (tmp_path / "b").read_bytes() == DATA
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_a_new_file_has_the_mode_that_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "new")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new") == 0o666 & ~umask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755, 0o400])
def test_an_existing_file_keeps_its_mode(mode: int, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"before")
    (tmp_path / "old").chmod(mode)
    write(tmp_path / "old")
    assert mode_of(tmp_path / "old") == mode
    assert (tmp_path / "old").read_bytes() == DATA


@pytest.mark.parametrize("there", ["there", "not there"])
@pytest.mark.parametrize("links", [1, 2])
def test_a_link_is_followed(there: str, links: int, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "file"
    if there == "there":
        target.write_bytes(b"before")
    link = tmp_path / "link1"
    link.symlink_to(Path("elsewhere") / "file")
    if links == 2:
        link = tmp_path / "link2"
        link.symlink_to("link1")
    write(link)
    assert link.is_symlink()
    assert not target.is_symlink()
    assert target.read_bytes() == DATA
    assert names(tmp_path / "elsewhere") == ["file"]


def test_the_longest_name_that_a_file_can_have(tmp_path: Path) -> None:
    write(tmp_path / ("x" * 255))
    assert names(tmp_path) == ["x" * 255]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[bytes] = []
    reader = threading.Thread(
        target=lambda: got.append((tmp_path / "pipe").read_bytes()), daemon=True
    )
    reader.start()
    write(tmp_path / "pipe")
    reader.join(timeout=60)
    assert got == [DATA]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert names(tmp_path) == ["pipe"]


def test_a_pipe_whose_reader_goes_away(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["head", "-c", "10", tmp_path / "pipe"], stdout=subprocess.DEVNULL)
    with pytest.raises(BrokenPipeError):
        write(tmp_path / "pipe", DATA * 10)
    reader.wait(timeout=60)


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "link", "link to the link"])
def test_an_open_file_is_written_where_it_stands(name: str, tmp_path: Path) -> None:
    """As a shell's `3>>file` has it: not replaced, not cut, and written on from there."""
    (tmp_path / "log").write_bytes(b"before ")
    node = (tmp_path / "log").stat().st_ino
    with (tmp_path / "log").open("ab") as log:
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{log.fileno()}")  # as /dev/stdout is one
        (tmp_path / "link to the link").symlink_to("link")
        files.write({tmp_path / name.format(log.fileno()): DATA})
        log.write(b" after")
    assert (tmp_path / "log").read_bytes() == b"before " + DATA + b" after"
    assert (tmp_path / "log").stat().st_ino == node
    assert names(tmp_path) == ["link", "link to the link", "log"]


@pytest.mark.parametrize("number", ["987654", "99999999999999999999"])
def test_a_number_that_is_not_open(number: str) -> None:
    with pytest.raises(OSError, match=r"Bad file descriptor|No such file"):
        write(Path("/dev/fd") / number)


def test_a_file_that_is_open_for_reading(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with (
        (tmp_path / "file").open("rb") as file,
        pytest.raises(OSError, match="Bad file descriptor"),
    ):
        write(Path(f"/dev/fd/{file.fileno()}"))
    assert (tmp_path / "file").read_bytes() == b"before"


def test_a_terminal_gets_no_binary_data() -> None:
    ours, theirs = pty.openpty()
    try:
        with pytest.raises(OSError, match="expected a file or a pipe, got a terminal"):
            write(Path(f"/dev/fd/{theirs}"))
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):
            os.read(ours, 1)
    finally:
        os.close(ours)
        os.close(theirs)


def loop(folder: Path) -> Path:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    return folder / "a"


def listening(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    return folder / "socket"


def below_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "below"


def a_folder(folder: Path) -> Path:
    (folder / "folder").mkdir()
    return folder / "folder"


def a_link(folder: Path) -> Path:
    (folder / "link").symlink_to(a_folder(folder))
    return folder / "link"


# What cannot be a file, and what the system says of it.
NO_FILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "folder": (a_folder, "Is a directory"),
    "folder through a link": (
        a_link,
        "Is a directory",
    ),
    "below a file": (below_a_file, "Not a directory"),
    "loop of links": (loop, "Too many levels of symbolic links"),
    "name too long": (lambda folder: folder / ("x" * 256), "File name too long"),
    "path too long": (lambda folder: folder / ("x/" * 4000), "File name too long"),
}


@pytest.mark.parametrize("what", NO_FILE)
def test_neither_file_is_there_where_one_cannot_be(what: str, tmp_path: Path) -> None:
    make, said = NO_FILE[what]
    path = make(tmp_path)
    (tmp_path / "old").write_bytes(b"before")
    before = names(tmp_path)
    for contents in (
        {tmp_path / "old": DATA, tmp_path / "new": DATA, path: DATA},
        {path: DATA, tmp_path / "old": DATA, tmp_path / "new": DATA},
    ):
        with pytest.raises(OSError, match=said):
            files.write(contents)
        assert names(tmp_path) == before
        assert (tmp_path / "old").read_bytes() == b"before"


def test_a_socket_and_a_missing_folder_take_nothing(tmp_path: Path) -> None:
    path = listening(tmp_path)
    with pytest.raises(OSError, match="No such device or address"):
        write(path)
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none" / "file")
    assert names(tmp_path) == ["socket"]


@pytest.mark.parametrize("name", ["nul\0", "\ud800"])
def test_what_can_be_no_name(name: str, tmp_path: Path) -> None:
    for use in (write, lambda path: files.read(path, most=1)):
        with pytest.raises(ValueError, match=r"null byte|can't encode"):
            use(tmp_path / name)
    assert names(tmp_path) == []


def test_readers_see_one_whole_version(tmp_path: Path) -> None:
    path = tmp_path / "file"
    versions = [bytes([i]) * 200_000 for i in range(4)]
    write(path, versions[0])

    def rewrite(data: bytes) -> None:
        for _ in range(25):
            write(path, data)

    writers = [threading.Thread(target=rewrite, args=(data,)) for data in versions]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert files.read(path, most=200_000) in versions
    assert names(tmp_path) == ["file"]


FILLED_UP = """
import errno, resource, sys
from pathlib import Path
from iree_lnbwd.disk import files

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # Python ignores SIGXFSZ
folder = Path(sys.argv[1])
try:
    files.write({folder / "old": b"after", folder / "new": bytes(100_001)})
except OSError as error:
    assert error.errno == errno.EFBIG, error
else:
    raise AssertionError("it was written")
"""


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """Neither the file that it took nor the one that it did not is there."""
    (tmp_path / "old").write_bytes(b"before")
    subprocess.run([sys.executable, "-c", FILLED_UP, tmp_path], check=True, timeout=60)
    assert names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == b"before"


WRITES = """
import sys
from pathlib import Path
from iree_lnbwd.disk import files

folder = Path(sys.argv[1])
print("ready", flush=True)
try:
    while True:
        files.write({folder / "a": bytes(300_000), folder / "b": bytes(300_000)})
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.drawn
def test_interrupted_at_any_time_nothing_is_left_over(tmp_path: Path) -> None:
    for round_ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITES, tmp_path], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(0.003 + 0.0012 * round_)
        writer.send_signal(signal.SIGINT)
        writer.communicate(timeout=60)
        assert writer.returncode == 7
        assert set(names(tmp_path)) <= {"a", "b"}
        assert {path.stat().st_size for path in tmp_path.iterdir()} <= {300_000}


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    """While the second file is written, that of the first goes."""
    folder = tmp_path / "folder"
    folder.mkdir()

    class Contents(dict[Path, bytes]):
        def items(self) -> Any:
            yield folder / "a", DATA
            shutil.rmtree(folder)
            yield tmp_path / "b", DATA

    with pytest.raises(FileNotFoundError):
        files.write(Contents())
    assert names(tmp_path) == []


# --- reading ---------------------------------------------------------------------------------


def test_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert files.read(tmp_path / name, most=len(DATA)) == DATA


def test_read_of_more_than_there_can_be(tmp_path: Path) -> None:
    """Also where that would not fit the memory."""
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="expected at most 1000 bytes, got 1099511627776"):
        files.read(tmp_path / "file", most=1000)


@pytest.mark.parametrize("what", NO_FILE)
def test_read_of_what_is_no_file(what: str, tmp_path: Path) -> None:
    make, said = NO_FILE[what]
    with pytest.raises(OSError, match=said):
        files.read(make(tmp_path), most=1000)


def test_read_of_a_pipe_neither_waits_nor_disturbs_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    said = "expected a regular file, got a pipe, a socket or a device"
    for path in (tmp_path / "pipe", listening(tmp_path)):
        with pytest.raises(OSError, match=said):
            files.read(path, most=1000)
    writer = subprocess.Popen(["dd", "if=/dev/zero", f"of={tmp_path}/pipe", "bs=1", "count=1"])
    time.sleep(0.2)
    with pytest.raises(OSError, match=said):
        files.read(tmp_path / "pipe", most=1000)
    assert (tmp_path / "pipe").read_bytes() == b"\0"
    assert writer.wait(timeout=60) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_read_of_an_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0)
    with pytest.raises(PermissionError):
        files.read(tmp_path / "file", most=1000)


@pytest.mark.parametrize("change", ["longer", "shorter", "other"])
def test_a_file_that_changes_while_it_is_read(change: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    os.utime(path, (0, 0))
    changed = {"longer": DATA + b"x", "shorter": DATA[:-1], "other": DATA[::-1]}[change]

    def read() -> None:
        with files.opened(path) as file:
            file.read(10)
            path.write_bytes(changed)

    with pytest.raises(OSError, match="it changed while it was read"):
        read()
