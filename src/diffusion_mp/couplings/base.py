"""``Coupling``: a matrix-free linear operator over nodes, one matrix per head."""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import add, sub
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from diffusion_mp import checks, errors
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.couplings.shapes import (
    ByRow,
    Entries,
    Maps,
    Matrices,
    Pairs,
    Received,
    Sent,
    State,
    Values,
)
from diffusion_mp.graph import Graph
from diffusion_mp.graph.arguments import row_bounds
from diffusion_mp.graph.ops import mean_rows
from diffusion_mp.runtime.cache import cached_property

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

# Entries of a dense coupling above which to_dense warns: 256 MiB in float32.
LARGE = 1 << 26

PROMISES = ("symmetric", "row_stochastic", "nonnegative", "positive_semidefinite")


def _no(coupling: Coupling) -> bool:
    return False


C = TypeVar("C", bound="Coupling")


class Coupling(ABC):
    r"""A linear operator over nodes, one per head: the weights of messages between them.

    S: values [N, H, D] → [N, H, D], (S v)_i = Σ_j s_ij v_j (Wu, Wipf & Yan 2025, Eq. 4).

    Row i receives and column j sends; a single head broadcasts. A subclass names its ``parts``, implements ``_product``
    and ``_transpose``, and may override ``degree``, ``_at`` and ``_dense`` where row sums or entries are known.
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
        _checked: whether the library has made or checked the arguments, so that they are not looked at again.
        promises: the first four of these properties by name; ``None`` leaves one to the class.

    Examples:
        >>> S = SimpleDiffusivity()(x)
        >>> isinstance(S, Coupling), (S @ x.unsqueeze(1)).shape  # it multiplies states [nodes, heads, channels]
        (True, torch.Size([6, 1, 4]))
    """

    #: Attributes with the tensors, couplings and graphs that S is made of, or lists of them: :meth:`to` maps over them.
    parts: ClassVar[tuple[str, ...]] = ()
    #: Properties that the constructor takes as keywords.
    promises: ClassVar[tuple[str, ...]] = PROMISES

    #: Arrays of NumPy leave the arithmetic to this class; they would make an array of couplings.
    __array_ufunc__ = None

    def __init__(
        self,
        num_nodes: int,
        heads: int,
        like: Tensor | Coupling,
        ptr: Tensor | None = None,
        *,
        _checked: bool | None = False,
        **promises: bool | None,
    ) -> None:
        self.num_nodes = num_nodes
        self.heads = heads
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device
        if not _checked:
            ptr = row_bounds(ptr, num_nodes)
            self._check_promises(promises)
        if ptr is not None:
            self.ptr = ptr
        for name, promise in promises.items():
            if promise is not None:
                setattr(self, name, promise)
        if promises.get("positive_semidefinite"):
            self.symmetric = True

    def _check_promises(self, promises: dict[str, bool | None]) -> None:
        for name, promise in promises.items():
            if name not in self.promises:
                raise TypeError(
                    f"{name} is no argument of {type(self).__name__}, nor a promise ({', '.join(self.promises)})."
                )
            if promise is not None:
                checks.check_flags(**{name: promise})

    row_stochastic = cached_property(_no)
    nonnegative = cached_property(_no)
    positive_semidefinite = cached_property(_no)
    low_rank = cached_property(_no)
    #: Whether a product costs O(N²), so that to factorise a small dense system is cheaper than many products.
    quadratic = cached_property(_no)
    #: Whether it takes a pass over stored entries to find a promise out, which costs more than to transpose.
    examines = cached_property(_no)

    @cached_property
    def ptr(self) -> Tensor | None:
        return None

    @cached_property
    def _metric(self) -> ByRow | None:
        return None

    @cached_property
    def symmetric(self) -> bool:
        return self.positive_semidefinite

    @cached_property
    def whole(self) -> bool:
        """Whether this process has all rows; a solver of a whole system needs them."""
        return True

    @abstractmethod
    def _product(self, v: Values) -> Values:
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

    def matmul(self, v: Sent) -> Received:
        """``S @ v`` for v [N, H, D] as a method, which ``torch.compile`` traces: ``@`` tries the tensor first."""
        self.check(v, "v")
        return self.received(v)

    def received(self, v: Sent) -> Received:
        """S v of checked values, as the step of an update has them."""
        values = self._expanded(v)
        moved = self._product(values)
        # Only here does the identity copy: inside sums and multiples nobody writes to the values that it passes on.
        return moved.clone() if moved is values else moved

    def transformed(
        self,
        v: State,
        matrix: Maps | None,
        hops: int = 1,
    ) -> State:
        """Return Σ_h S_h^hops v M_hᵀ, every head with a matrix of its own, its diagonal, or ``None``, the identity."""
        out = v.unsqueeze(1)
        if matrix is not None and matrix.dim() == 2:
            out = out * matrix
        elif matrix is not None:
            out = functional.linear(v, matrix.flatten(0, 1)).view(-1, *matrix.shape[:2])
        for _ in range(hops):
            out = self.received(out)
        return out.squeeze(1) if self.heads == 1 else out.sum(1)

    def _expanded(self, v: Sent) -> Values:
        """Values with at least the heads of S."""
        return v.expand(-1, self.heads, -1) if v.size(1) < self.heads else v

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

    def _ones(self, dtype: torch.dtype | None = None) -> ByRow:
        """Ones [N, H], by default in at least float32: a sum over many nodes leaves the range of half precision."""
        dtype = dtype or torch.promote_types(self.dtype, torch.float32)
        return torch.ones(self.num_nodes, self.heads, dtype=dtype, device=self.device)

    def both(self, v: Values, w: Float[Tensor, "N H C"]) -> tuple[Tensor, Tensor]:
        """Return S v and Sᵀ w, for values by head, and share what the two have in common."""
        return self.matmul(v), self.T.matmul(w)

    #: Whether no row is zero, so that those of a row-stochastic S all sum to one.
    no_empty_row = False

    def degree(self) -> ByRow:
        """Row sums d_i = Σ_j s_ij, by one product with ones."""
        if self.no_empty_row and self.row_stochastic:
            return self._ones()
        return self._product(self._ones().unsqueeze(2)).squeeze(2)

    def exact_degree(self, dtype: torch.dtype) -> ByRow:
        """Row sums with the precision of ``dtype``; rounded to fewer digits, D − S would leak constants."""
        # The product with ones of another dtype adds up in that dtype, which `degree` does not know of.
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

    def laplacian(self, v: Sent) -> Received:
        """(D − S) v = d·v − S v with d the row sums, in at least float32."""
        self.check(v, "v")
        wide = v.to(torch.promote_types(v.dtype, torch.float32))
        return self.laplacian_and_degree(wide)[0]

    def laplacian_and_degree(
        self, v: Sent
    ) -> tuple[Received, Float[Tensor, "N out_heads"]]:
        """(D − S) v and d by one product with [v, 1], for checked values of at least float32."""
        # Row sums of the same product, not those of ``degree``, which may be rounded otherwise: a constant state then
        # stays where it is to the last digit.
        values = torch.cat([v, v.new_ones(*v.shape[:2], 1)], 2)
        moved = self._product(self._expanded(values))
        degree = moved[:, :, -1:]
        return degree * v - moved[:, :, :-1], degree.squeeze(2)

    def majorant(self, convex: bool, degree: ByRow | None = None) -> ByRow:
        """A diagonal p that bounds D − S, as a certified step needs it (Theorem T1 of docs/certified.md).

        With ``convex``, 2 diag(p) ⪰ D − S, and p is the row sums d. Otherwise diag(p) ⪰ D − S, and p is 2d, or d where
        S is positive semi-definite. `CouplingMismatchError` unless S promises to be symmetric and nonnegative.
        ``degree`` is d where the caller has it, from `laplacian_and_degree`.
        """
        missing = [
            name for name in ("symmetric", "nonnegative") if not getattr(self, name)
        ]
        if missing:
            raise errors.CouplingMismatchError(
                f"a certified step needs a coupling that is symmetric and nonnegative; {self!r} does not promise to be "
                f"{' or '.join(missing)}. Take row_stochastic=False in all-pair diffusivities (one denominator divides "
                f"everything in the end), AdjacencyDiffusivity('sym') or ('sum') of an undirected graph "
                f"(graph.to_undirected()), factors that are numbers >= 0 or a Positive, and for the simple penalty of "
                f"distances a constraint that keeps states within 2 of each other."
            )
        if degree is None:
            degree = self.degree()
        return degree if convex or self.positive_semidefinite else 2 * degree

    @property
    def shape(self) -> torch.Size:
        """[H, N, N], that of :meth:`to_dense`."""
        return torch.Size((self.heads, self.num_nodes, self.num_nodes))

    def at(self, edge_index: Pairs) -> Entries:
        """Entries [E, H] of listed pairs [2, E]: s_ij with i = ``edge_index[1]``, j = ``edge_index[0]``."""
        return self._at(
            checks.check_pairs(edge_index, "edge_index", self.num_nodes, self.device)
        )

    def log_at(self, edge_index: Pairs) -> Entries:
        """log s_ij of listed pairs; for couplings defined by logarithms finite where s_ij itself underflows."""
        return self._log_at(
            checks.check_pairs(edge_index, "edge_index", self.num_nodes, self.device)
        )

    def _at(self, edge_index: Pairs) -> Entries:
        """Entries of checked pairs, here by one product with a unit vector for each distinct source."""
        # Many pairs share a source, and a product serves all of them.
        source, column = torch.unique(edge_index[0], return_inverse=True)
        units = torch.zeros(
            self.num_nodes, 1, source.numel(), dtype=self.dtype, device=self.device
        )
        units[source, 0, torch.arange(source.numel(), device=self.device)] = 1
        return (self @ units)[edge_index[1], :, column]

    def _log_at(self, edge_index: Pairs) -> Entries:
        return self._at(edge_index).log()

    def to_dense(self) -> Matrices:
        """The dense matrices [H, N, N], the reference in tests; warns above 2²⁶ entries."""
        entries = self.heads * self.num_nodes**2
        if entries > LARGE:
            warnings.warn(
                f"to_dense() of {type(self).__name__} writes {entries:,} entries; S @ v, S.degree() and "
                f"S.at(edge_index) work without them.",
                stacklevel=2,
            )
        return self._dense()

    def _dense(self) -> Matrices:
        """The matrices, here by products with unit vectors."""
        eye = torch.eye(self.num_nodes, dtype=self.dtype, device=self.device)
        return (self @ eye.unsqueeze(1)).permute(1, 0, 2)

    def _entries_of_all_pairs(self) -> Matrices:
        """`_dense` of a class whose entries have more digits, or take less time, than products with unit vectors."""
        nodes = torch.arange(self.num_nodes, device=self.device)
        target, source = torch.cartesian_prod(nodes, nodes).T
        return self._at(torch.stack([source, target])).T.reshape(self.shape)

    @property
    def metric(self) -> ByRow | None:
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
        self, function: Callable[[Tensor], Tensor], v: Values
    ) -> Values | None:
        """f(D̄ − S) v for an elementwise f where the eigenvectors of D̄ − S are known, otherwise ``None``."""
        return None

    def as_linear_operator(self, head: int = 0) -> LinearOperator:
        """One head as a SciPy operator (float64, N×N), for example for ``scipy.sparse.linalg.eigsh``."""
        from scipy.sparse.linalg import LinearOperator

        checks.check_index(head, "head", self.heads)

        def multiply(coupling: Coupling, x: np.ndarray) -> np.ndarray:
            # SciPy passes slices of its work space, and integers; torch takes no negative strides.
            columns = np.ascontiguousarray(x, dtype=np.float64)
            values = torch.from_numpy(columns).to(self.device)
            with torch.no_grad():
                # Not -1, which is ambiguous without nodes.
                columns_of = math.prod(x.shape[1:])
                product = coupling.matmul(values.reshape(self.num_nodes, 1, columns_of))
            return product[:, head].double().cpu().numpy().reshape(x.shape)

        forward = partial(multiply, self)

        def adjoint(x: np.ndarray) -> np.ndarray:
            return multiply(self.T, x)

        return LinearOperator(
            self.shape[1:],
            forward,
            rmatvec=adjoint,
            matmat=forward,
            rmatmat=adjoint,
            dtype=np.float64,
        )

    def to(self: C, *args: Any, **kwargs: Any) -> C:
        """S in another dtype or on another device, with arguments as of a tensor: ``S.to("cuda", torch.float64)``.

        Gradients flow through. Row boundaries stay on the CPU.
        """
        here = torch.empty(0, dtype=self.dtype, device=self.device)
        try:
            there = here.to(*args, **kwargs)
        except NotImplementedError as error:
            raise ValueError(
                f"device must stay meta, where the coupling has no values to move; got {args or kwargs}."
            ) from error
        except (TypeError, RuntimeError) as error:
            raise TypeError(
                f"to takes a dtype and a device, as a tensor does; got {args or kwargs}."
            ) from error
        if not there.is_floating_point():
            raise TypeError(f"dtype must be a floating torch.dtype; got {there.dtype}.")
        if (there.dtype, there.device) == (here.dtype, here.device):
            return self
        # Parts may be more precise than the coupling, and stay so on another device.
        dtype = None if there.dtype == self.dtype else there.dtype
        return self._mapped(_once(partial(_moved, dtype, there.device)))

    def detach(self: C) -> C:
        """S with the same entries, detached from the graph of autograd, whose memory it does not keep."""
        return self._mapped(_once(_detached))

    def _mapped(self: C, change: Callable[[Any], Any]) -> C:
        """S of the parts that ``change`` makes of a tensor or a graph."""
        # A copy keeps options and promises, which no constructor has to be told again.
        mapped = copy.copy(self)
        example = change(torch.empty(0, dtype=self.dtype, device=self.device))
        mapped.dtype = example.dtype
        mapped.device = example.device
        for name, value in vars(self).items():
            if name in self.parts:
                setattr(mapped, name, _of_part(value, change))
            elif name == "_metric" and value is not None:
                # It is without gradient and in double precision; made of rounded parts it would lose digits.
                mapped._metric = value.to(example.device)
            elif name != "ptr" and not isinstance(value, bool):
                # What was computed from the parts is computed again: kept, it would hold on to the graph of autograd,
                # or to another device. Promises and row boundaries do not depend on either.
                computed = getattr(type(self), name, None)
                if isinstance(computed, cached_property):
                    delattr(mapped, name)
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

    def float(self: C) -> C:
        """S in single precision."""
        return self.to(torch.float32)

    def double(self: C) -> C:
        """S in double precision."""
        return self.to(torch.float64)


