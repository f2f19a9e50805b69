"""The pass over inductor's graphs: what it folds, what it leaves, and what a cache sees of it."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import iree_lnbwd.torch as ours
from iree_lnbwd.torch.inductor.state import STATE, Folded

# Raised inside PyTorch, by the imports of its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WIDTH = 264  # of more columns than are left to inductor


class Block(nn.Module):  # type: ignore[misc]
    """Two branches around a stream."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[..., WIDTH] to the same shape."""
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + torch.tanh(linear(norm(x)))
        return x


def model_of(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(norm), norm(WIDTH))


def own_layer_norm(width: int) -> nn.Module:
    return ours.LayerNorm(width, own_forward=True)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)  # weights do not depend on the tests before
    yield
    ours.disable()
    ours.use_inductor_pass()
    STATE.displaced_by = None


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], dtype: Any) -> list[Tensor]:
    """Of the input and the parameters, by a backward of squares."""
    x = torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_()
    model.zero_grad(set_to_none=True)
    output = run(x)
    output.float().sin().mean().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def folded(run: Callable[[], object]) -> Folded:
    before = STATE.folded()
    run()
    return Folded(*(a - b for a, b in zip(STATE.folded(), before, strict=True)))


def assert_close(one: list[Tensor], other: list[Tensor], reference: list[Tensor]) -> None:
    """As close to f64 as the other, but for the roundings of twice the pass's additions."""
    for mine, theirs, exact in zip(one, other, reference, strict=True):
        spacing = torch.finfo(mine.dtype).eps
        scale = exact.abs().max()
        error, allowed = (each.double().sub(exact).abs().max() for each in (mine, theirs))
        assert error <= 2 * allowed + 4 * spacing * scale


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("norm", "forwards", "dtype", "dynamic"),
    [
        (ours.LayerNorm, 0, torch.float32, None),
        (ours.RMSNorm, 3, torch.bfloat16, None),
        pytest.param(own_layer_norm, 3, torch.float32, True, marks=pytest.mark.slow),
    ],
    ids=["layer", "rms", "own"],
)
def test_additions_go_into_backwards_and_forwards_to_inductor(
    norm: Callable[[int], nn.Module], forwards: int, dtype: Any, dynamic: bool | None
) -> None:
    model = model_of(norm)
    wide = gradients(model.double(), model, torch.float64)
    model.to(dtype)
    eager = gradients(model, model, dtype)
    compiled = torch.compile(model, dynamic=dynamic)
    found: list[Tensor] = []
    counts = folded(lambda: found.extend(gradients(model, compiled, dtype)))
    assert counts == Folded(forwards, 2, 0, sums=1)
    assert_close(found, eager, wide)


@pytest.mark.drawn
def test_switched_off_it_changes_nothing() -> None:
    ours.use_inductor_pass(False)
    model = model_of(ours.RMSNorm)
    assert folded(lambda: gradients(model, torch.compile(model), torch.float32)) == Folded()
    assert "switched off" in str(ours.status().inductor)
    with pytest.raises(TypeError, match="on: expected True or False, got int"):
        ours.use_inductor_pass(1)  # type: ignore[arg-type]


@pytest.mark.drawn
def test_a_widened_gradient_is_taken_as_it_was() -> None:
    norm, linear = ours.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()

    def run(x: Tensor) -> Tensor:
        return linear(norm(x).bfloat16())

    model = nn.ModuleList([norm, linear])
    eager = gradients(model, run, torch.float32)
    found: list[Tensor] = []
    compiled = torch.compile(run)
    counts = folded(lambda: found.extend(gradients(model, compiled, torch.float32)))
    assert counts == Folded(0, 0, 1)
    for mine, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-7 * theirs.abs().max().item())


