"""``Coupling``: a matrix-free linear operator over nodes, one matrix per head."""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from diffusion_mp import checks, errors
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.graph import Graph
from diffusion_mp.graph.arguments import row_bounds
from diffusion_mp.graph.ops import mean_rows
from diffusion_mp.runtime.cache import cached_property

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

# Entries of a dense coupling above which to_dense warns: 256 MiB in float32.
LARGE = 1 << 26

PROMISES = ("symmetric", "row_stochastic", "nonnegative", "positive_semidefinite")


class Coupling(ABC):
    r"""A linear operator over nodes, one per head: the weights of messages between them.

    S: values [N, H, D] → [N, H, D], (S v)_i = Σ_j s_ij v_j (Wu, Wipf & Yan 2025, Eq. 4).

    Row i receives and column j sends; a single head broadcasts. A subclass names its ``parts``, implements ``_product``
    and ``_transpose``, and may override ``degree``, ``_at`` and ``to_dense`` where row sums or entries are known.
    ``_product`` and ``_at``, unlike ``matmul`` and ``at``, do not check their arguments.

    What is known of S are properties that a subclass overrides, by an attribute or by a (cached) property:

    - ``symmetric``, ``nonnegative``: S = Sᵀ for every head; no entry is negative.
    - ``row_stochastic``: every row sums to one, except for rows of zeros.
    - ``positive_semidefinite``: xᵀSx ≥ 0 for all x, and S = Sᵀ.
    - ``low_rank``: :meth:`low_rank_form` represents all of S.
    - ``_metric``: d̄ > 0 [N, H] with diag(d̄) S symmetric, or ``None``; not used if S is symmetric.
    - ``ptr``: row boundaries, if they are not an argument.

    Args:
        num_nodes, heads: N and H.
        like: tensor with the dtype and device of S, or a coupling.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU; ``None`` is one graph. Entries between graphs are zero.

    Examples:
        >>> S = SimpleDiffusivity()(x)
        >>> isinstance(S, Coupling), (S @ x.unsqueeze(1)).shape  # it multiplies states [nodes, heads, channels]
        (True, torch.Size([6, 1, 4]))
    """

    #: Attributes with the tensors, couplings and graphs that S is made of, or lists of them: :meth:`to` maps over them.
    parts: ClassVar[tuple[str, ...]] = ()

    #: Arrays of NumPy leave the arithmetic to this class; they would make an array of couplings.
    __array_ufunc__ = None

    def __init__(
        self,
        num_nodes: int,
        heads: int,
        like: Tensor | Coupling,
        ptr: Tensor | None = None,
    ) -> None:
        self.num_nodes = num_nodes
        self.heads = heads
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device
        if ptr is not None:
            self.ptr = row_bounds(ptr, num_nodes)

    @cached_property
    def ptr(self) -> Tensor | None:
        return None

    @cached_property
    def symmetric(self) -> bool:
        return self.positive_semidefinite

    @cached_property
    def row_stochastic(self) -> bool:
        return False

    @cached_property
    def nonnegative(self) -> bool:
        return False

    @cached_property
    def positive_semidefinite(self) -> bool:
        return False

    @cached_property
    def low_rank(self) -> bool:
        return False

    @cached_property
    def _metric(self) -> Float[Tensor, "N heads"] | None:
        return None

    @cached_property
    def quadratic(self) -> bool:
        """Whether a product costs O(N²), so that to factorise a small dense system is cheaper than many products."""
        return False

    @cached_property
    def whole(self) -> bool:
        """Whether this process has all rows; a solver of a whole system needs them."""
        return True

    @cached_property
    def examines(self) -> bool:
        """Whether it takes a pass over stored entries to find a promise out, which costs more than to transpose."""
        return False

    @abstractmethod
    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        """S v for values of a checked shape, with at least as many heads as S; v itself, or a tensor of its own."""

    @abstractmethod
    def _transpose(self) -> Coupling:
        """The operator Sᵀ."""

    def __matmul__(self, v: Float[Tensor, "N ..."]) -> Float[Tensor, "N ..."]:
        """S v for ``v`` [N, H, D]; with one head also for a vector [N] or a state [N, C]."""
        if isinstance(v, Tensor) and v.dim() in (1, 2) and self.heads == 1:
            values = v.unsqueeze(1) if v.dim() == 2 else v[:, None, None]
            return self.matmul(values).reshape(v.shape)
        return self.matmul(v)

    def matmul(
        self, v: Float[Tensor, "N in_heads D"]
    ) -> Float[Tensor, "N out_heads D"]:
        """``S @ v`` for v [N, H, D] as a method, which ``torch.compile`` traces: ``@`` tries the tensor first."""
        self.check(v, "v")
        if v.size(1) >= self.heads:
            values = v
        else:
            values = v.expand(-1, self.heads, -1)
        moved = self._product(values)
        # Only here does the identity copy: inside sums and multiples nobody writes to the values that it passes on.
        return moved.clone() if moved is values else moved

    def transformed(
        self,
        v: Float[Tensor, "N C"],
        matrix: Float[Tensor, "heads C C"] | Float[Tensor, "heads C"] | None,
        hops: int = 1,
    ) -> Float[Tensor, "N C"]:
        """Return Σ_h S_h^hops v M_hᵀ, every head with a matrix of its own, its diagonal, or ``None``, the identity."""
        if matrix is None or matrix.dim() == 2:
            if matrix is None:
                out = v.unsqueeze(1).expand(-1, self.heads, -1)
            else:
                out = v.unsqueeze(1) * matrix
        else:
            out = functional.linear(v, matrix.flatten(0, 1)).view(-1, *matrix.shape[:2])
        for _ in range(hops):
            moved = self._product(out)
            # As in `matmul`, the identity copies here alone.
            out = moved.clone() if moved is out else moved
        return out.squeeze(1) if self.heads == 1 else out.sum(1)

    def check(self, v: Tensor, name: str) -> None:
        """Raise unless ``v`` is a tensor of values [N, H, D] for these nodes, on the device of the coupling."""
        checks.check_values(v, self.num_nodes, self.heads, name)
        checks.check_device(v, name, self.device, "the coupling")

    @property
    def T(self) -> Coupling:
        """Sᵀ as a coupling; S itself where it is known to be symmetric."""
        # To transpose is cheaper than to find out by a pass over the entries.
        if not self.examines and self.symmetric:
            return self
        return self._transpose()

    def _ones(self, dtype: torch.dtype | None = None) -> Float[Tensor, "N heads"]:
        """Ones [N, H], by default in at least float32: a sum over many nodes leaves the range of half precision."""
        dtype = dtype or torch.promote_types(self.dtype, torch.float32)
        return torch.ones(self.num_nodes, self.heads, dtype=dtype, device=self.device)

    def both(
        self, v: Float[Tensor, "N H D"], w: Float[Tensor, "N H C"]
    ) -> tuple[Tensor, Tensor]:
        """Return S v and Sᵀ w, for values by head, and share what the two have in common."""
        return self.matmul(v), self.T.matmul(w)

    def degree(self) -> Float[Tensor, "N heads"]:
        """Row sums d_i = Σ_j s_ij, by one product with ones."""
        return self._product(self._ones().unsqueeze(2)).squeeze(2)

    def exact_degree(self, dtype: torch.dtype) -> Float[Tensor, "N heads"]:
        """Row sums with the precision of ``dtype``; rounded to fewer digits, D − S would leak constants."""
        if torch.promote_types(self.dtype, dtype) == self.dtype:
            return self.degree().to(dtype)
        return self.matmul(self._ones(dtype).unsqueeze(2)).squeeze(2)

    def dirichlet(self, x: Tensor) -> Float[Tensor, " heads"]:
        """Σ_ij s_ij ‖x_i − x_j‖² = Σ_i (d_i + c_i)‖x_i‖² − 2⟨x, S x⟩, c the column sums, for x [N, C] or [N, H, D].

        Accumulates in at least float32.
        """
        if isinstance(x, Tensor) and x.dim() == 2:
            values = x.unsqueeze(1)
        else:
            values = x
        self.check(values, "x")
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        # Without the mean of each graph, which changes nothing, the two terms cancel fewer digits.
        values = values - mean_rows(values, self.ptr)
        ends = self.exact_degree(values.dtype) + self.T.exact_degree(values.dtype)
        squares = (ends * values.square().sum(2)).sum(0)
        return squares - 2 * (values * (self @ values)).sum((0, 2))

    def laplacian(
        self, v: Float[Tensor, "N in_heads D"]
    ) -> Float[Tensor, "N out_heads D"]:
        """(D − S) v = d·v − S v with d the row sums, in at least float32."""
        self.check(v, "v")
        return self._majorized(v.to(torch.promote_types(v.dtype, torch.float32)), True)[
            0
        ]

    def majorant(self, convex: bool) -> Float[Tensor, "N heads"]:
        """A diagonal p that bounds D − S, as a certified step needs it (Theorem T1 of docs/certified.md).

        With ``convex``, 2 diag(p) ⪰ D − S, and p is the row sums d. Otherwise diag(p) ⪰ D − S, and p is 2d, or d where
        S is positive semi-definite. `CouplingMismatchError` unless S promises to be symmetric and nonnegative.
        """
        nothing = self._ones().unsqueeze(2)[:, :, :0]
        return self.majorized(nothing, convex)[1].squeeze(2)

    def majorized(
        self, v: Tensor, convex: bool
    ) -> tuple[Float[Tensor, "N heads D"], Float[Tensor, "N heads 1"]]:
        """`laplacian` and `majorant` by one product, for checked values of at least float32."""
        if not (self.symmetric and self.nonnegative):
            missing = [
                name for name in ("symmetric", "nonnegative") if not getattr(self, name)
            ]
            raise errors.CouplingMismatchError(
                f"a certified step needs a coupling that is symmetric and nonnegative; {self!r} does not promise to be "
                f"{' or '.join(missing)}. Take row_stochastic=False in all-pair diffusivities (one denominator divides "
                f"everything in the end), AdjacencyDiffusivity('sym') or ('sum') of an undirected graph "
                f"(graph.to_undirected()), factors that are numbers >= 0 or a Positive, and for the simple penalty of "
                f"distances a constraint that keeps states within 2 of each other."
            )
        return self._majorized(v, convex)

    def _majorized(self, v: Tensor, convex: bool) -> tuple[Tensor, Tensor]:
        """(D − S) v and p, from one product with [v, 1]."""
        # Row sums of the same product, not those of ``degree``, which may be rounded otherwise: a constant state then
        # stays where it is to the last digit.
        values = torch.cat([v, v.new_ones(*v.shape[:2], 1)], 2)
        if v.size(1) < self.heads:
            values = values.expand(-1, self.heads, -1)
        moved = self._product(values)
        degree = moved[:, :, -1:]
        laplacian = degree * v - moved[:, :, :-1]
        if convex or self.positive_semidefinite:
            return laplacian, degree
        return laplacian, 2 * degree

    @property
    def shape(self) -> torch.Size:
        """[H, N, N], that of :meth:`to_dense`."""
        return torch.Size((self.heads, self.num_nodes, self.num_nodes))

    def at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """Entries [E, H] of listed pairs [2, E]: s_ij with i = ``edge_index[1]``, j = ``edge_index[0]``."""
        return self._at(
            checks.check_pairs(edge_index, "edge_index", self.num_nodes, self.device)
        )

    def log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """log s_ij of listed pairs; for couplings defined by logarithms finite where s_ij itself underflows."""
        return self._log_at(
            checks.check_pairs(edge_index, "edge_index", self.num_nodes, self.device)
        )

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """Entries of checked pairs, here by one product with a unit vector for each distinct source."""
        source, column = torch.unique(edge_index[0], return_inverse=True)
        units = torch.zeros(
            self.num_nodes, 1, source.numel(), dtype=self.dtype, device=self.device
        )
        units[source, 0, torch.arange(source.numel(), device=self.device)] = 1
        return (self @ units)[edge_index[1], :, column]

    def _log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self._at(edge_index).log()

    def diagonal(self) -> Float[Tensor, "N heads"]:
        """s_ii [N, H], at the cost of the entries of N pairs."""
        return self._at(torch.arange(self.num_nodes, device=self.device).expand(2, -1))

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        """The dense matrices [H, N, N], the reference in tests; warns above 2²⁶ entries."""
        self._warn_if_large()
        eye = torch.eye(self.num_nodes, dtype=self.dtype, device=self.device)
        return (self @ eye.unsqueeze(1)).permute(1, 0, 2)

    def _warn_if_large(self) -> None:
        entries = self.heads * self.num_nodes**2
        if entries > LARGE:
            way_out = "S @ v, S.degree() and S.at(edge_index) work without them."
            warnings.warn(
                f"to_dense() of {type(self).__name__} writes {entries:,} entries; {way_out}",
                stacklevel=3,
            )

    @property
    def metric(self) -> Float[Tensor, "N heads"] | None:
        """d̄ > 0 with diag(d̄) S symmetric, so that S is self-adjoint in Σ_i d̄_i u_i v_i; ``None`` if none is known.

        1 for symmetric S, the row sums of Ω for D̄⁻¹Ω. Computed on first access, without gradient.
        """
        if self.symmetric:
            return self._ones(torch.float64)
        with torch.no_grad():
            # A copy, since the one that was computed is kept.
            if self._metric is None:
                return None
            return self._metric.expand(-1, self.heads).clone()

    @property
    def reversible(self) -> bool:
        """Whether S is symmetric, or self-adjoint in a known `metric`."""
        return self.symmetric or self.metric is not None

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        """The part of S (all of it if ``low_rank``) that is a diagonal plus a product of features, in ``dtype``."""
        return None

    def laplacian_function(
        self, function: Callable[[Tensor], Tensor], v: Float[Tensor, "N H D"]
    ) -> Float[Tensor, "N H D"] | None:
        """f(D̄ − S) v for an elementwise f where the eigenvectors of D̄ − S are known, otherwise ``None``."""
        return None

    def as_linear_operator(self, head: int = 0) -> LinearOperator:
        """One head as a SciPy operator (float64, N×N), for example for ``scipy.sparse.linalg.eigsh``."""
        from scipy.sparse.linalg import LinearOperator

        checks.check_index(head, "head", self.heads)
        if self.device.type == "meta":
            raise ValueError(
                f"the coupling must have values; got {self!r} on the meta device, where there are none."
            )

        def apply(turned: bool, x: np.ndarray) -> np.ndarray:
            coupling = self.T if turned else self
            columns = np.ascontiguousarray(x, dtype=np.float64).reshape(
                self.num_nodes, 1, math.prod(x.shape[1:])
            )
            with torch.no_grad():
                result = coupling @ torch.from_numpy(columns).to(self.device)
            return result[:, head].double().cpu().numpy().reshape(x.shape)

        forward = partial(apply, False)
        adjoint = partial(apply, True)
        shape = (self.num_nodes, self.num_nodes)
        return LinearOperator(
            shape,
            forward,
            rmatvec=adjoint,
            matmat=forward,
            rmatmat=adjoint,
            dtype=np.float64,
        )

    def to(
        self,
        *args: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Coupling:
        """S in another dtype or on another device, with arguments as of a tensor: ``S.to("cuda", torch.float64)``.

        Gradients flow through. Row boundaries stay on the CPU.
        """
        for value in args:
            dtype, device = (
                (value, device) if isinstance(value, torch.dtype) else (dtype, value)
            )
        checks.floating((), dtype, "meta")  # raises if it is no dtype
        place = None if device is None else checks.as_device(device)
        if place is not None and place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        if dtype in (None, self.dtype) and place in (None, self.device):
            return self
        return self._mapped(_once(partial(_moved, dtype, place)))

    def detach(self) -> Coupling:
        """S with the same entries, detached from the graph of autograd, whose memory it does not keep."""
        return self._mapped(_once(_detached))

    def _mapped(self, change: Callable[[Any], Any]) -> Coupling:
        """S of the parts that ``change`` makes of a tensor or a graph."""
        # What was computed from the parts is computed again: kept, it would hold on to the graph of autograd, or to
        # another device. Promises and row boundaries do not depend on either.
        kind = type(self)
        cached = {
            name
            for name in dir(kind)
            if isinstance(getattr(kind, name), cached_property)
        }
        cached.remove("ptr")
        mapped = copy.copy(self)
        for name, value in vars(self).items():
            if name in self.parts:
                setattr(mapped, name, _of_part(value, change))
            elif name in cached and not isinstance(value, bool):
                delattr(mapped, name)
        example = change(torch.empty(0, dtype=self.dtype, device=self.device))
        mapped.dtype = example.dtype
        mapped.device = example.device
        return mapped

    def __mul__(self, scale: float | Tensor) -> Coupling:
        return ScaledCoupling(scale, self)

    __rmul__ = __mul__

    def __neg__(self) -> Coupling:
        return self * -1.0

    def __add__(self, other: Coupling) -> Coupling:
        if not isinstance(other, Coupling):
            raise TypeError(
                f"a coupling can only be added to a coupling; got {checks.describe(other)}."
            )
        return SumCoupling([self, other])

    __radd__ = __add__

    def __sub__(self, other: Coupling) -> Coupling:
        return self + (-other if isinstance(other, Coupling) else other)

    def __rsub__(self, other: object) -> None:
        raise TypeError(
            f"a coupling can only be subtracted from a coupling; got {checks.describe(other)}."
        )

    def __rmatmul__(self, other: object) -> None:
        raise TypeError(
            f"a coupling multiplies from the left, S @ v; got {checks.describe(other)} to the left of it. S.T @ v is "
            f"the product of the transpose."
        )

    def __repr__(self) -> str:
        # Only what is known already: a promise may take a product or a pass over the entries.
        known = {
            name: vars(self).get(name, getattr(type(self), name)) for name in PROMISES
        }
        promises = [f", {name}" for name, promise in known.items() if promise is True]
        return f"{type(self).__name__}(num_nodes={self.num_nodes}, heads={self.heads}{''.join(promises)})"

    def float(self) -> Coupling:
        """S in single precision."""
        return self.to(torch.float32)

    def double(self) -> Coupling:
        """S in double precision."""
        return self.to(torch.float64)


class DerivedCoupling(Coupling):
    """Base of couplings made of one other, ``coupling``, that keep these of its properties."""

    coupling: Coupling

    @cached_property
    def ptr(self) -> Tensor | None:
        return self.coupling.ptr

    @cached_property
    def symmetric(self) -> bool:
        return self.coupling.symmetric

    @cached_property
    def low_rank(self) -> bool:
        return self.coupling.low_rank

    @cached_property
    def _metric(self) -> Float[Tensor, "N heads"] | None:
        return self.coupling.metric

    @cached_property
    def quadratic(self) -> bool:
        return self.coupling.quadratic

    @cached_property
    def whole(self) -> bool:
        return self.coupling.whole

    @cached_property
    def examines(self) -> bool:
        return self.coupling.examines


def as_scale(scale: object, heads: int) -> float | Tensor:
    """Return a finite number, or a tensor with a single element or one per head; numbers of NumPy become Python's."""
    scale = checks.python_number(scale)
    if isinstance(scale, Tensor):
        if (
            scale.is_complex()
            or scale.dtype == torch.bool
            or scale.layout != torch.strided
        ):
            raise TypeError(
                f"scale must hold real numbers; got {checks.describe(scale)}."
            )
        if (
            scale.dim() > 1
            or not scale.numel()
            or (heads != 1 and scale.numel() not in (1, heads))
        ):
            raise ValueError(
                f"scale must be a number, a 0-dimensional tensor or [{heads}]; got {checks.describe(scale)}."
            )
        return scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)):
        if isinstance(scale, np.ndarray):
            way_out = " A tensor has one factor per head."
        else:
            way_out = ""
        raise TypeError(
            f"scale must be a number or a tensor; got {checks.describe(scale)}.{way_out}"
        )
    if not torch.compiler.is_compiling() and not math.isfinite(
        scale
    ):  # symbolic while tracing
        raise ValueError(f"scale must be a finite number; got {scale}.")
    return cast("float", scale)


