// A thread's share of a row's two sums, and a subgroup's.

// What a NormSpec and a Schedule decide.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!acc = f32
#chunks = 1 : index
#dy_chunk_bytes = 16 : i64
#x_chunk_bytes = 16 : i64
#chunks_a_load = 1 : index
#rereads = false
#centres = true
#from_output = false
!dy_staged = memref<3x1x4096x!dy, #gpu.address_space<workgroup>>
!x_staged = memref<3x1x4096x!x, #gpu.address_space<workgroup>>
!gamma_staged = memref<1x4096x!gamma, #gpu.address_space<workgroup>>
!wide_staged = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!beta_staged = memref<1x4096x!beta, #gpu.address_space<workgroup>>
!inverse_staged = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
!gamma_chunk = vector<8x!gamma>
!beta_chunk = vector<8x!beta>
!chunk = vector<8x!acc>
!dy_held = memref<1x!dy_chunk, #gpu.address_space<private>>
!more_dy_held = memref<3x1x!dy_chunk, #gpu.address_space<private>>
!x_held = memref<1x!x_chunk, #gpu.address_space<private>>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!beta_held = memref<1x!beta_chunk, #gpu.address_space<private>>
!held = memref<1x!chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>

func.func private @stages() -> i1
func.func private @at_once() -> i1
func.func private @apart() -> i1
func.func private @column(index, index, index, index) -> (index, i1)
func.func private @await_copies(i32)
func.func private @x_slot(index) -> index
func.func private @masked(!dy_chunk, !x_chunk, index, index, index) -> (!dy_chunk, !x_chunk)
func.func private @summed_dy(!dy_chunk, !more_dy_held, index) -> !chunk
func.func private @widen_of_x(!x_chunk) -> !chunk
func.func private @chunk_weight(!gamma_held, !gamma_staged, !wide_staged, index, index, index) -> !chunk
func.func private @chunk_bias(!beta_held, !beta_staged, index, index, index) -> !chunk
func.func private @chunk_inverse(!inverse_staged, index, index, !chunk, !acc) -> !chunk
func.func private @xhat_from_output(!chunk, !chunk, !chunk) -> !chunk
func.func private @xhat(!chunk, !acc, !acc) -> !chunk
func.func private @plus_hx_from_output(!chunk, !chunk, !chunk, !chunk, !chunk) -> !chunk
// End of what is replaced.

// Whether the lanes of a subgroup meet before they read chunk k from shared memory, which keeps ptxas from loading
// all chunks first.
func.func private @meets_before(%k: index) -> i1 {
  %c0 = arith.constant 0 : index
  %at_once = arith.constant #chunks_a_load
  %rereads = arith.constant #rereads
  %others = arith.remui %k, %at_once : index
  %is_first = arith.cmpi eq, %others, %c0 : index
  %meets = arith.andi %rereads, %is_first : i1
  return %meets : i1
}

