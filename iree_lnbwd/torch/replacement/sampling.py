"""How a module is sampled: random rows and parameters, and what its forward returns for them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from iree_lnbwd.torch.replacement.classes import stand_in
from iree_lnbwd.torch.replacement.form import Form
from iree_lnbwd.torch.replacement.watched import NotPlainError, notes_of

# Of the rows: from much above to much below each eps that is usual, by its root.
_SCALES = (1.0, 4.0, 0.25, 1e-2, 1e-3, 1e-4, 1e-6, 0.0, 64.0, 1.0, 0.5, 0.0)
_MEANS = (0.0, 1.0, -0.5, 0.0, 1e-3, 0.0, 0.0, 0.25, -8.0, 4.0, 0.0, 0.0)
ZEROS = len(_SCALES) - 1  # the row that is zero
_OUTLIER = 10  # the row that has one
_FAR = 1000.0  # an outlier, in units of its row
# Of the gates: each makes silu nearly linear, as it is, or nearly nothing.
_GATE_SCALES = (1.0, 2.0, 8.0, 1e-3, 1.0, 4.0, 0.1, 1.0, 1.0, 16.0, 3.0, 0.0)
_MOST_OF_A_GATE = 60.0  # beyond, the exponential is infinite in f32 in some formulas of silu
# As images, volumes and sequences have, in the order that they are tried in.
_LEADING: tuple[tuple[int, ...], ...] = ((2, 3, 2), (2, 3, 2, 1), (4, 3))
_WEIGHTS = (-3.0, 300.0, 0.0)  # the first ones of a sample
RAISED = "its forward raised"
OTHER_SHAPE = "its output is no tensor of the input's shape"


class Sample:
    """Random rows and parameters for a module, and the module with these parameters.

    Attributes:
        rows: [rows, *normalized_shape].
        gates: As ``rows``; None if the form has no gate.
        module: A copy, with random parameters.
    """

    gates: Tensor | None = None

    def __init__(
        self,
        module: nn.Module,
        form: Form,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        gate_dtype: torch.dtype | None = None,
        scales: Sequence[float] = (),
    ) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._form = form
        made = {name: self._made(module, name, vector, weight_dtype or dtype)
                for name, vector in {**module._parameters, **module._buffers}.items()}  # fmt: skip
        self.module = stand_in(module, type(module), made)
        rows = self.random(len(_SCALES), *form.normalized_shape)
        if scales:
            self.rows = rows * self._column([scales[i % len(scales)] for i in range(len(rows))])
        else:
            rows = rows * self._column(_SCALES) + self._column(_MEANS)
            rows[_OUTLIER].view(-1)[-1] *= _FAR
            self.rows = rows.to(dtype)
        if form.gate is not None:
            gates = self.random(*rows.shape) * self._column(_GATE_SCALES)
            self.gates = gates.clamp(-_MOST_OF_A_GATE, _MOST_OF_A_GATE).to(gate_dtype or dtype)

    def _column(self, values: Sequence[float]) -> Tensor:
        ones = (1 for _ in self._form.normalized_shape)
        return torch.tensor(values, dtype=torch.float32).reshape(-1, *ones)

    def _made(
        self, module: nn.Module, name: str, vector: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """In place of a parameter or a buffer."""
        if vector is None:
            return None
        values = torch.randn(vector.shape, generator=self._generator, dtype=torch.float32) + 0.5
        if vector.numel() > len(_WEIGHTS):
            values.view(-1)[: len(_WEIGHTS)] = torch.tensor(_WEIGHTS)
        if name in module._buffers:
            return values.to(dtype)
        return nn.Parameter(values.to(dtype), requires_grad=vector.requires_grad)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers in f32."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float32)

    def inputs(
        self, leading: Sequence[int] | None = None, *, turned: bool = False
    ) -> tuple[Tensor, ...]:
        """The rows, and the gates, as the module takes them: with other dimensions, too.

        Args:
            leading: These dimensions; None means those that the module is sure to take.
            turned: Whether they lie in another order in memory: those of images channels last.
        """
        leading = _leading(self._form) if leading is None else leading
        given = (self.rows,) if self.gates is None else (self.rows, self.gates)
        return tuple(self._arranged(each, leading, turned) for each in given)

    def _arranged(self, rows: Tensor, leading: Sequence[int], turned: bool) -> Tensor:
        x = rows.reshape(*leading, *self._form.normalized_shape) if leading else rows[0]
        if self._form.channels_first and leading:
            x = x.movedim(-1, 1)
            return x.clone() if turned else x.contiguous()
        return x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x.clone()

    def output(
        self,
        leading: Sequence[int] | None = None,
        *,
        turned: bool = False,
        training: bool = True,
    ) -> Tensor:
        """Of the module, without its hooks, for `inputs`."""
        with torch.no_grad():
            return run(self.module.train(training), *self.inputs(leading, turned=turned))


def run(module: nn.Module, input: Tensor, *gate: Tensor) -> Tensor:
    """What a module's forward returns.

    Raises:
        NotPlainError: It raised an error, or returned something else than a tensor of that shape.
    """
    forward = module.forward
    read = (input, *gate, *vectors_of(module).values())
    versions = [tensor._version for tensor in read]
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=()),
            notes_of(module).taken(),
        ):
            warnings.simplefilter("ignore")  # of types that are slow together
            output = forward(input, *gate)
    except Exception as error:  # code that is not ours
        # torch.compile puts another error around ours, or adds lines to it.
        notes = (e for e in (error, error.__context__) if isinstance(e, NotPlainError))
        if (noted := next(notes, None)) is not None:
            raise NotPlainError(str(noted).splitlines()[0]) from error
        said = str(error).strip().splitlines() or [""]
        raise NotPlainError(f"{RAISED} {type(error).__name__}: {said[0][:120]}") from error
    if not isinstance(output, Tensor) or output.shape != input.shape:
        raise NotPlainError(OTHER_SHAPE)
    if versions != [tensor._version for tensor in read]:
        raise NotPlainError("its forward changes its input or its parameters")
    return output


def as_rows(tensor: Tensor, form: Form) -> Tensor:
    """[rows, *normalized_shape] of an input or an output."""
    if form.channels_first:
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(-1, *form.normalized_shape)


def input_shape(form: Form) -> tuple[int, ...]:
    """Of a sample's input."""
    dims, leading = form.normalized_shape, _leading(form)
    return (leading[0], *dims, *leading[1:]) if form.channels_first else (*leading, *dims)


def _leading(form: Form) -> tuple[int, ...]:
    """The dimensions of a sample's input other than the normalized ones."""
    of_ranks = {len(leading) + len(form.normalized_shape): leading for leading in _LEADING}
    return next(of_ranks[rank] for rank in of_ranks if form.ranks is None or rank in form.ranks)


def vectors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a stand-in has, by name."""
    every = {**module._parameters, **module._buffers}
    return {name: vector for name, vector in every.items() if vector is not None}
