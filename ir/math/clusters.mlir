// How sums come to all workgroups of a cluster (NVIDIA since sm_90).
//
// Each workgroup has one mbarrier for each buffer of its exchange. One of its threads says how many bytes are to
// come, and st.async sends values and counts their bytes. A phase of an mbarrier is over when all have
// come; phases count from 0. Barriers of a cluster would do, but each makes a thread wait for all of its
// accesses to memory, and forgets what the L1 cache holds.
//
// Addresses in shared memory have 32 bits. Source: PTX ISA, "mbarrier", "st.async", "mapa".

// What a kernel's declaration decides.
!acc = f32
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
// End of what is replaced.

func.func private @mbarrier(%all: !mbarriers, %which: index) -> i32 {
  %bytes = arith.constant 8 : index
  %base = memref.extract_aligned_pointer_as_index %all : !mbarriers -> index
  %offset = arith.muli %which, %bytes : index
  %address = arith.addi %base, %offset : index
  %address_i32 = arith.index_castui %address : index to i32
  return %address_i32 : i32
}

// In each phase there are so many arrivals, which say how many bytes they expect.
func.func private @init_mbarrier(%mbarrier: i32, %arrivals: i32) {
  llvm.inline_asm has_side_effects "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r,~{memory}" %mbarrier, %arrivals
      : (i32, i32) -> ()
  llvm.inline_asm has_side_effects "fence.mbarrier_init.release.cluster;", "~{memory}" : () -> ()
  return
}

func.func private @expect(%mbarrier: i32, %bytes: i32) {
  llvm.inline_asm has_side_effects "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r,~{memory}" %mbarrier, %bytes
      : (i32, i32) -> ()
  return
}

// The same place in the memory of the workgroup of that rank.
func.func private @of_rank(%address: i32, %rank: i32) -> i32 {
  %theirs = llvm.inline_asm has_side_effects "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r" %address, %rank
      : (i32, i32) -> i32
  return %theirs : i32
}

func.func private @send(%to: i32, %value: !acc, %mbarrier: i32) {
  llvm.inline_asm has_side_effects "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $1, [$2];", "r,f,r,~{memory}" %to, %value, %mbarrier
      : (i32, !acc, i32) -> ()
  return
}

func.func private @send_two(%to: i32, %first: !acc, %second: !acc, %mbarrier: i32) {
  llvm.inline_asm has_side_effects "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$0], {$1, $2}, [$3];", "r,f,f,r,~{memory}" %to, %first, %second, %mbarrier
      : (i32, !acc, !acc, i32) -> ()
  return
}

func.func private @send_four(%to: i32, %first: !acc, %second: !acc, %third: !acc, %fourth: !acc, %mbarrier: i32) {
  llvm.inline_asm has_side_effects "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];", "r,f,f,f,f,r,~{memory}" %to, %first, %second, %third, %fourth, %mbarrier
      : (i32, !acc, !acc, !acc, !acc, i32) -> ()
  return
}

// Waits until the phase of that parity is over.
func.func private @await(%mbarrier: i32, %parity: i32) {
  %yes = arith.constant true
  scf.while : () -> () {
    %over = llvm.inline_asm has_side_effects "mbarrier.try_wait.parity.shared::cta.b64 $0, [$1], $2;", "=b,r,r,~{memory}" %mbarrier, %parity
        : (i32, i32) -> i1
    %goes_on = arith.xori %over, %yes : i1
    scf.condition(%goes_on)
  } do {
    scf.yield
  }
  return
}
