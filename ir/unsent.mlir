// What is there before the workgroups of one_pass.mlir post sums of rows in memory (parts/sums/memory.mlir).
//
// There are M rows of a few words. A workgroup has some rows, whose words follow each other.

// What a NormSpec and a Schedule decide. These lines are replaced; the rest changes only by the rules
// of README.md.
#posted_words = 8 : index    // of a row
#unsent_rows = 128 : index   // of a workgroup
#unsent_threads = 256 : index
#unsent_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [256, 1, 1] subgroup_size = 32>
!posted = memref<?x8xi64, #hal.descriptor_type<storage_buffer>>
// The launch, as iree_lnbwd/vmfb/launches.py states it: the binding, and the workgroups for M rows, the
// least number of a list.
#unsent_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer>             // posted sums [M, words]
]>
#unsent_x = affine_map<()[m] -> (m ceildiv 128)>
// End of what is replaced.

hal.executable.source private @unsent {
  hal.executable.export public @unsent ordinal(0) layout(#unsent_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %x = affine.min #unsent_x()[%m]
    %one = arith.constant 1 : index
    hal.return %x, %one, %one : index, index, index
  }
  builtin.module {
    // From ir/math/.
    func.func private @unsent_word() -> i64

    func.func @unsent() attributes {translation_info = #unsent_kernel} {
      %c0 = arith.constant 0 : index
      %words = arith.constant #posted_words
      %rows = arith.constant #unsent_rows
      %threads = arith.constant #unsent_threads
      %m_i32 = hal.interface.constant.load layout(#unsent_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %posted = hal.interface.binding.subspan layout(#unsent_layout) binding(0) alignment(64) offset(%c0) : !posted{%m}
      %workgroup = hal.interface.workgroup.id[0] : index
      %t = gpu.thread_id x
      %word = func.call @unsent_word() : () -> i64
      %row_first = arith.muli %workgroup, %rows : index
      %row_after = arith.addi %row_first, %rows : index
      %row_end = arith.minui %row_after, %m : index
      %before = arith.muli %row_first, %words : index
      %first = arith.addi %before, %t : index
      %end = arith.muli %row_end, %words : index
      scf.for %i = %first to %end step %threads {
        %row = arith.divui %i, %words : index
        %which = arith.remui %i, %words : index
        memref.store %word, %posted[%row, %which] : !posted
      }
      return
    }
  }
}
