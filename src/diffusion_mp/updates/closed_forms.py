"""Inverse and exponential of a diagonal minus a product of features: exact, O(N F² + F³) a graph, any number of
derivatives (Theorem T3 of docs/certified.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.couplings.base import LowRankForm
from diffusion_mp.errors import ConvergenceError
from diffusion_mp.kernels.segments import Rows, buckets, gather, rows_of

# What a solution may leave of its right-hand side; beyond, rounding has more to say about it than the system.
LEFT_OVER = 1e-6


class LowRankInverse:
    r"""(diag(d) − S)⁻¹ for S = diag(e) + U Kᵀ, factorised once (Woodbury, 1950).

        A⁻¹ + A⁻¹U(I − KᵀA⁻¹U)⁻¹KᵀA⁻¹,   A = diag(d − e)

    Graphs of one size are factorised together; where a graph has no more nodes than there are features, its own matrix
    is smaller than KᵀA⁻¹U, and is factorised instead.

    Args:
        form: S.
        diagonal: d [N, H, 1], of one head or of those of the form, or a number.
    """

    def __init__(self, form: LowRankForm, diagonal: Tensor | float) -> None:
        self.form = form
        own = 0.0 if form.diagonal is None else form.diagonal.unsqueeze(2)
        self.diagonal: Tensor = diagonal * form.left.new_ones(*form.left.shape[:2], 1) - own
        self.blocks = [
            _Block.of(gather(self.diagonal, rows), gather(form.left, rows), gather(form.right, rows))
            for rows in _graphs(form)
        ]

    def __call__(self, b: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        """(diag(d) − S)⁻¹ b."""
        solved = iter(self.blocks)
        return _by_graph(self.form, lambda part: next(solved).apply(part), b)

    def solve(self, b: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        """The same, and looked at.

        Raises:
            ConvergenceError: the system is singular to working precision, or something in it is not finite.
        """
        x = self(b)
        with torch.no_grad():
            moved = _by_graph(
                self.form, lambda left, right, x: left @ (right.mT @ x), self.form.left, self.form.right, x
            )
            left_over, size = (self.diagonal * x - moved - b).norm(dim=0), b.norm(dim=0)
        if not bool((left_over <= LEFT_OVER * size).all()):  # NaN is not
            relative = torch.where(size > 0, left_over / size, left_over).max().item()
            raise ConvergenceError(
                f"a low-rank system is singular, nearly so, or holds NaN or infinity: the solution misses the "
                f"right-hand side by {relative:.3g} of it, expected up to {LEFT_OVER:g}. Raise the leak, or lower tau."
            )
        return x

    def inverse_diagonal(self) -> Float[Tensor, "N H"]:
        """The diagonal of (diag(d) − S)⁻¹."""
        solved = iter(self.blocks)
        return _by_graph(self.form, lambda _: next(solved).inverse_diagonal(), self.diagonal).squeeze(2)


class _Block(NamedTuple):
    """Graphs of one size: with R = |A|^-½ and s the sign of a, R (I − û k̂ᵀ)⁻¹ sR for û = sRU and k̂ = RK."""

    root: Tensor
    sign: Tensor
    left: Tensor
    right: Tensor
    factors: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, diagonal: Tensor, left: Tensor, right: Tensor) -> _Block:
        root, sign = diagonal.abs().rsqrt(), diagonal.detach().sign()
        left, right = sign * root * left, root * right
        nodes, features = right.shape[-2:]
        if nodes > features:
            left, right = _rebased(left, right)
        core = right.mT @ left if nodes > features else left @ right.mT
        lu, pivots, _ = torch.linalg.lu_factor_ex(_eye(core) - core)
        return cls(root, sign, left, right, (lu, pivots))

    def core_solve(self, b: Tensor) -> Tensor:
        return torch.linalg.lu_solve(*(factor.expand(*b.shape[:2], *factor.shape[2:]) for factor in self.factors), b)

    def apply(self, b: Tensor) -> Tensor:
        b = self.sign * self.root * b
        if self.right.size(-2) > self.right.size(-1):
            return self.root * (b + self.left @ self.core_solve(self.right.mT @ b))
        return self.root * self.core_solve(b)

    def inverse_diagonal(self) -> Tensor:
        if self.right.size(-2) > self.right.size(-1):
            kept = 1.0 + (self.left * self.core_solve(self.right.mT).mT).sum(-1, keepdim=True)
        else:
            kept = self.core_solve(_eye(self.factors[0])).diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        return self.sign * self.root.square() * kept


def low_rank_heat(
    form: LowRankForm, diagonal: Float[Tensor, " N #H one"], t: float, v: Float[Tensor, " N #H D"]
) -> Float[Tensor, "N H D"]:
    r"""exp(−t(diag(d) − U Kᵀ)) v for d of ones, and zeros where the row of U is zero: such a node never moves.

        e⁻ᵗ[v + U tφ₁(tG) Kᵀv],   G = KᵀU,   φ₁(X) = (e^X − 1)/X

    for d = 1. In general x moves by U [e^{-t} tφ₁(tG) Kᵀ(dv) + tφ₁(t(G − I)) Kᵀ((1 − d)v)], and both matrices are
    blocks of one exponential, in which nothing overflows.
    """

    def graphs(diagonal: Tensor, left: Tensor, right: Tensor, v: Tensor) -> Tensor:
        nodes, features = right.shape[-2:]
        if nodes <= features:
            return _exponential(t * (left @ right.mT - diagonal * _eye(left @ right.mT))) @ v
        left, right = _rebased(left, right)
        core = right.mT @ left
        eye, zero = _eye(core), torch.zeros_like(core)
        pooled, count = right.mT @ (diagonal * v), 2
        if bool((diagonal == 0).any()):
            pooled, count = torch.cat([pooled, right.mT @ (v - diagonal * v)], dim=-2), 3
        rows = [[core - eye, eye, eye], [zero, -eye, zero], [zero, zero, zero]]
        generator = torch.cat([torch.cat(blocks[:count], dim=-1) for blocks in rows[:count]], dim=-2)
        power = _exponential(t * generator)[..., :features, features:]
        return torch.exp(-t * diagonal) * v + left @ (power @ pooled)

    return _by_graph(form, graphs, diagonal, form.left, form.right, v)


def _rebased(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """U T and K T⁻ᵀ, the same product in a basis in which Kᵀ K is the identity, or nearly where it is singular.

    KᵀU is then as well scaled as the coupling itself, whatever the norms of the features. No gradient in T is missing,
    since the product does not depend on it.
    """
    if not right.size(-1):
        return left, right
    with torch.no_grad():
        size = right.abs().amax(-2, keepdim=True)
        size = torch.where(size > 0, size, 1.0)
        values, vectors = torch.linalg.eigh((right / size).mT @ (right / size))
        least = values.size(-1) * torch.finfo(values.dtype).eps
        root = values.clamp(min=least * values.amax(-1, keepdim=True)).sqrt().unsqueeze(-2)
        basis, inverse = size.mT * vectors * root, vectors / root
    return left @ basis, (right / size) @ inverse


def _exponential(x: Tensor) -> Tensor:
    """exp(x), to the last digits at every norm.

    PyTorch (2.13) takes a polynomial of degree 8 for norms between 3e-4 and 0.05, which is off by up to 2e-11. A block
    of its own beside x keeps the norm above that.
    """
    beside = pad(x, (0, 1, 0, 1)) + torch.diag_embed(pad(x.new_zeros(x.size(-1)), (0, 1), value=1.0))
    return torch.linalg.matrix_exp(beside)[..., :-1, :-1]


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.size(-1), dtype=like.dtype, device=like.device).expand_as(like)


def _graphs(form: LowRankForm) -> list[Rows]:
    """The rows of all graphs of one size, for every size."""
    nodes, device = form.left.size(0), form.left.device
    return [rows_of(starts, size, device) for size, starts in buckets(form.ptr, nodes)]


def _by_graph(form: LowRankForm, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A function of stacked graphs of one size, [b, H, n, C] → [b, H, n, D], for all sizes; rows as they came."""
    every = _graphs(form)
    parts = [function(*(gather(tensor, rows) for tensor in tensors)).transpose(1, 2).flatten(0, 1) for rows in every]
    if not parts:
        return torch.zeros_like(tensors[-1])
    node = torch.arange(form.left.size(0), device=form.left.device)
    order = torch.cat([node[rows].flatten() for rows in every])
    return parts[0] if len(parts) == 1 and isinstance(every[0], slice) else torch.cat(parts)[order.argsort()]
