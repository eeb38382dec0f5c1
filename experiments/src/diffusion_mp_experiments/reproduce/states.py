"""How far apart a trained model keeps the nodes, state by state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_mp.diagnostics.hooks import declared, hooked
from diffusion_mp.diffusivities import AdjacencyDiffusivity
from diffusion_mp.graph import Graph

#: What is measured of every state, and how a reader is told; all are scale-free but the energy.
MEASURES = {
    "energy": "energy on the graph, tr Zᵀ(I − Â)Z",
    "roughness": "tr Zᵀ(I − Â)Z / ‖Z‖²",
    "spread": "‖Z − mean‖² / ‖Z‖²",
    "rank": "effective rank",
}


@contextmanager
def measured(model: nn.Module) -> Iterator[dict[str, list[float]]]:
    """For the body, of every state that passes a diffusion layer on a single graph: first before any, then after each.

    A state counts as the next layer reads it, after normalisation and activation, and the last one as its layer gives
    it. Nothing is recorded of a batch of graphs, nor of a second pass.
    """
    found: dict[str, list[float]] = {name: [] for name in MEASURES}
    seen: list[tuple[Tensor, Graph]] = []

    def look(name: str, x: Any, graph: Any, out: Any) -> None:
        if isinstance(graph, Graph) and graph.segments is None and x.layout is torch.strided:
            out = out[0] if isinstance(out, tuple) else out
            seen[-1:] = [(x, graph), (out, graph)]  # what a layer reads takes the place of what the last one gave

    def end(*_: Any) -> None:
        for state, graph in [] if found["energy"] else seen:
            for name, value in state_measures(state, graph).items():
                found[name].append(value)
        seen.clear()

    handle = model.register_forward_hook(end)
    try:
        with hooked(declared(model, "is_diffusion_layer"), look):
            yield found
    finally:
        handle.remove()


@torch.no_grad()
def state_measures(x: Tensor, graph: Graph) -> dict[str, float]:
    """`MEASURES` of one state [N, …] on a graph; Â is the symmetric normalised adjacency with self-loops."""
    z = x.detach().flatten(1).double()
    square = float(z.square().sum())
    adjacency = AdjacencyDiffusivity("sym", self_loops="remaining", direction="undirected")(z, graph)
    energy = square - float((z * adjacency.matmul(z.unsqueeze(1)).squeeze(1)).sum())
    share = torch.linalg.eigvalsh(z.T @ z).clamp(min=0)
    share = share / share.sum().clamp(min=torch.finfo(share.dtype).tiny)
    rank = float(torch.special.entr(share).sum().exp())
    apart = float((z - z.mean(0)).square().sum())
    relative = [value / square if square else 0.0 for value in (energy, apart)]
    return {"energy": energy, "roughness": relative[0], "spread": relative[1], "rank": rank}
