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
// step is a whole row, or in shared memory, as narrow as it came. In registers, too, it may stay narrow and
// be widened for each of the three. A wider row is read again, from the cache, each time.
//
// A cluster of workgroups may share a row (NVIDIA since sm_90): each has a part of the columns. How a row's sums come
// together is in parts/forward/sums/; iree_lnbwd/compiling/ir.py takes one of these files, which have the same functions.
//
// A workgroup has one set of rows, and is done. Several of them on a multiprocessor keep memory busy while
// others wait for their sums. The more of them there are, the better; so the weights, which all rows have
// in common, can be loaded after the sums, each when it is used, where registers are free. With few rows,
// they are loaded with the row: nothing else would hide how long they take to arrive. Few rows fit the
// cache, too, and need not leave it late. That is a kernel of its own, @normalize_few, from this text; the
// sums of a row have the same order in both.
//
// Or workgroups walk (#forward_walks): they have one set of rows after the other, all of which begin at the same place of
// an access. Then weights are read once, and cut once, if they must be. Registers keep them, and have room for fewer rows,
// or they wait in shared memory (parts/forward/weights.mlir). The rows that come next may be copied into shared memory
// meanwhile (parts/forward/copies.mlir).

// What a NormSpec and a Schedule decide. These lines are replaced; the rest changes only by the rules
// of README.md.
!x = bf16
!y = bf16
!residual = bf16
!gamma = bf16
!beta = bf16
!acc = f32
#inv_n = 2.44140625e-4 : !acc
#centres = true  // the mean is subtracted
#takes_residual = true  // s is normalized, not x
#scales = true  // gamma is given
#adds_bias = true
#gates_first = false  // the gate is before the norm
#writes_output = true  // y; without it, only statistics are computed
#forward_columns = 4096 : index  // of a workgroup
#forward_in_clusters = false
#forward_chunks = 2 : index  // C
#forward_threads = 256 : index  // T
#forward_rows = 1 : index  // of a workgroup at once
#forward_steps = 1 : index  // of a row
#forward_in_registers = true  // a row is one step, and stays there
#forward_weights_early = true  // the weights are loaded before the sums
#forward_packs = false  // rows stay in registers as narrow as they came
#forward_resident = 1 : i32  // workgroups that a multiprocessor must hold at once
#forward_walks = 0 : index  // rows that are at work at once, if workgroups walk over the rows; else 0
#forward_meets = false  // threads of a walk meet once more for each row
#forward_copies = false  // rows of a walk are copied into shared memory
#forward_slots = 1 : index  // rows that a workgroup has there then
#forward_stages_weights = false  // weights of a walk are in shared memory
#forward_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [256, 1, 1] subgroup_size = 32>
!forward_x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!forward_y_rows = memref<?x4096x!y, #hal.descriptor_type<storage_buffer>>
!forward_residual_rows = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!forward_exchange = memref<2x1x8x!acc, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!forward_x_kept = memref<1x4096x!x, #gpu.address_space<workgroup>>
!forward_residual_kept = memref<1x4096x!residual, #gpu.address_space<workgroup>>
!forward_staged = memref<1x1x8x!x, #gpu.address_space<workgroup>>
!forward_gamma_staged = memref<1x1x8x!gamma, #gpu.address_space<workgroup>>
!forward_beta_staged = memref<1x1x8x!beta, #gpu.address_space<workgroup>>
!forward_x = vector<8x!x>
!forward_y = vector<8x!y>
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
#rolled = #llvm.loop_annotation<unroll = <disable = true>>  // else LLVM would unroll steps of a row, and keep it all the same
!forward_thread = vector<8xindex>  // its numbers: parts/forward/thread.mlir
// The launch, as iree_lnbwd/vmfb/launches.py states it: the bindings, and the workgroups for M rows, the least
// number of a list.
#normalize_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer>,  // x [M, N]
  #hal.pipeline.binding<storage_buffer>,  // residual [M, N]
  #hal.pipeline.binding<storage_buffer>,  // gamma [N]
  #hal.pipeline.binding<storage_buffer>,  // beta [N]
  #hal.pipeline.binding<storage_buffer>,  // z [M, N]
  #hal.pipeline.binding<storage_buffer>,  // y [M, N]
  #hal.pipeline.binding<storage_buffer>,  // mean [M]
  #hal.pipeline.binding<storage_buffer>,  // rstd [M]
  #hal.pipeline.binding<storage_buffer>   // s [M, N]
]>
#normalize_x = affine_map<()[m] -> (m ceildiv 1)>
#normalize_y = affine_map<()[m] -> (1)>
// End of what is replaced.

