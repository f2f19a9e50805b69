"""Captures the layer-norm backward operands of a real transformer training step.

Trains a small GPT-style model (pre-LN, byte level, about 1.9 million parameters) on the Python
language reference that every Python installation carries (`pydoc_data.topics`). It then runs the
forward and backward pass of one further step and saves, for a few of the layer norms, what a
layer-norm backward kernel is given: grad_output, input, weight, mean and rstd. That step runs in
f32, in bf16, and (for one layer norm) in bf16 with the layer norms' parameters kept in f32.

The default 300 steps take about a minute on two CPU cores:

    python scripts/capture_training_step.py [--steps 300] [--seed 0] [--output PATH]

The output is a compressed .npz with keys `<case>/<argument>`, e.g. `step300.h0.ln_1.f32/input`.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_gpt import Config, Gpt, batches, corpus, next_byte_loss, optimizer_of, train_step
from torch import Tensor, nn

_DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "iree_lnbwd" / "data" / "training_step.npz"
_MAX_BYTES = 2_000_000
_SAVED_SEQUENCES = 2  # of each batch; keeps the file small enough to ship in the package
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

# What one layer norm's backward is given, by argument name.
Case = dict[str, Tensor]


class CaptureError(Exception):
    """The run did not produce data worth saving."""


def captured_norms(config: Config) -> dict[str, tuple[str, ...]]:
    """Returns, for each precision, the module names of the layer norms to save."""
    middle = f"h.{config.n_layer // 2}.ln_1"
    every = ("h.0.ln_1", middle, f"h.{config.n_layer - 1}.ln_2", "ln_f")
    return {"f32": every, "bf16": every, "bf16_f32weight": (middle,)}


def train(model: Gpt, data: Iterator[Tensor], config: Config, steps: int) -> list[float]:
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


def cast_copy(model: Gpt, precision: str) -> Gpt:
    """Returns a copy of the model in one of `_PRECISIONS`."""
    model = copy.deepcopy(model)
    bf16_modules: tuple[type[nn.Module], ...] = {
        "f32": (),
        "bf16": (nn.Linear, nn.Embedding, nn.LayerNorm),
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


def capture(model: Gpt, batch: Tensor, names: tuple[str, ...]) -> tuple[float, dict[str, Case]]:
    """Runs one forward and backward pass and returns its loss and the named layer norms' operands.

    Each case has grad_output and input [batch, seq, d_model], weight [d_model], and mean and rstd
    [batch, seq, 1].
    """
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def remember(norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen[norm] = (args[0].detach(), output)

    norms = {name: module for name, module in model.named_modules() if name in names}
    for module in norms.values():
        module.register_forward_hook(remember)
    model.zero_grad()
    loss = next_byte_loss(model, batch)
    torch.autograd.backward(loss)

    cases: dict[str, Case] = {}
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
        cases[name] = case
    return loss.item(), cases


def encode(case_name: str, case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays to store for a case: its first sequences, bf16 as uint16 bits."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for argument, tensor in case.items():
        key = f"{case_name}/{argument}"
        saved = tensor if argument == "weight" else tensor[:_SAVED_SEQUENCES]
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


def describe(config: Config, losses: list[float], text: bytes) -> dict[str, Any]:
    """Returns the provenance that does not depend on what was captured."""
    return {
        "initial_loss": losses[0],
        "final_loss": losses[-1],
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
        "model": {
            "kind": "decoder-only transformer, pre-LN, byte level, causal attention, GELU, AdamW",
            **dataclasses.asdict(config),
        },
    }


def run(steps: int, seed: int) -> bytes:
    """Trains, captures, prints the provenance and returns the .npz file's content."""
    torch.set_num_threads(_NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    config = Config()
    text = corpus()
    model = Gpt(config)
    data = batches(text, config, seed)
    losses = train(model, data, config, steps)
    check_losses(losses)

    arrays: dict[str, Any] = {}
    captured_losses: dict[str, float] = {}
    case_names: list[str] = []
    batch = next(data)
    for precision, names in captured_norms(config).items():
        captured_losses[precision], cases = capture(cast_copy(model, precision), batch, names)
        for name, case in cases.items():
            case_names.append(f"step{steps}.{name.replace('h.', 'h')}.{precision}")
            arrays |= encode(case_names[-1], case)
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
