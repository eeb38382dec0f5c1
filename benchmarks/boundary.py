"""What the checks of arguments cost: layers on a graph of Cora's size, with checks and without, in turn.

    python benchmarks/boundary.py

The script prints for every layer, given a Graph and given edge_index, the median time of a forward pass. It also prints
how much longer the pass with checks took, as a median over pairs of passes. (Without checks every ``check_…`` of the
package does nothing.)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from torch import nn

from diffusion_mp import DIFFormerConv, GATConv, GCNConv, Graph

NODES = 2_708
EDGES = 10_556
CHANNELS = 64


@contextmanager
def unchecked() -> Iterator[None]:
    """Replace every function called ``check_…`` in a module of the package by a function that does nothing."""
    replaced = []
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusion_mp"):
            checks = [
                key
                for key, value in vars(module).items()
                if key.startswith("check_") and callable(value)
            ]
            replaced += [patch.object(module, key, _nothing) for key in checks]
    for one in replaced:
        one.start()
    try:
        yield
    finally:
        for one in replaced:
            one.stop()


def _nothing(*_: object, **__: object) -> None:
    pass


def fastest(call: Callable[[], object], passes: int) -> float:
    """Return the seconds of the fastest of some passes."""
    times = []
    for _ in range(passes):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="rounds with and without the checks"
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=10,
        help="passes in a round, of which the fastest counts",
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(NODES, CHANNELS)
    edge_index = torch.randint(NODES, (2, EDGES))
    layers: list[nn.Module] = [
        kind(CHANNELS, CHANNELS) for kind in (GCNConv, GATConv, DIFFormerConv)
    ]
    print(f"{'layer':16}{'given':14}{'with checks':>12}{'more':>10}")
    for layer, edges in product(layers, (Graph(NODES, edge_index), edge_index)):
        call = partial(layer, x, edges)
        pairs = []
        with torch.no_grad():
            for _ in range(options.rounds):
                checked = fastest(call, options.passes)
                with unchecked():
                    pairs.append((checked, fastest(call, options.passes)))
        more = statistics.median(checked / bare - 1 for checked, bare in pairs)
        median = statistics.median(checked for checked, _ in pairs)
        given = "Graph" if isinstance(edges, Graph) else "edge_index"
        print(
            f"{type(layer).__name__:16}{given:14}{1e3 * median:9.2f} ms{100 * more:9.1f} %"
        )


if __name__ == "__main__":
    main()
