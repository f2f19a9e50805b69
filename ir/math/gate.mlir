// A gate z, of which silu(z) is a factor. After the norm:
//   y = n * silu(z)           n = xhat * g + beta
//   dz = dy * n * silu'(z)    the gradient of n is dy * silu(z)
// or before it (#gates_first), where v = x * silu(z) takes the place of x:
//   dx = dv * silu(z)         dv is the norm's gradient of v
//   dz = dv * x * silu'(z)
// Nothing is rounded to a narrow type between: all of it is computed in the type of sums.

// What a kernel's declaration decides.
!chunk = vector<8xf32>
!lanes = vector<8xi1>
!bits = vector<8xi32>
!element = f32
#elements = 8 : index  // of a chunk
#gates_first = false
#unrolled = #llvm.loop_annotation<unroll = <full = true>>

func.func private @exp_minus_of_it(!chunk) -> !chunk
func.func private @reciprocal_from_1_to_2_of_it(!chunk) -> !chunk
func.func private @exp2_of_it(!chunk) -> !chunk
func.func private @power_of_it(!element) -> !element
// End of what is replaced.

// silu(z) = z * sigmoid(z), and its derivative sigmoid(z) + silu(z) * sigmoid(-z). No exponential overflows, so the
// sigmoid of any z <= 0 is as exact as that of -z. As with x * sigmoid(x) elsewhere, silu(-inf) is NaN.
func.func private @silu(%z: !chunk) -> (!chunk, !chunk) {
  %zeros = arith.constant dense<0.0> : !chunk
  %ones = arith.constant dense<1.0> : !chunk
  %size = math.absf %z : !chunk
  %e = func.call @exp_minus_of_it(%size) : (!chunk) -> !chunk
  %both = arith.addf %e, %ones : !chunk
  %above = func.call @reciprocal_from_1_to_2_of_it(%both) : (!chunk) -> !chunk
  %below = arith.mulf %e, %above : !chunk
  %is_below = arith.cmpf olt, %z, %zeros : !chunk
  %sigmoid = arith.select %is_below, %below, %above : !lanes, !chunk
  %sigmoid_other = arith.select %is_below, %above, %below : !lanes, !chunk
  %silu = arith.mulf %z, %sigmoid : !chunk
  %along = arith.mulf %silu, %sigmoid_other : !chunk
  %slope = arith.addf %sigmoid, %along : !chunk
  return %silu, %slope : !chunk, !chunk
}

