"""All pairs, with any function of their distance."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.inner_products import check_features, same_graph
from diffusion_mp.errors import check_function
from diffusion_mp.kernels.precision import accumulating, without_autocast

TILE_ENTRIES = 1 << 20  # pairs, of all heads, held at a time


class DistanceCoupling(Coupling):
    r"""s_ij = f(‖q_i − k_j‖²) within a graph, for any function f of a tensor of squared distances.

    A product costs O(N² D) time and O(N D) memory beside one tile of pairs: the backward pass computes every tile
    again. Where f is linear, exponential or a sigmoid, `LowRankCoupling` and `PairwiseCoupling` are several times
    faster. Inside ``torch.compile`` there is one tile.

    Args:
        function: f, element by element, called with tensors of single and double precision; it needs a derivative at 0,
            which is the distance of a node from itself.
        query, key: features of receivers and senders [N, H, F].
        ptr: row boundaries of a ragged batch on the CPU (``Graph.segments``); ``None`` is one graph.
        nonnegative, positive_semidefinite: promises about S, which is symmetric where query is key.

    Raises:
        TypeError, ValueError: no function; features that are no [N, H, F] of one shape, dtype and device.

    Examples:
        >>> S = DistanceCoupling(lambda z2: 1 / (1 + z2), q, q)
        >>> torch.allclose(S.to_dense()[0], 1 / (1 + torch.cdist(q[:, 0], q[:, 0]).square()), atol=1e-5)
        True
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        query: Float[Tensor, "N H F"],
        key: Float[Tensor, "N H F"],
        ptr: Tensor | None = None,
        *,
        nonnegative: bool = False,
        positive_semidefinite: bool = False,
    ) -> None:
        check_function(function, "function", "of a tensor of squared distances")
        check_features(query, key)
        super().__init__(
            query.size(0),
            query.size(1),
            query,
            ptr=ptr,
            symmetric=query is key,
            nonnegative=nonnegative,
            positive_semidefinite=positive_semidefinite,
        )
        self.quadratic = True
        self.function, self.query, self.key = function, query, key

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        (query, key, values), dtype = accumulating(self.query, self.key, v)
        with without_autocast(v):
            if torch.compiler.is_compiling():
                return (self._all(query, key) @ values.transpose(0, 1)).transpose(0, 1).to(dtype)
            tiles = self._tiles()
            moved = []
            for rows, columns in tiles:
                tile = query[rows], key[columns], values[columns]
                if len(tiles) == 1:
                    moved.append(self._moved(*tile))
                else:
                    moved.append(checkpoint(self._moved, *tile, use_reentrant=False, preserve_rng_state=False))
            return torch.cat(moved).to(dtype)

    def _moved(self, query: Tensor, key: Tensor, values: Tensor) -> Tensor:
        return (self._entries(query, key) @ values.transpose(0, 1)).transpose(0, 1)

    def _entries(self, query: Float[Tensor, "r H F"], key: Float[Tensor, "c H F"]) -> Float[Tensor, "H r c"]:
        """f of all pairs of some rows and some columns."""
        q, k = query.transpose(0, 1), key.transpose(0, 1)
        squares = q.square().sum(2).unsqueeze(2) + k.square().sum(2).unsqueeze(1)
        return self.function(torch.clamp(squares - 2 * q @ k.mT, min=0))

    def _all(self, query: Tensor, key: Tensor) -> Float[Tensor, "H N N"]:
        """f of all pairs of the same graph, 0 for others."""
        entries = self._entries(query, key)
        if self.ptr is None:
            return entries
        nodes = torch.arange(self.num_nodes, device=self.device)
        return torch.where(same_graph(self.ptr, nodes[:, None], nodes[None, :]), entries, 0.0)

    def _tiles(self) -> list[tuple[slice, slice]]:
        """The rows and the columns of every tile, of one graph each; one without any where there are no nodes."""
        bounds = [0, self.num_nodes] if self.ptr is None else self.ptr.tolist()
        tiles = []
        for start, stop in pairwise(bounds):
            step = max(1, TILE_ENTRIES // max(1, self.heads * (stop - start)))
            tiles += [(slice(row, min(row + step, stop)), slice(start, stop)) for row in range(start, stop, step)]
        return tiles or [(slice(0, 0), slice(0, 0))]

    def _transpose(self) -> Coupling:
        return DistanceCoupling(self.function, self.key, self.query, self.ptr, nonnegative=self.nonnegative)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        (query, key), dtype = accumulating(self.query, self.key)
        entries = self.function((query[target] - key[source]).square().sum(2)).to(dtype)
        if self.ptr is None:
            return entries
        return torch.where(same_graph(self.ptr, target, source).unsqueeze(1), entries, 0.0)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        (query, key), dtype = accumulating(self.query, self.key)
        return self._all(query, key).to(dtype)
