"""One of two processes that FSDP1 shards a model over: python fsdp1_norms.py RANK FOLDER.

It prints what `replace_norms` does before and after, as JSON, and how far results are from those of
the model as it was.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from iree_lnbwd.torch import replace_norms, warmup

COLUMNS = 24


class Norm(nn.Module):
    """As a model has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(COLUMNS)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def model() -> nn.Module:
    """Its parameters divide unevenly: rank 0 has nothing of the last norms, or all."""
    torch.manual_seed(0)
    parts = (
        nn.Linear(COLUMNS, COLUMNS),
        Norm(),
        nn.LayerNorm(COLUMNS),
        Norm(),
        nn.RMSNorm(COLUMNS),
    )
    return nn.Sequential(*parts)


def sharded(module: nn.Module, use_orig_params: bool) -> Any:
    """It, over both processes."""
    device = torch.device("cpu")
    return FullyShardedDataParallel(module, use_orig_params=use_orig_params, device_id=device)


def step(module: nn.Module, x: Tensor) -> list[float]:
    """The output after two updates."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        output = module(x)
        torch.autograd.backward(output.square().mean())
        optimizer.step()
    found: list[float] = module(x).flatten().tolist()
    return found


def tried(rank: int, use_orig_params: bool) -> dict[str, Any]:
    """What happens in one mode."""
    x = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(rank))
    expected = step(sharded(model(), use_orig_params), x)
    after = sharded(model(), use_orig_params)
    report = replace_norms(after)
    before = model()
    assert len(replace_norms(before).replaced) == 4
    before = sharded(before, use_orig_params)
    compiled: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("iree_lnbwd.torch").addHandler(handler)
    warmup(before)
    warmup(after)
    compiled.clear()
    off = 0.0
    for each in (before, after):
        pairs = zip(step(each, x), expected, strict=True)
        off = max(off, *(abs(ours - theirs) for ours, theirs in pairs))
    return {"report": str(report), "off": off, "compiled": compiled}


def main(rank: int, folder: Path) -> None:
    """Both modes."""
    warnings.simplefilter("ignore")  # of FSDP1, that it is old
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'met'}", rank=rank, world_size=2
    )
    print(json.dumps({str(mode): tried(rank, mode) for mode in (True, False)}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads release tensors while Python ends, and then abort it
