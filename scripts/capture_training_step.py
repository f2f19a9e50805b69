"""Captures what norms are given in a real training step of two small transformers.

Trains a small GPT-style model (layer norms, about 1.9 million parameters) and a small Llama-style
one (RMS norms of a residual stream, about as many) on the Python language reference that every
Python installation carries (`pydoc_data.topics`). It then runs the forward and backward pass of one
further step and saves, for a few of the norms, what kernels are given: in a forward (input,
residual, weight, bias) and in a backward (grad_output, input, weight, mean and rstd,
grad_residual). That step runs in f32, in bf16, and (for one layer norm) in bf16 with the norms'
parameters kept in f32.

The default 300 steps take about two minutes on two CPU cores:

    python scripts/capture_training_step.py [--steps 300] [--seed 0] [--output PATH]

The output is a compressed .npz with keys `<case>/<argument>`, e.g. `step300.h0.ln_1.f32/input`. The
key `<case>/op` names the op, where it is another than `layer_norm_backward`.
NumPy has no bfloat16, so a bf16 array is stored as its uint16 bits, under
`<case>/<argument>:bf16`. The key `provenance` is a 0-d string array that holds JSON.
"""

import argparse
import copy
import dataclasses
import hashlib
import io
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_gpt import Config, Gpt, batches, corpus, next_byte_loss, optimizer_of, train_step
from small_llama import AddRMSNorm, Llama
from torch import Tensor, nn

_DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "iree_lnbwd" / "data" / "training_step.npz"
_MAX_BYTES = 2_000_000
_SAVED_SEQUENCES = 1  # of each batch; keeps the file small enough to ship in the package
_REPORT_EVERY = 20
_NUM_THREADS = 2  # fixed, because the order of parallel sums changes their rounding

_PRECISIONS = {
    "f32": "parameters and activations in f32",
    "bf16": "parameters and activations in bf16 (a cast copy of the trained model)",
    "bf16_f32weight": "as bf16, but with the layer norms' parameters kept in f32",
}
_STATISTICS = (
    "f32 mean and rstd from torch.native_layer_norm on the captured input; for the precision bf16, "
    "where PyTorch's CPU kernel returns them in bf16, from the same input widened to f32"
)

# What one norm is given, forward or backward, by argument name.
Case = dict[str, Tensor]
Calls = dict[tuple[str, str], Case]  # by the norm's name and the op's


class CaptureError(Exception):
    """The run did not produce data worth saving."""


def captured_norms(config: Config) -> dict[str, tuple[str, ...]]:
    """Returns, for each precision, the module names of the layer norms to save."""
    middle = f"h.{config.n_layer // 2}.ln_1"
    every = ("h.0.ln_1", middle, f"h.{config.n_layer - 1}.ln_2", "ln_f")
    return {"f32": every, "bf16": every, "bf16_f32weight": (middle,)}


def captured_add_norms(config: Config) -> dict[str, tuple[str, ...]]:
    """As `captured_norms`, of the Llama."""
    middle = f"h.{config.n_layer // 2}.mlp_norm"
    return {"f32": (middle,), "bf16": (middle, "norm")}


def train(model: nn.Module, data: Iterator[Tensor], config: Config, steps: int) -> list[float]:
    """Trains the model in place and returns the loss of each step."""
    optimizer = optimizer_of(model, config)
    losses: list[float] = []
    start = time.monotonic()
    for step, batch in enumerate(itertools.islice(data, steps), start=1):
        losses.append(train_step(model, optimizer, batch, step, config).item())
        if step == 1 or step == steps or step % _REPORT_EVERY == 0:
            elapsed = time.monotonic() - start
            print(f"step {step:4d}/{steps}  loss {losses[-1]:.4f}  {elapsed:5.0f} s", flush=True)
    return losses


def check_losses(losses: list[float]) -> None:
    """Raises CaptureError unless training clearly reduced the loss."""
    # An untrained model is at ln(256) = 5.5, and one that knows only byte frequencies is above 3.
    if not losses[-1] < 0.55 * losses[0]:
        raise CaptureError(
            f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps, "
            "which is not a trained model; use more --steps"
        )


def cast_copy(model: nn.Module, precision: str) -> nn.Module:
    """Returns a copy of a model in one of `_PRECISIONS`."""
    model = copy.deepcopy(model)
    bf16_modules: tuple[type[nn.Module], ...] = {
        "f32": (),
        "bf16": (nn.Linear, nn.Embedding, nn.LayerNorm, AddRMSNorm),
        "bf16_f32weight": (nn.Linear, nn.Embedding),
    }[precision]
    for module in model.modules():
        if isinstance(module, bf16_modules):
            module.to(torch.bfloat16)
    return model


