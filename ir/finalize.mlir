// The last kernel of one_pass.mlir and of two_pass.mlir. It adds up partial rows of dgamma and dbeta, and of dx where its
// sum over rows is asked for, and rounds the sums once to the types of the caller's parameters.
//
// There are P partial rows of N columns. A workgroup has a few columns. Its threads divide the partial
// rows into slices, and each loads several rows at a time. A thread has one column. Where the weight has sets, it has up to
// four: sets may be many, and workgroups with fewer columns took long to start.

// What a NormSpec and a Schedule decide. These lines are replaced; the rest changes only by the rules
// of README.md.
!gamma = bf16
!beta = bf16
!acc = f32
#columns = 4096 : index
#cells = 1 : index  // columns of a thread
#width = 32 : index  // columns of a workgroup
#slices = 16 : index
#partials_at_once = 1 : index
#sums_dbeta = true   // there is a dbeta
#finalize_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [512, 1, 1] subgroup_size = 32>
!acc_rows = memref<?x4096x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!slices = memref<16x32x!acc, #gpu.address_space<workgroup>>
!shares = vector<16x1x!acc>  // of a column's sum, one from each slice
!gamma_cell = vector<1x!gamma>
!beta_cell = vector<1x!beta>
!cell = vector<1x!acc>
!sum = f32  // of a thread's columns: a cell, where the weight has sets
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
// The launch, as iree_lnbwd/vmfb/launches.py states it: the bindings, and the workgroups for M rows of x, the
// least number of a list.
#finalize_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // partial dgamma [P, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // partial dbeta [P, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // partial sum of dx over rows [P, N]
  #hal.pipeline.binding<storage_buffer>,            // dgamma [N]
  #hal.pipeline.binding<storage_buffer>,            // dbeta [N]
  #hal.pipeline.binding<storage_buffer>             // sum of dx over rows [N]
]>
#finalize_x = affine_map<()[m] -> (128)>
// End of what is replaced.

// with totals: !cell_held = memref<1x!acc, #gpu.address_space<private>>

