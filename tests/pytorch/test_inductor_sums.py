"""Gradients of biases in inductor's graphs: the backward whose dx they sum computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn

import iree_lnbwd.torch as ours
from iree_lnbwd.torch.inductor.state import STATE, Folded
from iree_lnbwd.torch.operator_table import GRADIENTS, WITH_SUMS

# Raised inside PyTorch, by the imports of its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WIDTH, ROWS = 512, (3, 5)


class Block(nn.Module):  # type: ignore[misc]
    """As a GPT's: a stream to which a linear with a bias adds what a norm gave."""

    def __init__(self, norm: Callable[[int], nn.Module], act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.act = norm(WIDTH), act
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.linears
        return x + self.act(other(nn.functional.gelu(one(self.norm(x)))))


class AfterAddition(Block):
    """As BERT's: the sum is normalized, and goes nowhere else."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.linears
        return self.norm(x + self.act(other(nn.functional.gelu(one(x)))))


def _same(x: Tensor) -> Tensor:
    return x


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    ours.disable()
    torch._dynamo.reset()


def gradients(
    model: nn.Module, how: str, *, dynamic: bool | None = None, autocast: bool = False
) -> tuple[list[Tensor], Folded]:
    """Of the input and of all parameters, and what the pass folded."""
    x = torch.randn(*ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    x = x.to(next(model.parameters()).dtype).requires_grad_()
    before, run = STATE.folded(), model
    if how == "compiled":
        run = torch.compile(model, dynamic=dynamic)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = run(x)
    found = torch.autograd.grad(output.double().sin().sum(), [x, *model.parameters()])
    return list(found), Folded(*(a - b for a, b in zip(STATE.folded(), before, strict=True)))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("dtype", "dynamic"), [(torch.bfloat16, None), (torch.bfloat16, True), (torch.float32, None)]
)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("block", [Block, AfterAddition])
def test_a_bias_before_a_norm_has_its_gradient_from_the_norms_backward(
    block: type[Block],
    norm: Callable[[int], nn.Module],
    dtype: torch.dtype,
    dynamic: bool | None,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(block(norm, _same) for _ in range(2)), norm(WIDTH)).to(dtype)
    eager, _ = gradients(model, "eager")
    ours.replace_norms(model)
    found, folded = gradients(model, "compiled", dynamic=dynamic)
    assert folded.sums == 2
    exact, _ = gradients(model.double(), "eager")
    for mine, theirs, right in zip(found, eager, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - right).norm() <= 1.2 * (theirs - right).norm() + 1e-6 * right.norm()


def test_under_enable_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.LayerNorm, _same), nn.LayerNorm(WIDTH))
    eager, _ = gradients(model, "eager")
    ours.enable()
    if ours.status().operators[-2].kept is not None:
        pytest.skip("the C++ kernels could not be built")
    found, folded = gradients(model, "compiled")
    assert folded.sums == 1
    for mine, theirs in zip(found, eager, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.drawn
def test_other_sums_stay() -> None:
    """What is between the bias and the norm makes another sum; so do a copy's reader's."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.LayerNorm, torch.tanh), nn.LayerNorm(WIDTH))
    ours.replace_norms(model)
    _, folded = gradients(model, "compiled")
    assert folded.sums == 0
    model = nn.Sequential(Block(nn.LayerNorm, _same), nn.LayerNorm(WIDTH))
    ours.replace_norms(model)
    _, folded = gradients(model, "compiled", autocast=True)
    assert (folded.sums, folded.casts) == (0, 2)


class Shift(torch.autograd.Function):  # type: ignore[misc]
    """Adds a row, of which the gradient is summed in the row's own type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor) -> Tensor:
        ctx.dtype = row.dtype
        return x + row.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.sum((0, 1), dtype=ctx.dtype)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("dtype", "sums"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.float64, 0)]
)
def test_a_sum_has_the_type_that_it_had(dtype: torch.dtype, sums: int) -> None:
    """No kernel of 16 bits sums in f64."""
    norm = ours.RMSNorm(WIDTH, dtype=torch.bfloat16)
    row = torch.zeros(WIDTH, dtype=dtype, requires_grad=True)
    x = torch.randn(*ROWS, WIDTH).bfloat16().requires_grad_()

    def run(x: Tensor) -> Tensor:
        return norm(Shift.apply(x, row)).float().sin().sum()

    (eager,) = torch.autograd.grad(run(x), row)
    before = STATE.folded().sums
    (found,) = torch.autograd.grad(torch.compile(run)(x), row)
    assert STATE.folded().sums - before == sums
    assert found.dtype == dtype
    torch.testing.assert_close(found, eager, rtol=2**-7, atol=2**-5)


@pytest.mark.drawn
def test_of_rows_whose_width_a_compiler_does_not_know() -> None:
    def run(x: Tensor, bias: Tensor) -> Tensor:
        return ours.rms_norm(x + bias, (x.shape[-1],)).sin().sum()

    compiled = torch.compile(run, dynamic=True)
    for width in (WIDTH, 384):
        x, bias = torch.randn(*ROWS, width), torch.zeros(width, requires_grad=True)
        (eager,) = torch.autograd.grad(run(x, bias), bias)
        (found,) = torch.autograd.grad(compiled(x, bias), bias)
        torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.drawn
@pytest.mark.parametrize("name", WITH_SUMS)
def test_the_operators_return_what_those_without_a_sum_return(name: str) -> None:
    plain = next(each for each in GRADIENTS if each.name == name)
    rng = torch.Generator().manual_seed(0)
    cells, columns = torch.randn(4, 6, 40, generator=rng), torch.randn(3, 40, generator=rng)
    statistics = torch.rand(6, 1, generator=rng) + 0.5
    of_kind = {"mn": cells[0], "m": statistics, "n": columns[0]}
    tensors = [of_kind[argument.kind.value] for argument in plain.op.arguments]
    options = ([40], [True] * len(plain.results), 1e-5, 0.0)
    expected = plain.operator(*tensors, *options)
    for dtype in (torch.float32, torch.bfloat16) * 2:  # no call answers for one of another type
        *found, total = WITH_SUMS[name].operator(*tensors, *options, dtype)
        assert all(map(torch.equal, found, expected))
        assert total.dtype == dtype
        torch.testing.assert_close(total.float(), expected[0].sum(0), atol=1e-4, rtol=2**-8)
    torch.library.opcheck(WITH_SUMS[name].operator, (*tensors, *options, torch.bfloat16))
    empty = [t[:0] if t.ndim == 2 else t for t in tensors]
    nothing = WITH_SUMS[name].operator(*empty, *options, torch.float16)[-1]
    assert torch.equal(nothing, torch.zeros(40, dtype=torch.float16))
