"""Many modules in one file, to ship a family of norms. docs/bundles.md is the manual.

`index` says what is in a bundle, `container` reads and writes the file, `making` compiles it,
`choosing` finds what a device runs, `serving` loads it, and `loaded` answers calls.
"""