hal.executable.source private @finalize {
  hal.executable.export public @finalize ordinal(0) layout(#finalize_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %x = affine.min #finalize_x()[%m]
    %one = arith.constant 1 : index
    hal.return %x, %one, %one : index, index, index
  }
  builtin.module {
    // From ir/math/.
    func.func private @round_of_gamma(!cell) -> !gamma_cell
    func.func private @round_of_beta(!cell) -> !beta_cell
    // with sets: func.func private @count_partial_rows(i32) -> index
    // with totals: func.func private @round_of_total(!cell) -> !total_cell

    func.func @finalize() attributes {translation_info = #finalize_kernel, nvvm.minctasm = 3 : i32} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %n = arith.constant #columns
      %width = arith.constant #width
      %slices = arith.constant #slices
      %rows_at_once = arith.constant #partials_at_once
      %zero = arith.constant 0.0 : !acc
      %zero_cell = arith.constant dense<0.0> : !cell
      %no_sum = arith.constant 0.0 : !sum  // without sets
      // with sets: %no_sum = arith.constant dense<0.0> : !sum
      %sums_dbeta = arith.constant #sums_dbeta
      %p_i32 = hal.interface.constant.load layout(#finalize_layout) ordinal(0) : i32
      %p = arith.index_castui %p_i32 : i32 to index  // without sets
      // with sets: %of_each_workgroup = arith.index_castui %p_i32 : i32 to index
      // with sets: %rows_per_set = hal.interface.constant.load layout(#finalize_layout) ordinal(2) : i32
      // with sets: %each = func.call @count_partial_rows(%rows_per_set) : (i32) -> index
      // with sets: %p = arith.muli %of_each_workgroup, %each : index
      // with sets: %set_width = arith.constant #width
      // with sets: %tiles = arith.ceildivui %n, %set_width : index
      // with sets: %id = hal.interface.workgroup.id[0] : index
      // with sets: %set = arith.divui %id, %tiles : index
      // with sets: %gamma_bytes = arith.constant #gamma_bytes
      // with sets: %gamma_at = arith.muli %set, %gamma_bytes : index
      // with sets: %beta_bytes = arith.constant #beta_bytes
      // with sets: %beta_at = arith.muli %set, %beta_bytes : index
      // with sets: %partial_bytes = arith.constant #acc_bytes
      // with sets: %set_bytes = arith.muli %p, %partial_bytes : index
      // with sets: %partials_at = arith.muli %set, %set_bytes : index
      %dgamma_partials = hal.interface.binding.subspan layout(#finalize_layout) binding(0) alignment(64) offset(%c0) flags(ReadOnly) : !acc_rows{%p}  // without sets
      // with sets: %dgamma_partials = hal.interface.binding.subspan layout(#finalize_layout) binding(0) alignment(64) offset(%partials_at) flags(ReadOnly) : !acc_rows{%p}
      %dbeta_partials = hal.interface.binding.subspan layout(#finalize_layout) binding(1) alignment(64) offset(%c0) flags(ReadOnly) : !acc_rows{%p}  // without sets
      // with sets: %dbeta_partials = hal.interface.binding.subspan layout(#finalize_layout) binding(1) alignment(64) offset(%partials_at) flags(ReadOnly) : !acc_rows{%p}
      %dgamma = hal.interface.binding.subspan layout(#finalize_layout) binding(3) alignment(64) offset(%c0) : !gamma_row  // without sets
      // with sets: %dgamma = hal.interface.binding.subspan layout(#finalize_layout) binding(3) alignment(64) offset(%gamma_at) : !gamma_row
      %dbeta = hal.interface.binding.subspan layout(#finalize_layout) binding(4) alignment(64) offset(%c0) : !beta_row  // without sets
      // with sets: %dbeta = hal.interface.binding.subspan layout(#finalize_layout) binding(4) alignment(64) offset(%beta_at) : !beta_row
      // with totals: %dx_partials = hal.interface.binding.subspan layout(#finalize_layout) binding(2) alignment(64) offset(%c0) flags(ReadOnly) : !acc_rows{%p}
      // with totals: %dx_total = hal.interface.binding.subspan layout(#finalize_layout) binding(5) alignment(64) offset(%c0) : !total_row

      %workgroup = hal.interface.workgroup.id[0] : index  // without sets
      // with sets: %workgroup = arith.remui %id, %tiles : index
      %thread = gpu.thread_id x
      %tx = arith.remui %thread, %width : index  // without sets
      %ty = arith.divui %thread, %width : index  // without sets
      // with sets: %cells = arith.constant #cells
      // with sets: %lanes = arith.divui %width, %cells : index
      // with sets: %lane = arith.remui %thread, %lanes : index
      // with sets: %tx = arith.muli %lane, %cells : index
      // with sets: %ty = arith.divui %thread, %lanes : index
      %tile = arith.muli %workgroup, %width : index
      %column = arith.addi %tile, %tx : index
      %inside = arith.cmpi ult, %column, %n : index
      %last_column = arith.subi %n, %c1 : index  // without sets
      // with sets: %last_column = arith.subi %n, %cells : index
      %column_in = arith.minui %column, %last_column : index

      // All rows of a step exist, so that their loads wait for nothing. The rest of the rows are added one
      // by one. Sets have few rows, so a step of theirs has what rows there are.
      %stride = arith.muli %slices, %rows_at_once : index
      %last_skips = arith.subi %stride, %slices : index  // without sets
      // with sets: %last_skips = arith.constant 0 : index
      %steps_end = arith.subi %p, %last_skips : index
      // with totals: %dx_sum = memref.alloca() : !cell_held
      // with totals: memref.store %zero, %dx_sum[%c0] : !cell_held
      %steps:3 = scf.for %i = %ty to %steps_end step %stride
          iter_args(%dgamma_step = %no_sum, %dbeta_step = %no_sum, %next = %ty) -> (!sum, !sum, index) {
        %dgamma_after, %dbeta_after = scf.for %k = %c0 to %rows_at_once step %c1
            iter_args(%dgamma_sum = %dgamma_step, %dbeta_sum = %dbeta_step) -> (!sum, !sum) {
          %skipped = arith.muli %k, %slices : index
          %row = arith.addi %i, %skipped : index
          // with sets: %is_there = arith.cmpi ult, %row, %p : index
          %dgamma_row = memref.load %dgamma_partials[%row, %column_in] : !acc_rows  // without sets
          // with sets: %dgamma_row = scf.if %is_there -> !sum {
          // with sets:   %dgamma_any = vector.load %dgamma_partials[%row, %column_in] : !acc_rows, !sum
          // with sets:   scf.yield %dgamma_any : !sum
          // with sets: } else {
          // with sets:   scf.yield %no_sum : !sum
          // with sets: }
          %dbeta_row = memref.load %dbeta_partials[%row, %column_in] : !acc_rows  // without sets
          // with sets: %dbeta_row = scf.if %is_there -> !sum {
          // with sets:   %dbeta_any = vector.load %dbeta_partials[%row, %column_in] : !acc_rows, !sum
          // with sets:   scf.yield %dbeta_any : !sum
          // with sets: } else {
          // with sets:   scf.yield %no_sum : !sum
          // with sets: }
          // with totals: %dx_row = memref.load %dx_partials[%row, %column_in] : !acc_rows
          // with totals: %dx_before = memref.load %dx_sum[%c0] : !cell_held
          // with totals: %dx_after = arith.addf %dx_before, %dx_row : !acc
          // with totals: memref.store %dx_after, %dx_sum[%c0] : !cell_held
          %dgamma_more = arith.addf %dgamma_sum, %dgamma_row : !sum
          %dbeta_more = arith.addf %dbeta_sum, %dbeta_row : !sum
          %dbeta_after = arith.select %sums_dbeta, %dbeta_more, %dbeta_sum : !sum
          scf.yield %dgamma_more, %dbeta_after : !sum, !sum
        } {llvm.loop_annotation = #unrolled}
        %after = arith.addi %i, %stride : index
        scf.yield %dgamma_after, %dbeta_after, %after : !sum, !sum, index
      }
      %sums:2 = scf.for %row = %steps#2 to %p step %slices
          iter_args(%dgamma_sum = %steps#0, %dbeta_sum = %steps#1) -> (!sum, !sum) {
        %dgamma_row = memref.load %dgamma_partials[%row, %column_in] : !acc_rows  // without sets
        // with sets: %dgamma_row = vector.load %dgamma_partials[%row, %column_in] : !acc_rows, !sum
        %dbeta_row = memref.load %dbeta_partials[%row, %column_in] : !acc_rows  // without sets
        // with sets: %dbeta_row = vector.load %dbeta_partials[%row, %column_in] : !acc_rows, !sum
        // with totals: %dx_row = memref.load %dx_partials[%row, %column_in] : !acc_rows
        // with totals: %dx_before = memref.load %dx_sum[%c0] : !cell_held
        // with totals: %dx_after = arith.addf %dx_before, %dx_row : !acc
        // with totals: memref.store %dx_after, %dx_sum[%c0] : !cell_held
        %dgamma_more = arith.addf %dgamma_sum, %dgamma_row : !sum
        %dbeta_more = arith.addf %dbeta_sum, %dbeta_row : !sum
        %dbeta_after = arith.select %sums_dbeta, %dbeta_more, %dbeta_sum : !sum
        scf.yield %dgamma_more, %dbeta_after : !sum, !sum
      }
      %dgamma_slices = memref.alloc() : !slices  // [slices, columns of the workgroup]
      %dbeta_slices = memref.alloc() : !slices   // likewise
      // with totals: %dx_slices = memref.alloc() : !slices
      memref.store %sums#0, %dgamma_slices[%ty, %tx] : !slices  // without sets
      // with sets: vector.store %sums#0, %dgamma_slices[%ty, %tx] : !slices, !sum
      // with totals: %dx_share = memref.load %dx_sum[%c0] : !cell_held
      // with totals: memref.store %dx_share, %dx_slices[%ty, %tx] : !slices
      scf.if %sums_dbeta {
        memref.store %sums#1, %dbeta_slices[%ty, %tx] : !slices  // without sets
        // with sets: vector.store %sums#1, %dbeta_slices[%ty, %tx] : !slices, !sum
      }
      gpu.barrier
      %first_slice = arith.cmpi eq, %ty, %c0 : index
      %adds_up = arith.andi %first_slice, %inside : i1
      scf.if %adds_up {
        %dgamma_shares = vector.transfer_read %dgamma_slices[%c0, %tx], %zero {in_bounds = [true, true]} : !slices, !shares
        %dbeta_shares = scf.if %sums_dbeta -> !shares {
          %read = vector.transfer_read %dbeta_slices[%c0, %tx], %zero {in_bounds = [true, true]} : !slices, !shares
          scf.yield %read : !shares
        } else {
          %none = arith.constant dense<0.0> : !shares
          scf.yield %none : !shares
        }
        %dgamma_sum = vector.multi_reduction <add>, %dgamma_shares, %zero_cell [0] : !shares to !cell
        %dbeta_sum = vector.multi_reduction <add>, %dbeta_shares, %zero_cell [0] : !shares to !cell
        %dgamma_cell = func.call @round_of_gamma(%dgamma_sum) : (!cell) -> !gamma_cell
        %dbeta_cell = func.call @round_of_beta(%dbeta_sum) : (!cell) -> !beta_cell
        vector.store %dgamma_cell, %dgamma[%column] : !gamma_row, !gamma_cell
        // with totals: %dx_shares = vector.transfer_read %dx_slices[%c0, %tx], %zero {in_bounds = [true, true]} : !slices, !shares
        // with totals: %dx_all = vector.multi_reduction <add>, %dx_shares, %zero_cell [0] : !shares to !cell
        // with totals: %total_cell = func.call @round_of_total(%dx_all) : (!cell) -> !total_cell
        // with totals: vector.store %total_cell, %dx_total[%column] : !total_row, !total_cell
        scf.if %sums_dbeta {
          vector.store %dbeta_cell, %dbeta[%column] : !beta_row, !beta_cell
        }
      }
      return
    }
  }
}
