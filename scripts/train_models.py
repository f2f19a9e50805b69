"""The models that `scripts/train` trains side by side, and the modules that each of them needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

from small_gpt import Config, Gpt
from small_llama import AddRMSNorm, Llama
from torch import Tensor, nn

from iree_lnbwd import NormSpec
from iree_lnbwd import torch as ours
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, RMS_NORM, RMS_NORM_BACKWARD

BASELINE, OURS, IN_PLACE = "PyTorch", "iree-lnbwd", "iree-lnbwd enable()"


@dataclass(frozen=True)
class Precision:
    """The element types of a training run, by MLIR's names.

    Attributes:
        said: What it is, in words.
        stream: Of the parameters and of the residual stream.
        layers: Of what linear layers compute; it is another under autocast alone.
    """

    said: str
    stream: str
    layers: str

    @property
    def is_autocast(self) -> bool:
        """Whether the step runs under autocast."""
        return self.stream != self.layers


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "f32": Precision("f32", "f32", "f32"),
        "autocast": Precision("autocast to bf16", "f32", "bf16"),
        "bf16": Precision("parameters and activations in bf16", "bf16", "bf16"),
    }
)


@dataclass(frozen=True)
class Run:
    """What decides the modules that a contender needs.

    Attributes:
        config: Of the model.
        precision: Of its tensors.
        on_cpu: Whether it trains on a CPU.
    """

    config: Config
    precision: Precision
    on_cpu: bool


def _none(_run: Run) -> tuple[NormSpec, ...]:
    return ()


@dataclass(frozen=True)
class Recipe:
    """How a contender is made.

    Attributes:
        model: Makes the model; raises ImportError if its library is not there.
        specs: The modules that it needs.
        compiled: Whether it runs under ``torch.compile``.
        around: What each of its steps runs in: changes of the process that are not for others.
    """

    model: Callable[[Run], nn.Module]
    specs: Callable[[Run], tuple[NormSpec, ...]] = _none
    compiled: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Preset:
    """A model, and who trains it.

    Attributes:
        kind: What it is called.
        config: Its size and that of its batches.
        recipes: The contenders by name.
    """

    kind: str
    config: Config
    recipes: Mapping[str, Recipe]


def _replaced(model: nn.Module) -> nn.Module:
    ours.replace_norms(model)
    return model


# --- layer norms: the forward is PyTorch's ---------------------------------------------------


def _gpt(run: Run) -> nn.Module:
    return Gpt(run.config)


def _our_gpt(run: Run) -> nn.Module:
    return _replaced(Gpt(run.config))


def _of_layer_norms(run: Run) -> tuple[NormSpec, ...]:
    # On the CPU, PyTorch's statistics are in the input's type: too coarse in bf16.
    recomputed = run.on_cpu and run.precision.stream != "f32"
    return (
        NormSpec(
            (run.config.d_model,),
            run.precision.stream,
            op=LAYER_NORM_BACKWARD.name,
            eps=run.config.layer_norm_eps if recomputed else None,
        ),
    )


def _in_place_of_layer_norms(run: Run) -> tuple[NormSpec, ...]:
    """With PyTorch's statistics, however coarse."""
    return (NormSpec((run.config.d_model,), run.precision.stream, op=LAYER_NORM_BACKWARD.name),)


# --- RMS norms of a residual stream ----------------------------------------------------------

# `AddRMSNorm` before another class adds, and calls the other's forward, which takes one tensor.


class _OursApart(AddRMSNorm, ours.RMSNorm):  # type: ignore[misc]
    """Ours, after an addition."""


class _Apart(nn.Module):
    """PyTorch's as a module of its own, after an addition: what `replace_norms` looks for."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.norm(total), total


def _llama(run: Run) -> nn.Module:
    return Llama(run.config)


def _ligers_llama(run: Run) -> nn.Module:
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction

    class Liger(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            normed: Tensor = function.apply(x, self.weight, self.eps)
            return normed

    class LigerApart(AddRMSNorm, Liger):  # type: ignore[misc]
        """Liger's, after an addition."""

    return Llama(run.config, LigerApart)


def _our_llama(run: Run) -> nn.Module:
    return _replaced(Llama(run.config, _Apart))


