"""Graphs of nearest neighbours in feature space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import scipy
import torch
from jaxtyping import Int64
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from diffusion_mp import checks
from diffusion_mp.runtime.progress import progress_bar

Metric = Literal["euclidean", "cosine"]
_Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]
# The largest entry is scaled to 2^_LARGEST, and entries of other rows clipped at 2^_CUT: the square of a distance in up
# to 2^22 channels is then below 2^1024, where double precision ends, and small distances keep their squares.
_LARGEST = 480
_CUT = 500
# Rows that are searched for at a time, so that the bar moves and a block of distances stays small.
_PART = 1 << 12


def knn_graph(
    x: Tensor,
    k: int,
    metric: Metric = "euclidean",
    *,
    approximate: bool = False,
) -> Int64[Tensor, "2 E"]:
    """Join every row of a feature matrix to its k nearest rows, and return the edges [2, E] in both directions.

    The pair (i, j) is an edge if j is among the k nearest rows of i, or i among the k nearest rows of j. Edges are
    sorted. Labels spread on this graph over images, texts and tables (Zhou et al., 2004). Scale columns of different
    units first.

    The exact search takes O(N²) time.

    Args:
        x: features [N, C].
        k: number of neighbours of a row, below N.
        metric: ``"euclidean"``, or ``"cosine"`` for the angle between rows. With ``"cosine"`` rows at an angle of 90°
            or more are not joined.
        approximate: whether FAISS compares each row only with the rows in the 32 nearest of up to 4√N clusters, in
            single precision. This finds 99.6 % of the ten nearest of MNIST's 70 000 images. The default is the exact
            search.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed, or FAISS with ``approximate``.

    Examples:
        >>> knn_graph(torch.tensor([[0.0], [1.0], [5.0], [7.0]]), k=1)
        tensor([[0, 1, 2, 3],
                [1, 0, 3, 2]])
    """
    return KNNGraph(k, metric, approximate=approximate)._joined(x, "x")[0]


@dataclass(eq=False)
class KNNGraph(BaseTransform):
    r"""Transform that sets the edges of a `Data` to the `knn_graph` of its features, optionally with weights.

        w_ij ∝ exp(−s ‖x_i − x_j‖² / (σ_i σ_j))

    σ_i is the distance of i to the farthest of its k nearest rows (local scaling, Zelnik-Manor & Perona, 2004, with s =
    1). With ``"cosine"`` rows are first scaled to length one. Weights are scaled to the mean one.

    Args:
        k: number of neighbours of a row.
        metric: ``"euclidean"`` or ``"cosine"``, see `knn_graph`.
        weighted: whether to set ``edge_weight`` [E] too. Off by default: all edges then count alike.
        sharpness: s, larger for weights that fall faster with the distance. The default 8 was chosen on images of
            digits (docs/results.md); 4 is better for texts.
        approximate: whether FAISS searches for the neighbours, see `knn_graph`.

    Examples:
        >>> KNNGraph(k=2)(Data(x=x)).edge_index.size(0)
        2
    """

    k: int = 5
    metric: Metric = "euclidean"
    weighted: bool = False
    sharpness: float = 8.0
    approximate: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.k = checks.as_whole(self.k, "k")
        checks.check_counts(k=self.k)
        checks.check_choice(self.metric, "metric", get_args(Metric))
        checks.check_flags(weighted=self.weighted, approximate=self.approximate)
        checks.check_positive(self.sharpness, "sharpness")

    def forward(self, data: Any) -> Data:
        """Replace the edges of data, and remove the weights and features of the old edges.

        PyG passes a shallow copy, so the caller's data keep their edges.
        """
        checks.check_kind(data, "data", Data, "a torch_geometric Data")
        if getattr(data, "num_graphs", 1) > 1:
            raise ValueError(
                f"KNNGraph takes one graph; got a batch of {data.num_graphs}. Apply it before batching."
            )
        data.edge_index, weights = self._joined(data.x, "data.x")
        # Those of the edges before.
        for name in ("edge_weight", "edge_attr", "adj_t"):
            data.pop(name, None)
        if self.weighted:
            data.edge_weight = weights
        return data

    def attach(self, data: Data, x_new: Tensor) -> Data:
        """Return the rows of ``data`` and new rows after them, each with edges from its k nearest rows of ``data``.

        A model that was trained on ``data`` predicts new rows by one call:

            more = knn.attach(data, x_new)
            out = model.eval()(more.x, more.edge_index, more.edge_weight)[data.num_nodes :]

        New rows are not joined with each other, and no edge leads from them to the rows of ``data``. The weights of
        their edges have the scale of the graph of ``data``, whose rows keep their σ_j.

        The rows of ``data`` keep their states, and a prediction does not depend on the other new rows, in layers that
        send along edges and normalise by what a node receives: in all layers of `DiffusionGNN` (GCN divides by
        in-degrees at both ends, as in PyG) and with ``AdjacencyDiffusivity("row")``.

        All rows act on each other in attention over all pairs (`DIFFormer`, `NodeFormer`, `SGFormer`, `GPS`), in the
        certified models, whose neighbours act in both directions, and where an entry is divided by the out-degree of
        its sender (``direction="directed"``). With such a model, attach the rows one at a time if a prediction must not
        depend on the others.

        Args:
            data: Rows ``x`` [N, C] and the edges that this transform has set.
            x_new: New rows [M, C], in the units of ``data.x``; converted to its dtype.

        Returns:
            Data with ``x`` [N + M, C], ``edge_index`` and, if ``weighted``, ``edge_weight``.

        Examples:
            >>> knn = KNNGraph(k=2)
            >>> knn.attach(knn(Data(x=x)), x[:3] + 0.1).num_nodes
            9
        """
        checks.check_kind(data, "data", Data, "a torch_geometric Data")
        rows = _rows(data.x, "data.x")
        new = _rows(x_new, "x_new")
        if new.shape[1] != rows.shape[1]:
            raise ValueError(
                f"x_new must have {rows.shape[1]} channels, as data.x has; got {checks.describe(x_new)}."
            )
        checks.check_device(x_new, "x_new", data.x.device, "data.x")
        edges = data.edge_index
        weights = data.edge_weight
        if edges is None or (weights is not None) != self.weighted:
            raise ValueError(
                f"data must have the edges that {self} has set; got {data}. Apply the transform to the rows first."
            )
        # Without weights the reach of the rows does not matter.
        reach = np.zeros(len(rows))
        if self.weighted:
            _, before, reach = self._graph(rows)
        near, _ = self._weights(rows, new, reach)
        ends = np.stack([near.col, near.row + len(rows)])
        found = torch.from_numpy(ends).to(edges)
        x_new = x_new.to(data.x.dtype)
        more = Data(
            x=torch.cat([data.x, x_new]),
            edge_index=torch.cat([edges, found], 1),
        )
        if self.weighted:
            scaled = torch.from_numpy(near.data) / before.mean()
            more.edge_weight = torch.cat([weights, scaled.to(weights)])
        return more

    def _joined(self, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        rows = _rows(x, name)
        if self.k >= len(x):
            raise ValueError(
                f"k must be below the number of nodes, {len(x)}; got {self.k}."
            )
        edges, weights, _ = self._graph(rows)
        weights = weights / weights.mean()
        return edges.to(x.device), weights.to(x)

    def _graph(self, x: Any) -> tuple[Tensor, Tensor, np.ndarray]:
        """Return the edges of rows, their weights (the larger of both directions), and every row's squared reach."""
        near, reach = self._weights(x)
        # The relation is not symmetric: an outlier is no neighbour of its neighbours. Either direction makes an edge.
        both = near.maximum(near.T).tocsr()
        # The edges of a sparse matrix come in the order of its storage.
        both = both.sorted_indices().tocoo()
        edges = np.stack([both.row, both.col])
        weights = torch.from_numpy(both.data)
        return torch.from_numpy(edges).long(), weights, reach

    def _weights(
        self,
        x: Any,
        of: Any = None,
        reach: Any = None,
    ) -> tuple[scipy.sparse.coo_array, np.ndarray]:
        """Return the weights [M, N] of neighbours, and the squared reach of the M rows.

        The reach of a row is the distance to its farthest neighbour; with ``of``, that of the rows of x is passed.
        """
        row, column, square = self._pairs(x, of)
        rows = x if of is None else of
        own = np.zeros(rows.shape[0])
        np.maximum.at(own, row, square)
        if reach is None:
            reach = own
        # The root of the product would overflow where the product of the roots does not.
        scale = np.sqrt(own[row]) * np.sqrt(reach[column])
        # Copies of a row are at distance zero from it, and have the weight one.
        relative = np.zeros(len(square))
        np.divide(square, scale, out=relative, where=scale > 0)
        # Clipped, so that an outlier has small, equal, nonzero weights.
        exponent = np.minimum(self.sharpness * relative, 30)
        entries = (np.exp(-exponent), (row, column))
        shape = (len(own), len(reach))
        return scipy.sparse.coo_array(entries, shape=shape), own

    def _pairs(self, x: Any, of: Any = None) -> _Pairs:
        """Return pairs (i, j) with row j of ``x`` among the k nearest of row i of ``of`` [M, C], and ‖x_j − of_i‖².

        Without ``of`` each row of x [N, C] is compared with the others. Distances are in the unit of `comparable`.
        """
        rows = comparable(x if of is None else of, x, self.metric)
        x = comparable(x, x, self.metric)
        # Rows of zeros are left out: at distance one from unit rows, they would be nearer than orthogonal rows.
        asking = np.arange(rows.shape[0])
        others = np.arange(x.shape[0])
        if self.metric == "cosine":
            asking = np.flatnonzero(abs(rows).sum(axis=1))
            others = np.flatnonzero(abs(x).sum(axis=1))
        candidates = len(others)
        if of is None:
            # A row is not its own neighbour.
            candidates -= 1
        k = min(self.k, candidates)
        if k < 1 or not len(asking):
            return np.zeros(0, int), np.zeros(0, int), np.zeros(0)
        x = x[others]
        rows = rows[asking]
        itself = np.arange(len(asking)) if of is None else None
        # FAISS takes dense rows only.
        search = _nearest
        if self.approximate and not scipy.sparse.issparse(x):
            search = _nearly_nearest
        row, column, square = search(x, rows, k, itself)
        row = asking[row]
        column = others[column]
        if self.metric != "cosine":
            return row, column, square
        # Unit vectors at 90° have the squared distance 2, up to rounding.
        near = square < 2 - 1e-12
        return row[near], column[near], square[near]


