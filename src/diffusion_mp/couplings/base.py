"""``Coupling``: a linear operator over nodes, one per head, never materialised unless asked."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffusion_mp.couplings.facts import PROMISES, Fact, Promise
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.errors import (
    CouplingMismatchError,
    as_device,
    as_size,
    check_counts,
    check_device,
    check_flags,
    check_function,
    check_kind,
    check_pairs,
    check_values,
    describe,
    floating,
)
from diffusion_mp.graph.checks import MOST_NODES, as_num_nodes, row_bounds
from diffusion_mp.graph.ops import mean_rows

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

# Entries of a dense coupling above which to_dense warns: 256 MiB in float32.
LARGE = 1 << 26


class Coupling(ABC):
    r"""S: values [N, H, D] → [N, H, D], (S v)_i = Σ_j s_ij v_j (Wu, Wipf & Yan 2025, Eq. 4).

    Row i receives, column j sends. A new kind writes two methods, ``_product`` and ``_transpose``, passes its size and
    promises to ``super().__init__``, and inherits the rest; it overrides ``degree``, ``_at`` and ``to_dense`` where it
    knows its row sums and entries. One head broadcasts over any number of heads of the values.

    What users pass is checked by the public ``matmul``, ``at`` and ``log_at``; couplings made of others call their
    ``_product`` and ``_at``, which check nothing again.

    Args:
        num_nodes: N.
        heads: H.
        like: any tensor with the coupling's dtype and device; or the coupling that this one is made of, which then
            answers for ``ptr`` too.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU; ``None`` is one graph. Entries between graphs are zero.
        symmetric: S = Sᵀ for every head.
        row_stochastic: every row sums to one, except that a row nobody sends to is zero. (There a conservative update
            leaves the node alone, a residual one shrinks it.)
        nonnegative: no entry is negative.
        positive_semidefinite: xᵀSx ≥ 0 for all x, and S = Sᵀ, which is promised along with it.
        low_rank: S is a diagonal plus a product of features, all of it (:meth:`low_rank_form`).
        metric: a function that finds d̄ > 0 [N, H] with diag(d̄) S symmetric, or ``None`` where there is none; for a
            symmetric S nobody asks it.

    ``ptr`` and the promises may also be questions, functions without arguments: whoever asks for
    ``coupling.symmetric`` first has it found out, and nobody pays for what nobody asks (:class:`Fact`).

    Raises:
        TypeError, ValueError: a size, boundaries or a promise that is none.

    Examples:
        >>> S = SimpleDiffusivity()(x)
        >>> isinstance(S, Coupling), (S @ x.unsqueeze(1)).shape  # it multiplies states [nodes, heads, channels]
        (True, torch.Size([6, 1, 4]))
        >>> S.to_dense().shape  # [heads, nodes, nodes]; for looking at it
        torch.Size([1, 6, 6])
    """

    ptr = Fact[Tensor | None]()
    symmetric = Fact[bool]()
    row_stochastic = Fact[bool]()
    nonnegative = Fact[bool]()
    positive_semidefinite = Fact[bool]()
    low_rank = Fact[bool]()
    _metric = Fact[Tensor | None]()

    def __init__(
        self,
        num_nodes: int,
        heads: int,
        like: Tensor | Coupling,
        *,
        ptr: Tensor | Callable[[], Tensor | None] | None = None,
        symmetric: Promise = False,
        row_stochastic: Promise = False,
        nonnegative: Promise = False,
        positive_semidefinite: Promise = False,
        low_rank: Promise = False,
        metric: Callable[[], Tensor | None] | None = None,
    ) -> None:
        if not torch.compiler.is_compiling():  # they may be symbols there
            if type(num_nodes) is not int or not 0 <= num_nodes <= MOST_NODES:
                num_nodes = as_num_nodes(num_nodes)
            if type(heads) is not int or heads < 1:
                heads = as_size(heads)
                check_counts(heads=heads)
            if not isinstance(like, (Tensor, Coupling)):
                check_kind(like, "like", Tensor, "a tensor with the coupling's dtype and device")
        self.num_nodes, self.heads = num_nodes, heads
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device
        if metric is not None and not callable(metric):
            check_function(metric, "metric", "that finds the metric, or None")
        self._questions: dict[str, Callable[[], Any]] = {"_metric": metric or _no_metric}
        #: Whether a product costs O(N²): then a dense factorisation of a small system is cheaper than many products.
        self.quadratic: bool = isinstance(like, Coupling) and like.quadratic
        #: Whether this process has all rows; a solver of a whole system needs them.
        self.whole: bool = not isinstance(like, Coupling) or like.whole
        symmetric = True if positive_semidefinite is True and symmetric is False else symmetric
        given = (symmetric, row_stochastic, nonnegative, positive_semidefinite, low_rank)
        for name, promise in zip((*PROMISES, "low_rank"), given, strict=True):
            if type(promise) is bool:
                setattr(self, name, promise)
            elif callable(promise) and not isinstance(promise, nn.Module):
                self._questions[name] = promise
            else:
                check_flags(**{name: promise})  # type: ignore[arg-type]  # refused
        if callable(ptr) and not isinstance(ptr, nn.Module):
            self._questions["ptr"] = ptr
        elif ptr is None and isinstance(like, Coupling):
            self._questions["ptr"] = lambda: like.ptr
        else:
            self.ptr = None if ptr is None else row_bounds(ptr, self.num_nodes)

    # ---------------------------------------------------------------- what a kind writes

    @abstractmethod
    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        """S v for values whose shape was checked and whose heads match."""

    @abstractmethod
    def _transpose(self) -> Coupling:
        """The operator Sᵀ."""

    # ---------------------------------------------------------------- what it inherits

    def degree(self) -> Float[Tensor, "N heads"]:
        """Row sums d_i = Σ_j s_ij, by one product with ones."""
        dtype = torch.promote_types(self.dtype, torch.float32)  # a sum over many nodes leaves the range of half
        ones = torch.ones(self.num_nodes, self.heads, 1, dtype=dtype, device=self.device)
        return self._product(ones).squeeze(2)

    def exact_degree(self, dtype: torch.dtype) -> Float[Tensor, "N heads"]:
        """Row sums as exact as ``dtype``: D − S then maps constants to zero, as it should.

        Row sums that were rounded to fewer digits than somebody works with would be a leak, or a source, of their own.
        """
        if torch.promote_types(self.dtype, dtype) == self.dtype:
            return self.degree().to(dtype)
        return self.matmul(torch.ones(self.num_nodes, self.heads, 1, dtype=dtype, device=self.device)).squeeze(2)

    def laplacian(self, v: Float[Tensor, "N in_heads D"]) -> Float[Tensor, "N out_heads D"]:
        """(D − S) v = d·v − S v with d the row sums, in at least float32."""
        self.check(v, "v")
        return self._majorized(v.to(torch.promote_types(v.dtype, torch.float32)), True)[0]

    def majorant(self, convex: bool) -> Float[Tensor, "N heads"]:
        """A diagonal p that bounds D − S, as a certified step needs it (Theorem T1 of docs/certified.md).

        With ``convex``, 2 diag(p) ⪰ D − S, for which the row sums d are enough. Without, diag(p) ⪰ D − S: that takes
        2d, but d where S is positive semi-definite. A sum adds what its terms say, so only the others count twice.

        Raises:
            CouplingMismatchError: S does not promise to be symmetric and nonnegative.
        """
        dtype = torch.promote_types(self.dtype, torch.float32)
        nothing = torch.empty(self.num_nodes, self.heads, 0, dtype=dtype, device=self.device)
        return self.majorized(nothing, convex)[1].squeeze(2)

    def majorized(self, v: Tensor, convex: bool) -> tuple[Float[Tensor, "N heads D"], Float[Tensor, "N heads 1"]]:
        """`laplacian` and `majorant` by one product, for a wide v that an update has checked."""
        missing = [name for name in ("symmetric", "nonnegative") if not getattr(self, name)]
        if missing:
            raise CouplingMismatchError(
                f"a certified step needs a coupling that is symmetric and nonnegative; {self!r} does not promise to be "
                f"{' or '.join(missing)}. Take row_stochastic=False in all-pair diffusivities (one denominator divides "
                f"everything in the end), AdjacencyDiffusivity('sym') or ('sum') of an undirected graph "
                f"(graph.to_undirected()), factors that are numbers >= 0 or a Positive, and for the simple penalty of "
                f"distances a constraint that keeps states within 2 of each other."
            )
        return self._majorized(v, convex)

    def _majorized(self, v: Tensor, convex: bool) -> tuple[Tensor, Tensor]:
        """(D − S) v and p, from one product with [v, 1]."""
        moved = self.product(torch.cat([v, v.new_ones(*v.shape[:2], 1)], 2))
        degree = moved[:, :, -1:]
        return degree * v - moved[:, :, :-1], degree if convex or self.positive_semidefinite else 2 * degree

    def __matmul__(self, v: Float[Tensor, "N ..."]) -> Float[Tensor, "N ..."]:
        """``S @ v``: :meth:`matmul`; with one head also of a vector [N] or a state [N, C], which it then gives."""
        if isinstance(v, Tensor) and v.dim() in (1, 2) and self.heads == 1:
            return self.matmul(v.unsqueeze(1) if v.dim() == 2 else v[:, None, None]).reshape(v.shape)
        return self.matmul(v)

    @property
    def shape(self) -> torch.Size:
        """[H, N, N], that of :meth:`to_dense`."""
        return torch.Size((self.heads, self.num_nodes, self.num_nodes))

    def matmul(self, v: Float[Tensor, "N in_heads D"]) -> Float[Tensor, "N out_heads D"]:
        """S v; ``v`` is [N, H, D]. A single head on either side broadcasts.

        (What a layer calls: under ``torch.compile`` the operator ``@`` would ask the tensor on its right first.)
        """
        self.check(v, "v")
        return self.product(v)

    def check(self, v: Tensor, name: str) -> None:
        """Raise unless ``v`` holds values for these nodes, [N, H, D], and lies with the coupling."""
        # Every product asks: what fits passes at one look, and only what does not is told why.
        if (
            isinstance(v, Tensor)
            and v.dim() == 3
            and v.size(0) == self.num_nodes
            and (self.heads == 1 or v.size(1) in (1, self.heads))
            and v.is_floating_point()
            and v.layout is torch.strided
            and v.device == self.device
        ):
            return
        check_values(v, self.num_nodes, self.heads, name)
        check_device(v, name, self.device, "the coupling")

    def product(self, v: Float[Tensor, "N in_heads D"]) -> Float[Tensor, "N out_heads D"]:
        """S v for values that an update has checked."""
        return self._product(v if v.size(1) >= self.heads else v.expand(-1, self.heads, -1))

    @property
    def T(self) -> Coupling:
        """Sᵀ, a coupling again; one that is promised to be symmetric is its own. (Turning beats finding out.)"""
        return self if "symmetric" not in self._questions and self.symmetric else self._transpose()

    def at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """Entries of listed pairs: for an edge source → target, s_ij with i = ``edge_index[1]``, j = ``edge_index[0]``.

        Raises:
            TypeError, ValueError: no pairs [2, E] of nodes that exist.
        """
        return self._at(check_pairs(edge_index, "edge_index", self.num_nodes, self.device))

    def log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """log s_ij of listed pairs; kinds that hold logarithms give them where s_ij itself would underflow."""
        return self._log_at(check_pairs(edge_index, "edge_index", self.num_nodes, self.device))

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """Entries of pairs that were checked: one product with a unit vector per distinct source; a kind that knows its
        entries does it in O(E)."""
        source, column = torch.unique(edge_index[0], return_inverse=True)
        units = torch.zeros(self.num_nodes, 1, source.numel(), dtype=self.dtype, device=self.device)
        units[source, 0, torch.arange(source.numel(), device=self.device)] = 1
        return (self @ units)[edge_index[1], :, column]

    def _log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self._at(edge_index).log()

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        """[H, N, N], the oracle of every test; warns above 2²⁶ entries."""
        self._warn_if_large()
        eye = torch.eye(self.num_nodes, dtype=self.dtype, device=self.device)
        return (self @ eye.unsqueeze(1)).permute(1, 0, 2)

    def _warn_if_large(self) -> None:
        entries = self.heads * self.num_nodes**2
        if entries > LARGE:
            warnings.warn(
                f"to_dense() of {type(self).__name__} writes {entries:,} entries; "
                f"S @ v, S.degree() and S.at(edge_index) work without them.",
                stacklevel=3,
            )

    def diagonal(self) -> Float[Tensor, "N heads"]:
        """s_ii [N, H], what every node couples with itself; as cheap as the entries of N pairs."""
        return self._at(torch.arange(self.num_nodes, device=self.device).expand(2, -1))

    def dirichlet(self, x: Tensor) -> Float[Tensor, " heads"]:
        """Σ_ij s_ij ‖x_i − x_j‖² of every head by one product, Σ_i (d_i + c_i)‖x_i‖² − 2⟨x, S x⟩, c the column sums.

        ``x`` is a state [N, C], the same for all heads, or values [N, H, D]. Accumulates in at least float32.
        """
        values = x.unsqueeze(1) if isinstance(x, Tensor) and x.dim() == 2 else x
        self.check(values, "x")
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        # The form does not see a shift of a graph; removing the mean keeps the two terms from cancelling.
        values = values - mean_rows(values, self.ptr)
        ends = self.exact_degree(values.dtype) + self.T.exact_degree(values.dtype)
        squares = (ends * values.square().sum(2)).sum(0)
        return squares - 2 * (values * (self @ values)).sum((0, 2))

    @property
    def metric(self) -> Float[Tensor, "N heads"] | None:
        """d̄ > 0 with diag(d̄) S symmetric; ``None`` where none is known. Found out when first asked, without gradient.

        S is then self-adjoint in ⟨u, v⟩ = Σ_i d̄_i u_i v_i (*reversible*, as a Markov chain is), so its spectrum is
        real, and conjugate gradients work in this inner product. d̄ = 1 for symmetric S, the row sums of Ω for D̄⁻¹Ω.
        """
        if self.symmetric:
            return torch.ones(self.num_nodes, self.heads, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            return None if self._metric is None else self._metric.expand(-1, self.heads)

    @property
    def reversible(self) -> bool:
        """Whether S is symmetric, or self-adjoint in a known `metric`."""
        return self.symmetric or self.metric is not None

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        """The part of S that is a diagonal plus a product of features, in ``dtype``; ``None`` where there is none.

        It is all of S where ``low_rank`` is promised.
        """
        return None

    def laplacian_function(
        self, function: Callable[[Tensor], Tensor], v: Float[Tensor, "N H D"]
    ) -> Float[Tensor, "N H D"] | None:
        """f(D̄ − S) v, by a kind that has the eigenvectors of D̄ − S at hand; others answer ``None``.

        ``function`` maps a tensor of eigenvalues to factors, element by element. Updates ask here before they iterate.
        """
        return None

    def as_linear_operator(self, head: int = 0) -> LinearOperator:
        """SciPy's view of one head (float64, N×N): spectra by ``scipy.sparse.linalg.eigsh`` without a matrix."""
        from scipy.sparse.linalg import LinearOperator

        check_kind(head, "head", int, "an integer")
        if self.device.type == "meta":
            raise ValueError(f"{type(self).__name__} must have numbers; on the meta device there are none.")
        if not 0 <= head < self.heads:
            raise ValueError(f"head must lie in [0, {self.heads - 1}]; got {head}.")

        def apply(turned: bool, x: np.ndarray) -> np.ndarray:
            coupling = self.T if turned else self
            columns = np.ascontiguousarray(x, dtype=np.float64).reshape(self.num_nodes, 1, math.prod(x.shape[1:]))
            with torch.no_grad():
                result = coupling @ torch.from_numpy(columns).to(self.device)
            return result[:, head].double().cpu().numpy().reshape(x.shape)

        forward, adjoint = partial(apply, False), partial(apply, True)
        shape, dtype = (self.num_nodes, self.num_nodes), np.float64
        return LinearOperator(shape, forward, rmatvec=adjoint, matmat=forward, rmatmat=adjoint, dtype=dtype)

    def to(self, *args: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Coupling:
        """S in another dtype or on another device, given as to a tensor: ``S.to("cuda")``, ``S.to(torch.float64)``.

        Every tensor it is made of is converted, its parts' too; gradients flow through. Row boundaries stay on the CPU.
        """
        from diffusion_mp.couplings.changed import Change

        for value in args:
            if isinstance(value, torch.dtype):
                dtype = value
            else:
                device = value
        if dtype is not None:
            floating((), dtype, "meta")
        place = None if device is None else as_device(device)
        if place is not None and place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        if dtype in (None, self.dtype) and place in (None, self.device):
            return self
        return Change(dtype, place).coupling(self)

    def detach(self) -> Coupling:
        """S with the same entries, cut off from what they were made of: to keep it, and no graph of autograd."""
        from diffusion_mp.couplings.changed import Change

        return Change(detach=True).coupling(self)

    def __mul__(self, scale: float | Tensor) -> Coupling:
        from diffusion_mp.couplings.algebra import ScaledCoupling

        return ScaledCoupling(scale, self)

    __rmul__ = __mul__

    def __neg__(self) -> Coupling:
        return self * -1.0

    def __sub__(self, other: Coupling) -> Coupling:
        return self + (-other if isinstance(other, Coupling) else other)

    def __add__(self, other: Coupling) -> Coupling:
        if not isinstance(other, Coupling):
            raise TypeError(f"a coupling can only be added to a coupling; got {describe(other)}.")
        from diffusion_mp.couplings.algebra import SumCoupling

        return SumCoupling([self, other])

    def __repr__(self) -> str:
        promises = [name for name in PROMISES if vars(self).get(name)]  # what nobody asked for is not found out here
        facts = [f"num_nodes={self.num_nodes}", f"heads={self.heads}", *promises]
        return f"{type(self).__name__}({', '.join(facts)})"


def _no_metric() -> None:
    """No metric is known."""


def check_coupling_kind(coupling: object, name: str = "coupling") -> None:
    """Raise ``TypeError`` unless a coupling came."""
    if not isinstance(coupling, Coupling):
        raise TypeError(
            f"{name} must be a Coupling; got {describe(coupling)}. A diffusivity makes one, D(x, graph); a layer "
            f"returns its own with return_coupling=True."
        )
