// A row's chunks as a thread computes with them, its share of the row's two sums, and a subgroup's.

// What a NormSpec and a Schedule decide.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!acc = f32
#chunks = 1 : index
#chunks_a_load = 1 : index
#rereads = false
#centres = true
#from_output = false
!dy_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!more_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
!beta_chunk = vector<8x!beta>
!chunk = vector<8x!acc>
!more_dy_held = memref<3x1x!dy_chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!thread = vector<9xindex>
!begin = vector<4xindex>
!statistics = vector<3x!acc>
!weight_room = memref<1x4096x!gamma, #gpu.address_space<workgroup>>
!bias_room = memref<1x!beta_chunk, #gpu.address_space<private>>
!inverse_room = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!dy_room = memref<3x1x4096x!dy, #gpu.address_space<workgroup>>
!x_room = memref<3x1x4096x!x, #gpu.address_space<workgroup>>

func.func private @fetched_chunk(index, !thread, !begin, i1, i1, !dy_room, !x_room) -> (!dy_chunk, !x_chunk)
func.func private @load_more_late(!more_lines, !dy_lines, !dy_lines, index, i1, index, !thread, !more_dy_held)
func.func private @summed_dy(!dy_chunk, !more_dy_held, index) -> !chunk
func.func private @widen_of_x(!x_chunk) -> !chunk
func.func private @gated_x(!chunk, !more_dy_held, index) -> !chunk
func.func private @chunk_weight(index, !thread, !weight_room) -> !chunk
func.func private @chunk_bias(index, !thread, !bias_room) -> !chunk
func.func private @chunk_inverse(index, !thread, !chunk, !acc, !inverse_room) -> !chunk
func.func private @xhat_from_output(!chunk, !chunk, !chunk) -> !chunk
func.func private @xhat(!chunk, !acc, !acc) -> !chunk
func.func private @plus_hx_from_output(!chunk, !chunk, !chunk, !chunk, !chunk) -> !chunk
// End of what is replaced.

// The lanes of a subgroup meet before they read chunk k from shared memory for the second time, if it begins a load: so
// ptxas does not load all chunks first.
func.func private @meet(%k: index) {
  %c0 = arith.constant 0 : index
  %all_lanes = arith.constant -1 : i32
  %at_once = arith.constant #chunks_a_load
  %rereads = arith.constant #rereads
  %others = arith.remui %k, %at_once : index
  %is_first = arith.cmpi eq, %others, %c0 : index
  %meets = arith.andi %rereads, %is_first : i1
  scf.if %meets {
    nvvm.bar.warp.sync %all_lanes : i32
  }
  return
}

// dy, xhat and h = dy * g of chunk k of a row; and x, g and the bias, which they come from.
func.func private @row_chunk(%k: index, %thread: !thread, %where: !begin, %statistics: !statistics, %has_row: i1, %again: i1, %dy_rows: !dy_room, %x_rows: !x_room, %more_held: !more_dy_held, %weight: !weight_room, %bias: !bias_room, %inverse: !inverse_room) -> (!chunk, !chunk, !chunk, !chunk, !chunk, !chunk) {
  %from_output = arith.constant #from_output
  %zeros = arith.constant dense<0.0> : !chunk
  %mean = vector.extract %statistics[0] : !acc from !statistics
  %rstd = vector.extract %statistics[1] : !acc from !statistics
  %row_zero = vector.extract %statistics[2] : !acc from !statistics
  %dy_k, %x_k = func.call @fetched_chunk(%k, %thread, %where, %has_row, %again, %dy_rows, %x_rows)
      : (index, !thread, !begin, i1, i1, !dy_room, !x_room) -> (!dy_chunk, !x_chunk)
  %dya = func.call @summed_dy(%dy_k, %more_held, %k) : (!dy_chunk, !more_dy_held, index) -> !chunk
  %xa = func.call @widen_of_x(%x_k) : (!x_chunk) -> !chunk
  // With a gate:
  %xa_gated = func.call @gated_x(%xa, %more_held, %k) : (!chunk, !more_dy_held, index) -> !chunk
  // End of the gate.
  %ga = func.call @chunk_weight(%k, %thread, %weight) : (index, !thread, !weight_room) -> !chunk
  %b = func.call @chunk_bias(%k, %thread, %bias) : (index, !thread, !bias_room) -> !chunk
  %one_by_g = func.call @chunk_inverse(%k, %thread, %ga, %row_zero, %inverse) : (index, !thread, !chunk, !acc, !inverse_room) -> !chunk
  %of_y = func.call @xhat_from_output(%xa, %b, %one_by_g) : (!chunk, !chunk, !chunk) -> !chunk
  %of_x = func.call @xhat(%xa, %mean, %rstd) : (!chunk, !acc, !acc) -> !chunk
  %of_either = arith.select %from_output, %of_y, %of_x : !chunk
  %xhat = arith.select %has_row, %of_either, %zeros : !chunk
  %h = arith.mulf %dya, %ga : !chunk
  return %dya, %xhat, %h, %xa, %ga, %b : !chunk, !chunk, !chunk, !chunk, !chunk, !chunk
}

