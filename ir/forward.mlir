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
// A cluster of workgroups may share a row (NVIDIA since sm_90): each has a part of the columns, and every
// subgroup sends its sums into the exchange of each workgroup of the cluster (math/clusters.mlir). That takes
// long, so they exchange sums once.
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
#columns = 4096 : index          // N
#forward_columns = 4096 : index  // of a workgroup
#forward_parts_alike = true      // all workgroups of a cluster have as many
#forward_cluster = 1 : index     // workgroups that share a row
#forward_in_clusters = false
#forward_told = 8 : index        // subgroups of a cluster
#forward_turns = 1 : index       // in which a subgroup's lanes read what they have told
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
#forward_packs = false           // rows stay in registers as narrow as they came
#forward_alone = false           // a row has one subgroup, or a part of one
#forward_resident = 1 : i32      // workgroups that a multiprocessor must hold at once
#forward_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [256, 1, 1] subgroup_size = 32>
!pointer = !llvm.ptr<1>          // to a cell of the rows
!x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!residual_rows = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!forward_exchange = memref<2x1x8x!acc, #gpu.address_space<workgroup>>
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
#rolled = #llvm.loop_annotation<unroll = <disable = true>>  // else LLVM would unroll steps of a row, and keep it all the same
// The launch, as iree_lnbwd/vmfb/launches.py states it: the bindings, and the workgroups for M rows, the least
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
    func.func private @settled_of_x(!forward_x) -> !forward_x
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
    func.func private @init_mbarrier(i32, i32)
    func.func private @expect(i32, i32)
    func.func private @of_rank(i32, i32) -> i32
    func.func private @send(i32, !acc, i32)
    func.func private @await(i32, i32)

    // The first column of thread t's chunk k of a step, of the workgroup's columns, which begin at %part, and
    // whether they have that chunk. The last workgroup of a cluster may have fewer columns.
    func.func private @column(%step: index, %k: index, %t: index, %part: index) -> (index, i1) {
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
        %col, %inside = func.call @column(%step, %k, %t, %part) : (index, index, index, index) -> (index, i1)
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
      %col, %inside = func.call @column(%step, %k, %t, %part) : (index, index, index, index) -> (index, i1)
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
        %col, %inside = func.call @column(%step, %k, %t, %part) : (index, index, index, index) -> (index, i1)
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

    // A thread's share of a row's sum: of the values without %centre, or of the squares of those.
    func.func private @share(%squares: i1, %centre: !acc, %x: !x_rows, %residual: !residual_rows, %s: !residual_rows,
        %x_kept: !forward_x_kept, %residual_kept: !forward_residual_kept, %group: index, %row: index, %part: index,
        %exists: i1, %t: index, %again: i1, %values: !forward_held) -> !acc {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %chunks = arith.constant #forward_chunks
      %steps = arith.constant #forward_steps
      %span = arith.constant #forward_span
      %minus_zeros = arith.constant dense<-0.0> : !forward_chunk  // adding -0.0 changes no number
      %centre_v = vector.broadcast %centre : !acc to !forward_chunk
      %sum = scf.for %span_first = %c0 to %steps step %span iter_args(%spans_before = %minus_zeros) -> (!forward_chunk) {
        %span_after = arith.addi %span_first, %span : index
        %span_end = arith.minui %span_after, %steps : index
        %span_sum = scf.for %step = %span_first to %span_end step %c1 iter_args(%steps_before = %minus_zeros) -> (!forward_chunk) {
          func.call @reread(%x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %step, %t, %again, %values)
              : (!x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, index, i1, !forward_held) -> ()
          %step_sum = scf.for %k = %c0 to %chunks step %c1 iter_args(%before = %steps_before) -> (!forward_chunk) {
            %col, %inside = func.call @column(%step, %k, %t, %part) : (index, index, index, index) -> (index, i1)
            %value = memref.load %values[%k] : !forward_held
            %more = scf.if %squares -> !forward_chunk {
              %centred = arith.subf %value, %centre_v : !forward_chunk
              %with_square = math.fma %centred, %centred, %before : !forward_chunk
              scf.yield %with_square : !forward_chunk
            } else {
              %centred = arith.subf %value, %centre_v : !forward_chunk
              %with_value = arith.addf %before, %centred : !forward_chunk
              scf.yield %with_value : !forward_chunk
            }
            %after = arith.select %inside, %more, %before : !forward_chunk
            scf.yield %after : !forward_chunk
          } {llvm.loop_annotation = #unrolled}
          scf.yield %step_sum : !forward_chunk
        } {llvm.loop_annotation = #rolled}
        %spans = arith.addf %spans_before, %span_sum : !forward_chunk
        scf.yield %spans : !forward_chunk
      } {llvm.loop_annotation = #rolled}
      // Any order of these additions will do, as long as it is always the same order.
      %thread_sum = vector.reduction <add>, %sum fastmath<reassoc> : !forward_chunk into !acc
      return %thread_sum : !acc
    }

    // A subgroup's sum for the workgroups of its cluster: lane r sends it to that of rank r.
    func.func private @tell_cluster(%exchange: !forward_exchange, %mbarrier: i32, %buffer: index, %rank: index,
        %warp: index, %lane: index, %sum: !acc) {
      %cluster = arith.constant #forward_cluster
      %warps = arith.constant #forward_warps
      %bytes = arith.constant 4 : index
      %there = arith.cmpi ult, %lane, %cluster : index
      scf.if %there {
        %all_warps = arith.muli %cluster, %warps : index
        %buffers_before = arith.muli %buffer, %all_warps : index
        %ranks_before = arith.muli %rank, %warps : index
        %before = arith.addi %buffers_before, %ranks_before : index
        %place = arith.addi %before, %warp : index
        %offset = arith.muli %place, %bytes : index
        %base = memref.extract_aligned_pointer_as_index %exchange : !forward_exchange -> index
        %mine = arith.addi %base, %offset : index
        %mine_i32 = arith.index_castui %mine : index to i32
        %lane_i32 = arith.index_castui %lane : index to i32
        %theirs = func.call @of_rank(%mine_i32, %lane_i32) : (i32, i32) -> i32
        %their_mbarrier = func.call @of_rank(%mbarrier, %lane_i32) : (i32, i32) -> i32
        func.call @send(%theirs, %sum, %their_mbarrier) : (i32, !acc, i32) -> ()
      }
      return
    }

    // The sum over a row's threads, for all of them. Subgroups exchange their sums through a buffer for
    // each sum, so one barrier is enough.
    func.func private @total(%share: !acc, %exchange: !forward_exchange, %buffer: index, %group: index, %t: index) -> !acc {
      %c0 = arith.constant 0 : index
      %lanes = arith.constant #subgroup
      %alone = arith.constant #forward_alone
      %zero = arith.constant 0.0 : !acc
      %warp_sum = gpu.subgroup_reduce add %share cluster(size = 32) : (!acc) -> !acc
      %total = scf.if %alone -> !acc {
        scf.yield %warp_sum : !acc
      } else {
        %lane = arith.remui %t, %lanes : index
        %warp = arith.divui %t, %lanes : index
        %leads = arith.cmpi eq, %lane, %c0 : index
        scf.if %leads {
          memref.store %warp_sum, %exchange[%buffer, %group, %warp] : !forward_exchange
        }
        gpu.barrier
        %warp_sums = vector.transfer_read %exchange[%buffer, %group, %c0], %zero {in_bounds = [true]} : !forward_exchange, !forward_warps
        %group_sum = vector.reduction <add>, %warp_sums fastmath<reassoc> : !forward_warps into !acc
        scf.yield %group_sum : !acc
      }
      return %total : !acc
    }

    // How many columns a subgroup has, of the workgroup of that rank.
    func.func private @columns_of(%rank: index, %warp: index) -> !acc {
      %c0 = arith.constant 0 : index
      %all = arith.constant #columns
      %most = arith.constant #forward_columns
      %ranks_before = arith.muli %rank, %most : index
      %rest = arith.subi %all, %ranks_before : index
      %n = arith.minsi %most, %rest : index
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

    // Which subgroup of a cluster a lane reads the sums of in a turn, and whether there is one.
    func.func private @told_in(%turn: index, %t: index) -> (index, i1) {
      %c0 = arith.constant 0 : index
      %lanes = arith.constant #subgroup
      %told = arith.constant #forward_told
      %lane = arith.remui %t, %lanes : index
      %before = arith.muli %turn, %lanes : index
      %which = arith.addi %before, %lane : index
      %there = arith.cmpi ult, %which, %told : index
      %which_in = arith.select %there, %which, %c0 : index
      return %which_in, %there : index, i1
    }

    // A row's mean m, and the sum of its squares without m, for all threads of a cluster. Subgroup w has n_w
    // columns, their sum, and some number p_w near their mean. Without p_w, they sum up to r_w, and their squares
    // to q_w. For any p_w and m, what is asked for is the sum of q_w + (p_w - m) * (2 r_w + n_w (p_w - m)). So an
    // error of p_w or m enters squared, and one exchange is enough. Source: Chan, Golub, LeVeque, "Algorithms for
    // Computing the Sample Variance", The American Statistician 37(3), 1983. Where the mean is not subtracted, p_w
    // and m are zero.
    func.func private @merged(%warp_sum: !acc, %p_own: !acc, %share_r: !acc, %share_q: !acc, %exchange: !forward_exchange,
        %mbarriers: !mbarriers, %rank: index, %t: index) -> (!acc, !acc) {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %c2 = arith.constant 2 : index
      %c3 = arith.constant 3 : index
      %phase = arith.constant 0 : i32
      %lanes = arith.constant #subgroup
      %warps = arith.constant #forward_warps
      %turns = arith.constant #forward_turns
      %centres = arith.constant #centres
      %zero = arith.constant 0.0 : !acc
      %two = arith.constant 2.0 : !acc
      %inv_n = arith.constant #inv_n
      %lane = arith.remui %t, %lanes : index
      %warp = arith.divui %t, %lanes : index
      %warp_q = gpu.subgroup_reduce add %share_q cluster(size = 32) : (!acc) -> !acc
      %mbarrier = func.call @mbarrier(%mbarriers, %c0) : (!mbarriers, index) -> i32
      func.call @tell_cluster(%exchange, %mbarrier, %c0, %rank, %warp, %lane, %warp_q)
          : (!forward_exchange, i32, index, index, index, index, !acc) -> ()
      scf.if %centres {
        %warp_r = gpu.subgroup_reduce add %share_r cluster(size = 32) : (!acc) -> !acc
        func.call @tell_cluster(%exchange, %mbarrier, %c1, %rank, %warp, %lane, %warp_sum)
            : (!forward_exchange, i32, index, index, index, index, !acc) -> ()
        func.call @tell_cluster(%exchange, %mbarrier, %c2, %rank, %warp, %lane, %p_own)
            : (!forward_exchange, i32, index, index, index, index, !acc) -> ()
        func.call @tell_cluster(%exchange, %mbarrier, %c3, %rank, %warp, %lane, %warp_r)
            : (!forward_exchange, i32, index, index, index, index, !acc) -> ()
      }
      func.call @await(%mbarrier, %phase) : (i32, i32) -> ()
      %mean = scf.if %centres -> !acc {
        %lane_sum = scf.for %turn = %c0 to %turns step %c1 iter_args(%before = %zero) -> (!acc) {
          %which, %there = func.call @told_in(%turn, %t) : (index, index) -> (index, i1)
          %sum = memref.load %exchange[%c1, %c0, %which] : !forward_exchange
          %more = arith.addf %before, %sum : !acc
          %after = arith.select %there, %more, %before : !acc
          scf.yield %after : !acc
        } {llvm.loop_annotation = #unrolled}
        %row_sum = gpu.subgroup_reduce add %lane_sum cluster(size = 32) : (!acc) -> !acc
        %mean_of_row = arith.mulf %row_sum, %inv_n : !acc
        scf.yield %mean_of_row : !acc
      } else {
        scf.yield %zero : !acc
      }
      %lane_squares = scf.for %turn = %c0 to %turns step %c1 iter_args(%before = %zero) -> (!acc) {
        %which, %there = func.call @told_in(%turn, %t) : (index, index) -> (index, i1)
        %q = memref.load %exchange[%c0, %c0, %which] : !forward_exchange
        %squares = scf.if %centres -> !acc {
          %p = memref.load %exchange[%c2, %c0, %which] : !forward_exchange
          %r = memref.load %exchange[%c3, %c0, %which] : !forward_exchange
          %its_rank = arith.divui %which, %warps : index
          %its_warp = arith.remui %which, %warps : index
          %n = func.call @columns_of(%its_rank, %its_warp) : (index, index) -> !acc
          %off = arith.subf %p, %mean : !acc
          %twice_r = arith.mulf %two, %r : !acc
          %slope = math.fma %n, %off, %twice_r : !acc
          %without_mean = math.fma %off, %slope, %q : !acc
          scf.yield %without_mean : !acc
        } else {
          scf.yield %q : !acc
        }
        %more = arith.addf %before, %squares : !acc
        %after = arith.select %there, %more, %before : !acc
        scf.yield %after : !acc
      } {llvm.loop_annotation = #unrolled}
      %row_squares = gpu.subgroup_reduce add %lane_squares cluster(size = 32) : (!acc) -> !acc
      return %mean, %row_squares : !acc, !acc
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
      %mbarriers = memref.alloc() : !mbarriers                  // one is used
      %exchange = memref.alloc() : !forward_exchange            // [sums, groups, warps of the cluster]
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
          %one_i32 = arith.constant 1 : i32
          %mbarrier = func.call @mbarrier(%mbarriers, %c0) : (!mbarriers, index) -> i32
          func.call @init_mbarrier(%mbarrier, %one_i32) : (i32, i32) -> ()
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

      // The variance is biased and is computed from centred values: the mean of squares minus the square
      // of the mean would cancel. In a cluster, they are without the mean of their subgroup.
      %values_sum = arith.constant false
      %squares_sum = arith.constant true
      %centre, %own_sum = scf.if %centres -> (!acc, !acc) {
        %share = func.call @share(%values_sum, %zero, %x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %t, %first_time, %values)
            : (i1, !acc, !x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, i1, !forward_held) -> !acc
        %near_mean, %summed = scf.if %in_clusters -> (!acc, !acc) {
          %one = arith.constant 1.0 : !acc
          %lanes = arith.constant #subgroup
          %warp = arith.divui %t, %lanes : index
          %sum = gpu.subgroup_reduce add %share cluster(size = 32) : (!acc) -> !acc
          %count = func.call @columns_of(%rank, %warp) : (index, index) -> !acc
          %some = arith.maximumf %count, %one : !acc
          %mean_of_warp = arith.divf %sum, %some : !acc
          scf.yield %mean_of_warp, %sum : !acc, !acc
        } else {
          %sum = func.call @total(%share, %exchange, %c0, %group, %t) : (!acc, !forward_exchange, index, index, index) -> !acc
          %mean_of_row = arith.mulf %sum, %inv_n : !acc
          scf.yield %mean_of_row, %sum : !acc, !acc
        }
        scf.yield %near_mean, %summed : !acc, !acc
      } else {
        scf.yield %zero, %zero : !acc, !acc
      }
      scf.if %packs {
        func.call @take_anew(%x_held, %values) : (!forward_x_held, !forward_held) -> ()
      }
      %share_squares = func.call @share(%squares_sum, %centre, %x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %t, %centres, %values)
          : (i1, !acc, !x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, i1, !forward_held) -> !acc
      %mean_row, %sum_squares = scf.if %in_clusters -> (!acc, !acc) {
        %share_centred = scf.if %centres -> !acc {
          %centred = func.call @share(%values_sum, %centre, %x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %t, %centres, %values)
              : (i1, !acc, !x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, i1, !forward_held) -> !acc
          scf.yield %centred : !acc
        } else {
          scf.yield %zero : !acc
        }
        %mean_of_all, %squares_of_all = func.call @merged(%own_sum, %centre, %share_centred, %share_squares, %exchange, %mbarriers, %rank, %t)
            : (!acc, !acc, !acc, !acc, !forward_exchange, !mbarriers, index, index) -> (!acc, !acc)
        scf.yield %mean_of_all, %squares_of_all : !acc, !acc
      } else {
        %squares_of_all = func.call @total(%share_squares, %exchange, %c1, %group, %t) : (!acc, !forward_exchange, index, index, index) -> !acc
        scf.yield %centre, %squares_of_all : !acc, !acc
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

      scf.if %packs {
        func.call @take_anew(%x_held, %values) : (!forward_x_held, !forward_held) -> ()
      }
      %again = arith.constant true
      scf.if %writes_output {
        scf.for %step = %c0 to %steps step %c1 {
          func.call @reread(%x, %residual, %s, %x_kept, %residual_kept, %group, %row, %part, %exists, %step, %t, %again, %values)
              : (!x_rows, !residual_rows, !residual_rows, !forward_x_kept, !forward_residual_kept, index, index, index, i1, index, index, i1, !forward_held) -> ()
          scf.for %k = %c0 to %chunks step %c1 {
            %col, %inside = func.call @column(%step, %k, %t, %part) : (index, index, index, index) -> (index, i1)
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
