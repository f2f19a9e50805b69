// The sum of dx over the rows of a thread, from before dx is rounded.

// What a NormSpec and a Schedule decide.
!acc = f32
#chunks = 1 : index
!chunk = vector<8x!acc>
!held = memref<1x!chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
// End of what is replaced.

// Of no rows.
func.func private @begin_total(%sums: !held) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #chunks
  %zeros = arith.constant dense<0.0> : !chunk
  scf.for %k = %c0 to %chunks step %c1 {
    memref.store %zeros, %sums[%k] : !held
  } {llvm.loop_annotation = #unrolled}
  return
}

// With a row's chunk k, if there is that row.
func.func private @add_to_total(%k: index, %has_row: i1, %dx: !chunk, %sums: !held) {
  %before = memref.load %sums[%k] : !held
  %more = arith.addf %before, %dx : !chunk
  %after = arith.select %has_row, %more, %before : !chunk
  memref.store %after, %sums[%k] : !held
  return
}
