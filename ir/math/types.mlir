// Conversions from an element type to the type of sums, and back. The two types decide which function is
// used.

// What a kernel's declaration decides.
!narrow = vector<8xbf16>
!words = vector<4xi32>   // the bits of the narrow elements
!halves = vector<4xf32>  // every second of the wide elements
!wide = vector<8xf32>
!long_words = vector<4xi64>
!word_indices = vector<4xindex>
!wide_words = vector<8xi32>     // the bits of the wide elements
!short_words = vector<8xi16>    // the bits of the narrow elements, one by one
!lanes = vector<8xi1>
!one_word = vector<2xbf16>     // narrow elements of so many words
!two_words = vector<4xbf16>
!four_words = vector<8xbf16>
// End of what is replaced.

// Widening is exact.
func.func private @widen(%value: !narrow) -> !wide {
  %wide = arith.extf %value : !narrow to !wide
  return %wide : !wide
}

func.func private @widen_equal(%value: !wide) -> !wide {
  return %value : !wide
}

// For pairs of bf16 on a GPU. bf16 is the upper half of f32, so a shift and a mask widen two elements.
// ptxas turns arith.extf into three instructions for every second element.
func.func private @widen_pairs(%value: !narrow) -> !wide {
  %half = arith.constant dense<16> : !words
  %upper = arith.constant dense<0xFFFF0000> : !words
  %words = vector.bitcast %value : !narrow to !words
  %even_words = arith.shli %words, %half : !words
  %odd_words = arith.andi %words, %upper : !words
  %evens = arith.bitcast %even_words : !words to !halves
  %odds = arith.bitcast %odd_words : !words to !halves
  %wide = vector.interleave %evens, %odds : !halves -> !wide
  return %wide : !wide
}

// Rounding is to the nearest, ties to even. A GPU has an instruction for it, or LLVM knows the shortest
// code. IREE turns arith.truncf to bf16 into a dozen integer operations before LLVM sees it.
func.func private @round(%value: !wide) -> !narrow {
  %rounded = llvm.fptrunc %value : !wide to !narrow
  return %rounded : !narrow
}

// On a CPU, LLVM turns fptrunc to bf16 into a call of a function that a module does not have.
func.func private @round_on_cpu(%value: !wide) -> !narrow {
  %rounded = arith.truncf %value : !wide to !narrow
  return %rounded : !narrow
}

func.func private @round_equal(%value: !wide) -> !wide {
  return %value : !wide
}

// bf16 on a CPU, where the value is widened at once: IREE drops such a pair of arith.truncf and arith.extf.
// bf16 is the upper half of f32. Half of its last place is added, or a little less if that place is even.
func.func private @round_apart(%value: !wide) -> !narrow {
  %half = arith.constant dense<16> : !wide_words
  %one = arith.constant dense<1> : !wide_words
  %below_half = arith.constant dense<0x7FFF> : !wide_words
  %nan = arith.constant dense<0x7FC0> : !wide_words
  %bits = arith.bitcast %value : !wide to !wide_words
  %shifted = arith.shrui %bits, %half : !wide_words
  %is_odd = arith.andi %shifted, %one : !wide_words
  %up = arith.addi %is_odd, %below_half : !wide_words
  %sum = arith.addi %bits, %up : !wide_words
  %upper = arith.shrui %sum, %half : !wide_words
  %is_nan = arith.cmpf uno, %value, %value : !wide
  %upper_or_nan = arith.select %is_nan, %nan, %upper : !lanes, !wide_words
  %short = arith.trunci %upper_or_nan : !wide_words to !short_words
  %rounded = arith.bitcast %short : !short_words to !narrow
  return %rounded : !narrow
}

// For ptxas: a value that is there before a branch that stores it. LLVM moves whatever only a branch uses into
// the branch; with dx computed there, a one-pass kernel of 15008 columns spilled 212 bytes. The empty
// instructions keep it where it is.
func.func private @settled_word(%value: !one_word) -> !one_word {
  %words = vector.bitcast %value : !one_word to vector<1xi32>
  %a = vector.extract %words[0] : i32 from vector<1xi32>
  %a_here = llvm.inline_asm has_side_effects "", "=r,0" %a : (i32) -> i32
  %words_here = vector.from_elements %a_here : vector<1xi32>
  %here = vector.bitcast %words_here : vector<1xi32> to !one_word
  return %here : !one_word
}

