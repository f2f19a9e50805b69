"""Graphs of norms on PyTorch's tensors, in the way of cuDNN's samples."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch

from iree_lnbwd.graph import (
    Graph,
    LayernormAttributes,
    LayernormBackwardAttributes,
    NormFwdPhase,
    Tensor,
)

EPS = 1e-3


def tensor(graph: Graph, name: str, like: torch.Tensor) -> Tensor:
    """As cuDNN's samples make one."""
    return graph.tensor(name=name, dim=like.size(), stride=like.stride(), data_type=like.dtype)


def test_a_training_step_of_channels_last(device: str) -> None:
    """The layout of test/python/test_layernorm.py: [N, C, 1, 1], with channels last."""

    def made(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, dtype=torch.float64, device=device)
        return values.to(memory_format=torch.channels_last)

    x, scale, bias, dy = made(6, 4, 1, 1), made(1, 4, 1, 1), made(1, 4, 1, 1), made(6, 4, 1, 1)
    leaves = [t.clone().requires_grad_() for t in (x, scale, bias)]
    expected = torch.nn.functional.layer_norm(
        leaves[0], (4, 1, 1), leaves[1].squeeze(0), leaves[2].squeeze(0), EPS
    )
    expected.backward(dy)

    graph = Graph()
    given = {"X": x, "scale": scale, "bias": bias, "dY": dy}
    tx, tscale, tbias, tdy = (tensor(graph, name, each) for name, each in given.items())
    y, mean, inv_var = graph.layernorm(
        tx, tscale, tbias, LayernormAttributes(EPS, NormFwdPhase.TRAINING, name="LN")
    )
    assert mean is not None
    assert inv_var is not None
    gradients = graph.layernorm_backward(
        tdy, tx, tscale, LayernormBackwardAttributes(mean, inv_var, name="DLN")
    )
    for output in (y, mean, inv_var, *gradients):
        output.set_output(True)
    gpu = "hip" if torch.version.hip else "cuda"
    graph.build("local-task" if device == "cpu" else gpu)
    rooms = {
        y: torch.empty_like(x).requires_grad_(),  # what PyTorch protects is written to, too
        mean: torch.empty_like(x[:, :1]),
        inv_var: torch.empty_like(x[:, :1]),
        gradients[0]: torch.empty_like(x),
        gradients[1]: torch.empty_like(scale),
        gradients[2]: torch.empty_like(bias),
    }
    graph.execute({tx: x, tscale: scale, tbias: bias, tdy: dy, **rooms})

    torch.testing.assert_close(rooms[y], expected.requires_grad_())
    torch.testing.assert_close(rooms[mean], x.mean(dim=(1, 2, 3), keepdim=True))
    for gradient, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(rooms[gradient], leaf.grad)
