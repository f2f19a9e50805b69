// Which thread this is: its numbers, in one value that functions take. The compiler folds it.

// What a NormSpec and a Schedule decide.
!forward_thread = vector<8xindex>
// End of what is replaced.

// Of the workgroup's threads.
func.func private @my_id(%thread: !forward_thread) -> index {
  %n = vector.extract %thread[0] : index from !forward_thread
  return %n : index
}

// Of its group's threads: t, below T.
func.func private @my_t(%thread: !forward_thread) -> index {
  %n = vector.extract %thread[1] : index from !forward_thread
  return %n : index
}

// Of the workgroup's groups.
func.func private @my_group(%thread: !forward_thread) -> index {
  %n = vector.extract %thread[2] : index from !forward_thread
  return %n : index
}

// Its row.
func.func private @my_row(%thread: !forward_thread) -> index {
  %n = vector.extract %thread[3] : index from !forward_thread
  return %n : index
}

// Of the cluster's workgroups.
func.func private @my_rank(%thread: !forward_thread) -> index {
  %n = vector.extract %thread[4] : index from !forward_thread
  return %n : index
}

// The first column of its workgroup.
func.func private @my_part(%thread: !forward_thread) -> index {
  %n = vector.extract %thread[5] : index from !forward_thread
  return %n : index
}

// How many rows of its walk are behind it.
func.func private @my_round(%thread: !forward_thread) -> index {
  %n = vector.extract %thread[6] : index from !forward_thread
  return %n : index
}

// The first row of its workgroup's set.
func.func private @my_set(%thread: !forward_thread) -> index {
  %n = vector.extract %thread[7] : index from !forward_thread
  return %n : index
}
