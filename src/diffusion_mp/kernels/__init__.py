"""Pure functions on tensors, without parameters: one module or folder per operation.

An operation has a reference (plain torch, dense, per graph) and fast paths.
:func:`~diffusion_mp.kernels.operation.operation` registers them with ``torch.library``. Sums over nodes accumulate in
at least float32.
"""
