// The rows of workgroups that are still to begin, on their way to the L2 cache.
//
// While a workgroup sums up its row and stores it, it has nothing on its way from memory. Where rows are wide, few
// workgroups are at once, and others do not make up for it. So each fetches the row that is as many rows further on as
// are at once: that is in the cache when its workgroup begins. It comes after the row's sums: with the row's own loads,
// it delayed these. And what is at work and what is ahead must fit the cache, or they push each other out.

// What a NormSpec and a Schedule decide.
!x = bf16
!residual = bf16
#takes_residual = true
#gates_first = false
#writes_output = true
#columns = 4096 : index
#forward_columns = 4096 : index
#forward_ahead = 0 : index
#forward_x_of_16 = 8 : index
#forward_residual_of_16 = 8 : index
!forward_x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!forward_residual_rows = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!forward_thread = vector<8xindex>

func.func private @my_t(!forward_thread) -> index
func.func private @my_row(!forward_thread) -> index
func.func private @my_part(!forward_thread) -> index
func.func private @fetch_to_cache_of_x(!forward_x_rows, index, index, index)
func.func private @fetch_to_cache_of_residual(!forward_residual_rows, index, index, index)
// End of what is replaced.

// Of the row that is so many rows further on, what this workgroup has of its own: the columns of its rank.
func.func private @fetch_ahead(%x: !forward_x_rows, %residual: !forward_residual_rows, %m: index, %thread: !forward_thread) {
  %t = func.call @my_t(%thread) : (!forward_thread) -> index
  %row = func.call @my_row(%thread) : (!forward_thread) -> index
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  %c0 = arith.constant 0 : index
  %ahead = arith.constant #forward_ahead
  %n = arith.constant #columns
  %own_columns = arith.constant #forward_columns
  %x_of_16 = arith.constant #forward_x_of_16
  %residual_of_16 = arith.constant #forward_residual_of_16
  %adds_residual = arith.constant #takes_residual
  // With a gate:
  %gates_first = arith.constant #gates_first
  %writes_output = arith.constant #writes_output
  %adds_residual_gated = arith.ori %gates_first, %writes_output : i1
  // End of the gate.
  %fetches = arith.cmpi ne, %ahead, %c0 : index
  scf.if %fetches {
    %next = arith.addi %row, %ahead : index
    %is_there = arith.cmpi ult, %next, %m : index
    %leads = arith.cmpi eq, %t, %c0 : index
    %is_mine = arith.andi %is_there, %leads : i1
    scf.if %is_mine {
      %left = arith.subi %n, %part : index
      %count = arith.minui %own_columns, %left : index
      %rows_before = arith.muli %next, %n : index
      %from = arith.addi %rows_before, %part : index
      %below = arith.addi %from, %count : index
      func.call @fetch_to_cache_of_x(%x, %from, %below, %x_of_16) : (!forward_x_rows, index, index, index) -> ()
      scf.if %adds_residual {
        func.call @fetch_to_cache_of_residual(%residual, %from, %below, %residual_of_16) : (!forward_residual_rows, index, index, index) -> ()
      }
    }
  }
  return
}
