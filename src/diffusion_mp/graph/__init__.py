"""Observed edges and ragged batches: who is joined to whom, and which rows belong to which graph."""

from diffusion_mp.graph.graph import Graph

__all__ = ["Graph"]
