// How a CPU's thread treats subnormal numbers and rounds. IREE's threads flush subnormal numbers to zero.

// Sets IEEE's rules for this thread, and says what was there before.
func.func private @set_ieee_rules() -> i256 {
  %before = llvm.call_intrinsic "llvm.get.fpenv"() : () -> i256
  llvm.call_intrinsic "llvm.reset.fpenv"() : () -> ()
  return %before : i256
}

func.func private @restore_rules(%before: i256) {
  llvm.call_intrinsic "llvm.set.fpenv"(%before) : (i256) -> ()
  return
}

// On AArch64, LLVM turns the above into calls of fegetenv and fesetenv, and those that IREE links do
// nothing. The register FPCR has all of the rules; 0 is IEEE's. Source: Arm Architecture Reference Manual
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
