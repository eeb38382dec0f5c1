"""``DiffusionClassifier``, scikit-learn's label spreading and logistic regression on MNIST: time and memory.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive python benchmarks/classifier.py data/MNIST     # a table in Markdown
    python benchmarks/classifier.py data/MNIST --rows 1000 --methods approximate exact

Ten images of every class have a label; the accuracy is measured on the other images. Every method has a process of its
own. Its peak memory counts everything in the process, including the images (0.44 GB for 70 000 in double precision) and
imports.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from fresh import in_fresh_process, peak
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.semi_supervised import LabelSpreading

from diffusion_mp.estimators import DiffusionClassifier

METHODS = {
    "approximate": (
        "`DiffusionClassifier(approximate=True)`",
        DiffusionClassifier(approximate=True, random_state=0),
    ),
    "exact": ("`DiffusionClassifier()`", DiffusionClassifier(random_state=0)),
    "spreading": ('`LabelSpreading(kernel="knn")`', LabelSpreading(kernel="knn")),
    "logistic": (
        "`LogisticRegression()`, of the labelled rows alone",
        LogisticRegression(),
    ),
}


def read(folder: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return some images [count, 784] in [0, 1] and their digits; a seed draws them from training and test set."""

    def both(kind: str, header: int) -> np.ndarray:
        files = [
            folder / "raw" / f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k")
        ]
        return np.concatenate(
            [
                np.frombuffer(gzip.decompress(f.read_bytes()), np.uint8, offset=header)
                for f in files
            ]
        )

    some = np.random.default_rng(0).permutation(70_000)[:count]
    return both("images-idx3", 16).reshape(-1, 784)[some] / 255, both("labels-idx1", 8)[
        some
    ].astype(int)


def run(method: str, folder: Path, count: int) -> dict[str, float]:
    """Fit one method to some rows."""
    x, y = read(folder, count)
    known = np.concatenate([np.flatnonzero(y == digit)[:10] for digit in range(10)])
    some = np.full(count, -1)
    some[known] = y[known]
    model: Any = METHODS[method][1]
    wall = time.perf_counter()
    cpu = time.process_time()
    if method == "logistic":
        found = model.fit(x[known], y[known]).predict(x)
    else:
        found = model.fit(x, some).transduction_
    wall = time.perf_counter() - wall
    cpu = time.process_time() - cpu
    return {
        "wall": wall,
        "cpu": cpu,
        "peak": peak(),
        "accuracy": 100 * float((found == y)[some < 0].mean()),
    }


def main() -> None:
    """Print the table, each line as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="with raw/train-images-idx3-ubyte.gz and the three other files",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1_000, 5_000, 20_000, 70_000]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        warnings.simplefilter("ignore", ConvergenceWarning)
        method, count = args.run.split()
        print(json.dumps(run(method, args.folder, int(count))))
        return
    print(
        "| n | method | wall, s | CPU, s | peak, MB | right, % |\n|--:|---|--:|--:|--:|--:|"
    )
    for count in args.rows:
        for method in args.methods:
            found = in_fresh_process(__file__, f"{method} {count}")
            line = "{wall:.1f} | {cpu:.1f} | {peak:,.0f} | {accuracy:.1f}".format_map(
                found
            )
            print(f"| {count:,} | {METHODS[method][0]} | {line} |", flush=True)


if __name__ == "__main__":
    main()
