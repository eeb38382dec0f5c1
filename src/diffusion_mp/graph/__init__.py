"""Observed edges and ragged batches: which nodes are joined, and which rows belong to which graph."""

from diffusion_mp.graph.graph import Graph
from diffusion_mp.graph.part_edge_index import PartEdgeIndex

__all__ = ["Graph", "PartEdgeIndex"]