// A thread's shares of a row's two sums, of h and of h * xhat, with a chunk's. If dx computes xhat once more, the second
// sum takes h * xhat without it.
func.func private @plus_chunk(%h_before: !chunk, %hx_before: !chunk, %dya: !chunk, %xhat: !chunk, %h: !chunk, %xa: !chunk, %ga: !chunk, %b: !chunk) -> (!chunk, !chunk) {
  %rereads = arith.constant #rereads
  %centres = arith.constant #centres
  %from_output = arith.constant #from_output
  %h_more = arith.addf %h_before, %h : !chunk
  %h_after = arith.select %centres, %h_more, %h_before : !chunk
  %divides_later = arith.andi %from_output, %rereads : i1
  %hx_after = scf.if %divides_later -> !chunk {
    %undivided = func.call @plus_hx_from_output(%hx_before, %dya, %ga, %xa, %b)
        : (!chunk, !chunk, !chunk, !chunk, !chunk) -> !chunk
    scf.yield %undivided : !chunk
  } else {
    %divided = math.fma %h, %xhat, %hx_before : !chunk
    scf.yield %divided : !chunk
  }
  return %h_after, %hx_after : !chunk, !chunk
}

// A thread's shares of a row that is read again for dx.
func.func private @row_shares(%thread: !thread, %where: !begin, %statistics: !statistics, %more: !more_lines, %dy3: !dy_lines, %dy4: !dy_lines, %dy_rows: !dy_room, %x_rows: !x_room, %more_held: !more_dy_held, %weight: !weight_room, %bias: !bias_room, %inverse: !inverse_room) -> (!chunk, !chunk) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %yes = arith.constant true
  %row = vector.extract %where[3] : index from !begin
  %chunks = arith.constant #chunks
  %first_time = arith.constant false
  %minus_zeros = arith.constant dense<-0.0> : !chunk  // adding -0.0 changes no number
  %share_h, %share_hx = scf.for %k = %c0 to %chunks step %c1
      iter_args(%h_before = %minus_zeros, %hx_before = %minus_zeros) -> (!chunk, !chunk) {
    func.call @load_more_late(%more, %dy3, %dy4, %row, %yes, %k, %thread, %more_held)
        : (!more_lines, !dy_lines, !dy_lines, index, i1, index, !thread, !more_dy_held) -> ()
    %dya, %xhat, %h, %xa, %ga, %b = func.call @row_chunk(%k, %thread, %where, %statistics, %yes, %first_time, %dy_rows, %x_rows, %more_held, %weight, %bias, %inverse)
        : (index, !thread, !begin, !statistics, i1, i1, !dy_room, !x_room, !more_dy_held, !weight_room, !bias_room, !inverse_room)
        -> (!chunk, !chunk, !chunk, !chunk, !chunk, !chunk)
    %h_after, %hx_after = func.call @plus_chunk(%h_before, %hx_before, %dya, %xhat, %h, %xa, %ga, %b)
        : (!chunk, !chunk, !chunk, !chunk, !chunk, !chunk, !chunk, !chunk) -> (!chunk, !chunk)
    scf.yield %h_after, %hx_after : !chunk, !chunk
  } {llvm.loop_annotation = #unrolled}
  return %share_h, %share_hx : !chunk, !chunk
}

// A subgroup's share of them. Any order of these additions will do, as long as it is always the same order.
func.func private @subgroup_sums(%share_h: !chunk, %share_hx: !chunk) -> (!acc, !acc) {
  %centres = arith.constant #centres
  %zero = arith.constant 0.0 : !acc
  %thread_h = vector.reduction <add>, %share_h fastmath<reassoc> : !chunk into !acc
  %thread_hx = vector.reduction <add>, %share_hx fastmath<reassoc> : !chunk into !acc
  %warp_h = scf.if %centres -> !acc {
    %subgroup_h = gpu.subgroup_reduce add %thread_h cluster(size = 32) : (!acc) -> !acc
    scf.yield %subgroup_h : !acc
  } else {
    scf.yield %zero : !acc
  }
  %warp_hx = gpu.subgroup_reduce add %thread_hx cluster(size = 32) : (!acc) -> !acc
  return %warp_h, %warp_hx : !acc, !acc
}

// -0.0: rows are counted from zero, so this number is below it. The compiler does not know that, and
// does not compute with it before the first row.
func.func private @row_zero(%row: i32) -> !acc {
  %all_lanes = arith.constant -1 : i32
  %zero = arith.constant 0.0 : !acc
  %row_below = arith.xori %row, %all_lanes : i32
  %row_below_acc = arith.sitofp %row_below : i32 to !acc
  %row_zero = math.copysign %zero, %row_below_acc : !acc
  return %row_zero : !acc
}
