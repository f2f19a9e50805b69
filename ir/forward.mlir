// Layer normalization and RMS normalization, forward: how they run on a GPU.
//
// x has M rows of N columns. What is normalized is x, or s = x + residual, as it is rounded and stored.
// With it, mean and rstd of every row are written. A caller that has no statistics for a backward pass
// takes this kernel without its output.
//
// A row is divided into chunks of V neighbouring columns. A group of T threads has a row. T is a part of a
// subgroup, so that a subgroup has several narrow rows, or it is several subgroups, which exchange their
// sums through shared memory. A row is handled in steps. In a step a thread loads C chunks before it waits
// for the first: thread t takes the chunks t, t + T, t + 2T, ... of the step.
//
// A row is read from memory once, if it can be kept for mean, variance and output: in registers, if one
// step is a whole row, or in shared memory, as narrow as it came. A wider row is read again, from the
// cache, for each of the three.
//
// A cluster of workgroups may share a row (NVIDIA since sm_90): each has a part of the columns, and every
// subgroup sends its sums into the exchange of each workgroup of the cluster (math/clusters.mlir).
//
// A workgroup has one set of rows, and is done. Several of them on a multiprocessor keep memory busy while
// others wait for their sums. The more of them there are, the better; so the weights, which all rows have
// in common, can be loaded after the sums, each when it is used, where registers are free. With few rows,
// they are loaded with the row: nothing else would hide how long they take to arrive. Few rows fit the
// cache, too, and need not leave it late. That is a kernel of its own, @normalize_few, from this text; the
// sums of a row have the same order in both. Workgroups that walk over the rows were slower on an H200,
// whether they loaded the next row into registers or copied rows by cp.async.

// What a NormSpec and a Schedule decide. These lines are replaced; the rest changes only by the rules
// of README.md.
!x = bf16
!residual = bf16
!gamma = bf16
!beta = bf16
!acc = f32
#inv_n = 2.44140625e-4 : !acc
#eps = 1.0e-5 : !acc
#subgroup = 32 : index
#centres = true                  // the mean is subtracted
#takes_residual = true           // s is normalized, not x
#scales = true                   // gamma is given
#adds_bias = true
#writes_output = true            // y; without it, only statistics are computed
#forward_columns = 4096 : index  // of a workgroup
#forward_cluster = 1 : index     // workgroups that share a row
#forward_in_clusters = false
#forward_said = 4 : index        // numbers that a subgroup tells the others of its row
#forward_told = 8 : index        // subgroups that share a row
#forward_merging = 8 : index     // lanes that read what they have told
#forward_turns = 1 : index       // in so many turns
#forward_sent_bytes = 128 : i32  // to each workgroup
#forward_vector = 8 : index      // V
#forward_chunks = 2 : index      // C
#forward_threads = 256 : index   // T
#forward_warps = 8 : index       // subgroups of a group
#forward_rows = 1 : index        // of a workgroup at once
#forward_steps = 1 : index       // of a row
#forward_span = 1 : index        // steps that are summed at a time
#forward_whole = true            // steps are full
#forward_keeps = true            // a row is one step, and stays in registers
#forward_shares = false          // a row stays in shared memory
#forward_weights_early = true    // the weights are loaded before the sums
#forward_lasts = true            // rows leave the L2 cache late
#forward_alone = false           // a row has one subgroup, or a part of one
#forward_resident = 1 : i32      // workgroups that a multiprocessor must hold at once
#forward_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [256, 1, 1] subgroup_size = 32>
!pointer = !llvm.ptr<1>          // to a cell of the rows
!x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!residual_rows = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!forward_exchange = memref<1x32x!acc, #gpu.address_space<workgroup>>
!forward_four = vector<4x!acc>
!forward_warps = vector<8x!acc>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!forward_x_kept = memref<1x4096x!x, #gpu.address_space<workgroup>>
!forward_residual_kept = memref<1x4096x!residual, #gpu.address_space<workgroup>>
!forward_x = vector<8x!x>
!forward_residual = vector<8x!residual>
!forward_gamma = vector<8x!gamma>
!forward_beta = vector<8x!beta>
!forward_chunk = vector<8x!acc>
!forward_x_held = memref<2x!forward_x, #gpu.address_space<private>>  // a thread's chunks of a step, in registers
!forward_residual_held = memref<2x!forward_residual, #gpu.address_space<private>>
!forward_gamma_held = memref<2x!forward_gamma, #gpu.address_space<private>>
!forward_beta_held = memref<2x!forward_beta, #gpu.address_space<private>>
!forward_held = memref<2x!forward_chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
// The launch, as iree_lnbwd/launches.py states it: the bindings, and the workgroups for M rows, the least
// number of a list.
#normalize_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer>,  // x [M, N]
  #hal.pipeline.binding<storage_buffer>,  // residual [M, N]
  #hal.pipeline.binding<storage_buffer>,  // gamma [N]
  #hal.pipeline.binding<storage_buffer>,  // beta [N]
  #hal.pipeline.binding<storage_buffer>,  // y [M, N]
  #hal.pipeline.binding<storage_buffer>,  // mean [M]
  #hal.pipeline.binding<storage_buffer>,  // rstd [M]
  #hal.pipeline.binding<storage_buffer>   // s [M, N]
]>
#normalize_x = affine_map<()[m] -> (m ceildiv 1)>
#normalize_y = affine_map<()[m] -> (1)>
// End of what is replaced.

