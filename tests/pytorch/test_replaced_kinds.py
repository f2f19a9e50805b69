"""`replace_norms`: which modules count as one kind, and what becomes of one that changes later."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn

from iree_lnbwd.torch import replace_norms
from iree_lnbwd.torch.replacement import constants
from iree_lnbwd.torch.replacement.classes import ReplacedNorm

COLUMNS = 32
WIDE = 2048  # tensors and arrays of more than a thousand elements are printed in part


class Norm(nn.Module):
    """It reads an attribute `extra` if it has one."""

    def __init__(self, columns: int = COLUMNS, eps: float = 1e-6, **attributes: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(columns) + 0.5), eps
        self.__dict__.update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return self.after(y, self.extra) if hasattr(self, "extra") else y

    def after(self, y: Tensor, extra: Any) -> Tensor:
        return y


class Masked(Norm):
    def after(self, y: Tensor, extra: Any) -> Tensor:
        return y * torch.as_tensor(extra).to(y.dtype)


class Applied(Norm):
    def after(self, y: Tensor, extra: Any) -> Tensor:
        found: Tensor = extra(y)
        return found


class OfItem(Norm):
    def after(self, y: Tensor, extra: Any) -> Tensor:
        return y * extra[0]


class OfField(Norm):
    def after(self, y: Tensor, extra: Any) -> Tensor:
        return y * extra.factor


class Named(Tensor):
    def __repr__(self, **_: Any) -> str:
        return "Named()"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone().as_subclass(Named)


@dataclasses.dataclass
class Hidden:
    factor: float = dataclasses.field(repr=False)


class Unprintable:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        raise AssertionError("it is not printed")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it is not compared")

    __hash__ = None  # type: ignore[assignment]


class Scaler:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scaled(self, y: Tensor) -> Tensor:
        return y * self.factor

    def __repr__(self) -> str:
        return "Scaler()"


def closure(factor: float) -> Callable[[Tensor], Tensor]:
    def scaled(y: Tensor) -> Tensor:
        return y * factor

    return scaled


def dead() -> Tensor:
    mask = torch.ones(WIDE)
    mask[500:1500] = 0
    return mask


def on_meta() -> Tensor:
    return torch.ones(COLUMNS, device="meta")


# Of each: a norm that is a plain one when it is looked at, and one of equal text that is none.
PAIRS: dict[str, tuple[Norm, Norm]] = {
    "long tensors": (Masked(WIDE, extra=torch.ones(WIDE)), Masked(WIDE, extra=dead())),
    "long arrays": (Masked(WIDE, extra=np.ones(WIDE)), Masked(WIDE, extra=dead().numpy())),
    "fields that are not printed": (OfField(extra=Hidden(1.0)), OfField(extra=Hidden(2.0))),
    "objects": (OfField(extra=Unprintable(1.0)), OfField(extra=Unprintable(2.0))),
    "closures": (Applied(extra=closure(1.0)), Applied(extra=closure(2.0))),
    "bound methods": (Applied(extra=Scaler(1.0).scaled), Applied(extra=Scaler(2.0).scaled)),
    "partial functions": (
        Applied(extra=functools.partial(torch.mul, other=torch.ones(WIDE)), columns=WIDE),
        Applied(extra=functools.partial(torch.mul, other=dead()), columns=WIDE),
    ),
    "defaults": (Applied(extra=lambda y, by=1.0: y * by), Applied(extra=lambda y, by=2.0: y * by)),
    "functions": (Applied(extra=lambda y: y), Applied(extra=lambda y: y * 2)),
    "functions in C": (Applied(extra=torch.clone), Applied(extra=torch.neg)),
    "nested": (OfItem(extra=(1.0, (Scaler(1.0),))), OfItem(extra=(2.0, (Scaler(1.0),)))),
    "lists": (OfItem(extra=[1.0]), OfItem(extra=[2.0])),
    "numbers": (OfItem(extra=(1.0,)), OfItem(extra=(2.0,))),
    "subclasses of tensors": (
        Masked(extra=torch.ones(()).as_subclass(Named)),
        Masked(extra=torch.zeros(()).as_subclass(Named)),
    ),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("order", [1, -1])
def test_each_module_is_what_it_was(name: str, order: int) -> None:
    model = nn.Sequential(*copy.deepcopy(PAIRS[name])[::order])
    own = copy.deepcopy(model)
    replace_norms(model)
    x = torch.randn(4, model[0].weight.numel())
    for ours, theirs in zip(model, own, strict=True):
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


def test_what_may_change_later_is_kept() -> None:
    """Nothing would tell a replaced norm that its mask has changed in place."""
    mask = torch.ones(COLUMNS)
    model = nn.Sequential(Masked(extra=mask), OfItem(extra=[1.0]), OfItem(extra=(1.0,)))
    report = replace_norms(model, only=[Norm])
    assert [entry.reason for entry in report.entries] == [
        "its forward reads extra, which may change: it is of type Tensor",
        "its forward reads extra, which may change: it is of type list",
        None,
    ]
    mask.zero_()
    assert not model[0](torch.randn(3, COLUMNS)).any()


def test_what_a_class_shares_is_no_constant_either() -> None:
    class OfClass(Masked):
        extra = torch.ones(COLUMNS)

    class Namespace:
        factor = 1.0

    model = nn.Sequential(OfClass(), OfField(extra=Namespace))
    assert [entry.reason for entry in replace_norms(model, only=[Norm]).entries] == [
        "its forward reads extra, which may change: it is of type Tensor",
        "its forward reads extra, which may change: it is of type type",
    ]


@pytest.mark.parametrize("cls", [Norm, Masked])
def test_freed_memory_is_not_read(cls: type[Norm]) -> None:
    """FSDP1 leaves such attributes; what a forward does not read does not matter."""
    norm = cls(cache=torch.ones(64), nested=([torch.ones(64)],), extra=torch.ones(64))
    if cls is Norm:
        del norm.extra
    kept: list[Any] = [norm.cache, norm.nested[0][0], getattr(norm, "extra", norm.cache)]
    for tensor in kept:
        tensor.untyped_storage().resize_(0)
    (entry,) = replace_norms(norm, only=[Norm]).entries
    assert (entry.reason is None) == (cls is Norm)


def test_tensors_without_memory_are_not_read() -> None:
    (entry,) = replace_norms(Masked(extra=on_meta()), only=[Norm]).entries
    assert entry.reason == "its forward reads extra, which may change: it is of type Tensor"


def test_what_no_forward_reads_makes_no_other_kind() -> None:
    """Norms of a large model are tried once, whatever their names and numbers are."""
    count = 0

    class Counted(Norm):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return super().forward(x)

    model = nn.Sequential(*(Counted(index=i, name=f"norm {i}", cache=[i]) for i in range(8)))
    assert len(replace_norms(model[:1]).replaced) == 1
    of_one, count = count, 0
    assert len(replace_norms(model[1:]).replaced) == 7
    assert count == of_one


class Stateful(Norm):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.shape
        return super().forward(x)


class Clamps(Norm):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(min=0.0)
        return super().forward(x)


class InPlace(Norm):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if not torch.is_grad_enabled():
            x.zero_()
        return output


class ReadsAll(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * vars(self).get("factor", 1.0)


class FindsInItsOwnWay(Norm):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class OfOneWeight(Norm):
    """A gain for all columns: a norm of any width."""

    def __init__(self) -> None:
        super().__init__(1)


class OtherWithGradients(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if torch.is_grad_enabled() else 1.0)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Stateful, "its forward sets seen"),
        (Clamps, "its forward changes its input or its parameters"),
        (InPlace, "its forward changes its input or its parameters"),
        (ReadsAll, "its forward reads all of its attributes"),
        (FindsInItsOwnWay, "its class has its own __getattr__"),
        (OfOneWeight, "its forward raised RuntimeError: Expected weight to be of same shape"),
        (OtherWithGradients, "its output in f32 is "),
    ],
)
def test_what_does_more_than_a_norm_is_kept(cls: type[Norm], reason: str) -> None:
    norm = cls()
    (entry,) = replace_norms(norm, only=[Norm]).entries
    assert (entry.reason or "").startswith(reason)
    assert type(norm) is cls


def test_a_forward_that_is_compiled_by_itself() -> None:
    """torch.compile reads more than the forward does, or nothing, if it did so before."""

    class Compiled(Norm):
        forward = torch.compile(Norm.forward, backend="aot_eager")

    torch._dynamo.reset()
    norm = Compiled()
    (entry,) = replace_norms(norm, only=[Norm]).entries
    assert entry.reason == "torch.compile compiled its forward by itself"
    torch._dynamo.reset()


def test_large_and_unfinished_modules_are_kept() -> None:
    """An embedding of a language model would take gigabytes of samples."""
    model = nn.Sequential(
        nn.Embedding(1 << 14, 1 << 10, device="meta"),
        nn.Linear(1 << 12, 1 << 12, bias=False, device="meta"),
        nn.LazyLinear(3),
    )
    assert not replace_norms(model).replaced


# --- changes after the replacement ---------------------------------------------------------------


class Scaled(Norm):
    def __init__(self, columns: int = COLUMNS) -> None:
        super().__init__(columns)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("compiled", [False, True])
def test_a_later_change_of_what_the_forward_reads(
    compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be no norm any more, so it is what it was."""
    torch._dynamo.reset()
    model = nn.Sequential(Scaled())
    report = replace_norms(model)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    x = torch.randn(3, COLUMNS)
    torch.testing.assert_close(run(x), Scaled.forward(model[0], x))
    model[0].scale = 1.0  # no other value
    model[0].note = "which is not read"
    assert isinstance(model[0], ReplacedNorm)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        model[0].scale = 3.0
    assert caplog.messages[-1] == (
        "IreeScaled computes by its own forward again, because scale has changed"
    )
    assert type(model[0]) is Scaled
    torch.testing.assert_close(run(x), Scaled.forward(model[0], x))
    report.undo()
    assert type(model[0]) is Scaled
    torch._dynamo.reset()


