"""Odd places to run in: what can work there works, the rest is one clear error or warning."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from iree.compiler.tools.binaries import find_tool
from ranks import can_mount, mounted

import iree_lnbwd as lnbwd
from iree_lnbwd import CompileError, NormSpec
from iree_lnbwd.compiling import compiler, iree_compile
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.schedules import WholeTensors
from iree_lnbwd.vmfb import artifact

SPEC = NormSpec((8,))
TARGETS = ("generic", "gfx942", "sm_90")  # linked through a shell, linked without one, not linked

# Prints the digests of modules that were compiled, or the error.
COMPILE = """
import sys
import iree_lnbwd as lnbwd
from iree_lnbwd.compiling import compiler, iree_compile
from iree_lnbwd.hardware.targets import find_target

try:
    for name in sys.argv[1:] or ("generic", "gfx942", "sm_90"):
        spec = lnbwd.NormSpec((8,))
        print(compiler.build(spec, find_target(name))[1].vmfb_sha256)
except (lnbwd.CompileError, ValueError) as error:
    print(f"{type(error).__name__}: {error}")
"""

# Prints a gradient, for which something was compiled or found in the cache.
CALL = """
import numpy as np
import iree_lnbwd as lnbwd

x = np.arange(24, dtype=np.float32).reshape(3, 8)
mean, rstd = np.full(3, 11.5, np.float32), np.full(3, 0.2, np.float32)
print(lnbwd.layer_norm_backward(x, x, 8, mean, rstd).grad_bias.tolist())
"""
GRADIENT = "[24.0, 27.0, 30.0, 33.0, 36.0, 39.0, 42.0, 45.0]\n"


# A kernel with a value from nowhere, in a register of that constraint.
INLINE_ASSEMBLY = """
#layout = #hal.pipeline.layout<bindings = [#hal.pipeline.binding<storage_buffer>]>
#one = #iree_codegen.translation_info<
    pipeline = #iree_codegen.no_pipeline workgroup_size = [1, 1, 1]>
