// A gate, in place of other gradients of the output: the same functions, and what only a gate has. more.mlir says when it
// is loaded.

// What a NormSpec and a Schedule decide.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!z = bf16
!acc = f32
#vector = 8 : index
#gates_first = false
!dy_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!more_lines = memref<?x4096x!z, #hal.descriptor_type<storage_buffer>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
!z_chunk = vector<8x!z>
!beta_chunk = vector<8x!beta>
!chunk = vector<8x!acc>
!more_dy_held = memref<3x1x!z_chunk, #gpu.address_space<private>>  // one is used
!thread = vector<9xindex>
!begin = vector<4xindex>
!weight_room = memref<1x4096x!gamma, #gpu.address_space<workgroup>>
!bias_room = memref<1x!beta_chunk, #gpu.address_space<private>>
!dy_room = memref<3x1x4096x!dy, #gpu.address_space<workgroup>>
!x_room = memref<3x1x4096x!x, #gpu.address_space<workgroup>>

func.func private @load_cells_of_z(!more_lines, index, index, index, index, i1, index) -> !z_chunk
func.func private @my_part(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @is_whole(index, index, index) -> i1
func.func private @span(index, index, index) -> (index, index)
func.func private @is_within(index, index, index) -> i1
func.func private @cell_address(index, index, index) -> (index, index)
func.func private @fetched_chunk(index, !thread, !begin, i1, i1, !dy_room, !x_room) -> (!dy_chunk, !x_chunk)
func.func private @chunk_weight(index, !thread, !weight_room) -> !chunk
func.func private @chunk_bias(index, !thread, !bias_room) -> !chunk
func.func private @widen_of_dy(!dy_chunk) -> !chunk
func.func private @widen_of_x(!x_chunk) -> !chunk
func.func private @widen_of_z(!z_chunk) -> !chunk
func.func private @silu_of_z(!chunk) -> (!chunk, !chunk)
func.func private @gated_gradient(!chunk, !chunk) -> !chunk
func.func private @gated_input(!chunk, !chunk) -> !chunk
func.func private @gated_dx(!chunk, !chunk) -> !chunk
func.func private @y(!chunk, !chunk, !chunk) -> !chunk
func.func private @dz(!chunk, !chunk, !chunk) -> !chunk
// End of what is replaced.

// Chunk k of a row of z. What is not of the row is zeros.
func.func private @load_more_chunk(%z: !more_lines, %dy3: !dy_lines, %dy4: !dy_lines, %row: index, %has_row: i1, %k: index, %thread: !thread, %held: !more_dy_held) {
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %c0 = arith.constant 0 : index
  %zeros = arith.constant dense<0.0> : !z_chunk
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %exists = arith.andi %inside, %has_row : i1
  %read = func.call @load_cells_of_z(%z, %row, %k, %part, %col, %exists, %shift)
      : (!more_lines, index, index, index, index, i1, index) -> !z_chunk
  %own = arith.select %exists, %read, %zeros : !z_chunk
  memref.store %own, %held[%c0, %k] : !more_dy_held
  return
}

// silu(z) of chunk k, and its derivative.
func.func private @chunk_silu(%held: !more_dy_held, %k: index) -> (!chunk, !chunk) {
  %c0 = arith.constant 0 : index
  %z_k = memref.load %held[%c0, %k] : !more_dy_held
  %za = func.call @widen_of_z(%z_k) : (!z_chunk) -> !chunk
  %silu, %slope = func.call @silu_of_z(%za) : (!chunk) -> (!chunk, !chunk)
  return %silu, %slope : !chunk, !chunk
}

// The gradient of the norm's output, of chunk k.
func.func private @summed_dy(%dy: !dy_chunk, %held: !more_dy_held, %k: index) -> !chunk {
  %dya = func.call @widen_of_dy(%dy) : (!dy_chunk) -> !chunk
  %silu, %slope = func.call @chunk_silu(%held, %k) : (!more_dy_held, index) -> (!chunk, !chunk)
  %dn = func.call @gated_gradient(%dya, %silu) : (!chunk, !chunk) -> !chunk
  return %dn : !chunk
}

// What is normalized, of chunk k.
func.func private @gated_x(%x: !chunk, %held: !more_dy_held, %k: index) -> !chunk {
  %silu, %slope = func.call @chunk_silu(%held, %k) : (!more_dy_held, index) -> (!chunk, !chunk)
  %v = func.call @gated_input(%x, %silu) : (!chunk, !chunk) -> !chunk
  return %v : !chunk
}

// dx and dz of chunk k, from the norm's gradient of what it normalized. dy and x are where the row was fetched.
func.func private @gate_gradients(%k: index, %thread: !thread, %where: !begin, %has_row: i1, %dv: !chunk, %xhat: !chunk, %dy_rows: !dy_room, %x_rows: !x_room, %held: !more_dy_held, %weight: !weight_room, %bias: !bias_room) -> (!chunk, !chunk) {
  %gates_first = arith.constant #gates_first
  %yes = arith.constant true
  %silu, %slope = func.call @chunk_silu(%held, %k) : (!more_dy_held, index) -> (!chunk, !chunk)
  %dy_k, %x_k = func.call @fetched_chunk(%k, %thread, %where, %has_row, %yes, %dy_rows, %x_rows)
      : (index, !thread, !begin, i1, i1, !dy_room, !x_room) -> (!dy_chunk, !x_chunk)
  %dya = func.call @widen_of_dy(%dy_k) : (!dy_chunk) -> !chunk
  %xa = func.call @widen_of_x(%x_k) : (!x_chunk) -> !chunk
  %ga = func.call @chunk_weight(%k, %thread, %weight) : (index, !thread, !weight_room) -> !chunk
  %b = func.call @chunk_bias(%k, %thread, %bias) : (index, !thread, !bias_room) -> !chunk
  %n = func.call @y(%xhat, %ga, %b) : (!chunk, !chunk, !chunk) -> !chunk
  %dy_or_x = arith.select %gates_first, %xa, %dya : !chunk
  %n_or_dv = arith.select %gates_first, %dv, %n : !chunk
  %dz = func.call @dz(%dy_or_x, %slope, %n_or_dv) : (!chunk, !chunk, !chunk) -> !chunk
  %dx = func.call @gated_dx(%dv, %silu) : (!chunk, !chunk) -> !chunk
  return %dx, %dz : !chunk, !chunk
}
