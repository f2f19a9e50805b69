"""A bias of RMS norms in PyTorch: modules, operators, compilers, threads, and replaced classes.

The forms of `norm_support` have one, too, in the tests of all norms.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn

from iree_lnbwd.torch import AddRMSNorm, RMSNorm, add_rms_norm, replace_norms, rms_norm, specs
from iree_lnbwd.torch.replacement.classes import form_of

COLUMNS, EPS = 48, 1e-6


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def by_formula(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    wide = x.double()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    y = y if weight is None else y * weight.double()
    return (y if bias is None else y + bias.double()).to(x.dtype)


def parameters(*dtypes: torch.dtype) -> list[Tensor]:
    return [torch.randn(COLUMNS, dtype=dtype, requires_grad=True) for dtype in dtypes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_as_by_hand(dtype: torch.dtype) -> None:
    """Thrice, for C++ launches what Python was asked; contiguous or not, and of mixed types."""
    weight, bias = parameters(torch.float32, dtype)
    for _ in range(3):
        wide = torch.randn(5, 2 * COLUMNS, dtype=dtype)
        for x in (wide[:, :COLUMNS].clone(), wide[:, COLUMNS:], wide.view(5, COLUMNS, 2)[..., 1]):
            x = x.detach().requires_grad_()
            dy = torch.randn_like(x)
            ours, theirs = rms_norm(x, COLUMNS, weight, EPS, bias=bias), by_formula(x, weight, bias)
            torch.testing.assert_close(ours, theirs)
            leaves = (x, weight, bias)
            found, expected = (torch.autograd.grad(y, leaves, dy) for y in (ours, theirs))
            for mine, other in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("needs", ["input", "weight", "bias"])
def test_what_requires_no_gradient_gets_none(needs: str) -> None:
    given = {"input": torch.randn(5, COLUMNS), "weight": torch.ones(COLUMNS)}
    given["bias"] = torch.zeros(COLUMNS)
    given[needs].requires_grad_()
    rms_norm(given["input"], COLUMNS, given["weight"], bias=given["bias"]).sum().backward()
    assert {name for name, tensor in given.items() if tensor.grad is not None} == {needs}


def test_one_kind_with_a_bias_and_without_one() -> None:
    """The same arrays, in turn: no call takes what was learned of the other."""
    x, (weight, bias) = torch.randn(5, COLUMNS), parameters(torch.float32, torch.float32)
    for _ in range(3):
        for given in (bias, None):
            torch.testing.assert_close(
                rms_norm(x, COLUMNS, weight, EPS, bias=given), by_formula(x, weight, given)
            )
            out, total = add_rms_norm(x, x, COLUMNS, None, EPS, bias=given)
            torch.testing.assert_close(out, by_formula(total, None, given))


def test_an_operator_computes_no_gradient_of_a_bias_that_is_not_there() -> None:
    x = torch.randn(5, COLUMNS)
    operator, rstd = torch.ops.iree_lnbwd.rms_norm_backward.default, torch.ones(5)
    for bias in (None, torch.zeros(COLUMNS, dtype=torch.float16)):
        for _ in range(2):
            tensors = (x, x, rstd, None, bias, *(None,) * 4)
            dx, dgamma, dbeta = operator(*tensors, [COLUMNS], [True] * 3, EPS, 0.0)
            assert (dx.shape, dgamma) == (x.shape, None)
            assert (dbeta is None) == (bias is None)
            if bias is not None:
                torch.testing.assert_close(dbeta, x.sum(0).half(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("count", [0, 1, 4, 40])
def test_a_mask_of_another_length_is_refused(count: int) -> None:
    """In C++, which keeps no more bools than there are gradients."""
    x = torch.randn(5, COLUMNS)
    tensors = (x, x, torch.ones(5), None, *(None,) * 5)
    operator = torch.ops.iree_lnbwd.rms_norm_backward.default
    with pytest.raises((RuntimeError, ValueError), match=r"output_mask|zip"):
        operator(*tensors, [COLUMNS], [True] * count, EPS, 0.0)


def test_modules() -> None:
    norm: Any = RMSNorm(COLUMNS, eps=EPS, bias=True)
    assert list(norm.state_dict()) == ["weight", "bias"]
    assert not norm.bias.any()
    assert "bias=True" in repr(norm)
    assert "bias" not in repr(RMSNorm(COLUMNS))
    assert list(RMSNorm(COLUMNS).state_dict()) == ["weight"]
    with torch.no_grad():
        norm.bias.normal_()
    x = torch.randn(3, COLUMNS)
    torch.testing.assert_close(norm(x), by_formula(x, norm.weight, norm.bias))
    fused = AddRMSNorm(COLUMNS, eps=EPS, bias=True, memory_efficient=True)
    fused.load_state_dict(norm.state_dict())
    out, total = fused(x, x)
    torch.testing.assert_close(out, by_formula(total, norm.weight, norm.bias))
    norm.reset_parameters()
    assert not norm.bias.any()
    assert copy.deepcopy(norm).to(torch.bfloat16).bias.dtype == torch.bfloat16
    assert {spec.has_bias for spec in specs(norm)} == {True}
    meta: Any = RMSNorm(COLUMNS, bias=True, device="meta", dtype=torch.float16)
    assert meta.bias.is_meta
    assert meta.bias.dtype == torch.float16
    for wrong in (lambda: RMSNorm(8, elementwise_affine=False, bias=True),
                  lambda: AddRMSNorm(8, elementwise_affine=False, bias=True)):  # fmt: skip
        with pytest.raises(ValueError, match=r"^bias: expected False without elementwise_affine"):
            wrong()


@pytest.mark.parametrize(
    ("bias", "error", "said"),
    [
        (torch.zeros(7), (ValueError, RuntimeError), "bias: expected shape"),
        (torch.zeros(COLUMNS, dtype=torch.float64), TypeError, "bias: expected torch.float32 like"),
        (torch.zeros(COLUMNS, dtype=torch.int8), TypeError, "bias: expected an element type of"),
        (torch.zeros(COLUMNS, device="meta"), ValueError, "bias: expected a tensor on cpu"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(bias: Tensor, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        rms_norm(torch.ones(2, COLUMNS), COLUMNS, bias=bias)


@pytest.mark.drawn
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")
def test_compiled_whole() -> None:
    """By inductor, with an addition before the norm and a skip past it; wide rows stay ours."""
    for columns in (64, 16384):
        norm = RMSNorm(columns, eps=EPS, bias=True)
        nn.init.normal_(norm.bias)

        def step(x: Tensor, y: Tensor, norm: nn.Module = norm) -> Tensor:
            total = x + y
            return norm(total).tanh() + total

        x, y = (torch.randn(4, columns, requires_grad=True) for _ in range(2))
        leaves = (x, y, norm.weight, norm.bias)
        compiled = torch.compile(step, fullgraph=True)(x, y)
        eager = step(x, y)
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
        dy = torch.randn_like(eager)
        found, expected = (torch.autograd.grad(each, leaves, dy) for each in (compiled, eager))
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_threads() -> None:
    """Calls with a bias and without one at once; each is right."""
    wrong: list[str] = []

    def work(columns: int, biased: bool) -> None:
        x, bias = torch.randn(64, columns), torch.randn(columns) if biased else None
        for _ in range(20):
            y = rms_norm(x, columns, None, EPS, bias=bias)
            if not torch.allclose(y, by_formula(x, None, bias), atol=1e-5):
                wrong.append(f"{columns} {biased}")

    threads = [
        threading.Thread(target=work, args=(columns, biased))
        for columns in (40, 80)
        for biased in (True, False)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- replaced classes --------------------------------------------------------------------------


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.offset = (nn.Parameter(torch.rand(COLUMNS)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return (wide * self.scale + self.offset).to(x.dtype)


class BiasAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) + self.bias


class OfL2(Biased):
    def forward(self, x: Tensor) -> Tensor:
        length = torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)
        return x * length * self.scale + self.offset


class BeforeTheWeight(Biased):
    """(xhat + bias) * weight is another norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return (x + self.offset) * self.scale


@pytest.mark.drawn
@pytest.mark.parametrize("cls", [Biased, BiasAlone, OfL2])
def test_a_class_that_adds_a_bias_is_replaced(cls: type[nn.Module]) -> None:
    own, model = cls(), nn.Sequential(cls())
    model[0].load_state_dict(own.state_dict())
    report = replace_norms(model)
    assert "bias" in str(report)
    form = form_of(model[0])
    assert form.bias_name in ("offset", "bias")
    assert not form.op.centres
    x = torch.randn(4, COLUMNS, requires_grad=True)
    torch.testing.assert_close(model(x), own(x), rtol=1e-5, atol=1e-5)
    dy = torch.randn(4, COLUMNS)
    found, expected = (
        torch.autograd.grad(module(x), (x, *module.parameters()), dy) for module in (model, own)
    )
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_bias_before_the_weight_is_another_norm() -> None:
    model = nn.Sequential(BeforeTheWeight())
    replace_norms(model)
    assert type(model[0]) is BeforeTheWeight