class ScaledCoupling(DerivedCoupling):
    """A coupling times a number, a 0-dimensional tensor or one factor per head [H].

    Args:
        scale, coupling: a, which may be learnable, and S.
        nonnegative: the promise that a tensor ``scale`` has no negative element, which keeps the promises about signs.

    Examples:
        >>> isinstance(0.5 * UniformCoupling(6), ScaledCoupling)
        True
    """

    parts = ("scale", "coupling")

    def __init__(
        self, scale: float | Tensor, coupling: Coupling, *, nonnegative: bool = False
    ) -> None:
        check_coupling_kind(coupling)
        scale = as_scale(scale, coupling.heads)
        if isinstance(scale, Tensor):
            checks.check_device(scale, "scale", coupling.device, "the coupling")
        checks.check_flags(nonnegative=nonnegative)
        heads = coupling.heads
        if isinstance(scale, Tensor):
            heads = max(heads, scale.numel())
        super().__init__(coupling.num_nodes, heads, coupling)
        self.scale = scale
        self.coupling = coupling
        if isinstance(scale, Tensor):
            self._positive = nonnegative
        else:
            self._positive = bool(
                scale >= 0
            )  # bool() makes a comparison of symbols concrete

    @cached_property
    def row_stochastic(self) -> bool:
        one = not isinstance(self.scale, Tensor) and bool(self.scale == 1)
        return one and self.coupling.row_stochastic

    @cached_property
    def nonnegative(self) -> bool:
        return self._positive and self.coupling.nonnegative

    @cached_property
    def positive_semidefinite(self) -> bool:
        return self._positive and self.coupling.positive_semidefinite

    def _by_head(self, value: Tensor, dim: int) -> Tensor:
        """a · value, with the head axis of ``value`` at ``dim``."""
        if not isinstance(self.scale, Tensor):
            return self.scale * value
        shape = [1] * value.dim()
        shape[dim] = -1
        return self.scale.view(shape) * value

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self._by_head(self.coupling._product(v), 1)

    def _transpose(self) -> Coupling:
        return ScaledCoupling(self.scale, self.coupling.T, nonnegative=self._positive)

    def degree(self) -> Float[Tensor, "N heads"]:
        return self._by_head(self.coupling.degree(), 1)

    def _majorized(self, v: Tensor, convex: bool) -> tuple[Tensor, Tensor]:
        moved, bound = self.coupling._majorized(v, convex)
        return self._by_head(moved, 1), self._by_head(bound, 1)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self._by_head(self.coupling._at(edge_index), 1)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        form = self.coupling.low_rank_form(dtype)
        one = torch.ones(1, self.coupling.heads, dtype=dtype, device=self.device)
        if form is None:
            return None
        return form.reweighted(self._by_head(one, 1))

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return self._by_head(self.coupling.to_dense(), 0)


