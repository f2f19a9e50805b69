"""`replace_norms`: of a model's own classes, and of classes that compute what others' do."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn
from torch.nn.utils import parametrize

from iree_lnbwd.torch import AddRMSNorm, LayerNorm, RMSNorm, replace_norms
from iree_lnbwd.torch.replacement.classes import ReplacedNorm

COLUMNS = 32
DTYPES = (torch.float32, torch.bfloat16)


# --- classes that compute what those of transformers and timm do ---------------------------------


class TwiceRoundedNorm(nn.Module):
    """The norm of Llama, Mistral and Qwen: the normalized row is rounded before the weight."""

    def __init__(self, columns: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.variance_epsilon = eps

    def xhat(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, states: Tensor) -> Tensor:
        return self.weight * self.xhat(states).to(states.dtype)


class AroundZero(TwiceRoundedNorm):
    """Gemma's `1 + weight`; the output is rounded once."""

    def __init__(self, columns: int) -> None:
        super().__init__(columns)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (self.xhat(x) * (1.0 + self.weight.float())).type_as(x)


class OfTheWeightsType(TwiceRoundedNorm):
    """T5's: the output has the type of a half weight."""

    def forward(self, states: Tensor) -> Tensor:
        found = states * torch.rsqrt(states.float().square().mean(-1, keepdim=True) + 1e-6)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            found = found.to(self.weight.dtype)
        return self.weight * found


class WithoutWeight(nn.Module):
    """OLMo's: computed in f32, with an eps that is no attribute."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.normalized_shape = (columns,)

    def forward(self, states: Tensor) -> Tensor:
        return F.layer_norm(states.float(), self.normalized_shape, eps=1e-5).to(states.dtype)


class InF32(nn.LayerNorm):
    """One of timm's."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class OfImages(nn.LayerNorm):
    """ConvNeXt's: channels come first."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return super().forward(x).permute(0, 3, 1, 2)


class OfOneEps(nn.RMSNorm):
    """PyTorch's, with the eps of the other classes: one module less to compile."""

    def __init__(self, columns: int) -> None:
        super().__init__(columns, eps=1e-6)


# The class, and what the report says of it.
PLAIN: dict[type[nn.Module], str] = {
    nn.LayerNorm: "layer norm",
    OfOneEps: "RMS norm",
    TwiceRoundedNorm: "RMS norm, output type: promote(input, weight)",
    AroundZero: "RMS norm, 1 + weight",
    OfTheWeightsType: "RMS norm, output type: the weight's",
    WithoutWeight: "layer norm, no weight",
    InF32: "layer norm",
    OfImages: "layer norm, channels first",
}


class HasNoGradientOfRstd(TwiceRoundedNorm):
    def xhat(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6).detach()


class SumsInTheInputsType(TwiceRoundedNorm):
    def xhat(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class AddsEpsToTheRoot(TwiceRoundedNorm):
    def xhat(self, x: Tensor) -> Tensor:
        return x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + 1e-6)


