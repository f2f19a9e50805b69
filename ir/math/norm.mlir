// The formulas for a chunk of a row, each in one place. A row has N elements. The kernels in ../ declare
// the functions that they call; ../README.md says how a declaration is replaced by its function.

// What a kernel's declaration decides.
!acc = f32
!chunk = vector<8x!acc>
!lanes = vector<8xi1>
#inv_n = 2.44140625e-4 : !acc  // 1 / N
#eps = 1.0e-5 : !acc
#single_column = false         // N is 1
#weight_offset = -0.0 : !acc   // none: adding -0.0 changes no number, and leaves no code
#adds_residual = true
#least_weight = 1.0e-5 : !acc
// End of what is replaced.

// xhat = (x - mean) * rstd. x is centred first: the expanded form x * rstd - mean * rstd would cancel.
func.func private @xhat(%x: !chunk, %mean: !acc, %rstd: !acc) -> !chunk {
  %mean_v = vector.broadcast %mean : !acc to !chunk
  %rstd_v = vector.broadcast %rstd : !acc to !chunk
  %centred = arith.subf %x, %mean_v : !chunk
  %xhat = arith.mulf %centred, %rstd_v : !chunk
  return %xhat : !chunk
}

// RMS normalization subtracts no mean: xhat = x * rstd.
func.func private @xhat_uncentred(%x: !chunk, %mean: !acc, %rstd: !acc) -> !chunk {
  %rstd_v = vector.broadcast %rstd : !acc to !chunk
  %xhat = arith.mulf %x, %rstd_v : !chunk
  return %xhat : !chunk
}

// g = weight_offset + gamma, where the offset is 1 for Gemma's 1 + gamma.
func.func private @weight(%gamma: !chunk) -> !chunk {
  %offset = arith.constant #weight_offset
  %offset_v = vector.broadcast %offset : !acc to !chunk
  %g = arith.addf %gamma, %offset_v : !chunk
  return %g : !chunk
}

// xhat from the output y = xhat * g + beta, by 1 / g. Without a beta (0.0), LLVM leaves no subtraction.
func.func private @xhat_from_output(%y: !chunk, %beta: !chunk, %inverse: !chunk) -> !chunk {
  %scaled = arith.subf %y, %beta : !chunk
  %xhat = arith.mulf %scaled, %inverse : !chunk
  return %xhat : !chunk
}

// A sum of h * xhat from the output, without a division: h * xhat = dy * (y - beta) * g / g', where g' is what
// counts as g, below. g / g' is 1, but not where g is smaller than #least_weight. Inf and NaN give NaN, as
// they would by Inf * 0.
func.func private @plus_hx_from_output(%sum: !chunk, %dy: !chunk, %g: !chunk, %y: !chunk, %beta: !chunk) -> !chunk {
  %one = arith.constant 1.0 : !acc
  %least = arith.constant #least_weight
  %per_least = arith.divf %one, %least : !acc
  %per_least_v = vector.broadcast %per_least : !acc to !chunk
  %ones = arith.constant dense<1.0> : !chunk
  %zeros = arith.constant dense<0.0> : !chunk
  %size = math.absf %g : !chunk
  %by_least = arith.mulf %size, %per_least_v : !chunk
  %ratio = arith.minnumf %by_least, %ones : !chunk
  %ratio_or_nan = math.fma %g, %zeros, %ratio : !chunk
  %dy_part = arith.mulf %dy, %ratio_or_nan : !chunk
  %scaled = arith.subf %y, %beta : !chunk
  %more = math.fma %dy_part, %scaled, %sum : !chunk
  return %more : !chunk
}

// g, or what counts as g where an output is divided by it: #least_weight with g's sign where g is smaller.
// A zero has a sign too. NaN stays NaN.
func.func private @away_from_zero(%g: !chunk) -> !chunk {
  %least = arith.constant #least_weight
  %least_v = vector.broadcast %least : !acc to !chunk
  %size = math.absf %g : !chunk
  %is_small = arith.cmpf olt, %size, %least_v : !chunk
  %signed_least = math.copysign %least_v, %g : !chunk
  %divisor = arith.select %is_small, %signed_least, %g : !lanes, !chunk
  return %divisor : !chunk
}

