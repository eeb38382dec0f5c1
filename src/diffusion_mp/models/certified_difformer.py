"""``CertifiedDIFFormer``: a graph Transformer in which every layer descends one energy, for any parameters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypedDict, Unpack

from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.checks import Count, Probability
from diffusion_mp.diffusivities import Diffusivity, UniformDiffusivity
from diffusion_mp.energies import Certificate, Constraint, Energy, Penalty
from diffusion_mp.graph import Graph
from diffusion_mp.layers import CertifiedConv
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.layers.options import CertifiedConvOptions, split
from diffusion_mp.models.base import Edges, Head, Task, output_layers
from diffusion_mp.models.certified_network import CertifiedNetwork, Stage


class ReadoutOptions(TypedDict, total=False):
    """Options of the layers around the steps."""

    dropout: Probability
    task: Task
    head: Head


class CertifiedDIFFormerOptions(ReadoutOptions, CertifiedConvOptions, total=False):
    """Options of `CertifiedDIFFormer`: the options of its readout and of `CertifiedConv`."""

    penalty: Penalty | str | None
    heads: Count
    constraint: Constraint | str | None
    lam: float
    mu: float
    graph: bool | Diffusivity


class CertifiedDIFFormer(CertifiedNetwork):
    r"""A graph Transformer in which every layer lowers one energy, for any parameters.

        H = MLP(X),   Z⁰ = Proj_C(H),   Z^K = CertifiedConv(Z⁰),   Ŷ = Z^K W_O + b_O

    The K steps of :class:`CertifiedConv` have the source H. They share β, λ, μ and the projections, so they descend one
    energy F (:meth:`energy`):

        F(Z⁰) ≥ F(Z¹) ≥ … ≥ F(Z^K)

    (Theorem T1 of docs/certified.md). `certify` checks the premises. `CertifiedTransformer` has several blocks, with
    learned matrices.

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call.
        hidden_channels: Number of channels C of the state.
        out_channels: Number of logits.
        num_layers: Number of steps K. The default is deep, since the model does not get worse with depth
            (docs/training.md). ``None`` iterates to a stationary point of F (see `fixed_point`).
        inputs: A symmetric and nonnegative diffusivity that reads the features X. It is added to A as a fixed term.
            ``None``: A is the graph.
        encoder_layers: Number of linear layers of the encoder of H, each followed by ReLU and dropout. One layer is
            best with few labels and bag-of-words features (docs/training.md).
        encoder_channels: Number of channels between the layers of the encoder; ``hidden_channels`` by default.
        centre: Subtract from H its mean over the nodes of each graph, which a large μ would leave alone.

    Options:
        penalty (Penalty, str or None): δ, or its name; ``"simple"`` by default. ``None`` is the model without
            attention.
        heads (int): Number of heads H; 1 by default.
        projection (str or None): ``"tied"``: distances are measured by learned projections; ``None`` (default):
            distances of the state itself.
        constraint (Constraint, str or None): The set C of every row of a head; ``"ball"`` by default, as the default
            penalty needs.
        radius (float): Radius of a ball or sphere that is given by its name; 1 by default.
        beta (float): Initial weight β > 0 of the source, which is learned; 1 by default.
        lam (float): Initial λ > 0, the weight of the attention, which is learned; 0.3 by default.
        mu (float): Initial μ > 0, the weight of neighbours, which is learned; 20 by default.
        graph (bool or Diffusivity): A. ``True`` (default) is D^-½AD^-½ of the symmetric part of the graph; ``False``
            does not read edges.
        dropout (float): Dropout rate in the encoder; 0 by default.
        task (str): ``"node"`` (default): predict for every node; ``"graph"``: an MLP reads the mean over the nodes of
            each graph; ``"link"``: score pairs of nodes.
        head (str): Score of a pair in link tasks: ``"dot"`` (default), ⟨z_u, z_v⟩ with states of ``out_channels``, as
            in PyG's ``GAE``; or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.

    Shapes:
        x: [N, in_channels], dense or sparse.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.

    Raises:
        ConvergenceError: With ``num_layers=None``, the iteration did not converge.

    Examples:
        >>> energies = CertifiedDIFFormer(4, 16, 3, num_layers=8).energies(x, edge_index)  # before and after each step
        >>> bool((energies.diff() <= 1e-5 * energies[0].abs()).all())
        True
    """

    references = ("wu2025transformers",)

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int | None = 16,
        *,
        inputs: Diffusivity | None = None,
        encoder_layers: Count = 1,
        encoder_channels: Count | None = None,
        centre: bool = False,
        **options: Unpack[CertifiedDIFFormerOptions],
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels)
        readout, steps = split(options, ReadoutOptions)
        rate = readout.get("dropout", 0.0)
        width = encoder_channels or hidden_channels
        layers: list[nn.Module] = []
        for a, b in pairwise(
            [in_channels, *[width] * (encoder_layers - 1), hidden_channels]
        ):
            layers += [FeatureLinear(a, b), nn.ReLU(), nn.Dropout(rate)]
        self.encoder = nn.Sequential(*layers)
        # Dropout acts only in the encoder; the base class has a place for it before the decoder.
        self.dropout = nn.Identity()
        self.mean = UniformDiffusivity() if centre else None
        self.inputs = inputs
        weights: dict[str, Any] = {"lam": 0.3, "mu": 20.0}
        self.conv = CertifiedConv(
            hidden_channels, num_layers=num_layers, **weights | steps
        )
        self.decoder, self.head = output_layers(
            hidden_channels,
            out_channels,
            readout.get("task", "node"),
            readout.get("head", "dot"),
        )

    def stages(self) -> list[Stage]:
        return [("conv", self.encoder, self.conv)]

    def encoded(self, encoder: nn.Module, state: Tensor, graph: Graph) -> Tensor:
        # Under autocast an encoder answers in half precision, which is too coarse for an energy.
        source = encoder(state).to(self.conv.mu.raw.dtype)
        if self.mean is None:
            return source
        # A coupling, so that ranks that hold some of the nodes take the mean of all.
        mean = self.mean(source, graph).matmul(source.unsqueeze(1)).squeeze(1)
        return source - mean

    def block_inputs(
        self, x: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> dict[str, Any]:
        if self.inputs is None:
            return {}
        # A coupling of the inputs is fixed for all steps, unlike one of the state.
        return {"beside": self.inputs(x, graph)}

    def energy(
        self,
        x: Tensor,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Energy:
        """Return the energy F at these inputs, a function of states [N, heads, channels / heads].

        Args:
            x: Features of the nodes.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
        """
        graph = self.inputs_to_graph(x, edge_index, edge_weight, batch)
        source = self.encoded(self.encoder, x, graph)
        return self.conv.energy(source, graph, **self.block_inputs(x, graph, None))

    def energies(self, *inputs: Any, **options: Any) -> Float[Tensor, "*states"]:
        """Return F before the first step and after every step, in float64; with ``num_layers=None``, F of Z⁰ and Z*.

        Args:
            inputs: Features, edges, weights of edges and ``batch``, as in a call.
            options: ``by_graph=True`` returns F of every graph of a batch, [states, B], instead of the sum over graphs.
        """
        return super().energies(*inputs, **options)[0]

    def summary(self, blocks: dict[str, Certificate]) -> Certificate:
        # The network has one block, whose certificate names the premise.
        return blocks["conv"]
