"""Link prediction on Cora: models of this library against PyG's GAE, in a plain PyTorch loop.

    python examples/links.py --root data/Planetoid --seeds 5

Every seed draws a split of the edges (5 % validation, 10 % test), which all models share, and the weights. Every epoch
draws as many pairs without an edge as there are edges. Every fifth epoch is evaluated, and the test scores are those of
the one with the best validation AUC.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from runs import count, needs, options, spread
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import GAE, GCNConv
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import negative_sampling

from diffusion_mp.models import CertifiedDIFFormer, DiffusionGNN

with needs("diffusion-mp-experiments"):
    from sklearn.metrics import average_precision_score, roc_auc_score

    from diffusion_mp_experiments.graphs import load_planetoid

HIDDEN = 32
OUT = 16


class GCNEncoder(nn.Module):
    """The encoder of PyG's example of a graph autoencoder (Kipf & Welling, 2016)."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.conv1 = GCNConv(in_channels, HIDDEN)
        self.conv2 = GCNConv(HIDDEN, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def gcn(in_channels: int, dropout: float = 0.0, **options: Any) -> nn.Module:
    """Without options the same network as the `GAE` with a `GCNEncoder`."""
    return DiffusionGNN(
        in_channels, HIDDEN, OUT, conv="gcn", dropout=dropout, task="link", **options
    )


def certified(in_channels: int, **options: Any) -> nn.Module:
    """Four steps that lower an energy, without attention."""
    options |= {"penalty": None, "constraint": None, "mu": 4.0}
    return CertifiedDIFFormer(in_channels, HIDDEN, OUT, 4, task="link", **options)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gae": lambda channels: GAE(GCNEncoder(channels)),
    "gcn": gcn,
    "gcn-dropout": lambda channels: gcn(channels, dropout=0.5),
    "gcn-mlp": lambda channels: gcn(channels, head="mlp"),
    "certified": certified,
    "certified-mlp": lambda channels: certified(channels, head="mlp"),
}


def scores(model: Any, data: Data, pairs: Tensor) -> Tensor:
    """Return the logits of pairs of nodes."""
    z = model.encode(data.x, data.edge_index)
    # PyG's decoder returns probabilities by default.
    if isinstance(model, GAE):
        return model.decode(z, pairs, sigmoid=False)
    return model.decode(z, pairs)


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> tuple[float, float]:
    """Return ROC-AUC and average precision in per cent."""
    predicted = scores(model.eval(), data, data.edge_label_index)
    return tuple(
        100 * float(metric(data.edge_label, predicted))
        for metric in (roc_auc_score, average_precision_score)
    )


def train(
    model: nn.Module, parts: tuple[Data, Data, Data], epochs: int
) -> tuple[float, float]:
    """Return the test scores of the epoch with the best validation AUC."""
    data, val, test = parts
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    positive = data.edge_label_index
    target = torch.cat([torch.ones(positive.size(1)), torch.zeros(positive.size(1))])
    best = (0.0, (0.0, 0.0))
    for epoch in range(1, epochs + 1):
        optimizer.zero_grad()
        negative = negative_sampling(data.edge_index, data.num_nodes, positive.size(1))
        predicted = scores(model.train(), data, torch.cat([positive, negative], 1))
        binary_cross_entropy_with_logits(predicted, target).backward()
        optimizer.step()
        if epoch % 5 == 0:
            best = max(best, (evaluate(model, val)[0], evaluate(model, test)))
    return best[1]


def main(argv: list[str] | None = None) -> int:
    """Print one line per model, mean and standard deviation over the seeds; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", default="data/Planetoid", help="holds Cora/raw/ind.cora.*"
    )
    parser.add_argument("--seeds", type=count, default=5)
    parser.add_argument("--epochs", type=count, default=100)
    parser.add_argument(
        "--model", nargs="+", choices=list(MODELS), default=list(MODELS)
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="let PyG download missing files into --root",
    )
    args = options(parser, argv, seeds=2, epochs=20, model=["gae", "gcn"])
    try:
        data = load_planetoid(
            args.root, "Cora", download=args.download, normalize_features=False
        )
    except (FileNotFoundError, ConnectionError) as error:
        print(f"{error}\nOr run this script with --download.", file=sys.stderr)
        return 2
    split = RandomLinkSplit(
        num_val=0.05, num_test=0.1, is_undirected=True, add_negative_train_samples=False
    )
    print(f"Cora, {args.epochs} epochs, test scores in % over {args.seeds} seeds:")
    for name in args.model:
        results = []
        start = time.perf_counter()
        for seed in range(args.seeds):
            # Also Python's generator, which draws the pairs without an edge.
            seed_everything(seed)
            parts = split(data)
            for part in parts:
                part.x = part.x.to_sparse_csr()
            model = MODELS[name](data.num_features)
            results.append(train(model, parts, args.epochs))
        auc, ap = (spread(column, digits=1) for column in zip(*results, strict=True))
        seconds = (time.perf_counter() - start) / args.seeds
        print(f"{name:14} AUC {auc}, AP {ap}   ({seconds:.0f} s per seed)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
