// What is read beside dy and x: other gradients of the output (gradients.mlir), or a gate (gate.mlir). A thread has its chunks
// of this row in registers, and those of the next row on their way. Where registers have no room for that, it loads a chunk
// when it is used: for the row's sums, and for dx, when the caches have it.

// What a NormSpec and a Schedule decide.
!dy = bf16
#chunks = 1 : index
#loads_late = false
!dy_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!more_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!more_chunk = vector<8x!dy>
!more_dy_held = memref<3x1x!more_chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!thread = vector<9xindex>

func.func private @load_more_chunk(!more_lines, !dy_lines, !dy_lines, index, i1, index, !thread, !more_dy_held)
// End of what is replaced.

// All chunks of a row, a step before their use.
func.func private @load_more(%more: !more_lines, %dy3: !dy_lines, %dy4: !dy_lines, %row: i32, %last: i32, %thread: !thread, %held: !more_dy_held) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #chunks
  %loads_late = arith.constant #loads_late
  %live = arith.cmpi sle, %row, %last : i32
  %row_in = arith.minsi %row, %last : i32
  %row_index = arith.index_castui %row_in : i32 to index
  scf.if %loads_late {
  } else {
    scf.for %k = %c0 to %chunks step %c1 {
      func.call @load_more_chunk(%more, %dy3, %dy4, %row_index, %live, %k, %thread, %held)
          : (!more_lines, !dy_lines, !dy_lines, index, i1, index, !thread, !more_dy_held) -> ()
    } {llvm.loop_annotation = #unrolled}
  }
  return
}

// Chunk k, when it is used.
func.func private @load_more_late(%more: !more_lines, %dy3: !dy_lines, %dy4: !dy_lines, %row: index, %has_row: i1, %k: index, %thread: !thread, %held: !more_dy_held) {
  %loads_late = arith.constant #loads_late
  scf.if %loads_late {
    func.call @load_more_chunk(%more, %dy3, %dy4, %row, %has_row, %k, %thread, %held)
        : (!more_lines, !dy_lines, !dy_lines, index, i1, index, !thread, !more_dy_held) -> ()
  }
  return
}
