"""``Coupling``: a matrix-free linear operator over nodes, one matrix per head."""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from diffusion_mp import errors
from diffusion_mp.graph import Graph
from diffusion_mp.graph.cache import values_only
from diffusion_mp.graph.checks import MOST_NODES, as_num_nodes, row_bounds
from diffusion_mp.graph.ops import mean_rows

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

    from diffusion_mp.couplings.algebra import LowRankForm

T = TypeVar("T")

# Entries of a dense coupling above which to_dense warns: 256 MiB in float32.
LARGE = 1 << 26

PROMISES = ("symmetric", "row_stochastic", "nonnegative", "positive_semidefinite")

Promise = bool | Callable[[], bool] | list["Coupling"]
"""A known property, a function that finds it out on first access, or the couplings that all have to have it."""


class Lazy(Generic[T]):
    """Attribute that is set at construction, or computed by ``coupling._questions`` on first access and then kept.

    A function there must not refer to its coupling: only the garbage collector would free the tensors of such a cycle.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, coupling: Any, kind: type | None = None) -> T:
        question = coupling._questions[self.name]
        answer: Any = (
            question() if callable(question) else all(getattr(part, self.name) for part in question)
        )
        setattr(coupling, self.name, answer)
        return cast("T", answer)


class Coupling(ABC):
    r"""A linear operator over nodes, one per head: the weights of messages between them.

    S: values [N, H, D] → [N, H, D], (S v)_i = Σ_j s_ij v_j (Wu, Wipf & Yan 2025, Eq. 4).

    Row i receives and column j sends; a single head broadcasts. A subclass implements ``_product`` and ``_transpose``,
    and may override ``degree``, ``_at`` and ``to_dense`` where row sums or entries are known. ``_product`` and ``_at``,
    unlike ``matmul`` and ``at``, do not check their arguments.

    Args:
        num_nodes, heads: N and H.
        like: tensor with its dtype and device, or the coupling it is made of, which also provides ``ptr`` by default.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU; ``None`` is one graph. Entries between graphs are zero.
        symmetric, nonnegative: S = Sᵀ for every head; no entry is negative.
        row_stochastic: every row sums to one, except for rows of zeros.
        positive_semidefinite: xᵀSx ≥ 0 for all x, and S = Sᵀ, which ``True`` implies.
        low_rank: :meth:`low_rank_form` represents all of S.
        metric: function that returns d̄ > 0 [N, H] with diag(d̄) S symmetric, or ``None``; not called if S is symmetric.

    ``ptr`` and promises may be functions called on first access; a promise may be a list of couplings that all make it.

    Examples:
        >>> S = SimpleDiffusivity()(x)
        >>> isinstance(S, Coupling), (S @ x.unsqueeze(1)).shape  # it multiplies states [nodes, heads, channels]
        (True, torch.Size([6, 1, 4]))
    """

    ptr = Lazy[Tensor | None]()
    symmetric = Lazy[bool]()
    row_stochastic = Lazy[bool]()
    nonnegative = Lazy[bool]()
    positive_semidefinite = Lazy[bool]()
    low_rank = Lazy[bool]()
    _metric = Lazy[Tensor | None]()

    viewed: tuple[Tensor, Tensor] | None = None
    """A state [N, C] and the view [N, 1, C] of it that is query and key, if there is one: kernels share its norms."""

    #: Arrays of NumPy leave the arithmetic to this class; they would make an array of couplings.
    __array_ufunc__ = None

    # The classes of multiples and sums: algebra.py, which imports this module, sets them.
    _multiple: ClassVar[Callable[[float | Tensor, Coupling], Coupling]]
    _sum: ClassVar[Callable[[list[Coupling]], Coupling]]

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
        if not torch.compiler.is_compiling():  # sizes may be symbolic while tracing
            plain = (
                type(num_nodes) is int
                and type(heads) is int
                and isinstance(like, (Tensor, Coupling))
            )
            if not (plain and 0 <= num_nodes <= MOST_NODES and heads > 0):
                num_nodes = as_num_nodes(num_nodes)
                errors.check_counts(heads=heads)
                errors.check_kind(
                    like,
                    "like",
                    (Tensor, Coupling),
                    "a tensor with the coupling's dtype and device",
                )
        origin = like if isinstance(like, Coupling) else None
        self.num_nodes = num_nodes
        self.heads = heads
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device
        #: Whether a product costs O(N²), so that a dense factorisation of a small system is cheaper than many products.
        self.quadratic: bool = origin is not None and origin.quadratic
        #: Whether this process has all rows; a solver of a whole system needs them.
        self.whole: bool = origin is None or origin.whole
        self._questions: dict[str, Any] = {"_metric": metric}
        promises: dict[str, Promise] = {
            "symmetric": True
            if positive_semidefinite is True and symmetric is False
            else symmetric,
            "row_stochastic": row_stochastic,
            "nonnegative": nonnegative,
            "positive_semidefinite": positive_semidefinite,
            "low_rank": low_rank,
        }
        for name, promise in promises.items():
            known: Any = promise
            if type(promise) is list:
                known = True
                for part in promise:
                    of_part = vars(part).get(name, promise)  # the list itself, if not found out yet
                    if known is True or of_part is False:
                        known = of_part
            if type(known) is bool:
                setattr(self, name, known)
            elif type(known) is list or (callable(known) and not isinstance(known, nn.Module)):
                self._questions[name] = known
            else:
                errors.check_flags(**{name: known})  # raises
        if metric is None:
            self._metric = None
        elif not callable(metric):
            errors.check_function(metric, "metric", "that finds the metric, or None")
        if origin is not None and ptr is None:
            if "ptr" in vars(origin):
                self.ptr = origin.ptr
            else:
                self._questions["ptr"] = lambda: origin.ptr
        elif callable(ptr) and not isinstance(ptr, nn.Module):
            self._questions["ptr"] = ptr
        else:
            if ptr is None:
                self.ptr = None
            else:
                self.ptr = row_bounds(ptr, self.num_nodes)

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
            if self.viewed is not None and v is self.viewed[0] and _is_view(self.viewed[1], values):
                values = self.viewed[1]
            return self.matmul(values).reshape(v.shape)
        return self.matmul(v)

    def matmul(self, v: Float[Tensor, "N in_heads D"]) -> Float[Tensor, "N out_heads D"]:
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
                out = v.unsqueeze(1)
            else:
                out = v.unsqueeze(1) * matrix
        else:
            out = functional.linear(v, matrix.flatten(0, 1)).view(-1, *matrix.shape[:2])
        for _ in range(hops):
            out = self.matmul(out)
        return out.squeeze(1) if self.heads == 1 else out.sum(1)

    def check(self, v: Tensor, name: str) -> None:
        """Raise unless ``v`` is a tensor of values [N, H, D] for these nodes, on the device of the coupling."""
        # Valid values pass in two expressions; the checks below explain the others.
        shaped = (
            isinstance(v, Tensor)
            and v.dim() == 3
            and v.size(0) == self.num_nodes
            and v.layout is torch.strided
        )
        fits = (
            shaped and (self.heads == 1 or v.size(1) in (1, self.heads)) and v.is_floating_point()
        )
        if not (fits and v.device == self.device):
            errors.check_values(v, self.num_nodes, self.heads, name)
            errors.check_device(v, name, self.device, "the coupling")

    @property
    def T(self) -> Coupling:
        """Sᵀ as a coupling; S itself where it is known to be symmetric. (Transposing is cheaper than finding out.)"""
        if "symmetric" not in self._questions and self.symmetric:
            return self
        return self._transpose()

    def _ones(self, dtype: torch.dtype | None = None) -> Float[Tensor, "N heads"]:
        """Ones [N, H], by default in at least float32: a sum over many nodes leaves the range of half precision."""
        dtype = dtype or torch.promote_types(self.dtype, torch.float32)
        return torch.ones(self.num_nodes, self.heads, dtype=dtype, device=self.device)

    def both(self, v: Float[Tensor, "N H D"], w: Float[Tensor, "N H C"]) -> tuple[Tensor, Tensor]:
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

    def laplacian(self, v: Float[Tensor, "N in_heads D"]) -> Float[Tensor, "N out_heads D"]:
        """(D − S) v = d·v − S v with d the row sums, in at least float32."""
        self.check(v, "v")
        return self._majorized(v.to(torch.promote_types(v.dtype, torch.float32)), True)[0]

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
            missing = [name for name in ("symmetric", "nonnegative") if not getattr(self, name)]
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
        values = torch.cat([v, v.new_ones(*v.shape[:2], 1)], 2)
        moved = self._product(
            values if v.size(1) >= self.heads else values.expand(-1, self.heads, -1)
        )
        degree = moved[:, :, -1:]
        return degree * v - moved[
            :, :, :-1
        ], degree if convex or self.positive_semidefinite else 2 * degree

    @property
    def shape(self) -> torch.Size:
        """[H, N, N], that of :meth:`to_dense`."""
        return torch.Size((self.heads, self.num_nodes, self.num_nodes))

    def at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """Entries [E, H] of listed pairs [2, E]: s_ij with i = ``edge_index[1]``, j = ``edge_index[0]``."""
        return self._at(errors.check_pairs(edge_index, "edge_index", self.num_nodes, self.device))

    def log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """log s_ij of listed pairs; for couplings defined by logarithms finite where s_ij itself underflows."""
        return self._log_at(
            errors.check_pairs(edge_index, "edge_index", self.num_nodes, self.device)
        )

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """Entries of checked pairs, here by one product with a unit vector for each distinct source."""
        source, column = torch.unique(edge_index[0], return_inverse=True)
        units = torch.zeros(self.num_nodes, 1, source.numel(), dtype=self.dtype, device=self.device)
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

        errors.check_index(head, "head", self.heads)
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
            shape, forward, rmatvec=adjoint, matmat=forward, rmatmat=adjoint, dtype=np.float64
        )

    def to(
        self, *args: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Coupling:
        """S in another dtype or on another device, with arguments as of a tensor: ``S.to("cuda", torch.float64)``.

        Gradients flow through. Row boundaries stay on the CPU.
        """
        for value in args:
            dtype, device = (value, device) if isinstance(value, torch.dtype) else (dtype, value)
        errors.floating((), dtype, "meta")  # raises if it is no dtype
        place = None if device is None else errors.as_device(device)
        if place is not None and place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        if dtype in (None, self.dtype) and place in (None, self.device):
            return self
        return self._changed(Change(dtype, place))

    def detach(self) -> Coupling:
        """S with the same entries, detached from the graph of autograd, whose memory it does not keep."""
        return self._changed(Change(detach=True))

    def _changed(self, change: Change) -> Coupling:
        changed: Coupling = change.keep(self, copy.copy(self))
        if self.ptr is not None:
            change.keep(self.ptr, self.ptr)
        for name, value in vars(self).items():
            # A metric that was found stays in double precision, whatever the dtype of the coupling.
            in_double = name == "_metric" and isinstance(value, Tensor)
            setattr(
                changed,
                name,
                value.to(change.device or value.device) if in_double else change.of(value),
            )
        changed.dtype = change.dtype or self.dtype
        changed.device = change.device or self.device
        return changed

    def __mul__(self, scale: float | Tensor) -> Coupling:
        return Coupling._multiple(scale, self)

    __rmul__ = __mul__

    def __neg__(self) -> Coupling:
        return self * -1.0

    def __add__(self, other: Coupling) -> Coupling:
        if not isinstance(other, Coupling):
            raise TypeError(
                f"a coupling can only be added to a coupling; got {errors.describe(other)}."
            )
        return Coupling._sum([self, other])

    __radd__ = __add__

    def __sub__(self, other: Coupling) -> Coupling:
        return self + (-other if isinstance(other, Coupling) else other)

    def __rsub__(self, other: object) -> None:
        raise TypeError(
            f"a coupling can only be subtracted from a coupling; got {errors.describe(other)}."
        )

    def __rmatmul__(self, other: object) -> None:
        raise TypeError(
            f"a coupling multiplies from the left, S @ v; got {errors.describe(other)} to the left of it. S.T @ v is "
            f"the product of the transpose."
        )

    def __repr__(self) -> str:
        promises = [
            f", {name}" for name in PROMISES if vars(self).get(name)
        ]  # promises not accessed yet stay unknown
        return f"{type(self).__name__}(num_nodes={self.num_nodes}, heads={self.heads}{''.join(promises)})"


def _is_view(earlier: Tensor, now: Tensor) -> bool:
    """Whether a view taken earlier is the view now: v may have new ``data`` since, or require a gradient."""
    return (
        values_only()
        and earlier.data_ptr() == now.data_ptr()
        and (earlier.grad_fn is None) == (now.grad_fn is None)
    )


def check_coupling_kind(coupling: object, name: str = "coupling") -> None:
    """Raise ``TypeError`` unless ``coupling`` is a `Coupling`."""
    if not isinstance(coupling, Coupling):
        raise TypeError(
            f"{name} must be a Coupling; got {errors.describe(coupling)}. A diffusivity makes one, D(x, graph); "
            f"a layer returns its own with return_coupling=True."
        )


def feature_sizes(query: Tensor, key: Tensor, prefix: str = "") -> tuple[int, int, Tensor]:
    """Return N, H and the query, the first arguments of `Coupling`; raise unless both are [N, H, F] of one kind."""
    # Valid features pass in two expressions; the checks below explain the others.
    tensors = isinstance(query, Tensor) and (key is query or isinstance(key, Tensor))
    alike = (
        tensors
        and key.shape == query.shape
        and key.dtype == query.dtype
        and query.device == key.device
    )
    if not (
        alike
        and query.dim() == 3
        and query.is_floating_point()
        and query.layout is key.layout is torch.strided
    ):
        for name, features in (("query", query), ("key", key)):
            errors.check_tensor(features, f"{prefix}{name}", "[num_nodes, heads, features]")
        got = f"got {errors.describe(query)} and {errors.describe(key)}."
        if query.dim() != 3 or query.shape != key.shape:
            shape = "[num_nodes, heads, features]"
            raise ValueError(
                f"{prefix}query and {prefix}key must both be {shape} of one shape; {got}"
            )
        if query.dtype != key.dtype:
            raise TypeError(f"{prefix}query and {prefix}key must have one dtype; {got}")
        errors.check_device(key, f"{prefix}key", query.device, f"{prefix}query")
    return query.size(0), query.size(1), query


class Change:
    """Copies of couplings in another dtype, on another device (``None`` keeps them), or without gradient.

    An object held in several places is copied once. Closures of functions that compute promises are rebuilt.
    """

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        detach: bool = False,
    ):
        self.dtype = dtype
        self.device = device
        self.detach = detach
        # Copies by the id of the original, which is kept as well so that its id is not given to another object.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def keep(self, value: Any, changed: Any) -> Any:
        self._copies[id(value)] = value, changed
        return changed

    def of(self, value: Any) -> Any:
        """Return the copy of anything that a coupling may hold; an object without tensors is returned as it is."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, Tensor):
            tensor = value.detach() if self.detach else value
            dtype = self.dtype if value.is_floating_point() else None
            if self.device is None:
                place = value.device
            else:
                place = errors.as_device(self.device, value.device)
            return self.keep(value, tensor.to(place, dtype))
        if isinstance(value, Coupling):
            return value._changed(self)
        if isinstance(value, Graph):
            return self.keep(value, self._graph(value))
        if isinstance(value, nn.Module):
            module = copy.deepcopy(value).to(device=self.device, dtype=self.dtype)
            return self.keep(value, module.requires_grad_(False) if self.detach else module)
        if isinstance(value, (list, tuple)):
            parts = map(self.of, value)
            if hasattr(value, "_fields"):
                return type(value)(*parts)
            return type(value)(parts)
        if isinstance(value, dict):
            return {key: self.of(part) for key, part in value.items()}
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, partial):
            return self.keep(
                value, partial(self.of(value.func), *self.of(value.args), **self.of(value.keywords))
            )
        if isinstance(value, FunctionType) and (
            value.__closure__ or value.__defaults__ or value.__kwdefaults__
        ):
            return self.keep(value, self._function(value))
        return value

    def _graph(self, graph: Graph) -> Graph:
        """Graphs keep the dtype of their weights; what was derived from weights that are detached is computed again."""
        graph = graph if self.device is None else graph.to(self.device)
        if not self.detach or graph.edge_weight is None or not graph.edge_weight.requires_grad:
            return graph
        graph = copy.copy(graph)
        graph.edge_weight = self.of(graph.edge_weight)
        graph._derived = {}
        return graph

    def _function(self, function: FunctionType) -> FunctionType:
        cells = tuple(CellType(self.of(cell.cell_contents)) for cell in function.__closure__ or ())
        defaults = self.of(function.__defaults__)
        keyword_only = self.of(function.__kwdefaults__)
        changed = FunctionType(
            function.__code__, function.__globals__, function.__name__, defaults, cells
        )
        changed.__kwdefaults__ = keyword_only
        return changed
