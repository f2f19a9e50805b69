"""Runs GPU kernels on a machine that has no GPU, and faults on what hardware would hide."""
