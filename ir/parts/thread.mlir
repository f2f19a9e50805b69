// Which thread this is: its numbers, in one value that functions take. The compiler folds it. With sets of weights,
// set_rows.mlir reads more of them.

// What a NormSpec and a Schedule decide.
!thread = vector<9xindex>
// End of what is replaced.

// Of the workgroup's threads.
func.func private @my_id(%thread: !thread) -> index {
  %n = vector.extract %thread[0] : index from !thread
  return %n : index
}

// Of its group's threads: t, below T.
func.func private @my_t(%thread: !thread) -> index {
  %n = vector.extract %thread[1] : index from !thread
  return %n : index
}

// Of the workgroup's groups.
func.func private @my_group(%thread: !thread) -> index {
  %n = vector.extract %thread[2] : index from !thread
  return %n : index
}

// Of its subgroup's threads.
func.func private @my_lane(%thread: !thread) -> index {
  %n = vector.extract %thread[3] : index from !thread
  return %n : index
}

// Whether it is the first of its subgroup.
func.func private @leads(%thread: !thread) -> i1 {
  %c0 = arith.constant 0 : index
  %lane = func.call @my_lane(%thread) : (!thread) -> index
  %leads = arith.cmpi eq, %lane, %c0 : index
  return %leads : i1
}

// Of its group's subgroups.
func.func private @my_warp(%thread: !thread) -> index {
  %n = vector.extract %thread[4] : index from !thread
  return %n : index
}

// The same number, which ptxas knows to be the same for all lanes, where a subgroup copies.
func.func private @my_copier(%thread: !thread) -> index {
  %n = vector.extract %thread[5] : index from !thread
  return %n : index
}

// Of the cluster's workgroups.
func.func private @my_rank(%thread: !thread) -> index {
  %n = vector.extract %thread[6] : index from !thread
  return %n : index
}

// The first column of its workgroup.
func.func private @my_part(%thread: !thread) -> index {
  %n = vector.extract %thread[7] : index from !thread
  return %n : index
}

// How many elements of other rows are before each of its rows, in the access where the row begins.
func.func private @my_shift(%thread: !thread) -> index {
  %n = vector.extract %thread[8] : index from !thread
  return %n : index
}
