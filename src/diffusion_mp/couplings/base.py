"""The base class of couplings, ``Coupling``: a matrix-free linear operator over nodes, one matrix per head."""

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
from diffusion_mp.graph.ops import detached_mean_rows
from diffusion_mp.runtime.cache import cached_property
from diffusion_mp.runtime.precision import wide_dtype, widened

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

# Entries of a dense coupling above which to_dense warns: 256 MiB in float32.
LARGE = 1 << 26

PROMISES = ("symmetric", "row_stochastic", "nonnegative", "positive_semidefinite")


def _no(coupling: Coupling) -> bool:
    return False


C = TypeVar("C", bound="Coupling")


class Coupling(ABC):
    """A linear operator over nodes that holds the weights of the messages between them, one matrix per head.

    A coupling S maps values v to S v (Wu, Wipf & Yan 2025, Eq. 4):

        (S v)_i = Σ_j s_ij v_j

    Row i receives and column j sends. If S or v has a single head, that head broadcasts against the heads of the other.

    A subclass names its ``parts`` and implements ``_product`` and ``_transpose``. It may override ``degree``, ``_at``
    and ``_dense`` where it knows row sums or entries. ``_product`` and ``_at`` receive checked arguments. ``matmul``
    and ``at`` check their arguments.

    A subclass states what is known of S by overriding these properties, each by an attribute or by a (cached) property:

    - ``symmetric``: S = Sᵀ for every head.
    - ``nonnegative``: no entry is negative.
    - ``row_stochastic``: every row sums to one, except for rows of zeros.
    - ``positive_semidefinite``: xᵀSx ≥ 0 for all x, and S = Sᵀ.
    - ``low_rank``: :meth:`low_rank_form` represents all of S.
    - ``_metric``: d̄ > 0 [N, H] with diag(d̄) S symmetric, or ``None`` if none is known. A symmetric S does not use it.
    - ``ptr``: the row boundaries, if they are not an argument of the constructor.

    Args:
        num_nodes: number N of nodes.
        heads: number H of heads.
        like: tensor or coupling from which S takes its dtype and device.
        ptr: row boundaries [B+1] of the B graphs of a ragged batch, on the CPU. Entries between graphs are zero.
            ``None`` is one graph.

    Options:
        symmetric: whether S = Sᵀ for every head. ``None``, the default, leaves it to the class.
        row_stochastic: whether every row sums to one, except for rows of zeros. ``None``, the default, leaves it to the
            class.
        nonnegative: whether no entry is negative. ``None``, the default, leaves it to the class.
        positive_semidefinite: whether xᵀSx ≥ 0 for all x, and S = Sᵀ. ``None``, the default, leaves it to the class.

    Shapes:
        - v: [N, H, D]; with one head also [N, C] or [N].
        - S @ v: the shape of v, with the larger of the two numbers of heads.

    Examples:
        >>> S = SimpleDiffusivity()(x)
        >>> isinstance(S, Coupling), (S @ x.unsqueeze(1)).shape  # S multiplies states [nodes, heads, channels]
        (True, torch.Size([6, 1, 4]))
    """

    #: Attributes that hold the tensors, couplings and graphs of S, or lists of these: :meth:`to` maps over them.
    parts: ClassVar[tuple[str, ...]] = ()
    #: Properties that the constructor takes as keyword arguments.
    promises: ClassVar[tuple[str, ...]] = PROMISES

    #: NumPy arrays leave the arithmetic to this class. Otherwise they would make an array of couplings.
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
            # Only if given, since a subclass may compute its row boundaries.
            self.ptr = ptr
        for name, promise in promises.items():
            if promise is not None:
                setattr(self, name, promise)
        # A semi-definite S is symmetric, so a class that examines its entries need not look.
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
    #: Whether a product costs O(N²). If so, a solver factorises a small dense system instead of taking many products.
    quadratic = cached_property(_no)
    #: Whether finding a promise takes a pass over stored entries, which costs more than a transpose.
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
        """Whether this process has all rows, which a solver of the whole system needs."""
        return True

    @abstractmethod
    def _product(self, v: Values) -> Values:
        """Return S v for checked values with at least as many heads as S; v itself, or a new tensor."""

    @abstractmethod
    def _transpose(self) -> Coupling:
        """Return the operator Sᵀ."""

    def __matmul__(self, v: Float[Tensor, "N ..."]) -> Float[Tensor, "N ..."]:
        """Return S v for ``v`` [N, H, D]; with one head also for a vector [N] or a state [N, C]."""
        if isinstance(v, Tensor) and v.dim() in (1, 2) and self.heads == 1:
            values = v.view(len(v), 1, v.shape[1:].numel())
            return self.matmul(values).reshape(v.shape)
        return self.matmul(v)

    def matmul(self, v: Sent) -> Received:
        """Return ``S @ v`` for values [N, H, D].

        ``torch.compile`` traces this method. For ``@`` it tries the method of the tensor first.

        Args:
            v: values [N, H, D] that the nodes send, on the device of S. A single head broadcasts.

        Returns:
            Values [N, H, D] that the nodes receive.
        """
        self.check(v, "v")
        return self.received(v)

    def received(self, v: Sent) -> Received:
        """Return S v for values that are already checked, as in the step of an update."""
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
        """Return Σ_h S_h^hops v M_hᵀ, where each head h applies its own matrix M_h to the state.

        Args:
            v: state [N, C].
            matrix: the matrices M [H, C, C], or their diagonals [H, C]. ``None`` is the identity for every head.
            hops: power of S; one product by default.

        Returns:
            The sum over the heads, [N, C].
        """
        out = v.unsqueeze(1)
        if matrix is not None and matrix.dim() == 2:
            out = out * matrix
        elif matrix is not None:
            out = functional.linear(v, matrix.flatten(0, 1)).view(-1, *matrix.shape[:2])
        for _ in range(hops):
            out = self.received(out)
        return out.squeeze(1) if self.heads == 1 else out.sum(1)

    def _expanded(self, v: Sent) -> Values:
        """Return the values with at least the heads of S."""
        return v.expand(-1, self.heads, -1) if v.size(1) < self.heads else v

    def check(self, v: Tensor, name: str) -> None:
        """Raise unless ``v`` is a tensor of values [N, H, D] for these nodes, on the device of the coupling.

        Args:
            v: the tensor to check.
            name: the name of ``v`` in the message.
        """
        checks.check_values(v, self.num_nodes, self.heads, name)
        checks.check_device(v, name, self.device, "the coupling")

    @property
    def T(self) -> Coupling:
        """Sᵀ as a coupling; S itself if it is known to be symmetric."""
        # A transpose is cheaper than a pass over the entries.
        if not self.examines and self.symmetric:
            return self
        return self._transpose()

    def _ones(self, dtype: torch.dtype | None = None) -> ByRow:
        """Return ones [N, H], by default in at least float32: long sums leave the range of half precision."""
        dtype = dtype or wide_dtype(self.dtype)
        return torch.ones(self.num_nodes, self.heads, dtype=dtype, device=self.device)

    def both(self, v: Values, w: Float[Tensor, "N H C"]) -> tuple[Tensor, Tensor]:
        """Return S v and Sᵀ w together, so that a subclass can share the work that the two products have in common.

        Args:
            v: values [N, H, D] for S, with all heads.
            w: values [N, H, C] for Sᵀ, with all heads.
        """
        return self.matmul(v), self.T.matmul(w)

    #: Whether no row is zero. If so, every row of a row-stochastic S sums to one.
    no_empty_row = False

    def degree(self) -> ByRow:
        """Return the row sums d_i = Σ_j s_ij [N, H], by one product with ones."""
        if self.no_empty_row and self.row_stochastic:
            return self._ones()
        return self._product(self._ones().unsqueeze(2)).squeeze(2)

    def exact_degree(self, dtype: torch.dtype) -> ByRow:
        """Return the row sums [N, H] with the precision of ``dtype``.

        If the row sums had fewer digits than the product, D − S would not map a constant state to zero.

        Args:
            dtype: the dtype in which the sums are accumulated and returned.
        """
        # A product with ones of another dtype accumulates in that dtype; `degree` takes no dtype.
        if torch.promote_types(self.dtype, dtype) == self.dtype:
            return self.degree().to(dtype)
        return self.matmul(self._ones(dtype).unsqueeze(2)).squeeze(2)

    def dirichlet(self, x: Tensor) -> Float[Tensor, " heads"]:
        """Return the Dirichlet energy of a state for every head, accumulated in at least float32.

        With the row sums D and the column sums C of S:

            Σ_ij s_ij ‖x_i − x_j‖² = ⟨x, (D − S)x⟩ + ⟨x, (C − Sᵀ)x⟩

        Args:
            x: state [N, C] or [N, H, D].

        Returns:
            One energy per head, [H].
        """
        if isinstance(x, Tensor) and x.dim() == 2:
            x = x.unsqueeze(1)
        self.check(x, "x")
        values = widened(x)
        # Subtracting the mean of each graph changes nothing, and fewer digits cancel.
        values = values - detached_mean_rows(values, self.ptr)
        moved = self.laplacian(values) + self.T.laplacian(values)
        return (values * moved).sum((0, 2))

    def laplacian(self, v: Sent) -> Received:
        """Return the Laplacian (D − S) v = d·v − S v, where d are the row sums, in at least float32.

        Args:
            v: values [N, H, D].

        Returns:
            Values [N, H, D].
        """
        self.check(v, "v")
        wide = widened(v)
        return self.laplacian_and_degree(wide)[0]

    def laplacian_and_degree(
        self, v: Sent
    ) -> tuple[Received, Float[Tensor, "N out_heads"]]:
        """Return (D − S) v and the row sums d from a single product with [v, 1].

        Args:
            v: checked values [N, H, D] of at least float32.

        Returns:
            (D − S) v [N, H, D], and d [N, H].
        """
        # The row sums come from the same product, since ``degree`` may round differently. A constant state then stays
        # unchanged to the last digit.
        values = torch.cat([v, v.new_ones(*v.shape[:2], 1)], 2)
        moved = self._product(self._expanded(values))
        degree = moved[:, :, -1:]
        return degree * v - moved[:, :, :-1], degree.squeeze(2)

    def majorant(self, convex: bool, degree: ByRow | None = None) -> ByRow:
        """Return the diagonal p [N, H] that bounds D − S in a certified step (Theorem T1 of docs/certified.md).

        Args:
            convex: whether the state stays in a convex set. If so, 2 diag(p) ⪰ D − S, and p is the row sums d.
                Otherwise diag(p) ⪰ D − S, and p is 2d, or d if S is positive semi-definite.
            degree: d, if the caller has it from `laplacian_and_degree`. ``None`` computes it.

        Raises:
            CouplingMismatchError: S does not promise to be symmetric and nonnegative.
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
        """The shape [H, N, N] of the matrices that :meth:`to_dense` returns."""
        return torch.Size((self.heads, self.num_nodes, self.num_nodes))

    def at(self, edge_index: Pairs) -> Entries:
        """Return the entries s_ij of listed pairs, with i = ``edge_index[1]`` and j = ``edge_index[0]``.

        Args:
            edge_index: pairs [2, E] of a sender and a receiver.

        Returns:
            Entries [E, H].
        """
        return self._at(
            checks.check_pairs(edge_index, "edge_index", self.num_nodes, self.device)
        )

    def log_at(self, edge_index: Pairs) -> Entries:
        """Return log s_ij of listed pairs.

        A coupling that is defined by logarithms returns finite values even where s_ij underflows.

        Args:
            edge_index: pairs [2, E] of a sender and a receiver.

        Returns:
            Logarithms [E, H].
        """
        return self._log_at(
            checks.check_pairs(edge_index, "edge_index", self.num_nodes, self.device)
        )

    def _at(self, edge_index: Pairs) -> Entries:
        """Return the entries of checked pairs; here by one product with a unit vector for each distinct source."""
        # Many pairs share a source, and a product serves all of them.
        source, column = torch.unique(edge_index[0], return_inverse=True)
        # Column c is the unit vector of the c-th source.
        nodes = torch.arange(self.num_nodes, device=self.device)
        units = (nodes[:, None, None] == source).to(self.dtype)
        return (self @ units)[edge_index[1], :, column]

    def _log_at(self, edge_index: Pairs) -> Entries:
        return self._at(edge_index).log()

    def to_dense(self) -> Matrices:
        """Return the dense matrices [H, N, N], a reference for tests; warn above 2²⁶ entries."""
        entries = self.heads * self.num_nodes**2
        if entries > LARGE:
            warnings.warn(
                f"to_dense() of {type(self).__name__} writes {entries:,} entries; S @ v, S.degree() and "
                f"S.at(edge_index) work without them.",
                stacklevel=2,
            )
        return self._dense()

    def _dense(self) -> Matrices:
        """Return the matrices; here by products with unit vectors."""
        eye = torch.eye(self.num_nodes, dtype=self.dtype, device=self.device)
        return (self @ eye.unsqueeze(1)).permute(1, 0, 2)

    def _entries_of_all_pairs(self) -> Matrices:
        """Implement `_dense` by entries, for classes where they have more digits or take less time than products."""
        nodes = torch.arange(self.num_nodes, device=self.device)
        target, source = torch.cartesian_prod(nodes, nodes).T
        return self._at(torch.stack([source, target])).T.reshape(self.shape)

    @property
    def metric(self) -> ByRow | None:
        """Weights d̄ > 0 [N, H] that make diag(d̄) S symmetric, in float64; ``None`` if none are known.

        S is then self-adjoint in the inner product Σ_i d̄_i u_i v_i. The weights are 1 for a symmetric S, and the row
        sums of Ω for S = D̄⁻¹Ω. They are computed on first access, without gradient.
        """
        if self.symmetric:
            return self._ones(torch.float64)
        with torch.no_grad():
            # A copy, since the computed metric is cached.
            if self._metric is None:
                return None
            return self._metric.expand(-1, self.heads).clone()

    @property
    def reversible(self) -> bool:
        """Whether S is symmetric, or self-adjoint in a known `metric`."""
        return self.symmetric or self.metric is not None

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        """Return the part of S that is a diagonal plus a product of features; all of S if ``low_rank`` is true.

        Args:
            dtype: dtype of the result.

        Returns:
            The part, or ``None`` if S has none.
        """
        return None

    def laplacian_function(
        self, function: Callable[[Tensor], Tensor], v: Values
    ) -> Values | None:
        """Return f(D̄ − S) v if the eigenvectors of D̄ − S are known, otherwise ``None``.

        Args:
            function: f, an elementwise function of the eigenvalues.
            v: values [N, H, D].
        """
        return None

    def as_linear_operator(self, head: int = 0) -> LinearOperator:
        """Return one head as a SciPy operator [N, N] in float64, for example for ``scipy.sparse.linalg.eigsh``.

        Args:
            head: index of the head; the first by default, which is the only one of many couplings.
        """
        from scipy.sparse.linalg import LinearOperator

        checks.check_index(head, "head", self.heads)
        if self.device.type == "meta":
            raise ValueError(
                f"a coupling on the meta device has no values to multiply with; got {self!r}."
            )

        def multiply(x: np.ndarray, transpose: bool = False) -> np.ndarray:
            coupling = self.T if transpose else self
            # SciPy passes slices of its workspace, and integers; torch takes no negative strides.
            columns = np.ascontiguousarray(x, dtype=np.float64)
            values = torch.from_numpy(columns).to(self.device)
            with torch.no_grad():
                # Not -1, which is ambiguous without nodes.
                columns_of = math.prod(x.shape[1:])
                product = coupling.matmul(values.reshape(self.num_nodes, 1, columns_of))
            return product[:, head].double().cpu().numpy().reshape(x.shape)

        adjoint = partial(multiply, transpose=True)
        return LinearOperator(
            self.shape[1:],
            multiply,
            rmatvec=adjoint,
            matmat=multiply,
            rmatmat=adjoint,
            dtype=np.float64,
        )

    def to(self: C, *args: Any, **kwargs: Any) -> C:
        """Return S in another dtype or on another device. Gradients flow through; row boundaries stay on the CPU.

        Args:
            args: positional arguments of ``Tensor.to``, as in ``S.to("cuda", torch.float64)``.
            kwargs: keyword arguments of ``Tensor.to``.

        Raises:
            TypeError: the dtype is not a floating-point dtype, or ``Tensor.to`` does not take the arguments.
            ValueError: S is on the meta device and has no values to move.
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
        """Return S with the same entries, detached from the autograd graph, whose memory the result does not keep."""
        return self._mapped(_once(_detached))

    def _mapped(self: C, change: Callable[[Any], Any]) -> C:
        """Return S with parts that ``change`` makes of its tensors and graphs."""
        # A copy keeps options and promises without a call of the constructor.
        mapped = copy.copy(self)
        example = change(torch.empty(0, dtype=self.dtype, device=self.device))
        mapped.dtype = example.dtype
        mapped.device = example.device
        for name, value in vars(self).items():
            if name in self.parts:
                setattr(mapped, name, _of_part(value, change))
            elif name == "_metric" and value is not None:
                # The metric has no gradient and is in double precision. From rounded parts it would lose digits.
                mapped._metric = value.to(example.device)
            elif name != "ptr" and not isinstance(value, bool):
                # Cached results of the parts are computed again, since they would keep the autograd graph or another
                # device. Promises and row boundaries depend on neither.
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
        # Only promises that are known already: finding one may take a product or a pass over the entries.
        shown = [f"num_nodes={self.num_nodes}", f"heads={self.heads}"]
        for name in PROMISES:
            if vars(self).get(name, getattr(type(self), name)) is True:
                shown.append(name)
        return f"{type(self).__name__}({', '.join(shown)})"

    def float(self: C) -> C:
        """Return S in single precision."""
        return self.to(torch.float32)

    def double(self: C) -> C:
        """Return S in double precision."""
        return self.to(torch.float64)


