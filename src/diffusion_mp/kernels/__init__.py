"""Pure functions on tensors, without parameters: one module or folder per operation.

An operation has a reference (plain torch, dense, per graph) and fast paths beside it. The front of its folder registers
it with ``torch.library`` (shape inference and autograd). Sums over nodes accumulate in at least float32.
"""
