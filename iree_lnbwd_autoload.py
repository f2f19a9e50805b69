"""What PyTorch calls at the end of ``import torch``, by the entry point in ``pyproject.toml``.

It is a module of its own, because it is imported in every process that imports PyTorch: it costs
nothing unless ``IREE_LNBWD_ENABLE`` is set.
"""

import os

VARIABLE = "IREE_LNBWD_ENABLE"


def load() -> None:
    """`iree_lnbwd.torch.enable`, if the variable is "1"; with ``forwards``, if it is "forwards".

    It raises nothing: ``import torch`` would fail.
    """
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):
        return
    try:
        if value not in ("1", "forwards"):
            raise ValueError(f"{VARIABLE}: expected 1, forwards, 0 or nothing, got {value!r}")
        # The package may be why PyTorch is imported: its `torch` has neither of them yet.
        from iree_lnbwd.torch import (
            operators,  # noqa: F401  (registers those that C++ looks up)
            overrides,
        )

        overrides.enable(forwards=value == "forwards")
    except Exception as error:
        import logging

        logging.getLogger(__name__).warning("PyTorch's own kernels stay: %s", error)
