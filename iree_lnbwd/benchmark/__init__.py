"""Times of calls on this machine, for ``iree-lnbwd benchmark`` and for scripts.

    cells: what  ─>  pytorch, alone: who  ─>  host_times, gpu_times: how long  ─>  report

`runs` leads through these. Only `pytorch`, `gpu_times` and `beside` import PyTorch.
"""
