"""Data for graph models: parts and clusters of large graphs, neighbour graphs, encodings, splits, padded sequences."""

from diffusion_mp.data.knn import KNNGraph, knn_graph
from diffusion_mp.data.partition import PartOf, find_clusters
from diffusion_mp.data.partition_loader import RandomPartitionLoader
from diffusion_mp.data.splits import (
    Split,
    label_mask,
    random_split,
    random_split_per_class,
)
from diffusion_mp.data.transforms import AddLaplacianPE, ToDiffusionGraph, pad

__all__ = [
    "AddLaplacianPE",
    "KNNGraph",
    "PartOf",
    "RandomPartitionLoader",
    "Split",
    "ToDiffusionGraph",
    "find_clusters",
    "knn_graph",
    "label_mask",
    "pad",
    "random_split",
    "random_split_per_class",
]