class DropsOut(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class TakesAGate(TwiceRoundedNorm):
    def forward(self, states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(states if gate is None else states * gate)


class OfImagesAlone(nn.LayerNorm):
    """Of four dimensions, it normalizes the second."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x.movedim(1, -1)).movedim(-1, 1) if x.ndim == 4
                else super().forward(x))  # fmt: skip


class CentresByMedian(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.median(-1, keepdim=True).values * 1e-3


NOT_PLAIN: dict[type[nn.Module], str] = {
    HasNoGradientOfRstd: "its gradient of input is not that of the norm",
    AddsEpsToTheRoot: "its output in f32 is ",
    DropsOut: "its forward draws random numbers",
    TakesAGate: "its output in f32 is ",
    OfImagesAlone: "it normalizes another dimension of sequences than of images",
    CentresByMedian: "its output in f32 is ",
    nn.BatchNorm1d: "BatchNorm1d: no kernel",
    nn.GroupNorm: "GroupNorm: no kernel",
}


def made(cls: type[nn.Module]) -> nn.Module:
    """A norm with random parameters."""
    norm: nn.Module = cls(2, COLUMNS) if cls is nn.GroupNorm else cls(COLUMNS)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 0.75, 0.25)
    return norm


def input_of(cls: type[nn.Module], dtype: torch.dtype) -> Tensor:
    shape = (3, COLUMNS, 2, 2) if cls is OfImages else (3, 5, COLUMNS)
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def results(norm: nn.Module, x: Tensor, grad_output: Tensor) -> list[Tensor]:
    output = norm(x)
    asked = [x, *norm.parameters()]
    return [output, *torch.autograd.grad(output, asked, grad_output.to(output.dtype))]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("cls", "dtype"),
    [*((cls, torch.float32) for cls in PLAIN), (TwiceRoundedNorm, torch.bfloat16)],
    ids=str,
)
def test_plain_norms(cls: type[nn.Module], dtype: torch.dtype) -> None:
    own = made(cls).to(dtype)
    ours = copy.deepcopy(own)
    (entry,) = replace_norms(ours).replaced
    assert entry.norm == PLAIN[cls]
    x = input_of(cls, dtype)
    grad_output = torch.randn(x.shape, dtype=dtype)
    # Theirs rounds to bf16 up to three times, ours once. The sums in f32 have 30 terms or so.
    roundings = 4 * 2.0**-8 if dtype == torch.bfloat16 else 32 * 2.0**-24
    for mine, other in zip(*(results(n, x, grad_output) for n in (ours, own)), strict=True):
        bound = roundings * float(other.detach().abs().max())
        torch.testing.assert_close(mine, other, rtol=0, atol=bound)


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("cls", PLAIN)
def test_element_types_are_what_they_were(cls: type[nn.Module]) -> None:
    """Mixed ones too; on the meta device, where PyTorch's own take as many as anywhere."""
    own = made(cls).to("meta")
    ours = copy.deepcopy(own)
    replace_norms(ours)
    for dtype, weight in itertools.product(DTYPES, DTYPES):
        own.to(weight), ours.to(weight)
        x = input_of(cls, dtype).detach().to("meta").requires_grad_()
        mine, other = (results(norm, x, torch.empty_like(x)) for norm in (ours, own))
        assert [t.dtype for t in mine] == [t.dtype for t in other]


@pytest.mark.parametrize("cls", NOT_PLAIN)
def test_what_is_no_plain_norm_is_kept(cls: type[nn.Module]) -> None:
    norm = made(cls)
    (entry,) = replace_norms(norm, only=[cls]).entries
    assert entry.norm is None
    assert entry.reason is not None
    assert entry.reason.startswith(NOT_PLAIN[cls])
    assert type(norm) is cls


def test_the_attribute_of_eps_stays_alive() -> None:
    norm = made(TwiceRoundedNorm)
    replace_norms(norm)
    x = torch.randn(3, COLUMNS)
    before = norm(x)
    norm.variance_epsilon = 1.0
    torch.testing.assert_close(norm(x), TwiceRoundedNorm.forward(norm, x))
    assert not torch.allclose(norm(x), before)


def test_a_call_with_other_arguments_is_refused_in_the_classs_own_words() -> None:
    norm = made(TwiceRoundedNorm)
    replace_norms(norm)
    x = torch.randn(3, COLUMNS)
    assert torch.equal(norm(states=x), norm(x))
    with pytest.raises(TypeError, match=r"TwiceRoundedNorm\.forward\(\)"):
        norm(x, x)
    with pytest.raises(TypeError, match=r"TwiceRoundedNorm\.forward\(\)"):
        norm(input=x)


# --- models ----------------------------------------------------------------------------------


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # its fast path is for inference alone
        return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).sin().mean(), [*model.parameters()]))