def test_an_attribute_that_comes_later() -> None:
    model = nn.Sequential(Masked())
    assert replace_norms(model).replaced
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each[0].extra = torch.zeros(COLUMNS)
        assert not each(torch.randn(3, COLUMNS)).any()


class ScaledIfAsked(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if hasattr(self, "scale") else torch.zeros_like(x)


def test_an_attribute_that_is_deleted() -> None:
    model = nn.Sequential(ScaledIfAsked())
    assert replace_norms(model).replaced
    del model[0].scale
    assert not model(torch.randn(3, COLUMNS)).any()


class AroundZero(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1.0 + self.weight, self.eps)


def test_a_weight_that_is_taken_away() -> None:
    model = nn.Sequential(Norm(), nn.LayerNorm(COLUMNS))
    replace_norms(model)
    for norm in model:
        norm.weight = None
        x = torch.randn(3, COLUMNS)
        torch.testing.assert_close(norm(x), super(ReplacedNorm, norm).forward(x))
    norm = AroundZero()
    assert replace_norms(norm).replaced
    norm.weight = None
    with pytest.raises(TypeError, match="NoneType"):
        norm(torch.randn(3, COLUMNS))


class OfOptionalWeight(nn.Module):
    """timm's RmsNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape, self.eps = (COLUMNS,), 1e-6
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def test_a_weight_that_comes_later() -> None:
    norm = OfOptionalWeight()
    assert replace_norms(norm).replaced
    norm.weight = nn.Parameter(torch.zeros(COLUMNS))
    assert not norm(torch.randn(3, COLUMNS)).any()


class WithoutWeight(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.normalized_shape = (columns,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape)


class OfAnyWidth(WithoutWeight):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])


class ByShape(Norm):
    """As `nn.RMSNorm`, whose dimensions are an attribute."""

    def __init__(self, columns: int) -> None:
        super().__init__(columns)
        self.normalized_shape = (columns,)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def with_columns(norm: nn.Module, columns: int) -> nn.Module:
    """As pruning tools do it."""
    for name, parameter in norm.named_parameters():
        setattr(norm, name, nn.Parameter(parameter.detach()[:columns].clone()))
    if hasattr(norm, "normalized_shape"):
        norm.normalized_shape = (columns,)
    return norm


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("cls", "compiled"),
    [
        *((cls, False) for cls in (nn.LayerNorm, nn.RMSNorm, Norm, ByShape)),
        *((WithoutWeight, False), (OfAnyWidth, False), (nn.LayerNorm, True), (Norm, True)),
    ],
)
def test_another_width(cls: type[nn.Module], compiled: bool) -> None:
    torch._dynamo.reset()
    own: nn.Module = cls(COLUMNS)
    model = nn.Sequential(copy.deepcopy(own))
    assert replace_norms(model).replaced
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for columns in (COLUMNS, 24, 16):
        with_columns(own, columns), with_columns(model[0], columns)
        assert isinstance(model[0], ReplacedNorm)
        x = torch.randn(3, columns, requires_grad=True)
        asked = [x, *model.parameters()], [x, *own.parameters()]
        for ours, theirs in zip(
            torch.autograd.grad(run(x).sin().sum(), asked[0]),
            torch.autograd.grad(own(x).sin().sum(), asked[1]),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("base", [nn.LayerNorm, Norm])
def test_classes_are_freed(base: type[nn.Module]) -> None:
    """Of those that a program makes as it runs, as of code that comes with a model."""

    def replaced() -> list[weakref.ref[Any]]:
        cls = type("Made", (base,), {})
        norm = cls(COLUMNS)
        assert replace_norms(norm).replaced
        norm(torch.randn(3, COLUMNS))
        return [weakref.ref(cls), weakref.ref(type(norm))]

    classes = replaced()
    gc.collect()
    assert [each() for each in classes] == [None, None]


def test_modules_of_one_class_share_theirs() -> None:
    model = nn.Sequential(nn.LayerNorm(COLUMNS), nn.LayerNorm(COLUMNS))
    replace_norms(model[:1]), replace_norms(model)
    assert type(model[0]) is type(model[1]) is type(copy.deepcopy(model)[0])


def test_a_register_of_subclasses_is_not_told() -> None:
    known: list[type] = []

    class Registered(Norm):
        def __init_subclass__(cls, *, name: str) -> None:
            known.append(cls)

    norm = Registered()
    assert replace_norms(norm).replaced
    assert not known


# --- values as constants -------------------------------------------------------------------------


def test_equal_values_of_one_type_have_one_key() -> None:
    values: tuple[Any, ...] = (
        None,
        True,
        1,
        1.0,
        0.0,
        -0.0,
        np.float32(1),
        np.int32(1),
        "1",
        b"1",
        (1,),
        (1.0,),
    )
    values += ((True,), frozenset({1}), torch.float32, torch.device("cpu"), torch.Size([1]), int)
    values += (float("nan"), len, torch.neg, ((1, (2,)),), ((1, (2.0,)),))
    keys = [constants.key(value) for value in values]
    assert keys == [constants.key(value) for value in copy.deepcopy(values)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "value",
    [
        *([1], {1}, {1: 1}, (1, [1]), bytearray(1), torch.ones(()), np.ones(1), nn.Identity()),
        *(Scaler, Scaler(1.0), Scaler(1.0).scaled, [].append, closure(1.0), functools.partial(len)),
        lambda y=1: y,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_change_has_no_key(value: object) -> None:
    with pytest.raises(constants.NotConstantError):
        constants.key(value)
