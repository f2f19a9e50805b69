"""Arrays by name in .npz files, bf16 too."""

from __future__ import annotations

import io
import os
import stat
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from iree_lnbwd.ops import npz
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES


def every_dtype() -> dict[str, Array]:
    values = np.linspace(-3, 3, 12).reshape(3, 4)
    return {name: values.astype(dtype.numpy) for name, dtype in DTYPES.items()}


def assert_same(actual: dict[str, Array], expected: dict[str, Array]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        assert actual[name].tobytes() == array.tobytes(), name


def test_round_trip(tmp_path: Path) -> None:
    npz.write(tmp_path / "all.npz", every_dtype())
    assert_same(npz.read(tmp_path / "all.npz"), every_dtype())


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1, 1, 1)])
def test_round_trip_of_odd_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    arrays = {name: np.ones(shape, dtype.numpy) for name, dtype in DTYPES.items()}
    npz.write(tmp_path / "odd.npz", arrays)
    assert_same(npz.read(tmp_path / "odd.npz"), arrays)


def test_round_trip_of_other_layouts(tmp_path: Path) -> None:
    arrays = {f"{n}{i}": a for n, x in every_dtype().items() for i, a in enumerate((x.T, x[::2]))}
    npz.write(tmp_path / "views.npz", arrays)
    assert_same(npz.read(tmp_path / "views.npz"), arrays)


def test_bf16_is_stored_as_its_bits(tmp_path: Path) -> None:
    npz.write(tmp_path / "x.npz", {"x": np.array([1.0, -2.0], ml_dtypes.bfloat16)})
    with np.load(tmp_path / "x.npz") as plain:
        assert plain.files == ["x:bf16"]
        assert plain["x:bf16"].dtype == np.uint16
        assert plain["x:bf16"].tolist() == [0x3F80, 0xC000]


