// How a thread's chunks of a row come to registers: from memory, or from shared memory where they are kept.

// What a NormSpec and a Schedule decide.
!x = bf16
!residual = bf16
!acc = f32
#takes_residual = true
#gates_first = false
#writes_output = true
#columns = 4096 : index
#forward_columns = 4096 : index
#forward_parts_alike = true
#forward_vector = 8 : index
#forward_chunks = 2 : index
#forward_threads = 256 : index
#forward_shifted = false
#forward_rereads = false
#forward_whole = true
#forward_in_registers = true
#forward_in_shared_memory = false
#forward_accesses = 1 : index
#forward_residual_from = 0 : index
!forward_x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!forward_residual_rows = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!forward_x_kept = memref<1x4096x!x, #gpu.address_space<workgroup>>
!forward_residual_kept = memref<1x4096x!residual, #gpu.address_space<workgroup>>
!forward_x = vector<8x!x>
!forward_residual = vector<8x!residual>
!forward_chunk = vector<8x!acc>
!forward_x_held = memref<2x!forward_x, #gpu.address_space<private>>
!forward_residual_held = memref<2x!forward_residual, #gpu.address_space<private>>
!forward_held = memref<2x!forward_chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!forward_thread = vector<8xindex>

func.func private @my_t(!forward_thread) -> index
func.func private @my_part(!forward_thread) -> index
func.func private @my_group(!forward_thread) -> index
func.func private @my_row(!forward_thread) -> index
func.func private @has_access(index, index, index, i1) -> i1
func.func private @access_of_x(!forward_x_rows, index, index, index, index) -> !forward_x
func.func private @access_of_residual(!forward_residual_rows, index, index, index, index) -> !forward_residual
func.func private @read_edge_of_x(!forward_x_rows, !forward_x, index, index, index, !forward_x_held)
func.func private @read_edge_of_residual(!forward_residual_rows, !forward_residual, index, index, index, !forward_residual_held)
func.func private @join_all_of_x(!forward_x, index, !forward_x_held)
func.func private @joined_of_residual(!forward_residual, index, index, !forward_residual_held) -> !forward_residual
func.func private @stored_of_x(!forward_x, index, !forward_x_held) -> !forward_x
func.func private @stored_of_residual(!forward_residual, index, !forward_residual_held) -> !forward_residual
func.func private @put_of_residual(!forward_residual_rows, !forward_residual, index, index, index, index, i1, i1)
func.func private @widen_of_x(!forward_x) -> !forward_chunk
func.func private @widen_of_residual(!forward_residual) -> !forward_chunk
func.func private @round_of_residual(!forward_chunk) -> !forward_residual
func.func private @settled_of_x(!forward_x) -> !forward_x
func.func private @settled_of_residual(!forward_residual) -> !forward_residual
func.func private @silu_of_z(!forward_chunk) -> (!forward_chunk, !forward_chunk)
func.func private @gated_input(!forward_chunk, !forward_chunk) -> !forward_chunk
// End of what is replaced.

// The first column of a thread's chunk k of a step, of the workgroup's columns, and whether these have that
// chunk. The last workgroup of a cluster may have fewer columns.
func.func private @column(%step: index, %k: index, %thread: !forward_thread) -> (index, i1) {
  %t = func.call @my_t(%thread) : (!forward_thread) -> index
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  %all = arith.constant #columns
  %n = arith.constant #forward_columns
  %alike = arith.constant #forward_parts_alike
  %v = arith.constant #forward_vector
  %t_count = arith.constant #forward_threads
  %chunks = arith.constant #forward_chunks
  %whole = arith.constant #forward_whole
  %steps_before = arith.muli %step, %chunks : index
  %chunks_before = arith.addi %steps_before, %k : index
  %before = arith.muli %chunks_before, %t_count : index
  %chunk = arith.addi %before, %t : index
  %col = arith.muli %chunk, %v : index
  %at = arith.addi %part, %col : index
  %in_row = arith.cmpi ult, %at, %all : index
  %exists = arith.ori %alike, %in_row : i1
  %in_part = arith.cmpi ult, %col, %n : index
  %before_end = arith.andi %in_part, %exists : i1
  %inside = arith.ori %whole, %before_end : i1
  return %col, %inside : index, i1
}