class SumCoupling(Coupling):
    """The sum of couplings; one with a single head is added to every head of the others, and sums in it are flattened.

    Examples:
        >>> isinstance(UniformCoupling(6) + IdentityCoupling(6), SumCoupling)
        True
    """

    parts = ("terms",)

    def __init__(self, terms: Sequence[Coupling]) -> None:
        if not isinstance(terms, Iterable):
            raise TypeError(
                f"terms must be a sequence of couplings; got {checks.describe(terms)}."
            )
        flat: list[Coupling] = []
        for term in terms:
            check_coupling_kind(term, "every one of terms")
            flat += term.terms if isinstance(term, SumCoupling) else [term]
        if not flat:
            raise ValueError("terms must hold a coupling at least; got none.")
        first = flat[0]
        heads = 1
        dtype = first.dtype
        for term in flat:
            if term.num_nodes != first.num_nodes:
                sizes = f"{first.num_nodes} and {term.num_nodes}"
                raise ValueError(
                    f"the terms of a sum must couple the same nodes; got {sizes} nodes."
                )
            if term.device != first.device:
                got = (
                    f"got {first.device} and {term.device}. Move one with .to(device)."
                )
                raise ValueError(
                    f"the terms of a sum must couple nodes on one device; {got}"
                )
            if term.heads not in (1, heads) and heads != 1:
                most = max(t.heads for t in flat)
                raise ValueError(
                    f"the terms of a sum must have one head or {most}; got {[t.heads for t in flat]}."
                )
            heads = max(heads, term.heads)
            dtype = torch.promote_types(dtype, term.dtype)
        super().__init__(first.num_nodes, heads, first)
        self.dtype = dtype
        self.terms: list[Coupling] = flat

    @cached_property
    def ptr(self) -> Tensor | None:
        """The row boundaries common to all terms; ``None``, one graph, if one of the terms has no boundaries."""
        common = self.terms[0].ptr
        for term in self.terms[1:]:
            if common is None or term.ptr is None:
                return None
            common, other = sorted((common, term.ptr), key=len)
            common = common[torch.isin(common, other)]
        return common

    @cached_property
    def symmetric(self) -> bool:
        return all(term.symmetric for term in self.terms)

    @cached_property
    def row_stochastic(self) -> bool:
        """Whether terms are so up to factors that add up to one, and a row of zeros in one is zero in all."""
        total = 0.0
        empty = []
        for term in self.terms:
            factor = 1.0
            part = term
            if isinstance(term, ScaledCoupling) and not isinstance(term.scale, Tensor):
                factor = term.scale
                part = term.coupling
            if not part.row_stochastic:
                return False
            total += factor
            empty.append(part.degree() == 0)
        return abs(total - 1.0) < 1e-12 and all(
            bool((rows == empty[0]).all()) for rows in empty
        )

    @cached_property
    def nonnegative(self) -> bool:
        return all(term.nonnegative for term in self.terms)

    @cached_property
    def positive_semidefinite(self) -> bool:
        return all(term.positive_semidefinite for term in self.terms)

    @cached_property
    def quadratic(self) -> bool:
        return any(term.quadratic for term in self.terms)

    @cached_property
    def whole(self) -> bool:
        return all(term.whole for term in self.terms)

    @cached_property
    def examines(self) -> bool:
        return any(term.examines for term in self.terms)

    @cached_property
    def low_rank(self) -> bool:
        return all(term.low_rank for term in self.terms) and self._over_the_same_graphs

    @cached_property
    def _metric(self) -> Float[Tensor, "N heads"] | None:
        """The metric of all terms; a diagonal term is self-adjoint in any."""
        metrics = [term.metric for term in self._reaching or self.terms]
        first = metrics[0]
        if all(
            m is not None and first is not None and bool((m == first).all())
            for m in metrics
        ):
            return first
        return None

    @property
    def _reaching(self) -> list[Coupling]:
        """The terms that couple different nodes."""
        return [
            t for t in self.terms if t.ptr is None or bool((t.ptr.diff() > 1).any())
        ]

    @property
    def _over_the_same_graphs(self) -> bool:
        """Whether all terms that couple different nodes have the same row boundaries."""
        bounds = [term.ptr for term in self._reaching] or [None]
        first = bounds[0]
        return all(
            ptr is first
            or (ptr is not None and first is not None and torch.equal(ptr, first))
            for ptr in bounds
        )

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        total = self.terms[0]._product(v)
        for term in self.terms[1:]:
            total = total + term._product(v)
        return total

    def _transpose(self) -> Coupling:
        return SumCoupling([term.T for term in self.terms])

    def degree(self) -> Float[Tensor, "N heads"]:
        return reduce(add, [term.degree() for term in self.terms])

    def _majorized(self, v: Tensor, convex: bool) -> tuple[Tensor, Tensor]:
        moved, bound = self.terms[0]._majorized(v, convex)
        for term in self.terms[1:]:
            more, further = term._majorized(v, convex)
            moved = moved + more
            bound = bound + further
        return moved, bound

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return reduce(add, [term._at(edge_index) for term in self.terms])

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        known = [
            form
            for term in self.terms
            if (form := term.low_rank_form(dtype)) is not None
        ]
        if known and self._over_the_same_graphs:
            return LowRankForm.total(known)
        return None

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return reduce(add, [term.to_dense() for term in self.terms])


