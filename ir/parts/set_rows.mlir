// Which rows a workgroup walks over where the weight has sets (math/sets.mlir). It stays in one set, and counts rows as the
// k-th of that. A row that the set does not have is M, as any row past the last one.
//
// Where a row ends within a line of memory, a set's rows would bring parts of its neighbours' rows with them, and only the
// caches could keep these until others need them. So the subgroups of a workgroup are teams there: each team stays in one
// set, and neighbouring teams in neighbouring sets, so that rows that are side by side in memory are walked over together.
// Where a set has long runs of rows, those are its own: all teams of a workgroup have one set, and one partial row. Subgroup s
// is of team s mod #teams.
//
// From one step to the next, k grows by the same number. So the walk divides before its first step alone. It knows the rows
// of some steps (#known_rows): of this one, and of those that are fetched ahead, or whose statistics are.

// What a NormSpec and a Schedule decide.
#known_rows = 3 : index
#teams = 1 : index
#groups = 1 : index
#threads = 512 : index
#few_sets = 24 : i32  // there are fewer than these
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!thread = vector<14xindex>
!walk = memref<5xi32, #gpu.address_space<private>>  // the rows of some steps, and where the last of them is (@place_last)
!set_step = vector<3xi32>  // from one row of the walk to the next (@set_step)

func.func private @has_teams() -> i1
func.func private @teams_have_sets(i32) -> i1
func.func private @set_row(index, index, index, index) -> index
func.func private @count_set_rows(index, index, index, index) -> index
func.func private @subgroup_i32() -> i32
func.func private @subgroup_groups() -> index
// End of what is replaced.

func.func private @teams_i32() -> i32 {
  %teams = arith.constant #teams
  %n = arith.index_castui %teams : index to i32
  return %n : i32
}

// Groups of a team.
func.func private @team_groups_i32() -> i32 {
  %teams = arith.constant #teams
  %groups = arith.constant #groups
  %each = arith.divui %groups, %teams : index
  %n = arith.index_castui %each : index to i32
  return %n : i32
}

// The set of a thread's team, how many sets there are, the rows of a run, and all rows of the set; then which of the set's
// teams it is, and of how many. A workgroup without teams is one.
func.func private @team_set(%m: index, %sets_i32: i32, %rows_per_set_i32: i32) -> (index, index, index, index, i32, i32) {
  %sets = arith.index_castui %sets_i32 : i32 to index
  %rows_per_set = arith.index_castui %rows_per_set_i32 : i32 to index
  %all = hal.interface.workgroup.count[0] : index
  %id = hal.interface.workgroup.id[0] : index
  %team = func.call @my_team() : () -> i32
  %set_i32, %walker, %walkers = func.call @place_in_sets(%all, %id, %team, %sets_i32, %rows_per_set_i32)
      : (index, index, i32, i32, i32) -> (i32, i32, i32)
  %set = arith.index_castui %set_i32 : i32 to index
  %set_rows = func.call @count_set_rows(%m, %set, %sets, %rows_per_set) : (index, index, index, index) -> index
  return %set, %sets, %rows_per_set, %set_rows, %walker, %walkers : index, index, index, index, i32, i32
}

// The set of a workgroup's team, which of the set's teams that is, and of how many.
func.func private @place_in_sets(%all: index, %id: index, %team: i32, %sets: i32, %rows_per_set: i32) -> (i32, i32, i32) {
  %teams_i32 = func.call @teams_i32() : () -> i32
  %all_i32 = arith.index_castui %all : index to i32
  %workgroup = arith.index_castui %id : index to i32
  %all_teams = arith.muli %all_i32, %teams_i32 : i32
  %walkers = arith.divui %all_teams, %sets : i32
  %teams_before = arith.muli %workgroup, %teams_i32 : i32
  %own = arith.addi %teams_before, %team : i32
  %set_by_set = func.call @teams_have_sets(%rows_per_set) : (i32) -> i1
  %set, %walker = scf.if %set_by_set -> (i32, i32) {
    %team_set = arith.remui %own, %sets : i32
    %team_walker = arith.divui %own, %sets : i32
    scf.yield %team_set, %team_walker : i32, i32
  } else {
    %own_set = arith.divui %own, %walkers : i32
    %own_walker = arith.remui %own, %walkers : i32
    scf.yield %own_set, %own_walker : i32, i32
  }
  return %set, %walker, %walkers : i32, i32, i32
}

