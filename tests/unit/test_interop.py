"""Arrays of other libraries, as far as no GPU is needed."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import assert_matches_reference, assert_same_bits, random_arguments, random_generator

import iree_lnbwd as lnbwd
from iree_lnbwd import LayerNormGrads, NormSpec
from iree_lnbwd.calls.modules import loaded
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.runtime.frameworks import interop, pytorch

HOST = DeviceUri.parse("local-task")


def test_numpy_arrays_pass_as_they_are() -> None:
    array = np.ones((2, 3), np.float32)
    assert interop.on_gpu("input", array) is None
    assert interop.to_numpy("input", array) is array


@pytest.mark.parametrize("wrong", [[1.0], 3, "text", object()])
def test_what_is_no_array_is_named(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"input: expected a NumPy array.* {type(wrong).__name__}"):
        interop.on_gpu("input", wrong)


def test_storage_of_the_caller_is_filled() -> None:
    arguments = random_arguments(random_generator(), NormSpec((96,), "bf16"), (37,))
    op = loaded(NormSpec((96,), "bf16"), HOST)
    expected = arguments.backward_by(op)
    # In the middle of a larger array: aligned for the CPU's code, or not.
    for start in (0, 1, 32):
        x = np.full(37 * 96 + 64, 7, ml_dtypes.bfloat16)
        out = LayerNormGrads(
            x[start : start + 37 * 96].reshape(37, 96),
            np.empty(96, ml_dtypes.bfloat16),
            np.empty(96, ml_dtypes.bfloat16),
        )
        returned = op(
            arguments.grad_output, arguments.input, arguments.mean, arguments.rstd,
            arguments.weight, arguments.bias, out=out,
        )  # fmt: skip
        assert returned is out
        assert_same_bits(out, expected)
        assert (x[:start] == 7).all()
        assert (x[start + 37 * 96 :] == 7).all()


def test_bad_storage_is_named() -> None:
    spec = NormSpec((96,), "f32")
    arguments = random_arguments(random_generator(), spec, (5,))
    op = loaded(spec, HOST)
    row = np.empty(96, np.float32)
    good = LayerNormGrads(np.empty((5, 96), np.float32), row.copy(), row.copy())
    read_only = row.copy()
    read_only.flags.writeable = False
    for wrong, error, said in (
        ({"grad_bias": None}, ValueError, "out.grad_bias: expected an array, got None"),
        ({"grad_input": row}, ValueError, r"out.grad_input: expected shape \(5, 96\), got \(96,\)"),
        (
            {"grad_weight": row.astype(np.float64)},
            TypeError,
            "out.grad_weight: .* f32, got float64",
        ),
        ({"grad_weight": read_only}, ValueError, "out.grad_weight: .* can be written"),
        ({"grad_weight": [1.0]}, TypeError, "out.grad_weight: expected a NumPy array"),
    ):
        with pytest.raises(error, match=said):
            op(
                arguments.grad_output, arguments.input, arguments.mean, arguments.rstd,
                arguments.weight, arguments.bias, out=good._replace(**wrong),
            )  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_tensors_in_tensors_out(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    arguments = random_arguments(random_generator(), NormSpec((96,), dtype), (37,))

    def tensor(array: Any) -> Any:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    names = ("grad_output", "input", "mean", "rstd", "weight", "bias")
    given = {name: tensor(getattr(arguments, name)) for name in names}
    for name in names:
        array = interop.to_numpy(name, given[name].requires_grad_())
        assert array.ctypes.data == given[name].data_ptr()  # nothing was copied
    gradients = lnbwd.layer_norm_backward(
        given["grad_output"], given["input"], 96, *(given[name] for name in names[2:])
    )
    assert all(isinstance(gradient, torch.Tensor) for gradient in gradients)
    numpy = LayerNormGrads(*(interop.to_numpy("gradient", gradient) for gradient in gradients))
    assert_matches_reference(numpy, arguments)
    assert_same_bits(numpy, arguments.backward())
    out = LayerNormGrads(*(torch.full_like(gradient, 7) for gradient in gradients))
    assert loaded(NormSpec((96,), dtype), HOST)(**given, out=out) is out
    assert_same_bits(LayerNormGrads(*(interop.to_numpy("out", g) for g in out)), numpy)


def test_a_tensor_that_is_nowhere_is_named() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(ValueError, match=r"input: expected a tensor on the CPU or a GPU.* meta"):
        interop.on_gpu("input", torch.empty(3, device="meta"))


def test_a_tensor_without_shape_or_strides_is_no_known_kind() -> None:
    """PyTorch fails over them; what is wrong with such a tensor, `describe` says by its name."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    dense = torch.ones(2, 3)
    with warnings.catch_warnings():  # PyTorch says that both are not finished
        warnings.simplefilter("ignore")
        strange = (dense.to_sparse_csr(), torch.nested.nested_tensor([dense[0], dense[1]]))
    of = functools.partial(pytorch.on_gpu().signature, ("input", "weight"))
    for tensor in strange:
        assert of((dense, tensor)) not in (of((dense, dense)), of((dense, None)))
        with pytest.raises(TypeError, match=r"^weight: expected a tensor whose memory"):
            pytorch.check_memory("weight", tensor)


def test_a_tensor_whose_storage_shrank_has_no_address() -> None:
    """Calls of a known kind ask for nothing else."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    whole, short, cut = (torch.ones(4, 8) for _ in range(3))
    tensors = (whole, whole[1:], short, cut[1:2], cut[2:3])
    short.untyped_storage().resize_(whole.nbytes - 1)
    cut.untyped_storage().resize_(2 * cut[0].nbytes)
    found, _ = pytorch.on_gpu().addresses(tensors)
    assert [bool(address) for address in found] == [True, True, False, True, False]
    assert found[1] == whole[1:].data_ptr()
