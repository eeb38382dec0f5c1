"""Inside two trained models: embeddings, the strongest couplings and the energy, layer by layer.

    python examples/inside.py                                      # digits, 10 labels per class; runs/inside.png
    python examples/inside.py --root data/Planetoid --name Cora    # a citation network
    python examples/inside.py --quick                              # seconds: nothing is learned

The picture has one row per model, DIFFormer-s and the certified network. From left to right it shows the nodes before
the first layer; the nodes after the last layer, with the strongest couplings between nodes that share no edge; and the
energy. The script prints how many of these couplings join nodes of one class, compared with random pairs (Wu, Wipf &
Yan 2025, Figures 5 to 7).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from runs import count, needs, options
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_dense_adj

from diffusion_mp import CertifiedDIFFormer, DIFFormer, QuadraticPenalty
from diffusion_mp.data import random_split_per_class
from diffusion_mp.diagnostics import EnergyTrace
from diffusion_mp.models.base import GraphModel

with needs("diffusion-mp-experiments"):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from sklearn.manifold import TSNE

    from diffusion_mp_experiments.graphs import load_digits, load_planetoid

MODELS: dict[str, Callable[[int, int], GraphModel]] = {
    "DIFFormer-s": lambda features, classes: DIFFormer(
        features, 64, classes, 8, tau=0.5, layer_norm=True, dropout=0.2
    ),
    "certified": lambda features, classes: CertifiedDIFFormer(
        features,
        64,
        classes,
        8,
        lam=0.3,
        mu=9.0,
        encoder_layers=1,
        centre=True,
        dropout=0.2,
    ),
}


@dataclass(frozen=True)
class Inside:
    """A trained model's states, their energies, the strongest pairs [2, P] without an edge, and the test accuracy."""

    states: list[Tensor]
    energies: list[float]
    label: str
    pairs: Tensor
    accuracy: float


def train(model: GraphModel, data: Data, epochs: int) -> None:
    """Train all weights by Adam; the last epoch counts."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(epochs):
        optimizer.zero_grad()
        logits = model.train()(data.x, data.edge_index)
        F.cross_entropy(logits[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()


@torch.no_grad()
def look_inside(model: GraphModel, data: Data, pairs: int) -> Inside:
    """Run the model once and keep what passes its layers."""
    states: list[Tensor] = []

    def keep(x: Tensor, before: Tensor | None) -> Tensor:
        states.append(x.flatten(1))
        return x.sum()  # the trace wants a number

    with EnergyTrace(model.eval(), keep):
        logits, couplings = model(data.x, data.edge_index, return_coupling=True)
    states = [*states[::2], states[-1]]  # before every layer, and after the last
    if isinstance(model, CertifiedDIFFormer):
        energies = model.energies(data.x, data.edge_index).tolist()
        label = "F, which no step raises"
    else:
        energies = [float(QuadraticPenalty().total(z)) for z in states]
        label = "Σ_ij ‖z_i − z_j‖²"
    strength = couplings[-1].to_dense().mean(0).fill_diagonal_(-torch.inf)
    strength[
        to_dense_adj(data.edge_index, max_num_nodes=data.num_nodes)[0] > 0
    ] = -torch.inf
    best = strength.triu(1).flatten().topk(pairs).indices
    right = (logits.argmax(1) == data.y)[data.test_mask].float().mean()
    return Inside(
        states,
        energies,
        label,
        torch.stack([best // len(strength), best % len(strength)]),
        float(right),
    )


def draw(found: dict[str, Inside], y: Tensor, path: Path) -> None:
    """Draw the picture, three columns wide."""
    figure, axes = plt.subplots(
        len(found),
        3,
        figsize=(13, 4.2 * len(found)),
        squeeze=False,
        layout="constrained",
    )
    for row, (name, inside) in zip(axes, found.items(), strict=True):
        for ax, state, title in zip(
            row,
            (inside.states[0], inside.states[-1]),
            ("before", "after"),
            strict=False,
        ):
            points = TSNE(init="pca", random_state=0, max_iter=500).fit_transform(
                state.numpy()
            )
            if title == "after":
                ends = points[inside.pairs.numpy()]
                ax.plot(
                    ends[..., 0], ends[..., 1], color="black", linewidth=0.3, alpha=0.4
                )
            drawn = ax.scatter(
                points[:, 0], points[:, 1], c=y, cmap="tab10", vmin=-0.5, vmax=9.5, s=4
            )
            ax.set(title=f"{name}: {title} its layers", xticks=[], yticks=[])
        row[2].plot(inside.energies, "o-", color="#0072B2", markersize=3)
        row[2].set(
            xlabel="layer",
            ylabel=inside.label,
            yscale="log",
            title=f"{name}: test {inside.accuracy:.1%}",
        )
    figure.colorbar(drawn, ax=axes[:, 1], ticks=range(int(y.max()) + 1), label="class")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Train, print and draw; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="of Planetoid; without it the digits")
    parser.add_argument("--name", default="Cora", help="Cora or CiteSeer")
    parser.add_argument("--epochs", type=count, default=100)
    parser.add_argument(
        "--pairs", type=count, default=500, help="strongest couplings that are shown"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/inside.png"))
    args = options(parser, argv, epochs=2)
    data = (
        load_digits(10) if args.root is None else load_planetoid(args.root, args.name)
    )
    split = random_split_per_class(
        data.y, 10, 500, None, torch.Generator().manual_seed(args.seed)
    )
    data = split.apply_to(data)
    found = {}
    shares = data.y.bincount() / len(data.y)
    for name, make in MODELS.items():
        torch.manual_seed(args.seed)
        model = make(data.num_features, len(shares))
        train(model, data, args.epochs)
        found[name] = inside = look_inside(model, data, args.pairs)
        alike = (data.y[inside.pairs[0]] == data.y[inside.pairs[1]]).float().mean()
        print(
            f"{name}: test {inside.accuracy:.1%}; of the {args.pairs} strongest couplings without an edge {alike:.1%} "
            f"join nodes of one class (random pairs: {shares.square().sum():.1%})"
        )
    draw(found, data.y, args.out)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
