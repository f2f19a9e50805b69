"""What a call needs of a library whose arrays are on a GPU."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from iree_lnbwd.arguments import GpuArray
from iree_lnbwd.devices import DeviceUri


class Framework(Protocol):
    """How a library's arrays on a GPU are read and made.

    Attributes:
        waits: Whether its later work would not know of ours, so that a call must wait at its end.
    """

    waits: bool

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """All that `describe` depends on, whose arrays they are, and whether it would refuse.

        It costs little.

        Args:
            arrays: A call's arguments in ATen's order, and behind them its storage, if it has any.

        Raises:
            TypeError, ValueError: As `describe`.
        """

    def describe(self, name: str, array: Any) -> GpuArray:
        """Shape, type and place.

        Raises:
            TypeError: The array is none of this framework's, naming the argument.
            ValueError: It is on no GPU.
        """

    def addresses(self, arrays: Sequence[Any]) -> tuple[list[int], object]:
        """Where their elements are, and what keeps them there as long as it is referenced."""

    def capsule(self, array: Any) -> object:
        """The array as a DLPack capsule."""

    def copy(self, name: str, array: Any) -> Any:
        """The values of an array, in memory of their own, one after the other.

        Raises:
            ValueError: The library cannot, naming the argument.
        """

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A new array on the device of another."""

    def empty_like(self, like: Any) -> Any:
        """A new array of another's shape and type, on its device."""

    def clear(self, array: Any) -> None:
        """Fills an array that is the caller's, or new, with zeros."""

    def is_captured(self) -> bool:
        """Whether the current stream's work goes into a graph, to be run later."""

    def stream(self, device: DeviceUri) -> int:
        """The stream that the caller's work is on, as the driver's handle."""


def type_name(array: Any) -> str:
    """Of an array's type, for messages."""
    return type(array).__name__
