"""Attention before and after, from a trained SFi-Former (SFi-Former, Figure 4).

    python examples/sfi_former.py --dataset CLUSTER --model SFi --out runs/sfi_former
    python examples/attention.py runs/sfi_former/CLUSTER-SFi-seed0.pt

The picture has one row per layer, on a logarithmic scale; white is zero. From left to right it shows softmax attention,
which is the flow through the same resistances without friction; the sparse flow; and what propagates, the flow next to
the adjacency (Eq. 11). The nodes are the nodes of one test graph, sorted by class where they have one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from runs import needs, options
from torch_geometric.data import Batch

from diffusion_mp import Coupling
from diffusion_mp.couplings import SparseFlowCoupling
from diffusion_mp.diagnostics import plot_attention

with needs("diffusion-mp-experiments"):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import sfi_former
    from sfi_former import BENCHMARKS, Run, make_model, predict

    from diffusion_mp_experiments.train import load_checkpoint


#: What is drawn with --quick, and trained for it.
QUICK = Path("runs/sfi_former_quick/CLUSTER-SFi-seed0.pt")


def attentions(
    checkpoint: Path, peptides: Path, index: int
) -> list[tuple[SparseFlowCoupling, Coupling]]:
    """Return the sparse flow and the propagation of every layer, for one test graph."""
    state = load_checkpoint(checkpoint)
    run = Run(**{**state["run"], "device": "cpu"})
    if run.model != "SFi" or "best_model" not in state:
        raise SystemExit(
            f"{checkpoint} is no trained SFi-Former; examples/sfi_former.py --model SFi trains one."
        )
    benchmark = BENCHMARKS[run.dataset](run, checkpoint.parent, peptides)
    model = make_model(run, benchmark)
    model.load_state_dict(state["best_model"])
    data = Batch.from_data_list([benchmark.splits["test"][index]])
    if data.y.numel() == data.num_nodes:
        data = data.subgraph(data.y.argsort(stable=True))
    with torch.no_grad():
        couplings = predict(model.eval(), data, return_coupling=True)[1]
    return [
        (getattr(coupling, "attention", coupling), coupling) for coupling in couplings
    ]


def draw(
    layers: list[tuple[SparseFlowCoupling, Coupling]], head: int, path: Path
) -> None:
    """Draw the picture, three columns wide."""
    figure, axes = plt.subplots(
        len(layers),
        3,
        figsize=(10, 3.2 * len(layers)),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for row, (flow, propagation) in zip(axes, layers, strict=True):
        titles = (
            "softmax, without friction",
            f"sparse flow, {flow.density()[head]:.1%} not zero",
            "with the adjacency",
        )
        for ax, coupling, title in zip(
            row, (flow.without_friction(), flow, propagation), titles, strict=True
        ):
            plot_attention(coupling, ax, head=min(head, coupling.heads - 1))
            ax.set_title(title, fontsize=9)
            ax.label_outer()
    for number, row in enumerate(axes, 1):
        row[0].set_ylabel(f"layer {number}\nreceiver i")
    figure.colorbar(axes[0, 0].images[-1], ax=axes, shrink=0.6, label="s_ij")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Draw the picture; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        nargs="?",
        help="of an SFi-Former, from examples/sfi_former.py",
    )
    parser.add_argument(
        "--graph", type=int, default=0, help="which graph of the test split"
    )
    parser.add_argument("--head", type=int, default=0)
    parser.add_argument(
        "--peptides",
        type=Path,
        default=Path("data/peptides-functional"),
        help="its files",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the picture; in the folder of the checkpoint by default",
    )
    args = options(parser, argv, checkpoint=QUICK)
    if args.checkpoint == QUICK:
        sfi_former.main(["--quick", "--out", str(QUICK.parent), "--model", "SFi"])
    if args.checkpoint is None or not args.checkpoint.is_file():
        parser.error(
            f"there is no checkpoint {args.checkpoint or ''}; examples/sfi_former.py writes one."
        )
    layers = attentions(args.checkpoint, args.peptides, args.graph)
    path = args.out or args.checkpoint.with_suffix(".png")
    draw(layers, args.head, path)
    for number, (flow, _) in enumerate(layers, 1):
        print(
            f"layer {number}: density by head {' '.join(f'{value:.3f}' for value in flow.density())}"
        )
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
