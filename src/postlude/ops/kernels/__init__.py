"""Every Triton kernel. `kernels/x.py` has those of `ops/x.py`; `x_device.py` has their device code where it is long.

Operations import these files inside functions, since only they need triton. `capabilities.py`, which needs none, says
which kernel runs where. Each file begins with what its kernels are faster than and where that was measured, if it was.
"""