def _rows(x: Tensor, name: str) -> np.ndarray:
    """Check features, and return them for scikit-learn, which searches in double precision and on the CPU."""
    checks.check_state(x, name)
    if not x.size(1):
        raise ValueError(
            f"{name} must have a channel at least; got {checks.describe(x)}."
        )
    checks.check_finite(x, name)
    return x.detach().cpu().double().numpy()


def _nearest(
    x: Any,
    rows: Any,
    k: int,
    itself: np.ndarray | None,
) -> _Pairs:
    """Search among comparable rows; a row whose number is in ``itself`` is not its own neighbour."""
    from sklearn.neighbors import NearestNeighbors

    def search(algorithm: str, x: Any, rows: Any, itself: Any) -> list[np.ndarray]:
        # A row is the nearest of itself, and is left out.
        count = k + (itself is not None)
        index = NearestNeighbors(n_neighbors=count, algorithm=algorithm)
        index.fit(x)
        return _in_parts(index.kneighbors, rows, itself)

    if scipy.sparse.issparse(x):
        distance, column = search("brute", x, rows, itself)
    elif x.shape[1] <= (64 if len(x) <= 2_000 else 15):
        # Without matrix products, ties are broken alike on every machine. With more channels a tree visits every row.
        distance, column = search("kd_tree", x, rows, itself)
    else:
        # The median, which a row far outside does not move.
        middle = np.median(x, axis=0)
        centred = rows - middle
        distance, column = search("brute", x - middle, centred, itself)
        # ‖x‖² + ‖y‖² − 2x·y cancels for rows much closer to each other than to the origin.
        cancelling = 2.0**-14 * np.linalg.norm(centred, axis=1)
        lost = np.flatnonzero(distance[:, -1] < cancelling)
        if len(lost):
            among = None if itself is None else lost
            distance[lost], column[lost] = search("kd_tree", x, rows[lost], among)
    row = np.arange(len(distance)).repeat(k)
    return row, column.ravel(), distance.ravel() ** 2


