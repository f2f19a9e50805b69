"""`replace_norms` of norms with a weight for each head, as Cohere's of queries and keys."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn

from iree_lnbwd.torch import replace_norms, specs, warmup
from iree_lnbwd.torch.replacement.classes import ReplacedNorm

HEADS, COLUMNS = 4, 16
EPS = 1e-5


class Norm(nn.Module):
    """Cohere's, or with other statistics or a bias."""

    def __init__(
        self,
        shape: tuple[int, ...] = (HEADS, COLUMNS),
        *,
        centres: bool = True,
        has_bias: bool = False,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) + 1.0 - offset)
        self.bias = nn.Parameter(torch.randn(shape)) if has_bias else None
        self.eps, self.centres, self.offset = EPS, centres, offset

    def normalized(self, x: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
        centred = x - x.mean(dims, keepdim=True) if self.centres else x
        square = centred.square().mean(dims, keepdim=True)
        return centred * torch.rsqrt(square + self.eps)

    def scaled(self, y: Tensor) -> Tensor:
        y = (self.weight.to(y.dtype) + self.offset) * y
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return self.scaled(self.normalized(wide)).to(x.dtype)


KINDS: dict[str, tuple[Callable[[], Norm], str]] = {
    "Cohere's": (Norm, "layer norm, 4 heads"),
    "with a bias": (lambda: Norm(has_bias=True), "layer norm, 4 heads"),
    "RMS norm": (lambda: Norm(centres=False), "RMS norm, 4 heads"),
    "RMS norm with a bias": (lambda: Norm(centres=False, has_bias=True), "RMS norm, bias, 4 heads"),
    "around one": (lambda: Norm(centres=False, offset=1.0), "RMS norm, 4 heads, 1 + weight"),
    "as many heads as columns": (lambda: Norm((8, 8)), "layer norm, 8 heads"),
    "two heads": (lambda: Norm((2, 7)), "layer norm, 2 heads"),
}


def replaced(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Norm, Norm]:
    """A norm, and the same replaced."""
    torch.manual_seed(0)
    made, said = KINDS[kind]
    own = made().to(dtype)
    ours = copy.deepcopy(own)
    (entry,) = replace_norms(ours).replaced
    assert entry.norm == said
    return own, ours


def rows(
    norm: Norm, leading: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float32
) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*leading, *norm.weight.shape).to(dtype).requires_grad_()


