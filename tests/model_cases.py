"""Every model with inputs of any size: one entry registers a model with all tests that hold for all of them.

These are the laws, explainers, saving, export, ONNX, compilation, transforms, data parallelism and inference by blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim

import diffusion_mp as dm
from helpers import built

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
}
SEQUENCES = {0: Dim("rows"), 1: Dim("length", min=1, max=40)}


def graphs(num_nodes: int) -> Inputs:
    generator = torch.Generator().manual_seed(num_nodes)
    batch = torch.arange(num_nodes) * 3 // max(1, num_nodes)
    pairs = torch.randint(max(1, num_nodes), (2, 5 * num_nodes), generator=generator)
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
        "edge_label_index": torch.randint(
            max(1, num_nodes), (2, num_nodes + min(1, num_nodes)), generator=generator
        ),
    }


def sequences(size: int) -> Inputs:
    generator = torch.Generator().manual_seed(size)
    shape = (size // 4, size // 2)
    tokens = torch.randint(9, shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.8
    return {"x": tokens, "mask": mask}


#: Sizes at which programs that were exported at another size have failed: no node, one, and few.
FEW = (0, 1, 2, 3, 9)


class Case(NamedTuple):
    """A model and the names of the inputs that it reads."""

    build: Callable[[], nn.Module]
    names: tuple[str, ...] = ("x", "edge_index")
    per_node: bool = True
    """Whether the output has a row for every node."""

    def model(self) -> nn.Module:
        return built(self.build)

    def inputs(self, size: int) -> Inputs:
        made = sequences(size) if "mask" in self.names else graphs(size)
        return {name: made[name] for name in self.names}

    @property
    def sizes(self) -> Inputs:
        return {
            name: SEQUENCES if "mask" in self.names else SIZES[name]
            for name in self.names
        }


EDGES = ("x", "edge_index")
BATCH = (*EDGES, "batch")

MODELS = {
    "difformer": Case(lambda: dm.DIFFormer(8, 6, 3)),
    "difformer-options": Case(
        lambda: dm.DIFFormer(
            8,
            6,
            3,
            graph="mean",
            heads=2,
            projection="separate",
            transform=True,
            source=True,
            leak=0.1,
        ),
        (*EDGES, "edge_weight"),
    ),
    "difformer-sigmoid": Case(lambda: dm.DIFFormer(8, 6, 3, kernel="sigmoid"), BATCH),
    "difformer-graphs": Case(
        lambda: dm.DIFFormer(8, 6, 3, 1, task="graph"), BATCH, per_node=False
    ),
    "difformer-links": Case(
        lambda: dm.DIFFormer(8, 6, 3, task="link"), (*EDGES, "edge_label_index")
    ),
    "certified": Case(lambda: dm.CertifiedDIFFormer(8, 6, 3, 2, heads=2)),
    "certified-options": Case(
        lambda: dm.CertifiedDIFFormer(
            8, 6, 3, 2, centre=True, constraint="sphere", penalty="gaussian"
        ),
        BATCH,
    ),
    "certified-transformer": Case(
        lambda: dm.CertifiedTransformer(
            8,
            6,
            3,
            2,
            edge_dim=4,
            attention="all",
            mlp_channels=5,
            gate=True,
            task="graph",
        ),
        (*BATCH, "edge_attr"),
    ),
    "certified-transformer-diagonal": Case(
        lambda: dm.CertifiedTransformer(
            8, 6, 3, 2, edge_dim=4, matrix="diagonal", attention="all"
        ),
        (*EDGES, "edge_attr"),
    ),
    "certified-transformer-identity": Case(
        lambda: dm.CertifiedTransformer(
            8, 6, 3, matrix="identity", mu=0.5, attention="neighbours"
        ),
        BATCH,
    ),
    "nodeformer": Case(lambda: dm.NodeFormer(8, 6, 3, heads=2)),
    "nodeformer-options": Case(
        lambda: dm.NodeFormer(8, 6, 3, 1, heads=2, hops=2), BATCH
    ),
    "sgformer": Case(lambda: dm.SGFormer(8, 6, 3)),
    "sgformer-options": Case(
        lambda: dm.SGFormer(
            8,
            6,
            3,
            normalize="frobenius",
            projection="tied",
            shared_encoder=False,
            gnn="gat",
        ),
        BATCH,
    ),
    "mlp": Case(lambda: dm.DiffusionGNN(8, 6, 3, conv="mlp", dropout=0.0)),
    "gcn": Case(lambda: dm.DiffusionGNN(8, 6, 3, conv="gcn", dropout=0.0)),
    "sgc": Case(lambda: dm.DiffusionGNN(8, 6, 3, conv="sgc", dropout=0.0)),
    "gcn-links": Case(
        lambda: dm.DiffusionGNN(8, 6, 3, dropout=0.0, task="link", head="mlp"),
        (*EDGES, "edge_label_index"),
    ),
    "gin": Case(
        lambda: dm.DiffusionGNN(8, 6, 3, conv="gin", dropout=0.0, task="graph"),
        BATCH,
        per_node=False,
    ),
    "gat": Case(lambda: dm.DiffusionGNN(8, 6, 3, conv="gat", dropout=0.0, heads=2)),
    "appnp": Case(lambda: dm.DiffusionGNN(8, 6, 3, conv="appnp", dropout=0.0)),
    "gcnii": Case(lambda: dm.DiffusionGNN(8, 6, 3, conv="gcnii", dropout=0.0)),
    "gatedgcn": Case(
        lambda: dm.GatedGCN(8, 6, 3, 2, edge_dim=4, pe_channels=2),
        (*EDGES, "edge_attr", "pe"),
    ),
    "gps": Case(lambda: dm.GPS(8, 6, 3, 2, heads=2)),
    "dfi-former": Case(lambda: dm.DFiFormer(8, 6, 3, 2, heads=2)),
    "sfi-former": Case(lambda: dm.SFiFormer(8, 6, 3, 2, heads=2)),
    "sfi-former-options": Case(
        lambda: dm.SFiFormer(
            8, 6, 3, 2, heads=2, edge_dim=4, task="graph", attention={"hops": 2}
        ),
        (*BATCH, "edge_attr"),
    ),
    "label-propagation": Case(lambda: dm.LabelPropagation(3), ("y", "edge_index")),
    "pde-transformer": Case(
        lambda: dm.PDETransformer([9], 8, 3, 2, 2, max_length=40, placement="P5"),
        ("x", "mask"),
    ),
}
