"""What a compiled step keeps for its backward: of narrow rows, what the model's own norms keep."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import make_boxed_func as boxed
from torch._inductor import config
from torch.fx import GraphModule

import iree_lnbwd.torch as ours
from iree_lnbwd.torch.inductor.state import STATE, Folded

# Raised inside PyTorch, by the imports of its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
HEADS, COLUMNS = 4, 64
WIDTH = HEADS * COLUMNS


class QwensNorm(nn.Module):  # type: ignore[misc]
    """As Qwen3 has it for each head."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * xhat.to(x.dtype)


class Attention(nn.Module):  # type: ignore[misc]
    """Queries and keys are normalized, head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(QwensNorm(COLUMNS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = [linear(x).unflatten(-1, (HEADS, COLUMNS)) for linear in self.linears]
        q, k = (norm(head).transpose(1, 2) for norm, head in zip(self.norms, heads, strict=False))
        return nn.functional.scaled_dot_product_attention(q, k, heads[2].transpose(1, 2).to(q))


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    torch._dynamo.reset()
    STATE.displaced_by = None


def kept_and_gradients(
    model: nn.Module, autocast: bool, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[torch.dtype, str]], list[Tensor]]:
    """The element types and shapes of what a forward keeps, and the gradients of the weights.

    Inductor changes and parts the graph of a step; both parts run as they are.
    """
    kept: list[tuple[torch.dtype, str]] = []
    compile_fx = importlib.import_module("torch._inductor.compile_fx")  # its import warns
    partition: Callable[..., tuple[GraphModule, GraphModule]]
    partition = compile_fx.min_cut_rematerialization_partition

    def looking(*given: Any, num_fwd_outputs: int, **named: Any) -> Any:
        forward, backward = partition(*given, num_fwd_outputs=num_fwd_outputs, **named)
        (output,) = forward.graph.find_nodes(op="output")
        values = (each.meta["val"] for each in output.args[0][num_fwd_outputs:])
        kept.extend((v.dtype, str(tuple(v.shape))) for v in values if isinstance(v, Tensor))
        return forward, backward

    def backend(graph: GraphModule, inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=lambda g, *_, **__: boxed(g))

    torch._dynamo.reset()
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    with monkeypatch.context() as patched, config.patch(force_disable_caches=True):
        patched.setattr(compile_fx, "min_cut_rematerialization_partition", looking)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = torch.compile(model, backend=backend, dynamic=dynamic)(x)
        loss = output.float().square().sum()
        return sorted(kept, key=str), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize(("autocast", "dynamic"), [(True, None), (False, None), (True, True)])
def test_narrow_rows_keep_what_the_model_s_own_norms_keep(
    autocast: bool, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Attention()
    own, expected = kept_and_gradients(model, autocast, dynamic, monkeypatch)
    assert len(ours.replace_norms(model).replaced) == 2
    before = STATE.folded()
    replaced, found = kept_and_gradients(model, autocast, dynamic, monkeypatch)
    folded = Folded(*(a - b for a, b in zip(STATE.folded(), before, strict=True)))
    if autocast:
        assert (folded.forwards, folded.backwards) == (2, 2)
        assert replaced == own
    else:  # a norm that is whole keeps its input, and nothing has widened that
        assert (folded.forwards, folded.backwards) == (0, 0)
    for mine, theirs in zip(found, expected, strict=True):
        bound = (0.05 if autocast else 1e-5) * theirs.abs().max()
        assert (mine - theirs).abs().max() <= bound


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_another_pass_over_joint_graphs_goes_on() -> None:
    seen: list[object] = []
    model = nn.Sequential(nn.Linear(8, 8), ours.RMSNorm(8))
    before = config.joint_custom_pre_pass
    try:
        config.joint_custom_pre_pass = seen.append
        assert "other passes are in the place" in str(ours.status().inductor)
        ours.replace_norms(model)
        with config.patch(force_disable_caches=True):
            torch.compile(model)(torch.randn(3, 8)).sum().backward()
    finally:
        config.joint_custom_pre_pass = before
    assert seen
    assert ours.status().inductor.why_not is None