def _of_coupling(name: str) -> cached_property[Any]:
    """A property that is the one of ``coupling``."""
    return cached_property(lambda derived: getattr(derived.coupling, name))


class DerivedCoupling(Coupling):
    """Base of couplings made of one other, ``coupling``, that keep these of its properties."""

    parts: ClassVar[tuple[str, ...]] = ("coupling",)

    def __init__(
        self,
        coupling: Coupling,
        heads: int | None = None,
        *,
        _checked: bool | None = False,
        **promises: bool | None,
    ) -> None:
        heads = heads or coupling.heads
        super().__init__(
            coupling.num_nodes, heads, coupling, None, _checked=_checked, **promises
        )
        self.coupling = coupling

    ptr = _of_coupling("ptr")
    symmetric = _of_coupling("symmetric")
    low_rank = _of_coupling("low_rank")
    _metric = _of_coupling("metric")
    quadratic = _of_coupling("quadratic")
    whole = _of_coupling("whole")
    examines = _of_coupling("examines")


class TransposedCoupling(DerivedCoupling):
    """Sᵀ of a coupling whose ``_product`` takes ``transpose=True``."""

    low_rank = False
    _metric = None

    nonnegative = _of_coupling("nonnegative")

    def _product(self, v: Values) -> Values:
        return self.coupling._product(v, transpose=True)  # type: ignore[call-arg]

    def _transpose(self) -> Coupling:
        return self.coupling

    def _at(self, edge_index: Pairs) -> Entries:
        return self.coupling._at(edge_index.flip(0))

    def _log_at(self, edge_index: Pairs) -> Entries:
        return self.coupling._log_at(edge_index.flip(0))

    def _dense(self) -> Matrices:
        return self.coupling._dense().mT.contiguous()


