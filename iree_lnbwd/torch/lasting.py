"""Operators that are registered as long as the process lasts."""

import weakref

import torch

from iree_lnbwd.torch.operator_table import NAMESPACE


def library(kind: str) -> torch.library.Library:
    """Where operators of ours are registered from Python.

    PyTorch would remove them as one of the last things that Python does at exit. What a program
    registered to be done at exit before it imported PyTorch comes after that: its norms, and with
    `enable` PyTorch's own, would find no operators.

    Args:
        kind: As ``torch.library.Library`` has it.
    """
    made = torch.library.Library(NAMESPACE, kind)
    for reference in weakref.getweakrefs(made):
        if isinstance(reference.__callback__, weakref.finalize):
            reference.__callback__.atexit = False
    return made
