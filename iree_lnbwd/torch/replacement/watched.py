"""Modules that note which of their attributes their forward reads."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from iree_lnbwd.torch.replacement import constants

OF_ANY_MODULE = frozenset(vars(nn.Module()))
_NOTES = "_iree_lnbwd_notes"  # the attribute of a watched module


class NotPlainError(Exception):
    """A module computes no norm that this package has; the message says why."""


class Notes:
    """What the forward of a module, and of its copies, has read.

    Attributes:
        read: The names of attributes, also of those that are not there. Those that any module has
            are left out.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self._is_on = False

    @contextlib.contextmanager
    def taken(self, on: bool = True) -> Iterator[None]:
        """Whether notes are taken within the block."""
        before, self._is_on = self._is_on, on
        try:
            yield
        finally:
            self._is_on = before

    def add_read(self, cls: type, attributes: dict[str, Any], name: str) -> None:
        """Raises `NotPlainError` if an attribute of a module can change without notice."""
        if not self._is_on or name in OF_ANY_MODULE:
            return
        if name == "__dict__":
            raise NotPlainError("its forward reads all of its attributes")
        self.read.add(name)
        try:
            constants.key(attributes.get(name, _of_class(cls, name)))
        except constants.NotConstantError as error:
            raise NotPlainError(
                f"its forward reads {name}, which may change: it is of type {error}"
            ) from error

    def add_written(self, name: str) -> None:
        """Raises `NotPlainError`: a norm has no state."""
        if self._is_on and name not in OF_ANY_MODULE:
            raise NotPlainError(f"its forward sets {name}")


class Watched(nn.Module):
    """What is ours of the class of a watched module; the module's own class comes after it."""

    def __init_subclass__(cls) -> None:
        """The own class, which may keep a register of its subclasses, is not told."""

    def __getattribute__(self, name: str) -> Any:
        """Notes the name."""
        attributes = object.__getattribute__(self, "__dict__")
        if (notes := attributes.get(_NOTES)) is not None:
            notes.add_read(type(self), attributes, name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        """Of a parameter; what PyTorch reads to find it is not noted."""
        with notes_of(self).taken(False):
            return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Notes the name."""
        notes_of(self).add_written(name)
        with notes_of(self).taken(False):
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Notes the name."""
        notes_of(self).add_written(name)
        with notes_of(self).taken(False):
            super().__delattr__(name)


def _of_class(cls: type, name: str) -> object:
    """The value that a class has of an attribute; `ABSENT` for methods, properties and the like."""
    value = inspect.getattr_static(cls, name, constants.ABSENT)
    return constants.ABSENT if hasattr(value, "__get__") else value


def watched_class(own: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a class whose modules take notes.

    Raises:
        NotPlainError: The class finds attributes in its own way, or has no subclasses.
    """
    for name in ("__getattribute__", "__getattr__", "__setattr__", "__delattr__"):
        if getattr(own, name) is not getattr(nn.Module, name):
            raise NotPlainError(f"its class has its own {name}")
    same = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    try:
        return type(own.__name__, (Watched, own), same)
    except Exception as error:  # code that is not ours
        raise NotPlainError(f"its class cannot have a subclass: {type(error).__name__}") from error


def notes_of(module: nn.Module) -> Notes:
    """Of a watched module; new ones if it has none."""
    notes: Notes = object.__getattribute__(module, "__dict__").setdefault(_NOTES, Notes())
    return notes