def test_wide_rows_stay_ours_with_the_addition_before_them() -> None:
    columns = 16384
    norm = ours.RMSNorm(columns)

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return norm(total), total * 2

    x, y = torch.randn(2, 3, columns).unbind()
    found: list[Any] = []
    with torch.no_grad():
        counts = folded(lambda: found.extend(torch.compile(run)(x, y)))
        expected = run(x, y)
    assert counts == Folded(0, 1, 0)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)  # the bits of an addition and a norm


class Other(CustomGraphPass):  # type: ignore[misc]
    """Somebody else's pass."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Graph) -> None:
        self.graphs += 1

    def uuid(self) -> Any:
        return "somebody else's"


@pytest.mark.drawn
def test_another_pass_runs_before_ours_or_is_named() -> None:
    importlib.import_module("torch._inductor.compile_fx")  # the pass is placed with it
    other, model = Other(), model_of(ours.RMSNorm)
    with config.patch(post_grad_custom_post_pass=other):
        assert "in the place of iree-lnbwd's: Other" in str(ours.status().inductor)
        ours.RMSNorm(WIDTH)  # puts ours behind it
        assert ours.status().inductor.others == ("Other",)
        with torch.no_grad():
            torch.compile(model)(torch.randn(3, WIDTH))
    assert other.graphs == 1
    assert ours.status().inductor.others == ()

    torch._dynamo.reset()
    compiled = torch.compile(model, options={"post_grad_custom_post_pass": other})
    with torch.no_grad():
        assert folded(lambda: compiled(torch.randn(5, WIDTH))) == Folded()
    assert other.graphs == 2
    assert "were in the place of iree-lnbwd's" in str(ours.status().inductor)


@pytest.mark.drawn
def test_a_graph_without_norms_of_ours_stays_as_it_is() -> None:
    model = model_of(nn.LayerNorm)
    assert folded(lambda: gradients(model, torch.compile(model), torch.float32)) == Folded()


def test_enable_keeps_pytorchs_backwards_whole() -> None:
    model = model_of(nn.LayerNorm)
    wide = gradients(model.double(), model, torch.float64)
    eager = gradients(model.float(), model, torch.float32)
    ours.enable()
    found: list[Tensor] = []
    if ours.status().operators[-2].kept is not None:
        pytest.skip("the C++ kernels could not be built")
    compiled = torch.compile(model)
    counts = folded(lambda: found.extend(gradients(model, compiled, torch.float32)))
    assert counts == Folded(0, 2, 0, sums=1)
    assert_close(found, eager, wide)
    assert ours.status().ours == 1  # the last norm: nothing is added to its gradient
    ours.disable()
    again = gradients(model, compiled, torch.float32)  # the graph stays
    assert_close(again, eager, wide)

    torch._dynamo.reset()  # the caches on disk know both
    assert folded(lambda: gradients(model, torch.compile(model), torch.float32)) == Folded()


@pytest.mark.drawn
def test_other_threads_compile_with_it() -> None:
    model, counts = model_of(ours.RMSNorm), []

    def run() -> None:
        compiled = torch.compile(model)
        counts.append(folded(lambda: gradients(model, compiled, torch.float32)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert counts == [Folded(3, 2, 0, sums=1)]


@pytest.mark.drawn
def test_a_backward_may_be_compiled_in_another_thread() -> None:
    model = model_of(ours.RMSNorm)
    x = torch.randn(3, WIDTH)
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=False):
        loss = torch.compile(model)(x).square().mean()
        counts: list[Folded] = []
        thread = threading.Thread(target=lambda: counts.append(folded(loss.backward)))
        thread.start()
        thread.join()
    assert counts == [Folded(0, 2, 0, sums=1)]


@pytest.mark.slow
def test_the_first_use_of_a_process_and_its_cache(tmp_path: Path) -> None:
    """Imported before inductor and after; a second process gets the graph from the cache."""
    code = textwrap.dedent(
        """
        import sys, torch
        if sys.argv[1] == "late":
            torch.compile(torch.sin)(torch.ones(2))
        import iree_lnbwd.torch as ours
        assert ("torch._inductor.compile_fx" in sys.modules) == (sys.argv[1] == "late")
        norm = ours.RMSNorm(64)
        x = torch.linspace(-1, 1, 192).reshape(3, 64).requires_grad_()
        y = torch.compile(lambda x: norm(x.tanh()) + x)(x)
        y.square().sum().backward()
        print(ours.status().inductor, x.grad.double().norm().item(), sep=chr(10))
        """
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, when], text=True, capture_output=True, check=True
        ).stdout.splitlines()
        for when in ("early", "late", "early")
    ]
    assert ["folded 1 forwards" in lines[0] for lines in said] == [True, False, False]
    np.testing.assert_allclose([float(lines[1]) for lines in said], float(said[0][1]), rtol=1e-6)


class Attending(nn.Module):  # type: ignore[misc]
    """A norm whose output has several uses, as that before an attention."""

    def __init__(self, norm: nn.Module, width: int, count: int, narrow: Any) -> None:
        super().__init__()
        self.norm, self.narrow = norm, narrow
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        used = [linear(y.to(self.narrow)).to(x.dtype) for linear in self.linears]
        return torch.stack(used).prod(0) + x


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("dtype", "narrow", "count", "expected"),
    [
        (torch.float32, torch.float32, 3, Folded(1, 3, 0)),
        (torch.bfloat16, torch.bfloat16, 2, Folded(1, 2, 0)),
        (torch.float32, torch.bfloat16, 4, Folded(1, 4, 0)),  # each is widened before it is added
        (torch.float32, torch.float32, 6, Folded(1, 1, 0)),  # more than a kernel takes
    ],
)
def test_gradients_of_several_uses_are_added_in_the_kernel(
    dtype: Any, narrow: Any, count: int, expected: Folded
) -> None:
    model = Attending(ours.RMSNorm(WIDTH), WIDTH, count, torch.float64)
    wide = gradients(model.double(), model, torch.float64)
    model.to(dtype)
    model.narrow = narrow
    model.linears.to(narrow)
    eager = gradients(model, model, dtype)
    found: list[Tensor] = []
    compiled = torch.compile(model)
    counts = folded(lambda: found.extend(gradients(model, compiled, dtype)))
    assert counts == expected
    assert_close(found, eager, wide)


@pytest.mark.drawn
def test_what_inductor_computes_itself_stays_in_its_sums() -> None:
    norm = ours.RMSNorm(WIDTH)

    def run(x: Tensor) -> Tensor:
        y = norm(x)
        return torch.sin(y) * torch.cos(y)

    eager = gradients(norm, run, torch.float32)
    found: list[Tensor] = []
    compiled = torch.compile(run)
    counts = folded(lambda: found.extend(gradients(norm, compiled, torch.float32)))
    assert counts == Folded(1, 0, 0)
    for mine, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.drawn
@pytest.mark.parametrize("norm", [ours.LayerNorm, ours.RMSNorm])
def test_backwards_of_narrow_rows_become_inductors(norm: Callable[[int], nn.Module]) -> None:
    model = Attending(norm(64), 64, 2, torch.float64)
    x = torch.randn(5, 3, 64, dtype=torch.float64, requires_grad=True)
    wide = torch.autograd.grad(model.double()(x).square().sum(), (x, *model.parameters()))
    model.float().narrow = torch.float32
    compiled, own = torch.compile(model), x.detach().float().requires_grad_()
    found: list[Tensor] = []

    def run() -> None:
        loss = compiled(own).square().sum()
        found.extend(torch.autograd.grad(loss, (own, *model.parameters())))

    counts = folded(run)
    assert counts.backwards == 1
    assert counts.additions == 0
    for mine, exact in zip(found, wide, strict=True):
        assert (mine - exact).abs().max() <= 1e-5 * exact.abs().max()
