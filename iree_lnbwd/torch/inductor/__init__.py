"""A pass over inductor's graphs: what surrounds a norm of ours goes into its kernel.

``torch.compile`` traces a model into a graph, and inductor makes kernels of it. An operator of ours
stays whole there, so inductor could not fuse it with its neighbours. The pass does that:

- `forwards`: a forward becomes inductor's own code, which it fuses with what is around it; rows
  that are too wide for that keep ours, with the addition before it.
- `backwards`: the addition of a skip connection's gradient goes into the backward, and so does the
  cast of the gradient that arrives.
- `modulations`: what multiplies a norm's output, for each sample, becomes a weight of its backward.
- `widened`: a backward takes an input that was cast to f32 as it was before.
- Both directions of narrow rows become inductor's own code.
- `calls`: a backward in a graph, as a value; `served`: whether it will have a module. Where IREE's
  compiler is not installed, a backward without one becomes inductor's own code, too.
- `pytorchs`: under `enable`, the backwards of PyTorch's own norms stay whole, too, and the pass
  treats them as ours.
- `placing`: puts the passes into inductor's configuration, beside those that are there.

The pass leaves a graph without such operators as it is.
"""
