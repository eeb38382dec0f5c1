"""What the arrays of a cache must be before they are taken for one graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def check_graph_arrays(folder: Path, arrays: Mapping[str, Tensor], names: set[str], classes: int) -> None:
    """Raise unless the arrays that were read from `folder` are those of one graph with labels of `classes` classes.

    They are `names`, edge_index and y among them: edge_index [2, E] long of nodes that exist, y long of classes that
    exist or −1, a row for every edge in all other `edge_*`, and a row for every node in the rest; masks are bool. One
    pass over edges and labels: whoever indexes with a node that does not exist reads what belongs to nobody.

    Errors: ValueError naming the folder.
    """
    way_out = f"Delete {folder}, and it is made anew from the files."
    if set(arrays) != names:
        raise ValueError(
            f"{folder} must hold the arrays {', '.join(sorted(names))}; it holds {', '.join(sorted(arrays))}. {way_out}"
        )
    edges, labels = arrays["edge_index"], arrays["y"]
    for name, array in arrays.items():
        kind = torch.bool if name.endswith("_mask") else torch.long if name in ("edge_index", "y") else array.dtype
        rows = len(labels) if not name.startswith("edge_") else edges.size(-1)
        across = name == "edge_index"
        if array.dtype != kind or (array.dim() != 2 or len(array) != 2 if across else len(array) != rows):
            raise ValueError(
                f"{folder}: {name} must be {kind} with {'2 rows' if across else f'{rows} rows'}; got {array.dtype} "
                f"{list(array.shape)}. {way_out}"
            )
    for name, values, low, high in (("edge_index", edges, 0, len(labels)), ("y", labels, -1, classes)):
        if values.numel():
            least, most = (int(end) for end in values.aminmax())
            if least < low or most >= high:
                raise ValueError(f"{folder}: {name} must lie in {low}..{high - 1}; got {least}..{most}. {way_out}")
