"""Pure functions on tensors, without parameters: one folder per operation.

``reference.py`` is the plain truth (dense, per graph), the file beside it the fast path, and ``op.py`` registers the
operation with ``torch.library`` (shape inference and autograd). Sums over nodes accumulate in at least float32.
"""
