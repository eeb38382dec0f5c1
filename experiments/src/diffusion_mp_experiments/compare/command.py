"""`diffusion-mp compare`: from a file to a report, the best model, and predictions."""

import argparse
from pathlib import Path

from diffusion_mp_experiments.compare.comparison import (
    METRICS,
    compare,
    predictions_path,
)
from diffusion_mp_experiments.compare.report import scores, verdict
from diffusion_mp_experiments.reproduce.command import count


def run_compare(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "diffusion-mp compare",
        description="Compares models on data of your own, all with one budget.",
    )
    parser.add_argument(
        "data",
        help="nodes.csv beside edges.csv, a csv with a column smiles, a csv of rows, a folder of them or in TU format, "
        "or a file .npz, .safetensors or .pt of a graph or of graphs",
    )
    parser.add_argument("--target", help="the column that is predicted")
    parser.add_argument(
        "--task",
        choices=["node", "graph", "link", "regression"],
        help="by default what the data say",
    )
    metrics = dict.fromkeys(name for names in METRICS.values() for name in names)
    parser.add_argument("--metric", choices=list(metrics))
    parser.add_argument("--identifier", help="the column of the ids of nodes")
    parser.add_argument(
        "--directed",
        action=argparse.BooleanOptionalAction,
        help="whether edges have a direction",
    )
    parser.add_argument("--edges", help="the file of the edges, edges.csv beside DATA")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time for everything"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/compare"), help="folder, %(default)s"
    )
    parser.add_argument("--jobs", type=count, help="processes, by default all cores")
    parser.add_argument("--seed", type=int, default=0, help="draws the splits")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="ROW", help="these rows, not all"
    )
    parser.add_argument(
        "--predict",
        metavar="NEW",
        help="a table of new rows with the same columns, or the folder of new nodes.csv and edges.csv",
    )
    options = vars(parser.parse_args(args))
    comparison = compare(options.pop("data"), options.pop("minutes"), **options)
    print(f"\n{verdict(comparison)}\n\n{scores(comparison)}\n")
    print(f"With pictures: {comparison.folder / 'report.md'}")
    path = comparison.folder / "predictions.csv"
    if options["predict"] is not None:
        path = predictions_path(comparison.folder, options["predict"])
    if path.is_file():
        print(f"Predictions: {path}")
