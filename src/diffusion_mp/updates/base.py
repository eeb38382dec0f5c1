"""``StateUpdate``, the interface of all updates, and ``LaplacianUpdate``, the base of updates with a Laplacian."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp import checks, errors
from diffusion_mp.couplings.base import Coupling, check_coupling_kind
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.energies.spectrum import Form as Form
from diffusion_mp.kernels.operation import exporting
from diffusion_mp.modules import Resettable
from diffusion_mp.updates.derivatives import formula_runs

#: The state of every head; one head broadcasts against several.
State = Float[Tensor, " N #H D"]


class StateUpdate(Resettable, ABC):
    """Base of all updates: one numerical step of a diffusion, from a state and a coupling to the next state.

    An update uses only ``S @ v``, ``S.degree()`` and the properties that a coupling declares. A subclass implements
    `step`, which gets checked arguments. A two-step method declares ``takes_previous = True``. Its `step` has a keyword
    ``previous``, the state one step earlier, or ``None`` in the first step.

    Attributes:
        needs_reversible: whether S must be reversible or low-rank. Iterations need self-adjoint operators, and closed
            forms need features. ``False`` by default.
        takes_source: whether the update has a source term τβh. ``True`` by default.
        takes_previous: whether `step` also reads the previous state. ``False`` by default.
        beta: β, the weight of the source. Unless it is zero, the default, a source is required.

    Shapes:
        - x, values, source: [N, H, D], where one head broadcasts against several; or [N, C], whose channels are split
          into the heads of the coupling.
        - output: [N, H, D], or [N, C].

    Raises:
        TypeError: an argument has another type, or a dtype that does not fit.
        ValueError: a shape does not fit, a source is missing, or an update without a source term got one.
        CouplingMismatchError: the coupling lacks a property that the update needs (see `check`).

    Examples:
        >>> update = ExplicitEuler(tau=0.5)
        >>> isinstance(update, StateUpdate), update(x, UniformDiffusivity()(x)).shape
        (True, torch.Size([6, 4]))
    """

    #: Whether S must be reversible or low-rank: iterations need self-adjoint operators,
    #: closed forms need features.
    needs_reversible: ClassVar[bool] = False
    takes_source: ClassVar[bool] = True  #: Whether the update has a source term τβh.
    takes_previous: bool = False  #: Whether `step` also reads the previous state.
    beta: float = (
        0.0  #: β, the weight of the source; unless it is zero, a source is required.
    )

    def forward(
        self,
        x: Tensor,
        coupling: Coupling,
        values: Tensor | None = None,
        source: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the next state.

        Args:
            x: state, [N, H, D] or [N, C].
            coupling: the coupling S.
            values: the values v that S propagates, of the shape of x. ``None`` is x.
            source: the source h, of the shape of x. ``None`` is no source.
            options: keyword arguments of `step`, such as ``previous``.
        """
        # All checks are made here, once and before any arithmetic, so that a `step` is
        # only its mathematics. It gets tensors [N, H, D] on the device of the coupling.
        if not isinstance(coupling, Coupling):
            check_coupling_kind(coupling)
        self.check(coupling)
        # Layers pass the state as its own values, and one check serves both.
        others = {"values": None if values is x else values, "source": source}
        if "previous" in options:
            others["previous"] = options["previous"]
        flat = isinstance(x, Tensor) and x.dim() == 2
        if flat:
            x = _by_head(x, coupling.heads, "x")
            for name, state in others.items():
                others[name] = _by_head(state, coupling.heads, name)
        coupling.check(x, "x")
        for name, state in others.items():
            if state is not None:
                _check_like(state, name, x, coupling)
        values = others.pop("values")
        source = others.pop("source")
        if source is not None:
            if not self.takes_source:
                raise ValueError(
                    f"{type(self).__name__} has no source term; got a source of shape {list(source.shape)}. Leave it "
                    f"out, or use ExplicitEuler, ImplicitEuler or Equilibrium."
                )
        # Without this check, a step with a source term would silently be a step
        # without, and drift to consensus.
        elif self.beta != 0.0:
            raise ValueError(
                f"beta={self.beta} weighs a source, but none came; pass source=h [N, H, D] (usually the initial "
                f"embedding), or set beta=0."
            )
        if values is None:
            values = x
        moved = self.step(x, coupling, values, source, **options | others)
        return moved.flatten(1) if flat else moved

    @abstractmethod
    def step(
        self, x: State, coupling: Coupling, values: State, source: State | None = None
    ) -> State:
        """Return the next state of every head, [N, H, D], from checked arguments.

        Args:
            x: state [N, H, D].
            coupling: the coupling S.
            values: the values [N, H, D] that S propagates.
            source: the source [N, H, D], or ``None``.
        """

    def check(self, coupling: Coupling) -> None:
        """Raise unless a coupling has the properties that this update needs.

        Args:
            coupling: the coupling to check.

        Raises:
            CouplingMismatchError: the coupling is neither reversible nor low-rank, or has only the rows of one process,
                and the update needs more.
        """
        if not self.needs_reversible:
            return
        if not coupling.whole:
            raise errors.CouplingMismatchError(
                f"{type(self).__name__} solves for all rows at once; got a {type(coupling).__name__} with the rows of "
                f"one rank. Run it in one process, or take ExplicitEuler or CertifiedStep, which need no other rows."
            )
        # A formula takes any coupling, and a recorded or exported program has no
        # entries to examine.
        if dense_formula_runs(coupling):
            return
        if not (coupling.low_rank or coupling.reversible):
            raise errors.CouplingMismatchError(
                f"{type(self).__name__} needs a reversible coupling, S = Sᵀ or the rows of such a one divided by their "
                f"sums; got a {type(coupling).__name__} that declares symmetric=False and knows no metric. Use "
                f"AdjacencyDiffusivity on an undirected graph, an all-pair diffusivity with no or tied projections, or "
                f"SimpleDiffusivity, which is solved in closed form; ExplicitEuler takes any coupling."
            )


