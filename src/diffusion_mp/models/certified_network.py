"""``CertifiedNetwork``: encoders and certified blocks in turn, and a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.checks import checked
from diffusion_mp.energies import Certificate
from diffusion_mp.energies.certification import STEPS, broken_parameter, random_input
from diffusion_mp.graph import Graph
from diffusion_mp.layers import CertifiedBlock
from diffusion_mp.models.base import Collect, Edges, GraphModel, run_layer
from diffusion_mp.modules import evaluating

#: Called with a block, its source, the graph, and the further inputs that its terms read.
Visit = Callable[..., Tensor]
#: The name of a block, the encoder in front of it, and the block.
Stage = tuple[str, nn.Module, CertifiedBlock]


class CertifiedNetwork(GraphModel):
    r"""Encoders and certified blocks in turn, and a decoder: the network of both certified models.

        H_b = H_{b−1} + f_b(Z_{b−1}),   Z_b = CertifiedBlock(H_b),   Ŷ = W_O Z_B + b_O

    for b = 1 … B, with H_1 = f_1(X). The K steps of block b descend its energy F_b for any parameters (Theorem T11 of
    docs/certified.md). A subclass makes the modules, and :meth:`stages` returns them in order.

    Args:
        in_channels: Number of channels of the features.
        hidden_channels: Number of channels C of the state.
        out_channels: Number of logits.

    Shapes:
        x: [N, in_channels].
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.
    """

    decoder: nn.Module
    dropout: nn.Module  # in front of the decoder
    edge_dim: int | None = None

    def stages(self) -> list[Stage]:
        """Return the name of every block, the encoder f_b before it, and the block."""
        raise NotImplementedError

    def encoded(self, encoder: nn.Module, state: Tensor, graph: Graph) -> Tensor:
        """Return f_b of a state."""
        return encoder(state)

    def block_inputs(
        self, x: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> dict[str, Any]:
        """Return the further inputs that the terms of the blocks read."""
        if edge_attr is None:
            return {}
        return {"edge_attr": edge_attr}

    def run(
        self, x: Tensor, graph: Graph, edge_attr: Tensor | None, visit: Visit
    ) -> Tensor:
        """Return Z_B; ``visit(block, source, graph, **inputs)`` returns the last state of a block."""
        inputs = self.block_inputs(x, graph, edge_attr)
        source: Tensor | None = None
        state = x
        for _, encoder, block in self.stages():
            encoded = self.encoded(encoder, state, graph)
            # The sources keep what a node knows of itself.
            source = encoded if source is None else source + encoded
            state = visit(block, source, graph, **inputs)
        return state

    def propagate(
        self, x: Tensor, graph: Graph, collect: Collect, edge_attr: Tensor | None = None
    ) -> Tensor:
        state = self.run(x, graph, edge_attr, partial(run_layer, collect))
        return self.decoder(self.dropout(state))

    @checked
    @torch.no_grad()
    def energies(
        self,
        x: Tensor,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        by_graph: bool = False,
    ) -> Float[Tensor, "*states"]:
        """Return F_b before the first step and after every step of every block, in float64.

        With ``num_layers=None`` the states are Z⁰ and Z*.

        Args:
            x: Features of the nodes.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            edge_attr: Features of the edges, for models that read them.
            by_graph: Return F_b of every graph of a batch, [blocks, states, B], instead of the sum over graphs,
                [blocks, states].
        """
        graph = self._graph(x, edge_index, edge_weight, batch, {"edge_attr": edge_attr})
        # One row for every block, in the order in which they run.
        values = []

        def visit(
            block: CertifiedBlock, source: Tensor, graph: Graph, **inputs: Any
        ) -> Tensor:
            energies, state = block.measured(source, graph, by_graph, **inputs)
            values.append(energies)
            return state

        self.run(x, graph, edge_attr, visit)
        return torch.stack(values)

    @torch.no_grad()
    def certificate(
        self,
        x: Tensor | None = None,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
    ) -> Certificate:
        """Return the certificate that no step of a block raises its energy at these inputs, in evaluation mode.

        Its ``layers`` hold the certificate of every block, from its first state on (`certify_step`).

        Args:
            x: Features of the nodes. ``None`` draws a random input with random edges and features.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            edge_attr: Features of the edges, for models that read them.
        """
        if x is None:
            like = self.stages()[0][2].beta.raw
            x, edge_index, edge_attr = random_input(
                self.in_channels, like, self.edge_dim
            )
            # Any category will do, as long as its table has it.
            if self.categories is not None:
                rows = torch.arange(8, device=x.device)
                x = torch.stack([rows % size for size in self.categories], 1)
        graph = self._graph(x, edge_index, edge_weight, batch, {"edge_attr": edge_attr})
        certificates: list[Certificate] = []

        # Every block is certified at the source that reaches it.
        def visit(
            block: CertifiedBlock, source: Tensor, graph: Graph, **inputs: Any
        ) -> Tensor:
            certificates.append(block.certificate(source, graph, **inputs))
            # A block that breaks a premise may not be able to take its steps.
            return block(source, graph, **inputs) if certificates[-1] else source

        # Dropout would certify the source of one draw, and statistics of a batch would change.
        with evaluating(self):
            # The first call of an encoder may draw its parameters.
            self.block_inputs(x, graph, edge_attr)
            self.encoded(self.stages()[0][1], x, graph)
            broken = broken_parameter(self, "encoder", "inputs.", "conv.", "blocks.")
            if broken is not None:
                return Certificate.refused(STEPS, math.nan, broken)
            self.run(x, graph, edge_attr, visit)
        names = [name for name, _, _ in self.stages()]
        return self.summary(dict(zip(names, certificates, strict=True)))

    def summary(self, blocks: dict[str, Certificate]) -> Certificate:
        """Return the certificate of the network from the certificates of its blocks."""
        holds = all(blocks.values())
        if holds:
            # Of certified steps: no step size limits them.
            tau_max = math.inf
            reason = "Every block descends an energy of its own."
        else:
            tau_max = 0.0
            reason = "Not every block descends its energy."
        return Certificate(
            theorem=STEPS,
            holds=holds,
            tau_max=tau_max,
            reason=reason,
            layers=blocks,
            energy="the energy of every block",
            searched=sum(block.searched for block in blocks.values()),
        )