// Of the subgroup. The shuffle tells ptxas that all lanes have the same.
func.func private @my_team() -> i32 {
  %zero_i32 = arith.constant 0 : i32
  %t_count = arith.constant #threads
  %id = gpu.thread_id x
  %group = arith.divui %id, %t_count : index
  %neighbours = func.call @subgroup_groups() : () -> index
  %subgroup = arith.divui %group, %neighbours : index
  %teams = arith.constant #teams
  %mine = arith.remui %subgroup, %teams : index
  %mine_i32 = arith.index_castui %mine : index to i32
  %has_teams = func.call @has_teams() : () -> i1
  %team = scf.if %has_teams -> i32 {
    %lanes_i32 = func.call @subgroup_i32() : () -> i32
    %same, %there = gpu.shuffle idx %mine_i32, %zero_i32, %lanes_i32 : i32
    scf.yield %same : i32
  } else {
    scf.yield %zero_i32 : i32
  }
  return %team : i32
}

// Of the rows of its team's set: the k of a subgroup's first group; how much greater it is for a group %groups_on further;
// and how much k grows in a step. Some walkers of a set go abreast (@walkers_abreast): they take neighbouring k for their first
// groups, then for their second ones, and so on. The next walkers take the k behind these.
func.func private @team_walk(%sets: index, %rows_per_set: index, %walker: i32, %walkers: i32, %group_first: i32, %groups_on: i32) -> (i32, i32, i32) {
  %groups = func.call @team_groups_i32() : () -> i32
  %teams_i32 = func.call @teams_i32() : () -> i32
  %neighbours = func.call @subgroup_groups() : () -> index
  %neighbours_i32 = arith.index_castui %neighbours : index to i32
  %round = arith.muli %teams_i32, %neighbours_i32 : i32
  %rounds = arith.divui %group_first, %round : i32
  %in_rounds = arith.muli %rounds, %neighbours_i32 : i32
  %has_teams = func.call @has_teams() : () -> i1
  %in_team = arith.select %has_teams, %in_rounds, %group_first : i32
  %abreast = func.call @walkers_abreast(%sets, %rows_per_set, %walkers) : (index, index, i32) -> i32
  %block = arith.divui %walker, %abreast : i32
  %place = arith.remui %walker, %abreast : i32
  %groups_of_blocks = arith.muli %block, %groups : i32
  %groups_before = arith.addi %groups_of_blocks, %in_team : i32
  %before = arith.muli %groups_before, %abreast : i32
  %k = arith.addi %before, %place : i32
  %k_on = arith.muli %groups_on, %abreast : i32
  %stride = arith.muli %walkers, %groups : i32
  return %k, %k_on, %stride : i32, i32, i32
}

