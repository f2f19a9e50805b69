"""Tensors whose rows have two strides are read where they lie: views of packed tensors, slices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec
from iree_lnbwd.calls import calling
from iree_lnbwd.calls.modules import in_use
from iree_lnbwd.torch import (
    RMSNorm,
    add_rms_norm,
    gated_rms_norm,
    layer_norm,
    native,
    rms_norm,
    specs,
)
from iree_lnbwd.torch.fallbacks import REFUSALS

B, S, H, D = 2, 6, 3, 16
VIEWS: dict[str, Callable[[], Any]] = {
    "q": lambda: torch.randn(B, S, 3, H, D)[:, :, 0],
    "v": lambda: torch.randn(B, S, 3, H, D)[:, :, 2],
    "a slice of features": lambda: torch.randn(B, S, 3 * D)[..., D : 2 * D],
    "batch and sequence": lambda: torch.randn(S, B, D).transpose(0, 1),
    "one row for all": lambda: torch.randn(D).expand(B, S, D),
    "every second": lambda: torch.randn(B, 2 * S, D)[:, ::2],
}
COPIED: dict[str, Callable[[], Any]] = {
    "heads first": lambda: torch.randn(B, S, 3, H, D)[:, :, 1].transpose(1, 2),
    "columns apart": lambda: torch.randn(B, S, 2 * D)[..., ::2],
    "negated": lambda: torch._neg_view(torch.randn(B, S, 2 * D)[..., :D]),
}
NORMS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "layer_norm": functools.partial(layer_norm, own_forward=True),
    "memory_efficient": functools.partial(rms_norm, memory_efficient=True),
    "sets": lambda x, d, w: rms_norm(x, d, w.expand(2, d), rows_per_set=3),
    "residual": lambda x, d, w: add_rms_norm(x, x * 2, d, w)[0],
    "gated": lambda x, d, w: gated_rms_norm(x, x, d, w),
}


def reaches_python(*_: Any, **__: Any) -> Any:
    raise AssertionError("a known call came to Python")


def step(norm: Callable[..., Any], x: Any, weight: Any, dy: Any) -> list[Any]:
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    output = norm(leaves[0], D, leaves[1])
    return [output.detach(), *torch.autograd.grad(output, leaves, dy)]


@pytest.mark.parametrize("view", [*VIEWS, *COPIED])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_view_has_the_bits_of_its_copy(
    norm: str, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first call, and in others, which C++ launches; whatever has strides, and what not."""
    torch.manual_seed(0)
    make, weight = {**VIEWS, **COPIED}[view], torch.randn(D)
    x, dy = make(), make()
    for ours, gradient in ((x, dy), (x, dy.contiguous()), (x.contiguous(), dy)):
        plain = x.resolve_neg().clone(memory_format=torch.contiguous_format)
        same = dy.resolve_neg().clone(memory_format=torch.contiguous_format)
        expected = step(NORMS[norm], plain, weight, same)
        first = step(NORMS[norm], ours, weight, gradient)
        with monkeypatch.context() as patch:
            if native.load() and view != "negated":
                patch.setattr(calling, "call", reaches_python)
            again = step(NORMS[norm], ours, weight, gradient)
        for computed in (first, again):
            for got, wanted in zip(computed, expected, strict=True):
                assert torch.equal(got, wanted)
                assert got.is_contiguous()


