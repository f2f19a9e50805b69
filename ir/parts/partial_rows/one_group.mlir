// A workgroup's sums of columns to its partial rows of dgamma and dbeta, and of dx where its sum is asked for. It has one group.

// What a NormSpec and a Schedule decide.
!acc = f32
#chunks = 1 : index
#sums_dbeta = true
!acc_rows = memref<?x4096x!acc, #hal.descriptor_type<storage_buffer>>
!dy_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!chunk = vector<8x!acc>
!held = memref<1x!chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!thread = vector<9xindex>

func.func private @my_part(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @store_sums(!acc_rows, index, index, index, index, !chunk)
// End of what is replaced.

func.func private @store_partial_row(%thread: !thread, %workgroup: index, %dgamma_sums: !held, %dbeta_sums: !held, %dy_bytes: !dy_bytes, %dgamma_partials: !acc_rows, %dbeta_partials: !acc_rows) {  // without totals
// with totals: func.func private @store_partial_row(%thread: !thread, %workgroup: index, %dgamma_sums: !held, %dbeta_sums: !held, %dx_sums: !held, %dy_bytes: !dy_bytes, %dgamma_partials: !acc_rows, %dbeta_partials: !acc_rows, %dx_partials: !acc_rows) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #chunks
  %sums_dbeta = arith.constant #sums_dbeta
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  scf.for %k = %c0 to %chunks step %c1 {
    %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
    %at = arith.addi %part, %col : index
    %dgamma_k = memref.load %dgamma_sums[%k] : !held
    %dbeta_k = memref.load %dbeta_sums[%k] : !held
    // with totals: %dx_k = memref.load %dx_sums[%k] : !held
    scf.if %inside {
      func.call @store_sums(%dgamma_partials, %workgroup, %k, %at, %shift, %dgamma_k)
          : (!acc_rows, index, index, index, index, !chunk) -> ()
      // with totals: func.call @store_sums(%dx_partials, %workgroup, %k, %at, %shift, %dx_k)
      // with totals:     : (!acc_rows, index, index, index, index, !chunk) -> ()
      scf.if %sums_dbeta {
        func.call @store_sums(%dbeta_partials, %workgroup, %k, %at, %shift, %dbeta_k)
            : (!acc_rows, index, index, index, index, !chunk) -> ()
      }
    }
  } {llvm.loop_annotation = #unrolled}
  return
}
