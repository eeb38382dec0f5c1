"""Every model once, with inputs of any size: for what has to hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim

from diffusion_mp.models import (
    GPS,
    CertifiedDIFFormer,
    DFiFormer,
    DIFFormer,
    DiffusionGNN,
    GatedGCN,
    LabelPropagation,
    NodeFormer,
    PDETransformer,
    SFiFormer,
    SGFormer,
)

Inputs = dict[str, Any]

#: Which sizes of an input may change, and which of these are equal.
SIZES: Inputs = {
    "x": {0: Dim("nodes")},
    "y": {0: Dim("nodes")},
    "edge_index": {1: Dim("edges")},
    "edge_weight": {0: Dim("edges")},
    "edge_attr": {0: Dim("edges")},
    "batch": {0: Dim("nodes")},
    "pe": ({0: Dim("nodes")},) * 3,
    "edge_label_index": {1: Dim("pairs")},
    "tokens": {0: Dim("rows"), 1: Dim("length", max=40)},
}


def graphs(num_nodes: int) -> Inputs:
    """Three graphs with everything that a model of graphs may read."""
    generator = torch.Generator().manual_seed(num_nodes)
    batch = torch.arange(num_nodes) * 3 // num_nodes
    pairs = torch.randint(num_nodes, (2, 5 * num_nodes), generator=generator)
    edges = pairs[:, batch[pairs[0]] == batch[pairs[1]]]
    encodings = [torch.randn(num_nodes, 5, generator=generator) for _ in range(2)]
    return {
        "x": torch.randn(num_nodes, 8, generator=generator),
        "y": torch.rand(num_nodes, 3, generator=generator),
        "edge_index": edges,
        "edge_weight": torch.rand(edges.size(1), generator=generator) + 0.5,
        "edge_attr": torch.randn(edges.size(1), 4, generator=generator),
        "batch": batch,
        "pe": (*encodings, torch.rand(num_nodes, 5, generator=generator) < 0.8),
        "edge_label_index": torch.randint(num_nodes, (2, num_nodes + 1), generator=generator),
    }