def results(norm: Any, x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """The output and all gradients."""
    output = norm(x)
    torch.manual_seed(2)
    grad_output = torch.randint(-4, 5, output.shape).to(output.dtype)  # the same in every type
    return [output.detach(), *torch.autograd.grad(output, [x, *parameters], grad_output)]


@pytest.mark.drawn
@pytest.mark.parametrize("leading", [(), (1, 1), (3, 5), (40, 50), (2, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    """By our operators with sets, as near to f64 as before."""
    own, ours = replaced(kind, dtype)
    x = rows(own, leading, dtype)
    with torch.profiler.profile() as profiled:
        found = results(ours, x, list(ours.parameters()))
    ran = {event.name for event in profiled.events() if event.name.startswith("iree_lnbwd::")}
    assert any("of_sets" in name for name in ran), ran
    before = results(own, x, list(own.parameters()))
    wide = copy.deepcopy(own).double()
    exact = results(wide, x.detach().double().requires_grad_(), list(wide.parameters()))
    bound = 8 * torch.finfo(dtype).eps
    for mine, theirs, right in zip(found, before, exact, strict=True):
        assert mine.dtype == theirs.dtype == dtype
        off, off_before = ((each.double() - right).norm() for each in (mine, theirs))
        assert off <= max(bound * right.norm(), 1.5 * off_before)


@pytest.mark.parametrize("is_on_cpu", [True, False])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_autocast(weights: torch.dtype, is_on_cpu: bool) -> None:
    """Types as before: Cohere's formula gives the input's."""
    own, ours = replaced("Cohere's", weights)
    device = "cpu" if is_on_cpu else "cuda"
    dtypes = (torch.float32, torch.bfloat16)
    inputs = [rows(own, dtype=dtype).detach() for dtype in dtypes]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_on_cpu):
        for x in inputs:
            found, before = ours(x), own(x)
            assert found.dtype == before.dtype
            torch.testing.assert_close(found, before, rtol=2.0**-7, atol=1e-5)
    form = vars(ours)["_iree_lnbwd_form"]
    rule = form.on_cpus if device == "cpu" else form.on_gpus
    assert rule.name == "NOTHING"


def test_compiled() -> None:
    """In one graph, with the same gradients; of a size that changes, too."""
    torch._dynamo.reset()
    _, ours = replaced("Cohere's")
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for leading in ((3, 5), (4, 7), (2, 9)):
        x = rows(ours, leading)
        found, expected = (results(norm, x, [ours.weight]) for norm in (compiled, ours))
        torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


def test_a_kept_order_in_memory() -> None:
    """The output lies as the own forward's does, whatever the input's order is."""
    own, ours = replaced("Cohere's")
    x = rows(own, (3, 5)).detach()
    for order in itertools.permutations(range(4)):
        back = sorted(range(4), key=order.__getitem__)
        turned = x.permute(order).contiguous().permute(back)
        assert turned.shape == x.shape
        found, before = ours(turned), own(turned)
        assert found.stride() == before.stride(), order
        torch.testing.assert_close(found, before)


def test_what_else_is_called_is_what_it_was() -> None:
    """Inputs and parameters that a forward broadcasts, and those of another rank."""
    own, ours = replaced("with a bias")
    x = rows(own).detach()
    for other in (x[..., :1, :], x[:, :, :1].expand_as(x), x[0, 0, :1], x[0, 0, 0]):
        torch.testing.assert_close(ours(other), own(other))
    with pytest.raises(RuntimeError):
        ours(x[..., :3, :])
    for norm in (own, ours):
        norm.bias = nn.Parameter(norm.bias.detach()[:1].clone())  # type: ignore[union-attr]
    torch.testing.assert_close(ours(x), own(x))
    for norm in (own, ours):
        norm.bias, norm.weight = None, nn.Parameter(norm.weight.detach()[1].clone())
    torch.testing.assert_close(ours(x), own(x))
    for norm in (own, ours):  # fewer heads than it had
        norm.weight = nn.Parameter(torch.linspace(0.5, 2.0, 2 * COLUMNS).reshape(2, COLUMNS))
    torch.testing.assert_close(ours(x[..., :2, :]), own(x[..., :2, :]))


def test_a_weight_that_gets_heads() -> None:
    """Of a norm that was found without: its own forward says what that is."""
    own = Norm((COLUMNS,))
    ours = copy.deepcopy(own)
    assert len(replace_norms(ours).replaced) == 1
    known = nn.Sequential(nn.LayerNorm(COLUMNS))
    replace_norms(known)
    weight = nn.Parameter(torch.randn(HEADS, COLUMNS))
    own.weight = ours.weight = known[0].weight = weight
    x = rows(own).detach()
    torch.testing.assert_close(ours(x), own(x))
    with pytest.raises(RuntimeError, match="weight"):  # PyTorch's
        known(x)


class OfBoth(Norm):
    """Heads and columns are normalized together."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.normalized(x, (-2, -1)))


class OfHeads(Norm):
    """The heads are normalized, and not the columns."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.normalized(x, (-2,)))


class HeadsFirst(Norm):
    """Of [batch, heads, sequence, columns]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[:, None] * self.normalized(x)


class Turned(Norm):
    """The weight's heads in another order."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.flip(0) * self.normalized(x)


class OfOneHead(Norm):
    """All heads take the first one's."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[0] * self.normalized(x)


class Swapped(Norm):
    """[n, n] the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.T * self.normalized(x)


class OfTheMeanHead(Norm):
    """Heads share a little of their statistics."""

    def forward(self, x: Tensor) -> Tensor:
        square = x.square().mean(-1, keepdim=True)
        square = square + 1e-3 * square.mean(-2, keepdim=True)
        return self.weight * x * torch.rsqrt(square + self.eps)


class Interleaved(Norm):
    """Every second column belongs to another head."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.normalized(x.transpose(-1, -2).reshape(x.shape))
        return self.weight * y.reshape(*x.shape[:-2], *x.shape[:-3:-1]).transpose(-1, -2)


@pytest.mark.parametrize("shape", [(HEADS, COLUMNS), (8, 8), (2, 3), (3, 2)], ids=str)
@pytest.mark.parametrize(
    "cls", [HeadsFirst, OfHeads, Turned, OfOneHead, OfTheMeanHead, Interleaved, Swapped]
)
def test_near_misses_are_kept(cls: type[Norm], shape: tuple[int, int]) -> None:
    assert not replace_norms(nn.Sequential(cls(shape))).replaced


@pytest.mark.parametrize("cls", [Norm, OfBoth])
@pytest.mark.parametrize(
    ("shape", "is_replaced"),
    [
        ((1, COLUMNS), True),  # one set, which is no head
        ((HEADS, 1), False),
        ((1, 1), True),  # one weight for all
        ((2, 3, 4), False),
    ],
)
def test_other_shapes_are_right(cls: type[Norm], shape: tuple[int, ...], is_replaced: bool) -> None:
    """Whether it was replaced or not."""
    torch.manual_seed(0)
    own = cls(shape)
    ours = copy.deepcopy(own)
    report = replace_norms(nn.Sequential(ours))
    if cls is Norm:
        assert bool(report.replaced) == is_replaced
    for leading in ((3, 5), (2, 3, 4)):
        x = rows(own, leading).detach()
        torch.testing.assert_close(ours(x), own(x))


def test_copies_and_undoing() -> None:
    own, ours = replaced("Cohere's")
    report = replace_norms(own)
    x = rows(own).detach()
    expected = ours(x)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert isinstance(copied, ReplacedNorm)
        assert torch.equal(copied(x), expected)
    report.undo()
    assert type(own) is Norm
    torch.testing.assert_close(own(x), expected)


def test_specs() -> None:
    model = nn.ModuleList([replaced(kind)[1] for kind in ("Cohere's", "two heads")])
    said = {(spec.op, spec.weight_sets, spec.normalized_shape) for spec in specs(model)}
    assert said == {
        (op, True, (columns,))
        for op in ("layer_norm", "layer_norm_backward")
        for columns in (COLUMNS, 7)
    }
    warmup(model)


def test_jagged_sequences() -> None:
    """Heads of sequences of several lengths: as each alone."""
    _, ours = replaced("Cohere's")
    each = [rows(ours, (length,)).detach() for length in (2, 5)]
    nested = torch.nested.nested_tensor(each, layout=torch.jagged)
    for found, x in zip(ours(nested).unbind(), each, strict=True):
        torch.testing.assert_close(found, ours(x))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_dtensors_are_the_own_forwards() -> None:
    """As they were before: heads over processes, and all of them in each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        own, ours = replaced("Cohere's")
        x, weight = rows(own).detach(), own.weight.detach()
        placements: list[tuple[Placement, Placement]] = [
            (Shard(2), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate())]  # fmt: skip
        for of_rows, of_weight in placements:
            placed = DTensor.from_local(x, mesh, [of_rows], run_check=False)
            sets = DTensor.from_local(weight, mesh, [of_weight], run_check=False)
            for norm in (own, ours):
                norm.weight = nn.Parameter(sets.detach().clone())
            found, before = (norm(placed) for norm in (ours, own))
            assert isinstance(found, DTensor)
            assert found.placements == before.placements
            assert torch.equal(found.to_local(), before.to_local())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chameleons_class(dtype: torch.dtype) -> None:
    """A subclass of PyTorch's, whose dimensions are fewer than its weight's."""
    chameleon = pytest.importorskip("transformers.models.chameleon.modeling_chameleon")
    own = chameleon.ChameleonLayerNorm((HEADS, COLUMNS)).to(dtype)
    for parameter in own.parameters():
        nn.init.normal_(parameter)
    ours, wide = copy.deepcopy(own), copy.deepcopy(own).double()
    (entry,) = replace_norms(ours).replaced
    assert entry.norm == "layer norm, 4 heads"
    x = rows(own, dtype=dtype)
    found, before = (results(norm, x, list(norm.parameters())) for norm in (ours, own))
    exact = results(wide, x.detach().double().requires_grad_(), list(wide.parameters()))
    for mine, theirs, right in zip(found, before, exact, strict=True):
        off, off_before = ((each.double() - right).norm() for each in (mine, theirs))
        assert off <= max(8 * torch.finfo(dtype).eps * right.norm(), 1.5 * off_before)


def cohere() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.CohereConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_qk_norm=True, eos_token_id=1,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.CohereForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.5)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coheres_queries_and_keys(dtype: torch.dtype) -> None:
    """Its own class in its own model: all norms are replaced, no error grows, and undone, all is
    as it was."""
    own = cohere().to(dtype)
    ours, wide = copy.deepcopy(own), copy.deepcopy(own).double()
    report = replace_norms(ours)
    assert len(report.replaced) == 7
    assert {entry.norm for entry in report.replaced} == {
        "layer norm", "layer norm, 4 heads", "layer norm, 2 heads"}  # fmt: skip
    tokens = torch.arange(24).reshape(2, 12) % 64

    def step(model: Any) -> list[Tensor]:
        logits = model(input_ids=tokens).logits
        loss = logits.double().square().mean()
        return [logits, *torch.autograd.grad(loss, list(model.parameters()))]

    # With the formula of the class in f64, which computes in f32.
    found, before, exact = step(ours), step(own), step(wide)
    for mine, theirs, right in zip(found, before, exact, strict=True):
        size = right.double().norm()
        off = [(each.double() - right.double()).norm() / size for each in (mine, theirs)]
        assert off[0] <= 1.5 * off[1] + 4 * torch.finfo(torch.float32).eps, off
    report.undo()
    torch.testing.assert_close(step(ours), before, rtol=0, atol=0)
