"""Norms of a model's own classes, computed by this package.

`replace` looks at a model's modules. `probe` finds the norm that a module computes, by running it:
`candidates` are what it may be, `effects` and `tracing` tell what a run would do, `sampling` runs
it, `judging` and `checks` compare what comes, `element_types` do so for each type and autocast.
`wrappers` finds what scales and shifts a norm's output, and `modulated` does that by one kernel.
`form` is that norm, `classes` are the classes of modules that compute it by our functions, and
`report` says what was done.
"""
