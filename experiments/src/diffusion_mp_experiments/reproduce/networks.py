"""Networks of the tables that are not models of the library, and models without their attention."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import relu
from torch_geometric.nn import GATv2Conv, GINConv, GINEConv, ResGatedGraphConv

from diffusion_mp.checks import Probability, checked
from diffusion_mp.couplings import Coupling
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    Diffusivity,
    IdentityDiffusivity,
    UniformDiffusivity,
)
from diffusion_mp.diffusivities.all_pair import QueryKeyDiffusivity
from diffusion_mp.errors import CouplingMismatchError
from diffusion_mp.graph import Graph
from diffusion_mp.layers import APPNPConv, DiffusionConv, GCNConv
from diffusion_mp.layers.certified_block import CertifiedBlock, Pairs
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.models import DIFFormer, DiffusionGNN
from diffusion_mp.models.base import Collect, LayerStack, Task
from diffusion_mp.runtime.noise import dropout
from diffusion_mp.updates import ExplicitEuler, HeatKernel

T = TypeVar("T")
ABLATIONS: dict[str, type[Diffusivity]] = {
    "identity": IdentityDiffusivity,
    "uniform": UniformDiffusivity,
}


def normalized_adjacency() -> AdjacencyDiffusivity:
    """Return Â of a GCN, D^(−1/2) (A + I) D^(−1/2), with every edge in both directions."""
    return AdjacencyDiffusivity("sym", self_loops="remaining", direction="undirected")


class Readout(nn.Module):
    """A `DiffusionGNN` whose logits are spread to equilibrium by α (I − (1 − α) Â)⁻¹ (`APPNPConv`), α in (0, 1)."""

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        alpha: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.body = DiffusionGNN(
            in_channels, hidden_channels, out_channels, num_layers, **options
        )
        self.readout = APPNPConv(out_channels, K=None, alpha=alpha)

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        return self.readout(
            self.body(x, edge_index, edge_weight), edge_index, edge_weight
        )


class HeatNetwork(nn.Module):
    """An encoder, the heat equation over the graph for a time t, and a decoder.

    This is GRAND with a fixed, symmetric diffusivity (Chamberlain et al. 2021) and no error in time (`HeatKernel`).
    Dropout acts on the features and on the state before the decoder.
    """

    @checked
    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        t: float = 5.0,
        dropout: Probability = 0.5,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.encoder = FeatureLinear(in_channels, hidden_channels)
        self.decoder = nn.Linear(hidden_channels, out_channels)
        self.heat = DiffusionConv(
            hidden_channels,
            hidden_channels,
            normalized_adjacency(),
            HeatKernel(t, "residual"),
            transform=False,
            bias=False,
        )

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        state = relu(self.encoder(dropout(x, self.dropout, self.training)))
        state = self.heat(state, edge_index, edge_weight)
        return self.decoder(dropout(state, self.dropout, self.training))


class DropoutSeenDIFFormer(DIFFormer):
    """`DIFFormer` with dropout of every state before its layer, as published; the attention reads what is left.

    In the library dropout acts only on what is propagated (docs/errata.md, D20).
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        dropout: Probability = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(
            in_channels, hidden_channels, out_channels, num_layers, **options
        )
        self.norms = nn.ModuleList(
            nn.Sequential(norm, nn.Dropout(dropout)) for norm in self.norms
        )


ClassicConv = Literal["gcn", "sage", "gine", "gat", "gatedgcn"]