def _nearly_nearest(
    x: np.ndarray,
    rows: np.ndarray,
    k: int,
    itself: np.ndarray | None,
) -> _Pairs:
    """Search among comparable rows in an inverted file; the squared distances of the neighbours found are exact."""
    with checks.needed_by(
        "An approximate search for neighbours", "diffusion-mp[faiss]"
    ):
        import faiss
    # With fewer than 39 rows in a cell, FAISS warns.
    cells = int(min(4 * len(x) ** 0.5, len(x) / 39))
    if cells < 2:
        return _nearest(x, rows, k, itself)
    middle = np.median(x, axis=0)
    # Squares must fit into single precision; what is clipped is equally far from every row of x.
    _, exponent = np.frexp(abs(x - middle).max())

    def single(rows: np.ndarray) -> np.ndarray:
        scaled = np.ldexp(rows - middle, -exponent)
        return scaled.clip(-(2.0**50), 2.0**50).astype(np.float32)

    index: Any = faiss.index_factory(x.shape[1], f"IVF{cells},Flat")
    index.train(single(x))
    index.add(single(x))
    index.nprobe = min(cells, 32)
    count = k + (itself is not None)

    def search(part: np.ndarray) -> Any:
        return index.search(single(part), count)

    _, column = _in_parts(search, rows, itself)
    # A cell may hold fewer than k rows, which FAISS fills with −1.
    row, rank = np.nonzero(column >= 0)
    column = column[row, rank]
    square = np.empty(len(row))
    # In parts of 2^24 numbers, since the differences of all pairs would take k times the memory of x.
    parts = len(row) * x.shape[1] // 2**24 + 1
    for part in np.array_split(np.arange(len(row)), parts):
        difference = rows[row[part]] - x[column[part]]
        square[part] = (difference**2).sum(1)
    return row, column, square