def check_coupling_kind(coupling: object, name: str = "coupling") -> None:
    """Raise ``TypeError`` unless ``coupling`` is a `Coupling`."""
    if not isinstance(coupling, Coupling):
        raise TypeError(
            f"{name} must be a Coupling; got {checks.describe(coupling)}. A diffusivity makes one, D(x, graph); "
            f"a layer returns its own with return_coupling=True."
        )


def feature_sizes(
    query: Tensor, key: Tensor, prefix: str = ""
) -> tuple[int, int, Tensor]:
    """Return N, H and the query, the first arguments of `Coupling`; raise unless both are [N, H, F] of one kind."""
    shape = "[num_nodes, heads, features]"
    checks.check_tensor(query, f"{prefix}query", shape)
    checks.check_tensor(key, f"{prefix}key", shape)
    if query.dim() != 3 or query.shape != key.shape:
        raise ValueError(
            f"{prefix}query and {prefix}key must both be {shape} of one shape; got "
            f"{checks.describe(query)} and {checks.describe(key)}."
        )
    if query.dtype != key.dtype:
        raise TypeError(
            f"{prefix}query and {prefix}key must have one dtype; got {query.dtype} and {key.dtype}."
        )
    checks.check_device(key, f"{prefix}key", query.device, f"{prefix}query")
    return query.size(0), query.size(1), query


