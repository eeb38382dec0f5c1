"""A small instance of everything public that has a state, and how ``modules.pt`` was made from it.

``modules.pt`` was written by version 0.1.0, before its classes were rearranged. It is not written again: it stands for
the checkpoints that users have. A new entry goes into a file of its own, made by ``python tests/saved/saved_modules.py
FILE NAME ...`` with the version that introduces it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import diffusion_mp as dm
from diffusion_mp import Diffusivity, Graph

Inputs = dict[str, Tensor]
Case = tuple[Callable[[], nn.Module], Callable[[Any, Inputs], Tensor]]


def draw_inputs() -> Inputs:
    """Two graphs, of 4 and of 5 nodes, with weights on directed edges; labels, tokens and encodings beside them."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    edges = [[0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 5], [1, 0, 2, 1, 3, 3, 5, 6, 5, 4, 4, 8]]
    return {
        "x": normal(9, 4),
        "values": normal(9, 1, 2),
        "edge_index": torch.tensor(edges),
        "edge_weight": torch.rand(12, generator=generator, dtype=torch.float64) + 0.5,
        "edge_attr": normal(12, 4),
        "batch": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1]),
        "source": normal(9, 4),
        "eigenvectors": normal(9, 3),
        "eigenvalues": torch.rand(9, 3, generator=generator, dtype=torch.float64),
        "categories": torch.randint(3, (9, 2), generator=generator),
        "sequences": normal(2, 5, 4),
        "tokens": torch.randint(6, (2, 5), generator=generator),
        "mask": torch.tensor([[True] * 5, [True, True, False, True, False]]),
        "labels": torch.tensor([0, 1, 2, 0, 1, 1, 2, 0, 2]),
    }


