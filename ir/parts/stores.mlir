// Stores of a row's chunks.

// What a kernel's declaration decides.
!lines = memref<?x4096xbf16, #hal.descriptor_type<storage_buffer>>
!pointer = !llvm.ptr<1>
!narrow = vector<8xbf16>
!one_word = vector<2xbf16>  // narrow elements of so many words
!two_words = vector<4xbf16>
!four_words = vector<8xbf16>

func.func private @cell_address(index, index, index) -> (index, index)
func.func private @address_of_it(!lines, index, index) -> !pointer
// End of what is replaced.

// A chunk to rows, if it is to be stored.
func.func private @store(%lines: !lines, %row: index, %part: index, %col: index, %stores: i1, %value: !narrow) {
  // with strides: %lines_strided = func.call @row_of_it(%lines, %row) : (!lines, index) -> !lines
  scf.if %stores {
    %line, %in_line = func.call @cell_address(%row, %part, %col) : (index, index, index) -> (index, index)
    vector.store %value, %lines[%line, %in_line] : !lines, !narrow
  }
  return
}

// The same without a branch, for kernels with a gate on NVIDIA GPUs: these have two stores and reads of shared memory
// for each chunk, and one chunk's would not begin before the branches of the last.
func.func private @store_word(%lines: !lines, %row: index, %part: index, %col: index, %stores: i1, %value: !one_word) {
  // with strides: %lines_strided = func.call @row_of_it(%lines, %row) : (!lines, index) -> !lines
  %line, %in_line = func.call @cell_address(%row, %part, %col) : (index, index, index) -> (index, index)
  %address = func.call @address_of_it(%lines, %line, %in_line) : (!lines, index, index) -> !pointer
  %words = vector.bitcast %value : !one_word to vector<1xi32>
  %a = vector.extract %words[0] : i32 from vector<1xi32>
  llvm.inline_asm has_side_effects "@$2 st.global.b32 [$0], $1;", "l,r,b" %address, %a, %stores
      : (!pointer, i32, i1) -> ()
  return
}

func.func private @store_two_words(%lines: !lines, %row: index, %part: index, %col: index, %stores: i1, %value: !two_words) {
  // with strides: %lines_strided = func.call @row_of_it(%lines, %row) : (!lines, index) -> !lines
  %line, %in_line = func.call @cell_address(%row, %part, %col) : (index, index, index) -> (index, index)
  %address = func.call @address_of_it(%lines, %line, %in_line) : (!lines, index, index) -> !pointer
  %words = vector.bitcast %value : !two_words to vector<2xi32>
  %a, %b = vector.to_elements %words : vector<2xi32>
  llvm.inline_asm has_side_effects "@$3 st.global.v2.b32 [$0], {$1, $2};", "l,r,r,b" %address, %a, %b, %stores
      : (!pointer, i32, i32, i1) -> ()
  return
}

func.func private @store_four_words(%lines: !lines, %row: index, %part: index, %col: index, %stores: i1, %value: !four_words) {
  // with strides: %lines_strided = func.call @row_of_it(%lines, %row) : (!lines, index) -> !lines
  %line, %in_line = func.call @cell_address(%row, %part, %col) : (index, index, index) -> (index, index)
  %address = func.call @address_of_it(%lines, %line, %in_line) : (!lines, index, index) -> !pointer
  %words = vector.bitcast %value : !four_words to vector<4xi32>
  %a, %b, %c, %d = vector.to_elements %words : vector<4xi32>
  llvm.inline_asm has_side_effects "@$5 st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r,b" %address, %a, %b, %c, %d, %stores
      : (!pointer, i32, i32, i32, i32, i1) -> ()
  return
}
