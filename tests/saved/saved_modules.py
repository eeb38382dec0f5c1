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

from diffusion_mp import (
    GPS,
    AdjacencyDiffusivity,
    AdjacencyEnhancedDiffusivity,
    APPNPConv,
    DFiFormer,
    DIFFormer,
    DIFFormerConv,
    DiffusionConv,
    DiffusionGNN,
    Diffusivity,
    EdgeDiffusivity,
    EdgeSparseFlowDiffusivity,
    ExplicitEuler,
    GATConv,
    GATDiffusivity,
    GatedGCN,
    GatedGCNConv,
    GaussianDiffusivity,
    GCNConv,
    GCNIIConv,
    GINConv,
    GPSBlock,
    Graph,
    GraphAugmentedDiffusivity,
    IdentityDiffusivity,
    KernelizedSoftmaxDiffusivity,
    LabelPropagation,
    LaplacianEncoder,
    MLPConv,
    MultiHeadConv,
    NeumannDiffusivity,
    NodeFormer,
    NodeFormerConv,
    PDEDiffusion1d,
    PDETransformer,
    RelationalBias,
    SFiConv,
    SFiFormer,
    SGConv,
    SGFormer,
    SGFormerConv,
    SGFormerDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
    SoftmaxDiffusivity,
    SparseFlowDiffusivity,
    UniformDiffusivity,
)

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
    out = module(inputs["x"], *graph(inputs), **{name: inputs[key] for name, key in options.items()})
    return torch.cat([part.flatten() for part in out]) if isinstance(out, tuple) else out


def in_training(module: nn.Module, inputs: Inputs) -> Tensor:
    """An answer with noise, which is drawn from the saved state of the generator."""
    return layer(module.train(), inputs)


def with_encodings(module: SFiFormer, inputs: Inputs) -> Tensor:
    pe = inputs["eigenvectors"], inputs["eigenvalues"]
    return module(inputs["categories"], *graph(inputs), edge_attr=inputs["edge_attr"], pe=pe)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


DIFFUSIVITIES: dict[str, Callable[[], Diffusivity]] = {
    "simple": lambda: SimpleDiffusivity(4, heads=2, projection="separate"),
    "simple-tied": lambda: SimpleDiffusivity(4, projection="tied", head_channels=3),
    "sigmoid": lambda: SigmoidDiffusivity(4, heads=2, projection="separate"),
    "softmax": lambda: SoftmaxDiffusivity(4, projection="tied"),
    "gaussian": lambda: GaussianDiffusivity(4, heads=2, projection="tied", bandwidth=0.5),
    "kernelized": lambda: KernelizedSoftmaxDiffusivity(4, heads=2, num_features=5, edge_regularization=0.5),
    "sgformer": lambda: SGFormerDiffusivity(4, heads=2),
    "gat": lambda: GATDiffusivity(4, 2),
    "edge": lambda: EdgeDiffusivity("sigmoid"),
    "relational-bias": lambda: RelationalBias(2, hops=3),
    "sparse-flow": lambda: SparseFlowDiffusivity(4, heads=2, lam=0.3),
    "sparse-flow-tied": lambda: SparseFlowDiffusivity(4, projection="tied", friction="constant", alpha=1.0),
    "edge-sparse-flow": lambda: EdgeSparseFlowDiffusivity(4, heads=2, hops=2),
    "neumann": lambda: NeumannDiffusivity(2, strides=(1, 2), boundary="replicate"),
    "identity": IdentityDiffusivity,
    "uniform": UniformDiffusivity,
    "adjacency": lambda: AdjacencyDiffusivity("row", self_loops="remaining"),
    "enhanced": lambda: AdjacencyEnhancedDiffusivity(SoftmaxDiffusivity(4, projection="tied"), gamma=0.5),
    "enhanced-sparse-flow": lambda: AdjacencyEnhancedDiffusivity(SparseFlowDiffusivity(4, heads=2), gamma=0.5),
    "augmented-sum": lambda: GraphAugmentedDiffusivity(
        SigmoidDiffusivity(4, projection="tied"), AdjacencyDiffusivity("sym")
    ),
    "augmented-mean": lambda: GraphAugmentedDiffusivity(
        SimpleDiffusivity(4, projection="separate"), AdjacencyDiffusivity("sym"), "mean"
    ),
    "scaled": lambda: scalar(0.5) * SimpleDiffusivity(4, projection="tied"),
    "sum": lambda: 0.5 * SimpleDiffusivity(4, projection="tied") + scalar(0.5) * GATDiffusivity(4),
    "three-terms": lambda: SimpleDiffusivity(4, projection="tied") + IdentityDiffusivity() + 0.5 * GATDiffusivity(4),
}

# What were defaults when the states were saved.
MAPPED: dict[str, Any] = {"transform": True, "keep": "values", "bias": True}
SLIDES: dict[str, Any] = {"relational_bias": "sum", "tau": 0.25, "logits": "dot", "num_samples": 10}
PUBLISHED: dict[str, Any] = {"tau": 0.5, "layer_norm": True}

