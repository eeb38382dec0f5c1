"""Every picture of `diffusion_mp.plot`: what a model of the zoo sees in the digits, and a network of the karate club.

python examples/gallery.py            # writes plots.png into docs/images
python examples/gallery.py --quick    # seconds: little is learned; writes into runs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from runs import count, needs, options
from torch.nn.functional import cross_entropy
from torch_geometric.datasets import KarateClub

from diffusion_mp import CertifiedTransformer, Graph, load, plot

with needs("diffusion-mp[plot,sklearn]"):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Draw the picture; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=count, default=100)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/plots.png")
    args = options(parser, argv, epochs=5, out=Path("runs/plots.png"))
    figure, axes = plt.subplots(2, 2, figsize=(9, 7.5), layout="constrained")

    model = load(ROOT / "zoo/digits.safetensors")
    images, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = images.float() / 16
    coupling = model.inputs(x, Graph(len(x)))
    logits = model(x).detach()
    names = [f"{k}: a {digit}" for k, digit in enumerate(y)]
    plot.neighbours(coupling, 7, names=names, ax=axes[0, 0])
    plot.uncertainty(coupling, logits, ax=axes[0, 1]).set(title="digits, by the logits")

    torch.manual_seed(0)
    data = KarateClub()[0]
    network = CertifiedTransformer(34, 32, 4, num_blocks=2, num_layers=4, graph="sym")
    labelled = torch.rand(34) < 0.5
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(args.epochs):
        out = network(data.x, data.edge_index)
        loss = cross_entropy(out[labelled], data.y[labelled])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    plot.energies(network, data.x, data.edge_index, ax=axes[1, 0])
    plot.spectrum(network, data.x, data.edge_index, ax=axes[1, 1])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=80)
    plt.close(figure)
    right = float((logits.argmax(1) == y).float().mean())
    print(f"{right:.1%} of the digits are right\n{args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