def test_replaces_those_of_a_model() -> None:
    model = transformer()
    x = torch.randn(5, 7, 32)
    expected_output, expected = model(x), gradients(model, x)
    before = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    keys, text = list(model.state_dict()), repr(model)

    report = replace_norms(model)
    assert dict(model.named_modules()) == before
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert repr(model) == text.replace("LayerNorm", "IreeLayerNorm")
    assert len(report.replaced) == len(report.entries) == 5
    assert str(report).splitlines() == [
        "5 of 5 norms replaced; without that, enable() reaches 5 on a GPU",
        "norms  class      by iree-lnbwd  modules",
        "5      LayerNorm  layer norm     layers.0.norm1, layers.0.norm2, ..., norm",
        "undo() of this report gives the modules their own classes back",
    ]
    assert torch.equal(model(x), expected_output)
    for ours, theirs in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)

    again = replace_norms(model)
    assert {entry.reason for entry in again.entries} == {"it is one of iree-lnbwd already"}
    again.undo()  # it did nothing
    assert sum(isinstance(module, ReplacedNorm) for module in model.modules()) == 5
    for _ in range(2):
        report.undo()
        assert repr(model) == text
        assert {type(module) for module in model.modules()} == {type(m) for m in before.values()}
    for ours, theirs in zip(gradients(model, x), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("eps", [1e-46, 1e39])
def test_an_eps_that_sums_cannot_hold(eps: float) -> None:
    """The norm stays PyTorch's; sums of f64 hold it."""
    norms = (nn.RMSNorm(COLUMNS, eps=eps), nn.RMSNorm(COLUMNS, eps=eps, dtype=torch.float64))
    report = replace_norms(nn.ModuleList(norms))
    assert [entry.names for entry in report.replaced] == [("1",)]
    assert (report.kept[0].reason or "").startswith("eps: expected 0, or a number from ")
    x = torch.randn(3, COLUMNS, dtype=torch.float64)
    expected = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    torch.testing.assert_close(norms[1](x), expected)
    norms[0](x.float())


def test_the_report_says_what_was_kept_and_why() -> None:
    model = nn.Sequential(
        nn.LayerNorm(COLUMNS),
        TwiceRoundedNorm(COLUMNS),
        RMSNorm(COLUMNS),
        nn.Linear(COLUMNS, COLUMNS),
    )
    model.extend([nn.BatchNorm1d(COLUMNS), nn.RMSNorm(COLUMNS)])
    model.append(model[0])
    model[5].forward = functools.partial(model[5].forward)
    report = replace_norms(model, only=[nn.LayerNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm])
    assert [(entry.names, entry.norm) for entry in report.replaced] == [(("0", "6"), "layer norm")]
    assert str(report).startswith(
        "1 of 5 norms replaced; without that, enable() reaches 2 on a GPU"
    )
    left = "kept: its class is not in `only`"
    lines = [line.split("  ") for line in str(report).splitlines()]
    assert [tuple(word.strip() for word in line if word) for line in lines[2:]] == [
        ("1", "LayerNorm", "layer norm", "0 = 6"),
        ("1", "TwiceRoundedNorm", left, "1"),
        ("1", "RMSNorm", "kept: it is one of iree-lnbwd already", "2"),
        ("1", "BatchNorm1d", "kept: BatchNorm1d: no kernel", "4"),
        ("1", "RMSNorm", "kept: its forward is set on the module itself", "5"),
        ("undo() of this report gives the modules their own classes back",),
    ]


def test_hooks_and_the_mode_are_kept() -> None:
    norm = nn.LayerNorm(COLUMNS).eval()
    seen: list[str] = []
    norm.register_forward_hook(lambda *_: seen.append("forward"))
    norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    norm.weight.requires_grad_(False)
    replace_norms(norm)
    x = torch.randn(3, COLUMNS, requires_grad=True)
    torch.autograd.backward(norm(x).sum())
    assert seen == ["forward", "backward"]
    assert not norm.training
    assert norm.weight.grad is None
    assert norm.bias.grad is not None


def test_subclasses_are_replaced_if_they_have_the_forward() -> None:
    class Alike(nn.LayerNorm):
        pass

    model = nn.Sequential(OfImages(COLUMNS), Alike(COLUMNS), nn.LayerNorm(COLUMNS))
    report = replace_norms(model)
    assert not report.kept
    assert isinstance(model[1], Alike)
    assert repr(model[1]) == repr(nn.LayerNorm(COLUMNS)).replace("LayerNorm", "IreeAlike")


@pytest.mark.parametrize("cls", [nn.LayerNorm, TwiceRoundedNorm])
@pytest.mark.parametrize("first", [True, False], ids=["parametrized", "replaced"])
def test_parametrizations(cls: type[nn.Module], first: bool) -> None:
    """Before or after; they can be removed, and the replacement can be undone."""
    norm = made(cls)
    report = replace_norms(norm) if not first else None
    parametrize.register_parametrization(norm, "weight", nn.Softplus())
    report = report or replace_norms(norm)
    assert len(report.replaced) == 1
    x = torch.randn(3, COLUMNS)
    assert type(norm).__name__ == f"ParametrizedIree{cls.__name__}"
    torch.testing.assert_close(norm(x), cls.forward(norm, x))
    assert all(g is not None for g in gradients(norm, x))
    if first:
        parametrize.remove_parametrizations(norm, "weight")
        assert type(norm).__name__ == f"Iree{cls.__name__}"
        report.undo()
        assert type(norm) is cls
    else:
        report.undo()
        assert type(norm).__name__ == f"Parametrized{cls.__name__}"
        torch.testing.assert_close(norm(x), cls.forward(norm, x))
        parametrize.remove_parametrizations(norm, "weight")
        assert type(norm) is cls


@pytest.mark.parametrize("cls", [nn.LayerNorm, TwiceRoundedNorm])
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies(clone: Callable[[nn.Module], nn.Module], cls: type[nn.Module]) -> None:
    norm = made(cls)
    replace_norms(norm)
    x = torch.randn(3, COLUMNS)
    copied = clone(norm)
    assert type(copied) is type(norm)
    assert repr(copied) == repr(norm)
    assert copied.weight is not norm.weight
    for ours, theirs in zip(gradients(copied, x), gradients(norm, x), strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(COLUMNS, COLUMNS),
            TwiceRoundedNorm(COLUMNS),
            nn.RMSNorm(COLUMNS),
            OfTheWeightsType(COLUMNS),
        )
    assert len(replace_norms(model).replaced) == 3
    torch.autograd.backward(model(torch.randn(3, COLUMNS, device="meta")).sum())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0)
    x = torch.randn(3, COLUMNS)
    expected = model[0](x)
    for norm in model[1:]:
        expected = super(ReplacedNorm, norm).forward(expected)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")