class ClassicGNN(LayerStack):
    """x⁰ = drop(ReLU(Norm(W x + b))),  xᵏ⁺¹ = xᵏ + drop(ReLU(Norm(conv(xᵏ) + W_k xᵏ))), after Luo, Shi & Wu (2024).

    Args:
        in_channels: channels of the features.
        hidden_channels: channels of the states.
        out_channels: channels of the output.
        num_layers: number of layers.
        conv: "gcn" is `GCNConv`, "sage" the mean of the neighbours. "gine", "gat" and "gatedgcn" are PyG's `GINEConv`,
            `GATv2Conv` and `ResGatedGraphConv`, which read `edge_attr`.
        edge_dim: channels of `edge_attr` [E, edge_dim]; without it "gine" is `GINConv`.
        heads: number of heads of "gat".
        layer_norm: whether Norm is a LayerNorm, see `LayerStack`.
        dropout: probability of drop.
        task: "node" or "graph", see `LayerStack`.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        conv: ClassicConv = "gcn",
        edge_dim: int | None = None,
        heads: int = 1,
        layer_norm: bool = True,
        dropout: float = 0.0,
        task: Task = "node",
    ) -> None:
        width = hidden_channels

        def mlp() -> nn.Module:
            return nn.Sequential(
                nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
            )

        makes: dict[str, Callable[[], nn.Module]] = {
            "gcn": lambda: GCNConv(width, width),
            "sage": lambda: DiffusionConv(
                width,
                width,
                AdjacencyDiffusivity("row"),
                ExplicitEuler(1.0, "residual"),
            ),
            "gine": lambda: (
                GINConv(mlp())
                if edge_dim is None
                else GINEConv(mlp(), edge_dim=edge_dim)
            ),
            "gat": lambda: GATv2Conv(
                width, width // heads, heads, edge_dim=edge_dim, add_self_loops=False
            ),
            "gatedgcn": lambda: ResGatedGraphConv(
                width, width, edge_dim=edge_dim, root_weight=False
            ),
        }
        super().__init__(
            (in_channels, width, out_channels),
            num_layers,
            makes[conv],
            layer_norm=layer_norm,
            dropout=dropout,
            task=task,
        )
        if edge_dim is not None and conv in ("gcn", "sage"):
            raise ValueError(
                f"edge_dim goes with the layers that read edge_attr; got conv={conv!r}."
            )
        # The W_k, since not all of PyG's layers have a weight of their own for the node itself.
        self.roots = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        # The base class passes on the inputs that are named here.
        self.reads = () if edge_dim is None else ("edge_attr",)
        self.weighted = conv == "gcn"

    def propagate(
        self, x: Tensor, graph: Graph, collect: Collect, edge_attr: Tensor | None = None
    ) -> Tensor:
        inputs = {}
        if self.weighted:
            inputs["edge_weight"] = graph.edge_weight
        if edge_attr is not None:
            inputs["edge_attr"] = edge_attr
        first, *norms = self.norms
        x = self._activated(first(self.encoder(x)))
        for conv, root, norm in zip(self.convs, self.roots, norms, strict=True):
            x = x + self._activated(norm(conv(x, graph.edges, **inputs) + root(x)))
        return self.decoder(x)

    def _activated(self, x: Tensor) -> Tensor:
        return dropout(relu(x), self.dropout, self.training)


class Diagonalized(Diffusivity):
    """The couplings of another diffusivity, diagonalised; it has no parameters, one head and symmetric couplings.

    It serves for training on all pairs of one graph of a few thousand nodes. It takes N³ operations once. The state at
    rest is then two products with a dense matrix, exact at any β and μ. The coupling is cached until features or edges
    change. A coupling that is not symmetric, or has several heads, raises CouplingMismatchError.
    """

    depends_on = "graph"
    symmetric = True
    why_no_penalty = (
        "the coupling does not follow the state: certify it itself (Theorem 1)."
    )

    @checked
    def __init__(self, diffusivity: Diffusivity) -> None:
        super().__init__()
        self.diffusivity = diffusivity
        self.needs_graph = diffusivity.needs_graph
        self._couplings: Kept = []

    @torch.no_grad()
    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        inputs = [x]
        if graph.edge_index is not None and self.needs_graph:
            inputs.append(graph.edge_index)

        def diagonalized() -> Coupling:
            return _Diagonal(self.diffusivity(x.double(), graph), x.dtype)

        return _once(self._couplings, inputs, diagonalized)


#: What was computed from tensors.
Kept = list[tuple[list[Tensor], Any]]
#: Matrices of a process with their spectra, since a table trains many networks with the same ones.
_SPECTRA: Kept = []


def _once(kept: Kept, inputs: list[Tensor], compute: Callable[[], T]) -> T:
    """Return what was computed from equal tensors, or compute it."""
    for before, value in kept:
        if len(before) == len(inputs) and all(map(torch.equal, before, inputs)):
            return value
    # Copies, since a tensor that is written to in place equals itself.
    copies = [tensor.clone() for tensor in inputs]
    # Tables alternate between few matrices; more than three would only fill the memory.
    kept[:] = [*kept[-2:], (copies, compute())]
    return kept[-1][1]


def _spectrum(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues, none below zero, and eigenvectors of D̄ − S."""
    rates, modes = torch.linalg.eigh(torch.diag(entries.sum(1)) - entries)
    return rates.clamp(min=0), modes