def _in_parts(
    search: Callable[[Any], Any],
    rows: Any,
    itself: Any,
) -> list[np.ndarray]:
    """Search for some rows at a time; a row whose number is in ``itself`` is not its own neighbour.

    ``search`` returns the distances and the numbers of the neighbours, one row of each for every row that it is given.
    """
    parts = []
    with progress_bar("neighbours", "row", rows.shape[0]) as bar:
        for first in range(0, rows.shape[0], _PART):
            part = search(rows[first : first + _PART])
            column = part[1]
            count = len(column)
            if itself is not None:
                others = column != itself[first : first + _PART, None]
                # Copies of a row may have displaced it; then the farthest of them is left out.
                displaced = others.all(1)
                others[displaced, -1] = False
                part = [each[others].reshape(count, -1) for each in part]
            parts.append(part)
            bar.update(count)
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


def comparable(rows: Any, x: Any, metric: Metric) -> Any:
    """Scale rows by the largest entry of x, so that squares neither overflow nor vanish; for "cosine" to length one."""
    with checks.needed_by("A graph of nearest neighbours", "diffusion-mp[sklearn]"):
        from sklearn.preprocessing import normalize
    sparse = scipy.sparse.issparse(rows)
    largest = abs(rows).max(axis=1) if metric == "cosine" else abs(x).max()
    if scipy.sparse.issparse(largest):
        largest = largest.toarray().ravel()
    # Powers of two are exact.
    _, exponent = np.frexp(largest)
    entries = rows.data if sparse else rows
    if metric == "cosine" and sparse:
        exponent = exponent.repeat(np.diff(rows.indptr))
    elif metric == "cosine":
        exponent = exponent[:, None]
    # Infinity is clipped like any other number that is too large.
    with np.errstate(over="ignore"):
        values = np.ldexp(entries, _LARGEST - exponent)
    np.clip(values, -(2.0**_CUT), 2.0**_CUT, out=values)
    if sparse:
        values = scipy.sparse.csr_array((values, rows.indices, rows.indptr), rows.shape)
    if metric == "cosine":
        values = normalize(values, copy=False)
    return values