hal.executable.source private @normalize {
  hal.executable.export public @normalize ordinal(0) layout(#normalize_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %x = affine.min #normalize_x()[%m]
    %y = affine.min #normalize_y()[%m]
    %one = arith.constant 1 : index
    hal.return %x, %y, %one : index, index, index
  }
  builtin.module {
    // From ir/parts/forward/.
    func.func private @ready_for_sums(!mbarriers, !forward_thread)
    func.func private @load(!forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, index, i1, !forward_x_held, !forward_residual_held)
    func.func private @load_weights(!gamma_row, !beta_row, !forward_thread, index, index, !forward_gamma_held, !forward_beta_held)
    func.func private @stage_weights(!forward_gamma_staged, !forward_beta_staged, !forward_thread, index, !forward_gamma_held, !forward_beta_held)
    func.func private @staged_weights(!forward_gamma_staged, !forward_beta_staged, !forward_thread, index, !forward_gamma_held, !forward_beta_held)
    func.func private @take(!forward_x_held, !forward_residual_held, i1, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, index, !forward_held)
    func.func private @others_are_ready()
    func.func private @share(i1, !acc, !forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, i1, !forward_held) -> !acc
    func.func private @centre(!acc, !forward_exchange, !forward_thread) -> !acc
    func.func private @take_anew(!forward_x_held, !forward_held)
    func.func private @merges() -> i1
    func.func private @statistics(!acc, !acc, !acc, !forward_exchange, !mbarriers, !forward_thread) -> (!acc, !acc)
    func.func private @reread(!forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, index, i1, !forward_held)
    func.func private @column(index, index, !forward_thread) -> (index, i1)
    func.func private @put_of_y(!forward_y_rows, !forward_y, index, index, index, index, i1, i1)
    func.func private @memory_rows(index) -> index
    func.func private @fetch_ahead(!forward_x_rows, !forward_residual_rows, index, !forward_thread)
    func.func private @begin_copies(!mbarriers, !forward_thread)
    func.func private @copy_row(!forward_x_rows, !forward_staged, !mbarriers, index, !forward_thread)
    func.func private @load_copied(!forward_x_rows, !forward_staged, !mbarriers, !forward_thread, !forward_x_held)
    func.func private @load_copied_again(!forward_x_rows, !forward_staged, !forward_thread, !forward_x_held)
    func.func private @take_stored(!forward_x_rows, !forward_thread, !forward_x_held, !forward_residual_held, !forward_held)
    // From ir/math/.
    func.func private @rstd(!acc) -> !acc
    // with sets: func.func private @row_set(index, index, index) -> index
    // with strides: func.func private @row_of_x(!forward_x_rows, index) -> !forward_x_rows
    // with strides: func.func private @row_of_residual(!forward_residual_rows, index) -> !forward_residual_rows
    // with strides: func.func private @row_of_y(!forward_y_rows, index) -> !forward_y_rows
    func.func private @xhat(!forward_chunk, !acc, !acc) -> !forward_chunk
    func.func private @settled_of_gamma(!forward_gamma) -> !forward_gamma
    func.func private @settled_of_beta(!forward_beta) -> !forward_beta
    func.func private @widen_of_gamma(!forward_gamma) -> !forward_chunk
    func.func private @weight(!forward_chunk) -> !forward_chunk
    func.func private @widen_of_beta(!forward_beta) -> !forward_chunk
    func.func private @y(!forward_chunk, !forward_chunk, !forward_chunk) -> !forward_chunk
    func.func private @round_of_y(!forward_chunk) -> !forward_y
    // With a gate:
    func.func private @widen_of_residual(!forward_residual) -> !forward_chunk
    func.func private @stored_of_residual(!forward_residual, index, !forward_residual_held) -> !forward_residual
    func.func private @silu_of_z(!forward_chunk) -> (!forward_chunk, !forward_chunk)
    func.func private @gated_output(!forward_chunk, !forward_chunk) -> !forward_chunk
    func.func private @settled_of_residual(!forward_residual) -> !forward_residual
    // End of the gate.

    func.func @normalize() attributes {translation_info = #forward_kernel, nvvm.minctasm = #forward_resident} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %first_time = arith.constant false
      %t_count = arith.constant #forward_threads
      %rows = arith.constant #forward_rows
      %chunks = arith.constant #forward_chunks
      %steps = arith.constant #forward_steps
      %in_registers = arith.constant #forward_in_registers
      %packs = arith.constant #forward_packs
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
      // with sets: %sets_i32 = hal.interface.constant.load layout(#normalize_layout) ordinal(1) : i32
      // with sets: %sets = arith.index_castui %sets_i32 : i32 to index
      // with sets: %rows_per_set_i32 = hal.interface.constant.load layout(#normalize_layout) ordinal(2) : i32
      // with sets: %rows_per_set = arith.index_castui %rows_per_set_i32 : i32 to index
      // with sets: %set_workgroup = hal.interface.workgroup.id[0] : index
      // with sets: %set_thread = gpu.thread_id x
      // with sets: %set_group = arith.divui %set_thread, %t_count : index
      // with sets: %set_first_row = arith.muli %set_workgroup, %rows : index
      // with sets: %set_row_mine = arith.addi %set_first_row, %set_group : index
      // with sets: %set_last_row = arith.subi %m, %c1 : index
      // with sets: %set_row = arith.minui %set_row_mine, %set_last_row : index
      // with sets: %set = func.call @row_set(%set_row, %sets, %rows_per_set) : (index, index, index) -> index
      // with sets: %gamma_bytes = arith.constant #gamma_bytes
      // with sets: %gamma_at = arith.muli %set, %gamma_bytes : index
      // with sets: %beta_bytes = arith.constant #beta_bytes
      // with sets: %beta_at = arith.muli %set, %beta_bytes : index
      %memory_rows = func.call @memory_rows(%m) : (index) -> index
      %x = hal.interface.binding.subspan layout(#normalize_layout) binding(0) alignment(64) offset(%c0) : !forward_x_rows{%memory_rows}
      %residual = hal.interface.binding.subspan layout(#normalize_layout) binding(1) alignment(64) offset(%c0) : !forward_residual_rows{%memory_rows}
      %gamma = hal.interface.binding.subspan layout(#normalize_layout) binding(2) alignment(64) offset(%c0) : !gamma_row  // without sets
      // with sets: %gamma = hal.interface.binding.subspan layout(#normalize_layout) binding(2) alignment(64) offset(%gamma_at) : !gamma_row
      %beta = hal.interface.binding.subspan layout(#normalize_layout) binding(3) alignment(64) offset(%c0) : !beta_row  // without sets
      // with sets: %beta = hal.interface.binding.subspan layout(#normalize_layout) binding(3) alignment(64) offset(%beta_at) : !beta_row
      %y = hal.interface.binding.subspan layout(#normalize_layout) binding(5) alignment(64) offset(%c0) : !forward_y_rows{%memory_rows}
      %mean = hal.interface.binding.subspan layout(#normalize_layout) binding(6) alignment(64) offset(%c0) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#normalize_layout) binding(7) alignment(64) offset(%c0) : !acc_column{%m}
      %s = hal.interface.binding.subspan layout(#normalize_layout) binding(8) alignment(64) offset(%c0) : !forward_residual_rows{%memory_rows}
      // With a gate:
      // z is where others have a residual. A statistic of x alone is not asked for it.
      %residual_gated = hal.interface.binding.subspan layout(#normalize_layout) binding(4) alignment(64) offset(%c0) : !forward_residual_rows{%memory_rows}
      %gates_first = arith.constant #gates_first
      %reads_gate = arith.ori %gates_first, %writes_output : i1
      // End of the gate.

      %workgroup = hal.interface.workgroup.id[0] : index
      %id_y = hal.interface.workgroup.id[1] : index
      %rank = arith.select %in_clusters, %id_y, %c0 : index  // of the cluster's workgroups
      %own_columns = arith.constant #forward_columns
      %part = arith.muli %rank, %own_columns : index         // the first column of this workgroup
      %id = gpu.thread_id x
      %group = arith.divui %id, %t_count : index
      %t = arith.remui %id, %t_count : index
      %is_first = arith.cmpi eq, %t, %c0 : index
      %leads_cluster = arith.cmpi eq, %rank, %c0 : index
      %mbarriers = memref.alloc() : !mbarriers                  // one is used
      %exchange = memref.alloc() : !forward_exchange            // [sums, groups, warps], or of a cluster [turns, warps, sums]
      %x_kept = memref.alloc() : !forward_x_kept                // [groups, columns of T threads' steps]
      %residual_kept = memref.alloc() : !forward_residual_kept  // likewise: s

      %staged = "memref.alloc"() <{alignment = 128 : i64, operandSegmentSizes = array<i32: 0, 0>}> : () -> !forward_staged  // [slots, 1, columns]
      %gamma_staged = memref.alloc() : !forward_gamma_staged  // [chunks, threads, columns of a chunk]
      %beta_staged = memref.alloc() : !forward_beta_staged    // likewise

      // Registers, with room for each of a thread's chunks.
      %x_held = memref.alloca() : !forward_x_held
      %residual_held = memref.alloca() : !forward_residual_held
      %gamma_held = memref.alloca() : !forward_gamma_held
      %beta_held = memref.alloca() : !forward_beta_held
      %values = memref.alloca() : !forward_held

      %yes = arith.constant true
      // A walk has a round for each set of rows. Without one, there is one round.
      %walk = arith.constant #forward_walks
      %slots = arith.constant #forward_slots
      %walks = arith.cmpi ne, %walk, %c0 : index
      %may_copy = arith.constant #forward_copies
      %copies = arith.andi %walks, %may_copy : i1
      %may_stage_weights = arith.constant #forward_stages_weights
      %stages_weights = arith.andi %walks, %may_stage_weights : i1
      %meets = arith.constant #forward_meets
      %last_row = arith.subi %m, %c1 : index
      %one_row = arith.cmpi eq, %rows, %c1 : index
      %begins = arith.muli %workgroup, %rows : index
      %begins_mine = arith.addi %begins, %group : index
      %first_row = arith.minui %begins_mine, %last_row : index
      %begin_thread = vector.from_elements %id, %t, %group, %first_row, %rank, %part, %c0, %begins : !forward_thread
      func.call @ready_for_sums(%mbarriers, %begin_thread) : (!mbarriers, !forward_thread) -> ()
      %loads_weights = arith.andi %writes_output, %weights_early : i1
      %keeps_weights = arith.andi %loads_weights, %walks : i1
      scf.if %copies {
        func.call @begin_copies(%mbarriers, %begin_thread) : (!mbarriers, !forward_thread) -> ()
        scf.for %slot = %c0 to %slots step %c1 {
          %slots_on = arith.muli %slot, %walk : index
          %row_of_slot = arith.addi %begins, %slots_on : index
          %thread_of_slot = vector.from_elements %id, %t, %group, %row_of_slot, %rank, %part, %slot, %row_of_slot : !forward_thread
          func.call @copy_row(%x, %staged, %mbarriers, %m, %thread_of_slot) : (!forward_x_rows, !forward_staged, !mbarriers, index, !forward_thread) -> ()
        } {llvm.loop_annotation = #unrolled}
      }
      scf.if %walks {
        func.call @others_are_ready() : () -> ()
      }
      scf.if %keeps_weights {
        scf.for %k = %c0 to %chunks step %c1 {
          func.call @load_weights(%gamma, %beta, %begin_thread, %c0, %k, %gamma_held, %beta_held)
              : (!gamma_row, !beta_row, !forward_thread, index, index, !forward_gamma_held, !forward_beta_held) -> ()
          scf.if %stages_weights {
            func.call @stage_weights(%gamma_staged, %beta_staged, %begin_thread, %k, %gamma_held, %beta_held)
                : (!forward_gamma_staged, !forward_beta_staged, !forward_thread, index, !forward_gamma_held, !forward_beta_held) -> ()
          }
        } {llvm.loop_annotation = #unrolled}
      }
      %left = arith.subi %m, %begins : index
      %step_of_walk = arith.maxui %walk, %c1 : index
      %rounds_left = arith.ceildivui %left, %step_of_walk : index
      %rounds = arith.select %walks, %rounds_left, %c1 : index
      scf.for %round = %c0 to %rounds step %c1 {
        // A set of rows, one row for each group. Groups past the last row read the last row, because they wait
        // with the others, and store nothing.
        %walked = arith.muli %round, %walk : index
        %set_first = arith.addi %begins, %walked : index
        %row_mine = arith.addi %set_first, %group : index
        %row_of_walk = arith.minui %row_mine, %last_row : index
        %row = arith.select %walks, %row_of_walk, %first_row : index
        %before_end = arith.cmpi ule, %row_mine, %last_row : index
        %exists = arith.ori %one_row, %before_end : i1

        // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!forward_x_rows, index) -> !forward_x_rows
        // with strides: %residual_strided = func.call @row_of_residual(%residual, %row) : (!forward_residual_rows, index) -> !forward_residual_rows
        // with strides: %y_strided = func.call @row_of_y(%y, %row) : (!forward_y_rows, index) -> !forward_y_rows
        // with strides: %s_strided = func.call @row_of_residual(%s, %row) : (!forward_residual_rows, index) -> !forward_residual_rows
        %thread = vector.from_elements %id, %t, %group, %row, %rank, %part, %round, %set_first : !forward_thread

        // What a row needs is loaded before anything is waited for.
        %is_alone = arith.xori %walks, %yes : i1
        %loads_own_weights = arith.andi %loads_weights, %is_alone : i1
        %reads_memory = arith.xori %copies, %yes : i1
        %loads = arith.andi %in_registers, %reads_memory : i1
        scf.if %copies {
          func.call @load_copied(%x, %staged, %mbarriers, %thread, %x_held) : (!forward_x_rows, !forward_staged, !mbarriers, !forward_thread, !forward_x_held) -> ()
        }
        scf.if %loads {
          func.call @load(%x, %residual, %s, %x_kept, %residual_kept, %thread, %c0, %first_time, %x_held, %residual_held)
              : (!forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, index, i1, !forward_x_held, !forward_residual_held) -> ()
        }
        scf.if %loads_own_weights {
          scf.for %k = %c0 to %chunks step %c1 {
            func.call @load_weights(%gamma, %beta, %thread, %c0, %k, %gamma_held, %beta_held)
                : (!gamma_row, !beta_row, !forward_thread, index, index, !forward_gamma_held, !forward_beta_held) -> ()
          } {llvm.loop_annotation = #unrolled}
        }
        scf.if %in_registers {
          func.call @take(%x_held, %residual_held, %first_time, %s, %x_kept, %residual_kept, %thread, %exists, %c0, %values)
              : (!forward_x_held, !forward_residual_held, i1, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, index, !forward_held) -> ()
        }

        scf.if %is_alone {
          func.call @others_are_ready() : () -> ()
        }

        // The variance is biased and is computed from centred values: the mean of squares minus the square
        // of the mean would cancel. In a cluster, they are without the mean of their subgroup.
        %values_sum = arith.constant false
        %squares_sum = arith.constant true
        %centre = scf.if %centres -> !acc {
          %share = func.call @share(%values_sum, %zero, %x, %residual, %s, %x_kept, %residual_kept, %thread, %exists, %first_time, %values)
              : (i1, !acc, !forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, i1, !forward_held) -> !acc
          %near_mean = func.call @centre(%share, %exchange, %thread) : (!acc, !forward_exchange, !forward_thread) -> !acc
          scf.yield %near_mean : !acc
        } else {
          scf.yield %zero : !acc
        }
        scf.if %packs {
          func.call @take_anew(%x_held, %values) : (!forward_x_held, !forward_held) -> ()
        }
        %share_squares = func.call @share(%squares_sum, %centre, %x, %residual, %s, %x_kept, %residual_kept, %thread, %exists, %centres, %values)
            : (i1, !acc, !forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, i1, !forward_held) -> !acc
        %merges = func.call @merges() : () -> i1
        %has_centred = arith.andi %merges, %centres : i1
        %share_centred = scf.if %has_centred -> !acc {
          %centred = func.call @share(%values_sum, %centre, %x, %residual, %s, %x_kept, %residual_kept, %thread, %exists, %centres, %values)
              : (i1, !acc, !forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, i1, !forward_held) -> !acc
          scf.yield %centred : !acc
        } else {
          scf.yield %zero : !acc
        }
        %mean_row, %sum_squares = func.call @statistics(%centre, %share_centred, %share_squares, %exchange, %mbarriers, %thread)
            : (!acc, !acc, !acc, !forward_exchange, !mbarriers, !forward_thread) -> (!acc, !acc)
        %rstd_row = func.call @rstd(%sum_squares) : (!acc) -> !acc
        %is_there = arith.andi %is_first, %exists : i1
        %stores_statistics = arith.andi %leads_cluster, %is_there : i1
        scf.if %stores_statistics {
          scf.if %centres {
            memref.store %mean_row, %mean[%row] : !acc_column
          }
          memref.store %rstd_row, %rstd[%row] : !acc_column
        }
        // All threads are done with the row before. Where they meet twice for their sums, they have shown it.
        %meets_now = arith.andi %walks, %meets : i1
        scf.if %meets_now {
          gpu.barrier
        }
        scf.if %copies {
          %has_room = arith.cmpi ne, %round, %c0 : index
          scf.if %has_room {
            %rounds_on = arith.addi %round, %slots : index
            %round_next = arith.subi %rounds_on, %c1 : index
            %walked_next = arith.muli %round_next, %walk : index
            %row_next = arith.addi %begins, %walked_next : index
            %thread_next = vector.from_elements %id, %t, %group, %row_next, %rank, %part, %round_next, %row_next : !forward_thread
            func.call @copy_row(%x, %staged, %mbarriers, %m, %thread_next) : (!forward_x_rows, !forward_staged, !mbarriers, index, !forward_thread) -> ()
          }
        }
        func.call @fetch_ahead(%x, %residual, %m, %thread) : (!forward_x_rows, !forward_residual_rows, index, !forward_thread) -> ()

        scf.if %packs {
          func.call @take_anew(%x_held, %values) : (!forward_x_held, !forward_held) -> ()
        }
        scf.if %copies {
          func.call @load_copied_again(%x, %staged, %thread, %x_held) : (!forward_x_rows, !forward_staged, !forward_thread, !forward_x_held) -> ()
        }
        func.call @take_stored(%x, %thread, %x_held, %residual_held, %values) : (!forward_x_rows, !forward_thread, !forward_x_held, !forward_residual_held, !forward_held) -> ()
        %again = arith.constant true
        scf.if %writes_output {
          scf.for %step = %c0 to %steps step %c1 {
            func.call @reread(%x, %residual, %s, %x_kept, %residual_kept, %thread, %exists, %step, %again, %values)
                : (!forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, index, i1, !forward_held) -> ()
            scf.for %k = %c0 to %chunks step %c1 {
              %col, %inside = func.call @column(%step, %k, %thread) : (index, index, !forward_thread) -> (index, i1)
              %at = arith.addi %part, %col : index
              scf.if %stages_weights {
                func.call @staged_weights(%gamma_staged, %beta_staged, %thread, %k, %gamma_held, %beta_held)
                    : (!forward_gamma_staged, !forward_beta_staged, !forward_thread, index, !forward_gamma_held, !forward_beta_held) -> ()
              }
              scf.if %weights_early {
              } else {
                func.call @load_weights(%gamma, %beta, %thread, %step, %k, %gamma_held, %beta_held)
                    : (!gamma_row, !beta_row, !forward_thread, index, index, !forward_gamma_held, !forward_beta_held) -> ()
              }
              %value = memref.load %values[%k] : !forward_held
              %xhat = func.call @xhat(%value, %mean_row, %rstd_row) : (!forward_chunk, !acc, !acc) -> !forward_chunk
              %g = scf.if %scales -> !forward_chunk {
                %gamma_k = memref.load %gamma_held[%k] : !forward_gamma_held
                %gamma_here = scf.if %walks -> !forward_gamma {
                  // Else they would be widened once, before the first row, and take more registers.
                  %gamma_settled = func.call @settled_of_gamma(%gamma_k) : (!forward_gamma) -> !forward_gamma
                  scf.yield %gamma_settled : !forward_gamma
                } else {
                  scf.yield %gamma_k : !forward_gamma
                }
                %ga = func.call @widen_of_gamma(%gamma_here) : (!forward_gamma) -> !forward_chunk
                %weight = func.call @weight(%ga) : (!forward_chunk) -> !forward_chunk
                scf.yield %weight : !forward_chunk
              } else {
                scf.yield %ones : !forward_chunk
              }
              %b = scf.if %adds_bias -> !forward_chunk {
                %beta_k = memref.load %beta_held[%k] : !forward_beta_held
                %beta_here = scf.if %walks -> !forward_beta {
                  %beta_settled = func.call @settled_of_beta(%beta_k) : (!forward_beta) -> !forward_beta
                  scf.yield %beta_settled : !forward_beta
                } else {
                  scf.yield %beta_k : !forward_beta
                }
                %ba = func.call @widen_of_beta(%beta_here) : (!forward_beta) -> !forward_chunk
                scf.yield %ba : !forward_chunk
              } else {
                scf.yield %minus_zeros : !forward_chunk
              }
              %ya = func.call @y(%xhat, %g, %b) : (!forward_chunk, !forward_chunk, !forward_chunk) -> !forward_chunk
              // With a gate:
              %z_k = scf.if %in_registers -> !forward_residual {
                %no_z = arith.constant dense<0.0> : !forward_residual
                %z_held = func.call @stored_of_residual(%no_z, %k, %residual_held) : (!forward_residual, index, !forward_residual_held) -> !forward_residual
                scf.yield %z_held : !forward_residual
              } else {
                %col_in = arith.select %inside, %col, %c0 : index
                %at_in = arith.addi %part, %col_in : index
                %z_read = vector.load %residual[%row, %at_in] : !forward_residual_rows, !forward_residual
                scf.yield %z_read : !forward_residual
              }
              // Not before the row's sums: until then it is narrow.
              %z_here = func.call @settled_of_residual(%z_k) : (!forward_residual) -> !forward_residual
              %za = func.call @widen_of_residual(%z_here) : (!forward_residual) -> !forward_chunk
              %silu, %slope = func.call @silu_of_z(%za) : (!forward_chunk) -> (!forward_chunk, !forward_chunk)
              %ya_gated = func.call @gated_output(%ya, %silu) : (!forward_chunk, !forward_chunk) -> !forward_chunk
              // End of the gate.
              %y_k = func.call @round_of_y(%ya) : (!forward_chunk) -> !forward_y
              func.call @put_of_y(%y, %y_k, %row, %k, %col, %at, %inside, %exists)
                  : (!forward_y_rows, !forward_y, index, index, index, index, i1, i1) -> ()
            } {llvm.loop_annotation = #unrolled}
          } {llvm.loop_annotation = #rolled}
        }
      } {llvm.loop_annotation = #rolled}

      // This branch is never taken. Without a store, LLVM finds that these bindings are read-only. ptxas
      // then moves the loads, which are meant to overlap with the barriers, to behind them.
      %never = arith.cmpi eq, %m, %c0 : index
      scf.if %never {
        %zero_x = arith.constant dense<0.0> : !forward_x
        vector.store %zero_x, %x[%c0, %c0] : !forward_x_rows, !forward_x
        scf.if %adds_residual {
          %zero_residual = arith.constant dense<0.0> : !forward_residual
          vector.store %zero_residual, %residual[%c0, %c0] : !forward_residual_rows, !forward_residual
        }
        // With a gate:
        scf.if %reads_gate {
          %zero_z = arith.constant dense<0.0> : !forward_residual
          vector.store %zero_z, %residual[%c0, %c0] : !forward_residual_rows, !forward_residual
        }
        // End of the gate.
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
