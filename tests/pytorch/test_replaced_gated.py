"""`replace_norms` of norms with a gate: Qwen3-Next's, Mamba2's, and those of groups."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn

from iree_lnbwd.torch import replace_norms, specs, warmup
from iree_lnbwd.torch.replacement.classes import ReplacedNorm

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from near_norms import GatedNearNorm

COLUMNS = 32


class After(nn.Module):
    """Qwen3-Next's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(COLUMNS) + 0.5), 1e-6

    def forward(self, states: Tensor, gate: Tensor) -> Tensor:
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        wide = (self.weight * wide.to(states.dtype)) * nn.functional.silu(gate.float())
        return wide.to(states.dtype)


class Before(After):
    """Mamba2's: the gate may be missing, and rows may have groups."""

    def __init__(self) -> None:
        super().__init__()
        self.group_size = COLUMNS

    def forward(self, states: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = states.float()
        wide = wide if gate is None else wide * nn.functional.silu(gate.float())
        grouped = wide.view(*wide.shape[:-1], -1, self.group_size)
        grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * grouped.view(wide.shape).to(states.dtype)


class OfGroups(Before):
    def __init__(self) -> None:
        super().__init__()
        self.group_size = 8


class OfSequences(After):
    """Falcon-H1's: it takes no other number of dimensions, and says how many groups there are."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = 2

    def forward(self, states: Tensor, gate: Tensor) -> Tensor:
        batch, length, columns = states.shape
        wide = states.float().view(batch, length, self.groups, columns // self.groups)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        wide = (self.weight.view(self.groups, -1) * wide).view(states.shape)
        return (wide * nn.functional.silu(gate.float())).to(states.dtype)


FOUND: dict[type[After], str] = {
    After: "RMS norm, gate after",
    Before: "RMS norm, gate before, output type: promote(input, weight)",
    OfGroups: "RMS norm, gate before, 4 groups, output type: promote(input, weight)",
    OfSequences: "RMS norm, gate after, 2 groups",
}


def replaced(cls: type[After], dtype: torch.dtype = torch.float32) -> tuple[After, After]:
    """A norm, and the same replaced."""
    torch.manual_seed(0)
    own = cls().to(dtype)
    ours = copy.deepcopy(own)
    (entry,) = replace_norms(ours).replaced
    assert entry.norm == FOUND[cls]
    return own, ours


def inputs(dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (3, 5)) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(*rows, COLUMNS).to(dtype).requires_grad_() for _ in range(2)]


def results(norm: Any, x: Tensor, z: Tensor, weight: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    output = norm(x, z)
    torch.manual_seed(2)
    grad_output = torch.randint(-4, 5, output.shape).to(output.dtype)  # the same in every type
    return [output.detach(), *torch.autograd.grad(output, [x, z, weight], grad_output)]


@pytest.mark.drawn
@pytest.mark.parametrize("rows", [(1, 1), (3, 5), (40, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cls", FOUND)
def test_values_and_gradients(cls: type[After], dtype: torch.dtype, rows: Any) -> None:
    """By our operators, as near to f64 as before; of few rows and of many."""
    own, ours = replaced(cls, dtype)
    x, z = inputs(dtype, rows)
    with torch.profiler.profile() as profiled:
        found = results(ours, x, z, ours.weight)
    ran = {event.name for event in profiled.events() if event.name.startswith("iree_lnbwd::")}
    assert any(name.endswith("_backward") or "_backward_" in name for name in ran), ran

    def formula(x: Tensor, z: Tensor) -> Tensor:
        factor, groups = nn.functional.silu(z), {OfGroups: 4, OfSequences: 2}.get(cls, 1)
        is_first = issubclass(cls, Before)
        rows = (x * factor if is_first else x).unflatten(-1, (groups, -1))
        y = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.flatten(-2) * weight * (1.0 if is_first else factor)

    weight = own.weight.detach().double().requires_grad_()
    wide = [each.detach().double().requires_grad_() for each in (x, z)]
    bound = 16 * torch.finfo(dtype).eps
    for mine, exact in zip(found, results(formula, wide[0], wide[1], weight), strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize(
    ("states", "gates", "weights"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),  # Mamba2's, of a model in bf16
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.drawn
@pytest.mark.parametrize("cls", [After, Before])
def test_mixed_types(cls: type[After], states: Any, gates: Any, weights: Any) -> None:
    own, ours = replaced(cls, weights)
    (x, _), (_, z) = inputs(states), inputs(gates)
    mine, theirs = (results(norm, x, z, norm.weight) for norm in (ours, own))
    for found, other in zip(mine, theirs, strict=True):
        assert found.dtype == other.dtype
        off = (found.double() - other.double()).norm()
        assert off <= 8 * 2.0**-8 * other.double().norm()


@pytest.mark.parametrize("is_first", [True, False])
def test_near_norms_are_near(is_first: bool) -> None:
    """Without its change, each of them is replaced."""
    assert replace_norms(GatedNearNorm(is_first, "nowhere", lambda *_: _[0])).replaced


def test_what_else_is_called_is_what_it_was() -> None:
    """A gate that is missing, broadcast, or of another kind; and widths that came later."""
    own, ours = replaced(OfGroups)
    x, z = (each.detach() for each in inputs())
    calls: list[tuple[Any, ...]] = [(x,), (x, None), (x, z[:1]), (x, z[..., :1]), (x, z > 0)]
    for call in calls:
        assert torch.equal(ours(*call), own(*call))
    named = {"gate": z, "states": x}
    torch.testing.assert_close(ours(**named), own(**named))
    torch.testing.assert_close(ours(x, gate=z), own(x, z))
    for bad in ({"gate": z}, {"states": x, "z": z}):
        with pytest.raises(TypeError, match="forward"):
            ours(**bad)
    for norm in (own, ours):
        norm.weight = nn.Parameter(norm.weight.detach()[:16].clone())
    assert torch.equal(ours(x[..., :16], z[..., :16]), own(x[..., :16], z[..., :16]))


def test_another_length_of_groups() -> None:
    own, ours = replaced(OfGroups)
    own.group_size = ours.group_size = 16
    assert not isinstance(ours, ReplacedNorm)
    x, z = inputs()
    assert torch.equal(ours(x, z), own(x, z))


def test_copies_and_undoing() -> None:
    own, ours = replaced(Before)
    report = replace_norms(own)
    x, z = inputs()
    expected = ours(x, z)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert isinstance(copied, ReplacedNorm)
        assert torch.equal(copied(x, z), expected)
    assert list(ours.state_dict()) == list(Before().state_dict())
    report.undo()
    assert type(own) is Before
    torch.testing.assert_close(own(x, z), expected)


@pytest.mark.parametrize("cls", [After, OfGroups])
def test_compiled(cls: type[After]) -> None:
    """In one graph, with the same gradients."""
    torch._dynamo.reset()
    _, ours = replaced(cls)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x, z = inputs()
    found, expected = (results(norm, x, z, ours.weight) for norm in (compiled, ours))
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_dtensors_of_groups_are_the_own_forwards() -> None:
    """There are no rules for sets of weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        own, ours = replaced(OfGroups)
        x, z = (DTensor.from_local(t.detach(), mesh, [Shard(0)], run_check=False) for t in inputs())
        weight = DTensor.from_local(own.weight.detach(), mesh, [Replicate()], run_check=False)
        for norm in (own, ours):
            norm.weight = nn.Parameter(weight.detach().clone())
        assert torch.equal(ours(x, z).to_local(), own(x, z).to_local())
    finally:
        torch.distributed.destroy_process_group()


def test_specs() -> None:
    model = nn.ModuleList([replaced(cls)[1] for cls in (After, OfGroups)])
    said = {(spec.op, spec.gate, spec.weight_sets, spec.normalized_shape) for spec in specs(model)}
    assert said == {
        (op, *kind)
        for op in ("rms_norm", "rms_norm_backward")
        for kind in (("after", False, (COLUMNS,)), ("before", True, (8,)))
    }
    warmup(model)
