"""`specs`: what a model's norms need; `warmup` and ``bundle --model`` agree with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import random_generator

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import nn

from iree_lnbwd import cli
from iree_lnbwd.bundles.container import BundleFile
from iree_lnbwd.calls import modules
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.torch import AddRMSNorm, GatedRMSNorm, enabled, replace_norms, specs, warmup


def norms(columns: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(columns), nn.RMSNorm(columns), AddRMSNorm(columns))


def loaded(columns: int) -> set[NormSpec]:
    return {spec for spec, _ in modules.in_use() if columns in spec.normalized_shape}


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warmup_loads_what_specs_says(dtype: torch.dtype) -> None:
    columns = int(random_generator().integers(20000, 21000))  # which no other test has loaded
    model = norms(columns).to(dtype)
    replace_norms(model)
    said = specs(model)
    assert not loaded(columns)
    warmup(model)
    assert loaded(columns) <= set(said)
    # Of a layer norm in bf16, CPUs compute the statistics again, which GPUs take.
    on_gpus = {replace(spec, eps=None) for spec in loaded(columns) if spec.family.is_backward}
    assert bool(on_gpus - loaded(columns)) == (dtype == torch.bfloat16)
    assert set(said) == loaded(columns) | on_gpus
    assert len(said) == len(set(said))


def test_specs_of_calls_that_are_known() -> None:
    """C++ launches them without asking for a module."""
    model = nn.Sequential(norms(43), GatedRMSNorm(43))
    replace_norms(model)
    said = specs(model)
    for _ in range(2):
        warmup(model)
    assert specs(model) == said
    assert len(said) == 7


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_specs_have_backwards_whatever_the_mode(mode: Callable[[], Any]) -> None:
    model = norms(40)
    replace_norms(model)
    with mode():
        within = specs(model)
    assert within == specs(model)
    assert {spec.op for spec in within} == {
        "layer_norm_backward",
        "rms_norm",
        "rms_norm_backward",
    }


def test_specs_of_element_types_that_the_model_has_not() -> None:
    """Each argument counts, also where the model's own types are others."""
    model = norms(40)
    replace_norms(model)
    types = {(spec.dtype, spec.weight_dtype) for spec in specs(model, weight_dtype=torch.bfloat16)}
    assert types == {("bf16", None)}  # the inputs' follow
    mixed = specs(model.bfloat16(), dtype=torch.float32, weight_dtype=torch.bfloat16)
    assert {(spec.dtype, spec.weight_dtype) for spec in mixed} == {("f32", "bf16")}
    wide = specs(model, residual_dtype=torch.float32)
    assert {spec.residual_dtype for spec in wide} == {None, "f32"}
    assert {spec.residual_dtype for spec in specs(model)} == {None, "bf16"}


def test_specs_leave_out_what_enable_serves() -> None:
    """``bundle --model`` has replaced norms in it, whatever else this process does."""
    columns = int(random_generator().integers(21000, 22000))
    with enabled():
        assert specs(nn.Sequential(nn.LayerNorm(columns), nn.RMSNorm(columns))) == ()
    assert not loaded(columns)


def test_specs_of_models_without_memory_and_of_other_types() -> None:
    model = norms(40)
    replace_norms(model)
    of_bf16 = specs(model, dtype=torch.bfloat16, weight_dtype=torch.float32)
    assert {(spec.dtype, spec.weight_dtype) for spec in of_bf16} == {("bf16", "f32")}
    assert specs(model.to("meta"), dtype=torch.bfloat16) == of_bf16
    assert specs(nn.LayerNorm(40)) == ()  # it is PyTorch's
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module, got int"):
        specs(3)


MODEL = """
from torch import nn


def model():
    return nn.Sequential(nn.LayerNorm(40), nn.RMSNorm(40))


def number():
    return 3


def fails():
    raise RuntimeError("why")


def empty():
    return nn.Linear(3, 3)
"""


@pytest.mark.drawn
def test_a_bundle_of_a_model(tmp_path: Path) -> None:
    """It has what `specs` says of the model with its norms replaced."""
    (tmp_path / "model.py").write_text(MODEL)
    place = tmp_path / "norms.lnb"
    asked = ["bundle", f"--model={tmp_path}/model.py:model", "--dtype=f32,bf16", f"-o{place}"]
    assert cli.main(asked) == 0
    model = nn.Sequential(nn.LayerNorm(40), nn.RMSNorm(40))
    replace_norms(model)
    expected = {
        spec
        for dtype in (torch.float32, torch.bfloat16)
        for spec in specs(model, dtype=dtype, weight_dtype=dtype)
    }
    assert {member.spec for member in BundleFile(place).members} == expected


@pytest.mark.parametrize(
    ("function", "more", "said"),
    [
        ("number", (), "model: expected a torch.nn.Module, got int"),
        ("fails", (), "raised RuntimeError: why"),
        ("missing", (), "model: expected a function missing in "),
        ("not one", (), "model: expected FILE:FUNCTION, got "),
        ("empty", (), "model: expected one with norms of a known width, got none"),
        ("model", ("--eps=1",), "eps: expected none beside a model, which says it, got 1.0"),
        ("model", ("--normalized-shape=3",), "not allowed with argument"),
    ],
)
def test_bad_models_are_refused(
    function: str,
    more: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    place = tmp_path / "norms.lnb"
    asked = ["bundle", f"--model={tmp_path}/model.py:{function}", *more, f"-o{place}"]
    assert cli.main(asked) != 0
    assert said in capsys.readouterr().err
    assert not place.exists()
    assert "model" not in sys.modules