def of_coupling(name: str) -> cached_property[Any]:
    """Return a property that reads the property ``name`` of ``coupling``."""
    return cached_property(lambda derived: getattr(derived.coupling, name))


class DerivedCoupling(Coupling):
    """Base of couplings that are made of one other coupling and keep the properties below.

    Args:
        coupling: the coupling from which this one is made.
        heads: number of heads; by default the number of ``coupling``.
        promises: see `Coupling`.
    """

    parts: ClassVar[tuple[str, ...]] = ("coupling",)

    def __init__(
        self,
        coupling: Coupling,
        heads: int | None = None,
        *,
        _checked: bool | None = False,
        **promises: bool | None,
    ) -> None:
        super().__init__(
            coupling.num_nodes,
            heads or coupling.heads,
            coupling,
            None,  # row boundaries are those of the coupling, read when they are needed
            _checked=_checked,
            **promises,
        )
        self.coupling = coupling

    ptr = of_coupling("ptr")
    symmetric = of_coupling("symmetric")
    low_rank = of_coupling("low_rank")
    _metric = of_coupling("metric")
    quadratic = of_coupling("quadratic")
    whole = of_coupling("whole")
    examines = of_coupling("examines")


class TransposedCoupling(DerivedCoupling):
    """The transpose Sᵀ of a coupling whose ``_product`` takes ``transpose=True``."""

    # A low-rank form and a metric of S belong to S, and not to Sᵀ.
    low_rank = False
    _metric = None

    nonnegative = of_coupling("nonnegative")

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
    """Return a finite number, or a tensor with one element or one per head; NumPy numbers become Python numbers."""
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
    """Multiply a coupling by a factor: a number, a 0-dimensional tensor or one factor per head.

    Args:
        scale: the factor, a finite number, a tensor with one element, or a tensor [H]. A tensor may be learnable.
        coupling: the coupling S to multiply.
        nonnegative: the promise that a tensor ``scale`` has no negative element. Only then does the product keep the
            promises of S about signs. ``False`` by default, since reading the elements would synchronise a GPU. The
            sign of a number is known without a promise.

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
        """Return a · value, where ``behind`` axes follow the axis of the heads."""
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
        # Multiply after the terms have cancelled: a · d and a · (S v) round differently, even where D − S is zero.
        moved, degree = self.coupling.laplacian_and_degree(v)
        return self._scaled(moved, 1), self._scaled(degree, 0)

    def _at(self, edge_index: Pairs) -> Entries:
        return self._scaled(self.coupling._at(edge_index), 0)

    def laplacian_function(
        self, function: Callable[[Tensor], Tensor], v: Values
    ) -> Values | None:
        # A factor per head would need a function per head.
        if isinstance(self.scale, Tensor) and self.scale.numel() > 1:
            return None
        return self.coupling.laplacian_function(
            lambda rate: function(self.scale * rate), v
        )

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        form = self.coupling.low_rank_form(dtype)
        if form is None:
            return None
        # A row of factors, one for each head, which broadcasts over the nodes.
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
    """Return a property that holds if it holds for ``all`` or for ``any`` of the terms."""
    return cached_property(
        lambda total: combine(getattr(term, name) for term in total.terms)
    )


class SumCoupling(Coupling):
    """Add couplings. A coupling with a single head is added to every head of the others.

    Sums among the terms are flattened. The sum has the widest dtype of its terms.

    Args:
        terms: the couplings to add, at least one, over the same nodes and on one device. Every term has either one head
            or the largest number of heads of all terms.

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
        first = terms[0]
        super().__init__(first.num_nodes, first.heads, first, _checked=True)
        self.terms: list[Coupling] = []
        for term in terms:
            self.heads = max(self.heads, term.heads)
            self.dtype = torch.promote_types(self.dtype, term.dtype)
            self.terms += term.terms if isinstance(term, SumCoupling) else [term]

    @cached_property
    def ptr(self) -> Tensor | None:
        """The row boundaries common to all terms; ``None``, one graph, if one of the terms has no boundaries."""
        common = self.terms[0].ptr
        for term in self.terms[1:]:
            if common is None or term.ptr is None:
                return None
            # A sum joins all that one of its terms joins, so only common boundaries separate graphs.
            common, other = sorted((common, term.ptr), key=len)
            common = common[torch.isin(common, other)]
        return common

    @cached_property
    def row_stochastic(self) -> bool:
        """Whether all terms are row-stochastic up to factors that add up to one, and have the same zero rows."""
        total = 0.0
        empty = []
        for term in self.terms:
            factor = 1.0
            if isinstance(term, ScaledCoupling) and not isinstance(term.scale, Tensor):
                factor = term.scale
                term = term.coupling
            if not term.row_stochastic:
                return False
            total += factor
            # Where one term alone has a zero row, the others of that row add up to less than one.
            empty.append(term.degree() == 0)
        alike = all(bool((rows == empty[0]).all()) for rows in empty)
        return alike and abs(total - 1.0) < 1e-12

    @cached_property
    def low_rank(self) -> bool:
        return all(term.low_rank for term in self.terms) and self._over_the_same_graphs

    @cached_property
    def _metric(self) -> ByRow | None:
        """The metric of all terms. A diagonal term is self-adjoint in any metric."""
        first, *others = [term.metric for term in self._reaching or self.terms]
        for metric in others:
            if first is None or metric is None or bool((metric != first).any()):
                return None
        return first

    @property
    def _reaching(self) -> list[Coupling]:
        """The terms that couple different nodes."""
        return [
            t for t in self.terms if t.ptr is None or bool((t.ptr.diff() > 1).any())
        ]

    @property
    def _over_the_same_graphs(self) -> bool:
        """Whether all terms that couple different nodes have the same row boundaries."""
        bounds = [term.ptr for term in self._reaching]
        for ptr in bounds:
            if ptr is bounds[0]:
                continue
            if ptr is None or bounds[0] is None or not torch.equal(ptr, bounds[0]):
                return False
        return True

    def _product(self, v: Values) -> Values:
        total = self.terms[0]._product(v)
        for term in self.terms[1:]:
            # Not in place, since the first product may be v itself.
            total = total + term._product(v)
        return total

    def _transpose(self) -> Coupling:
        return SumCoupling([term.T for term in self.terms])

    def degree(self) -> ByRow:
        return reduce(add, [term.degree() for term in self.terms])

    def laplacian_and_degree(self, v: Sent) -> tuple[Received, ByRow]:
        # Each term cancels by itself, since large terms would round away the difference of a small one.
        parts = [term.laplacian_and_degree(v) for term in self.terms]
        laplacians, degrees = zip(*parts, strict=True)
        return reduce(add, laplacians), reduce(add, degrees)

    def majorant(self, convex: bool, degree: ByRow | None = None) -> ByRow:
        # On a convex set, p is the row sums for any terms.
        bound = super().majorant(convex, degree)
        if convex or self.positive_semidefinite:
            return bound
        # The bound of a sum is the sum of the bounds. The bound of a semi-definite term is d instead of 2d.
        definite = [term.degree() for term in self.terms if term.positive_semidefinite]
        return reduce(sub, definite, bound)

    def _at(self, edge_index: Pairs) -> Entries:
        return reduce(add, [term._at(edge_index) for term in self.terms])

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        forms = [term.low_rank_form(dtype) for term in self.terms]
        known = [form for form in forms if form is not None]
        if known and self._over_the_same_graphs:
            return LowRankForm.total(known)
        return None

    def _dense(self) -> Matrices:
        return reduce(add, [term._dense() for term in self.terms])


def check_coupling_kind(coupling: object, name: str = "coupling") -> None:
    """Raise ``TypeError`` unless ``coupling`` is a `Coupling`."""
    checks.check_kind(
        coupling,
        name,
        Coupling,
        "a Coupling, as a diffusivity makes by D(x, graph), and a layer returns with return_coupling=True",
    )


def _of_part(part: Any, change: Callable[[Any], Any]) -> Any:
    """Return a part of a coupling with ``change`` applied to its tensors and graphs; other objects stay as they are."""
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
    """Return ``change`` that copies each object once: if query and key are one tensor, kernels do half of the work."""
    copies: dict[Any, Any] = {}

    # Not ``functools.cache``, which torch.compile ignores.
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
