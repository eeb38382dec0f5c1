"""Scikit-learn's digits as one graph: the low-label image setting of DIFFormer, small enough for a laptop."""

from __future__ import annotations

import torch
from torch_geometric.data import Data

from diffusion_mp.data.knn import KNNGraph
from diffusion_mp.errors import as_whole


def load_digits(num_neighbors: int = 5) -> Data:
    """Scikit-learn's 1 797 images of 8 × 8 pixels, joined to their nearest neighbours in pixel space.

    The graph has an edge in both directions wherever one image is among the `num_neighbors` nearest of the other
    (Euclidean distance of the pixels). It reads all pixels and no label: the low-label image setting of Wu, Wipf &
    Yan (2025).

    Args:
        num_neighbors: k, between 1 and 1 796.

    Returns:
        The graph with x [1797, 64] in [0, 1], y [1797] in 0..9 and edge_index [2, E], sorted, without self-loops.

    Raises:
        TypeError, ValueError: `num_neighbors` is no whole number, or out of range.

    Examples:
        >>> load_digits(num_neighbors=5).x.shape
        torch.Size([1797, 64])
    """
    from sklearn.datasets import load_digits as sklearn_digits

    pixels, labels = sklearn_digits(return_X_y=True)
    num_neighbors = as_whole(num_neighbors, "num_neighbors")
    if not 1 <= num_neighbors < len(pixels):
        raise ValueError(f"num_neighbors must be between 1 and {len(pixels) - 1}, got {num_neighbors}.")
    # Sixteenths are exact in every floating-point format, and so are the distances between them.
    data = Data(x=torch.from_numpy(pixels / 16).float(), y=torch.from_numpy(labels).long())
    return KNNGraph(num_neighbors)(data)
