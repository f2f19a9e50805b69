"""The samples of PyTorch's OpInfos of norms, as a table.

torch/testing/_internal/common_methods_invocations.py has them; it needs more than PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from support import random_generator
from torch import Tensor

# Input shape, normalized shape, eps; 0 stands for the default.
_CASES = [
    ((1, 2, 3), (1, 2, 3), 0.5),
    ((2, 2, 3), (2, 3), -0.5),
    ((1,), (1,), 0.0),
    ((1, 2), (2,), 0.0),
    ((0, 1), (1,), 0.0),
]
_BARE = ((1, 2), (2,), 0.0)  # without parameters
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "native_layer_norm": torch.native_layer_norm,
    "nn.functional.layer_norm": torch.nn.functional.layer_norm,
    "nn.functional.rms_norm": torch.nn.functional.rms_norm,
}
NATIVE, LAYER_NORM, RMS_NORM = FUNCTIONS


class Sample(NamedTuple):
    """The arguments of a function.

    Attributes:
        name: The OpInfo's.
        shape: Of the input.
        dims: The trailing dimensions, that are normalized.
        eps: None for the default.
        parameters: Whether there is a weight, and a bias.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    eps: float | None
    parameters: tuple[bool, bool]

    def __str__(self) -> str:
        given = "".join(
            letter for letter, there in zip("wb", self.parameters, strict=True) if there
        )
        shape = "x".join(map(str, self.shape))
        return f"{self.name.rpartition('.')[2]}-{shape}-{len(self.dims)}-{given}"

    @property
    def is_a_number(self) -> bool:
        """Whether no root of a negative number is taken."""
        return self.eps is None or self.eps > 0

    @property
    def given_eps(self) -> float | None:
        """What the operator gets; None as in ``rms_norm``."""
        return 1e-5 if self.eps is None and self.name != RMS_NORM else self.eps

    def tensors(self, dtype: torch.dtype, device: str, batch: tuple[int, ...] = ()) -> list[Tensor]:
        """Those that it differentiates by: input, and weight and bias where they are there."""
        torch.manual_seed(int(random_generator().integers(2**62)))
        high = {"high": 1000} if self.name == RMS_NORM else {}
        shapes = itertools.compress((self.dims, self.dims), self.parameters)
        return [
            torch.testing.make_tensor(shape, dtype=dtype, device=device, requires_grad=True, **high)
            for shape in ((*batch, *self.shape), *shapes)
        ]

    def __call__(self, input: Tensor, *given: Tensor) -> Any:
        """What the function returns of these tensors."""
        rest = iter(given)
        parameters = [next(rest) if there else None for there in self.parameters]
        if self.name == RMS_NORM:
            parameters.pop()
        return FUNCTIONS[self.name](input, self.dims, *parameters, self.given_eps)


def _of(name: str, case: tuple[Any, Any, float], weight: bool, bias: bool) -> Sample:
    shape, dims, eps = case
    return Sample(name, shape, dims, eps or None, (weight, bias))


SAMPLES = [
    *(
        _of(NATIVE, case, weight, bias)
        for case in _CASES
        for weight, bias in ((True, True), (False, True), (True, False), (False, False))
    ),
    *(_of(LAYER_NORM, case, True, True) for case in _CASES),
    _of(LAYER_NORM, _BARE, False, False),
    *(_of(RMS_NORM, case, True, False) for case in _CASES),
    _of(RMS_NORM, _BARE, False, False),
]
