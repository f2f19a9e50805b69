"""Copies an array of a GPU to NumPy, in the thread that opened the device and in another.

python to_host.py cuda
"""

import sys
import threading

import iree.runtime as rt
import numpy as np

device = rt.get_driver(sys.argv[1]).create_default_device()
array = rt.asdevicearray(
    device,
    np.arange(1000, dtype=np.float32),
    memory_type=rt.MemoryType.DEVICE_LOCAL,
    allowed_usage=rt.BufferUsage.DEFAULT,
)


def copy(thread: str) -> None:
    """Says what came of it."""
    try:
        copied = array.to_host()
    except RuntimeError as error:
        print(f"{thread}: {error}")
    else:
        print(f"{thread}: {copied[999]}")


copy("the thread that opened the device")
other = threading.Thread(target=copy, args=["another thread"])
other.start()
other.join()