// Of the steps of a row that is not kept. LLVM would unroll a few of them, and keep the row all the same.
#rolled = #llvm.loop_annotation<unroll = <disable = true>>

hal.executable.source private @normalize {
  hal.executable.export public @normalize ordinal(0) layout(#normalize_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %x = affine.min #normalize_x()[%m]
    %y = affine.min #normalize_y()[%m]
    %one = arith.constant 1 : index
    hal.return %x, %y, %one : index, index, index
  }
  builtin.module {
    // From ir/math/.
    func.func private @address_of_x(!x_rows, index, index) -> !pointer
    func.func private @load_lasting_of_x(!x_rows, index, index, !pointer) -> !forward_x
    func.func private @address_of_residual(!residual_rows, index, index) -> !pointer
    func.func private @load_lasting_of_residual(!residual_rows, index, index, !pointer) -> !forward_residual
    func.func private @widen_of_x(!forward_x) -> !forward_chunk
    func.func private @widen_of_residual(!forward_residual) -> !forward_chunk
    func.func private @widen_of_gamma(!forward_gamma) -> !forward_chunk
    func.func private @weight(!forward_chunk) -> !forward_chunk
    func.func private @widen_of_beta(!forward_beta) -> !forward_chunk
    func.func private @rstd(!acc) -> !acc
    func.func private @xhat(!forward_chunk, !acc, !acc) -> !forward_chunk
    func.func private @y(!forward_chunk, !forward_chunk, !forward_chunk) -> !forward_chunk
    func.func private @round_of_x(!forward_chunk) -> !forward_x
    func.func private @round_of_residual(!forward_chunk) -> !forward_residual
    func.func private @mbarrier(!mbarriers, index) -> i32
    func.func private @init_mbarrier(i32)
    func.func private @expect(i32, i32)
    func.func private @of_rank(i32, i32) -> i32
    func.func private @send(i32, !acc, i32)
    func.func private @send_two(i32, !acc, !acc, i32)
    func.func private @await(i32, i32)

    // The first column of thread t's chunk k of a step, of the workgroup's columns, and whether they have
    // that chunk.
    func.func private @column(%step: index, %k: index, %t: index) -> (index, i1) {
      %n = arith.constant #forward_columns
      %v = arith.constant #forward_vector
      %t_count = arith.constant #forward_threads
      %chunks = arith.constant #forward_chunks
      %whole = arith.constant #forward_whole
      %steps_before = arith.muli %step, %chunks : index
      %chunks_before = arith.addi %steps_before, %k : index
      %before = arith.muli %chunks_before, %t_count : index
      %chunk = arith.addi %before, %t : index
      %col = arith.muli %chunk, %v : index
      %before_end = arith.cmpi ult, %col, %n : index
      %inside = arith.ori %whole, %before_end : i1
      return %col, %inside : index, i1
    }

    // Loads a thread's chunks of a step of a row: of x and of the residual, or, once s is stored, of s in
    // place of both. From shared memory it reads only what it has stored there itself. For a chunk past the
    // end of the row, its first chunk is loaded. That of s could not be: another thread stores it.
    func.func private @load(%x: !x_rows, %residual: !residual_rows, %s: !residual_rows, %x_kept: !forward_x_kept,
        %residual_kept: !forward_residual_kept, %group: index, %row: index, %part: index, %step: index, %t: index,
        %again: i1, %x_held: !forward_x_held, %residual_held: !forward_residual_held) {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %chunks = arith.constant #forward_chunks
      %adds_residual = arith.constant #takes_residual
      %no_residual = arith.constant dense<0.0> : !forward_residual
      %shares = arith.constant #forward_shares
      %lasts = arith.constant #forward_lasts
      %was_kept = arith.andi %shares, %again : i1
      %reads_s = arith.andi %adds_residual, %again : i1
      scf.for %k = %c0 to %chunks step %c1 {
        %col, %inside = func.call @column(%step, %k, %t) : (index, index, index) -> (index, i1)
        %col_in = arith.select %inside, %col, %c0 : index
        %at = arith.addi %part, %col : index
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
              %stored = vector.load %s[%row, %at] : !residual_rows, !forward_residual
              scf.yield %stored : !forward_residual
            } else {
              scf.yield %no_residual : !forward_residual
            }
            memref.store %s_k, %residual_held[%k] : !forward_residual_held
          } else {
            %x_k = scf.if %lasts -> !forward_x {
              %address = func.call @address_of_x(%x, %row, %at_in) : (!x_rows, index, index) -> !pointer
              %lasting = func.call @load_lasting_of_x(%x, %row, %at_in, %address) : (!x_rows, index, index, !pointer) -> !forward_x
              scf.yield %lasting : !forward_x
            } else {
              %usual = vector.load %x[%row, %at_in] : !x_rows, !forward_x
              scf.yield %usual : !forward_x
            }
            memref.store %x_k, %x_held[%k] : !forward_x_held
            scf.if %adds_residual {
              %residual_k = scf.if %lasts -> !forward_residual {
                %address = func.call @address_of_residual(%residual, %row, %at_in) : (!residual_rows, index, index) -> !pointer
                %lasting = func.call @load_lasting_of_residual(%residual, %row, %at_in, %address)
                    : (!residual_rows, index, index, !pointer) -> !forward_residual
                scf.yield %lasting : !forward_residual
              } else {
                %usual = vector.load %residual[%row, %at_in] : !residual_rows, !forward_residual
                scf.yield %usual : !forward_residual
              }
              memref.store %residual_k, %residual_held[%k] : !forward_residual_held
            }
          }
        }
      } {llvm.loop_annotation = #unrolled}
      return
    }

    // Loads the weights of a thread's chunk k of a step.
    func.func private @load_weights(%gamma: !gamma_row, %beta: !beta_row, %part: index, %step: index, %k: index,
        %t: index, %gamma_held: !forward_gamma_held, %beta_held: !forward_beta_held) {
      %c0 = arith.constant 0 : index
      %scales = arith.constant #scales
      %adds_bias = arith.constant #adds_bias
      %col, %inside = func.call @column(%step, %k, %t) : (index, index, index) -> (index, i1)
      %col_in = arith.select %inside, %col, %c0 : index
      %at_in = arith.addi %part, %col_in : index
      scf.if %scales {
        %gamma_k = vector.load %gamma[%at_in] : !gamma_row, !forward_gamma
        memref.store %gamma_k, %gamma_held[%k] : !forward_gamma_held
      }
      scf.if %adds_bias {
        %beta_k = vector.load %beta[%at_in] : !beta_row, !forward_beta
        memref.store %beta_k, %beta_held[%k] : !forward_beta_held
      }
      return
    }

    // The values to normalize, from what @load has loaded. Those of s are rounded and stored first.
    func.func private @take(%x_held: !forward_x_held, %residual_held: !forward_residual_held, %again: i1,
        %s: !residual_rows, %x_kept: !forward_x_kept, %residual_kept: !forward_residual_kept, %group: index,
        %row: index, %part: index, %exists: i1, %step: index, %t: index, %values: !forward_held) {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %chunks = arith.constant #forward_chunks
      %adds_residual = arith.constant #takes_residual
      %shares = arith.constant #forward_shares
      %yes = arith.constant true
      %is_first = arith.xori %again, %yes : i1
      %stores_kept = arith.andi %shares, %is_first : i1
      scf.for %k = %c0 to %chunks step %c1 {
        %col, %inside = func.call @column(%step, %k, %t) : (index, index, index) -> (index, i1)
        %at = arith.addi %part, %col : index
        %value = scf.if %adds_residual -> !forward_chunk {
          %residual_k = memref.load %residual_held[%k] : !forward_residual_held
          %s_k = scf.if %again -> !forward_residual {
            scf.yield %residual_k : !forward_residual
          } else {
            %x_k = memref.load %x_held[%k] : !forward_x_held
            %xa = func.call @widen_of_x(%x_k) : (!forward_x) -> !forward_chunk
            %ra = func.call @widen_of_residual(%residual_k) : (!forward_residual) -> !forward_chunk
            %sum = arith.addf %xa, %ra : !forward_chunk
            %rounded = func.call @round_of_residual(%sum) : (!forward_chunk) -> !forward_residual
            %stores = arith.andi %inside, %exists : i1
            scf.if %stores {
              vector.store %rounded, %s[%row, %at] : !residual_rows, !forward_residual
            }
            scf.if %stores_kept {
              vector.store %rounded, %residual_kept[%group, %col] : !forward_residual_kept, !forward_residual
            }
            scf.yield %rounded : !forward_residual
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
        memref.store %value, %values[%k] : !forward_held
      } {llvm.loop_annotation = #unrolled}
      return
    }

    // The values of a step of a row that is not in registers.
    func.func private @reread(%x: !x_rows, %residual: !residual_rows, %s: !residual_rows, %x_kept: !forward_x_kept,
        %residual_kept: !forward_residual_kept, %group: index, %row: index, %part: index, %exists: i1, %step: index,
        %t: index, %again: i1, %values: !forward_held) {
      %keeps = arith.constant #forward_keeps
      scf.if %keeps {
      } else {
        %x_held = memref.alloca() : !forward_x_held
        %residual_held = memref.alloca() : !forward_residual_held
        func.call @load(%x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %step, %t, %again, %x_held, %residual_held)
            : (!x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, index, index, i1, !forward_x_held, !forward_residual_held) -> ()
        func.call @take(%x_held, %residual_held, %again, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %step, %t, %values)
            : (!forward_x_held, !forward_residual_held, i1, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, index, !forward_held) -> ()
      }
      return
    }

    // A thread's share of two sums: of a row's values without %centre, and of the squares of those.
    func.func private @shares(%centre: !acc, %x: !x_rows, %residual: !residual_rows, %s: !residual_rows,
        %x_kept: !forward_x_kept, %residual_kept: !forward_residual_kept, %group: index, %row: index, %part: index,
        %exists: i1, %t: index, %again: i1, %values: !forward_held) -> (!acc, !acc) {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %chunks = arith.constant #forward_chunks
      %steps = arith.constant #forward_steps
      %span = arith.constant #forward_span
      %minus_zeros = arith.constant dense<-0.0> : !forward_chunk  // adding -0.0 changes no number
      %centre_v = vector.broadcast %centre : !acc to !forward_chunk
      %sum, %squares = scf.for %span_first = %c0 to %steps step %span
          iter_args(%sum_0 = %minus_zeros, %squares_0 = %minus_zeros) -> (!forward_chunk, !forward_chunk) {
        %span_after = arith.addi %span_first, %span : index
        %span_end = arith.minui %span_after, %steps : index
        %span_sum, %span_squares = scf.for %step = %span_first to %span_end step %c1
            iter_args(%sum_1 = %minus_zeros, %squares_1 = %minus_zeros) -> (!forward_chunk, !forward_chunk) {
          func.call @reread(%x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %step, %t, %again, %values)
              : (!x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, index, i1, !forward_held) -> ()
          %step_sum, %step_squares = scf.for %k = %c0 to %chunks step %c1
              iter_args(%sum_2 = %sum_1, %squares_2 = %squares_1) -> (!forward_chunk, !forward_chunk) {
            %col, %inside = func.call @column(%step, %k, %t) : (index, index, index) -> (index, i1)
            %value = memref.load %values[%k] : !forward_held
            %centred = arith.subf %value, %centre_v : !forward_chunk
            %with_value = arith.addf %sum_2, %centred : !forward_chunk
            %with_square = math.fma %centred, %centred, %squares_2 : !forward_chunk
            %sum_after = arith.select %inside, %with_value, %sum_2 : !forward_chunk
            %squares_after = arith.select %inside, %with_square, %squares_2 : !forward_chunk
            scf.yield %sum_after, %squares_after : !forward_chunk, !forward_chunk
          } {llvm.loop_annotation = #unrolled}
          scf.yield %step_sum, %step_squares : !forward_chunk, !forward_chunk
        } {llvm.loop_annotation = #rolled}
        %sum_3 = arith.addf %sum_0, %span_sum : !forward_chunk
        %squares_3 = arith.addf %squares_0, %span_squares : !forward_chunk
        scf.yield %sum_3, %squares_3 : !forward_chunk, !forward_chunk
      } {llvm.loop_annotation = #rolled}
      // Any order of these additions will do, as long as it is always the same order.
      %thread_sum = vector.reduction <add>, %sum fastmath<reassoc> : !forward_chunk into !acc
      %thread_squares = vector.reduction <add>, %squares fastmath<reassoc> : !forward_chunk into !acc
      return %thread_sum, %thread_squares : !acc, !acc
    }

    // How many of a workgroup's columns its subgroup has.
    func.func private @columns_of(%warp: index) -> !acc {
      %c0 = arith.constant 0 : index
      %n = arith.constant #forward_columns
      %v = arith.constant #forward_vector
      %t_count = arith.constant #forward_threads
      %lanes = arith.constant #subgroup
      %chunks = arith.divui %n, %v : index
      %of_all = arith.divui %chunks, %t_count : index
      %left = arith.remui %chunks, %t_count : index
      %before = arith.muli %warp, %lanes : index
      %after = arith.subi %left, %before : index
      %some = arith.maxsi %after, %c0 : index
      %more = arith.minsi %some, %lanes : index
      %of_lanes = arith.muli %of_all, %lanes : index
      %mine = arith.addi %of_lanes, %more : index
      %count = arith.muli %mine, %v : index
      %count_i32 = arith.index_castui %count : index to i32
      %count_acc = arith.uitofp %count_i32 : i32 to !acc
      return %count_acc : !acc
    }

    // What a subgroup has to say, to all subgroups of its row, those of the other workgroups of its cluster too:
    // there lane r tells the workgroup of rank r. It has a place of its own for that, so one barrier is enough.
    func.func private @tell(%exchange: !forward_exchange, %mbarriers: !mbarriers, %group: index, %rank: index, %t: index,
        %first: !acc, %second: !acc, %third: !acc, %fourth: !acc) {
      %c0 = arith.constant 0 : index
      %lanes = arith.constant #subgroup
      %cluster = arith.constant #forward_cluster
      %warps = arith.constant #forward_warps
      %said = arith.constant #forward_said
      %in_clusters = arith.constant #forward_in_clusters
      %centres = arith.constant #centres
      %lane = arith.remui %t, %lanes : index
      %warp = arith.divui %t, %lanes : index
      %ranks_before = arith.muli %rank, %warps : index
      %before = arith.addi %ranks_before, %warp : index
      %place = arith.muli %before, %said : index
      scf.if %in_clusters {
        %phase = arith.constant 0 : i32
        %bytes = arith.constant 4 : index
        %two_bytes = arith.constant 8 : i32
        %mbarrier = func.call @mbarrier(%mbarriers, %c0) : (!mbarriers, index) -> i32
        %there = arith.cmpi ult, %lane, %cluster : index
        scf.if %there {
          %offset = arith.muli %place, %bytes : index
          %base = memref.extract_aligned_pointer_as_index %exchange : !forward_exchange -> index
          %mine = arith.addi %base, %offset : index
          %mine_i32 = arith.index_castui %mine : index to i32
          %lane_i32 = arith.index_castui %lane : index to i32
          %theirs = func.call @of_rank(%mine_i32, %lane_i32) : (i32, i32) -> i32
          %their_mbarrier = func.call @of_rank(%mbarrier, %lane_i32) : (i32, i32) -> i32
          scf.if %centres {
            func.call @send_two(%theirs, %first, %second, %their_mbarrier) : (i32, !acc, !acc, i32) -> ()
            %theirs_on = arith.addi %theirs, %two_bytes : i32
            func.call @send_two(%theirs_on, %third, %fourth, %their_mbarrier) : (i32, !acc, !acc, i32) -> ()
          } else {
            func.call @send(%theirs, %first, %their_mbarrier) : (i32, !acc, i32) -> ()
          }
        }
        func.call @await(%mbarrier, %phase) : (i32, i32) -> ()
      } else {
        %leads = arith.cmpi eq, %lane, %c0 : index
        scf.if %leads {
          scf.if %centres {
            %four = vector.from_elements %first, %second, %third, %fourth : !forward_four
            vector.store %four, %exchange[%group, %place] : !forward_exchange, !forward_four
          } else {
            memref.store %first, %exchange[%group, %place] : !forward_exchange
          }
        }
        gpu.barrier
      }
      return
    }

    // The sum of a row's squares, of those of its subgroups.
    func.func private @total(%exchange: !forward_exchange, %group: index) -> !acc {
      %c0 = arith.constant 0 : index
      %zero = arith.constant 0.0 : !acc
      %all = vector.transfer_read %exchange[%group, %c0], %zero {in_bounds = [true]} : !forward_exchange, !forward_warps
      %sum = vector.reduction <add>, %all fastmath<reassoc> : !forward_warps into !acc
      return %sum : !acc
    }

    // A row's mean m, and the sum of its squares without m, of what its subgroups have told. Subgroup w has n_w
    // columns, their sum, and some number p_w near their mean. Without p_w, they sum up to r_w, and their squares
    // to q_w. For any p_w and m, what is asked for is the sum of q_w + (p_w - m) * (2 r_w + n_w (p_w - m)). So an
    // error of p_w or m enters squared, and one exchange is enough. Source: Chan, Golub, LeVeque, "Algorithms for
    // Computing the Sample Variance", The American Statistician 37(3), 1983.
    func.func private @merged(%exchange: !forward_exchange, %group: index, %t: index) -> (!acc, !acc) {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %warps = arith.constant #forward_warps
      %told = arith.constant #forward_told
      %lanes = arith.constant #forward_merging
      %turns = arith.constant #forward_turns
      %said = arith.constant #forward_said
      %zero = arith.constant 0.0 : !acc
      %two = arith.constant 2.0 : !acc
      %inv_n = arith.constant #inv_n
      %lane = arith.remui %t, %lanes : index
      %lane_sum = scf.for %turn = %c0 to %turns step %c1 iter_args(%before = %zero) -> (!acc) {
        %turns_before = arith.muli %turn, %lanes : index
        %which = arith.addi %turns_before, %lane : index
        %there = arith.cmpi ult, %which, %told : index
        %which_in = arith.select %there, %which, %c0 : index
        %place = arith.muli %which_in, %said : index
        %sum = memref.load %exchange[%group, %place] : !forward_exchange
        %more = arith.addf %before, %sum : !acc
        %after = arith.select %there, %more, %before : !acc
        scf.yield %after : !acc
      } {llvm.loop_annotation = #unrolled}
      %row_sum = gpu.subgroup_reduce add %lane_sum cluster(size = 16) : (!acc) -> !acc
      %mean = arith.mulf %row_sum, %inv_n : !acc
      %lane_squares = scf.for %turn = %c0 to %turns step %c1 iter_args(%before = %zero) -> (!acc) {
        %turns_before = arith.muli %turn, %lanes : index
        %which = arith.addi %turns_before, %lane : index
        %there = arith.cmpi ult, %which, %told : index
        %which_in = arith.select %there, %which, %c0 : index
        %place = arith.muli %which_in, %said : index
        %four = vector.load %exchange[%group, %place] : !forward_exchange, !forward_four
        %p = vector.extract %four[1] : !acc from !forward_four
        %r = vector.extract %four[2] : !acc from !forward_four
        %q = vector.extract %four[3] : !acc from !forward_four
        %warp = arith.remui %which_in, %warps : index
        %n = func.call @columns_of(%warp) : (index) -> !acc
        %off = arith.subf %p, %mean : !acc
        %twice_r = arith.mulf %two, %r : !acc
        %slope = math.fma %n, %off, %twice_r : !acc
        %squares = math.fma %off, %slope, %q : !acc
        %more = arith.addf %before, %squares : !acc
        %after = arith.select %there, %more, %before : !acc
        scf.yield %after : !acc
      } {llvm.loop_annotation = #unrolled}
      %squares = gpu.subgroup_reduce add %lane_squares cluster(size = 16) : (!acc) -> !acc
      return %mean, %squares : !acc, !acc
    }

    func.func @normalize() attributes {translation_info = #forward_kernel, nvvm.minctasm = #forward_resident} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %first_time = arith.constant false
      %t_count = arith.constant #forward_threads
      %rows = arith.constant #forward_rows
      %chunks = arith.constant #forward_chunks
      %steps = arith.constant #forward_steps
      %keeps = arith.constant #forward_keeps
      %weights_early = arith.constant #forward_weights_early
      %centres = arith.constant #centres
      %adds_residual = arith.constant #takes_residual
      %scales = arith.constant #scales
      %adds_bias = arith.constant #adds_bias
      %writes_output = arith.constant #writes_output
      %in_clusters = arith.constant #forward_in_clusters
      %zero = arith.constant 0.0 : !acc
      %inv_n = arith.constant #inv_n
      %ones = arith.constant dense<1.0> : !forward_chunk
      %minus_zeros = arith.constant dense<-0.0> : !forward_chunk  // adding -0.0 changes no number

      // A spec without a tensor has another in its place. That is neither read nor written in its name.
      %m_i32 = hal.interface.constant.load layout(#normalize_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %x = hal.interface.binding.subspan layout(#normalize_layout) binding(0) alignment(64) offset(%c0) : !x_rows{%m}
      %residual = hal.interface.binding.subspan layout(#normalize_layout) binding(1) alignment(64) offset(%c0) : !residual_rows{%m}
      %gamma = hal.interface.binding.subspan layout(#normalize_layout) binding(2) alignment(64) offset(%c0) : !gamma_row
      %beta = hal.interface.binding.subspan layout(#normalize_layout) binding(3) alignment(64) offset(%c0) : !beta_row
      %y = hal.interface.binding.subspan layout(#normalize_layout) binding(4) alignment(64) offset(%c0) : !x_rows{%m}
      %mean = hal.interface.binding.subspan layout(#normalize_layout) binding(5) alignment(64) offset(%c0) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#normalize_layout) binding(6) alignment(64) offset(%c0) : !acc_column{%m}
      %s = hal.interface.binding.subspan layout(#normalize_layout) binding(7) alignment(64) offset(%c0) : !residual_rows{%m}

      %workgroup = hal.interface.workgroup.id[0] : index
      %id_y = hal.interface.workgroup.id[1] : index
      %rank = arith.select %in_clusters, %id_y, %c0 : index  // of the cluster's workgroups
      %own_columns = arith.constant #forward_columns
      %part = arith.muli %rank, %own_columns : index         // the first column of this workgroup
      %thread = gpu.thread_id x
      %group = arith.divui %thread, %t_count : index
      %t = arith.remui %thread, %t_count : index
      %is_first = arith.cmpi eq, %t, %c0 : index
      %leads_cluster = arith.cmpi eq, %rank, %c0 : index
      %mbarriers = memref.alloc() : !mbarriers                  // [1]
      %exchange = memref.alloc() : !forward_exchange            // [groups, what each warp of the cluster has said]
      %x_kept = memref.alloc() : !forward_x_kept                // [groups, columns of T threads' steps]
      %residual_kept = memref.alloc() : !forward_residual_kept  // likewise: s

      // Registers, with a place for each of a thread's chunks.
      %x_held = memref.alloca() : !forward_x_held
      %residual_held = memref.alloca() : !forward_residual_held
      %gamma_held = memref.alloca() : !forward_gamma_held
      %beta_held = memref.alloca() : !forward_beta_held
      %values = memref.alloca() : !forward_held

      // A set of rows, one row for each group. Groups past the last row read the last row, because they wait
      // with the others, and store nothing.
      %last_row = arith.subi %m, %c1 : index
      %one_row = arith.cmpi eq, %rows, %c1 : index
      %set_first = arith.muli %workgroup, %rows : index
      %row_mine = arith.addi %set_first, %group : index
      %row = arith.minui %row_mine, %last_row : index
      %before_end = arith.cmpi ule, %row_mine, %last_row : index
      %exists = arith.ori %one_row, %before_end : i1

      // Nobody sends to a workgroup that has not begun. None ends before all that is sent to it has come.
      scf.if %in_clusters {
        %is_zero = arith.cmpi eq, %thread, %c0 : index
        scf.if %is_zero {
          %sent_bytes = arith.constant #forward_sent_bytes
          %mbarrier = func.call @mbarrier(%mbarriers, %c0) : (!mbarriers, index) -> i32
          func.call @init_mbarrier(%mbarrier) : (i32) -> ()
          func.call @expect(%mbarrier, %sent_bytes) : (i32, i32) -> ()
        }
        nvvm.cluster.arrive.relaxed
      }

      // What a row needs is loaded before anything is waited for.
      %loads_weights = arith.andi %writes_output, %weights_early : i1
      scf.if %keeps {
        func.call @load(%x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %c0, %t, %first_time, %x_held, %residual_held)
            : (!x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, index, index, i1, !forward_x_held, !forward_residual_held) -> ()
      }
      scf.if %loads_weights {
        scf.for %k = %c0 to %chunks step %c1 {
          func.call @load_weights(%gamma, %beta, %part, %c0, %k, %t, %gamma_held, %beta_held)
              : (!gamma_row, !beta_row, index, index, index, index, !forward_gamma_held, !forward_beta_held) -> ()
        } {llvm.loop_annotation = #unrolled}
      }
      scf.if %keeps {
        func.call @take(%x_held, %residual_held, %first_time, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %c0, %t, %values)
            : (!forward_x_held, !forward_residual_held, i1, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, index, !forward_held) -> ()
      }

      scf.if %in_clusters {
        nvvm.cluster.wait
      }

      // The variance is biased and is computed from values without their mean, or that of their subgroup: the
      // mean of squares minus the square of the mean would cancel.
      %alone = arith.constant #forward_alone
      %mean_row, %sum_squares = scf.if %centres -> (!acc, !acc) {
        %again = arith.constant true
        %share, %unused = func.call @shares(%zero, %x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %t, %first_time, %values)
            : (!acc, !x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, i1, !forward_held) -> (!acc, !acc)
        %sum = gpu.subgroup_reduce add %share cluster(size = 32) : (!acc) -> !acc
        %near_mean = scf.if %alone -> !acc {
          %mean_of_row = arith.mulf %sum, %inv_n : !acc
          scf.yield %mean_of_row : !acc
        } else {
          %one = arith.constant 1.0 : !acc
          %lanes = arith.constant #subgroup
          %warp = arith.divui %t, %lanes : index
          %count = func.call @columns_of(%warp) : (index) -> !acc
          %some = arith.maximumf %count, %one : !acc
          %mean_of_warp = arith.divf %sum, %some : !acc
          scf.yield %mean_of_warp : !acc
        }
        %share_centred, %share_squares = func.call @shares(%near_mean, %x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %t, %again, %values)
            : (!acc, !x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, i1, !forward_held) -> (!acc, !acc)
        %squares = gpu.subgroup_reduce add %share_squares cluster(size = 32) : (!acc) -> !acc
        %mean_of_all, %squares_of_all = scf.if %alone -> (!acc, !acc) {
          scf.yield %near_mean, %squares : !acc, !acc
        } else {
          %centred = gpu.subgroup_reduce add %share_centred cluster(size = 32) : (!acc) -> !acc
          func.call @tell(%exchange, %mbarriers, %group, %rank, %t, %sum, %near_mean, %centred, %squares)
              : (!forward_exchange, !mbarriers, index, index, index, !acc, !acc, !acc, !acc) -> ()
          %merged_mean, %merged_squares = func.call @merged(%exchange, %group, %t) : (!forward_exchange, index, index) -> (!acc, !acc)
          scf.yield %merged_mean, %merged_squares : !acc, !acc
        }
        scf.yield %mean_of_all, %squares_of_all : !acc, !acc
      } else {
        %unused, %share_squares = func.call @shares(%zero, %x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %t, %first_time, %values)
            : (!acc, !x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, i1, !forward_held) -> (!acc, !acc)
        %squares = gpu.subgroup_reduce add %share_squares cluster(size = 32) : (!acc) -> !acc
        %squares_of_all = scf.if %alone -> !acc {
          scf.yield %squares : !acc
        } else {
          func.call @tell(%exchange, %mbarriers, %group, %rank, %t, %squares, %zero, %zero, %zero)
              : (!forward_exchange, !mbarriers, index, index, index, !acc, !acc, !acc, !acc) -> ()
          %total = func.call @total(%exchange, %group) : (!forward_exchange, index) -> !acc
          scf.yield %total : !acc
        }
        scf.yield %zero, %squares_of_all : !acc, !acc
      }
      %rstd_row = func.call @rstd(%sum_squares) : (!acc) -> !acc
      %is_there = arith.andi %is_first, %exists : i1
      %stores_statistics = arith.andi %leads_cluster, %is_there : i1
      scf.if %stores_statistics {
        scf.if %centres {
          memref.store %mean_row, %mean[%row] : !acc_column
        }
        memref.store %rstd_row, %rstd[%row] : !acc_column
      }

      %again = arith.constant true
      scf.if %writes_output {
        scf.for %step = %c0 to %steps step %c1 {
          func.call @reread(%x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %step, %t, %again, %values)
              : (!x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, index, i1, !forward_held) -> ()
          scf.for %k = %c0 to %chunks step %c1 {
            %col, %inside = func.call @column(%step, %k, %t) : (index, index, index) -> (index, i1)
            %at = arith.addi %part, %col : index
            scf.if %weights_early {
            } else {
              func.call @load_weights(%gamma, %beta, %part, %step, %k, %t, %gamma_held, %beta_held)
                  : (!gamma_row, !beta_row, index, index, index, index, !forward_gamma_held, !forward_beta_held) -> ()
            }
            %value = memref.load %values[%k] : !forward_held
            %xhat = func.call @xhat(%value, %mean_row, %rstd_row) : (!forward_chunk, !acc, !acc) -> !forward_chunk
            %g = scf.if %scales -> !forward_chunk {
              %gamma_k = memref.load %gamma_held[%k] : !forward_gamma_held
              %ga = func.call @widen_of_gamma(%gamma_k) : (!forward_gamma) -> !forward_chunk
              %weight = func.call @weight(%ga) : (!forward_chunk) -> !forward_chunk
              scf.yield %weight : !forward_chunk
            } else {
              scf.yield %ones : !forward_chunk
            }
            %b = scf.if %adds_bias -> !forward_chunk {
              %beta_k = memref.load %beta_held[%k] : !forward_beta_held
              %ba = func.call @widen_of_beta(%beta_k) : (!forward_beta) -> !forward_chunk
              scf.yield %ba : !forward_chunk
            } else {
              scf.yield %minus_zeros : !forward_chunk
            }
            %ya = func.call @y(%xhat, %g, %b) : (!forward_chunk, !forward_chunk, !forward_chunk) -> !forward_chunk
            %y_k = func.call @round_of_x(%ya) : (!forward_chunk) -> !forward_x
            %stores = arith.andi %inside, %exists : i1
            scf.if %stores {
              vector.store %y_k, %y[%row, %at] : !x_rows, !forward_x
            }
          } {llvm.loop_annotation = #unrolled}
        } {llvm.loop_annotation = #rolled}
      }

      // This branch is never taken. Without a store, LLVM finds that these bindings are read-only. ptxas
      // then moves the loads, which are meant to overlap with the barriers, to behind them.
      %never = arith.cmpi eq, %m, %c0 : index
      scf.if %never {
        %zero_x = arith.constant dense<0.0> : !forward_x
        vector.store %zero_x, %x[%c0, %c0] : !x_rows, !forward_x
        scf.if %adds_residual {
          %zero_residual = arith.constant dense<0.0> : !forward_residual
          vector.store %zero_residual, %residual[%c0, %c0] : !residual_rows, !forward_residual
        }
        %weighs = arith.andi %scales, %writes_output : i1
        scf.if %weighs {
          %zero_gamma = arith.constant dense<0.0> : !forward_gamma
          vector.store %zero_gamma, %gamma[%c0] : !gamma_row, !forward_gamma
        }
        %shifts = arith.andi %adds_bias, %writes_output : i1
        scf.if %shifts {
          %zero_beta = arith.constant dense<0.0> : !forward_beta
          vector.store %zero_beta, %beta[%c0] : !beta_row, !forward_beta
        }
      }
      return
    }
  }
}