// How many walkers of a set go abreast. If each row is of another set than the one before, and there are few sets, all do: in
// a step, the first rows of all workgroups lie side by side, and so do their second ones. With many sets that took longer
// (README.md). Then only so many do that all rows of the teams fill whole pieces of memory: one, or more if the number of sets
// is no multiple of the teams'. A set's walkers are a multiple of these.
func.func private @walkers_abreast(%sets: index, %rows_per_set: index, %walkers: i32) -> i32 {
  %one_i32 = arith.constant 1 : i32
  %few_sets = arith.constant #few_sets
  %sets_i32 = arith.index_castui %sets : index to i32
  %run = arith.index_castui %rows_per_set : index to i32
  %has_teams = func.call @has_teams() : () -> i1
  %for_teams = scf.if %has_teams -> i32 {
    %zero_i32 = arith.constant 0 : i32
    %teams = func.call @teams_i32() : () -> i32
    %negative = arith.subi %zero_i32, %sets_i32 : i32
    %power_of_two = arith.andi %sets_i32, %negative : i32  // the greatest that divides the number of sets
    %in_common = arith.minui %teams, %power_of_two : i32   // teams are a power of two, too
    %least = arith.divui %teams, %in_common : i32
    scf.yield %least : i32
  } else {
    scf.yield %one_i32 : i32
  }
  %are_few = arith.cmpi ult, %sets_i32, %few_sets : i32
  %of_rows = arith.select %are_few, %walkers, %for_teams : i32
  %runs_are_rows = arith.cmpi eq, %run, %one_i32 : i32
  %abreast = arith.select %runs_are_rows, %of_rows, %one_i32 : i32
  return %abreast : i32
}

// Which partial row has the sums of a workgroup's team, or of all its teams if they have one set. Those of a set are
// neighbours.
func.func private @partial_row(%thread: !thread, %workgroup: index, %team: index) -> index {
  %rows_per_set_i32 = func.call @run_rows(%thread) : (!thread) -> i32
  %set_by_set = func.call @teams_have_sets(%rows_per_set_i32) : (i32) -> i1
  %row = scf.if %set_by_set -> index {
    %sets = vector.extract %thread[10] : index from !thread
    %sets_i32 = arith.index_castui %sets : index to i32
    %team_i32 = arith.index_castui %team : index to i32
    %all = hal.interface.workgroup.count[0] : index
    %set, %walker, %walkers = func.call @place_in_sets(%all, %workgroup, %team_i32, %sets_i32, %rows_per_set_i32)
        : (index, index, i32, i32, i32) -> (i32, i32, i32)
    %rows_before = arith.muli %set, %walkers : i32
    %row_i32 = arith.addi %rows_before, %walker : i32
    %of_team = arith.index_castui %row_i32 : i32 to index
    scf.yield %of_team : index
  } else {
    scf.yield %workgroup : index
  }
  return %row : index
}

// The k-th row of the set, or M. And the same without a look whether the set has it.
func.func private @kth_row(%thread: !thread, %k: i32) -> i32 {
  %row = func.call @any_kth_row(%thread, %k) : (!thread, i32) -> i32
  %known = func.call @row_or_none(%thread, %k, %row) : (!thread, i32, i32) -> i32
  return %known : i32
}

func.func private @any_kth_row(%thread: !thread, %k: i32) -> i32 {
  %set = vector.extract %thread[9] : index from !thread
  %sets = vector.extract %thread[10] : index from !thread
  %rows_per_set = vector.extract %thread[11] : index from !thread
  %k_index = arith.index_castui %k : i32 to index
  %row = func.call @set_row(%k_index, %set, %sets, %rows_per_set) : (index, index, index, index) -> index
  %row_i32 = arith.index_castui %row : index to i32
  return %row_i32 : i32
}

func.func private @row_or_none(%thread: !thread, %k: i32, %row: i32) -> i32 {
  %set_rows = vector.extract %thread[12] : index from !thread
  %m = vector.extract %thread[13] : index from !thread
  %set_rows_i32 = arith.index_castui %set_rows : index to i32
  %m_i32 = arith.index_castui %m : index to i32
  %is_there = arith.cmpi slt, %k, %set_rows_i32 : i32
  %or_none = arith.select %is_there, %row, %m_i32 : i32
  return %or_none : i32
}