def as_scale(scale: object, heads: int) -> float | Tensor:
    """Return a finite number, or a tensor with a single element or one per head; numbers of NumPy become Python's."""
    scale = checks.python_number(scale)
    if not isinstance(scale, Tensor):
        # While torch traces, a number may be a symbol.
        if not torch.compiler.is_compiling():
            checks.check_number(cast("float", scale), "scale")
        return cast("float", scale)
    if scale.is_complex() or scale.dtype == torch.bool or scale.layout != torch.strided:
        raise TypeError(f"scale must hold real numbers; got {checks.describe(scale)}.")
    fits = scale.numel() > 0 if heads == 1 else scale.numel() in (1, heads)
    if scale.dim() > 1 or not fits:
        raise ValueError(
            f"scale must be a number, a 0-dimensional tensor or [{heads}]; got {checks.describe(scale)}."
        )
    return scale


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
        self,
        scale: float | Tensor,
        coupling: Coupling,
        *,
        nonnegative: bool = False,
        _checked: bool | None = False,
    ) -> None:
        if not _checked:
            check_coupling_kind(coupling)
            checks.check_flags(nonnegative=nonnegative)
            scale = as_scale(scale, coupling.heads)
        heads = coupling.heads
        if isinstance(scale, Tensor):
            checks.check_device(scale, "scale", coupling.device, "the coupling")
            heads = max(heads, scale.numel())
        else:
            nonnegative = bool(scale >= 0)  # makes a comparison of symbols concrete
        super().__init__(coupling, heads, _checked=True)
        self.scale = scale
        self._positive = nonnegative

    @cached_property
    def nonnegative(self) -> bool:
        return self._positive and self.coupling.nonnegative

    @cached_property
    def positive_semidefinite(self) -> bool:
        return self._positive and self.coupling.positive_semidefinite

    def _scaled(self, value: Tensor, behind: int) -> Tensor:
        """a · value, where so many axes lie behind that of heads."""
        if not isinstance(self.scale, Tensor):
            return self.scale * value
        return self.scale.view(-1, *[1] * behind) * value

    def _product(self, v: Values) -> Values:
        return self._scaled(self.coupling._product(v), 1)

    def _transpose(self) -> Coupling:
        return ScaledCoupling(self.scale, self.coupling.T, nonnegative=self._positive)

    def degree(self) -> ByRow:
        return self._scaled(self.coupling.degree(), 0)

    def laplacian_and_degree(self, v: Sent) -> tuple[Received, ByRow]:
        # Multiplied once the terms have cancelled: a · d rounds otherwise than a · (S v), also where D − S is zero.
        moved, degree = self.coupling.laplacian_and_degree(v)
        return self._scaled(moved, 1), self._scaled(degree, 0)

    def _at(self, edge_index: Pairs) -> Entries:
        return self._scaled(self.coupling._at(edge_index), 0)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        form = self.coupling.low_rank_form(dtype)
        if form is None:
            return None
        one = form.left.new_ones(1, form.left.size(1))
        return form.reweighted(self._scaled(one, 0))

    def _dense(self) -> Matrices:
        return self._scaled(self.coupling._dense(), 2)


