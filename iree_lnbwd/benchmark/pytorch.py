"""The contenders that PyTorch has: ours in it, its eager mode, and torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iree_lnbwd.benchmark.cells import EPS, Cell
from iree_lnbwd.benchmark.host_times import Call
from iree_lnbwd.errors import one_line
from iree_lnbwd.torch import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from iree_lnbwd.torch.supported import BY_NAME


@dataclass(frozen=True)
class Operands:
    """Everybody's tensors.

    Shapes: x, dy, residual [M, *normalized_shape]; gamma, beta [*normalized_shape].
    """

    x: Tensor
    dy: Tensor
    residual: Tensor
    gamma: Tensor
    beta: Tensor

    @classmethod
    def of(cls, cell: Cell, device: str) -> Operands:
        """Random ones.

        Raises:
            MemoryError: The device has too little memory.
        """
        dtype, row = BY_NAME[cell.dtype], cell.normalized_shape

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        try:
            x = (torch.randn((cell.rows, *row), device=device) * 2 + 0.5).to(dtype)
            dy, residual = (normal(cell.rows, *row) for _ in range(2))
            return cls(x, dy, residual, normal(*row), normal(*row))
        except RuntimeError as error:  # so PyTorch's allocators say it
            raise MemoryError(f"{cell}: {one_line(error)}") from error

    def leaves(self, cell: Cell) -> tuple[Tensor, ...]:
        """The tensors that have gradients: x, gamma and, of layer normalization, beta."""
        given = (self.x, self.gamma, self.beta) if cell.family.centres else (self.x, self.gamma)
        return tuple(tensor.detach().requires_grad_() for tensor in given)


def ours(cell: Cell, of: Operands) -> Call:
    """`iree_lnbwd.torch`'s function, or the backward that belongs to it."""
    norm: Any = (
        (add_layer_norm if cell.has_residual else layer_norm)
        if cell.family.centres
        else (add_rms_norm if cell.has_residual else rms_norm)
    )
    residual = (_added(cell, of),) if cell.has_residual else ()
    own = {"own_forward": True} if norm is layer_norm else {}

    def forward(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        results = norm(x, *residual, cell.normalized_shape, *parameters, EPS, **own)
        return results if cell.has_residual else (results,)

    return _differentiated(cell, of, forward)


def eager(cell: Cell, of: Operands) -> Call:
    """The shortest calls of PyTorch that compute the op."""
    shape = list(cell.normalized_shape)
    if not cell.family.is_backward:
        parameters = (of.gamma, of.beta) if cell.family.centres else (of.gamma,)
        return lambda: _normalized(cell, of.x, of.residual, *parameters)
    if cell.family.centres:
        # As its forward saves them: of x's type on the CPU.
        _, mean, rstd = torch.ops.aten.native_layer_norm(of.x, shape, of.gamma, of.beta, EPS)

        def backward() -> Any:
            return torch.ops.aten.native_layer_norm_backward(
                of.dy, of.x, shape, mean, rstd, of.gamma, of.beta, [True] * 3
            )

    else:
        leaves = of.leaves(cell)
        y = torch.nn.functional.rms_norm(leaves[0], shape, leaves[1], EPS)

        def backward() -> Any:
            return torch.autograd.grad(y, leaves, of.dy, retain_graph=True)

    if not cell.has_residual:
        return backward

    def backward_and_add() -> object:
        dx, *others = backward()
        return dx.add_(of.residual), *others

    return backward_and_add


def compiled(cell: Cell, of: Operands) -> Call:
    """The op as torch.compile has it: a compiled forward, or the backward that belongs to it."""
    torch._dynamo.reset()

    def normalized(x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return _normalized(cell, x, residual, *parameters)

    run = torch.compile(normalized, dynamic=False)
    residual = _added(cell, of)

    def forward(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = run(x, residual, *parameters)
        return results

    with torch._functorch.config.patch(donated_buffer=False):  # they outlive a backward
        return _differentiated(cell, of, forward)


def _added(cell: Cell, of: Operands) -> Tensor:
    """What a forward adds to x; nothing before a backward, so that its x is everybody's."""
    return torch.zeros_like(of.residual) if cell.family.is_backward else of.residual


def _normalized(cell: Cell, x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """PyTorch's norm; with a residual, of the sum, which is returned, too."""
    total = x + residual if cell.has_residual else x
    functional = torch.nn.functional
    norm: Any = functional.layer_norm if cell.family.centres else functional.rms_norm
    y = norm(total, cell.normalized_shape, *parameters, EPS)
    return (y, total) if cell.has_residual else (y,)


def _differentiated(cell: Cell, of: Operands, forward: Any) -> Call:
    """A forward, or its backward for given gradients of all its results."""
    if not cell.family.is_backward:
        parameters = (of.gamma, of.beta) if cell.family.centres else (of.gamma,)
        return lambda: forward(of.x, *parameters)
    leaves = of.leaves(cell)
    results = forward(*leaves)
    gradients = (of.dy, of.residual)[: len(results)]
    return lambda: torch.autograd.grad(results, leaves, gradients, retain_graph=True)
