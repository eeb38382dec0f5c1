"""``full_graph_inference``: exact inference on a large graph that computes one block of rows at a time on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense import Linear
from tqdm import tqdm

from diffusion_mp.checks import Count, as_device, checked
from diffusion_mp.couplings import Coupling, PooledCoupling, merged
from diffusion_mp.couplings.base import of_coupling
from diffusion_mp.couplings.shapes import State
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.energies import Constraint, EnergyTerm, Penalty
from diffusion_mp.energies.pairs import HeadState, Scalar
from diffusion_mp.energies.terms import Majorant, SharedTerm
from diffusion_mp.graph import Graph
from diffusion_mp.graph.sparse_rows import select_rows
from diffusion_mp.layers.certified_block import Edges, TermModule
from diffusion_mp.layers.features import check_input
from diffusion_mp.runtime.progress import progress_bar, show_progress


@checked
def full_graph_inference(
    model: nn.Module,
    x: State,
    edge_index: Edges = None,
    edge_weight: Tensor | None = None,
    *,
    edge_attr: Tensor | None = None,
    block_size: Count = 1 << 14,
    device: torch.device | str | None = None,
    progress: bool = False,
    method: Literal["forward", "energies", "certificate"] = "forward",
) -> Any:
    r"""Return ``model(x, edge_index, edge_weight)`` in evaluation mode, in bounded memory and on any device.

    The product S v of an O(N) coupling needs only sums over the senders (KᵀV, Σk, Σv and their count). One pass over
    blocks of rows accumulates the sums and another pass reads them, so the result equals a forward pass up to rounding.

    A few states [N, channels] and the graph stay on the device of ``x``, which also computes sparse products, the steps
    of certified blocks, and diffusivities without such sums (pairwise scores, sequences, the Frobenius norm). ``x`` may
    be memory-mapped.

    Args:
        model: Any model of this library, or one made of its layers, called as ``model(x, graph)``. A copy of it runs.
        x: Features of the nodes of one graph; sparse if the model takes sparse features.
        edge_index: Observed edges as the model takes them, or a ``Graph``.
        edge_weight: Weights of the edges; 1 by default.
        edge_attr: Features of the edges, for models that read them.
        block_size: Number of rows computed at a time.
        device: Device on which blocks are computed; by default the device of ``x``.
        progress: Show a progress bar (see `show_progress`).
        method: What to return instead of the output: ``"energies"`` or ``"certificate"`` of a certified model.

    Shapes:
        x: [N, in_channels].
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        edge_attr: [E, edge_dim].
        output: The shape of ``model(x, edge_index, edge_weight)``.

    Raises:
        ValueError: ``x`` is a batch of several graphs, or the model has no such method.

    Examples:
        >>> model = DIFFormer(4, 16, 3).eval()
        >>> out = full_graph_inference(model, x, edge_index, block_size=2)  # two rows at a time
        >>> torch.allclose(out, model(x, edge_index), atol=1e-5)
        True
    """
    channels = x.size(1) if isinstance(x, Tensor) and x.dim() == 2 else 0
    check_input(x, channels=channels, module=None)
    if not hasattr(model, method):
        raise ValueError(
            f"method must be 'forward' for a model that is not certified; got {method!r}, which {type(model).__name__} "
            f"lacks. CertifiedDIFFormer and CertifiedTransformer have it."
        )
    graph = Graph.coerce(x, edge_index, edge_weight)
    if not graph.is_single:
        raise ValueError(
            f"full_graph_inference takes one large graph; got a batch of {graph.num_graphs}. Call the model on batches "
            f"that fit."
        )
    inputs = {} if edge_attr is None else {"edge_attr": edge_attr}
    with torch.no_grad(), show_progress(progress):
        device = x.device if device is None else as_device(device)
        blocks = Blocks(block_size, device)
        # A copy, whose modules are replaced: hooks and state dict of the caller's model stay as they are.
        runner = deepcopy(model).to(x.device).eval()
        blocks.take_over(runner)
        # Usually one pass for each row-wise module and two for each coupling.
        kinds = [type(part) for part in runner.modules()]
        passes = kinds.count(_RowWise) + 2 * kinds.count(_Blockwise)
        total = passes * math.ceil(x.size(0) / block_size)
        with progress_bar("inference", "block", total) as blocks.bar:
            # Not ``runner.forward``, which would skip the hooks of the model.
            compute = runner if method == "forward" else getattr(runner, method)
            return compute(x, graph, **inputs)


class Blocks:
    """Move blocks of rows to the device and results back to the device of the input."""

    bar = tqdm(total=0, disable=True)  # until full_graph_inference shows one

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.device = device

    def take_over(self, module: nn.Module) -> None:
        """Replace the parts of ``module`` that act on single rows, or that pool rows, by versions for blocks."""
        # A replaced module is not looked into; other modules are, part by part. A diffusivity that depends on edges
        # or on the whole graph stays, and computes with all rows at once.
        for name, child in module.named_children():
            if isinstance(child, TermModule) and child.depends_on != "couplings":
                setattr(module, name, _ByBlocks(child, self))
            elif isinstance(child, (nn.Linear, Linear, nn.LayerNorm)):
                setattr(module, name, _RowWise(child.to(self.device), self))
            elif isinstance(child, Diffusivity) and child.depends_on == "rows":
                setattr(module, name, _Blockwise(child, self))
            elif not isinstance(child, Diffusivity) or child.depends_on == "parts":
                self.take_over(child)

    def each(
        self, function: Callable[..., Any], *tensors: Tensor
    ) -> Iterator[tuple[slice, Any]]:
        """Yield the rows of every block (an empty one for none) and ``function(*blocks)``, computed on the device."""
        for rows in self.slices(tensors[0].size(0)):
            parts = [_block(tensor, rows).to(self.device) for tensor in tensors]
            yield rows, function(*parts)
            self.bar.update()

    def slices(self, count: int) -> Iterator[slice]:
        """Yield the rows of every block, an empty one for none."""
        for start in range(0, max(count, 1), self.size):
            yield slice(start, start + self.size)

    def joined(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return the concatenated results of :meth:`each`, on the device of the first tensor."""
        first = tensors[0]
        out: Tensor | None = None
        for rows, part in self.each(function, *tensors):
            # Written block by block: a list of all blocks and their concatenation would be two copies of the result.
            if out is None:
                shape = (first.size(0), *part.shape[1:])
                out = part.new_empty(shape, device=first.device)
            out[rows] = part
        return cast("Tensor", out)