def _check_terms(terms: object) -> None:
    if not isinstance(terms, Iterable):
        raise TypeError(
            f"terms must be a sequence of couplings; got {checks.describe(terms)}."
        )
    couplings = list(terms)
    for term in couplings:
        check_coupling_kind(term, "every one of terms")
    if not couplings:
        raise ValueError("terms must hold a coupling at least; got none.")
    first = couplings[0]
    heads = max(term.heads for term in couplings)
    for term in couplings:
        if term.num_nodes != first.num_nodes or term.heads not in (1, heads):
            raise ValueError(
                f"the terms of a sum must couple the same nodes, with one number of heads or one head; got {couplings}."
            )
        if term.device != first.device:
            raise ValueError(
                f"the terms of a sum must couple nodes on one device; got {first.device} and {term.device}. Move one "
                f"with .to(device)."
            )


def _of_terms(
    name: str, combine: Callable[[Iterable[bool]], bool]
) -> cached_property[bool]:
    """A property that holds if it does for ``all`` or ``any`` of the terms."""
    return cached_property(
        lambda total: combine(getattr(term, name) for term in total.terms)
    )


class SumCoupling(Coupling):
    """The sum of couplings; one with a single head is added to every head of the others, and sums in it are flattened.

    Examples:
        >>> isinstance(UniformCoupling(6) + IdentityCoupling(6), SumCoupling)
        True
    """

    parts = ("terms",)

    symmetric = _of_terms("symmetric", all)
    nonnegative = _of_terms("nonnegative", all)
    positive_semidefinite = _of_terms("positive_semidefinite", all)
    whole = _of_terms("whole", all)
    quadratic = _of_terms("quadratic", any)
    examines = _of_terms("examines", any)

    def __init__(self, terms: Sequence[Coupling], *, _checked: bool = False) -> None:
        if not _checked:
            _check_terms(terms)
        flat: list[Coupling] = []
        for term in terms:
            flat += term.terms if isinstance(term, SumCoupling) else [term]
        first = flat[0]
        heads = max(term.heads for term in flat)
        super().__init__(first.num_nodes, heads, first, _checked=True)
        self.dtype = reduce(torch.promote_types, [term.dtype for term in flat])
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
    def low_rank(self) -> bool:
        return all(term.low_rank for term in self.terms) and self._over_the_same_graphs

    @cached_property
    def _metric(self) -> ByRow | None:
        """The metric of all terms; a diagonal term is self-adjoint in any."""
        metrics = [term.metric for term in self._reaching or self.terms]
        first = metrics[0]
        if first is None:
            return None
        same = all(m is not None and bool((m == first).all()) for m in metrics)
        return first if same else None

    @property
    def _reaching(self) -> list[Coupling]:
        """The terms that couple different nodes."""
        return [
            t for t in self.terms if t.ptr is None or bool((t.ptr.diff() > 1).any())
        ]

    @property
    def _over_the_same_graphs(self) -> bool:
        """Whether all terms that couple different nodes have the same row boundaries."""
        return all(
            term.ptr is self.ptr
            or (
                term.ptr is not None
                and self.ptr is not None
                and torch.equal(term.ptr, self.ptr)
            )
            for term in self._reaching
        )

    def _product(self, v: Values) -> Values:
        total = self.terms[0]._product(v)
        for term in self.terms[1:]:
            total = total + term._product(v)
        return total

    def _transpose(self) -> Coupling:
        return SumCoupling([term.T for term in self.terms])

    def degree(self) -> ByRow:
        return reduce(add, [term.degree() for term in self.terms])

    def laplacian_and_degree(self, v: Sent) -> tuple[Received, ByRow]:
        # Each term cancels by itself, as the others would round what is left of a small one.
        laplacians, degrees = zip(
            *[term.laplacian_and_degree(v) for term in self.terms], strict=True
        )
        return reduce(add, laplacians), reduce(add, degrees)

    def majorant(self, convex: bool, degree: ByRow | None = None) -> ByRow:
        # On a convex set p is the row sums, whatever the terms are.
        bound = super().majorant(convex, degree)
        if convex or self.positive_semidefinite:
            return bound
        # The bound of a sum is the sum of bounds, and those of semi-definite terms are d, not 2d.
        definite = [term.degree() for term in self.terms if term.positive_semidefinite]
        return reduce(sub, definite, bound)

    def _at(self, edge_index: Pairs) -> Entries:
        return reduce(add, [term._at(edge_index) for term in self.terms])

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        forms = [
            form
            for term in self.terms
            if (form := term.low_rank_form(dtype)) is not None
        ]
        if forms and self._over_the_same_graphs:
            return LowRankForm.total(forms)
        return None

    def _dense(self) -> Matrices:
        return reduce(add, [term._dense() for term in self.terms])