hal.executable.source public @executable {{
  hal.executable.export public @kernel ordinal(0) layout(#layout)
      count(%device: !hal.device) -> (index, index, index) {{
    %one = arith.constant 1 : index
    hal.return %one, %one, %one : index, index, index
  }}
  builtin.module {{
    func.func @kernel() attributes {{translation_info = #one}} {{
      %zero = arith.constant 0 : index
      %out = hal.interface.binding.subspan layout(#layout) binding(0) : memref<1xi32>
      %value = llvm.inline_asm "", "{}" : () -> i32
      memref.store %value, %out[%zero] : memref<1xi32>
      return
    }}
  }}
}}
"""


def python(
    script: str, *words: str | Path, shell: str = 'exec "$@"', cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, started by a line of shell."""
    return subprocess.run(
        ["/bin/sh", "-c", shell, "sh", sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=cwd,
        env={**os.environ, **env},
    )


def succeeded(ended: subprocess.CompletedProcess[str]) -> str:
    """What it printed; it must succeed, and complain of nothing."""
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def digests() -> str:
    """What `COMPILE` prints where nothing is odd."""
    modules = [compiler.build(SPEC, find_target(name))[1].vmfb_sha256 for name in TARGETS]
    return "".join(f"{digest}\n" for digest in modules)


# --- standard streams ------------------------------------------------------------------------

# How a process may have lost its standard error: before Python began, or since.
LOST = {
    "stderr": ('exec "$@" 2>&-', ""),
    "all three": ('exec "$@" <&- >&- 2>&-', ""),
    "stderr is None": ('exec "$@"', "sys.stderr = None"),
    "stderr was closed": ('exec "$@"', "sys.stderr.close()"),
    "its file was closed": ('exec "$@"', "os.close(2)"),
    "it is full": ('exec "$@" 2>/dev/full', ""),
}


@pytest.mark.drawn
@pytest.mark.parametrize("lost", LOST)
def test_without_standard_error(lost: str, tmp_path: Path) -> None:
    """Modules are compiled, iree-compile has something to say, and we have a warning to give."""
    shell, change = LOST[lost]
    (tmp_path / "file").touch()
    script = f"""
import os, sys
{change}
from pathlib import Path
import numpy as np

folder = Path(sys.argv[1])
try:
    import iree_lnbwd as lnbwd
    said = []
    for place in ("file", "cache"):
        os.environ["IREE_LNBWD_CACHE"] = str(folder / place)
        x = np.ones((1, len(place)), np.float32)
        said.append(lnbwd.layer_norm_backward(x, x, len(place)).grad_bias.sum())
    spec = lnbwd.NormSpec((8,))
    lnbwd.compile(spec, "generic", folder / "out", extra_flags=["--mlir-timing"])
except BaseException as error:
    said = repr(error)
(folder / "said").write_text(str(said))
"""
    # Buffered, any warning would make Python itself end with 120: it cannot flush it.
    ended = python(script, tmp_path, shell=shell, PYTHONUNBUFFERED="1")
    assert (tmp_path / "said").read_text() == str([np.float32(4), np.float32(5)])
    assert ended.returncode == 0
    assert len(list(tmp_path.rglob("*.vmfb"))) == 2


def test_what_iree_compile_says_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ("--mlir-timing", "--iree-hal-dump-executable-sources-to=-")
    compiler.build(SPEC, find_target("generic"), extra_flags=flags)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "Execution time report" in shown.err
    assert "hal.executable" in shown.err


# --- what the compiler says ------------------------------------------------------------------


def failed(*flags: str, how: WholeTensors | None = None) -> str:
    """The one line that says why."""
    with pytest.raises(CompileError) as caught:
        compiler.build(SPEC, find_target("generic"), schedule=how, extra_flags=flags)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("compiling layer_norm_backward_n8_f32 for generic failed: ")
    return said.removeprefix("compiling layer_norm_backward_n8_f32 for generic failed: ")


def test_a_compiler_that_a_signal_killed() -> None:
    said = failed("--iree-llvmcpu-number-of-threads=0", how=WholeTensors())
    assert said.startswith("iree-compile was killed by SIGFPE")


def test_a_fatal_error_of_llvm() -> None:
    assert failed("--stop-after=isel") == 'LLVM ERROR: "isel" pass is not registered.'


def test_an_error_of_iree_compile() -> None:
    said = failed("--iree-vm-target-index-bits=8")
    assert re.match(r"<stdin>:\d+:\d+: error: failed to legalize operation 'util.\w+'", said)
    assert len(said) < 1000


@pytest.mark.parametrize("target", ["gfx942", "gfx1100", "sm_90"])
def test_an_error_of_a_backend_that_goes_on(target: str) -> None:
    """iree-compile writes a module and ends with 0."""
    flags = compiler.flags(find_target(target))
    iree_compile.run(INLINE_ASSEMBLY.format("=r"), "none", flags, "it")
    with pytest.raises(CompileError) as caught:
        iree_compile.run(INLINE_ASSEMBLY.format("=Q"), "none", flags, "it")
    assert str(caught.value) == (
        "compiling it failed: error: could not allocate output register for constraint 'Q'"
    )


def test_remarks_about_errors_are_none(capfd: pytest.CaptureFixture[str]) -> None:
    remark = 'scf.if %true {{ }} {{ error = "no error: none" }}'
    text = INLINE_ASSEMBLY.replace(
        "%value = ", "%true = arith.constant true\n" + remark + "\n%value = "
    )
    flags = compiler.flags(find_target("gfx942"), extra_flags=["--mlir-print-ir-before-all"])
    iree_compile.run(text.format("=r"), "none", flags, "it")
    assert 'error = "no error: none"' in capfd.readouterr().err


def test_a_compiler_that_cannot_be_loaded() -> None:
    """It is installed, and is not said to be absent."""
    script = f"import resource\nresource.setrlimit(resource.RLIMIT_AS, ({300 << 20},) * 2)\n"
    said = succeeded(python("import numpy, iree_lnbwd\n" + script + COMPILE, "sm_90"))
    assert said.startswith("CompileError: iree-base-compiler cannot be imported: ")
    assert said.count("\n") == 1


# --- a compiler of one's own -----------------------------------------------------------------


def tool(folder: Path, script: str) -> None:
    """A program of that name, which runs the real one."""
    folder.mkdir()
    path = folder / "iree-compile"
    path.write_text(f"#!/bin/sh\nreal={shlex.quote(find_tool('iree-compile'))}\n{script}\n")
    path.chmod(0o755)


def test_the_printed_command_is_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for where the output goes, and that the compiler's path is written out."""
    tool(tmp_path / "tools", f'printf "%s\\n" "$@" >> {tmp_path}/words; exec "$real" "$@"')
    flags = ("--iree-opt-level=O1", "--iree-hal-dump-executable-files-to=a b;c")
    printed = compiler.command_line(SPEC, find_target("gfx942"), extra_flags=flags)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as ours:
        ours.setenv("IREE_TOOL_PATH", str(tmp_path / "tools"))
        compiler.build(SPEC, find_target("gfx942"), extra_flags=flags)
    version, *ran = (tmp_path / "words").read_text().splitlines()
    assert version == "--version"
    expected = shlex.split(printed)
    assert expected[0] == "iree-compile"
    place = expected.index("-o") + 1
    assert expected[place] == f"{SPEC.name}_gfx942.vmfb"
    ran[place - 1] = expected[place]
    assert ran == expected[1:]


def test_a_compiler_that_makes_another_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.mlir"
    other.write_text(compiler.source_text(NormSpec((9,)), find_target("generic")))
    tool(tmp_path / "tools", f'exec "$real" "$@" < {other}')
    monkeypatch.setenv("IREE_TOOL_PATH", str(tmp_path / "tools"))
    said = r"made another module: its spec is NormSpec\(normalized_shape=\(9,\), .*, not "
    with pytest.raises(CompileError, match=said) as caught:
        lnbwd.compile(SPEC, "generic", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", r"IREE_TOOL_PATH: .*/tools/iree-compile does not say which version it is"),
        ('test "$1" != --version || exec "$real" "$@"', "ended with code 0 and said nothing"),
        (
            'case "$1" in --version) exec "$real" "$@";; *) while test "$1" != -o; do shift; done; '
            'echo junk > "$2"; esac',
            "what iree-compile wrote: truncated, altered or not a .vmfb",
        ),
    ],
)
def test_a_compiler_that_makes_nothing(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path / "tools", script)
    monkeypatch.setenv("IREE_TOOL_PATH", str(tmp_path / "tools"))
    with pytest.raises(CompileError, match=said) as caught:
        lnbwd.compile(SPEC, "generic", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kibibytes", [100_000, 250_000])
def test_a_compiler_without_memory(
    kibibytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little for its code, or for its work."""
    limit = f'test "$1" = --version || ulimit -v {kibibytes}'
    tool(tmp_path / "tools", f'{limit}; exec "$real" "$@"')
    monkeypatch.setenv("IREE_TOOL_PATH", str(tmp_path / "tools"))
    said = f"^compiling {SPEC.name} for sm_90 failed: "
    with pytest.raises(CompileError, match=said) as caught:
        compiler.build(SPEC, find_target("sm_90"))
    assert "\n" not in str(caught.value)


def test_the_manifest_says_which_compiler_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path / "tools", 'exec "$real" "$@"')
    installed = compiler.build(SPEC, find_target("generic"))[1]
    monkeypatch.setenv("IREE_TOOL_PATH", str(tmp_path / "tools"))
    own = compiler.build(SPEC, find_target("generic"))[1]
    assert own.vmfb_sha256 == installed.vmfb_sha256
    assert own.compiler_version.startswith(installed.compiler_version)
    assert " @ " in own.compiler_version
    assert " @ " not in installed.compiler_version


@pytest.fixture(scope="module")
def oddly_installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The compiler below a folder whose name a shell takes apart."""
    folder = tmp_path_factory.mktemp("tools") / "a b;touch owned;'\"$(touch owned)"
    folder.mkdir()
    source = Path(find_tool("iree-compile")).resolve().parent
    for name in ("iree-compile", "iree-lld", "libIREECompiler.so"):
        try:
            os.link(source / name, folder / name)
        except OSError:  # on another device
            shutil.copy2(source / name, folder / name)
    if (source / "iree_platform_libs").is_dir():
        shutil.copytree(source / "iree_platform_libs", folder / "iree_platform_libs")
    yield folder
    shutil.rmtree(folder)  # hundreds of megabytes


@pytest.mark.drawn
def test_a_compiler_whose_path_a_shell_takes_apart(
    oddly_installed: Path, digests: str, tmp_path: Path
) -> None:
    ended = python(COMPILE, cwd=tmp_path, IREE_TOOL_PATH=str(oddly_installed))
    assert succeeded(ended) == digests
    assert not list(tmp_path.iterdir())


@pytest.mark.drawn
def test_variables_that_would_change_the_module(digests: str, tmp_path: Path) -> None:
    variables = {
        "IREE_LLVM_EMBEDDED_LINKER_PATH": "touch owned;",
        "IREE_LOAD_PLUGINS": "no-such-plugin",
        "LLD_REPRODUCE": str(tmp_path / "reproducer.tar"),
    }
    ended = python(COMPILE, cwd=tmp_path, **variables)  # IREE's own package complains of a plugin
    assert (ended.returncode, ended.stdout) == (0, digests)
    assert not list(tmp_path.iterdir())


# --- temporary files -------------------------------------------------------------------------

ODD = ("a b", "x;touch owned", "$(touch owned)", "`touch owned`", "a'b", 'a"b', "a\nb", "&", "ü")


def compiled() -> str:
    """The digest of a module that is compiled in this process, and linked through a shell."""
    return f"{compiler.build(SPEC, find_target('generic'))[1].vmfb_sha256}\n"


@pytest.mark.drawn
@pytest.mark.parametrize("name", ODD)
def test_temporary_folder_whose_path_a_shell_takes_apart(
    name: str, digests: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    assert digests.startswith(compiled())
    assert [path.name for path in tmp_path.rglob("*")] == [name]


@pytest.mark.drawn
@pytest.mark.parametrize("place", ["none", "file", "relative", "", "/proc", "open"])
def test_temporary_folder_that_cannot_be_used(
    place: str, digests: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "relative").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)  # where everybody can replace what the linker reads
    before = (tmp_path / "open").stat().st_mtime_ns
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "TMPDIR", place if place in ("relative", "", "/proc") else str(tmp_path / place)
    )
    assert digests.startswith(compiled())
    assert len(list(tmp_path.rglob("*"))) == 3
    assert (tmp_path / "open").stat().st_mtime_ns == before


def test_temporary_folder_is_used_and_left_empty(
    digests: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    tool(tmp_path / "tools", f'ls -ld "$TMPDIR" >> {tmp_path}/seen; exec "$real" "$@"')
    monkeypatch.setenv("IREE_TOOL_PATH", str(tmp_path / "tools"))
    monkeypatch.setenv("TMPDIR", str(place))
    assert digests.startswith(compiled())
    _, seen = (tmp_path / "seen").read_text().splitlines()  # of --version and of the compilation
    assert re.fullmatch(rf"drwx------.* {place}/iree-lnbwd-\w+", seen)
    assert not list(place.iterdir())


NAMESPACES = pytest.mark.skipif(not can_mount("/tmp"), reason="this user cannot mount file systems")
READ_ONLY, FULL = "ro,mode=1777", "size=64k,mode=1777"


@NAMESPACES
@pytest.mark.parametrize("options", [READ_ONLY, FULL])
def test_another_place_is_taken_for_temporary_files(options: str, digests: str) -> None:
    assert succeeded(python(COMPILE, shell=mounted({"/tmp": options}), TMPDIR="/tmp")) == digests


@NAMESPACES
def test_no_place_for_temporary_files() -> None:
    places = {"/tmp": READ_ONLY, "/var/tmp": FULL, "/dev/shm": READ_ONLY}
    said = succeeded(python(COMPILE, shell=mounted(places), TMPDIR="/nowhere"))
    assert said == (
        "CompileError: compiling layer_norm_backward_n8_f32 for generic failed: TMPDIR: expected "
        "a folder to write to, got /nowhere: No such file or directory; /tmp: Read-only file "
        "system; /var/tmp: No space left on device; /dev/shm: Read-only file system\n"
    )


@NAMESPACES
def test_a_cache_without_room_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    shell = mounted({str(tmp_path / "cache"): "size=4k,mode=0700"})
    ended = python(CALL, shell=shell, IREE_LNBWD_CACHE=str(tmp_path / "cache"))
    assert (ended.returncode, ended.stdout) == (0, GRADIENT)
    (warning,) = re.findall("RuntimeWarning: (.*)", ended.stderr)
    assert re.match(f"compiled module not cached: {tmp_path}/cache.*: No space left", warning)


# --- the process -----------------------------------------------------------------------------


@pytest.mark.drawn
def test_in_a_folder_that_is_gone(digests: str, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    shell = f'cd {tmp_path}/gone && rmdir ../gone && exec "$@"'
    ended = python(COMPILE + CALL, shell=shell, IREE_LNBWD_CACHE=str(tmp_path / "cache"))
    assert (ended.returncode, ended.stdout) == (0, digests + GRADIENT)  # shells do complain
    assert len(list(tmp_path.rglob("*.vmfb"))) == 1


@pytest.mark.drawn
@pytest.mark.parametrize("path", ["PATH=", ""])
def test_without_an_environment(path: str, digests: str) -> None:
    given = f"{path} PYTHONPATH={shlex.quote(os.environ.get('PYTHONPATH', ''))}"
    assert succeeded(python(COMPILE, shell=f'exec /usr/bin/env -i {given} "$@"')) == digests


# As servers do: a child that ignores it, too, cannot wait for its linker. Or another thread waits.
CHILDREN = {
    "ignored": "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n",
    "waited for": """
import os, threading, time

def wait():
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.001)

threading.Thread(target=wait, daemon=True).start()
""",
}


@pytest.mark.drawn
@pytest.mark.parametrize("children", CHILDREN)
def test_where_we_cannot_wait_for_children(children: str, digests: str) -> None:
    assert succeeded(python(CHILDREN[children] + COMPILE)) == digests


def test_an_error_where_we_cannot_wait_for_children(tmp_path: Path) -> None:
    script = """
import signal, sys
import iree_lnbwd as lnbwd
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
try:
    spec = lnbwd.NormSpec((8,))
    lnbwd.compile(spec, "generic", sys.argv[1], extra_flags=["--no-such-flag"])
except lnbwd.CompileError as error:
    print(error)
"""
    said = succeeded(python(script, tmp_path / "out"))
    assert "iree-compile: Unknown command line argument '--no-such-flag'" in said
    assert not (tmp_path / "out").exists()


def test_a_fork_while_another_thread_compiles(tmp_path: Path) -> None:
    """The child has none of the other threads, and must not wait for them."""
    script = """
import os, threading
from iree_lnbwd import NormSpec
from iree_lnbwd.calls import calling, modules
from iree_lnbwd.compiling import compiler, iree_compile
from iree_lnbwd.stores import cache
from iree_lnbwd.hardware.devices import DeviceUri

build, compiling, forked = compiler.build_planned, threading.Event(), threading.Event()

def wait(*words, **options):
    compiling.set()
    forked.wait()
    return build(*words, **options)

compiler.build_planned = wait
key = (NormSpec((8,)), DeviceUri("local-task"))
thread = threading.Thread(target=modules.loaded, args=key)
thread.start()
compiling.wait()
if (child := os.fork()) == 0:
    cache._LONGEST_COMPILATION = 0.5  # how long it waits for the other process, which compiles
    forked.set()
    modules.loaded(*key)
    os._exit(0)
ended = os.waitpid(child, 0)[1]
forked.set()
thread.join()
print(os.waitstatus_to_exitcode(ended))
"""
    ended = python(script, shell='exec timeout 120 "$@"', IREE_LNBWD_CACHE=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


def test_processes_that_fill_a_cache_together(tmp_path: Path) -> None:
    words = [sys.executable, "-W", "error", "-c", CALL]
    environment = {**os.environ, "IREE_LNBWD_CACHE": str(tmp_path / "new" / "cache")}
    several = [
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [process.communicate(timeout=300)[0] for process in several] == [GRADIENT] * 4
    assert sorted(p.suffix for p in tmp_path.rglob("*") if p.is_file()) == [".json", ".vmfb"]
    (vmfb,) = tmp_path.rglob("*.vmfb")
    assert artifact.read(vmfb)[1] is not None


# --- the user --------------------------------------------------------------------------------


def others_can_read(*places: str) -> bool:
    """Whether another user gets as far as these files."""
    folders = {folder for place in places for folder in Path(place).resolve().parents}
    return all(folder.stat().st_mode & 0o5 == 0o5 for folder in folders)


HOMELESS = pytest.mark.skipif(
    os.geteuid() != 0 or not others_can_read(find_tool("iree-compile"), lnbwd.__file__),
    reason="only root can be another user, who must get to this package and its compiler",
)

# All of Python that is imported later on is imported as root, who may be the only one to read it.
AS_NOBODY = """
import os, pwd, warnings
import numpy as np
import numpy.ma
import iree_lnbwd as lnbwd
from iree_lnbwd.compiling import compiler, iree_compile
from iree_lnbwd.stores import cache
from iree_lnbwd.hardware.targets import find_target
cache.build(lnbwd.NormSpec((4,)), find_target("host"))
warnings.simplefilter("always")
for name, value in {changes}.items():
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
"""


@pytest.mark.drawn
@HOMELESS
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"HOME": None}, "HOME: expected an absolute path, got none"),
        ({"HOME": ""}, "HOME: expected an absolute path, got ''"),
        ({"HOME": "here"}, "HOME: expected an absolute path, got 'here'"),
        ({"HOME": "/"}, "/.cache: Permission denied"),
        ({"HOME": "/proc"}, "/proc/.cache: No such file or directory"),
        ({"IREE_LNBWD_CACHE": "/"}, "/.*: Permission denied"),
    ],
)
def test_a_user_without_a_folder(changes: dict[str, str | None], said: str, tmp_path: Path) -> None:
    none = {"IREE_LNBWD_CACHE": None, "XDG_CACHE_HOME": None, "TMPDIR": None}
    script = AS_NOBODY.format(changes=none | changes)
    ended = python(script + CALL, cwd=tmp_path, IREE_LNBWD_CACHE=str(tmp_path / "roots"))
    assert (ended.returncode, ended.stdout) == (0, GRADIENT), ended.stderr
    (warning,) = re.findall("RuntimeWarning: (.*)", ended.stderr)
    assert re.match(f"compiled module not cached: {said}; IREE_LNBWD_CACHE can name", warning)
    assert [path.name for path in tmp_path.iterdir()] == ["roots"]


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that others can read; those of the tests are for us alone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@HOMELESS
def test_a_cache_that_root_filled_serves_all_who_can_read_it(
    readable: Path, tmp_path: Path
) -> None:
    place = readable / "cache"
    python(CALL, IREE_LNBWD_CACHE=str(place))
    for folder in (place, *place.iterdir()):
        folder.chmod(0o755)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    script = AS_NOBODY.format(changes={"IREE_LNBWD_CACHE": str(place)})
    spec = "lnbwd.NormSpec((8,), has_weight=False)"
    found = f"assert cache.Entry({spec}, find_target('host')).kept\n"
    ended = python(script + found + CALL, IREE_LNBWD_CACHE=str(tmp_path / "roots"))
    assert succeeded(ended) == GRADIENT
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


# --- interruption ----------------------------------------------------------------------------


def test_a_killed_compiler_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tool(tmp_path / "tools", 'test "$1" = --version && exec "$real" "$@"; kill -KILL $$')
    monkeypatch.setenv("IREE_TOOL_PATH", str(tmp_path / "tools"))
    with pytest.raises(CompileError, match=r"failed: iree-compile was killed by SIGKILL$"):
        lnbwd.compile(SPEC, "generic", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tools"]