def _by_head(state: Any, heads: int, name: str) -> Any:
    """Return a state [N, C] as [N, H, C/H], and anything else unchanged."""
    if not isinstance(state, Tensor) or state.dim() != 2:
        return state
    checks.check_tensor(state, name, "[num_nodes, channels]")
    if state.size(1) % heads:
        raise ValueError(
            f"the coupling's {heads} heads must divide the channels of {name}; got {checks.describe(state)}."
        )
    return state.unflatten(1, (heads, -1))


def _check_like(state: Tensor, name: str, x: Tensor, coupling: Coupling) -> None:
    """Raise unless ``state`` fits the coupling, and the state x in channels and heads."""
    coupling.check(state, name)
    broadcasts = state.size(1) == x.size(1) or 1 in (state.size(1), x.size(1))
    if state.size(2) != x.size(2) or not broadcasts:
        raise ValueError(
            f"{name} must match the state x of shape {list(x.shape)} in channels, and in heads unless one of them has "
            f"a single head; got shape {list(state.shape)}."
        )


class LaplacianUpdate(StateUpdate):
    """Base of the updates that act through a Laplacian Δ (Wu, Wipf & Yan 2025).

    The two forms of Δ agree if and only if the rows of S sum to one.

    Args:
        form: ``"conservative"``, the default: Δ = D̄ − S with the row sums D̄ of S (Eq. 6), whose fixed points are
            constants. ``"residual"``: Δ = I − S (Eq. 63).
        beta: weight β of the source h (Eq. 10). 0, the default, is a step without source; any other value requires one.
        leak: κ ≥ 0, the rate at which the state decays. 0 by default: no decay.

    Examples:
        >>> isinstance(ExplicitEuler(tau=0.5), LaplacianUpdate)
        True
    """

    def __init__(
        self,
        form: Form = "conservative",
        *,
        beta: checks.FiniteNumber = 0.0,
        leak: checks.NonnegativeNumber = 0.0,
    ) -> None:
        super().__init__()
        self.form: Form = form
        self.beta = float(beta)
        self.leak = float(leak)

    def rate(self, coupling: Coupling) -> Tensor | float:
        """Return d + κ, the rate at which a state decays by itself; [N, H, 1] in at least float32, or a number.

        Args:
            coupling: the coupling S, whose row sums are d in the conservative form.
        """
        if self.form == "residual":
            return 1.0 + self.leak
        return coupling.degree().unsqueeze(-1) + self.leak

    def decay(self, x: Tensor, coupling: Coupling) -> Tensor:
        """Return (d + κ)·x.

        Args:
            x: state [N, H, D].
            coupling: the coupling S.
        """
        rate = self.rate(coupling)
        if isinstance(rate, Tensor):
            rate = rate.to(x.dtype)
        return rate * x

    def velocity(
        self, x: State, coupling: Coupling, values: State, source: State | None
    ) -> Tensor:
        """Return S v − (d + κ)x + βh, the rate of change of the state.

        Args:
            x: state [N, H, D].
            coupling: the coupling S.
            values: values v [N, H, D].
            source: source h [N, H, D], or ``None``.
        """
        change = coupling.received(values) - self.decay(x, coupling)
        if source is None or self.beta == 0.0:
            return change
        return torch.add(change, source, alpha=self.beta)

    def warn_if_rounded(self, coupling: Coupling, rate: float) -> None:
        """Warn if the rounding of S hides modes that decay at ``rate`` or slower.

        Rounding may make a singular I − S regular.

        Args:
            coupling: the coupling S.
            rate: the smallest rate of decay that matters.
        """
        resolution = torch.finfo(coupling.dtype).eps
        # D̄ − S maps constants to zero in any precision, so the conservative form is
        # not affected. I − S with rounded entries maps them to zero up to their
        # resolution, and the error of the answer is proportional to 1/rate.
        if self.form == "residual" and 0.0 < rate < math.sqrt(resolution):
            warnings.warn(
                f"{self} resolves rates of {rate:.3g} in I − S, whose entries are rounded to {coupling.dtype}: where "
                f"the spectral radius of S is one, up to {min(1.0, resolution / rate):.1g} of the answer is that "
                f"rounding. Take form='conservative', a state in float64, a shorter time or a larger leak.",
                stacklevel=3,
            )

    def extra_repr(self) -> str:
        return f"form={self.form!r}, beta={self.beta:g}, leak={self.leak:g}"


