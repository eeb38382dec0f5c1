"""Inside trained networks of certified blocks: the energy of every block, and the matrices between neighbours.

    python examples/certified_blocks.py --root data           # SynMol, Planetoid, heterophilous_npz, …: three minutes
    python examples/certified_blocks.py --root data --quick   # seconds: nothing is learned

On the left the picture shows the energy of four blocks on SynMol's test molecules, before the first step and after each
step. Next, for three graphs, it shows the eigenvalues of the learned matrices B of a network and how much of the states
lies along their eigenvectors. Eigenvalue 1 makes neighbours agree, −1 makes them differ (Theorem T8 of
docs/certified.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from runs import count, needs, options
from torch import Tensor
from torch_geometric.data import Batch, Data

from diffusion_mp import CertifiedTransformer, plot

with needs("diffusion-mp-experiments"):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from diffusion_mp_experiments.graphs import (
        load_heterophilous,
        load_planetoid,
        load_synmol,
    )

#: Before and after training: eigenvalues, and the shares of the states along their eigenvectors.
Spectrum = list[tuple[Tensor, Tensor]]


def predict(model: CertifiedTransformer, data: Data) -> Tensor:
    return model(data.x, data.edge_index, batch=data.batch, edge_attr=data.edge_attr)


def train(
    model: CertifiedTransformer, batches: list[Data], epochs: int, lr: float
) -> None:
    """Train all weights by Adam; the last epoch counts."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        for number in torch.randperm(len(batches)).tolist():
            data = batches[number]
            optimizer.zero_grad()
            chosen = data.train_mask if "train_mask" in data else slice(None)
            F.cross_entropy(
                predict(model.train(), data)[chosen], data.y.long()[chosen]
            ).backward()
            optimizer.step()


def molecules(root: Path, epochs: int) -> Tensor:
    """Return the energies [blocks, states] of a network that was trained on SynMol."""
    known = load_synmol(root, "train")
    test = Batch.from_data_list(load_synmol(root, "test"))
    torch.manual_seed(0)
    model = CertifiedTransformer(
        test.num_features,
        64,
        2,
        num_blocks=4,
        num_layers=3,
        edge_dim=5,
        mlp_channels=64,
        layer_norm=True,
        task="graph",
    )
    batches = [
        Batch.from_data_list(known[start : start + 256])
        for start in range(0, len(known), 256)
    ]
    train(model, batches, epochs, 0.005)
    energies = model.eval().energies(
        test.x, test.edge_index, batch=test.batch, edge_attr=test.edge_attr
    )
    print(
        f"SynMol: test accuracy {(predict(model, test).argmax(1) == test.y).float().mean():.1%}"
    )
    for number, block in enumerate(energies.tolist(), 1):
        print(
            f"  F of block {number}: {', '.join(f'{energy:.4g}' for energy in block)}"
        )
    return energies


def neighbours(name: str, data: Data, epochs: int) -> Spectrum:
    """Return what matrices and states of a network are before and after training on the first split of a graph."""
    data.train_mask, test_mask = (
        mask.view(data.num_nodes, -1)[:, 0]
        for mask in (data.train_mask, data.test_mask)
    )
    torch.manual_seed(0)
    model = CertifiedTransformer(
        data.num_features,
        64,
        int(data.y.max()) + 1,
        num_blocks=2,
        graph="sym",
        layer_norm=True,
        dropout=0.5,
    )
    found = [plot.eigenvalues(model, data.x, data.edge_index)]
    train(model, [data], epochs, 0.01)
    found.append(plot.eigenvalues(model, data.x, data.edge_index))
    right = predict(model, data).argmax(1) == data.y
    ends = data.y[data.edge_index]
    alike = (ends[0] == ends[1]).float().mean()
    accuracy = right[test_mask].float().mean()
    print(
        f"{name}: test accuracy {accuracy:.1%}; {alike:.0%} of the neighbours share a class"
    )
    for when, (values, shares) in zip(("before", "after"), found, strict=True):
        print(
            f"  {when}: mean eigenvalue {values.mean():.2f}, weighted by the states {values @ shares:.2f}"
        )
    return found


def draw(energies: Tensor, spectra: dict[str, Spectrum], path: Path) -> None:
    """Draw the picture, one panel for the energies and one for every graph."""
    figure, (first, *others) = plt.subplots(
        1, 1 + len(spectra), figsize=(12, 2.9), layout="constrained"
    )
    plot.energies(energies, ax=first).axhline(0, color="0.8", linewidth=0.8, zorder=0)
    first.set(title="SynMol", xlabel="step of the block")
    for axis, (name, (_, spectrum)) in zip(others, spectra.items(), strict=True):
        plot.spectrum(spectrum, ax=axis).set(title=name, ylabel="")
    others[0].set(ylabel="share")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Train, print and draw; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, default=Path("data"), help="the folder of the data sets"
    )
    parser.add_argument("--molecule-epochs", type=count, default=15)
    parser.add_argument("--graph-epochs", type=count, default=150)
    parser.add_argument("--out", type=Path, default=Path("runs/certified_blocks.png"))
    args = options(parser, argv, molecule_epochs=1, graph_epochs=2)
    graphs = {
        "Cora": load_planetoid(args.root / "Planetoid", "Cora"),
        "chameleon_filtered": load_heterophilous(
            args.root / "heterophilous_npz", "chameleon_filtered"
        ),
        "Minesweeper": load_heterophilous(
            args.root / "HeterophilousGraphDataset", "minesweeper"
        ),
    }
    energies = molecules(args.root / "SynMol", args.molecule_epochs)
    draw(
        energies,
        {
            name: neighbours(name, data, args.graph_epochs)
            for name, data in graphs.items()
        },
        args.out,
    )
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
