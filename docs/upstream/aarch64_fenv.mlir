// Sets IEEE's floating-point rules for a kernel, which IREE's threads do not have: they flush subnormal numbers.
#layout = #hal.pipeline.layout<bindings = [#hal.pipeline.binding<storage_buffer>]>

hal.executable.source private @sums {
  hal.executable.export public @doubled ordinal(0) layout(#layout)
      count(%device: !hal.device) -> (index, index, index) {
    %one = arith.constant 1 : index
    hal.return %one, %one, %one : index, index, index
  }
  builtin.module {
    func.func @doubled() attributes {translation_info = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline>} {
      %c0 = arith.constant 0 : index
      %before = llvm.call_intrinsic "llvm.get.fpenv"() : () -> i256
      llvm.call_intrinsic "llvm.reset.fpenv"() : () -> ()
      %data = hal.interface.binding.subspan layout(#layout) binding(0) offset(%c0) : memref<1xf32, #hal.descriptor_type<storage_buffer>>
      %x = memref.load %data[%c0] : memref<1xf32, #hal.descriptor_type<storage_buffer>>
      %y = arith.addf %x, %x : f32
      memref.store %y, %data[%c0] : memref<1xf32, #hal.descriptor_type<storage_buffer>>
      llvm.call_intrinsic "llvm.set.fpenv"(%before) : (i256) -> ()
      return
    }
  }
}

func.func @doubled(%x: tensor<1xf32>) -> tensor<1xf32> {
  %y = flow.dispatch @sums::@doubled(%x) : (tensor<1xf32>) -> %x
  return %y : tensor<1xf32>
}