class _Diagonal(Coupling):
    """A symmetric nonnegative coupling of one head as a dense matrix, and D̄ − S = Q diag(rates) Qᵀ."""

    parts = ("entries", "modes", "rates", "sums")
    symmetric = True

    def __init__(self, coupling: Coupling, dtype: torch.dtype) -> None:
        if coupling.heads != 1 or not coupling.symmetric:
            raise CouplingMismatchError(
                f"Diagonalized needs a symmetric coupling of one head; got a {type(coupling).__name__} with heads="
                f"{coupling.heads}, symmetric={coupling.symmetric}. Make it with row_stochastic=False, or normalise it "
                "with SymmetricDiffusivity."
            )
        (entries,) = coupling.to_dense()
        rates, modes = _once(_SPECTRA, [entries], partial(_spectrum, entries))
        self.entries = entries.to(dtype)
        self.modes = modes.to(dtype)
        # In double precision: with a small leak the limit is decided by the smallest of them.
        self.rates = rates
        self.sums = entries.sum(1).to(dtype).unsqueeze(1)
        self.nonnegative = coupling.nonnegative
        super().__init__(coupling.num_nodes, 1, self.entries, coupling.ptr)

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return (self.entries.to(v.dtype) @ v.flatten(1)).view_as(v)

    def _transpose(self) -> Coupling:
        return self

    def degree(self) -> Float[Tensor, "N heads"]:
        return self.sums.clone()

    def laplacian_function(
        self, function: Callable[[Tensor], Tensor], v: Float[Tensor, "N H D"]
    ) -> Float[Tensor, "N H D"]:
        # In the dtype of the state: solvers ask in double, in which these products would take most of the training.
        modes = self.modes
        factors = function(self.rates).to(modes.dtype).unsqueeze(1)
        moved = modes @ (factors * (modes.T @ v.flatten(1).to(modes.dtype)))
        return moved.to(v.dtype).view_as(v)


def without_attention(model: nn.Module, ablation: str) -> bool:
    """Replace every attention over pairs of a model by "identity", or by "uniform", the mean over all nodes.

    A `CertifiedConv` takes the identity only, without its pairs (`penalty="quadratic"` weighs all pairs alike). A
    `Diagonalized` stays, since it is not learned. Return whether there was an attention.
    """
    replaced = False
    fixed = {
        part
        for module in model.modules()
        if isinstance(module, Diagonalized)
        for part in module.modules()
    }
    for parent in set(model.modules()) - fixed:
        # The pairs of a certified layer are left out as a term, or stay.
        if isinstance(parent, CertifiedBlock) and ablation == "identity":
            kept = [term for term in parent.terms if not isinstance(term, Pairs)]
            replaced = replaced or len(kept) < len(parent.terms)
            parent.terms = nn.ModuleList(kept)
        for name, child in list(parent.named_children()):
            if isinstance(child, QueryKeyDiffusivity) and not isinstance(parent, Pairs):
                setattr(parent, name, ABLATIONS[ablation]())
                replaced = True
    return replaced
