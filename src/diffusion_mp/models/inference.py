"""``full_graph_inference``: exact inference on a large graph, with a block of rows at a time on a device."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial, reduce
from operator import add
from typing import Any, NoReturn, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.nn.dense import Linear
from tqdm import tqdm

from diffusion_mp.couplings import Coupling, PooledCoupling, ScaledCoupling, SumCoupling, merged
from diffusion_mp.couplings.base import PROMISES, Promise
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.energies import Penalty
from diffusion_mp.errors import as_device, check_counts, check_flags, check_kind
from diffusion_mp.graph import Graph
from diffusion_mp.graph.sparse_rows import select_rows
from diffusion_mp.layers.certified_block import CertifiedBlock
from diffusion_mp.layers.features import check_input
from diffusion_mp.models.base import Edges
from diffusion_mp.progress import progress_bar, show_progress
from diffusion_mp.updates import ExplicitEuler, StateUpdate


def full_graph_inference(
    model: nn.Module,
    x: Float[Tensor, "N C"],
    edge_index: Edges = None,
    edge_weight: Tensor | None = None,
    *,
    block_size: int = 1 << 14,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Tensor:
    r"""Return ``model(x, edge_index, edge_weight)`` in evaluation mode, in bounded memory and on any device.

    The product S v of an O(N) coupling needs only sums over the senders (KᵀV, Σk, Σv and their count). One pass over
    blocks of rows accumulates them and another reads them, so the result is that of a forward pass up to rounding. A
    few states [N, channels] and the graph stay on the device of ``x``, where sparse products are computed, and so do
    diffusivities without such sums (pairwise scores, sequences, the Frobenius norm). ``x`` may be memory-mapped.

    Args:
        model: any model of this library, or one made of its layers, called as ``model(x, graph)``; a copy runs.
        x, edge_index, edge_weight: one graph, as the model takes it; x may be sparse where the model takes sparse ones.
        block_size, device, progress: rows computed at a time, and where (by default as ``x``); see `show_progress`.

    Examples:
        >>> model = DIFFormer(4, 16, 3).eval()
        >>> out = full_graph_inference(model, x, edge_index, block_size=2)  # two rows at a time
        >>> torch.allclose(out, model(x, edge_index), atol=1e-5)
        True
    """
    check_kind(model, "model", nn.Module, "a model called as model(x, graph)")
    check_input(x, channels=x.size(1) if isinstance(x, Tensor) and x.dim() == 2 else 0, module=None)
    check_counts(block_size=block_size)
    check_flags(progress=progress)
    graph = Graph.coerce(x, edge_index, edge_weight)
    if not graph.is_single:
        came = f"got a batch of {graph.num_graphs}"
        raise ValueError(
            f"full_graph_inference takes one large graph; {came}. Call the model on batches that fit."
        )
    with torch.no_grad(), show_progress(progress):
        blocks = Blocks(block_size, as_device(x.device if device is None else device))
        runner = deepcopy(model).to(x.device).eval()
        blocks.take_over(runner)
        # Usually one pass for each row-wise module and two for each coupling.
        passes = sum(
            isinstance(m, _RowWise) + 2 * isinstance(m, _Blockwise) for m in runner.modules()
        )
        with progress_bar("inference", "block", passes * -(-x.size(0) // block_size)) as blocks.bar:
            return runner(x, graph)


class Blocks:
    """Move blocks of rows to the device and results back to the device of the input."""

    bar = tqdm(total=0, disable=True)

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.device = device

    def take_over(self, module: nn.Module) -> None:
        """Replace the row-wise modules, diffusivities and steps within ``module`` by versions that run by blocks."""
        if isinstance(module, CertifiedBlock) and not module.runs_by_rows:
            raise NotImplementedError(
                "the steps of a CertifiedBlock are not computed by blocks; call the model itself."
            )
        for name, child in module.named_children():
            if isinstance(
                child, (nn.Linear, Linear, nn.LayerNorm)
            ):  # they act on every row separately
                setattr(module, name, _RowWise(child.to(self.device), self))
            elif type(child) is ExplicitEuler:
                setattr(module, name, _BlockwiseStep(child, self))
            elif not isinstance(child, Diffusivity) or child.depends_on == "parts":
                self.take_over(child)
            elif child.depends_on == "rows":
                setattr(module, name, _Blockwise(child, self))

    def slices(self, num_rows: int) -> list[slice]:
        """Return the blocks of ``num_rows`` rows, one empty block for no rows."""
        return [slice(first, first + self.size) for first in range(0, max(num_rows, 1), self.size)]

    def announced(self, num_rows: int) -> list[slice]:
        """Return the blocks and extend the progress bar by them."""
        rows = self.slices(num_rows)
        self.bar.total = max(self.bar.total, self.bar.n + len(rows))
        return rows

    def call(self, function: Callable[..., Any], rows: slice, *tensors: Tensor) -> Any:
        result = function(*(_block(t, rows).to(self.device) for t in tensors))
        self.bar.update()
        return result

    def joined(self, make: Callable[[slice], Tensor], like: Tensor) -> Tensor:
        """Return the concatenated results of ``make`` for every slice of rows, on the device of ``like``."""
        first, *others = self.slices(like.size(0))
        part = make(first)
        out = torch.empty(like.size(0), *part.shape[1:], dtype=part.dtype, device=like.device)
        out[first] = part
        for rows in others:
            out[rows] = make(rows)
        return out

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.announced(x.size(0))
        return self.joined(lambda rows: self.call(function, rows, x), x)


def _block(x: Tensor, rows: slice) -> Tensor:
    if x.layout is torch.strided:
        return x[rows]
    return select_rows(x, torch.arange(*rows.indices(x.size(0)), device=x.device))


class _RowWise(nn.Module):
    """A row-wise module on the device that is called with all rows."""

    def __init__(self, module: nn.Module, blocks: Blocks) -> None:
        super().__init__()
        self.module = module
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        if x.device != self.blocks.device:
            return self.blocks.each(self.module, x)
        self.blocks.bar.update(len(self.blocks.announced(x.size(0))))
        return self.module(x)  # all rows: only the result needs memory there


class _Blockwise(Diffusivity):
    """A diffusivity of single rows, evaluated by blocks where its coupling is a `PooledCoupling`."""

    depends_on = "rows"

    def __init__(self, diffusivity: Diffusivity, blocks: Blocks) -> None:
        super().__init__()
        self.diffusivity = diffusivity
        self.blocks = blocks
        self.heads = diffusivity.heads

    @property
    def penalty(self) -> Penalty | None:  # type: ignore[override]
        """δ of the diffusivity, a module of which is no second submodule."""
        return self.diffusivity.penalty

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        centre: list[Tensor] = []
        example = self.diffusivity.to(x.device).couple(x[:1], RowBlock(x[:1], centre))
        if not isinstance(example, PooledCoupling):
            return self.diffusivity.couple(x, graph)
        on_device = self.diffusivity.to(self.blocks.device)
        return BlockwiseCoupling(
            lambda rows: on_device.couple(rows, RowBlock(rows, centre)), example, x, self.blocks
        )


class RowBlock(Graph):
    """Rows of a graph without edges; blocks that share ``centre`` measure distances from one point."""

    def __init__(self, rows: Tensor, centre: list[Tensor]) -> None:
        super().__init__(rows.size(0))
        self._centre = centre

    def centre(self, x: Tensor) -> Tensor:
        # The first row: the mean of all rows would take another pass over the blocks.
        if not self._centre:
            self._centre.append(x[:1].detach())
        return self._centre[0].to(x.device)


class PartialCoupling(Coupling):
    """Base of couplings that have some of the rows at a time: products, with the promises of ``like``."""

    no_transpose = "some rows of a coupling have no transpose; ask the coupling itself."

    def __init__(self, num_nodes: int, like: Coupling, symmetric: Promise) -> None:
        promises: dict[str, Any] = {name: partial(getattr, like, name) for name in PROMISES} | {
            "symmetric": symmetric
        }
        super().__init__(
            num_nodes, like.heads, torch.empty(0, dtype=like.dtype, device=like.device), **promises
        )

    def _transpose(self) -> NoReturn:
        raise NotImplementedError(self.no_transpose)


class BlockwiseCoupling(PartialCoupling):
    """A coupling with products in two passes over blocks of rows, one that accumulates sums and one that reads them."""

    no_transpose = (
        "a coupling by blocks of rows has no transpose unless it is symmetric; ask the model itself, "
        "model(x, graph, return_coupling=True), on a graph that fits into memory."
    )

    def __init__(
        self,
        couple: Callable[[Tensor], Any],
        example: PooledCoupling,
        x: Float[Tensor, "N C"],
        blocks: Blocks,
    ) -> None:
        super().__init__(x.size(0), example, example.symmetric)
        self.couple = couple
        self.x = x
        self.blocks = blocks

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.blocks.joined(self.rows_of(v), self.x)

    def rows_of(self, v: Float[Tensor, "N H D"]) -> Callable[[slice], Tensor]:
        """Accumulate the sums, and return a function of a slice that computes these rows of S v."""

        def read(x: Tensor, values: Tensor) -> Tensor:
            return self.couple(x).read(sums, values)

        rows = self.blocks.announced(v.size(0))
        sums = merged(
            [
                self.blocks.call(lambda x, v: self.couple(x).pool(v), part, self.x, v)
                for part in rows
            ]
        )
        self.blocks.announced(v.size(0))
        return lambda part: self.blocks.call(read, part, self.x, v).to(self.x.device)

    def diagonal(self) -> Float[Tensor, "N heads"]:
        if self.row_stochastic:  # divided by a sum over all nodes
            return super().diagonal()
        return self.blocks.each(lambda x: self.couple(x).diagonal(), self.x)


class _BlockwiseStep(StateUpdate):
    """An explicit step by blocks of rows, which stores no term for all rows except products that need all of them."""

    def __init__(self, update: ExplicitEuler, blocks: Blocks) -> None:
        super().__init__()
        self.update = update
        self.blocks = blocks
        self.beta = update.beta

    def step(
        self,
        x: Tensor,
        coupling: Coupling,
        values: Tensor | None = None,
        source: Tensor | None = None,
    ) -> Tensor:
        values = x if values is None else values
        moved = _rows_of(coupling, values.expand(-1, max(values.size(1), coupling.heads), -1))
        if self.update.form == "conservative":
            degree = coupling.degree()
        else:
            degree = None

        def step(rows: slice) -> Tensor:
            known = _KnownRows(coupling, moved(rows), None if degree is None else degree[rows])
            return self.update.step(
                x[rows], known, values[rows], None if source is None else source[rows]
            )

        return self.blocks.joined(step, x)


def _rows_of(coupling: Coupling, v: Float[Tensor, "N H D"]) -> Callable[[slice], Tensor]:
    if isinstance(coupling, SumCoupling):
        parts = [_rows_of(term, v) for term in coupling.terms]
        return lambda rows: reduce(add, [part(rows) for part in parts])
    if isinstance(coupling, ScaledCoupling):
        part = _rows_of(coupling.coupling, v)
        return lambda rows: coupling._by_head(part(rows), 1)
    if isinstance(coupling, BlockwiseCoupling):
        return coupling.rows_of(v)
    whole = coupling.matmul(v)
    return lambda rows: whole[rows]


class _KnownRows(PartialCoupling):
    """Some rows of a coupling, with given products and, for conservative steps, given row sums."""

    def __init__(
        self, coupling: Coupling, moved: Float[Tensor, "N H D"], sums: Tensor | None
    ) -> None:
        super().__init__(moved.size(0), coupling, symmetric=False)
        self.moved = moved
        self.sums = sums

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.moved

    def degree(self) -> Float[Tensor, "N heads"]:
        return cast("Tensor", self.sums)
