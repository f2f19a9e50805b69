"""Casts of a norm's gradient in inductor's graphs: the backward stores it in both types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn

import iree_lnbwd.torch as ours
from iree_lnbwd.ops.operands import FROM_OUTPUT, OPS
from iree_lnbwd.torch.inductor.state import STATE, Folded
from iree_lnbwd.torch.operator_table import GRADIENTS, WITH_COPIES

# Raised inside PyTorch, by the imports of its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WIDTH, ROWS = 512, (3, 5)
HALF = (torch.bfloat16, torch.float16)


class Block(nn.Module):  # type: ignore[misc]
    """A stream in f32, and linears that autocast runs in bf16."""

    def __init__(self, norm: Callable[[int], nn.Module], act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.act = norm(WIDTH), act
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.linears
        inner = other(nn.functional.gelu(one(self.norm(x).flatten(0, -2))))
        return (x.flatten(0, -2) + self.act(inner)).unflatten(0, x.shape[:-1])


def _same(x: Tensor) -> Tensor:
    return x


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(
    model: nn.Module, dtype: torch.dtype, how: str, dynamic: bool | None = None
) -> tuple[list[Tensor], Folded]:
    """Of the input and of all parameters, and what the pass folded."""
    x = torch.randn(*ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    before, run = STATE.folded(), model
    if how == "compiled":
        run = torch.compile(model, dynamic=dynamic)
    with torch.autocast("cpu", dtype, enabled=how != "exact"):
        output = run(x if how != "exact" else x.double())
    found = torch.autograd.grad(output.double().sin().sum(), [x, *model.parameters()])
    return list(found), Folded(*(a - b for a, b in zip(STATE.folded(), before, strict=True)))


@pytest.mark.drawn
@pytest.mark.parametrize(("dtype", "dynamic"), [*((each, None) for each in HALF), (HALF[0], True)])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_cast_that_a_product_reads_goes_into_the_backward(
    norm: Callable[[int], nn.Module], dtype: torch.dtype, dynamic: bool | None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(norm, _same) for _ in range(2)), norm(WIDTH))
    eager, _ = gradients(model, dtype, "eager")
    ours.replace_norms(model)
    found, folded = gradients(model, dtype, "compiled", dynamic)
    # What reaches a norm is cast in the first two; what leaves it, in the last two.
    assert (folded.additions, folded.casts) == (2, 4)
    exact, _ = gradients(model.double(), dtype, "exact")
    for mine, theirs, right in zip(found, eager, exact, strict=True):
        assert (mine - right).norm() <= 1.2 * (theirs - right).norm() + 1e-6 * right.norm()


@pytest.mark.drawn
def test_a_cast_that_inductor_fuses_stays_with_its_reader() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.LayerNorm, torch.tanh), nn.LayerNorm(WIDTH))
    ours.replace_norms(model)
    _, folded = gradients(model, torch.bfloat16, "compiled")
    assert (folded.additions, folded.casts) == (1, 1)


@pytest.mark.drawn
@pytest.mark.parametrize("name", WITH_COPIES)
def test_the_operators_return_what_those_without_a_copy_return(name: str) -> None:
    plain = next(each for each in GRADIENTS if each.name == name)
    rng = torch.Generator().manual_seed(0)
    cells, columns = torch.randn(4, 6, 40, generator=rng), torch.randn(3, 40, generator=rng)
    statistics = torch.rand(6, 1, generator=rng) + 0.5
    of_kind = {"mn": cells[0], "m": statistics, "n": columns[0]}
    assert plain.op in (*OPS.values(), *FROM_OUTPUT.values())
    tensors = [of_kind[argument.kind.value] for argument in plain.op.arguments]
    options = ([40], [True] * len(plain.results), 1e-5, 0.0)
    expected = plain.operator(*tensors, *options)
    for dtype in (*HALF, *HALF):  # no call answers for one of another type
        *found, copy = WITH_COPIES[name].operator(*tensors, *options, dtype)
        assert all(map(torch.equal, found, expected))
        assert torch.equal(copy, expected[0].to(dtype))
    torch.library.opcheck(WITH_COPIES[name].operator, (*tensors, *options, torch.bfloat16))
    empty = [t[:0] if t.ndim == 2 else t for t in tensors]
    assert WITH_COPIES[name].operator(*empty, *options, torch.float16)[-1].shape == (0, 40)
