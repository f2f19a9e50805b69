"""The pass over inductor's graphs, where outputs are scaled for each sample, or have a gate."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from inductor_support import compiled
from torch import Tensor, nn

import iree_lnbwd.torch as ours
from iree_lnbwd.torch.inductor.state import STATE, Folded

# Raised inside PyTorch, by the imports of its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WIDTH, SAMPLES, LENGTH = 264, 2, 5  # of more columns than are left to inductor
HALF, WIDE = torch.bfloat16, torch.float32
VIEW = torch.ops.aten.reshape.default


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    ours.disable()
    STATE.displaced_by = None


class Modulated(nn.Module):  # type: ignore[misc]
    """A branch of a diffusion transformer, as it is under autocast, with its casts written out."""

    def __init__(self, norm: nn.Module | None, narrow: torch.dtype, count: int = 1) -> None:
        super().__init__()
        self.norm, self.narrow = norm, narrow
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[B, T, WIDTH] and [B, WIDTH] to the former."""
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, dim=-1)
        wide = x.to(torch.promote_types(x.dtype, WIDE))
        y = self.normalized(wide, scale, shift)
        return x + gate * torch.stack([linear(y.to(self.narrow)) for linear in self.linears]).prod(
            0
        )

    def normalized(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Written out."""
        assert self.norm is not None
        scaled: Tensor = self.norm(x) * (1 + scale) + shift
        return scaled


class InOne(Modulated):
    """By a function of ours."""

    def normalized(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """With one rounding."""
        return ours.modulated_layer_norm(x, WIDTH, scale[:, 0], shift[:, 0])


def own(width: int, elementwise_affine: bool = False) -> nn.Module:
    return ours.LayerNorm(width, elementwise_affine=elementwise_affine, own_forward=True)


def gradients(
    model: nn.Module, run: Callable[..., Tensor], dtype: torch.dtype, samples: int = SAMPLES
) -> list[Tensor]:
    """The output and the gradients of the inputs and the parameters."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((samples, LENGTH, WIDTH), (samples, WIDTH))
    given = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    output = run(*given)
    loss = output.double().square().sum()
    return [output.detach(), *torch.autograd.grad(loss, [*given, *model.parameters()])]


def folded_and_left(
    model: nn.Module, dtype: torch.dtype, dynamic: bool | None = None
) -> tuple[list[Tensor], Folded, Counter[str]]:
    """What it computes compiled, what was folded, and what is left beside the norms' backwards.

    The last counts the operators on as many elements as the input has, of f32, that read what a
    backward writes, or write what it reads.
    """
    before = STATE.folded()
    run, graphs = compiled(model, dynamic)
    found = gradients(model, run, dtype)
    folded = Folded(*(a - b for a, b in zip(STATE.folded(), before, strict=True)))
    (*_, backward) = graphs
    left: Counter[str] = Counter()
    for node in backward.nodes:
        if "norm_backward" not in str(node.target):
            continue
        beside = {*node.all_input_nodes, *(use for taker in node.users for use in taker.users)}
        for each in beside:
            value = each.meta.get("val")
            is_work = each.op == "call_function" and each.target is not VIEW
            if is_work and isinstance(value, Tensor) and value.dtype == WIDE:
                left[str(each.target)] += value.shape[:2] == (SAMPLES, LENGTH)
    return found, folded, +left


def assert_close(found: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> None:
    """As close to f64 as an eager step, but for a few roundings."""
    for mine, theirs, right in zip(found, eager, exact, strict=True):
        assert mine.dtype == theirs.dtype
        scale, spacing = right.abs().max(), torch.finfo(mine.dtype).eps
        error, allowed = (each.double().sub(right).abs().max() for each in (mine, theirs))
        assert error <= 1.5 * allowed + 4 * spacing * scale


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": functools.partial(ours.LayerNorm, elementwise_affine=False),
    "own": own,
    "rms": functools.partial(ours.RMSNorm, eps=1e-5, elementwise_affine=False),
    "pytorch": functools.partial(nn.LayerNorm, elementwise_affine=False),
}


@pytest.mark.drawn
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("stream", [HALF, WIDE])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_scale_written_out_becomes_a_weight(
    kind: str, stream: torch.dtype, dynamic: bool | None
) -> None:
    torch.manual_seed(0)
    model = Modulated(NORMS[kind](WIDTH), torch.float64).double()
    exact = gradients(model, model, torch.float64)
    model.to(stream).narrow = stream
    eager = gradients(model, model, stream)
    if kind == "pytorch":
        ours.enable()
        if ours.status().operators[-2].kept is not None:
            pytest.skip("the C++ kernels could not be built")
    found, folded, left = folded_and_left(model, stream, dynamic)
    assert_close(found, eager, exact)
    assert folded.scales == 1
    assert folded.additions == 1  # that of the stream
    assert folded.casts == (2 if stream is HALF else 0)  # the input's, and that of the gradient
    assert not left


@pytest.mark.drawn
@pytest.mark.parametrize("stream", [HALF, WIDE])
def test_scales_of_a_function_are_folded_as_weights_are(stream: torch.dtype) -> None:
    torch.manual_seed(0)
    model = InOne(None, torch.float64, count=2).double()
    exact = gradients(model, model, torch.float64)
    model.to(stream).narrow = stream
    eager = gradients(model, model, stream)
    found, folded, left = folded_and_left(model, stream)
    assert_close(found, eager, exact)
    assert folded.forwards == 1
    assert folded.scales == 0
    assert (folded.additions, folded.casts) == ((1, 1) if stream is HALF else (2, 0))
    # The sum of what two casts have widened is rounded to f32, which no kernel of bf16 does.
    assert left == ({"aten.add.Tensor": 1} if stream is HALF else {})


class Gated(nn.Module):  # type: ignore[misc]
    """As Qwen3-Next's."""

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self.norm = ours.GatedRMSNorm(WIDTH, eps=1e-5)
        self.gate = nn.Linear(WIDTH, LENGTH * WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.narrow = narrow

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[B, T, WIDTH] and [B, WIDTH] to the former."""
        gate = self.gate(condition).unflatten(-1, (LENGTH, WIDTH))
        y: Tensor = self.linear(self.norm(x, gate).to(self.narrow))
        return y


@pytest.mark.drawn
def test_gated_norms() -> None:
    torch.manual_seed(0)
    model = Gated(torch.float64).double()
    exact = gradients(model, model, torch.float64)
    model.to(WIDE).linear.to(HALF)
    model.narrow = HALF
    eager = gradients(model, model, WIDE)
    found, folded, left = folded_and_left(model, WIDE)
    assert_close(found, eager, exact)
    assert folded == Folded(forwards=1, casts=1)
    assert not left


@pytest.mark.drawn
@pytest.mark.parametrize("kept", ["nothing", "shift", "scale"])
def test_scales_or_shifts_without_gradients(kept: str) -> None:
    """The backward computes what is asked for; in f32, for their sums have no cast."""
    torch.manual_seed(0)
    norm, linear = NORMS["layer"](WIDTH), nn.Linear(WIDTH, WIDTH)
    fixed = torch.randn(SAMPLES, 1, WIDTH)

    def run(x: Tensor, condition: Tensor) -> Tensor:
        own = condition[:, None] if condition.dtype is WIDE else condition[:, None].float()
        scale = own if kept == "scale" else fixed
        shift = own.sin() if kept == "shift" else fixed
        y = norm(x.float()) * scale + shift + (0 * own if kept == "nothing" else 0)
        return linear(y.to(linear.weight.dtype)).float() + x

    linear.to(HALF)
    eager = gradients(linear, run, HALF)
    before = STATE.folded()
    compiled_run, _ = compiled(run)
    found = gradients(linear, compiled_run, HALF)
    assert STATE.folded().scales == before.scales + 1
    for mine, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-7 * theirs.abs().max().item())


@pytest.mark.drawn
@pytest.mark.parametrize("case", ["rounded", "of rows", "of columns", "narrow", "another's"])
def test_what_is_no_scale_of_samples_stays(case: str) -> None:
    torch.manual_seed(0)
    width = 64 if case == "narrow" else WIDTH
    norm = NORMS["layer"](width)
    shape = {"of rows": (1, LENGTH, 1), "of columns": (width,)}.get(case, (SAMPLES, 1, width))
    scale = torch.randn(shape, requires_grad=True)
    dtype = HALF if case == "rounded" else WIDE

    def run(x: Tensor) -> Tensor:
        y = norm(x) if case != "another's" else x * 2
        return y * scale.to(dtype) if case != "another's" else norm(y) + y * scale

    x = torch.randn(SAMPLES, LENGTH, width, dtype=dtype, requires_grad=True)
    before = STATE.folded()
    compiled_run, _ = compiled(run)
    found, expected = (
        torch.autograd.grad(each(x).float().square().sum(), (x, scale))
        for each in (compiled_run, run)
    )
    assert STATE.folded().scales == before.scales
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-6 * theirs.abs().max().item())


@pytest.mark.drawn
@pytest.mark.parametrize("case", ["sets that end within", "a narrow row's output"])
def test_what_makes_tensors_is_taken_apart(case: str) -> None:
    """The numbers of the sets of rows, and the least weights that are divided by."""
    torch.manual_seed(0)
    width = WIDTH if case == "sets that end within" else 64
    sets = (2,) if width == WIDTH else ()
    x = torch.randn(LENGTH, width, requires_grad=True)
    weight = torch.randn(*sets, width, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return ours.rms_norm(x, width, weight, memory_efficient=not sets).sin()

    run_compiled = torch.compile(run)
    found, expected = (
        torch.autograd.grad(each(x).square().sum(), (x, weight)) for each in (run_compiled, run)
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
