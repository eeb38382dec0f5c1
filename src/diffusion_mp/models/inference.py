"""``full_graph_inference``: a model on a whole large graph, exactly, with a block of rows at a time on a device."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import reduce
from operator import add
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.nn.dense import Linear
from tqdm import tqdm

from diffusion_mp.couplings import Coupling, PooledCoupling, ScaledCoupling, SumCoupling, merged
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.errors import as_device, check_counts, check_flags, check_kind, check_state
from diffusion_mp.graph import Graph
from diffusion_mp.updates import ExplicitEuler, StateUpdate

# Modules that make a row of a row.
ROW_WISE = (nn.Linear, Linear, nn.LayerNorm)


def full_graph_inference(
    model: nn.Module,
    x: Float[Tensor, "N C"],
    edge_index: Tensor | Graph | None = None,
    edge_weight: Tensor | None = None,
    *,
    block_size: int = 1 << 14,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Tensor:
    r"""What ``model(x, edge_index, edge_weight)`` returns in evaluation, in bounded memory and on any device.

    Nothing is sampled, since an O(N) coupling needs nothing: its product S v goes through sums over the senders (KᵀV,
    Σk, Σv and their count), a few numbers whatever N is. One pass over blocks of rows adds them up, another reads them,
    so the numbers are those of one forward pass up to rounding. Queries, keys and whatever linear layers need in
    between exist for one block; states lie where ``x`` is, a few of [N, channels] at a time, and so does the graph,
    whose sparse product is taken there. ``x`` may be memory-mapped.

    The model is neither changed nor moved: a copy of it runs. A diffusivity whose coupling has no such sums (pairwise
    scores, sequences, the Frobenius norm) runs as it always does, on all rows where ``x`` is.

    Args:
        model: any model of this library, or one made of its layers, called as ``model(x, graph)``.
        x, edge_index, edge_weight: one graph, as the model takes it. Passing a ``Graph`` keeps what was derived from it
            (self-loops, compressed forms) for the next call.
        block_size: rows that are on the device at a time.
        device: where blocks are computed; by default where ``x`` is.
        progress: show a bar of the blocks.

    Returns:
        The logits [N, channels], where ``x`` is.

    Raises:
        TypeError, ValueError: the input does not fit the model, or is a batch of several graphs.

    Examples:
        >>> model = DIFFormer(4, 16, 3).eval()
        >>> out = full_graph_inference(model, x, edge_index, block_size=2, progress=False)  # two rows at a time
        >>> torch.allclose(out, model(x, edge_index), atol=1e-5)
        True
    """
    check_kind(model, "model", nn.Module, "a model called as model(x, graph)")
    check_state(x)
    check_counts(block_size=block_size)
    check_flags(progress=progress)
    graph = Graph.coerce(x, edge_index, edge_weight)
    if not graph.is_single:
        raise ValueError(
            f"full_graph_inference takes one large graph; got a batch of {graph.num_graphs}. "
            f"Call the model on batches of such a size that they fit."
        )
    with torch.no_grad(), tqdm(disable=not progress, unit="block", leave=False) as bar:
        blocks = Blocks(block_size, as_device(x.device if device is None else device), bar)
        runner = deepcopy(model).to(x.device).eval()
        blocks.take_over(runner)
        # Each of these once, as a rule: a pass of a row-wise module, two of a coupling.
        passes = sum(isinstance(m, _RowWise) + 2 * isinstance(m, _Blockwise) for m in runner.modules())
        bar.reset(total=passes * -(-x.size(0) // block_size))
        logits: Tensor = runner(x, graph)
    return logits


class Blocks:
    """Rows a block at a time: from where they are to the device, and back."""

    def __init__(self, size: int, device: torch.device, bar: tqdm) -> None:
        self.size, self.device, self.bar = size, device, bar

    def take_over(self, module: nn.Module) -> None:
        """Let the modules within ``module`` that make a row of a row, a coupling of rows, or a step run by blocks."""
        for name, child in module.named_children():
            if isinstance(child, ROW_WISE):
                setattr(module, name, _RowWise(child.to(self.device), self))
            elif type(child) is ExplicitEuler:
                setattr(module, name, _BlockwiseStep(child, self))
            elif not isinstance(child, Diffusivity) or child.depends_on == "parts":
                self.take_over(child)
            elif child.depends_on == "rows":
                setattr(module, name, _Blockwise(child, self))

    def each(self, function: Callable[..., Any], *tensors: Tensor) -> list[Any]:
        """What the function returns for every block of rows."""
        return [self.call(function, rows, tensors) for rows in self.announced(tensors[0].size(0))]

    def joined(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """The rows that the function returns for every block, where the tensors are."""
        self.announced(tensors[0].size(0))
        return self.filled(lambda rows: self.call(function, rows, tensors), tensors[0])

    def filled(self, make: Callable[[slice], Tensor], like: Tensor) -> Tensor:
        """The rows that are made for every block, where ``like`` is."""
        first, *others = self.slices(like.size(0))
        part = make(first)
        out = torch.empty(like.size(0), *part.shape[1:], dtype=part.dtype, device=like.device)
        out[first] = part
        for rows in others:
            out[rows] = make(rows)
        return out

    def slices(self, num_rows: int) -> list[slice]:
        """The blocks of so many rows, one of none where there are none."""
        return [slice(first, min(first + self.size, num_rows)) for first in range(0, max(num_rows, 1), self.size)]

    def announced(self, num_rows: int) -> list[slice]:
        """The same; the bar makes room for them."""
        rows = self.slices(num_rows)
        self.bar.total = max(self.bar.total, self.bar.n + len(rows))
        return rows

    def call(self, function: Callable[..., Any], rows: slice, tensors: tuple[Tensor, ...]) -> Any:
        """The function of these rows, on the device."""
        result = function(*(t[rows].to(self.device) for t in tensors))
        self.bar.update()
        return result


class _RowWise(nn.Module):
    """A row-wise module on the device, called with all rows."""

    def __init__(self, module: nn.Module, blocks: Blocks) -> None:
        super().__init__()
        self.module, self.blocks = module, blocks

    def forward(self, x: Tensor) -> Tensor:
        if x.device != self.blocks.device:
            return self.blocks.joined(self.module, x)
        self.blocks.bar.update(len(self.blocks.announced(x.size(0))))
        out: Tensor = self.module(x)  # all rows: there, it needs no room beside its result
        return out


class _Blockwise(Diffusivity):
    """A diffusivity that reads single rows: where its coupling has sums, it is made for a block of rows at a time."""

    depends_on = "rows"

    def __init__(self, diffusivity: Diffusivity, blocks: Blocks) -> None:
        super().__init__()
        self.diffusivity, self.blocks = diffusivity, blocks
        self.heads = diffusivity.heads

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        centre: list[Tensor] = []
        example = self.diffusivity.to(x.device).couple(x[:1], RowBlock(x[:1], centre))
        if not isinstance(example, PooledCoupling):
            return self.diffusivity.couple(x, graph)
        on_device = self.diffusivity.to(self.blocks.device)
        return BlockwiseCoupling(lambda rows: on_device.couple(rows, RowBlock(rows, centre)), example, x, self.blocks)


class RowBlock(Graph):
    """Some rows of a graph without edges; blocks that share ``centre`` measure distances from one point."""

    def __init__(self, rows: Tensor, centre: list[Tensor]) -> None:
        super().__init__(rows.size(0))
        self._centre = centre

    def centre(self, x: Tensor) -> Tensor:
        # A row, for the mean of all rows would take a pass over the blocks of its own.
        if not self._centre:
            self._centre.append(x[:1].detach())
        return self._centre[0].to(x.device)


class BlockwiseCoupling(Coupling):
    """S v in two passes over blocks of rows, one that adds up what the other reads."""

    def __init__(
        self, couple: Callable[[Tensor], Any], example: PooledCoupling, x: Float[Tensor, "N C"], blocks: Blocks
    ) -> None:
        super().__init__(
            x.size(0),
            example.heads,
            torch.empty(0, dtype=example.dtype, device=x.device),
            symmetric=example.symmetric,
            row_stochastic=example.row_stochastic,
            nonnegative=example.nonnegative,
            positive_semidefinite=example.positive_semidefinite,
        )
        self.couple, self.x, self.blocks = couple, x, blocks

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.blocks.filled(self.rows_of(v), self.x)

    def rows_of(self, v: Float[Tensor, "N H D"]) -> Callable[[slice], Tensor]:
        """What gives the rows of S v in a block: the sums are taken here."""
        sums = merged(self.blocks.each(lambda x, values: self.couple(x).pool(values), self.x, v))
        self.blocks.announced(v.size(0))

        def read(x: Tensor, values: Tensor) -> Tensor:
            return self.couple(x).read(sums, values)

        return lambda rows: self.blocks.call(read, rows, (self.x, v)).to(self.x.device)

    def _transpose(self) -> Coupling:
        raise NotImplementedError(
            "a coupling by blocks of rows has no transpose unless it is symmetric; ask the model itself, "
            "model(x, graph, return_coupling=True), on a graph that fits into memory."
        )

    def diagonal(self) -> Float[Tensor, "N heads"]:
        if self.row_stochastic:  # it is divided by a sum over all nodes
            return super().diagonal()
        return self.blocks.joined(lambda x: self.couple(x).diagonal(), self.x)


class _BlockwiseStep(StateUpdate):
    """An explicit step by blocks of rows: no term of it is written for all rows but products that need all of them."""

    def __init__(self, update: ExplicitEuler, blocks: Blocks) -> None:
        super().__init__()
        self.update, self.blocks, self.beta = update, blocks, update.beta

    def step(self, x: Tensor, coupling: Coupling, values: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        values = x if values is None else values
        moved = _rows_of(coupling, values.expand(-1, max(values.size(1), coupling.heads), -1))
        degree = coupling.degree() if self.update.form == "conservative" else None

        def step(rows: slice) -> Tensor:
            known = _KnownRows(coupling, moved(rows), None if degree is None else degree[rows])
            return self.update.step(x[rows], known, values[rows], None if source is None else source[rows])

        return self.blocks.filled(step, x)


def _rows_of(coupling: Coupling, v: Float[Tensor, "N H D"]) -> Callable[[slice], Tensor]:
    """What gives the rows of S v in a block."""
    if isinstance(coupling, SumCoupling):
        parts = [_rows_of(term, v) for term in coupling.terms]
        return lambda rows: reduce(add, [part(rows) for part in parts])
    if isinstance(coupling, ScaledCoupling):
        part = _rows_of(coupling.coupling, v)
        return lambda rows: coupling._by_head(part(rows), 1)
    if isinstance(coupling, BlockwiseCoupling):
        return coupling.rows_of(v)
    whole = coupling.product(v)
    return lambda rows: whole[rows]


class _KnownRows(Coupling):
    """Some rows of a coupling, of which the products and the sums are known."""

    def __init__(self, coupling: Coupling, moved: Float[Tensor, "N H D"], degree: Tensor | None) -> None:
        super().__init__(moved.size(0), coupling.heads, moved)
        self.moved, self._degree = moved, degree

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.moved

    def degree(self) -> Float[Tensor, "N heads"]:
        return super().degree() if self._degree is None else self._degree

    def _transpose(self) -> Coupling:
        raise NotImplementedError("some rows of a coupling have no transpose; ask the coupling itself.")
