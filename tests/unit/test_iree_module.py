"""Memory of IREE's devices."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support import random_generator

from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.runtime import iree_module


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_sent_to_a_device_comes_back(dtype: type) -> None:
    """By the copies that GPUs get; they work on any device."""
    memory = iree_module._DeviceMemory(iree_module.open_device(DeviceUri.parse(DEFAULT_DEVICE)))
    sent: Array = random_generator().standard_normal((37, 1001)).astype(dtype)
    received = np.empty_like(sent)
    memory.receive(memory.send(sent), received)
    assert received.tobytes() == sent.tobytes()
