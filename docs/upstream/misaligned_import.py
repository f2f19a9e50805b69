"""Doubles 64 numbers in host memory, OFFSET bytes past a multiple of 64 bytes.

0 works, and 4 ends the process.

python misaligned_import.py OFFSET
"""

import sys

import iree.runtime as rt
import numpy as np
from iree.compiler.tools import compile_str

DOUBLED = """
func.func @doubled(%x: tensor<64xf32>) -> tensor<64xf32> {
  %y = arith.addf %x, %x : tensor<64xf32>
  return %y : tensor<64xf32>
}
"""
FLAGS = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)
vmfb = compile_str(DOUBLED, input_type="none", extra_args=FLAGS)
instance = rt.VmInstance()
device = rt.get_driver("local-sync").create_default_device()
module = rt.VmModule.copy_buffer(instance, vmfb)
context = rt.VmContext(instance, modules=[rt.create_hal_module(instance, device), module])

storage = np.zeros(64 * 4 + 128, np.uint8)
start = -storage.ctypes.data % 64 + int(sys.argv[1])
x = storage[start : start + 64 * 4].view(np.float32)
x[:] = 1
buffer = device.allocator.import_host_allocation(
    x,
    memory_type=int(rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE),
    allowed_usage=int(rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING),
)
print("imported", flush=True)
arguments, results = rt.VmVariantList(1), rt.VmVariantList(1)
arguments.push_ref(rt.HalBufferView(buffer, (64,), rt.HalElementType.FLOAT_32))
context.invoke(module.lookup_function("doubled"), arguments, results)
view = results.get_as_object(0, rt.HalBufferView)
print(rt.DeviceArray(device, view).to_host()[0])