func.func private @settled_two_words(%value: !two_words) -> !two_words {
  %words = vector.bitcast %value : !two_words to vector<2xi32>
  %a, %b = vector.to_elements %words : vector<2xi32>
  %a_here = llvm.inline_asm has_side_effects "", "=r,0" %a : (i32) -> i32
  %b_here = llvm.inline_asm has_side_effects "", "=r,0" %b : (i32) -> i32
  %words_here = vector.from_elements %a_here, %b_here : vector<2xi32>
  %here = vector.bitcast %words_here : vector<2xi32> to !two_words
  return %here : !two_words
}

func.func private @settled_four_words(%value: !four_words) -> !four_words {
  %words = vector.bitcast %value : !four_words to vector<4xi32>
  %a, %b, %c, %d = vector.to_elements %words : vector<4xi32>
  %a_here = llvm.inline_asm has_side_effects "", "=r,0" %a : (i32) -> i32
  %b_here = llvm.inline_asm has_side_effects "", "=r,0" %b : (i32) -> i32
  %c_here = llvm.inline_asm has_side_effects "", "=r,0" %c : (i32) -> i32
  %d_here = llvm.inline_asm has_side_effects "", "=r,0" %d : (i32) -> i32
  %words_here = vector.from_elements %a_here, %b_here, %c_here, %d_here : vector<4xi32>
  %here = vector.bitcast %words_here : vector<4xi32> to !four_words
  return %here : !four_words
}

// Zeros in place of a chunk's first bits, by the words that they are in.
func.func private @zero_first(%value: !narrow, %bits: index) -> !narrow {
  %word_bits = arith.constant dense<32> : !words
  %zeros = arith.constant dense<0> : !words
  %ones = arith.constant dense<-1> : !long_words
  %bits_i32 = arith.index_castui %bits : index to i32
  %all_bits = vector.broadcast %bits_i32 : i32 to !words
  %word = vector.step : !word_indices
  %word_i32 = arith.index_castui %word : !word_indices to !words
  %before = arith.muli %word_i32, %word_bits : !words
  %of_word = arith.subi %all_bits, %before : !words
  %at_least = arith.maxsi %of_word, %zeros : !words
  %dropped = arith.minsi %at_least, %word_bits : !words
  %dropped_long = arith.extui %dropped : !words to !long_words
  %mask_long = arith.shli %ones, %dropped_long : !long_words
  %mask = arith.trunci %mask_long : !long_words to !words
  %words = vector.bitcast %value : !narrow to !words
  %kept = arith.andi %words, %mask : !words
  %rest = vector.bitcast %kept : !words to !narrow
  return %rest : !narrow
}

// A chunk of less than a word is not copied.
func.func private @zero_first_without_words(%value: !narrow, %bits: index) -> !narrow {
  return %value : !narrow
}

// For AMD's GPUs: likewise, in registers of which each thread has its own.
func.func private @settled_on_amd(%value: !narrow) -> !narrow {
  %words = vector.bitcast %value : !narrow to !words
  %words_here = llvm.inline_asm has_side_effects "", "=v,0" %words : (!words) -> !words
  %here = vector.bitcast %words_here : !words to !narrow
  return %here : !narrow
}

// LLVM takes no vector of one word for an operand.
func.func private @settled_on_amd_word(%value: !one_word) -> !one_word {
  %words = vector.bitcast %value : !one_word to vector<1xi32>
  %a = vector.extract %words[0] : i32 from vector<1xi32>
  %a_here = llvm.inline_asm has_side_effects "", "=v,0" %a : (i32) -> i32
  %words_here = vector.from_elements %a_here : vector<1xi32>
  %here = vector.bitcast %words_here : vector<1xi32> to !one_word
  return %here : !one_word
}

// Elsewhere, and for less than a word, nothing is needed.
func.func private @settled(%value: !narrow) -> !narrow {
  return %value : !narrow
}