def test_bf16_bits_are_uint16(tmp_path: Path) -> None:
    npz.write(tmp_path / "x.npz", {"x:bf16": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"x:bf16: expected uint16 bits of bf16, got float32"):
        npz.read(tmp_path / "x.npz")


def test_bf16_that_numpy_wrote_is_refused_with_a_hint(tmp_path: Path) -> None:
    """NumPy forgets its type."""
    np.savez(tmp_path / "x.npz", input=np.ones(3, ml_dtypes.bfloat16))
    said = r"input: expected an element type, got .V2, .*input\.view\(np\.uint16\) .* 'input:bf16'$"
    with pytest.raises(ValueError, match=said):
        npz.read(tmp_path / "x.npz")


def test_keys_with_a_slash_are_cases(tmp_path: Path) -> None:
    one: Array = np.ones(1, np.float32)
    two: Array = np.full(2, 2, ml_dtypes.bfloat16)
    npz.write(
        tmp_path / "cases.npz", {"a/input": one, "step300.h0/input": two, "deep/er/input": one}
    )
    cases = npz.read_cases(tmp_path / "cases.npz")
    assert {name: list(arrays) for name, arrays in cases.items()} == {
        "a": ["input"],
        "step300.h0": ["input"],
        "deep/er": ["input"],
    }
    assert_same(cases["step300.h0"], {"input": two})


def test_keys_without_a_slash_are_one_case(tmp_path: Path) -> None:
    arrays: dict[str, Array] = {
        "input": np.ones(1, np.float32),
        "weight": np.ones(1, np.float16),
    }
    npz.write(tmp_path / "one.npz", arrays)
    (case,) = npz.read_cases(tmp_path / "one.npz").items()
    assert case[0] == ""
    assert_same(case[1], arrays)


def test_provenance_is_no_argument(tmp_path: Path) -> None:
    arrays = {"a/input": np.ones(1, np.float32), "provenance": np.array("where it is from")}
    npz.write(tmp_path / "x.npz", arrays)
    assert list(npz.read_cases(tmp_path / "x.npz")) == ["a"]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.npz: expected a readable \.npz file: .*No such"):
        npz.read(tmp_path / "none.npz")


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x93NUMPY"])
def test_a_file_that_is_no_npz(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.npz: expected a readable \.npz file"):
        npz.read(tmp_path / "x.npz")


def test_a_single_array(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    with pytest.raises(
        ValueError, match=r"x\.npy: expected a readable \.npz file: it is an \.npy file"
    ):
        npz.read(tmp_path / "x.npy")


def test_pickles_are_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match=r"x\.npz: .*allow_pickle=False"):
        npz.read(tmp_path / "x.npz")


def npy(array: Array) -> bytes:
    """The bytes of an .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def with_header(header: str, data: bytes = b"") -> bytes:
    """An .npy file that says this of itself."""
    padded = header + " " * (-(len(header) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + data


def declared(shape: str, descr: str = "'<f4'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
    return with_header(header, bytes(64))


def write_members(path: Path, *members: tuple[str, bytes]) -> None:
    """A ZIP file of these members, whatever they are, and however often."""
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name that comes twice
        for name, data in members:
            archive.writestr(name, data)


ONES = npy(np.ones(16, np.float32))

# What is no array, though it may begin like one.
NO_ARRAYS = {
    "nothing": b"",
    "text": b"to whom it may concern",
    "the beginning of an array": ONES[:100],
    "less data than its header declares": ONES[:-1],
    "more data than its header declares": ONES + b"\0",
    "a shape of petabytes": declared("(1000000000000, 1000)"),
    "a shape of more elements than 64 bits count": declared("(4294967296, 4294967296)"),
    "a shape of more elements than that, of which 16 remain": declared("(4294967296, 4294967297)"),
    "a dimension of more than 64 bits": declared(f"({10**30},)"),
    "a dimension of very many digits": declared("(" + "9" * 5000 + ",)"),
    "a negative dimension": declared("(-1,)"),
    "two negative dimensions": declared("(-4, -4)"),
    "a dimension that is no int": declared("(1.5,)"),
    "a shape that is no tuple": declared("16"),
    "a deep header": with_header("(" * 9000),
    "a header that does not end": with_header("{'descr': '<f4', 'shape': ("),
    "a header that is no text": with_header("\x00\x01"),
    "a header with a name twice": with_header("{'descr': '<f4', 'descr': '<f8', 'shape': ()}"),
    "a header that calls": with_header("{'descr': print(1), 'fortran_order': 0, 'shape': ()}"),
    "an unknown type": declared("(16,)", "'<q9'"),
    "a type of gigabytes": declared("(16,)", "'<V2147483647'"),
    "a type that is no string": declared("(16,)", "[('a', [('b', 'c')])]"),
    "objects": declared("(16,)", "'|O'"),
    "an unknown version": ONES[:6] + b"\x09\x00" + ONES[8:],
    "another archive": b"PK\x05\x06" + bytes(18),
}


@pytest.mark.parametrize("what", NO_ARRAYS)
def test_a_member_that_is_no_array(what: str, tmp_path: Path) -> None:
    write_members(tmp_path / "x.npz", ("input.npy", ONES), ("weight.npy", NO_ARRAYS[what]))
    said = r"x\.npz: expected a readable \.npz file: weight\.npy: no array: [^\n]{1,300}$"
    with pytest.raises(ValueError, match=said):
        npz.read(tmp_path / "x.npz")


def test_a_folder_in_the_archive_is_no_array(tmp_path: Path) -> None:
    write_members(tmp_path / "x.npz", ("case/", b""), ("case/input.npy", ONES))
    with pytest.raises(ValueError, match=r"x\.npz: .*: case/: no array: "):
        npz.read(tmp_path / "x.npz")


BITS = npy(np.ones(16, np.uint16))


@pytest.mark.parametrize(
    "names",
    [
        ("weight.npy", "weight.npy"),
        ("weight.npy", "weight:bf16.npy"),
        ("weight:bf16.npy", "weight.npy"),
        ("weight", "weight.npy"),
        ("case/weight.npy", "case/weight:bf16.npy"),
    ],
)
def test_two_arrays_under_one_name(names: tuple[str, str], tmp_path: Path) -> None:
    """Neither of them is the one that was meant."""
    write_members(tmp_path / "x.npz", *((name, BITS) for name in names))
    for read in (npz.read, npz.read_cases):
        with pytest.raises(ValueError, match=r"x\.npz: .*weight: expected one array of that name"):
            read(tmp_path / "x.npz")


def test_two_arrays_under_one_name_of_the_case_without_a_name(tmp_path: Path) -> None:
    write_members(tmp_path / "x.npz", ("weight.npy", ONES), ("/weight.npy", ONES))
    with pytest.raises(ValueError, match=r"x\.npz: /weight: expected one array of that name"):
        npz.read_cases(tmp_path / "x.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_of_what_is_compressed(method: int, tmp_path: Path) -> None:
    """Each method has errors of its own."""
    data = npy(np.arange(3000.0))
    with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
        archive.writestr("x.npy", data)
    assert npz.read(tmp_path / "x.npz")["x"].tolist() == list(range(3000))
    whole = (tmp_path / "x.npz").read_bytes()
    for position in range(30, len(whole) - 100, len(whole) // 40):
        (tmp_path / "x.npz").write_bytes(whole[:position] + bytes(10) + whole[position + 10 :])
        with pytest.raises(ValueError, match=r"x\.npz: expected a readable \.npz file: [^\n]+$"):
            npz.read(tmp_path / "x.npz")


def test_a_shape_that_was_damaged(tmp_path: Path) -> None:
    """What is not read has a checksum, too."""
    np.savez(tmp_path / "x.npz", x=np.arange(30000.0))
    whole = (tmp_path / "x.npz").read_bytes()
    assert whole.count(b"(30000,)") == 1
    (tmp_path / "x.npz").write_bytes(whole.replace(b"(30000,)", b"(20000,)"))
    with pytest.raises(ValueError, match="more bytes than its array has"):
        npz.read(tmp_path / "x.npz")


def pipe(path: Path) -> None:
    os.mkfifo(path)


# What is no regular file.
NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (pipe, "expected a regular file, got a pipe, a socket or a device"),
    "folder": (lambda path: path.mkdir(), "Is a directory"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_not_read(kind: str, tmp_path: Path) -> None:
    make, said = NO_FILES[kind]
    make(tmp_path / "x.npz")
    with pytest.raises(ValueError, match=rf"x\.npz: expected a readable \.npz file: {said}$"):
        npz.read(tmp_path / "x.npz")


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    npz.write(path, every_dtype())
    path.chmod(0o640)
    npz.write(path, every_dtype())
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_damage_is_found_or_harmless(tmp_path: Path) -> None:
    """What a checksum covers, the values, are never read wrong. Names and dates it does not."""
    path, arrays = tmp_path / "x.npz", {"a": np.ones(5), "b": np.arange(300.0)}
    np.savez_compressed(path, a=arrays["a"], b=arrays["b"])
    whole = path.read_bytes()
    values = {array.tobytes() for array in arrays.values()}
    found = 0
    for position in range(len(whole)):
        for mask in (0x01, 0x88):
            damaged = bytearray(whole)
            damaged[position] ^= mask
            path.write_bytes(damaged)
            try:
                read = npz.read(path)
            except ValueError:
                found += 1
            else:
                assert {array.tobytes() for array in read.values()} <= values
    assert found > len(whole)


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "x.npz", tmp_path / "file" / "x.npz", tmp_path):
        with pytest.raises(ValueError, match="cannot be written: "):
            npz.write(path, every_dtype())
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