LAYERS: dict[str, Case] = {
    "diffusion": (lambda: DiffusionConv(4, 3, GATDiffusivity(4, 2), ExplicitEuler(0.5), 2, concat=True), layer),
    "diffusion-keep-state": (lambda: DiffusionConv(4, 4, SimpleDiffusivity(), keep="state"), layer),
    "diffusion-source": (
        lambda: DiffusionConv(4, 3, SimpleDiffusivity(4, projection="tied"), ExplicitEuler(0.3, beta=1.0)),
        layer,
    ),
    "readme": (
        lambda: DiffusionConv(
            4, 3, 0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("sym"), ExplicitEuler(tau=0.5)
        ),
        layer,
    ),
    "multi-head": (lambda: MultiHeadConv(4, 3, SparseFlowDiffusivity(4, heads=2), 2, head_channels=2), layer),
    "difformer-conv": (lambda: DIFFormerConv(4, 3, 2, projection="separate"), layer),
    "difformer-conv-mean": (lambda: DIFFormerConv(4, 4, kernel="sigmoid", graph="mean", **MAPPED), layer),
    "difformer-conv-source": (
        lambda: DIFFormerConv(4, 4, beta=0.5, leak=0.2, **MAPPED),
        partial(layer, source="source"),
    ),
    "nodeformer-conv": (lambda: NodeFormerConv(4, 4, 2, num_features=5, hops=2, **SLIDES), layer),
    "sgformer-conv": (lambda: SGFormerConv(4, 4, 2), layer),
    "sfi-conv": (lambda: SFiConv(4, 4, 2, bias=True), layer),
    "sfi-conv-no-adjacency": (lambda: SFiConv(4, 4, adjacency=False, projection="tied", residual=False), layer),
    "sfi-conv-hops": (lambda: SFiConv(4, 4, 2, hops=2, friction="constant", gamma=0.5), layer),
    "gated-gcn-conv": (lambda: GatedGCNConv(4), partial(layer, edge_attr="edge_attr")),
    "gps-block": (
        lambda: GPSBlock(4, GatedGCNConv(4), SFiConv(4, 4, 2, residual=False)),
        partial(layer, edge_attr="edge_attr"),
    ),
    "gps-block-local": (lambda: GPSBlock(4, GCNConv(4, 4), norm="layer"), layer),
    "pde-diffusion": (
        lambda: PDEDiffusion1d(4, heads=2, per="head", strides=(1, 2), norm=True),
        lambda module, inputs: module(inputs["sequences"], inputs["mask"]),
    ),
    "laplacian-encoder": (
        lambda: LaplacianEncoder(3),
        lambda module, inputs: module(inputs["eigenvectors"], inputs["eigenvalues"]),
    ),
    "mlp": (lambda: MLPConv(4, 3), layer),
    "gcn": (lambda: GCNConv(4, 3), layer),
    "sgc": (lambda: SGConv(4, 3, K=3), layer),
    "gin": (lambda: GINConv(4, mlp(), train_eps=True), layer),
    "gin-fixed": (lambda: GINConv(4, mlp(), eps=0.2), layer),
    "gat": (lambda: GATConv(4, 3, 2), layer),
    "gat-mean": (lambda: GATConv(4, 3, 2, concat=False), layer),
    "appnp": (lambda: APPNPConv(4, K=4, alpha=0.2), layer),
    "gcnii": (lambda: GCNIIConv(4, 0.2, theta=0.5, layer=2), partial(layer, source="source")),
}

MODELS: dict[str, Case] = {
    "difformer": (lambda: DIFFormer(4, 4, 3, **PUBLISHED), layer),
    "difformer-published": (
        lambda: DIFFormer(
            4, 4, 3, 1, heads=2, projection="separate", transform=True, activation="relu", source=True, **PUBLISHED
        ),
        layer,
    ),
    "difformer-sigmoid": (
        lambda: DIFFormer(4, 4, 3, 1, kernel="sigmoid", normalize=None, graph="mean", **PUBLISHED),
        layer,
    ),
    "nodeformer": (lambda: NodeFormer(4, 4, 3, 2, heads=2, num_features=5, hops=2, jump="cat", **SLIDES), layer),
    "nodeformer-noise": (
        lambda: NodeFormer(4, 4, 3, 1, heads=2, num_features=5, hops=1, jump="cat", **SLIDES | {"num_samples": 3}),
        in_training,
    ),
    "sgformer": (lambda: SGFormer(4, 4, 3, heads=2, num_gnn_layers=2, gnn="gcn", alpha=0.5), layer),
    "sgformer-released": (
        lambda: SGFormer(4, 4, 3, num_gnn_layers=1, shared_encoder=False, gnn="gat", alpha=0.5),
        layer,
    ),
    **{
        f"gnn-{conv}": (partial(DiffusionGNN, 4, 4, 3, 2, conv=conv), layer)
        for conv in ("mlp", "gcn", "sgc", "gin", "gat", "appnp", "gcnii")
    },
    "gated-gcn": (lambda: GatedGCN(4, 4, 3, 1), layer),
    "gps": (lambda: GPS(4, 4, 3, 1, heads=2), layer),
    "dfi-former": (lambda: DFiFormer(4, 4, 3, 1, heads=2), layer),
    "sfi-former": (lambda: SFiFormer(4, 4, 3, 1, heads=2), layer),
    "sfi-former-encodings": (
        lambda: SFiFormer([3, 3], 5, 3, 1, heads=1, edge_dim=4, pe_channels=2, task="graph"),
        with_encodings,
    ),
    "pde-transformer": (
        lambda: PDETransformer([6], 4, 3, 1, 2, max_length=6, placement="P5"),
        lambda module, inputs: module(inputs["tokens"], inputs["mask"]),
    ),
    "label-propagation": (
        lambda: LabelPropagation(3),
        lambda module, inputs: module(inputs["labels"], *graph(inputs)[:2], batch=inputs["batch"]),
    ),
}

CASES: dict[str, Case] = {name: (build, product) for name, build in DIFFUSIVITIES.items()} | {
    f"{name}-{kind}": case for kind, cases in (("layer", LAYERS), ("model", MODELS)) for name, case in cases.items()
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
        saved["states"][name] = {key: value.clone() for key, value in module.state_dict().items()}
        with torch.no_grad():
            saved["outputs"][name] = answer(module, inputs).clone()
    torch.save(saved, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