class Laplacian:
    """Δ + shift on states [N, H, D], with Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``)."""

    def __init__(
        self, coupling: Coupling, form: Form, dtype: torch.dtype, shift: float = 0.0
    ) -> None:
        self.coupling = coupling
        self.form = form
        self.dtype = dtype
        self.shift = shift

    @cached_property
    def diagonal(self) -> Tensor | float:
        """The diagonal part: the row sums [N, H, 1], or 1, plus the shift."""
        if self.form == "residual":
            return 1.0 + self.shift
        # Row sums rounded to the dtype of S would differ from the row sums of its
        # products, and constants would leak.
        return self.coupling.exact_degree(self.dtype).unsqueeze(-1) + self.shift

    def __call__(self, u: HeadState) -> HeadState:
        return self.diagonal * u - self.coupling @ u

    def dense(self) -> Float[Tensor, "heads N N"]:
        """Return the matrices by one product with the identity, which torch differentiates and exports."""
        # One product instead of `to_dense`, whose kernels torch.func and export do not
        # follow.
        identity = torch.eye(
            self.coupling.num_nodes, dtype=self.dtype, device=self.coupling.device
        )
        matrix = self.coupling.matmul(identity.unsqueeze(1)).transpose(0, 1)
        if self.form == "residual":
            return (1.0 + self.shift) * identity - matrix
        return torch.diag_embed(matrix.sum(2) + self.shift) - matrix

    def function(self, f: Callable[[Tensor], Tensor], v: HeadState) -> HeadState | None:
        """Return f(Δ) v for an elementwise f if the coupling knows the eigenvectors of Δ, else ``None``."""
        # Couplings know the eigenvectors of D̄ − S, such as the cosines of a path. An
        # export has their transforms. torch.func cannot differentiate them in all
        # ways, so the dense formula runs there.
        if self.form == "residual":
            return None
        if dense_formula_runs(self.coupling) and not exporting():
            return None
        return self.coupling.laplacian_function(lambda rate: f(rate + self.shift), v)


def dense_formula_runs(coupling: Coupling) -> bool:
    """Return whether the formula that stores the matrices of a coupling runs."""
    return formula_runs(coupling.heads * coupling.num_nodes**2)


def working_precision(v: Tensor, x: Tensor, coupling: Coupling) -> Tensor:
    """Return ``v`` for every head in double precision, which long recurrences and ill-conditioned systems need."""
    # A condition number of 1e8, which long steps have, costs half of the digits of a
    # solution. Double precision leaves the other half, as many digits as a state in
    # single precision has.
    v = v.double()
    heads = max(x.size(1), coupling.heads)
    return v.expand(-1, heads, -1) if v.size(1) == 1 else v
