"""``PartEdgeIndex``: the edges of a part of a graph, with the degrees that its nodes have in the whole graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from diffusion_mp.checks import INTEGERS

# The results of these functions are the same edges of the same nodes.
_KEEPING_THE_EDGES = {
    Tensor.clone,
    Tensor.contiguous,
    Tensor.cpu,
    Tensor.cuda,
    Tensor.detach,
    Tensor.int,
    Tensor.long,
    Tensor.pin_memory,
    Tensor.share_memory_,
    Tensor.to,
}


class PartEdgeIndex(Tensor):
    """The edges of a part of a graph, with the degrees of its nodes in the whole graph.

    Loaders with ``degrees="full"`` yield it as ``batch.edge_index``. ``model(batch.x, batch.edge_index)`` then divides
    by the degrees of the whole graph, as ``model(batch.x, Graph.from_data(batch))`` does. For any other use it is a
    tensor [2, E]. The degrees go with it to another device, dtype or process. Edges [2, …] that are computed from it
    have no degrees, and graphs refuse them.

    Attributes:
        plain: the same memory as a plain tensor, which torch.compile takes instead of this tensor.
        full_degree: weighted in- and out-degrees [N, 2] in the whole graph. ``None`` for edges that were computed from
            the edges of a part.

    Examples:
        >>> edges = PartEdgeIndex.of(torch.tensor([[0, 1], [1, 0]]), torch.tensor([[3.0, 3.0], [2.0, 2.0]]))
        >>> Graph(2, edges).degree()
        tensor([3., 2.])
    """

    plain: Tensor
    full_degree: Tensor | None

    @staticmethod
    def of(edge_index: Tensor, full_degree: Tensor | None) -> PartEdgeIndex:
        """Return the edges of a part with degrees in the whole graph.

        Args:
            edge_index: edges [2, E] of the part.
            full_degree: in- and out-degrees [N, 2] of its nodes in the whole graph, or ``None``.
        """
        edges: PartEdgeIndex = edge_index.as_subclass(PartEdgeIndex)
        edges.plain = edge_index
        edges.full_degree = full_degree
        return edges

    def as_tensor(self) -> Tensor:
        """Return the edges as a plain tensor. A ``Graph`` of this tensor has the degrees in the part."""
        return self.plain

    def __deepcopy__(self, memo: dict[int, Any]) -> PartEdgeIndex:
        return PartEdgeIndex.of(*copy.deepcopy((self.plain, self.full_degree), memo))

    # Also for other processes, since torch would drop the attributes of a subclass.
    def __reduce_ex__(self, protocol: Any) -> Any:
        return PartEdgeIndex.of, (self.plain, self.full_degree)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        degree = None
        if func in _KEEPING_THE_EDGES:
            # Of x.to(edges) the first argument is a plain tensor.
            degree = getattr(args[0], "full_degree", None)
        return _classified(result, degree)


def _classified(result: Any, degree: Tensor | None) -> Any:
    """Return plain tensors, and edges [2, …] with their degrees.

    torch gives every result this class, without attributes. Here it gets them, or loses the class.
    """
    if isinstance(result, (tuple, list)):
        return type(result)([_classified(part, degree) for part in result])
    if not isinstance(result, PartEdgeIndex) or "plain" in vars(result):
        return result
    plain = result.as_subclass(Tensor)
    # Tensors that may be edges keep the class, so that a graph of them is refused instead of getting wrong degrees.
    if plain.dim() != 2 or plain.size(0) != 2 or plain.dtype not in INTEGERS:
        return plain
    if degree is not None:
        degree = degree.to(plain.device)
    return PartEdgeIndex.of(plain, degree)
