"""Sparse products by compressed rows: what torch's kernels for single precision and for no order of edges give."""

import pytest
import torch
from helpers import randn

from diffusion_mp import Graph
from diffusion_mp.kernels.spmm import sddmm, spmm


def _edges(nodes, count, order, generator):
    edge_index = torch.randint(0, nodes, (2, count), generator=generator)
    return edge_index[:, edge_index[1].argsort()] if order == "by target" else edge_index