// Loads a thread's chunks of a step of a row: of x and of the residual, or, once s is stored, of s in
// place of both. From shared memory it reads only what it has stored there itself. For a chunk past the
// end of the row, its first chunk is loaded. That of s could not be: another thread stores it.
func.func private @load(%x: !forward_x_rows, %residual: !forward_residual_rows, %s: !forward_residual_rows, %x_kept: !forward_x_kept, %residual_kept: !forward_residual_kept, %thread: !forward_thread, %step: index, %again: i1, %x_held: !forward_x_held, %residual_held: !forward_residual_held) {
  %group = func.call @my_group(%thread) : (!forward_thread) -> index
  %row = func.call @my_row(%thread) : (!forward_thread) -> index
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #forward_chunks
  %adds_residual = arith.constant #takes_residual
  %no_residual = arith.constant dense<0.0> : !forward_residual
  %accesses = arith.constant #forward_accesses
  %in_shared_memory = arith.constant #forward_in_shared_memory
  %residual_from = arith.constant #forward_residual_from
  %yes = arith.constant true
  %no_x = arith.constant dense<0.0> : !forward_x
  %was_kept = arith.andi %in_shared_memory, %again : i1
  %reads_s = arith.andi %adds_residual, %again : i1
  // With a gate:
  // z comes with x, in the residual's place, each time.
  %gates_first = arith.constant #gates_first
  %writes_output = arith.constant #writes_output
  %adds_residual_gated = arith.ori %gates_first, %writes_output : i1
  // End of the gate.
  scf.for %k = %c0 to %chunks step %c1 {
    %col, %inside = func.call @column(%step, %k, %thread) : (index, index, !forward_thread) -> (index, i1)
    %at = arith.addi %part, %col : index
    %has_access = func.call @has_access(%row, %col, %at, %inside) : (index, index, index, i1) -> i1
    %col_in = arith.select %has_access, %col, %c0 : index
    %at_in = arith.addi %part, %col_in : index
    scf.if %was_kept {
      scf.if %adds_residual {
        %s_k = vector.load %residual_kept[%group, %col] : !forward_residual_kept, !forward_residual
        memref.store %s_k, %residual_held[%k] : !forward_residual_held
      } else {
        %x_k = vector.load %x_kept[%group, %col] : !forward_x_kept, !forward_x
        memref.store %x_k, %x_held[%k] : !forward_x_held
      }
    } else {
      scf.if %reads_s {
        %s_k = scf.if %inside -> !forward_residual {
          %stored = vector.load %s[%row, %at] : !forward_residual_rows, !forward_residual
          scf.yield %stored : !forward_residual
        } else {
          scf.yield %no_residual : !forward_residual
        }
        memref.store %s_k, %residual_held[%k] : !forward_residual_held
      } else {
        scf.for %which = %c0 to %accesses step %c1 {
          %accesses_before = arith.muli %which, %chunks : index
          %place = arith.addi %accesses_before, %k : index
          %x_k = func.call @access_of_x(%x, %row, %k, %at_in, %which) : (!forward_x_rows, index, index, index, index) -> !forward_x
          memref.store %x_k, %x_held[%place] : !forward_x_held
          %is_read = arith.cmpi uge, %which, %residual_from : index
          %reads_residual = arith.andi %adds_residual, %is_read : i1
          scf.if %reads_residual {
            %residual_k = func.call @access_of_residual(%residual, %row, %k, %at_in, %which)
                : (!forward_residual_rows, index, index, index, index) -> !forward_residual
            memref.store %residual_k, %residual_held[%place] : !forward_residual_held
          }
        } {llvm.loop_annotation = #unrolled}
      }
    }
  } {llvm.loop_annotation = #unrolled}
  %is_new = arith.xori %again, %yes : i1
  scf.if %is_new {
    scf.for %k = %c0 to %chunks step %c1 {
      %col, %inside = func.call @column(%step, %k, %thread) : (index, index, !forward_thread) -> (index, i1)
      %at = arith.addi %part, %col : index
      %has_access = func.call @has_access(%row, %col, %at, %inside) : (index, index, index, i1) -> i1
      scf.if %has_access {
        func.call @read_edge_of_x(%x, %no_x, %row, %k, %at, %x_held)
            : (!forward_x_rows, !forward_x, index, index, index, !forward_x_held) -> ()
        scf.if %adds_residual {
          func.call @read_edge_of_residual(%residual, %no_residual, %row, %k, %at, %residual_held)
              : (!forward_residual_rows, !forward_residual, index, index, index, !forward_residual_held) -> ()
        }
      }
    } {llvm.loop_annotation = #unrolled}
  }
  return
}

// The sum of x and a residual, as it is stored.
func.func private @rounded_sum(%x: !forward_x, %residual: !forward_residual) -> !forward_residual {
  %xa = func.call @widen_of_x(%x) : (!forward_x) -> !forward_chunk
  %ra = func.call @widen_of_residual(%residual) : (!forward_residual) -> !forward_chunk
  %sum = arith.addf %xa, %ra : !forward_chunk
  %rounded = func.call @round_of_residual(%sum) : (!forward_chunk) -> !forward_residual
  return %rounded : !forward_residual
}

// The values to normalize, from what @load has loaded. Those of s are rounded and stored first.
func.func private @take(%x_held: !forward_x_held, %residual_held: !forward_residual_held, %again: i1, %s: !forward_residual_rows, %x_kept: !forward_x_kept, %residual_kept: !forward_residual_kept, %thread: !forward_thread, %exists: i1, %step: index, %values: !forward_held) {
  %group = func.call @my_group(%thread) : (!forward_thread) -> index
  %row = func.call @my_row(%thread) : (!forward_thread) -> index
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #forward_chunks
  %adds_residual = arith.constant #takes_residual
  %shifted = arith.constant #forward_shifted
  %in_shared_memory = arith.constant #forward_in_shared_memory
  %no_x = arith.constant dense<0.0> : !forward_x
  %no_residual = arith.constant dense<0.0> : !forward_residual
  %yes = arith.constant true
  %is_first = arith.xori %again, %yes : i1
  %stores_kept = arith.andi %in_shared_memory, %is_first : i1
  scf.if %adds_residual {
  } else {
    func.call @join_all_of_x(%no_x, %row, %x_held) : (!forward_x, index, !forward_x_held) -> ()
  }
  scf.for %k = %c0 to %chunks step %c1 {
    %col, %inside = func.call @column(%step, %k, %thread) : (index, index, !forward_thread) -> (index, i1)
    %at = arith.addi %part, %col : index
    %value = scf.if %adds_residual -> !forward_chunk {
      %s_k = scf.if %again -> !forward_residual {
        %kept_k = memref.load %residual_held[%k] : !forward_residual_held
        scf.yield %kept_k : !forward_residual
      } else {
        %residual_k = func.call @stored_of_residual(%no_residual, %k, %residual_held) : (!forward_residual, index, !forward_residual_held) -> !forward_residual
        %x_k = func.call @stored_of_x(%no_x, %k, %x_held) : (!forward_x, index, !forward_x_held) -> !forward_x
        %stored = func.call @rounded_sum(%x_k, %residual_k) : (!forward_x, !forward_residual) -> !forward_residual
        func.call @put_of_residual(%s, %stored, %row, %k, %col, %at, %inside, %exists)
            : (!forward_residual_rows, !forward_residual, index, index, index, index, i1, i1) -> ()
        %joined = scf.if %shifted -> !forward_residual {
          %residual_on = memref.load %residual_held[%k] : !forward_residual_held
          %x_on = memref.load %x_held[%k] : !forward_x_held
          %stored_on = func.call @rounded_sum(%x_on, %residual_on) : (!forward_x, !forward_residual) -> !forward_residual
          %place = arith.addi %chunks, %k : index
          memref.store %stored_on, %residual_held[%k] : !forward_residual_held
          memref.store %stored, %residual_held[%place] : !forward_residual_held
          %of_both = func.call @joined_of_residual(%no_residual, %row, %k, %residual_held)
              : (!forward_residual, index, index, !forward_residual_held) -> !forward_residual
          scf.yield %of_both : !forward_residual
        } else {
          scf.yield %stored : !forward_residual
        }
        scf.if %stores_kept {
          vector.store %joined, %residual_kept[%group, %col] : !forward_residual_kept, !forward_residual
        }
        scf.yield %joined : !forward_residual
      }
      %sa = func.call @widen_of_residual(%s_k) : (!forward_residual) -> !forward_chunk
      scf.yield %sa : !forward_chunk
    } else {
      %x_k = memref.load %x_held[%k] : !forward_x_held
      scf.if %stores_kept {
        vector.store %x_k, %x_kept[%group, %col] : !forward_x_kept, !forward_x
      }
      %xa = func.call @widen_of_x(%x_k) : (!forward_x) -> !forward_chunk
      scf.yield %xa : !forward_chunk
    }
    // With a gate:
    %z_k = memref.load %residual_held[%k] : !forward_residual_held
    %za = func.call @widen_of_residual(%z_k) : (!forward_residual) -> !forward_chunk
    %silu, %slope = func.call @silu_of_z(%za) : (!forward_chunk) -> (!forward_chunk, !forward_chunk)
    %value_gated = func.call @gated_input(%value, %silu) : (!forward_chunk, !forward_chunk) -> !forward_chunk
    // End of the gate.
    memref.store %value, %values[%k] : !forward_held
  } {llvm.loop_annotation = #unrolled}
  return
}

// The values once more, from what was loaded. Without it, they would stay in registers, which take twice
// as many of them as narrow ones do; then fewer workgroups fit a multiprocessor.
func.func private @take_anew(%x_held: !forward_x_held, %values: !forward_held) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #forward_chunks
  scf.for %k = %c0 to %chunks step %c1 {
    %x_k = memref.load %x_held[%k] : !forward_x_held
    %here = func.call @settled_of_x(%x_k) : (!forward_x) -> !forward_x
    memref.store %here, %x_held[%k] : !forward_x_held
    %value = func.call @widen_of_x(%here) : (!forward_x) -> !forward_chunk
    memref.store %value, %values[%k] : !forward_held
  } {llvm.loop_annotation = #unrolled}
  return
}

// The values of the accesses that a thread stores, where these are not its chunks. Those of x may be read once more, from
// the L1 cache: in registers until then, they would leave room for fewer workgroups.
func.func private @take_stored(%x: !forward_x_rows, %thread: !forward_thread, %x_held: !forward_x_held, %residual_held: !forward_residual_held, %values: !forward_held) {
  %row = func.call @my_row(%thread) : (!forward_thread) -> index
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #forward_chunks
  %adds_residual = arith.constant #takes_residual
  %shifted = arith.constant #forward_shifted
  %rereads = arith.constant #forward_rereads
  %no_x = arith.constant dense<0.0> : !forward_x
  %no_residual = arith.constant dense<0.0> : !forward_residual
  scf.if %shifted {
    scf.for %k = %c0 to %chunks step %c1 {
      %value = scf.if %adds_residual -> !forward_chunk {
        %s_k = func.call @stored_of_residual(%no_residual, %k, %residual_held) : (!forward_residual, index, !forward_residual_held) -> !forward_residual
        %s_here = func.call @settled_of_residual(%s_k) : (!forward_residual) -> !forward_residual
        %sa = func.call @widen_of_residual(%s_here) : (!forward_residual) -> !forward_chunk
        scf.yield %sa : !forward_chunk
      } else {
        %col, %inside = func.call @column(%c0, %k, %thread) : (index, index, !forward_thread) -> (index, i1)
        %at = arith.addi %part, %col : index
        %has_access = func.call @has_access(%row, %col, %at, %inside) : (index, index, index, i1) -> i1
        %col_in = arith.select %has_access, %col, %c0 : index
        %at_in = arith.addi %part, %col_in : index
        %place = arith.addi %chunks, %k : index
        scf.if %rereads {
          %again = func.call @access_of_x(%x, %row, %k, %at_in, %c1) : (!forward_x_rows, index, index, index, index) -> !forward_x
          memref.store %again, %x_held[%place] : !forward_x_held
          scf.if %has_access {
            func.call @read_edge_of_x(%x, %no_x, %row, %k, %at, %x_held)
                : (!forward_x_rows, !forward_x, index, index, index, !forward_x_held) -> ()
          }
        }
        %x_k = func.call @stored_of_x(%no_x, %k, %x_held) : (!forward_x, index, !forward_x_held) -> !forward_x
        %x_here = func.call @settled_of_x(%x_k) : (!forward_x) -> !forward_x
        %xa = func.call @widen_of_x(%x_here) : (!forward_x) -> !forward_chunk
        scf.yield %xa : !forward_chunk
      }
      memref.store %value, %values[%k] : !forward_held
    } {llvm.loop_annotation = #unrolled}
  }
  return
}

// The values of a step of a row that is not in registers.
func.func private @reread(%x: !forward_x_rows, %residual: !forward_residual_rows, %s: !forward_residual_rows, %x_kept: !forward_x_kept, %residual_kept: !forward_residual_kept, %thread: !forward_thread, %exists: i1, %step: index, %again: i1, %values: !forward_held) {
  %in_registers = arith.constant #forward_in_registers
  scf.if %in_registers {
  } else {
    %x_held = memref.alloca() : !forward_x_held
    %residual_held = memref.alloca() : !forward_residual_held
    func.call @load(%x, %residual, %s, %x_kept, %residual_kept, %thread, %step, %again, %x_held, %residual_held)
        : (!forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, index, i1, !forward_x_held, !forward_residual_held) -> ()
    func.call @take(%x_held, %residual_held, %again, %s, %x_kept, %residual_kept, %thread, %exists, %step, %values)
        : (!forward_x_held, !forward_residual_held, i1, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, index, !forward_held) -> ()
  }
  return
}