def _fused_llama(run: Run) -> nn.Module:
    return Llama(run.config, ours.AddRMSNorm)


def _memory_efficient_llama(run: Run) -> nn.Module:
    # A fused norm that keeps its output alone takes one element type.
    norm = _OursApart if run.precision.is_autocast else ours.AddRMSNorm
    return Llama(run.config, lambda d, eps: norm(d, eps, memory_efficient=True))


def _apart(run: Run, *, from_output: bool = False) -> tuple[NormSpec, ...]:
    """The modules of norms after an addition: the stream has its type under autocast, too."""
    shape, dtype = (run.config.d_model,), run.precision.stream
    return (
        NormSpec(shape, dtype, op=RMS_NORM.name, eps=run.config.layer_norm_eps),
        NormSpec(shape, dtype, op=RMS_NORM_BACKWARD.name, from_output=from_output),
    )


def _in_place_of_rms_norms(run: Run) -> tuple[NormSpec, ...]:
    """PyTorch has no kernel of them on the CPU."""
    shape, dtype = (run.config.d_model,), run.precision.stream
    return () if run.on_cpu else (NormSpec(shape, dtype, op=RMS_NORM_BACKWARD.name),)


def _fused(run: Run, *, from_output: bool = False) -> tuple[NormSpec, ...]:
    """The modules of norms of sums, whose output has the type of what is added to the stream."""
    shape, stream, layers = (run.config.d_model,), run.precision.stream, run.precision.layers
    eps = run.config.layer_norm_eps
    # The first adds an embedding. Nothing but the norm uses the last sum.
    outputs = ((stream, stream), (layers, stream), (layers, None))
    forwards = (
        NormSpec(
            shape, dtype, weight_dtype=stream, residual_dtype=stream, op=RMS_NORM.name, eps=eps
        )
        for dtype, _ in outputs
    )
    backwards = (
        NormSpec(
            shape,
            stream,
            grad_output_dtype=dtype,
            residual_dtype=past,
            op=RMS_NORM_BACKWARD.name,
            from_output=from_output,
        )
        for dtype, past in outputs
    )
    return (*dict.fromkeys((*forwards, *backwards)),)


def _memory_efficient(run: Run) -> tuple[NormSpec, ...]:
    return (_apart if run.precision.is_autocast else _fused)(run, from_output=True)


_OF_GPT: Mapping[str, Recipe] = MappingProxyType(
    {
        BASELINE: Recipe(_gpt),
        "torch.compile": Recipe(_gpt, compiled=True),
        OURS: Recipe(_our_gpt, _of_layer_norms),
        f"{OURS} compiled": Recipe(_our_gpt, _of_layer_norms, compiled=True),
        IN_PLACE: Recipe(_gpt, _in_place_of_layer_norms, around=ours.enabled),
    }
)
_OF_LLAMA: Mapping[str, Recipe] = MappingProxyType(
    {
        BASELINE: Recipe(_llama),
        "torch.compile": Recipe(_llama, compiled=True),
        "Liger": Recipe(_ligers_llama),
        OURS: Recipe(_our_llama, _apart),
        f"{OURS} compiled": Recipe(_our_llama, _apart, compiled=True),
        IN_PLACE: Recipe(_llama, _in_place_of_rms_norms, around=ours.enabled),
        f"{OURS} fused": Recipe(_fused_llama, _fused),
        f"{OURS} fused compiled": Recipe(_fused_llama, _fused, compiled=True),
        f"{OURS} memory-efficient": Recipe(_memory_efficient_llama, _memory_efficient),
    }
)
_TINY = Config(n_layer=2, n_head=2, d_model=64, context=32, batch_size=4)
_LARGE = Config(n_layer=12, n_head=12, d_model=768, context=1024, batch_size=16)
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "tiny": Preset("GPT", _TINY, _OF_GPT),
        "small": Preset("GPT", Config(), _OF_GPT),
        "gpt2": Preset("GPT", _LARGE, _OF_GPT),
        "small-llama": Preset("Llama", _TINY, _OF_LLAMA),
        "llama": Preset("Llama", _LARGE, _OF_LLAMA),
    }
)