def _block(x: Tensor, rows: slice) -> Tensor:
    if x.layout is torch.strided:
        return x[rows]
    return select_rows(x, torch.arange(*rows.indices(len(x)), device=x.device))


class _RowWise(nn.Module):
    """A row-wise module on the device that is called with all rows."""

    def __init__(self, module: nn.Module, blocks: Blocks) -> None:
        super().__init__()
        self.module = module
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks.joined(self.module, x)


class _ByBlocks(nn.Module):
    """A module that makes a term, which is computed by blocks if it depends on single rows."""

    def __init__(self, module: TermModule, blocks: Blocks) -> None:
        super().__init__()
        self.module = module
        self.blocks = blocks
        self.reads = module.reads

    def forward(self, source: Tensor, graph: Graph, **read: Any) -> EnergyTerm | None:
        term: EnergyTerm | None = self.module(source, graph, **read)
        if term is None or term.depends_on != "rows":
            return term
        return BlockwiseTerm(term, self.blocks)


class BlockwiseTerm(SharedTerm):
    """A term of single rows, one block of rows after the other, on the device of the state."""

    depends_on = "rows"

    def __init__(self, term: EnergyTerm, blocks: Blocks) -> None:
        self.term = term
        self.blocks = blocks
        self.quadratic = term.quadratic

    def _parts(
        self, z: HeadState
    ) -> Iterator[tuple[slice, EnergyTerm, HeadState, Graph]]:
        """Yield the rows of every block, with the term, the state and the graph of these rows."""
        for rows in self.blocks.slices(len(z)):
            some = z[rows]
            yield rows, self.term.block(rows), some, Graph(len(some))

    def value(self, z: HeadState, graph: Graph) -> Scalar:
        values = [term.value(some, part) for _, term, some, part in self._parts(z)]
        return torch.stack(values).sum()

    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant:
        half = torch.empty_like(z)
        damping = torch.empty_like(z[:, :, :1])
        for rows, term, some, part in self._parts(z):
            half[rows], damping[rows] = term.majorant(some, part, convex)
        return Majorant(half, damping)

    def flaw(self, constraint: Constraint) -> str | None:
        return self.term.flaw(constraint)

    def __repr__(self) -> str:
        return repr(self.term)


