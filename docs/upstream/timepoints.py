"""Imports an event of CUDA's into a semaphore of a device, and exports one.

python timepoints.py cuda
"""

import sys

import iree.runtime as rt
from iree.runtime import _binding as binding

device = rt.get_driver(sys.argv[1]).create_default_device()
semaphore = device.create_semaphore(0)
event = binding.HalExternalTimepoint()
try:
    semaphore.import_timepoint(1, event)
except NotImplementedError as error:
    print(error)
try:
    semaphore.export_timepoint(1, binding.ExternalTimepointType.CUDA_EVENT, 0, event)
except NotImplementedError as error:
    print(error)