// The same for single f64 on AMD's GPUs, where LLVM crashes on math.copysign. The reciprocal tells the sign
// of a zero.
func.func private @away_from_zero_by_reciprocal(%g: !chunk) -> !chunk {
  %ones = arith.constant dense<1.0> : !chunk
  %zeros = arith.constant dense<0.0> : !chunk
  %least = arith.constant #least_weight
  %least_v = vector.broadcast %least : !acc to !chunk
  %minus_least_v = arith.negf %least_v : !chunk
  %inverse = arith.divf %ones, %g : !chunk
  %is_below = arith.cmpf olt, %g, %zeros : !chunk
  %inverse_is_below = arith.cmpf olt, %inverse, %zeros : !chunk
  %is_negative = arith.ori %is_below, %inverse_is_below : !lanes
  %signed_least = arith.select %is_negative, %minus_least_v, %least_v : !lanes, !chunk
  %size = math.absf %g : !chunk
  %is_small = arith.cmpf olt, %size, %least_v : !chunk
  %divisor = arith.select %is_small, %signed_least, %g : !lanes, !chunk
  return %divisor : !chunk
}

func.func private @reciprocal(%g: !chunk) -> !chunk {
  %ones = arith.constant dense<1.0> : !chunk
  %inverse = arith.divf %ones, %g : !chunk
  return %inverse : !chunk
}

// f32 on a GPU: one instruction, off by a unit in the last place at most.
func.func private @reciprocal_on_gpu(%g: !chunk) -> !chunk {
  %ones = arith.constant dense<1.0> : !chunk
  %inverse = arith.divf %ones, %g fastmath<afn> : !chunk
  return %inverse : !chunk
}

// The gradient of x has a second part if x also went past the norm: that which came back from there.
func.func private @plus_residual(%dx: !chunk, %dresidual: !chunk) -> !chunk {
  %adds_residual = arith.constant #adds_residual
  %both = arith.addf %dx, %dresidual : !chunk
  %sum = arith.select %adds_residual, %both, %dx : !chunk
  return %sum : !chunk
}

// rstd = 1 / sqrt(var + eps), from a row's sum of the squares of centred values, or of values.
func.func private @rstd(%sum_squares: !acc) -> !acc {
  %inv_n = arith.constant #inv_n
  %eps = arith.constant #eps
  %one = arith.constant 1.0 : !acc
  %var = arith.mulf %sum_squares, %inv_n : !acc
  %var_eps = arith.addf %var, %eps : !acc
  // The compiler would turn math.sqrt and a division into an approximate rsqrt.
  %std = llvm.call_intrinsic "llvm.sqrt"(%var_eps) : (!acc) -> !acc
  %rstd = arith.divf %one, %std : !acc
  return %rstd : !acc
}

// y = xhat * g + beta on a GPU. The multiply-add rounds once where two operations round twice, and LLVM
// turns it into a product without a beta (-0.0), and into a sum without a weight (1).
func.func private @y(%xhat: !chunk, %g: !chunk, %beta: !chunk) -> !chunk {
  %y = math.fma %xhat, %g, %beta : !chunk
  return %y : !chunk
}

