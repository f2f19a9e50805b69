"""`replace_norms` of wrappers that scale and shift what their norm returns, for each sample."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn

from iree_lnbwd.torch import replace_norms, specs, warmup
from iree_lnbwd.torch.operator_table import CHECKED
from iree_lnbwd.torch.replacement.classes import ReplacedNorm
from iree_lnbwd.torch.replacement.modulated import ReplacedWrapper

COLUMNS = 24


class AdaLN(nn.Module):
    """DiT's: a scale and a shift of each sample."""

    def __init__(self, norm: nn.Module | None = None, parts: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(8, parts * COLUMNS)
        self.norm = norm or nn.LayerNorm(COLUMNS, elementwise_affine=False)

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        shift, scale, gate = self.linear(nn.functional.silu(emb)).chunk(3, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate


class Twice(AdaLN):
    """SD 3.5's: one norm, scaled in two ways, from the left and in other orders."""

    def __init__(self) -> None:
        super().__init__(nn.RMSNorm(COLUMNS, eps=1e-6), 4)

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        shift, scale, shift_2, scale_2 = self.linear(emb).unsqueeze(1).chunk(4, dim=2)
        normalized = self.norm(x)
        return shift + (scale + 1) * normalized, torch.add(normalized.mul(scale_2), shift_2)


class OfNorm(AdaLN):
    """Whose norm has a weight and a bias of its own."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(COLUMNS))


class ScaleAlone(AdaLN):
    def __init__(self) -> None:
        super().__init__(nn.RMSNorm(COLUMNS, eps=1e-6), 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scaled: Tensor = self.norm(x) * self.linear(emb)[:, None]
        return scaled


class AddsRows(ScaleAlone):
    """A gate of each sample, and a residual stream."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        summed: Tensor = x + self.linear(emb)[:, None] * self.norm(x)
        return summed


FOUND: dict[type[AdaLN], str] = {
    AdaLN: "layer norm, modulated",
    Twice: "RMS norm, modulated",
    OfNorm: "layer norm, modulated",
    ScaleAlone: "RMS norm, modulated, no shift",
    AddsRows: "RMS norm, modulated",
}


def both(cls: type[AdaLN], dtype: torch.dtype = torch.float32) -> tuple[AdaLN, AdaLN]:
    """A wrapper, and the same replaced."""
    torch.manual_seed(0)
    own = cls().to(dtype)
    for parameter in own.parameters():
        nn.init.normal_(parameter, 0.3, 0.3)
    ours = copy.deepcopy(own)
    report = replace_norms(ours)
    assert report.entries[0].norm == FOUND[cls]
    assert len(report.replaced) == 2
    return own, ours


def inputs(dtype: torch.dtype = torch.float32, rows: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, emb = torch.randn(3, rows, COLUMNS), torch.randn(3, 8)
    return x.to(dtype), emb.to(dtype)


def results(module: Any, x: Tensor, emb: Tensor) -> list[Tensor]:
    """The outputs and all gradients."""
    x, emb = (each.clone().requires_grad_() for each in (x, emb))
    output = module(x, emb)
    outputs = list(output) if isinstance(output, tuple) else [output]
    torch.manual_seed(2)
    grads = [torch.randint(-4, 5, each.shape).to(each.dtype) for each in outputs]
    found = torch.autograd.grad(outputs, [x, emb, *module.parameters()], grads)
    return [*(each.detach() for each in outputs), *found]


def ran(function: Any, *given: Any) -> tuple[Any, set[str]]:
    """What it returns, and the names of our operators that ran; not what C++ says to Python."""
    with torch.profiler.profile() as profiled:
        found = function(*given)
    ours = (e.name for e in profiled.events() if e.name.startswith("iree_lnbwd::"))
    return found, {name.removesuffix(CHECKED) for name in ours} - {"iree_lnbwd::remember"}


@pytest.mark.drawn
@pytest.mark.parametrize("rows", [1, 5, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cls", FOUND)
def test_values_and_gradients(cls: type[AdaLN], dtype: torch.dtype, rows: int) -> None:
    """By one kernel each way, as near to f64 as before."""
    own, ours = both(cls, dtype)
    x, emb = inputs(dtype, rows)
    found, names = ran(results, ours, x, emb)
    kind = "layer_norm" if "layer" in FOUND[cls] else "rms_norm"
    forward = f"iree_lnbwd::{'own_' * (kind == 'layer_norm')}{kind}_of_sets"
    assert names == {forward, f"iree_lnbwd::{kind}_backward_of_sets"}
    exact = results(copy.deepcopy(own).double(), x.double(), emb.double())
    theirs = results(own, x, emb)
    least = 16 * torch.finfo(dtype).eps
    for mine, other, right in zip(found, theirs, exact, strict=True):
        assert mine.dtype == other.dtype
        off, before = (float((t.double() - right).norm()) for t in (mine, other))
        assert off <= max(1.5 * before, least * float(right.norm()))


def test_autocast() -> None:
    own, ours = both(OfNorm)
    x, emb = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            (mine, names), theirs = ran(ours, given, emb), own(given, emb)
            assert names == {"iree_lnbwd::own_layer_norm_of_sets"}
            assert mine[0].dtype == theirs[0].dtype
            off = (mine[0].double() - theirs[0].double()).norm()
            assert off <= 4 * 2.0**-8 * theirs[0].double().norm()


@pytest.mark.parametrize("cls", [AdaLN, Twice])
def test_compiled_and_exported(cls: type[AdaLN]) -> None:
    """In one graph."""
    torch._dynamo.reset()
    own, ours = both(cls)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    found, names = ran(results, compiled, *inputs())
    assert all(name.endswith("_of_sets") for name in names), names
    torch.testing.assert_close(found, results(own, *inputs()), rtol=1e-4, atol=1e-4)
    exported = torch.export.export(ours, inputs())
    assert any("_of_sets" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(*inputs())[0], own(*inputs())[0])
    torch._dynamo.reset()


def test_copies_and_undoing() -> None:
    own, ours = both(AdaLN)
    report = replace_norms(own)
    expected = results(ours, *inputs())
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert isinstance(copied, ReplacedWrapper)
        torch.testing.assert_close(results(copied, *inputs()), expected)
    assert list(ours.state_dict()) == list(AdaLN().state_dict())
    again = replace_norms(ours)
    assert not again.replaced
    report.undo()
    assert (type(own), type(own.norm)) == (AdaLN, nn.LayerNorm)
    torch.testing.assert_close(results(own, *inputs()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript, in torch.func
def test_modes_and_transforms() -> None:
    own, ours = both(AdaLN)
    x, emb = inputs()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(ours(x, emb.clone()), own(x, emb.clone()))
            torch.testing.assert_close(ours(x.clone(), emb), own(x.clone(), emb))
    many = [torch.stack([each, 2 * each]) for each in (x, emb)]
    found, expected = (torch.func.vmap(m)(*many)[0] for m in (ours, own))
    torch.testing.assert_close(found, expected)
    found, expected = (torch.func.jvp(lambda t, m=m: m(t, emb)[0], (x,), (x,)) for m in (ours, own))
    torch.testing.assert_close(found, expected)


def test_who_sees_the_norm_itself() -> None:
    """Hooks of the norm run, and one that is no longer replaced is called."""
    own, ours = both(AdaLN)
    x, emb = inputs()
    seen: list[Tensor] = []
    handle = ours.norm.register_forward_hook(lambda _, __, y: seen.append(y))
    torch.testing.assert_close(ours(x, emb), own(x, emb))
    torch.testing.assert_close(seen, [own.norm(x)])
    handle.remove()
    ours.norm = own.norm
    (found, names), expected = ran(ours, x, emb), own(x, emb)
    assert torch.equal(found[0], expected[0])
    assert not names


def changes(x: Tensor) -> None:
    x.add_(1)


class OtherUses(AdaLN):
    """What is asked of a norm's output, beside products."""

    what = "returned"

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        factor = self.linear(emb)[:, None, :COLUMNS]
        if self.what == "changed":
            x = x.clone()
        y = self.norm(x)
        match self.what:
            case "returned":
                return y, [{"y": y}]
            case "rows":
                return y * self.linear(x[..., :8])[..., :COLUMNS] + factor
            case "numbers":
                return (2 * y + 1, y * 3.0 + factor, y - factor, -y, y / 2, y**2, y @ y.mT, y[0])
            case "functions":
                return torch.cat([y, y]), nn.functional.linear(y, factor[0]), y.shape, y.sum(-1)
            case "scaled":
                scaled = y * factor
                return scaled, scaled * factor, scaled + 1, scaled.sum(), factor - scaled
            case "changed":
                changes(x)
                return y * factor
            case "factor changed":
                scaled = y * factor
                changes(factor)
                return scaled + factor
            case "of the columns":
                return y * factor[0, 0] + factor[:1, 0]
            case "squared":
                return y * y + y


@pytest.mark.parametrize(
    "what",
    ["returned", "rows", "numbers", "functions", "scaled", "of the columns", "squared"],
)
def test_whatever_else_is_asked_of_the_norm(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as one that scales, and then used in another way: it is its own output."""
    monkeypatch.setattr(OtherUses, "what", "of the columns")
    own = OtherUses()
    ours = copy.deepcopy(own)
    replace_norms(ours)
    assert isinstance(ours, ReplacedWrapper)
    monkeypatch.setattr(OtherUses, "what", what)
    x, emb = inputs()
    torch.testing.assert_close(ours(x, emb), own(x, emb))


@pytest.mark.parametrize("what", ["changed", "factor changed"])
def test_what_is_changed_in_between(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a wrapper is kept; if it does so later, that is an error, and no wrong value."""
    monkeypatch.setattr(OtherUses, "what", what)
    kept = OtherUses()
    replace_norms(kept)
    assert not isinstance(kept, ReplacedNorm)
    monkeypatch.setattr(OtherUses, "what", "of the columns")
    later = OtherUses()
    replace_norms(later)
    monkeypatch.setattr(OtherUses, "what", what)
    with torch.no_grad(), pytest.raises(RuntimeError, match="that do not change before"):
        later(*inputs())


class WithoutGradient(AdaLN):
    """Its norm is computed in other modes than what follows."""

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        factor, shift, _ = self.linear(emb)[:, None].chunk(3, dim=-1)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = self.norm(x.float())
        return y * factor + shift


def test_a_norm_in_other_modes() -> None:
    own = WithoutGradient(nn.LayerNorm(COLUMNS))
    ours = copy.deepcopy(own)
    replace_norms(ours)
    assert isinstance(ours, ReplacedWrapper)
    x, emb = inputs()
    x.requires_grad_()
    for is_on in (False, True):
        outputs = []
        for module in (own, ours):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                outputs.append(module(x, emb))
            parameters = [x, *module.parameters()]
            found = torch.autograd.grad(outputs[-1].sum(), parameters, allow_unused=True)
            assert [g is None for g in found] == [True, False, False, True, True]
        assert outputs[0].dtype == outputs[1].dtype
        torch.testing.assert_close(outputs[1], outputs[0])


class OfColumns(AdaLN):
    """One factor for all samples, as LayerScale has it, and rows without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(COLUMNS))

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        return self.norm(x) * self.factor + emb[..., :1]


def test_factors_of_all_samples_and_of_each_row() -> None:
    own = OfColumns()
    ours = copy.deepcopy(own)
    replace_norms(ours)
    x, _ = inputs()
    for emb in (torch.randn(1), torch.randn(3, 5, 1), torch.randn(COLUMNS)[None, None]):
        torch.testing.assert_close(ours(x, emb), own(x, emb))
    own, ours = both(ScaleAlone)
    x, emb = torch.randn(3, COLUMNS), torch.randn(3, 8)
    torch.testing.assert_close(ours(x[:, None], emb), own(x[:, None], emb))


class Super(AdaLN):
    def forward(self, x: Tensor, emb: Tensor) -> Any:
        return super().forward(x, emb)


class Draws(AdaLN):
    def forward(self, x: Tensor, emb: Tensor) -> Any:
        return self.norm(x) * torch.rand(COLUMNS)


class Decides(AdaLN):
    def forward(self, x: Tensor, emb: Tensor) -> Any:
        return self.norm(x) * 2.0 if x.sum() > 0 else x


class Plain(AdaLN):
    def forward(self, x: Tensor, emb: Tensor) -> Any:
        return self.linear(self.norm(x)[..., :8])


class AddsInPlace(AdaLN):
    def forward(self, x: Tensor, emb: Tensor) -> Any:
        y = self.norm(x)
        if emb is None:
            x += 1
        return y * 2.0 + emb


class Out(AdaLN):
    def forward(self, x: Tensor, emb: Tensor) -> Any:
        y = self.norm(x)
        torch.add(x, 1, out=x)
        return y * 2.0 + emb


class InPlace(AdaLN):
    def forward(self, x: Tensor, emb: Tensor) -> Any:
        y = self.norm(x)
        nn.functional.relu(x, True)
        return y * 2.0 + emb


class InPlaceModule(AdaLN):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        y = self.norm(x)
        self.relu(x)
        return y * 2.0 + emb


def doubled(x: Any) -> Any:
    return x * 2.0 if isinstance(x, Tensor) else x


class Asks(AdaLN):
    """What is put off is no tensor, and neither is it once it is multiplied."""

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        return doubled(self.norm(x) * emb) + emb


class Keeps(AdaLN):
    """What is put off would be in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        self.seen.append(y := self.norm(x))
        return y * emb + emb


class CountsRows(AdaLN):
    """The size of what passes for a tensor, in a place where PyTorch expects a number."""

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        y = self.norm(x)
        return y * emb + emb + torch.arange(y.shape[-1], device=x.device)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class CallsAFunction(AdaLN):
    """Of autograd's, whose C++ expects tensors that are there."""

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        return Doubling.apply(self.norm(x)) * emb + emb


@pytest.mark.parametrize("cls", [CountsRows, CallsAFunction])
def test_a_forward_of_what_cannot_be_traced(cls: type[AdaLN]) -> None:
    module = cls()
    x, emb = torch.randn(2, 3, COLUMNS, requires_grad=True), torch.randn(COLUMNS)

    def computed() -> tuple[Tensor, ...]:
        output = module(x, emb)
        return output, *torch.autograd.grad(output.square().sum(), x)

    expected = computed()
    replace_norms(module)
    torch.testing.assert_close(computed(), expected)


class AddsOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class ChangesLater(AdaLN):
    """A module changes a view of the norm's input before the output is used."""

    def __init__(self) -> None:
        super().__init__()
        self.adds = AddsOne()

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        y = self.norm(x)
        self.adds(x.view(-1))
        return y * emb + emb


class ChangesElse(ChangesLater):
    def forward(self, x: Tensor, emb: Tensor) -> Any:
        y = self.norm(x)
        return y * emb + self.adds(emb + 1.0)


@pytest.mark.parametrize(("cls", "is_kept"), [(ChangesLater, True), (ChangesElse, False)])
def test_modules_that_may_change_the_input(cls: type[AdaLN], is_kept: bool) -> None:
    """Under ``torch.compile`` nothing else would tell."""
    own = cls()
    ours = copy.deepcopy(own)
    replace_norms(ours)
    assert isinstance(ours, ReplacedWrapper) != is_kept
    x, emb = torch.randn(2, 3, COLUMNS), torch.randn(COLUMNS)
    torch.testing.assert_close(ours(x.clone(), emb), own(x.clone(), emb))


@pytest.mark.parametrize(
    "cls",
    [Super, Draws, Decides, Plain, AddsInPlace, Out, InPlace, InPlaceModule, Asks, Keeps],
)
def test_what_is_no_wrapper(cls: type[AdaLN]) -> None:
    module, state = cls(), torch.random.get_rng_state()
    assert len(replace_norms(module).replaced) == 1
    assert type(module) is cls
    assert torch.equal(torch.random.get_rng_state(), state)


def test_specs() -> None:
    model = nn.ModuleList([both(cls)[1] for cls in (AdaLN, ScaleAlone)])
    said = {(spec.op, spec.has_bias) for spec in specs(model) if spec.weight_sets}
    assert {op for op, _ in said} == {
        *("layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward")
    }
    warmup(model)
