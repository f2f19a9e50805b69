// A workgroup's sums of columns to its partial rows of dgamma and dbeta, where it has several groups. The sums of all
// groups are added up to one partial row, for dgamma, for dbeta and, where its sum is asked for, for dx, in the shared
// memory that held rows of dy. Teams of groups that have sets of their own have rows of their own (parts/set_rows.mlir).

// What a NormSpec and a Schedule decide.
!acc = f32
#columns = 4096 : index
#vector = 8 : index
#chunks = 1 : index
#threads = 512 : index
#groups = 1 : index
#sums_dbeta = true
!acc_rows = memref<?x4096x!acc, #hal.descriptor_type<storage_buffer>>
!dy_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!group_sums = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!chunk = vector<8x!acc>
!held = memref<1x!chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!thread = vector<9xindex>

func.func private @shifted() -> i1
func.func private @subgroup_groups() -> index
func.func private @my_id(!thread) -> index
func.func private @my_group(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @span(index, index, index) -> (index, index)
func.func private @is_within(index, index, index) -> i1
// with sets: func.func private @run_rows(!thread) -> i32
// with sets: func.func private @count_partial_rows(i32) -> index
// with sets: func.func private @partial_row(!thread, index, index) -> index
// End of what is replaced.

func.func private @store_partial_row(%thread: !thread, %workgroup: index, %dgamma_sums: !held, %dbeta_sums: !held, %dy_bytes: !dy_bytes, %dgamma_partials: !acc_rows, %dbeta_partials: !acc_rows) {  // without totals
// with totals: func.func private @store_partial_row(%thread: !thread, %workgroup: index, %dgamma_sums: !held, %dbeta_sums: !held, %dx_sums: !held, %dy_bytes: !dy_bytes, %dgamma_partials: !acc_rows, %dbeta_partials: !acc_rows, %dx_partials: !acc_rows) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %n = arith.constant #columns
  %v = arith.constant #vector
  %chunks = arith.constant #chunks
  %t_count = arith.constant #threads
  %groups = arith.constant #groups
  %sums_dbeta = arith.constant #sums_dbeta
  %shifted = func.call @shifted() : () -> i1
  %zero = arith.constant 0.0 : !acc
  %zeros = arith.constant dense<0.0> : !chunk
  %id = func.call @my_id(%thread) : (!thread) -> index
  %group = func.call @my_group(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %group_sums = memref.view %dy_bytes[%c0][] : !dy_bytes to !group_sums  // [groups, columns of T threads]
  %workgroup_threads = arith.muli %t_count, %groups : index
  %column_first = arith.muli %id, %v : index
  %column_step = arith.muli %workgroup_threads, %v : index
  %column_sums = arith.select %sums_dbeta, %c2, %c1 : index  // without totals
  // with totals: %column_sums = arith.constant 3 : index  // the last is that of dx
  // with totals: %next_sum = arith.select %sums_dbeta, %c1, %c2 : index
  scf.for %which = %c0 to %column_sums step %c1 {  // without totals
  // with totals: scf.for %which = %c0 to %column_sums step %next_sum {
    %is_dgamma = arith.cmpi eq, %which, %c0 : index
    // with totals: %is_dbeta = arith.cmpi eq, %which, %c1 : index
    // with totals: %is_dx = arith.cmpi eq, %which, %c2 : index
    gpu.barrier
    scf.for %k = %c0 to %chunks step %c1 {
      %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
      %dgamma_k = memref.load %dgamma_sums[%k] : !held
      %dbeta_k = memref.load %dbeta_sums[%k] : !held
      %sum_k = arith.select %is_dgamma, %dgamma_k, %dbeta_k : !chunk  // without totals
      // with totals: %dx_k = memref.load %dx_sums[%k] : !held
      // with totals: %of_output = arith.select %is_dgamma, %dgamma_k, %dbeta_k : !chunk
      // with totals: %sum_k = arith.select %is_dx, %dx_k, %of_output : !chunk
      scf.if %shifted {
        %from, %below = func.call @span(%k, %col, %shift) : (index, index, index) -> (index, index)
        scf.if %inside {
          scf.for %e = %c0 to %v step %c1 {
            %in_row = func.call @is_within(%e, %from, %below) : (index, index, index) -> i1
            scf.if %in_row {
              %shifted_at = arith.addi %col, %e : index
              %own_column = arith.subi %shifted_at, %shift : index
              %one = vector.extract %sum_k[%e] : !acc from !chunk
              memref.store %one, %group_sums[%group, %own_column] : !group_sums
            }
          } {llvm.loop_annotation = #unrolled}
        }
      } else {
        vector.store %sum_k, %group_sums[%group, %col] : !group_sums, !chunk
      }
    } {llvm.loop_annotation = #unrolled}
    gpu.barrier
    %teams = arith.constant 1 : index  // without sets
    // with sets: %rows_per_set = func.call @run_rows(%thread) : (!thread) -> i32
    // with sets: %teams = func.call @count_partial_rows(%rows_per_set) : (i32) -> index
    %neighbours = func.call @subgroup_groups() : () -> index
    %team_groups = arith.divui %groups, %teams : index
    scf.for %team = %c0 to %teams step %c1 {
      %partial = arith.addi %workgroup, %team : index  // without sets
      // with sets: %partial = func.call @partial_row(%thread, %workgroup, %team) : (!thread, index, index) -> index
      // Where rows are shifted, a partial row has no whole chunks: a thread adds up one column at a time.
      %one_first = arith.select %shifted, %id, %n : index
      scf.for %column = %one_first to %n step %workgroup_threads {
        %total = scf.for %in_team = %c0 to %team_groups step %c1 iter_args(%sum = %zero) -> (!acc) {
          %run = arith.divui %in_team, %neighbours : index
          %in_run = arith.remui %in_team, %neighbours : index
          %runs_before = arith.muli %run, %teams : index
          %own_run = arith.addi %runs_before, %team : index
          %groups_before = arith.muli %own_run, %neighbours : index
          %g = arith.addi %groups_before, %in_run : index
          %group_sum = memref.load %group_sums[%g, %column] : !group_sums
          %more = arith.addf %sum, %group_sum : !acc
          scf.yield %more : !acc
        }
        scf.if %is_dgamma {
          memref.store %total, %dgamma_partials[%partial, %column] : !acc_rows
        } else {
          scf.if %sums_dbeta {  // without totals
          // with totals: scf.if %is_dbeta {
            memref.store %total, %dbeta_partials[%partial, %column] : !acc_rows
          }
          // with totals: scf.if %is_dx {
          // with totals:   memref.store %total, %dx_partials[%partial, %column] : !acc_rows
          // with totals: }
        }
      }
      %chunks_first = arith.select %shifted, %n, %column_first : index
      scf.for %column = %chunks_first to %n step %column_step {
        %total = scf.for %in_team = %c0 to %team_groups step %c1 iter_args(%sum = %zeros) -> (!chunk) {
          %run = arith.divui %in_team, %neighbours : index
          %in_run = arith.remui %in_team, %neighbours : index
          %runs_before = arith.muli %run, %teams : index
          %own_run = arith.addi %runs_before, %team : index
          %groups_before = arith.muli %own_run, %neighbours : index
          %g = arith.addi %groups_before, %in_run : index
          %group_sum = vector.load %group_sums[%g, %column] : !group_sums, !chunk
          %more = arith.addf %sum, %group_sum : !chunk
          scf.yield %more : !chunk
        }
        scf.if %is_dgamma {
          vector.store %total, %dgamma_partials[%partial, %column] : !acc_rows, !chunk
        } else {
          scf.if %sums_dbeta {  // without totals
          // with totals: scf.if %is_dbeta {
            vector.store %total, %dbeta_partials[%partial, %column] : !acc_rows, !chunk
          }
          // with totals: scf.if %is_dx {
          // with totals:   vector.store %total, %dx_partials[%partial, %column] : !acc_rows, !chunk
          // with totals: }
        }
      }
    }
  }
  return
}
