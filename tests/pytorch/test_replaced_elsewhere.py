"""Replaced norms under what else changes, runs, shards or exports a model."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize, prune

from iree_lnbwd.torch import replace_norms, warmup
from iree_lnbwd.torch.replacement.classes import ReplacedNorm

COLUMNS = 32


class Norm(nn.Module):
    """Llama's."""

    def __init__(self, columns: int = COLUMNS) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(columns) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def norms() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(COLUMNS), Norm(), nn.RMSNorm(COLUMNS))


def replaced() -> nn.Sequential:
    model = norms()
    assert len(replace_norms(model).replaced) == 3
    return model


def by_own_forwards(model: nn.Sequential, x: Tensor) -> Tensor:
    for norm in model:
        x = super(ReplacedNorm, norm).forward(x)
    return x


def classes(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules()]


def assert_alike(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# --- what traces ---------------------------------------------------------------------------------


class HasNoScript(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if [*map(len, ["x"])] else -x


def test_scripting_leaves_the_callers_model_alone() -> None:
    """Where it fails, too; and the model goes on by our kernels."""
    x = torch.randn(3, COLUMNS)
    for fails in (False, True):
        model = nn.Sequential(replaced(), *[HasNoScript()] * fails)
        before, state = classes(model), list(model.modules())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is
            if fails:
                with pytest.raises(Exception, match="map"):
                    torch.jit.script(model)
            else:
                assert torch.equal(torch.jit.script(model)(x), by_own_forwards(model[0], x))
        assert classes(model) == before
        assert all(a is b for a, b in zip(model.modules(), state, strict=True))
        assert_alike(model(x), by_own_forwards(model[0], x))


def closed_over(functional: Any) -> nn.Module:
    """A norm whose forward has names of a function around it."""

    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(COLUMNS))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = functional.rms_norm(x, [x.size(-1)], self.weight, 1e-6)
            return found

    return Closed()


def test_scripting_finds_the_names_of_the_own_forward() -> None:
    model = nn.Sequential(closed_over(F))
    assert replace_norms(model).replaced
    x = torch.randn(3, COLUMNS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(model)
    assert_alike(scripted(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traces_have_the_own_forwards() -> None:
    """They run where this package is not; of PyTorch's norms, torch.fx keeps the modules."""
    model, x = replaced(), torch.randn(3, COLUMNS)
    before = classes(model)
    traced = torch.jit.trace(model, x)
    assert "iree_lnbwd::" not in str(traced.inlined_graph)
    assert torch.equal(traced(x), by_own_forwards(model, x))
    graph = torch.fx.symbolic_trace(model)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert targets == ["0", "2"]
    assert_alike(graph(x), model(x))
    inner = torch.fx.GraphModule(model, _LooksInside().trace(model))
    assert not any(node.op == "call_module" for node in inner.graph.nodes)
    assert torch.equal(inner(x), by_own_forwards(model, x))
    assert classes(model) == before


class _LooksInside(torch.fx.Tracer):
    """Traces PyTorch's modules, too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


# --- hooks that take the forward's place ---------------------------------------------------------


def test_accelerates_hooks_go_on() -> None:
    """Set before or after; they run around our forward, and can be removed."""
    hooks = pytest.importorskip("accelerate", reason="accelerate is not installed").hooks
    seen: list[str] = []

    class Hook(hooks.ModelHook):  # type: ignore[name-defined]
        def pre_forward(self, module: nn.Module, *inputs: Any, **named: Any) -> Any:
            seen.append(type(module).__name__)
            return inputs, named

    before, after = norms(), replaced()
    for norm in itertools.chain(before, after):
        hooks.add_hook_to_module(norm, Hook())
    report = replace_norms(before)
    assert len(report.replaced) == 3
    x = torch.randn(3, COLUMNS)
    for model in (before, after, copy.deepcopy(before)):
        seen.clear()
        warmup(model)
        assert not seen
        with torch.profiler.profile() as profiled:
            output = model(x)
        ran = {event.name for event in profiled.events()}
        assert {"iree_lnbwd::layer_norm", "iree_lnbwd::rms_norm"} <= ran
        assert seen == ["IreeLayerNorm", "IreeNorm", "IreeRMSNorm"]
        for norm in model:
            hooks.remove_hook_from_module(norm)
        assert torch.equal(model(x), output)
        assert len(seen) == 3
    assert not replace_norms(before).replaced  # a forward of its own class is none of its own
    report.undo()
    assert [type(norm) for norm in before] == [nn.LayerNorm, Norm, nn.RMSNorm]
    assert [norm.forward.__func__ for norm in before] == [
        cls.forward for cls in (nn.LayerNorm, Norm, nn.RMSNorm)
    ]
    assert len(replace_norms(before).replaced) == 3


def test_another_forward_on_the_module_is_kept() -> None:
    norm = nn.LayerNorm(COLUMNS)
    norm.forward = lambda x: x
    (entry,) = replace_norms(norm).entries
    assert entry.reason == "its forward is set on the module itself"


# --- types, layouts and modes --------------------------------------------------------------------


def outcome(norm: nn.Module, x: Tensor) -> tuple[Any, ...]:
    """What a call returns, or how it ends."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of types that are slow together
            output = norm(x)
    except Exception as error:
        return type(error), str(error)
    return output.dtype, output.stride(), output


@pytest.mark.drawn
@pytest.mark.parametrize("index", range(3))
def test_element_types_that_ours_do_not_take(index: int) -> None:
    """Results and errors are those of the own class, to the bit."""
    for weight, dtype in itertools.product(
        (torch.float32, torch.float64), (torch.float64, torch.float32, torch.int32, torch.complex64)
    ):
        if weight == dtype or (weight, dtype) == (torch.float32, torch.float32):
            continue
        ours = replaced()[index].to(weight)
        own = norms()[index].to(weight)
        own.load_state_dict(ours.state_dict())
        x = (3 * torch.randn(3, COLUMNS)).to(dtype)
        mine, theirs = outcome(ours, x), outcome(own, x)
        assert mine[:2] == theirs[:2]
        assert mine[2:] == () or torch.equal(mine[2], theirs[2])


def test_gradients_of_types_that_ours_do_not_take() -> None:
    for ours in replaced()[1:]:
        x = torch.randn(3, COLUMNS, dtype=torch.float64, requires_grad=True)
        asked = (x, ours.weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.autograd.grad(ours(x).sum(), asked)
            expected = torch.autograd.grad(super(ReplacedNorm, ours).forward(x).sum(), asked)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)


def test_nested_tensors_of_the_older_layout() -> None:
    ours = replaced()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is a prototype
        x = torch.nested.nested_tensor([torch.randn(n, COLUMNS) for n in (2, 3)])
        x.requires_grad_()
        (found,) = torch.autograd.grad(ours(x).to_padded_tensor(0.0).square().sum(), x)
    assert found.is_nested


class OfImages(nn.LayerNorm):
    """timm's LayerNorm2d."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return super().forward(x).permute(0, 3, 1, 2)


class InOneOrder(OfImages):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous()


class ConvNeXts(nn.Module):
    """That of the paper's authors: its output is in the order of its input."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.rand(columns)) for _ in range(2))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        centred = wide - wide.mean(1, keepdim=True)
        wide = centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + self.eps)
        return (self.weight[:, None, None] * wide + self.bias[:, None, None]).to(x.dtype)


class Exp2d(nn.LayerNorm):
    """timm's LayerNormExp2d: another formula, of lower precision, for other orders in memory."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_contiguous(memory_format=torch.contiguous_format):
            rows = x.permute(0, 2, 3, 1)
            return super().forward(rows).permute(0, 3, 1, 2)
        variance, mean = torch.var_mean(x, dim=1, unbiased=False, keepdim=True)
        x = (x - mean) * torch.rsqrt(variance + self.eps)
        return x * self.weight[:, None, None] + self.bias[:, None, None]


def images(dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(2, COLUMNS, 4, 5).to(dtype)
    return [
        x,
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(2, 3),
        x[:, :, 1:, ::2],
        torch.randn(COLUMNS, 2, 4, 5).to(dtype).transpose(0, 1),
    ]


@pytest.mark.parametrize("cls", [OfImages, InOneOrder, ConvNeXts, Exp2d])
def test_orders_in_memory_and_mixed_types_of_images(cls: Callable[[int], nn.Module]) -> None:
    own = cls(COLUMNS)
    ours = copy.deepcopy(own)
    assert bool(replace_norms(ours).replaced) == (cls is not Exp2d)
    for weight, dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        own.to(weight), ours.to(weight)
        for x in images(dtype):
            mine, theirs = outcome(ours, x), outcome(own, x)
            if isinstance(theirs[0], torch.dtype):
                assert mine[:2] == theirs[:2]
                rough = torch.bfloat16 in (weight, dtype)
                off = (mine[2].double() - theirs[2].double()).abs().max()
                assert off <= (2.0**-5 if rough else 1e-5)


def test_orders_in_memory_of_rows() -> None:
    """An element-wise forward keeps that of its input."""
    own, ours = norms()[1], replaced()[1]
    ours.load_state_dict(own.state_dict())
    for x in (torch.randn(5, 3, COLUMNS).transpose(0, 1), torch.randn(3, COLUMNS, 5).mT):
        assert ours(x).stride() == own(x).stride()
        found, expected = (torch.autograd.grad(n(x).square().sum(), n.weight) for n in (ours, own))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.no_grad,
        FakeTensorMode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
    ],
)
def test_modes_of_the_caller_do_not_matter(mode: Callable[[], Any]) -> None:
    outside = norms()
    with mode():
        inside = norms()
        assert all(len(replace_norms(m).replaced) == 3 for m in (outside, inside))
    x = torch.randn(3, COLUMNS)
    assert_alike(outside(x), by_own_forwards(outside, x))


def test_models_that_accelerate_makes_without_memory() -> None:
    """It exchanges `register_parameter` meanwhile."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    with accelerate.init_empty_weights():
        model = norms()
        assert len(replace_norms(model).replaced) == 3


# --- parameters that are elsewhere ---------------------------------------------------------------


def test_pruned_norms() -> None:
    """A weight that a hook computes: it is read at each call."""
    for ours in (nn.LayerNorm(COLUMNS), nn.RMSNorm(COLUMNS)):
        own = copy.deepcopy(ours)
        for norm in (ours, own):
            prune.l1_unstructured(norm, "weight", 5)
        assert replace_norms(ours).replaced
        x = torch.randn(3, COLUMNS)
        found, expected = (
            torch.autograd.grad(n(x).square().sum(), [*n.parameters()]) for n in (ours, own)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    norm = Norm()
    prune.l1_unstructured(norm, "weight", 5)
    assert replace_norms(norm, only=[Norm]).entries[0].reason == (
        "its forward reads weight, which may change: it is of type Tensor"
    )


def test_a_parametrization_is_not_run_in_an_order_of_its_own() -> None:
    """Some have a state that each run changes, as spectral norm has: once is enough."""
    runs = 0

    class Counts(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            return weight * 2

    norm = Norm()
    parametrize.register_parametrization(norm, "weight", Counts(), unsafe=True)
    runs = 0
    assert replace_norms(norm).replaced
    assert runs == 1


def emptied_as_by_zero_3(norm: nn.Module, held: int) -> nn.Module:
    """Parameters as DeepSpeed leaves them outside of a forward: nothing is there, or a part."""
    for number, parameter in enumerate(norm.parameters()):
        parameter.ds_id, parameter.ds_shape = number, parameter.shape
        parameter.data = parameter.data[:held].clone()
    return norm


@pytest.mark.parametrize("held", [0, 7, COLUMNS])
def test_parameters_that_zero_3_has_taken_away(held: int) -> None:
    """Whatever a rank holds, it decides alike."""
    model = nn.Sequential(*(emptied_as_by_zero_3(norm, held) for norm in norms()))
    report = replace_norms(model)
    assert [entry.reason for entry in report.entries] == [
        None,
        "ZeRO-3 holds parts of its parameters; replace norms before that",
        None,
    ]
    warmup(model)


@pytest.mark.parametrize("held", [0, 7])
def test_parameters_of_no_width(held: int) -> None:
    """Taken away by something that nobody knows."""
    norm = nn.Sequential(Norm())
    norm[0].weight.data = norm[0].weight.data[:held].clone()
    (entry,) = replace_norms(norm, only=[Norm]).entries
    assert (entry.reason == "its parameters have shape (0,)") == (held == 0)
    norm[0].weight.data = torch.rand(COLUMNS)
    x = torch.randn(3, COLUMNS)
    assert_alike(norm(x), Norm.forward(norm[0], x))


@pytest.mark.drawn
@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_norms_that_fsdp1_shards(tmp_path: Path) -> None:
    """Two processes replace the same norms, both ways, and train as they did."""
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).parent / "fsdp1_norms.py"), str(rank),
                     str(tmp_path)],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )
            for rank in (0, 1)
        ]  # fmt: skip
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    first, second = (json.loads(said) for said, _ in outputs)
    for mode in ("True", "False"):
        assert first[mode]["report"] == second[mode]["report"]
        assert "kept: FSDP1 holds parts of its parameters" in first[mode]["report"]
        assert first[mode]["report"].startswith("2 of 4 norms replaced;")
        for rank in (first, second):
            assert rank[mode]["off"] < 1e-5
            assert not rank[mode]["compiled"]  # warmup had compiled all