def graph(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs["edge_index"], inputs["edge_weight"], inputs["batch"]


def product(diffusivity: Diffusivity, inputs: Inputs) -> Tensor:
    """What the coupling makes of the values."""
    loops = torch.arange(9).expand(2, 9)  # some kinds ask for a sender in every row
    edge_index = torch.cat([inputs["edge_index"], loops], 1)
    edge_weight = torch.cat([inputs["edge_weight"], torch.ones(9, dtype=torch.float64)])
    observed = Graph(9, edge_index, edge_weight, ptr=torch.tensor([0, 4, 9]))
    return diffusivity(inputs["x"], observed) @ inputs["values"]


def layer(module: nn.Module, inputs: Inputs, **options: str) -> Tensor:
    """What a layer or model answers, given further inputs by name."""
    out = module(
        inputs["x"],
        *graph(inputs),
        **{name: inputs[key] for name, key in options.items()},
    )
    return (
        torch.cat([part.flatten() for part in out]) if isinstance(out, tuple) else out
    )


def in_training(module: nn.Module, inputs: Inputs) -> Tensor:
    """An answer with noise, which is drawn from the saved state of the generator."""
    return layer(module.train(), inputs)


def with_encodings(module: nn.Module, inputs: Inputs) -> Tensor:
    pe = inputs["eigenvectors"], inputs["eigenvalues"]
    return module(
        inputs["categories"], *graph(inputs), edge_attr=inputs["edge_attr"], pe=pe
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


# What were defaults when the states were saved.
DIRECTED: dict[str, Any] = {"direction": "directed"}
MAPPED: dict[str, Any] = {"transform": True, "keep": "values", "bias": True}
SLIDES: dict[str, Any] = {
    "relational_bias": "sum",
    "tau": 0.25,
    "logits": "dot",
    "num_samples": 10,
}
PUBLISHED: dict[str, Any] = {"tau": 0.5, "layer_norm": True, **DIRECTED}

DIFFUSIVITIES: dict[str, Callable[[], Diffusivity]] = {
    "simple": lambda: dm.SimpleDiffusivity(4, heads=2, projection="separate"),
    "simple-tied": lambda: dm.SimpleDiffusivity(4, projection="tied", head_channels=3),
    "sigmoid": lambda: dm.SigmoidDiffusivity(4, heads=2, projection="separate"),
    "softmax": lambda: dm.SoftmaxDiffusivity(4, projection="tied"),
    "gaussian": lambda: dm.GaussianDiffusivity(
        4, heads=2, projection="tied", bandwidth=0.5
    ),
    "kernelized": lambda: dm.KernelizedSoftmaxDiffusivity(
        4, heads=2, num_features=5, edge_regularization=0.5
    ),
    "sgformer": lambda: dm.SGFormerDiffusivity(4, heads=2),
    "gat": lambda: dm.GATDiffusivity(4, 2),
    "edge": lambda: dm.EdgeDiffusivity("sigmoid"),
    "relational-bias": lambda: dm.diffusivities.RelationalBias(2, hops=3),
    "sparse-flow": lambda: dm.SparseFlowDiffusivity(4, heads=2, lam=0.3),
    "sparse-flow-tied": lambda: dm.SparseFlowDiffusivity(
        4, projection="tied", friction="constant", alpha=1.0
    ),
    "edge-sparse-flow": lambda: dm.diffusivities.EdgeSparseFlowDiffusivity(
        4, heads=2, hops=2
    ),
    "neumann": lambda: dm.NeumannDiffusivity(2, strides=(1, 2), boundary="replicate"),
    "identity": dm.IdentityDiffusivity,
    "uniform": dm.UniformDiffusivity,
    "adjacency": lambda: dm.AdjacencyDiffusivity("row", self_loops="remaining"),
    "enhanced": lambda: dm.AdjacencyEnhancedDiffusivity(
        dm.SoftmaxDiffusivity(4, projection="tied"), gamma=0.5, **DIRECTED
    ),
    "enhanced-sparse-flow": lambda: dm.AdjacencyEnhancedDiffusivity(
        dm.SparseFlowDiffusivity(4, heads=2), gamma=0.5, **DIRECTED
    ),
    "augmented-sum": lambda: dm.GraphAugmentedDiffusivity(
        dm.SigmoidDiffusivity(4, projection="tied"),
        dm.AdjacencyDiffusivity("sym", **DIRECTED),
    ),
    "augmented-mean": lambda: dm.GraphAugmentedDiffusivity(
        dm.SimpleDiffusivity(4, projection="separate"),
        dm.AdjacencyDiffusivity("sym", **DIRECTED),
        0.5,
    ),
    "scaled": lambda: scalar(0.5) * dm.SimpleDiffusivity(4, projection="tied"),
    "sum": lambda: (
        0.5 * dm.SimpleDiffusivity(4, projection="tied")
        + scalar(0.5) * dm.GATDiffusivity(4)
    ),
    "three-terms": lambda: (
        dm.SimpleDiffusivity(4, projection="tied")
        + dm.IdentityDiffusivity()
        + 0.5 * dm.GATDiffusivity(4)
    ),
}

LAYERS: dict[str, Case | Callable[[], nn.Module]] = {
    "diffusion": lambda: dm.DiffusionConv(
        4, 3, dm.GATDiffusivity(4, 2), dm.ExplicitEuler(0.5), 2, concat=True
    ),
    "diffusion-keep-state": lambda: dm.DiffusionConv(
        4, 4, dm.SimpleDiffusivity(), keep="state"
    ),
    "diffusion-source": lambda: dm.DiffusionConv(
        4,
        3,
        dm.SimpleDiffusivity(4, projection="tied"),
        dm.ExplicitEuler(0.3, beta=1.0),
    ),
    "readme": lambda: dm.DiffusionConv(
        4,
        3,
        0.5 * dm.SimpleDiffusivity() + 0.5 * dm.AdjacencyDiffusivity("sym", **DIRECTED),
        dm.ExplicitEuler(tau=0.5),
    ),
    "multi-head": lambda: dm.MultiHeadConv(
        4, 3, dm.SparseFlowDiffusivity(4, heads=2), 2, head_channels=2
    ),
    "difformer-conv": lambda: dm.DIFFormerConv(
        4, 3, 2, projection="separate", **DIRECTED
    ),
    "difformer-conv-mean": lambda: dm.DIFFormerConv(
        4, 4, kernel="sigmoid", graph="mean", **MAPPED, **DIRECTED
    ),
    "difformer-conv-source": (
        lambda: dm.DIFFormerConv(4, 4, beta=0.5, leak=0.2, **MAPPED, **DIRECTED),
        partial(layer, source="source"),
    ),
    "nodeformer-conv": lambda: dm.NodeFormerConv(
        4, 4, 2, num_features=5, hops=2, **SLIDES
    ),
    "sgformer-conv": lambda: dm.SGFormerConv(4, 4, 2),
    "sfi-conv": lambda: dm.SFiConv(4, 4, 2, bias=True, **DIRECTED),
    "sfi-conv-no-adjacency": lambda: dm.SFiConv(
        4, 4, adjacency=False, projection="tied", residual=False
    ),
    "sfi-conv-hops": lambda: dm.SFiConv(
        4, 4, 2, hops=2, friction="constant", gamma=0.5, **DIRECTED
    ),
    "gated-gcn-conv": (
        lambda: dm.GatedGCNConv(4),
        partial(layer, edge_attr="edge_attr"),
    ),
    "gps-block": (
        lambda: dm.layers.GPSBlock(
            4, dm.GatedGCNConv(4), dm.SFiConv(4, 4, 2, residual=False, **DIRECTED)
        ),
        partial(layer, edge_attr="edge_attr"),
    ),
    "gps-block-local": lambda: dm.layers.GPSBlock(4, dm.GCNConv(4, 4), norm="layer"),
    "pde-diffusion": (
        lambda: dm.PDEDiffusion1d(4, heads=2, per="head", strides=(1, 2), norm=True),
        lambda module, inputs: module(inputs["sequences"], inputs["mask"]),
    ),
    "laplacian-encoder": (
        lambda: dm.layers.LaplacianEncoder(3),
        lambda module, inputs: module(inputs["eigenvectors"], inputs["eigenvalues"]),
    ),
    "mlp": lambda: dm.MLPConv(4, 3),
    "gcn": lambda: dm.GCNConv(4, 3),
    "sgc": lambda: dm.SGConv(4, 3, K=3),
    "gin": lambda: dm.GINConv(4, mlp(), train_eps=True),
    "gin-fixed": lambda: dm.GINConv(4, mlp(), eps=0.2),
    "gat": lambda: dm.GATConv(4, 3, 2),
    "gat-mean": lambda: dm.GATConv(4, 3, 2, concat=False),
    "appnp": lambda: dm.APPNPConv(4, K=4, alpha=0.2),
    "gcnii": (
        lambda: dm.GCNIIConv(4, 0.2, theta=0.5, layer=2),
        partial(layer, source="source"),
    ),
}

MODELS: dict[str, Case | Callable[[], nn.Module]] = {
    "difformer": lambda: dm.DIFFormer(4, 4, 3, **PUBLISHED),
    "difformer-published": lambda: dm.DIFFormer(
        4,
        4,
        3,
        1,
        heads=2,
        projection="separate",
        transform=True,
        activation="relu",
        source=True,
        **PUBLISHED,
    ),
    "difformer-sigmoid": lambda: dm.DIFFormer(
        4, 4, 3, 1, kernel="sigmoid", normalize=None, graph="mean", **PUBLISHED
    ),
    "nodeformer": lambda: dm.NodeFormer(
        4, 4, 3, 2, heads=2, num_features=5, hops=2, jump="cat", **SLIDES
    ),
    "nodeformer-noise": (
        lambda: dm.NodeFormer(
            4,
            4,
            3,
            1,
            heads=2,
            num_features=5,
            hops=1,
            jump="cat",
            **SLIDES | {"num_samples": 3},
        ),
        in_training,
    ),
    "sgformer": lambda: dm.SGFormer(
        4, 4, 3, heads=2, num_gnn_layers=2, gnn="gcn", alpha=0.5
    ),
    "sgformer-released": lambda: dm.SGFormer(
        4, 4, 3, num_gnn_layers=1, shared_encoder=False, gnn="gat", alpha=0.5
    ),
    **{
        f"gnn-{conv}": partial(dm.DiffusionGNN, 4, 4, 3, 2, conv=conv)
        for conv in ("mlp", "gcn", "sgc", "gin", "gat", "appnp", "gcnii")
    },
    "gated-gcn": lambda: dm.GatedGCN(4, 4, 3, 1),
    "gps": lambda: dm.GPS(4, 4, 3, 1, heads=2),
    "dfi-former": lambda: dm.DFiFormer(4, 4, 3, 1, heads=2, attention=DIRECTED),
    "sfi-former": lambda: dm.SFiFormer(4, 4, 3, 1, heads=2, attention=DIRECTED),
    "sfi-former-encodings": (
        lambda: dm.SFiFormer(
            [3, 3],
            5,
            3,
            1,
            heads=1,
            edge_dim=4,
            pe_channels=2,
            task="graph",
            attention=DIRECTED,
        ),
        with_encodings,
    ),
    "pde-transformer": (
        lambda: dm.PDETransformer([6], 4, 3, 1, 2, max_length=6, placement="P5"),
        lambda module, inputs: module(inputs["tokens"], inputs["mask"]),
    ),
    "label-propagation": (
        lambda: dm.LabelPropagation(3),
        lambda module, inputs: module(
            inputs["labels"], *graph(inputs)[:2], batch=inputs["batch"]
        ),
    ),
}

CASES: dict[str, Case] = {
    name: (build, product) for name, build in DIFFUSIVITIES.items()
} | {
    f"{name}-{kind}": case if isinstance(case, tuple) else (case, layer)
    for kind, cases in (("layer", LAYERS), ("model", MODELS))
    for name, case in cases.items()
}


def drawn(build: Callable[[], nn.Module]) -> nn.Module:
    """A module in double precision with no weight at its start, which is zero or one for some."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build().double().eval()
        with torch.no_grad():
            for value in module.state_dict().values():
                if value.is_floating_point():
                    value.add_(0.2 * torch.rand_like(value))
    return module


def main(path: str, *names: str) -> None:
    """Write the states and outputs of the named cases, or of all, to ``path``."""
    inputs = draw_inputs()
    saved: dict[str, Any] = {"inputs": inputs, "states": {}, "outputs": {}}
    for name in names or CASES:
        build, answer = CASES[name]
        module = drawn(build)
        saved["states"][name] = {
            key: value.clone() for key, value in module.state_dict().items()
        }
        with torch.no_grad():
            saved["outputs"][name] = answer(module, inputs).clone()
    torch.save(saved, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
