"""The interface to a library whose arrays are on a GPU."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops.arguments import GpuArray


class Framework(Protocol):
    """How a library's arrays on a GPU are read and made.

    Attributes:
        waits: Whether a call must wait at its end, because the library does not order its later
            work after ours.
    """

    waits: bool

    def signature(self, names: Sequence[str], arrays: Sequence[Any]) -> Hashable:
        """All that `describe` depends on, and whose arrays these are, found at little cost.

        Args:
            names: The names of the arrays, for messages.
            arrays: A call's arguments in the order of the op's table, and then its storage, if any.

        Raises:
            TypeError, ValueError: As `describe`.
        """

    def describe(self, name: str, array: Any) -> GpuArray:
        """The shape, type and device of an array.

        Raises:
            TypeError: The array is not of this framework; the message names the argument.
            ValueError: It is on no GPU.
        """

    def addresses(self, arrays: Sequence[Any]) -> tuple[list[int], object]:
        """The addresses of arrays, and an object that keeps their memory while it is referenced."""

    def capsule(self, array: Any) -> object:
        """The array as a DLPack capsule."""

    def copy(self, name: str, array: Any) -> Any:
        """A contiguous copy of an array.

        Raises:
            ValueError: The library cannot make one; the message names the argument.
        """

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A new array on the device of another."""

    def empty_like(self, like: Any) -> Any:
        """A new array of another's shape and type, on its device."""

    def clear(self, array: Any) -> None:
        """Fills an array, the caller's or a new one, with zeros."""

    def assign(self, to: Any, array: Any) -> None:
        """Copies an array's elements to the caller's, of the same shape and type."""

    def is_captured(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def stream(self, device: DeviceUri) -> int:
        """The stream that the caller's work is on, as the driver's handle."""


def type_name(array: Any) -> str:
    """The name of an array's type, for messages."""
    return type(array).__name__
