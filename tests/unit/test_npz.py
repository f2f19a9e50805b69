"""Arrays by name in .npz files, bf16 too."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from iree_lnbwd import npz
from iree_lnbwd.arguments import Array
from iree_lnbwd.dtypes import DTYPES


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