class _Blockwise(Diffusivity):
    """A diffusivity of single rows, evaluated by blocks if its coupling is a `PooledCoupling`."""

    depends_on = "rows"

    def __init__(self, diffusivity: Diffusivity, blocks: Blocks) -> None:
        super().__init__()
        self.diffusivity = diffusivity
        self.blocks = blocks
        self.heads = diffusivity.heads

    @property
    def penalty(self) -> Penalty | None:  # type: ignore[override]
        """The δ of the diffusivity; a property, since a module δ must not become a second submodule."""
        return self.diffusivity.penalty

    def couple(self, x: State, graph: Graph) -> Coupling:
        # Only a coupling says whether it can be pooled and what it promises: one of a single row is made to ask.
        centre: list[Tensor] = []
        example = self.diffusivity.to(x.device).couple(x[:1], RowBlock(x[:1], centre))
        if not isinstance(example, PooledCoupling):
            # Nothing can be pooled, so the coupling is computed with all rows at once.
            return self.diffusivity.couple(x, graph)
        # The module moves once, its input block by block.
        on_device = self.diffusivity.to(self.blocks.device)
        return BlockwiseCoupling(
            lambda rows: on_device.couple(rows, RowBlock(rows, centre)),
            example,
            x,
            self.blocks,
        )


class RowBlock(Graph):
    """Rows of a graph without edges. Blocks that share ``centre`` measure distances from one point."""

    def __init__(self, rows: Tensor, centre: list[Tensor]) -> None:
        super().__init__(rows.size(0))
        self._centre = centre

    def centre(self, x: Tensor) -> Tensor:
        # The first row: the mean of all rows would take another pass over the blocks.
        if not self._centre:
            self._centre.append(x[:1].detach())
        return self._centre[0].to(x.device)


class PartialCoupling(Coupling):
    """Base of couplings that hold some rows at a time. They have products, and the promises of ``coupling``."""

    no_transpose: str

    symmetric = of_coupling("symmetric")
    row_stochastic = of_coupling("row_stochastic")
    nonnegative = of_coupling("nonnegative")
    positive_semidefinite = of_coupling("positive_semidefinite")

    def __init__(self, num_nodes: int, coupling: Coupling) -> None:
        super().__init__(num_nodes, coupling.heads, coupling)
        self.coupling = coupling

    def _transpose(self) -> NoReturn:
        raise NotImplementedError(self.no_transpose)


class BlockwiseCoupling(PartialCoupling):
    """A coupling whose products take two passes over blocks of rows: one accumulates sums, one reads them."""

    no_transpose = (
        "a coupling by blocks of rows has no transpose unless it is symmetric; ask the model itself, "
        "model(x, graph, return_coupling=True), on a graph that fits into memory."
    )

    def __init__(
        self,
        couple: Callable[[Tensor], Any],
        example: PooledCoupling,
        x: State,
        blocks: Blocks,
    ) -> None:
        super().__init__(len(x), example)
        self.couple = couple
        self.x = x
        self.blocks = blocks

    def _product(self, v: HeadState) -> HeadState:
        # Every pass couples the rows of a block anew: keeping their features would take as much memory as all rows do.
        pooled = self.blocks.each(lambda x, v: self.couple(x).pool(v), self.x, v)
        # Sums over senders are small, whatever the number of nodes, so the sums of all blocks fit.
        sums = merged([part for _, part in pooled])
        return self.blocks.joined(lambda x, v: self.couple(x).read(sums, v), self.x, v)
