"""DIFFormer-s and a tuned GCN on Cora or CiteSeer, in a plain PyTorch loop.

    python examples/cora.py --root data/Planetoid --splits 5

Every split draws 20 training labels per class, 500 validation and 1 000 test nodes anew. The test accuracy is the
accuracy at the epoch with the best validation accuracy (ties: lower validation loss). Other models: --model nodeformer
sgformer difformer-a gat mlp.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from runs import count, needs, options, spread
from torch import nn
from torch_geometric.data import Data

from diffusion_mp import auxiliary_loss
from diffusion_mp.data import Split, random_split_per_class
from diffusion_mp.models import DIFFormer, DiffusionGNN, NodeFormer, SGFormer

with needs("diffusion-mp-experiments"):
    from diffusion_mp_experiments.graphs import load_planetoid


@dataclass(frozen=True)
class Recipe:
    """How to build a model from (in_channels, out_channels), and how to train it."""

    make: Callable[[int, int], nn.Module]
    lr: float
    weight_decay: float


def difformer(kernel: str, num_layers: int, weight_decay: float) -> Recipe:
    """Wu, Wipf & Yan (2025), published settings: attention + graph (Eqs. 61-63), tau 1/2, no W_V."""

    def make(in_channels: int, out_channels: int) -> nn.Module:
        return DIFFormer(
            in_channels,
            64,
            out_channels,
            num_layers,
            kernel=kernel,
            tau=0.5,
            layer_norm=True,
            dropout=0.2,
        )

    return Recipe(make, lr=1e-3, weight_decay=weight_decay)


def gnn(
    conv: str, dropout: float, lr: float, weight_decay: float, heads: int = 1
) -> Recipe:
    """A fixed-diffusivity network of the same library, two layers with 64 channels."""

    def make(in_channels: int, out_channels: int) -> nn.Module:
        return DiffusionGNN(
            in_channels, 64, out_channels, conv=conv, heads=heads, dropout=dropout
        )

    return Recipe(make, lr, weight_decay)


def nodeformer(weight_decay: float) -> Recipe:
    """Wu et al. (2022): tau 1/4, scaled dot products, two hops of degree-normalised bias, edge loss of weight 1."""

    def make(in_channels: int, out_channels: int) -> nn.Module:
        return NodeFormer(
            in_channels,
            32,
            out_channels,
            heads=4,
            num_features=30,
            num_samples=5,
            logits="scaled_dot",
            relational_bias="sym",
            hops=2,
            tau=0.25,
            jump="cat",
            edge_regularization=1.0,
            relative_edge_loss=False,
            dropout=0.5,
        )

    return Recipe(make, lr=1e-2, weight_decay=weight_decay)


def sgformer(weight_decay: float) -> Recipe:
    """Wu et al. (2023b): one attention layer parallel to a GNN of weight 0.8 with an encoder of its own; here APPNP."""

    def make(in_channels: int, out_channels: int) -> nn.Module:
        return SGFormer(
            in_channels,
            64,
            out_channels,
            gnn="appnp",
            num_gnn_layers=10,
            alpha=0.8,
            shared_encoder=False,
            dropout=0.5,
        )

    return Recipe(make, lr=1e-2, weight_decay=weight_decay)


# GCN: the best mean validation accuracy on splits 100 to 102 (never reported here) at lr 1e-2, 200 epochs. Tried for
# Cora: hidden 64 or 256, 2 or 3 layers, dropout 0.5 or 0.8, weight decay 2e-4 to 1e-2 (13 of these); for CiteSeer:
# hidden 64 or 256, dropout 0.5 or 0.8, weight decay 5e-4 to 2e-3 (6). GAT and MLP: their papers' settings, not tuned.
# SGFormer: likewise, 150 to 300 epochs. Tried for Cora (18): GCN of 2 or 3 layers or APPNP, both encoders, alpha 0.5 to
# 0.9, beta 0.1 or 0.5, dropout 0.5 or 0.8 (the GNN's also apart), weight decay 5e-4 to 1e-2, lr 1e-3 or 1e-2, without
# LayerNorm, Frobenius. APPNP was added after the best GCN branch (validation 83.5, weight decay 1e-2) had 79.2 on the
# reported splits; its validation accuracy is 84.5. For CiteSeer: weight decay 5e-3 or 2e-2 at 100 epochs (2).
# NodeFormer: the best validation accuracy on split 100 of Cora among 1 or 2 hops, weight decay 5e-4 or 5e-3, and lr
# 1e-3 without dropout (4 of these); the same on CiteSeer, untuned.
#: DIFFormer stays on a plateau for the first hundred.
EPOCHS = 300
#: The same on both data sets.
ON_BOTH: dict[str, Recipe] = {
    "nodeformer": nodeformer(weight_decay=0.005),
    "sgformer": sgformer(weight_decay=0.005),
    "gat": gnn("gat", dropout=0.6, lr=5e-3, weight_decay=5e-4, heads=8),
    "mlp": gnn("mlp", dropout=0.5, lr=1e-2, weight_decay=5e-4),
}
RECIPES: dict[str, dict[str, Recipe]] = {
    "Cora": {
        "difformer-s": difformer("simple", num_layers=8, weight_decay=0.01),
        "difformer-a": difformer("sigmoid", num_layers=8, weight_decay=0.01),
        "gcn": gnn("gcn", dropout=0.5, lr=1e-2, weight_decay=5e-4),
        **ON_BOTH,
    },
    "CiteSeer": {
        "difformer-s": difformer("simple", num_layers=4, weight_decay=0.1),
        "difformer-a": difformer("sigmoid", num_layers=4, weight_decay=0.1),
        "gcn": gnn("gcn", dropout=0.8, lr=1e-2, weight_decay=1e-3),
        **ON_BOTH,
    },
}


def train(
    recipe: Recipe, data: Data, split: Split, epochs: int
) -> tuple[float, float, int]:
    """Return validation and test accuracy at the best validation epoch, and that epoch."""
    model = recipe.make(data.num_features, int(data.y.max()) + 1)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay
    )
    best = (-1.0, 0.0)
    test_acc = 0.0
    best_epoch = 0
    for epoch in range(1, epochs + 1):
        model.train()
        optimizer.zero_grad()
        logits = model(data.x, data.edge_index)
        loss = F.cross_entropy(
            logits[split.train], data.y[split.train]
        ) + auxiliary_loss(model)
        loss.backward()
        optimizer.step()

        model.eval()
        with torch.no_grad():
            logits = model(data.x, data.edge_index)
        correct = (logits.argmax(dim=-1) == data.y).float()
        score = (
            correct[split.val].mean().item(),
            -F.cross_entropy(logits[split.val], data.y[split.val]).item(),
        )
        if score > best:
            best = score
            test_acc = correct[split.test].mean().item()
            best_epoch = epoch
    return best[0], test_acc, best_epoch


def main(argv: list[str] | None = None) -> int:
    """Print one line per model and split, then mean and standard deviation; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", default="data/Planetoid", help="holds <Dataset>/raw/ind.<dataset>.*"
    )
    parser.add_argument("--dataset", choices=list(RECIPES), default="Cora")
    parser.add_argument("--split", choices=["random", "public"], default="random")
    parser.add_argument(
        "--splits",
        type=count,
        default=5,
        help="random splits; with --split public, initialisations",
    )
    parser.add_argument("--epochs", type=count, default=EPOCHS)
    parser.add_argument(
        "--model",
        nargs="+",
        choices=list(RECIPES["Cora"]),
        default=["difformer-s", "gcn"],
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="run i draws its split and its weights with seed + i",
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="let PyG download missing files into --root",
    )
    args = options(parser, argv, splits=1, epochs=20)
    try:
        data = load_planetoid(args.root, args.dataset, download=args.download)
    except (FileNotFoundError, ConnectionError) as error:
        print(f"{error}\nOr run this script with --download.", file=sys.stderr)
        return 2

    summary = []
    for name in args.model:
        scores = []
        start = time.perf_counter()
        for seed in range(args.seed, args.seed + args.splits):
            if args.split == "public":
                split = Split.of(data)
            else:
                split = random_split_per_class(
                    data.y, 20, 500, 1000, torch.Generator().manual_seed(seed)
                )
            torch.manual_seed(seed)
            val, test, epoch = train(
                RECIPES[args.dataset][name], data, split, args.epochs
            )
            scores.append(100 * test)
            print(
                f"{name:12} seed {seed}: val {100 * val:.1f}, test {100 * test:.1f} at epoch {epoch}",
                flush=True,
            )
        summary.append(
            f"{name:12} {spread(scores, digits=1)}   ({time.perf_counter() - start:.0f} s)"
        )

    if args.epochs < EPOCHS:
        print(
            f"\nUndertrained, not a comparison: {args.epochs} of {EPOCHS} epochs, and DIFFormer needs over a hundred "
            f"to leave its first plateau."
        )
    if args.split == "public":
        kind = "initialisations on the public split"
    else:
        kind = "different random splits (20 per class)"
    print(
        f"\n{args.dataset}, test accuracy in %, mean ± standard deviation over {args.splits} {kind}:"
    )
    print("\n".join(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
