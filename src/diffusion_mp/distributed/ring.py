"""Couplings of all pairs over several ranks: blocks of rows travel round the ring of the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from diffusion_mp.couplings import Coupling, DistanceCoupling, PairwiseCoupling
from diffusion_mp.couplings.base import TransposedCoupling
from diffusion_mp.couplings.pairwise import (
    TILE_ENTRIES,
    features_of_squares,
    squared_distances,
)
from diffusion_mp.distributed.couplings import OverRanks
from diffusion_mp.distributed.parallel import all_reduce, all_to_all
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.kernels import pairwise
from diffusion_mp.runtime.cache import cached_property
from diffusion_mp.runtime.precision import accumulating

Part = Callable[..., Tensor]
"""From the tensors that stay here and the tensors of one rank to that rank's contribution to a sum."""


class Ring:
    """The ranks of a group in a circle: each gives the rows that it has to the next and takes those of the last.

    Args:
        num_nodes: number of nodes of the whole graph.
        group: the processes.
    """

    def __init__(self, num_nodes: int, group: ProcessGroup | None) -> None:
        self.group = group
        self.ranks = distributed.get_world_size(group)
        #: Rows of the largest part; all blocks are padded to it, since kernels take as many senders as receivers.
        self.block = math.ceil(num_nodes / self.ranks)
        rank = distributed.get_rank(group)
        self._sent = [0] * self.ranks
        self._sent[(rank + 1) % self.ranks] = self.block
        self._received = [0] * self.ranks
        self._received[(rank - 1) % self.ranks] = self.block

    def padded(
        self, x: Float[Tensor, " N *shape"], fill: Float[Tensor, " one *shape"]
    ) -> Float[Tensor, " block *shape"]:
        """Return the rows of this rank as a block, with copies of the row ``fill`` for what is missing."""
        missing = self.block - len(x)
        return torch.cat([x, fill.expand(missing, *x.shape[1:])]) if missing else x

    def passed(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Return the blocks of the rank before this one, which gets the blocks of the one before it."""
        counts = (self._sent, self._received)
        return [all_to_all(block, *counts, self.group) for block in blocks]

    def sum(
        self, part: Part, here: Sequence[Tensor], blocks: Sequence[Tensor]
    ) -> Tensor:
        """Return Σ_r part(here, blocks of rank r); once differentiable, in the memory of a few blocks.

        Args:
            part: the contribution of one rank, differentiable and the same function on every rank.
            here: the tensors of this rank that do not travel.
            blocks: the tensors of this rank that travel, with ``block`` rows.
        """
        return _RingSum.apply(self, part, len(here), *here, *blocks)


class _RingSum(torch.autograd.Function):
    """The sum of a ring. The blocks travel a second time in the backward pass, together with their gradients."""

    @staticmethod
    def forward(
        ctx: Any, ring: Ring, part: Part, num_here: int, *tensors: Tensor
    ) -> Tensor:
        ctx.ring = ring
        ctx.part = part
        ctx.num_here = num_here
        ctx.save_for_backward(*tensors)
        here = tensors[:num_here]
        blocks = list(tensors[num_here:])
        total = part(*here, *blocks)
        for _ in range(ring.ranks - 1):
            blocks = ring.passed(blocks)
            total = total + part(*here, *blocks)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        here = ctx.saved_tensors[: ctx.num_here]
        blocks = list(ctx.saved_tensors[ctx.num_here :])
        # Not the levels of rows, nor a column of ones.
        needed = ctx.needs_input_grad[3:]
        of_here = [torch.zeros_like(tensor) for tensor in here]
        of_blocks = [torch.zeros_like(tensor) for tensor in blocks]
        for _ in range(ctx.ring.ranks):
            together = zip((*here, *blocks), needed, strict=True)
            inputs = [
                tensor.detach().requires_grad_(needs) for tensor, needs in together
            ]
            with torch.enable_grad():
                ctx.part(*inputs).backward(grad)
            for total, tensor in zip(of_here + of_blocks, inputs, strict=True):
                if tensor.grad is not None:
                    total += tensor.grad
            # After as many steps as there are ranks, the gradients are where their blocks came from.
            passed = ctx.ring.passed(blocks + of_blocks)
            blocks, of_blocks = passed[: len(blocks)], passed[len(blocks) :]
        return None, None, None, *of_here, *of_blocks


class RingCoupling(OverRanks):
    """Attention to all nodes of all ranks: O(N²) time and memory of a few blocks, divided by the number of ranks.

    With the scores f(q_i·k_j) of `PairwiseCoupling`, a product is a sum over ranks, Σ_r Σ_{j of r} f(q_i·k_j) v_j,
    whose keys and values travel. Rows are normalised with a level l_i near log Σ_j f(q_i·k_j),

        s_ij = f(q_i·k_j) e^{−l_i} / Σ_m f(q_i·k_m) e^{−l_i}

    so that no exponential overflows. l_i cancels, and needs no gradient.

    Args:
        coupling: the coupling among the nodes of this rank, with ``loops``.
        ring: the ranks.
    """

    def __init__(self, coupling: PairwiseCoupling, ring: Ring) -> None:
        # Precision depends on the state, but the tensors of all ranks have to be of one dtype.
        double = torch.tensor(coupling.dtype == torch.float64, device=coupling.device)
        if all_reduce(double.float(), ring.group) > 0:
            coupling = coupling.double()
        super().__init__(coupling.num_nodes, coupling)
        self.coupling: PairwiseCoupling = coupling
        self.ring = ring

    def _features(self) -> tuple[Tensor, Tensor]:
        """Return the features of queries and keys as blocks."""
        # A copy of a row has scores that some row has anyway, and so leaves their range as it is.
        query, key = (
            self.ring.padded(rows, rows[-1:])
            for rows in (self.coupling.query, self.coupling.key)
        )
        return query, key

    @cached_property
    def _level(self) -> Float[Tensor, "block H"]:
        """log Σ_j f(q_i·k_j) of every row of the block, where rows of padding count too."""
        with torch.no_grad():
            query, key = self._features()
            score = self.coupling.score
            level = pairwise.pairwise_logsumexp(query, key, score=score)
            for _ in range(self.ring.ranks - 1):
                (key,) = self.ring.passed([key])
                part = pairwise.pairwise_logsumexp(query, key, score=score)
                level = torch.logaddexp(level, part)
        return level

    def _weighted(self, v: HeadState, *, transpose: bool = False) -> HeadState:
        """Return Σ_j w_ij v_j over all ranks, or Σ_j w_ji v_j, with w_ij = f(q_i·k_j) e^{−l_i}.

        Without a division of rows by their sums, l is zero.
        """
        # Padding sends nothing.
        values = self.ring.padded(v, torch.zeros_like(v[-1:]))
        query, key = self._features()
        shifts = [-self._level] if self.row_stochastic else []
        product = partial(pairwise.pairwise_product, score=self.coupling.score)

        def received(q: Tensor, *sent: Tensor) -> Tensor:
            return product(q, *sent, *shifts)

        def returned(k: Tensor, q: Tensor, v: Tensor, *shifts: Tensor) -> Tensor:
            return product(k, q, v, None, *shifts)

        if transpose:
            # The shift of a row travels with the row.
            out = self.ring.sum(returned, [key], [query, values, *shifts])
        else:
            out = self.ring.sum(received, [query], [key, values])
        return out[: len(v)]

    def _with_sums(self, v: HeadState) -> tuple[HeadState, Float[Tensor, "N H one"]]:
        """Return Σ_j w_ij v_j and the row sums Σ_j w_ij."""
        moved = self._weighted(pad(v, (0, 1), value=1.0))
        return moved[:, :, :-1], moved[:, :, -1:]

    def _product(self, v: HeadState, *, transpose: bool = False) -> HeadState:
        (values,), dtype = accumulating(v)
        if self.heads == 1:
            # The heads of the values are channels of the only head of S.
            values = values.flatten(1).unsqueeze(1)
        if not self.row_stochastic:
            out = self._weighted(values, transpose=transpose)
        elif transpose:
            _, sums = self._with_sums(values[:, :, :0])
            out = self._weighted(values / sums, transpose=True)
        else:
            moved, sums = self._with_sums(values)
            out = moved / sums
        return out.view_as(v).to(dtype)

    def both(
        self, v: HeadState, w: Float[Tensor, "N H C"]
    ) -> tuple[HeadState, Float[Tensor, "N H C"]]:
        if not self.row_stochastic:
            return super().both(v, w)
        # One pass for the row sums and the product.
        moved, sums = self._with_sums(v)
        return moved / sums, self._weighted(w / sums, transpose=True)

    def _transpose(self) -> Coupling:  # type: ignore[override]
        return TransposedCoupling(self)


class RingDistances(OverRanks):
    """Any function f of the squared distances to all nodes of all ranks: O(N²) time, divided by the number of ranks.

    A product is a sum over ranks, Σ_r Σ_{j of r} f(‖q_i − k_j‖²) v_j, whose keys and values travel.

    Args:
        coupling: the coupling among the nodes of this rank.
        ring: the ranks.
        first: number of the first node of this rank in the whole graph.
        centre: the point from which all ranks measure.
    """

    def __init__(
        self,
        coupling: DistanceCoupling,
        ring: Ring,
        first: int,
        centre: Float[Tensor, "one H F"],
    ) -> None:
        # The backward pass of a ring knows the tensors that it was given, and not what f holds.
        module = getattr(coupling.function, "__self__", coupling.function)
        if isinstance(module, nn.Module) and any(
            parameter.requires_grad for parameter in module.parameters()
        ):
            raise TypeError(
                f"a function of distances with learned parameters can not be taken over several ranks; got {module!r}. "
                f"Freeze them with requires_grad_(False), or use one process."
            )
        super().__init__(coupling.num_nodes, coupling)
        self.coupling: DistanceCoupling = coupling
        self.ring = ring
        self.first = first
        self.centre = centre

    def _product(self, v: HeadState) -> HeadState:
        coupling = self.coupling
        (_, values), dtype = accumulating(coupling.query, v)
        query, key = (
            self.ring.padded(rows, rows[-1:])
            for rows in features_of_squares(
                coupling.query,
                None if coupling.mutual else coupling.key,
                None,
                self.centre,
            )
        )
        nodes = torch.arange(self.ring.block, device=v.device) + self.first
        # Padding sends nothing, and is no node.
        sent = self.ring.padded(values, torch.zeros_like(values[-1:]))
        nodes[self.num_nodes :] = -1
        step = max(1, TILE_ENTRIES // max(1, self.heads * self.ring.block))

        def moved(
            query: Tensor, receivers: Tensor, key: Tensor, v: Tensor, senders: Tensor
        ) -> Tensor:
            squares = squared_distances(query, key, v.dtype)
            if coupling.mutual:
                # The distance of a node to itself is exactly zero.
                squares = squares.masked_fill(receivers[:, None] == senders, 0.0)
            entries = coupling.applied(squares)
            return (entries @ v.transpose(0, 1)).transpose(0, 1)

        def part(query: Tensor, receivers: Tensor, *block: Tensor) -> Tensor:
            tiles = zip(query.split(step), receivers.split(step), strict=True)
            rows = [
                checkpoint(moved, *tile, *block, use_reentrant=False) for tile in tiles
            ]
            return torch.cat(rows)

        out = self.ring.sum(part, [query, nodes], [key, sent, nodes])
        return out[: len(v)].to(dtype)

    def _transpose(self) -> Coupling:  # type: ignore[override]
        turned = cast("DistanceCoupling", self.coupling._transpose())
        return RingDistances(turned, self.ring, self.first, self.centre)
