"""Sparse flow: every row of attention is the solution of a small convex problem, exactly (SFi-Former)."""

from diffusion_mp.kernels.sparse_flow.op import RowPotentials, sparse_flow_potentials, sparse_flow_product
from diffusion_mp.kernels.sparse_flow.proximal import proximal
from diffusion_mp.kernels.sparse_flow.reference import solve_rows, solve_rows_by_newton

__all__ = [
    "RowPotentials",
    "proximal",
    "solve_rows",
    "solve_rows_by_newton",
    "sparse_flow_potentials",
    "sparse_flow_product",
]