// A thread's share of a row's two sums, of h and of h * xhat. Of the row's elements in its slot, %dy_from and %x_from
// say where they are.
func.func private @row_shares(%slot: index, %dy_from: index, %x_from: index, %t: index, %group: index, %part: index, %shift: index, %mean_row: !acc, %rstd_row: !acc, %has_row: i1, %row_zero: !acc, %dy_staged: !dy_staged, %x_staged: !x_staged, %dy_held: !dy_held, %x_held: !x_held, %more_held: !more_dy_held, %dy_next: !dy_held, %x_next: !x_held, %gamma_held: !gamma_held, %gamma_staged: !gamma_staged, %wide_staged: !wide_staged, %beta_held: !beta_held, %beta_staged: !beta_staged, %inverse_staged: !inverse_staged, %dya_kept: !held, %xhat_kept: !held, %h_kept: !held) -> (!chunk, !chunk) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #chunks
  %stages = func.call @stages() : () -> i1
  %at_once = func.call @at_once() : () -> i1
  %apart = func.call @apart() : () -> i1
  %rereads = arith.constant #rereads
  %centres = arith.constant #centres
  %from_output = arith.constant #from_output
  %all_lanes = arith.constant -1 : i32
  %zeros = arith.constant dense<0.0> : !chunk
  %minus_zeros = arith.constant dense<-0.0> : !chunk  // adding -0.0 changes no number
  %zero_dy = arith.constant dense<0.0> : !dy_chunk
  %zero_x = arith.constant dense<0.0> : !x_chunk
  %share_h, %share_hx = scf.for %k = %c0 to %chunks step %c1
      iter_args(%h_before = %minus_zeros, %hx_before = %minus_zeros) -> (!chunk, !chunk) {
    %col, %inside = func.call @column(%k, %t, %part, %shift) : (index, index, index, index) -> (index, i1)
    %meets = func.call @meets_before(%k) : (index) -> i1
    scf.if %meets {
      nvvm.bar.warp.sync %all_lanes : i32
    }
    // A chunk waits for its own copies alone, so that memory is busy while the first ones are summed.
    scf.if %apart {
      %last_chunk = arith.subi %chunks, %c1 : index
      %behind = arith.subi %last_chunk, %k : index
      %behind_i32 = arith.index_castui %behind : index to i32
      func.call @await_copies(%behind_i32) : (i32) -> ()
    }
    %dy_k, %x_k = scf.if %stages -> (!dy_chunk, !x_chunk) {
      %dy_at = arith.addi %dy_from, %col : index
      %x_at = arith.addi %x_from, %col : index
      %dy_copied = "vector.load"(%dy_staged, %slot, %group, %dy_at) <{alignment = #dy_chunk_bytes}> : (!dy_staged, index, index, index) -> !dy_chunk
      %slot_of_x = func.call @x_slot(%slot) : (index) -> index
      %x_copied = "vector.load"(%x_staged, %slot_of_x, %group, %x_at) <{alignment = #x_chunk_bytes}> : (!x_staged, index, index, index) -> !x_chunk
      %at = arith.addi %part, %col : index
      %dy_own, %x_own = func.call @masked(%dy_copied, %x_copied, %k, %at, %shift)
          : (!dy_chunk, !x_chunk, index, index, index) -> (!dy_chunk, !x_chunk)
      scf.yield %dy_own, %x_own : !dy_chunk, !x_chunk
    } else {
      %dy_early = memref.load %dy_held[%k] : !dy_held
      %x_early = memref.load %x_held[%k] : !x_held
      %dy_late = memref.load %dy_next[%k] : !dy_held
      %x_late = memref.load %x_next[%k] : !x_held
      %dy_mine = arith.select %at_once, %dy_late, %dy_early : !dy_chunk
      %x_mine = arith.select %at_once, %x_late, %x_early : !x_chunk
      %counts = arith.andi %inside, %has_row : i1
      %dy_in = arith.select %counts, %dy_mine, %zero_dy : !dy_chunk
      %x_in = arith.select %counts, %x_mine, %zero_x : !x_chunk
      scf.yield %dy_in, %x_in : !dy_chunk, !x_chunk
    }
    %dya = func.call @summed_dy(%dy_k, %more_held, %k) : (!dy_chunk, !more_dy_held, index) -> !chunk
    %xa = func.call @widen_of_x(%x_k) : (!x_chunk) -> !chunk
    %ga = func.call @chunk_weight(%gamma_held, %gamma_staged, %wide_staged, %group, %k, %col)
        : (!gamma_held, !gamma_staged, !wide_staged, index, index, index) -> !chunk
    %bias = func.call @chunk_bias(%beta_held, %beta_staged, %group, %k, %col)
        : (!beta_held, !beta_staged, index, index, index) -> !chunk
    %inverse = func.call @chunk_inverse(%inverse_staged, %group, %col, %ga, %row_zero)
        : (!inverse_staged, index, index, !chunk, !acc) -> !chunk
    %of_y = func.call @xhat_from_output(%xa, %bias, %inverse) : (!chunk, !chunk, !chunk) -> !chunk
    %of_x = func.call @xhat(%xa, %mean_row, %rstd_row) : (!chunk, !acc, !acc) -> !chunk
    %of_either = arith.select %from_output, %of_y, %of_x : !chunk
    %xhat = arith.select %has_row, %of_either, %zeros : !chunk
    %h = arith.mulf %dya, %ga : !chunk
    %h_more = arith.addf %h_before, %h : !chunk
    %h_after = arith.select %centres, %h_more, %h_before : !chunk
    // If dx computes xhat once more, the sum takes h * xhat without it.
    %divides_later = arith.andi %from_output, %rereads : i1
    %hx_after = scf.if %divides_later -> !chunk {
      %undivided = func.call @plus_hx_from_output(%hx_before, %dya, %ga, %xa, %bias)
          : (!chunk, !chunk, !chunk, !chunk, !chunk) -> !chunk
      scf.yield %undivided : !chunk
    } else {
      %divided = math.fma %h, %xhat, %hx_before : !chunk
      scf.yield %divided : !chunk
    }
    memref.store %dya, %dya_kept[%k] : !held
    memref.store %xhat, %xhat_kept[%k] : !held
    memref.store %h, %h_kept[%k] : !held
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