@pytest.mark.drawn
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("norm", NORMS)
def test_other_norms_of_views(norm: str, view: str) -> None:
    torch.manual_seed(0)
    x, dy, weight = VIEWS[view](), VIEWS[view](), torch.randn(D)
    expected = step(NORMS[norm], x.contiguous(), weight, dy.contiguous())
    for _ in range(2):
        for got, wanted in zip(step(NORMS[norm], x, weight, dy), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("view", [*VIEWS, *COPIED])
def test_what_is_copied_and_what_is_not(view: str) -> None:
    """By the operators that a call runs, from the second one on."""
    x, weight = {**VIEWS, **COPIED}[view](), torch.randn(D)

    weight.requires_grad_()

    def run() -> None:
        output = rms_norm(x.detach().requires_grad_(), D, weight)
        torch.autograd.grad(output, weight, x)

    run()
    if not native.load():
        pytest.skip("for the operators in C++")
    with torch.profiler.profile() as profile:
        run()
    copies = {event.key for event in profile.key_averages()} & {"aten::clone", "aten::copy_"}
    assert bool(copies) == (view in COPIED)


def test_layouts_are_told_apart() -> None:
    """One shape in memory of many kinds, one after the other and again."""
    torch.manual_seed(0)
    weight = torch.randn(D)
    packed, wide, turned = torch.randn(B, S, 3, D), torch.randn(B, S, 2 * D), torch.randn(S, B, D)
    views = [
        *(packed[:, :, part] for part in range(3)),
        *(wide[..., begin : begin + D] for begin in (0, 3, D)),
        *(turned.transpose(0, 1), torch.randn(B, S, D), torch.randn(B, 2 * S, D)[:, ::2]),
        *(torch.randn(2 * B, S, D)[::2], torch.randn(1, S, D).expand(B, S, D)),
    ]
    expected = [rms_norm(view.contiguous(), D, weight) for view in views]
    for _ in range(3):
        for view, wanted in zip(views, expected, strict=True):
            assert torch.equal(rms_norm(view, D, weight), wanted)
    by_rows = torch.randn(4, 3, 2, 2 * D)[..., :D]
    for shape in ((12, 2), (4, 6), (24,)):  # the same rows, other dimensions
        view = by_rows.as_strided((*shape, D), (*by_rows.stride()[3 - len(shape) : 3], 1))
        wanted = rms_norm(view.contiguous(), D, weight)
        for _ in range(2):
            assert torch.equal(rms_norm(view, D, weight), wanted)


def test_without_such_a_module_a_view_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle of plain modules, where nothing can be compiled: the first call and later ones."""
    plain = [
        NormSpec((40,), op="rms_norm", eps=1e-6),
        NormSpec((40,), op="rms_norm_backward"),
    ]
    path = tmp_path / "norms.lnb"
    lnbwd.bundle(plain, ["generic"], path)
    monkeypatch.setenv("IREE_LNBWD_BUNDLE", str(path))
    refused: list[str] = []
    compiled = lnbwd.calls.modules._compiled

    def refuse(spec: NormSpec, *given: Any) -> Any:
        if spec.strided_rows and spec.columns == 40:
            refused.append(spec.name)
            raise lnbwd.CompileError("no compiler")
        return compiled(spec, *given)

    monkeypatch.setattr(lnbwd.calls.modules, "_compiled", refuse)
    torch.manual_seed(0)
    packed, weight = torch.randn(3, 5, 2, 40), torch.randn(40)
    for part in (0, 1, 0):
        view = packed[:, :, part]
        wanted = torch.nn.functional.rms_norm(view, (40,), weight, 1e-6)
        for _ in range(3):
            assert torch.allclose(rms_norm(view, 40, weight, 1e-6), wanted, atol=1e-5)
    assert refused
    assert len(refused) == len(set(refused))  # what there is not is not asked for again


@pytest.mark.drawn
# Raised inside PyTorch, by the imports of its compiler.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("view", ["q", "a slice of features", "batch and sequence"])
def test_compiled_and_exported_functions_of_views(view: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(D)
    whole = {"q": torch.randn(B, S, 3, H, D), "a slice of features": torch.randn(B, S, 3 * D)}.get(
        view, torch.randn(S, B, D)
    )
    views: dict[str, Callable[[Any], Any]] = {
        "q": lambda given: given[:, :, 0],
        "a slice of features": lambda given: given[..., D : 2 * D],
        "batch and sequence": lambda given: given.transpose(0, 1),
    }

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, given: Any) -> Any:
            return rms_norm(views[view](given), D, weight) * 2

    model = Model()
    given = whole.clone().requires_grad_()
    expected = model(given)
    (gradient,) = torch.autograd.grad(expected.square().sum(), given)
    torch._dynamo.reset()
    compiled = torch.compile(model)
    for _ in range(2):
        again = whole.clone().requires_grad_()
        got = compiled(again)
        (own,) = torch.autograd.grad(got.square().sum(), again)
        assert torch.allclose(got, expected, atol=1e-6)
        assert torch.allclose(own, gradient, atol=1e-5)
    exported = torch.export.export(model, (whole,)).module()
    assert torch.equal(exported(whole), expected)


def test_specs_of_a_model_keep_no_view_from_its_module() -> None:
    """While specs are only recorded, there is no module; later calls ask again."""
    columns = 56
    assert specs(torch.nn.Sequential(RMSNorm(columns, eps=1e-6)))
    view, weight = torch.randn(3, 5, 2, columns)[:, :, 1], torch.randn(columns)
    with REFUSALS.asked() as asked:
        rms_norm(view, columns, weight, 1e-6)
    assert [spec.strided_rows for spec in asked] == [True, False]
    rms_norm(view, columns, weight, 1e-6)
    used = {spec.name for spec, _ in in_use() if spec.columns == columns}
    assert any("strided" in name for name in used)


def test_specs_are_of_their_own() -> None:
    spec = NormSpec((D,), op="rms_norm", eps=1e-6)
    assert replace(spec, strided_rows=True) != spec
    assert replace(spec, strided_rows=True).name != spec.name
    assert "strided_rows" not in spec.to_dict()
