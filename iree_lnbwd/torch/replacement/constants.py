"""Values that cannot change, and their keys.

What a forward reads from its module decides what it computes. Two modules of a class are of one
kind if all that it reads there is equal. Only of values of these types can that be told, and only
these stay what they are: nothing else is compared, printed or looked into, because a tensor may
have lost its memory, and an object may do anything.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Hashable

import numpy as np
import torch

ABSENT = object()  # in place of the value of an attribute that is not there

_IMMUTABLE = (
    type(None), bool, int, complex, str, bytes, type(...), type(NotImplemented), type(ABSENT),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class NotConstantError(Exception):
    """A value may change, or nothing tells whether it equals another."""


def key(value: object) -> Hashable:
    """What is equal for equal values of one type, and for no others.

    Raises:
        NotConstantError: The message is the value's type.
    """
    cls = type(value)
    if cls in _IMMUTABLE:
        return cls, value
    if isinstance(value, float) and cls is float:
        return cls, value.hex()  # zeros have a sign, and nan equals itself
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return cls, value.tobytes()
    if isinstance(value, tuple) and cls in (tuple, torch.Size):
        return cls, tuple(key(item) for item in value)
    if isinstance(value, frozenset) and cls is frozenset:
        return cls, frozenset(key(item) for item in value)
    if isinstance(value, (enum.Enum, np.dtype, *_OPERATORS)) or _is_code(value):
        return cls, id(value)  # there is one of each
    raise NotConstantError(cls.__name__)


def _is_code(value: object) -> bool:
    """Whether it is a function, or a type of Python's, that keeps nothing between its calls."""
    if isinstance(value, type):
        return value.__module__ == "builtins"
    if isinstance(value, types.FunctionType):
        kept = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        return not any(kept)
    return isinstance(value, types.BuiltinFunctionType) and (
        value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    )
