// The sum of a subgroup's elements, in each of its threads. TYPE and CLUSTER stand for what is tried.
#layout = #hal.pipeline.layout<bindings = [#hal.pipeline.binding<storage_buffer>]>
#kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [32, 1, 1] subgroup_size = 32>

hal.executable.source private @sums {
  hal.executable.export public @sum ordinal(0) layout(#layout)
      count(%device: !hal.device) -> (index, index, index) {
    %one = arith.constant 1 : index
    hal.return %one, %one, %one : index, index, index
  }
  builtin.module {
    func.func @sum() attributes {translation_info = #kernel} {
      %c0 = arith.constant 0 : index
      %thread = gpu.thread_id x
      %data = hal.interface.binding.subspan layout(#layout) binding(0) offset(%c0) : memref<32xTYPE, #hal.descriptor_type<storage_buffer>>
      %mine = memref.load %data[%thread] : memref<32xTYPE, #hal.descriptor_type<storage_buffer>>
      %sum = gpu.subgroup_reduce add %mine CLUSTER : (TYPE) -> TYPE
      memref.store %sum, %data[%thread] : memref<32xTYPE, #hal.descriptor_type<storage_buffer>>
      return
    }
  }
}

func.func @f(%x: tensor<32xTYPE>) -> tensor<32xTYPE> {
  %y = flow.dispatch @sums::@sum(%x) : (tensor<32xTYPE>) -> %x
  return %y : tensor<32xTYPE>
}