def check_coupling_kind(coupling: object, name: str = "coupling") -> None:
    """Raise ``TypeError`` unless ``coupling`` is a `Coupling`."""
    if not isinstance(coupling, Coupling):
        raise TypeError(
            f"{name} must be a Coupling; got {checks.describe(coupling)}. A diffusivity makes one, D(x, graph); "
            f"a layer returns its own with return_coupling=True."
        )


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
        return type(part)(*changed) if hasattr(part, "_fields") else type(part)(changed)
    return part


def _once(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``change`` that makes one copy of an object: if query and key are one tensor, kernels do half of the work."""
    copies: dict[Any, Any] = {}

    def changed(part: Any) -> Any:
        if part not in copies:
            copies[part] = change(part)
        return copies[part]

    return changed


def _moved(
    dtype: torch.dtype | None, device: torch.device, part: Tensor | Graph
) -> Tensor | Graph:
    if isinstance(part, Graph):  # which keeps the dtype of its weights
        return part.to(device)
    return part.to(device, dtype if part.is_floating_point() else None)


def _detached(part: Tensor | Graph) -> Tensor | Graph:
    if isinstance(part, Tensor):
        return part.detach()
    if part.edge_weight is None or not part.edge_weight.requires_grad:
        return part
    return part.with_weights(part.edge_weight.detach())
