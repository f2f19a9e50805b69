// How a CPU's thread treats subnormal numbers and rounds. IREE's threads flush subnormal numbers to zero.

// Sets IEEE's rules for this thread, and says what was there before.
//
// On x86-64 the register MXCSR has the rules of all vector arithmetic, and nothing here uses x87. LLVM's
// `llvm.reset.fpenv` sets x87's, too, which takes 110 ns of each workgroup; this takes 3. Source: Intel SDM,
// volume 1, "MXCSR Control and Status Register": all exceptions masked, rounding to nearest.
func.func private @set_ieee_rules() -> i256 {
  %one = llvm.mlir.constant(1 : i64) : i64
  %ieee = llvm.mlir.constant(0x1f80 : i32) : i32
  %place = llvm.alloca %one x i32 : (i64) -> !llvm.ptr
  llvm.call_intrinsic "llvm.x86.sse.stmxcsr"(%place) : (!llvm.ptr) -> ()
  %mxcsr = llvm.load %place : !llvm.ptr -> i32
  llvm.store %ieee, %place : i32, !llvm.ptr
  llvm.call_intrinsic "llvm.x86.sse.ldmxcsr"(%place) : (!llvm.ptr) -> ()
  %before = llvm.zext %mxcsr : i32 to i256
  return %before : i256
}

func.func private @restore_rules(%before: i256) {
  %one = llvm.mlir.constant(1 : i64) : i64
  %mxcsr = llvm.trunc %before : i256 to i32
  %place = llvm.alloca %one x i32 : (i64) -> !llvm.ptr
  llvm.store %mxcsr, %place : i32, !llvm.ptr
  llvm.call_intrinsic "llvm.x86.sse.ldmxcsr"(%place) : (!llvm.ptr) -> ()
  return
}

// On AArch64, LLVM turns `llvm.get.fpenv` and its like into calls of fegetenv and fesetenv, and those that
// IREE links do nothing. The register FPCR has all of the rules; 0 is IEEE's. Source: Arm Architecture Reference Manual
// for A-profile, "FPCR, Floating-point Control Register".
func.func private @set_ieee_rules_on_aarch64() -> i256 {
  %ieee = llvm.mlir.constant(0 : i64) : i64
  %fpcr = llvm.call_intrinsic "llvm.aarch64.get.fpcr"() : () -> i64
  llvm.call_intrinsic "llvm.aarch64.set.fpcr"(%ieee) : (i64) -> ()
  %before = llvm.zext %fpcr : i64 to i256
  return %before : i256
}

func.func private @restore_rules_on_aarch64(%before: i256) {
  %fpcr = llvm.trunc %before : i256 to i64
  llvm.call_intrinsic "llvm.aarch64.set.fpcr"(%fpcr) : (i64) -> ()
  return
}