def layer_norm_statistics(norm: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the f32 mean and rstd, each [batch, seq, 1], of x [batch, seq, d_model]."""
    shape = list(norm.normalized_shape)
    _, mean, rstd = torch.native_layer_norm(x, shape, norm.weight, norm.bias, norm.eps)
    if mean.dtype != torch.float32:
        # With a bf16 weight, PyTorch's CPU kernel returns bf16 statistics. Its CUDA kernel returns
        # f32 ones, and those are what the backward expects, so take them from the widened input.
        _, mean, rstd = torch.native_layer_norm(x.float(), shape, None, None, norm.eps)
    return mean.detach(), rstd.detach()


def check_case(name: str, case: Case, norm: nn.LayerNorm) -> None:
    """Raises CaptureError unless the captured operands are finite and belong together."""
    for argument, tensor in case.items():
        if not torch.isfinite(tensor).all():
            raise CaptureError(f"{name}: {argument} is not finite")
    dy, x, mean, rstd = (
        case[argument].double() for argument in ("grad_output", "input", "mean", "rstd")
    )
    variance, expected_mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    # One comparison in units of each row's own spread, since a row's mean may be near zero.
    mean_error = ((mean - expected_mean) * rstd).abs().max().item()
    rstd_error = (rstd * (variance + norm.eps).sqrt() - 1).abs().max().item()
    if not max(mean_error, rstd_error) < 1e-5:
        raise CaptureError(f"{name}: mean or rstd is off by {mean_error:.1e}, {rstd_error:.1e}")
    # Autograd's own parameter gradients must follow from the operands: they do only if grad_output
    # is this layer norm's, from this step. In bf16, PyTorch's sums are good to some percent only.
    normalized = (x - mean) * rstd
    tolerance = 1e-4 if case["input"].dtype == torch.float32 else 0.1
    for parameter, terms in ((norm.weight, dy * normalized), (norm.bias, dy)):
        assert parameter.grad is not None
        expected = terms.sum(dim=(0, 1))
        error = ((parameter.grad.double() - expected).norm() / expected.norm()).item()
        if not error < tolerance:
            raise CaptureError(f"{name}: the parameter gradients disagree by {error:.1e}")


def run_step(
    model: nn.Module, batch: Tensor, names: tuple[str, ...], remember: Callable[..., object]
) -> tuple[dict[str, nn.Module], float]:
    """Runs one forward and backward pass with a forward hook on the named modules.

    Returns:
        The modules by name, and the loss.
    """
    hooked = {name: module for name, module in model.named_modules() if name in names}
    for module in hooked.values():
        module.register_forward_hook(remember)
    model.zero_grad()
    loss = next_byte_loss(model, batch)
    torch.autograd.backward(loss)
    return hooked, loss.item()


def capture(model: nn.Module, batch: Tensor, names: tuple[str, ...]) -> tuple[float, Calls]:
    """Runs one forward and backward pass and returns its loss and the named layer norms' operands.

    The backward of each has grad_output and input [batch, seq, d_model], weight [d_model], and mean
    and rstd [batch, seq, 1]. The last of them has a forward, too, with a bias [d_model].
    """
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def remember(norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen[norm] = (args[0].detach(), output)

    norms, loss = run_step(model, batch, names, remember)
    calls: Calls = {}
    for name, norm in norms.items():
        assert isinstance(norm, nn.LayerNorm)
        x, output = seen[norm]
        assert output.grad is not None
        mean, rstd = layer_norm_statistics(norm, x)
        weight = norm.weight.detach()
        case = {
            "grad_output": output.grad,
            "input": x,
            "weight": weight,
            "mean": mean,
            "rstd": rstd,
        }
        check_case(name, case, norm)
        calls[name, "layer_norm_backward"] = case
    bias = norm.bias.detach()
    calls[name, "layer_norm"] = {"input": x, "weight": weight, "bias": bias}
    return loss, calls


def capture_sums(model: nn.Module, batch: Tensor, names: tuple[str, ...]) -> tuple[float, Calls]:
    """As `capture`, for the norms of a Llama: a forward call and a backward call of each.

    The forward has input and residual [batch, seq, d_model] and weight [d_model]. The backward's
    input is their sum, and it has grad_residual, the gradient that came back past the norm.
    """
    seen: dict[nn.Module, tuple[Tensor, ...]] = {}

    def remember(
        norm: nn.Module, args: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        output, total = outputs
        past = total.view_as(total)  # its gradient lacks the norm's own part
        output.retain_grad()
        past.retain_grad()
        seen[norm] = (args[0].detach(), args[1].detach(), total.detach(), output, past)
        return output, past

    norms, loss = run_step(model, batch, names, remember)
    calls: Calls = {}
    for name, norm in norms.items():
        assert isinstance(norm, AddRMSNorm)
        x, residual, total, output, past = seen[norm]
        assert output.grad is not None
        weight = norm.weight.detach()
        backward = {
            "grad_output": output.grad,
            "input": total,
            "rstd": torch.rsqrt(total.float().square().mean(-1, keepdim=True) + norm.eps),
            "weight": weight,
            "grad_residual": torch.zeros_like(total) if past.grad is None else past.grad,
        }
        check_sum_case(name, backward, norm)
        calls[name, "rms_norm"] = {"input": x, "residual": residual, "weight": weight}
        calls[name, "rms_norm_backward"] = backward
    return loss, calls


def check_sum_case(name: str, case: Case, norm: AddRMSNorm) -> None:
    """Raises CaptureError unless the captured operands are finite and belong together."""
    for argument, tensor in case.items():
        if not torch.isfinite(tensor).all():
            raise CaptureError(f"{name}: {argument} is not finite")
    dy, x, rstd = (case[argument].double() for argument in ("grad_output", "input", "rstd"))
    error = (rstd * (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() - 1).abs().max().item()
    if not error < 1e-5:
        raise CaptureError(f"{name}: rstd is off by {error:.1e}")
    assert norm.weight.grad is not None
    expected = (dy * x * rstd).sum(dim=(0, 1))
    error = ((norm.weight.grad.double() - expected).norm() / expected.norm()).item()
    if not error < (1e-4 if case["input"].dtype == torch.float32 else 0.1):
        raise CaptureError(f"{name}: the weight's gradient disagrees by {error:.1e}")


def encode(
    case_name: str, case: Case, op: str = "layer_norm_backward"
) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays to store for a case: its first sequences, bf16 as uint16 bits."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    if op != "layer_norm_backward":
        arrays[f"{case_name}/op"] = np.array(op)
    for argument, tensor in case.items():
        key = f"{case_name}/{argument}"
        saved = tensor if tensor.dim() == 1 else tensor[:_SAVED_SEQUENCES]
        if saved.dtype == torch.bfloat16:
            arrays[f"{key}:bf16"] = saved.contiguous().view(torch.uint16).numpy()
        else:
            arrays[key] = saved.contiguous().numpy()
    return arrays


def pack(arrays: Mapping[str, Any]) -> bytes:
    """Returns the arrays as a compressed .npz, which has fixed dates and so is reproducible."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    if buffer.tell() > _MAX_BYTES:
        raise CaptureError(f"the file would take {buffer.tell()} bytes, over {_MAX_BYTES}")
    return buffer.getvalue()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that, whatever happens, `path` never holds a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def describe(config: Config, losses: dict[str, list[float]], text: bytes) -> dict[str, Any]:
    """Returns the provenance that does not depend on what was captured."""
    return {
        "initial_loss": {kind: of_kind[0] for kind, of_kind in losses.items()},
        "final_loss": {kind: of_kind[-1] for kind, of_kind in losses.items()},
        "versions": {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        # Both change the order in which floating-point sums are taken.
        "cpu": {"threads": _NUM_THREADS, "instructions": torch.backends.cpu.get_cpu_capability()},
        "text": {
            "source": "pydoc_data.topics: the values of topics in the order of their sorted keys",
            "bytes": len(text),
            "sha256": hashlib.sha256(text).hexdigest(),
        },
        "models": {
            "Gpt": "decoder-only transformer, pre-LN, byte level, causal attention, GELU, AdamW",
            "Llama": "the same with RMS norms of a residual stream, rotary positions, a gated MLP",
            **dataclasses.asdict(config),
        },
    }


def run(steps: int, seed: int) -> bytes:
    """Trains, captures, prints the provenance and returns the .npz file's content."""
    torch.set_num_threads(_NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    config, text = Config(), corpus()
    arrays: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    captured_losses: dict[str, dict[str, float]] = {}
    case_names: list[str] = []
    for kind in (Gpt, Llama):
        torch.manual_seed(seed)
        model, data = kind(config), batches(text, config, seed)
        losses[kind.__name__] = train(model, data, config, steps)
        check_losses(losses[kind.__name__])
        batch = next(data)
        of_kind = captured_losses.setdefault(kind.__name__, {})
        wanted = captured_norms(config) if kind is Gpt else captured_add_norms(config)
        for precision, names in wanted.items():
            capture_ = capture if kind is Gpt else capture_sums
            of_kind[precision], calls = capture_(cast_copy(model, precision), batch, names)
            for (name, op), case in calls.items():
                stem = f"step{steps}.{name.replace('h.', 'h')}.{precision}"
                case_names.append(stem if op.endswith("backward") else f"{stem}.forward")
                arrays |= encode(case_names[-1], case, op)
    provenance = {
        "script": "scripts/capture_training_step.py",
        "arguments": {"steps": steps, "seed": seed},
        **describe(config, losses, text),
        "captured": {
            "step": "the forward and backward pass that follows the last optimizer step",
            "rows": f"the first {_SAVED_SEQUENCES} of the batch's {config.batch_size} sequences",
            "precisions": _PRECISIONS,
            "statistics": _STATISTICS,
            "losses": captured_losses,
            "cases": case_names,
        },
    }
    print(json.dumps(provenance, indent=2))
    return pack({**arrays, "provenance": np.array(json.dumps(provenance))})


def main() -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=_DEFAULT_OUTPUT)
    args = parser.parse_args()
    # A bad output path is reported now rather than after the training.
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, not {args.steps}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be at least 0 and below 2**63, not {args.seed}")
    if args.output.suffix != ".npz" or args.output.is_dir():
        parser.error(f"--output must name an .npz file, not {args.output}")
    if not os.access(args.output.parent, os.W_OK):
        parser.error(f"--output: {args.output.parent} is not a folder that can be written to")
    try:
        content = run(args.steps, args.seed)
        write_atomically(args.output, content)
    except (CaptureError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output} ({len(content)} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
