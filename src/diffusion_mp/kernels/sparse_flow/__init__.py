"""Sparse flow: every row of attention is the solution of a small convex problem, exactly (SFi-Former)."""

from diffusion_mp.kernels.sparse_flow.op import sparse_flow_potentials, sparse_flow_product
from diffusion_mp.kernels.sparse_flow.reference import entries, log_entries, solve_rows
from diffusion_mp.kernels.sparse_flow.rows import Features, RowPotentials, RowTerms
from diffusion_mp.kernels.sparse_flow.segments import EdgeFlow, sparse_flow_edges
from diffusion_mp.kernels.sparse_flow.tiled import support

__all__ = [
    "EdgeFlow",
    "Features",
    "RowPotentials",
    "RowTerms",
    "entries",
    "log_entries",
    "solve_rows",
    "sparse_flow_edges",
    "sparse_flow_potentials",
    "sparse_flow_product",
    "support",
]