def _of_part(part: Any, change: Callable[[Any], Any]) -> Any:
    """A part of a coupling after ``change`` of its tensors and graphs; other objects as they are."""
    if isinstance(part, (Tensor, Graph)):
        return change(part)
    if isinstance(part, Coupling):
        return part._mapped(change)
    if isinstance(part, dict):
        return {name: _of_part(each, change) for name, each in part.items()}
    if isinstance(part, (list, tuple)):
        changed = [_of_part(each, change) for each in part]
        if hasattr(part, "_fields"):
            return type(part)(*changed)
        return type(part)(changed)
    return part


def _once(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``change`` that makes one copy of an object: if query and key are one tensor, kernels do half of the work."""
    copies: dict[int, tuple[Any, Any]] = {}

    def changed(part: Any) -> Any:
        if id(part) not in copies:
            # The original is kept too, so that its id is not that of another object meanwhile.
            copies[id(part)] = part, change(part)
        return copies[id(part)][1]

    return changed


def _moved(
    dtype: torch.dtype | None, device: torch.device | None, part: Tensor | Graph
) -> Tensor | Graph:
    if isinstance(part, Graph):  # which keeps the dtype of its weights
        return part if device is None else part.to(device)
    return part.to(device or part.device, dtype if part.is_floating_point() else None)


def _detached(part: Tensor | Graph) -> Tensor | Graph:
    if isinstance(part, Tensor):
        return part.detach()
    if part.edge_weight is None or not part.edge_weight.requires_grad:
        return part
    graph = copy.copy(part)
    graph.edge_weight = part.edge_weight.detach()
    graph._derived = {}  # what was derived from the weights is computed again
    return graph