def test_compiled_models_keep_the_operators_whole() -> None:
    """One graph, forward and backward, whatever the class; under autocast, too."""
    torch._dynamo.reset()
    plain = [made(cls) for cls in PLAIN if cls is not OfImages]
    model = nn.Sequential(*itertools.chain(*((nn.Linear(COLUMNS, COLUMNS), n) for n in plain)))
    replace_norms(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, COLUMNS)
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = compiled(x), model(x)
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected, rtol=2.0**-6, atol=2.0**-6)
    gradients(compiled, x)  # compiles, which calls the operators on fake tensors
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        found = gradients(compiled, x)
    ran = [event.name for event in profiled.events() if event.name.startswith("iree_lnbwd::")]
    assert {name: ran.count(name) for name in ran if name.endswith("_backward")} == {
        "iree_lnbwd::layer_norm_backward": 3,
        "iree_lnbwd::rms_norm_backward": 4,
    }
    for mine, theirs in zip(found, gradients(model, x), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch._dynamo.reset()


@pytest.mark.drawn
def test_many_classes_are_compiled_each_by_itself() -> None:
    """As where graphs break in front of norms; all classes have a limit of their own."""
    torch._dynamo.reset()
    x = torch.randn(3, COLUMNS)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for number in range(torch._dynamo.config.recompile_limit + 1):
            norm = type(f"Norm{number}", (TwiceRoundedNorm,), {})(COLUMNS)
            replace_norms(norm)
            expected = norm(x)
            torch.testing.assert_close(torch.compile(norm, backend="eager")(x), expected)
    torch._dynamo.reset()


def test_defaults_of_the_process_do_not_matter() -> None:
    norm = made(TwiceRoundedNorm)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.no_grad():
            (entry,) = replace_norms(norm).replaced
    finally:
        torch.set_default_dtype(torch.float32)
    assert entry.norm == PLAIN[TwiceRoundedNorm]


def test_tied_weights_have_one_gradient() -> None:
    model = nn.Sequential(nn.LayerNorm(COLUMNS), nn.LayerNorm(COLUMNS))
    model[1].weight = model[0].weight
    x = torch.randn(3, COLUMNS)
    expected = gradients(model, x)
    replace_norms(model)
    assert model[1].weight is model[0].weight
    for ours, theirs in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_torchscript_takes_the_modules_own_class() -> None:
    model = nn.Sequential(nn.Linear(COLUMNS, COLUMNS), nn.LayerNorm(COLUMNS))
    x = torch.randn(3, COLUMNS)
    replace_norms(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is
        scripted = torch.jit.script(model)
    assert torch.equal(scripted(x), model(x))
    *_, entry = replace_norms(scripted, only=[torch.jit.ScriptModule]).entries
    assert entry.reason == "TorchScript compiled it"


@pytest.mark.parametrize(
    "bad", [nn.LayerNorm(COLUMNS), "LayerNorm", [int], [nn.LayerNorm(COLUMNS)], 5]
)
def test_bad_classes_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"^only: expected classes of modules, got "):
        replace_norms(nn.LayerNorm(COLUMNS), only=bad)


def test_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module, got type"):
        replace_norms(nn.LayerNorm)


def test_norms_of_sums_are_ours() -> None:
    (entry,) = replace_norms(AddRMSNorm(COLUMNS)).entries
    assert entry.reason == "it is one of iree-lnbwd already"
    assert not replace_norms(LayerNorm(COLUMNS)).replaced