// exp(-a) of a >= 0, off by four roundings at most; the same code for every target. With k = a / ln 2, rounded, it is
// 2^-k * exp(k * ln 2 - a). Adding 1.5 * 2^23 rounds to a whole number, and leaves it in the lowest bits. ln 2 is
// the sum of two numbers; the first has so few bits that its product with k is exact. From 110 on, 2^-k is zero.
func.func private @exp_minus(%a: !chunk) -> !chunk {
  %most = arith.constant dense<110.0> : !chunk
  %per_ln2 = arith.constant dense<1.44269504> : !chunk
  %rounder = arith.constant dense<12582912.0> : !chunk
  %ln2_first = arith.constant dense<0.693359375> : !chunk
  %ln2_rest = arith.constant dense<-2.12194440e-4> : !chunk
  %mantissa = arith.constant dense<23> : !bits
  %bias = arith.constant dense<127> : !bits
  %one_bit = arith.constant dense<1> : !bits
  %c7 = arith.constant dense<1.98412698e-4> : !chunk
  %c6 = arith.constant dense<1.38888889e-3> : !chunk
  %c5 = arith.constant dense<8.33333333e-3> : !chunk
  %c4 = arith.constant dense<4.16666667e-2> : !chunk
  %c3 = arith.constant dense<1.66666667e-1> : !chunk
  %c2 = arith.constant dense<0.5> : !chunk
  %c1 = arith.constant dense<1.0> : !chunk
  %bounded = arith.minnumf %a, %most : !chunk
  %quotient = arith.mulf %bounded, %per_ln2 : !chunk
  %shifted = arith.addf %quotient, %rounder : !chunk
  %k = arith.subf %shifted, %rounder : !chunk
  %by_first = arith.mulf %k, %ln2_first : !chunk
  %near = arith.subf %by_first, %bounded : !chunk
  %by_rest = arith.mulf %k, %ln2_rest : !chunk
  %r = arith.addf %near, %by_rest : !chunk
  %m6 = arith.mulf %c7, %r : !chunk
  %p6 = arith.addf %m6, %c6 : !chunk
  %m5 = arith.mulf %p6, %r : !chunk
  %p5 = arith.addf %m5, %c5 : !chunk
  %m4 = arith.mulf %p5, %r : !chunk
  %p4 = arith.addf %m4, %c4 : !chunk
  %m3 = arith.mulf %p4, %r : !chunk
  %p3 = arith.addf %m3, %c3 : !chunk
  %m2 = arith.mulf %p3, %r : !chunk
  %p2 = arith.addf %m2, %c2 : !chunk
  %m1 = arith.mulf %p2, %r : !chunk
  %p1 = arith.addf %m1, %c1 : !chunk
  %m0 = arith.mulf %p1, %r : !chunk
  %p = arith.addf %m0, %c1 : !chunk
  // 2^-k in two steps, because it may be subnormal.
  %shifted_bits = arith.bitcast %shifted : !chunk to !bits
  %rounder_bits = arith.bitcast %rounder : !chunk to !bits
  %k_bits = arith.subi %shifted_bits, %rounder_bits : !bits
  %half = arith.shrui %k_bits, %one_bit : !bits
  %rest = arith.subi %k_bits, %half : !bits
  %exponent_half = arith.subi %bias, %half : !bits
  %exponent_rest = arith.subi %bias, %rest : !bits
  %scale_half_bits = arith.shli %exponent_half, %mantissa : !bits
  %scale_rest_bits = arith.shli %exponent_rest, %mantissa : !bits
  %scale_half = arith.bitcast %scale_half_bits : !bits to !chunk
  %scale_rest = arith.bitcast %scale_rest_bits : !bits to !chunk
  %scaled = arith.mulf %p, %scale_half : !chunk
  %exp = arith.mulf %scaled, %scale_rest : !chunk
  return %exp : !chunk
}

// The same on a GPU, by the processor's own power of 2, which is off by three roundings at most. What the exponent's
// rounding left out is multiplied in.
func.func private @exp_minus_by_power(%a: !chunk) -> !chunk {
  %most = arith.constant dense<110.0> : !chunk
  %minus_per_ln2 = arith.constant dense<-1.44269504> : !chunk
  %minus_per_ln2_rest = arith.constant dense<-1.92596303e-8> : !chunk
  %ln2 = arith.constant dense<0.693147181> : !chunk
  %bounded = arith.minnumf %a, %most : !chunk
  %exponent = arith.mulf %bounded, %minus_per_ln2 : !chunk
  %minus_exponent = arith.negf %exponent : !chunk
  %left_out = math.fma %bounded, %minus_per_ln2, %minus_exponent : !chunk
  %rest = math.fma %bounded, %minus_per_ln2_rest, %left_out : !chunk
  %factor = arith.mulf %rest, %ln2 : !chunk
  %power = func.call @exp2_of_it(%exponent) : (!chunk) -> !chunk
  %exp = math.fma %power, %factor, %power : !chunk
  return %exp : !chunk
}

// The same of a gate of 16 bits on a GPU, without the rest: off by 2 a + 3 roundings at most.
func.func private @exp_minus_of_16_bits(%a: !chunk) -> !chunk {
  %minus_per_ln2 = arith.constant dense<-1.44269504> : !chunk
  %exponent = arith.mulf %a, %minus_per_ln2 : !chunk
  %exp = func.call @exp2_of_it(%exponent) : (!chunk) -> !chunk
  return %exp : !chunk
}

