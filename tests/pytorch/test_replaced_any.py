"""`replace_norms` of any module: what it finds, what it leaves alone, and what it never runs."""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn

from iree_lnbwd.torch import replace_norms, specs, status, warmup
from iree_lnbwd.torch.replacement import clamped
from iree_lnbwd.torch.replacement.classes import ReplacedNorm, form_of

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from near_norms import near_norms

COLUMNS = 32
EPS = 1e-6


def rms(x: Tensor, dim: int = -1) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + EPS)


class Naive(nn.Module):
    """As in research code: it computes in the input's type."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * (1 + self.scale)


class ImagesByHand(nn.Module):
    """Parameters with dimensions of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.b = (nn.Parameter(torch.rand(1, COLUMNS, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 1, unbiased=False, keepdim=True)
        return (x - mean) / torch.sqrt(variance + EPS) * self.g + self.b


class WithoutWeight(nn.Module):
    """Llama 4's: the input alone has a width."""

    def forward(self, x: Tensor) -> Tensor:
        return rms(x.float()).type_as(x)


class L2(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


class WeightedL2(Naive):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS) * self.scale


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * self.gain


class InABuffer(nn.Module):
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(COLUMNS) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * rms(x)


class UnreadBuffer(InABuffer):
    """Falcon-Mamba's: others read the buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return rms(x)


class OnePlus(nn.LayerNorm):
    """Nemotron's: under autocast, all is cast."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight + 1, self.bias
        if torch.is_autocast_enabled():
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Clamped(Naive):
    """Research code's and Wan's: `F.normalize` divides by 1e-12 where that is longer than a row."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * COLUMNS**0.5 * self.scale


class ClampedOnePlus(Naive):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * COLUMNS**0.5 * (self.scale + 1)


class ClampedWithoutBias(Naive):
    """Wan's: a zero in place of its bias, which is no eps, whatever rows but those of zeros say."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * COLUMNS**0.5 * self.scale + self.bias


class ClampedL2(nn.Module):
    """With a clamp of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.least = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.least)


class ClampedImages(nn.Module):
    ones: tuple[int, ...] = (1, 1)

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(COLUMNS, *self.ones))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * COLUMNS**0.5 * self.gamma


class ClampedVolumes(ClampedImages):
    ones = (1, 1, 1)


class Unpacks(Naive):
    """It takes sequences alone."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, columns = x.shape
        return rms(x.reshape(batch * length, columns)).reshape(x.shape) * self.scale


class UnpacksImages(Naive):
    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        return rms(x.reshape(batch, height * width, -1)).reshape(x.shape) * self.scale


class Sequences(ImagesByHand):
    """VITS's, and those of other models of sound: channels first, in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.b = (nn.Parameter(torch.rand(COLUMNS, 1)) for _ in range(2))


class TurnedSequences(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        batch, _, length = x.shape
        return super().forward(x.transpose(1, 2)).transpose(1, 2).view(batch, -1, length)


FOUND: dict[type[nn.Module], str] = {
    Naive: "RMS norm, 1 + scale, output type: promote(input, weight)",
    ImagesByHand: "layer norm, channels first",
    Sequences: "layer norm, channels first",
    TurnedSequences: "layer norm, channels first",
    Unpacks: "RMS norm",
    UnpacksImages: "RMS norm",
    WithoutWeight: "RMS norm, no weight",
    L2: "L2 norm, no weight",
    WeightedL2: "L2 norm",
    OneWeight: "RMS norm, one weight",
    InABuffer: "RMS norm",
    UnreadBuffer: "RMS norm, no weight",
    OnePlus: "layer norm, 1 + weight",
    Clamped: "RMS norm, clamped",
    ClampedOnePlus: "RMS norm, clamped, 1 + scale",
    ClampedWithoutBias: "RMS norm, clamped",
    ClampedL2: "L2 norm, no weight, clamped",
    ClampedImages: "RMS norm, clamped, channels first",
    ClampedVolumes: "RMS norm, clamped, channels first",
}
IMAGES = (ImagesByHand, ClampedImages)


def shape_of(cls: type[nn.Module], *rows: int) -> tuple[int, ...]:
    """Of an input for a class: of images, of volumes, or of rows."""
    if cls is ClampedVolumes:
        return (3, COLUMNS, 2, 1, 5)
    if cls in (Sequences, TurnedSequences):
        return (3, COLUMNS, 5)
    if cls is Unpacks:
        return (3, 5, COLUMNS)
    if cls is UnpacksImages:
        return (3, 5, 2, COLUMNS)
    return (3, COLUMNS, 2, 5) if cls in IMAGES else (*rows, COLUMNS)


def made(cls: type[nn.Module]) -> nn.Module:
    return cls(COLUMNS) if issubclass(cls, nn.LayerNorm) else cls()


def results(norm: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    x = x.clone().requires_grad_()
    output = norm(x)
    torch.manual_seed(5)
    grad_output = torch.randint(-4, 5, output.shape).to(output.dtype)  # the same in every type
    return [output, *torch.autograd.grad(output, [x, *norm.parameters()], grad_output)]


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", FOUND)
def test_norms_of_any_class(cls: type[nn.Module], dtype: torch.dtype) -> None:
    """In the model's element type, by our operators, and as near to f64 as before."""
    torch.manual_seed(0)
    own = made(cls).to(dtype)
    for parameter in own.parameters():
        nn.init.normal_(parameter, 0.5, 0.3)
    ours = copy.deepcopy(own)
    (entry,) = replace_norms(ours).replaced
    assert (entry.norm or "").startswith(FOUND[cls].partition(", output")[0])
    x = torch.randn(shape_of(cls, 3, 5), dtype=dtype)
    with torch.profiler.profile() as profiled:
        found = results(ours, x)
    assert any(event.name.startswith("iree_lnbwd::") for event in profiled.events())
    exact = results(copy.deepcopy(own).double(), x.double()) if cls is not WithoutWeight else None
    # By sums of 30 terms; a naive class in bf16 rounds five times, and its gradients more often.
    bound = 24 * torch.finfo(dtype).eps
    for mine, theirs in zip(found, exact or results(own, x), strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - theirs.double()).norm() <= bound * theirs.double().norm()


def came(norm: nn.Module, x: Tensor) -> Any:
    """The output, or the error's text."""
    try:
        return norm(x)
    except (RuntimeError, ValueError, IndexError) as error:
        return repr(error)


@pytest.mark.drawn
@pytest.mark.parametrize("cls", [Sequences, TurnedSequences, Unpacks, UnpacksImages])
def test_what_takes_one_number_of_dimensions(cls: type[nn.Module]) -> None:
    """Its modules are known, and of other inputs comes what came."""
    own = made(cls)
    ours = copy.deepcopy(own)
    assert replace_norms(ours).replaced
    assert specs(ours)
    warmup(ours)
    for x in (torch.randn(COLUMNS), torch.randn(shape_of(cls)[1:]), torch.randn(2, *shape_of(cls))):
        mine, theirs = came(ours, x), came(own, x)
        assert mine == theirs if isinstance(mine, str) else torch.equal(mine, theirs)


@pytest.mark.drawn
@pytest.mark.parametrize("cls", [WithoutWeight, L2, OneWeight, UnreadBuffer])
def test_the_input_says_how_long_its_rows_are(cls: type[nn.Module]) -> None:
    own = made(cls)
    ours = copy.deepcopy(own)
    assert replace_norms(ours).replaced
    warmup(ours)  # it cannot know
    for columns in (7, 40):
        x = torch.randn(4, columns)
        torch.testing.assert_close(results(ours, x), results(own, x), rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_a_buffer_is_read_at_each_call() -> None:
    norm = InABuffer()
    assert replace_norms(norm).replaced
    warmup(norm)
    x = torch.randn(3, COLUMNS)
    for _ in range(2):
        norm.weight.mul_(2)
        torch.testing.assert_close(norm(x), InABuffer.forward(norm, x))


def test_layer_norm_1p_under_autocast() -> None:
    """All is cast, as its class does it; on the CPU, it is told of autocast on GPUs alone."""
    own = OnePlus(COLUMNS)
    ours = copy.deepcopy(own)
    assert replace_norms(ours).replaced
    assert form_of(ours).on_gpus.name == "CASTS"
    x = torch.randn(3, COLUMNS)
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = ours(x), own(x)
    assert mine.dtype == theirs.dtype
    torch.testing.assert_close(mine, theirs)


@pytest.mark.drawn
@pytest.mark.parametrize("cls", FOUND)
def test_autocast_on_the_cpu(cls: type[nn.Module]) -> None:
    """Element types are what they were; values, but for a few roundings to bf16."""
    own = made(cls)
    ours = copy.deepcopy(own)
    with torch.autocast("cpu", torch.bfloat16):
        assert replace_norms(ours).replaced
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape_of(cls, 3), dtype=dtype)
            mine, theirs = ours(x), own(x)
            assert mine.dtype == theirs.dtype
            off = (mine.double() - theirs.double()).norm()
            assert off <= 8 * 2.0**-8 * theirs.double().norm()


# --- what is not found, or only in part -----------------------------------------------------------


def test_other_types_than_the_models_are_what_they_were() -> None:
    """Squares of small numbers are lost in f16: the model uses f32, so that does not matter."""
    norm = Naive()
    assert replace_norms(norm).replaced
    x = (1e-4 * torch.randn(3, COLUMNS)).half()
    norm.half()
    assert torch.equal(norm(x), Naive.forward(norm, x))
    (entry,) = replace_norms(Naive().half(), only=[Naive]).entries
    assert (entry.reason or "").startswith("its output in f16 is ")
    (entry,) = replace_norms(Naive(), only=[Naive], dtypes=[torch.float16]).entries
    assert (entry.reason or "").startswith("its output in f16 is ")
    assert replace_norms(Naive().half(), dtypes=[torch.bfloat16]).replaced


def test_other_shapes_than_a_class_takes_are_what_they_were() -> None:
    """Of rows, the parameters of images make something else."""
    norm = ImagesByHand()
    assert replace_norms(norm).replaced
    x = torch.randn(5, COLUMNS)
    assert torch.equal(norm(x), ImagesByHand.forward(norm, x))


def test_only_some_classes() -> None:
    model = nn.Sequential(nn.LayerNorm(COLUMNS), Naive(), L2())
    report = replace_norms(model, only=[Naive])
    assert [entry.names for entry in report.replaced] == [("1",)]
    assert [entry.reason for entry in report.kept] == ["its class is not in `only`"]


@pytest.mark.parametrize(
    ("bad", "error"),
    [("f32", TypeError), ([32], TypeError), (torch.int32, ValueError), ([torch.int32], ValueError)],
)
def test_bad_types_are_refused(bad: object, error: type[Exception]) -> None:
    norm = Naive()
    with pytest.raises(error, match=r"^dtypes: expected "):
        replace_norms(norm, dtypes=bad)  # type: ignore[arg-type]
    assert not isinstance(norm, ReplacedNorm)


# --- lengths that are clamped ---------------------------------------------------------------------

CLAMPED = (Clamped, ClampedOnePlus, ClampedWithoutBias, ClampedL2, ClampedImages, ClampedVolumes)
# Of rows, in units of the clamp: zeros, far below, around it, far above, and usual ones.
LENGTHS = (0.0, 1e-12, 1e-3, 0.1, 0.7, 0.999, 1.001, 1.5, 10.0, 1e4, 1e12, 0.0)


def rows_around_the_clamp(cls: type[nn.Module], dtype: torch.dtype) -> Tensor:
    """Their lengths are `LENGTHS`."""
    torch.manual_seed(1)
    least = 1e-3 if cls is ClampedL2 else 1e-12
    x = F.normalize(torch.randn(12, COLUMNS, dtype=torch.float64), dim=-1)
    x = x * torch.tensor(LENGTHS, dtype=torch.float64)[:, None] * least
    if cls is ClampedImages:
        x = x.reshape(2, 3, 2, COLUMNS).movedim(-1, 1)
    if cls is ClampedVolumes:
        x = x.reshape(2, 3, 2, 1, COLUMNS).movedim(-1, 1)
    return x.to(dtype)


def of_each_row(cls: type[nn.Module], tensor: Tensor) -> Tensor:
    """A tensor of such a shape as rows; a parameter's gradient is one."""
    if cls in (ClampedImages, ClampedVolumes) and tensor.ndim > 3 and tensor.shape[0] == 2:
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(-1, COLUMNS).double()


@pytest.mark.drawn
@pytest.mark.parametrize("is_told", [True, False], ids=["on the CPU", "as on a GPU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cls", CLAMPED)
def test_rows_around_a_clamp(
    cls: type[nn.Module], dtype: torch.dtype, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is right in both directions, by kernels; a GPU is not asked which are short."""
    if not is_told:
        monkeypatch.setattr(clamped, "_places", lambda _: slice(None))
    own = made(cls).to(dtype)
    for parameter in own.parameters():
        nn.init.normal_(parameter, 0.5, 0.3)
    ours = copy.deepcopy(own)
    assert replace_norms(ours, dtypes=[torch.float32, torch.bfloat16]).replaced
    x = rows_around_the_clamp(cls, dtype)
    with torch.profiler.profile() as profiled:
        found = results(ours, x)
    ran = {event.name for event in profiled.events()}
    assert {"iree_lnbwd::rms_norm", "iree_lnbwd::rms_norm_backward"} <= ran
    exact = results(copy.deepcopy(own).double(), x.double())
    # In f64, what is added so that zeros stay zeros is lost. A sum has 12 terms.
    bound = 24 * torch.finfo(dtype).eps
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype == dtype
        mine, theirs = of_each_row(cls, mine), of_each_row(cls, theirs)
        off, size = (each.norm(dim=-1) for each in (mine - theirs, theirs))
        assert (off <= bound * size).all()


@pytest.mark.parametrize("cls", CLAMPED)
def test_gradients_of_clamped_lengths_are_differentiable(cls: type[nn.Module]) -> None:
    own = made(cls).double()
    ours = copy.deepcopy(own)
    replace_norms(ours)
    x = rows_around_the_clamp(cls, torch.float64).requires_grad_()
    weight = torch.randn_like(x)
    first, second = (
        torch.autograd.grad((norm(x) * weight).sum(), x, create_graph=True)[0]
        for norm in (ours, own)
    )
    again, expected = (torch.autograd.grad((g * weight).sum(), x)[0] for g in (first, second))
    for mine, theirs in ((first, second), (again, expected)):
        # PyTorch's second derivative of the length of zeros is NaN.
        mine, theirs = (of_each_row(cls, each)[1:-1] for each in (mine, theirs))
        off, size = (each.norm(dim=-1) for each in (mine - theirs, theirs))
        assert (off <= 1e-9 * size).all()


def test_clamped_lengths_are_their_own_class_s_elsewhere() -> None:
    """Under transforms and in graphs of compilers, and where the clamp has gone."""
    norm, own = Clamped(), Clamped()
    assert replace_norms(norm).replaced
    x = rows_around_the_clamp(Clamped, torch.float32)
    assert torch.equal(torch.func.vmap(norm)(x), torch.func.vmap(own)(x))
    assert torch.equal(norm(x[:0]), own(x[:0]))
    gradients = [torch.func.jacrev(each)(x[3:5]) for each in (norm, own)]
    assert torch.equal(*gradients)
    other = ClampedL2()
    assert replace_norms(other).replaced
    other.least = 0.0
    assert torch.equal(other(x[3:9]), ClampedL2.forward(other, x[3:9]))


class AddsItsLeast(Naive):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) + 1e-12) * COLUMNS**0.5 * self.scale


class KeepsShortRows(Naive):
    def forward(self, x: Tensor) -> Tensor:
        length = x.norm(dim=-1, keepdim=True)
        return torch.where(length < 1e-12, x, x / length) * COLUMNS**0.5 * self.scale


class ClampsWithoutGradient(Naive):
    """Where the row is short, its length still has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.norm(dim=-1, keepdim=True)
        clamp = length + (length.clamp_min(1e-12) - length).detach()
        return x / clamp * COLUMNS**0.5 * self.scale


class ClampsTwice(Naive):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=1e-12).clamp(-0.9, 0.9) * COLUMNS**0.5 * self.scale


class AnotherLength(Naive):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, p=1.0, dim=-1) * COLUMNS**0.5 * self.scale


@pytest.mark.parametrize(
    "cls", [AddsItsLeast, KeepsShortRows, ClampsWithoutGradient, ClampsTwice, AnotherLength]
)
def test_what_is_nearly_a_clamped_norm(cls: type[nn.Module]) -> None:
    assert not replace_norms(cls()).replaced


class AddsATinyEpsToTheRoot(Naive):
    """It counts in rows of its size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-28

    def forward(self, x: Tensor) -> Tensor:
        root = x.pow(2).mean(-1, keepdim=True).sqrt()
        return x / (root + self.eps**0.5) * self.scale


class OfMatricesSomethingElse(Naive):
    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * (self.scale if x.ndim != 2 else self.scale * 1.01)


class OfLongRowsSomethingElse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rms(x) if x.shape[-1] < 60 else rms(x) * 1.01


class InEvaluationSomethingElse(Naive):
    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * (self.scale if self.training else self.scale * 1.01)


class SpreadsNaN(Naive):
    """A sum over all rows, of nothing but zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * self.scale + 0 * x.detach().sum()


class HasGradientsOfNaN(Naive):
    """Its values are those of a norm; autograd multiplies zero by the root's derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.isnan(), (-1 - x.square()).sqrt(), rms(x) * self.scale)


@pytest.mark.parametrize(
    "cls",
    [
        AddsATinyEpsToTheRoot,
        OfMatricesSomethingElse,
        OfLongRowsSomethingElse,
        InEvaluationSomethingElse,
        SpreadsNaN,
    ],
)
def test_what_is_a_norm_for_most_inputs(cls: type[nn.Module]) -> None:
    """Each is caught by one check of `probe`'s, and without that replaced."""
    (entry,) = replace_norms(cls(), only=[cls]).entries
    assert entry.norm is None
    assert (entry.reason or "").startswith("its output in f32 is ")


def test_gradients_that_are_nan_are_not_those_of_a_norm() -> None:
    (entry,) = replace_norms(HasGradientsOfNaN(), only=[HasGradientsOfNaN]).entries
    assert entry.reason == "its gradient of input is not that of the norm"


@pytest.mark.parametrize("cls", [WithoutWeight, L2, ClampedL2])
def test_rows_without_elements(cls: type[nn.Module]) -> None:
    norm = cls()
    assert replace_norms(norm).replaced
    for shape in ((3, 0), (0,), (0, 3, 0), (0, 8)):
        assert norm(torch.ones(shape)).shape == shape


def test_a_sample_of_near_norms() -> None:
    """`scripts/replaced_models near` has all."""
    every = list(near_norms())
    assert len(every) > 500
    for name, module in itertools.islice(every, None, None, 9):
        assert not replace_norms(module).replaced, name


# --- what is never run ---------------------------------------------------------------------------


RAN: list[str] = []  # on values; a class is no place for it: what runs is a subclass


class Effect(nn.Module):
    """A norm whose forward does something else, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        self.effect(x)
        return self.weight * rms(x)

    def effect(self, x: Tensor) -> None:
        raise NotImplementedError

    def seen(self, x: Tensor) -> None:
        if type(x) is Tensor:
            RAN.append(type(self).__name__)


class Mutates(Effect):
    def effect(self, x: Tensor) -> None:
        self.seen(x)
        x.detach().mul_(2)


class MutatesItsWeight(Effect):
    def effect(self, x: Tensor) -> None:
        self.seen(x)
        self.weight.data.clamp_(0)


class Draws(Effect):
    def effect(self, x: Tensor) -> None:
        self.seen(x)
        torch.rand_like(x)


class Communicates(Effect):
    def effect(self, x: Tensor) -> None:
        self.seen(x)
        torch.ops._c10d_functional.all_reduce(x, "sum", "0")


class InItsBackward(torch.autograd.Function):
    """Megatron's way: the forward changes nothing."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        reduced: Tensor = torch.ops._c10d_functional.all_reduce(grad, "sum", "0")
        return reduced


class CommunicatesInItsBackward(Effect):
    def forward(self, x: Tensor) -> Tensor:
        self.seen(x)
        return self.weight * rms(InItsBackward.apply(x))


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Mutates, "its forward changes its input or its parameters"),
        (MutatesItsWeight, "its forward changes its input or its parameters"),
        (Draws, "its forward draws random numbers"),
        (Communicates, "its forward talks to other processes"),
        (CommunicatesInItsBackward, "its backward talks to other processes"),
    ],
)
def test_what_has_effects_is_not_run(cls: type[Effect], reason: str) -> None:
    """On tensors without memory alone."""
    RAN.clear()
    norm, state = cls(), torch.random.get_rng_state()
    (entry,) = replace_norms(norm, only=[cls]).entries
    assert entry.reason == reason
    assert not RAN
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(norm.weight, torch.ones(COLUMNS))


# --- the report ----------------------------------------------------------------------------------


class GRN(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.norm(dim=-1, keepdim=True)


def test_the_report_names_what_is_called_a_norm() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4), GRN(), nn.Linear(4, 4), nn.LayerNorm(4))
    model.add_module("norm", nn.Identity())  # none, whatever it is called
    model.add_module("final_norm", Draws())
    report = replace_norms(model)
    assert [(entry.class_name, entry.reason, entry.by_enable) for entry in report.entries] == [
        ("GroupNorm", "GroupNorm: no kernel", False),
        ("GRN", "GRN: no kernel", False),
        ("LayerNorm", None, True),
        ("Draws", "its forward draws random numbers", False),
    ]
    first, *_, last = str(report).splitlines()
    assert first == "1 of 4 norms replaced; without that, enable() reaches 1 on a GPU"
    assert last == "undo() of this report gives the modules their own classes back"


def test_status_names_what_enable_does_not_reach() -> None:
    *_, last = str(status()).splitlines()
    assert last.startswith("not reached: ")
    assert "replace_norms(model)" in last
