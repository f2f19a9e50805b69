"""Copies small arrays of a GPU to NumPy, again and again, until CUDA refuses.

python to_host.py cuda
"""

import sys

import iree.runtime as rt
import numpy as np

COPIES = 100_000
device = rt.get_driver(sys.argv[1]).create_default_device()
arrays = [
    rt.asdevicearray(
        device,
        np.full(1000 + n, n, np.float32),
        memory_type=rt.MemoryType.DEVICE_LOCAL,
        allowed_usage=rt.BufferUsage.DEFAULT,
    )
    for n in range(64)
]
for n in range(COPIES):
    try:
        copied = arrays[n % len(arrays)].to_host()
    except RuntimeError as error:
        print(f"copy {n}: {error}")
        break
    assert copied[0] == n % len(arrays)
else:
    print(f"{COPIES} copies")