// A power of 2 on a GPU, where a subnormal one may be zero: to keep it takes three more instructions an element on NVIDIA's
// GPUs, and five on AMD's.
func.func private @exp2(%exponent: !chunk) -> !chunk {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %count = arith.constant #elements
  %zeros = arith.constant dense<0.0> : !chunk
  %powers = scf.for %i = %c0 to %count step %c1 iter_args(%before = %zeros) -> !chunk {
    %one = vector.extract %exponent[%i] : !element from !chunk
    %power = func.call @power_of_it(%one) : (!element) -> !element
    %after = vector.insert %power, %before[%i] : !element into !chunk
    scf.yield %after : !chunk
  } {llvm.loop_annotation = #unrolled}
  return %powers : !chunk
}

func.func private @power_on_nvidia(%exponent: !element) -> !element {
  %power = llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f"(%exponent) : (!element) -> !element
  return %power : !element
}

func.func private @power_on_amd(%exponent: !element) -> !element {
  %power = llvm.call_intrinsic "llvm.amdgcn.exp2"(%exponent) : (!element) -> !element
  return %power : !element
}

// 1 / g of 1 <= g <= 2 on NVIDIA's GPUs: a division takes six more instructions, for subnormal g and results.
func.func private @reciprocal_from_1_to_2(%g: !chunk) -> !chunk {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %count = arith.constant #elements
  %zeros = arith.constant dense<0.0> : !chunk
  %inverses = scf.for %i = %c0 to %count step %c1 iter_args(%before = %zeros) -> !chunk {
    %one = vector.extract %g[%i] : !element from !chunk
    %inverse = llvm.call_intrinsic "llvm.nvvm.rcp.approx.ftz.f"(%one) : (!element) -> !element
    %after = vector.insert %inverse, %before[%i] : !element into !chunk
    scf.yield %after : !chunk
  } {llvm.loop_annotation = #unrolled}
  return %inverses : !chunk
}

// The same in f64.
func.func private @exp_minus_in_f64(%a: !chunk) -> !chunk {
  %most = arith.constant dense<760.0> : !chunk
  %per_ln2 = arith.constant dense<1.4426950408889634> : !chunk
  %rounder = arith.constant dense<6755399441055744.0> : !chunk
  %ln2_first = arith.constant dense<0.69314718036912382> : !chunk
  %ln2_rest = arith.constant dense<1.9082149292705877e-10> : !chunk
  %mantissa = arith.constant dense<52> : !bits
  %bias = arith.constant dense<1023> : !bits
  %one_bit = arith.constant dense<1> : !bits
  %c13 = arith.constant dense<1.6059043836821613e-10> : !chunk
  %c12 = arith.constant dense<2.0876756987868100e-09> : !chunk
  %c11 = arith.constant dense<2.5052108385441720e-08> : !chunk
  %c10 = arith.constant dense<2.7557319223985893e-07> : !chunk
  %c9 = arith.constant dense<2.7557319223985893e-06> : !chunk
  %c8 = arith.constant dense<2.4801587301587302e-05> : !chunk
  %c7 = arith.constant dense<1.9841269841269841e-04> : !chunk
  %c6 = arith.constant dense<1.3888888888888889e-03> : !chunk
  %c5 = arith.constant dense<8.3333333333333332e-03> : !chunk
  %c4 = arith.constant dense<4.1666666666666664e-02> : !chunk
  %c3 = arith.constant dense<1.6666666666666666e-01> : !chunk
  %c2 = arith.constant dense<0.5> : !chunk
  %c1 = arith.constant dense<1.0> : !chunk
  %bounded = arith.minnumf %a, %most : !chunk
  %quotient = arith.mulf %bounded, %per_ln2 : !chunk
  %shifted = arith.addf %quotient, %rounder : !chunk
  %k = arith.subf %shifted, %rounder : !chunk
  %by_first = arith.mulf %k, %ln2_first : !chunk
  %near = arith.subf %by_first, %bounded : !chunk
  %by_rest = arith.mulf %k, %ln2_rest : !chunk
  %r = arith.addf %near, %by_rest : !chunk
  %m12 = arith.mulf %c13, %r : !chunk
  %p12 = arith.addf %m12, %c12 : !chunk
  %m11 = arith.mulf %p12, %r : !chunk
  %p11 = arith.addf %m11, %c11 : !chunk
  %m10 = arith.mulf %p11, %r : !chunk
  %p10 = arith.addf %m10, %c10 : !chunk
  %m9 = arith.mulf %p10, %r : !chunk
  %p9 = arith.addf %m9, %c9 : !chunk
  %m8 = arith.mulf %p9, %r : !chunk
  %p8 = arith.addf %m8, %c8 : !chunk
  %m7 = arith.mulf %p8, %r : !chunk
  %p7 = arith.addf %m7, %c7 : !chunk
  %m6 = arith.mulf %p7, %r : !chunk
  %p6 = arith.addf %m6, %c6 : !chunk
  %m5 = arith.mulf %p6, %r : !chunk
  %p5 = arith.addf %m5, %c5 : !chunk
  %m4 = arith.mulf %p5, %r : !chunk
  %p4 = arith.addf %m4, %c4 : !chunk
  %m3 = arith.mulf %p4, %r : !chunk
  %p3 = arith.addf %m3, %c3 : !chunk
  %m2 = arith.mulf %p3, %r : !chunk
  %p2 = arith.addf %m2, %c2 : !chunk
  %m1 = arith.mulf %p2, %r : !chunk
  %p1 = arith.addf %m1, %c1 : !chunk
  %m0 = arith.mulf %p1, %r : !chunk
  %p = arith.addf %m0, %c1 : !chunk
  %shifted_bits = arith.bitcast %shifted : !chunk to !bits
  %rounder_bits = arith.bitcast %rounder : !chunk to !bits
  %k_bits = arith.subi %shifted_bits, %rounder_bits : !bits
  %half = arith.shrui %k_bits, %one_bit : !bits
  %rest = arith.subi %k_bits, %half : !bits
  %exponent_half = arith.subi %bias, %half : !bits
  %exponent_rest = arith.subi %bias, %rest : !bits
  %scale_half_bits = arith.shli %exponent_half, %mantissa : !bits
  %scale_rest_bits = arith.shli %exponent_rest, %mantissa : !bits
  %scale_half = arith.bitcast %scale_half_bits : !bits to !chunk
  %scale_rest = arith.bitcast %scale_rest_bits : !bits to !chunk
  %scaled = arith.mulf %p, %scale_half : !chunk
  %exp = arith.mulf %scaled, %scale_rest : !chunk
  return %exp : !chunk
}

// What is normalized, from x.
func.func private @gated_input(%x: !chunk, %silu: !chunk) -> !chunk {
  %gates_first = arith.constant #gates_first
  %v = arith.mulf %x, %silu : !chunk
  %normalized = arith.select %gates_first, %v, %x : !chunk
  return %normalized : !chunk
}

// The output, from the norm's.
func.func private @gated_output(%n: !chunk, %silu: !chunk) -> !chunk {
  %gates_first = arith.constant #gates_first
  %product = arith.mulf %n, %silu : !chunk
  %y = arith.select %gates_first, %n, %product : !chunk
  return %y : !chunk
}

// The gradient of the norm's output, from that of the output.
func.func private @gated_gradient(%dy: !chunk, %silu: !chunk) -> !chunk {
  %gates_first = arith.constant #gates_first
  %product = arith.mulf %dy, %silu : !chunk
  %dn = arith.select %gates_first, %dy, %product : !chunk
  return %dn : !chunk
}

// dx, from the norm's gradient of what it normalized.
func.func private @gated_dx(%dv: !chunk, %silu: !chunk) -> !chunk {
  %gates_first = arith.constant #gates_first
  %product = arith.mulf %dv, %silu : !chunk
  %dx = arith.select %gates_first, %product, %dv : !chunk
  return %dx : !chunk
}

// dz, from dy and n, or from x and dv.
func.func private @dz(%dy_or_x: !chunk, %slope: !chunk, %n_or_dv: !chunk) -> !chunk {
  %along = arith.mulf %dy_or_x, %slope : !chunk
  %dz = arith.mulf %along, %n_or_dv : !chunk
  return %dz : !chunk
}
