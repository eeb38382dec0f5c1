"""Losses beside the task's own: what they are, where modules leave them, and how a training step collects them."""

from __future__ import annotations

import threading
from functools import reduce

import torch
from torch import Tensor, nn

from diffusion_mp.couplings.base import Coupling, check_coupling_kind
from diffusion_mp.errors import check_flags, check_kind
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.precision import quotient


def edge_loss(coupling: Coupling, graph: Graph, *, relative: bool = False) -> Tensor:
    r"""−(1/N) Σ_{(u,v) ∈ E} (a_uv/d_u) log π_uv, how unlikely attention π makes the observed edges, in O(E).

    One layer's part of the edge-level regularisation (slides, "Input Graphs as Regularization Loss"; Wu et al. 2022),
    to be minimised; a model adds its layers with weight 1/L. d_u = Σ_v a_uv is the weighted degree of the receiver u,
    so that unit weights give the slides' 1/d_u. The mean is over all N nodes of a batch, and over heads; the released
    code takes it over edges (docs/errata.md, N5).

    Args:
        coupling: π; its rows should sum to one.
        graph: the observed edges; an edge of weight zero is none.
        relative: divide every graph's part by log n, n its nodes, which is what attention to all nodes alike costs. So
            that is 1 in graphs of any size, where the slides' loss is 8 in one of 3 000 nodes and swamps the task's.

    Returns:
        A 0-dimensional tensor of at least float32, differentiable; zero where no edge was observed.

    Raises:
        ValueError: the graph has no ``edge_index`` at all, or other nodes than the coupling.

    Examples:
        >>> edge_loss(SoftmaxDiffusivity()(x), graph).shape
        torch.Size([])
    """
    check_coupling_kind(coupling)
    check_kind(graph, "graph", Graph, "a Graph")
    check_flags(relative=relative)
    if graph.edge_index is None:
        raise ValueError(
            "edge_loss compares the coupling with observed edges; got a graph without edge_index. "
            "Pass one (an empty [2, 0] one if no edge was observed), or leave the loss out."
        )
    if coupling.num_nodes != graph.num_nodes:
        raise ValueError(
            f"coupling and graph must have the same nodes; got {coupling.num_nodes} and {graph.num_nodes} nodes."
        )
    target = graph.edge_index[1]
    log_entries = coupling.log_at(graph.edge_index)
    log_entries = log_entries.to(torch.promote_types(log_entries.dtype, torch.float32))
    weight = graph.weights(log_entries)
    degree = weight.new_zeros(graph.num_nodes).index_add(0, target, weight)
    share = quotient(weight, degree[target])
    if relative:
        sizes = weight.new_full((1,), graph.total_nodes) if graph.is_single else graph.ptr.diff().to(weight)
        sizes = sizes.clamp(min=2).log()
        share = share / (sizes if graph.is_single else sizes[graph.batch[target]])
    share = share.unsqueeze(1)
    # 0 log 0 = 0
    log_entries = log_entries.masked_fill((share == 0) & log_entries.isneginf(), 0.0)
    return -(share * log_entries).sum() / max(graph.total_nodes * coupling.heads, 1)


class AuxiliaryLoss:
    """Where a module leaves the auxiliary loss of its last forward pass: ``self.auxiliary = AuxiliaryLoss()``.

    A module sets ``value`` anew on every forward pass, to ``None`` in evaluation. Threads that share a module do not
    see each other's: a value belongs to the thread whose forward pass left it. Copies and pickles of a module start
    with an empty one, since a tensor in the middle of a computation can be neither copied nor saved.

    Examples:
        >>> class Gate(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.auxiliary = AuxiliaryLoss()
        ...     def forward(self, x):
        ...         self.auxiliary.value = x.square().mean() if self.training else None
        ...         return x.relu()
        >>> gate = Gate()
        >>> y = gate(torch.ones(6, 4))
        >>> auxiliary_loss(gate)  # of all modules together, to be added to the loss
        tensor(1.)
    """

    def __init__(self) -> None:
        # An attribute, not a base class: Dynamo writes back what a graph leaves in a plain threading.local only.
        self._of_thread = threading.local()
        self._recorded = False

    @property
    def value(self) -> Tensor | None:
        """A 0-dimensional tensor, or ``None`` where nothing is to be added.

        Raises:
            RuntimeError: the module ran in other threads only, so that what they left would be taken for nothing.
        """
        if hasattr(self._of_thread, "value"):
            value: Tensor | None = self._of_thread.value
            return value
        if self._recorded:
            raise RuntimeError(
                "an auxiliary loss belongs to the thread whose forward pass recorded it; the module ran in other "
                "threads, never in this one. Call auxiliary_loss(model) where the model is called; under "
                "DataParallel, add it to the loss inside the module that is replicated."
            )
        return None

    @value.setter
    def value(self, value: Tensor | None) -> None:
        self._of_thread.value = value
        if value is not None:
            self._recorded = True

    def __reduce__(self) -> tuple[type[AuxiliaryLoss], tuple[()]]:
        return AuxiliaryLoss, ()


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The sum of what this thread's last forward pass left in any module of ``model``; zero where that is nothing.

    Weights (λ/L) are already in it. A module that ran several times in one pass counts with its last run.

    Raises:
        RuntimeError: a module of ``model`` recorded a loss in other threads, and never ran in this one.

    Examples:
        >>> model = NodeFormer(4, 16, 3)
        >>> logits = model(x, edge_index)
        >>> loss = logits.logsumexp(1).mean() + auxiliary_loss(model)
    """
    check_kind(model, "model", nn.Module, "a module")
    holders = [getattr(module, "auxiliary", None) for module in model.modules()]
    values = [holder.value for holder in holders if isinstance(holder, AuxiliaryLoss)]
    recorded = [value for value in values if value is not None]
    if not recorded:
        return next(model.parameters(), torch.zeros(())).new_zeros(())
    return reduce(torch.add, recorded)