// What a step of the walk adds: to the place in a run of rows; to the row; and to the row once more, where that leaves the
// run. A row that the set does not have may wrap around.
func.func private @set_step(%thread: !thread, %stride: i32) -> !set_step {
  %sets = vector.extract %thread[10] : index from !thread
  %run = func.call @run_rows(%thread) : (!thread) -> i32
  %sets_i32 = arith.index_castui %sets : index to i32
  %runs = arith.divui %stride, %run : i32
  %within = arith.remui %stride, %run : i32
  %round = arith.muli %sets_i32, %run : i32
  %rounds = arith.muli %runs, %round : i32
  %rows = arith.addi %rounds, %within : i32
  %over = arith.subi %round, %run : i32
  %step = vector.from_elements %within, %rows, %over : !set_step
  return %step : !set_step
}

func.func private @run_rows(%thread: !thread) -> i32 {
  %rows_per_set = vector.extract %thread[11] : index from !thread
  %run = arith.index_castui %rows_per_set : index to i32
  return %run : i32
}

// The rows of the first steps.
func.func private @begin_walk(%thread: !thread, %first: i32, %stride: i32, %walk: !walk) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %known = arith.constant #known_rows
  scf.for %step = %c0 to %known step %c1 {
    %step_i32 = arith.index_castui %step : index to i32
    %on = arith.muli %step_i32, %stride : i32
    %k = arith.addi %first, %on : i32
    %any = func.call @any_kth_row(%thread, %k) : (!thread, i32) -> i32
    %row = func.call @row_or_none(%thread, %k, %any) : (!thread, i32, i32) -> i32
    memref.store %row, %walk[%step] : !walk
    %run = func.call @run_rows(%thread) : (!thread) -> i32
    %place = arith.remui %k, %run : i32
    func.call @place_last(%any, %place, %walk) : (i32, i32, !walk) -> ()
  } {llvm.loop_annotation = #unrolled}
  return
}

// The last row that is known, though the set may not have it, and its place in its run.
func.func private @place_last(%row: i32, %place: i32, %walk: !walk) {
  %c1 = arith.constant 1 : index
  %known = arith.constant #known_rows
  %behind = arith.addi %known, %c1 : index
  memref.store %row, %walk[%known] : !walk
  memref.store %place, %walk[%behind] : !walk
  return
}

// The rows of the steps after this one, whose row is the k-th.
func.func private @walk_on(%thread: !thread, %step: !set_step, %k: i32, %stride: i32, %walk: !walk) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %zero_i32 = arith.constant 0 : i32
  %known = arith.constant #known_rows
  %behind = arith.addi %known, %c1 : index
  %last_known = arith.subi %known, %c1 : index
  scf.for %which = %c0 to %last_known step %c1 {
    %after = arith.addi %which, %c1 : index
    %row = memref.load %walk[%after] : !walk
    memref.store %row, %walk[%which] : !walk
  } {llvm.loop_annotation = #unrolled}
  %within = vector.extract %step[0] : i32 from !set_step
  %rows = vector.extract %step[1] : i32 from !set_step
  %over = vector.extract %step[2] : i32 from !set_step
  %run = func.call @run_rows(%thread) : (!thread) -> i32
  %row_last = memref.load %walk[%known] : !walk
  %place_last = memref.load %walk[%behind] : !walk
  %place_on = arith.addi %place_last, %within : i32
  %row_on = arith.addi %row_last, %rows : i32
  %leaves = arith.cmpi uge, %place_on, %run : i32
  %less = arith.select %leaves, %run, %zero_i32 : i32
  %more = arith.select %leaves, %over, %zero_i32 : i32
  %place = arith.subi %place_on, %less : i32
  %any = arith.addi %row_on, %more : i32
  func.call @place_last(%any, %place, %walk) : (i32, i32, !walk) -> ()
  %known_i32 = arith.index_castui %known : index to i32
  %on = arith.muli %known_i32, %stride : i32
  %k_last = arith.addi %k, %on : i32
  %row_then = func.call @row_or_none(%thread, %k_last, %any) : (!thread, i32, i32) -> i32
  memref.store %row_then, %walk[%last_known] : !walk
  return
}