// dx = rstd * (h - mean_N(h) - xhat * mean_N(h * xhat)) on a GPU, from the row's sums of h and of h * xhat.
// The formula is expanded, so that an element takes two multiply-adds:
//    = rstd * h - rstd * mean_N(h) - xhat * rstd * mean_N(h * xhat)
func.func private @dx(%h: !chunk, %xhat: !chunk, %rstd: !acc, %sum_h: !acc, %sum_hx: !acc) -> !chunk {
  %inv_n = arith.constant #inv_n
  %scale = arith.mulf %rstd, %inv_n : !acc
  %minus_scale = arith.negf %scale : !acc
  %shift_h = arith.mulf %sum_h, %minus_scale : !acc
  %shift_hx = arith.mulf %sum_hx, %minus_scale : !acc
  %rstd_v = vector.broadcast %rstd : !acc to !chunk
  %shift_h_v = vector.broadcast %shift_h : !acc to !chunk
  %shift_hx_v = vector.broadcast %shift_hx : !acc to !chunk
  %shifted = math.fma %h, %rstd_v, %shift_h_v : !chunk
  %dx = math.fma %xhat, %shift_hx_v, %shifted : !chunk
  return %dx : !chunk
}

// dx = rstd * (h - xhat * mean_N(h * xhat)) of RMS normalization, in the same way.
func.func private @dx_uncentred(%h: !chunk, %xhat: !chunk, %rstd: !acc, %sum_h: !acc, %sum_hx: !acc) -> !chunk {
  %inv_n = arith.constant #inv_n
  %scale = arith.mulf %rstd, %inv_n : !acc
  %minus_scale = arith.negf %scale : !acc
  %shift_hx = arith.mulf %sum_hx, %minus_scale : !acc
  %rstd_v = vector.broadcast %rstd : !acc to !chunk
  %shift_hx_v = vector.broadcast %shift_hx : !acc to !chunk
  %scaled = arith.mulf %h, %rstd_v : !chunk
  %dx = math.fma %xhat, %shift_hx_v, %scaled : !chunk
  return %dx : !chunk
}

// dx on any CPU, from the row's means of h and of h * xhat. There are no multiply-adds here, because on a
// CPU one could become a function call. With a single column, h is its own mean, and the difference is
// not computed: LLVM could make a multiply-add of it, in which h is not rounded but its mean is.
func.func private @dx_from_means(%h: !chunk, %xhat: !chunk, %rstd: !acc, %mean_h: !acc, %mean_hx: !acc) -> !chunk {
  %single_column = arith.constant #single_column
  %zeros = arith.constant dense<0.0> : !chunk
  %rstd_v = vector.broadcast %rstd : !acc to !chunk
  %mean_h_v = vector.broadcast %mean_h : !acc to !chunk
  %mean_hx_v = vector.broadcast %mean_hx : !acc to !chunk
  %less_mean = scf.if %single_column -> !chunk {
    %none = arith.mulf %h, %zeros : !chunk  // Inf has to give NaN
    scf.yield %none : !chunk
  } else {
    %centred = arith.subf %h, %mean_h_v : !chunk
    scf.yield %centred : !chunk
  }
  %along_xhat = arith.mulf %xhat, %mean_hx_v : !chunk
  %rest = arith.subf %less_mean, %along_xhat : !chunk
  %dx = arith.mulf %rest, %rstd_v : !chunk
  return %dx : !chunk
}

// dx on any CPU, for an op that does not centre.
func.func private @dx_from_means_uncentred(%h: !chunk, %xhat: !chunk, %rstd: !acc, %mean_h: !acc, %mean_hx: !acc) -> !chunk {
  %rstd_v = vector.broadcast %rstd : !acc to !chunk
  %mean_hx_v = vector.broadcast %mean_hx : !acc to !chunk
  %along_xhat = arith.mulf %xhat, %mean_hx_v : !chunk
  %rest = arith.subf %h, %along_xhat : !chunk
  %dx = arith.mulf %rest, %rstd_v : !chunk
  return %dx : !chunk
}

// y = xhat * g + beta on any CPU: without multiply-adds, as dx.
func.func private @y_on_cpu(%xhat: !chunk, %g: !chunk, %beta: !chunk) -> !chunk {
  %scaled = arith.mulf %xhat, %g : !chunk
  %y = arith.addf %scaled, %beta : !chunk
  return %y : !chunk
}
