"""``StateUpdate``, the interface of all updates, and ``LaplacianUpdate``, the base of those that use a Laplacian."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from diffusion_mp import errors
from diffusion_mp.couplings.base import Coupling, check_coupling_kind
from diffusion_mp.energies.spectrum import Form as Form
from diffusion_mp.modules import Resettable
from diffusion_mp.saving import Saved
from diffusion_mp.updates.derivatives import formula_runs

#: The state of every head; one head broadcasts against several.
State = Float[Tensor, " N #H D"]


class Positive(Saved):
    """A positive learnable number softplus(r) = log(1 + eʳ) as a 0-dimensional tensor, such as a weight of an energy.

    Examples:
        >>> diffusivity = Positive(1.0) * SimpleDiffusivity()  # softplus of a parameter, so it stays positive
    """

    def __init__(self, initial: float = 1.0) -> None:
        super().__init__()
        errors.check_positive(initial, "initial")
        self.initial = float(initial)
        self.raw = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.raw, self.initial + math.log(-math.expm1(-self.initial)))

    def forward(self) -> Float[Tensor, ""]:
        return softplus(self.raw)

    def extra_repr(self) -> str:
        return f"initial={self.initial:g}"


class StateUpdate(Resettable, ABC):
    """One numerical step of a diffusion: (state x, coupling S, values, source) → next state x′.

    An update uses only ``S @ v``, ``S.degree()`` and the properties that a coupling declares. A subclass implements
    `step`, which begins with ``values = self.validate(x, coupling, values, source)``. A two-step method declares
    ``takes_previous = True``, and its `step` has a keyword ``previous``: the state one step earlier, ``None`` at first.

    Shapes: x, values, source [N, H, D], where one head broadcasts against several; result [N, H, D]. Channels of a
    state [N, C] are split into the heads of the coupling, and the result is [N, C].

    Raises:
        TypeError, ValueError: a shape or dtype does not fit; a source is missing, or given to an update without one.
        CouplingMismatchError: the coupling lacks what the update needs (see `check`).

    Examples:
        >>> update = ExplicitEuler(tau=0.5)
        >>> isinstance(update, StateUpdate), update(x, UniformDiffusivity()(x)).shape
        (True, torch.Size([6, 4]))
    """

    #: Whether S must be reversible or low-rank: iterations need self-adjoint operators, closed forms features.
    needs_reversible: ClassVar[bool] = False
    takes_source: ClassVar[bool] = True  #: Whether the update has a source term τβh.
    takes_previous: bool = False  #: Whether `step` also reads the previous state.
    beta: float = 0.0  #: β, the weight of the source; unless it is zero, a source is required.

    def forward(
        self,
        x: Tensor,
        coupling: Coupling,
        values: Tensor | None = None,
        source: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the next state; ``values`` (default: x) are propagated, ``source`` is h, `step` gets ``options``."""
        values = None if values is x else values
        if not isinstance(x, Tensor) or x.dim() != 2:
            return self.step(x, coupling, values, source, **options)
        check_coupling_kind(coupling)
        heads = coupling.heads
        given: dict[str, Any] = {"x": x, "values": values, "source": source} | options
        for name in ("x", "values", "source", "previous"):
            t = given.get(name)
            if not isinstance(t, Tensor) or t.dim() != 2:
                continue
            errors.check_tensor(t, name, "[num_nodes, channels]")
            if t.size(1) % heads:
                raise ValueError(
                    f"the coupling's {heads} heads must divide the channels of {name}; got {errors.describe(t)}."
                )
            given[name] = t.unflatten(1, (heads, -1))
        x, values, source = (given.pop(name) for name in ("x", "values", "source"))
        return self.step(x, coupling, values, source, **given).flatten(1)

    @abstractmethod
    def step(
        self, x: State, coupling: Coupling, values: State | None = None, source: State | None = None
    ) -> State:
        """Return the next state of every head, [N, H, D]."""

    def check(self, coupling: Coupling) -> None:
        """Raise ``CouplingMismatchError`` unless ``coupling`` has the properties that this update needs."""
        if self.needs_reversible and not coupling.whole:
            raise errors.CouplingMismatchError(
                f"{type(self).__name__} solves for all rows at once; got a {type(coupling).__name__} with the rows of "
                f"one rank. Run it in one process, or take ExplicitEuler or CertifiedStep, which need no other rows."
            )
        # A formula takes any coupling, and a program that is recorded or exported has no entries to look at.
        if self.needs_reversible and formula_runs(coupling.heads * coupling.num_nodes**2):
            return
        if self.needs_reversible and not (coupling.low_rank or coupling.reversible):
            raise errors.CouplingMismatchError(
                f"{type(self).__name__} needs a reversible coupling, S = Sᵀ or the rows of such a one divided by their "
                f"sums; got a {type(coupling).__name__} that declares symmetric=False and knows no metric. Use "
                f"AdjacencyDiffusivity on an undirected graph, an all-pair diffusivity with no or tied projections, or "
                f"SimpleDiffusivity, which is solved in closed form; ExplicitEuler takes any coupling."
            )

    def validate(
        self,
        x: Tensor,
        coupling: Coupling,
        values: Tensor | None,
        source: Tensor | None,
        values_name: str = "values",
    ) -> Tensor:
        """Check all inputs and return the values, by default the state; ``values_name`` is their name in messages."""
        if not isinstance(coupling, Coupling):
            check_coupling_kind(coupling)
        self.check(coupling)
        coupling.check(x, "x")
        for name, tensor in ((values_name, values), ("source", source)):
            if tensor is None or tensor is x:
                continue
            coupling.check(tensor, name)
            heads = tensor.size(1) == x.size(1) or 1 in (tensor.size(1), x.size(1))
            if tensor.size(2) != x.size(2) or not heads:
                raise ValueError(
                    f"{name} must match the state x of shape {list(x.shape)} in channels, and in heads unless one of "
                    f"them has a single head; got shape {list(tensor.shape)}."
                )
        if source is not None and not self.takes_source:
            raise ValueError(
                f"{type(self).__name__} has no source term; got a source of shape {list(source.shape)}. Leave it out, "
                f"or use ExplicitEuler, ImplicitEuler or Equilibrium."
            )
        if source is None and self.beta != 0.0:
            if isinstance(self.beta, float):
                beta = f"{self.beta:g}"
            else:
                beta = self.beta
            raise ValueError(
                f"beta={beta} weighs a source, but none came; pass source=h [N, H, D] (usually the initial "
                f"embedding), or set beta=0."
            )
        return x if values is None else values


class LaplacianUpdate(StateUpdate):
    """Base of the updates that act through a Laplacian Δ, in one of the two forms of TfD (Wu, Wipf & Yan, 2025).

    ``form="conservative"`` is Δ = D̄ − S with D̄ the row sums of S (Eq. 6), whose fixed points are constants;
    ``form="residual"`` is Δ = I − S (Eq. 63). Both agree if and only if the rows of S sum to one. ``beta`` is the
    weight of the source h (Eq. 10); ``leak`` is κ ≥ 0, the rate at which the state decays.

    Examples:
        >>> isinstance(ExplicitEuler(tau=0.5), LaplacianUpdate)
        True
    """

    def __init__(
        self, form: Form = "conservative", *, beta: float = 0.0, leak: float = 0.0
    ) -> None:
        super().__init__()
        errors.check_choice(form, "form", ("conservative", "residual"))
        errors.check_number(beta, "beta")
        errors.check_positive(leak, "leak", allow_zero=True)
        self.form: Form = form
        self.beta = float(beta)
        self.leak = float(leak)

    def diagonal(self, coupling: Coupling) -> Tensor | float:
        """Return the diagonal part of Δ: row sums [N, H, 1], or 1."""
        if self.form == "conservative":
            return coupling.degree().unsqueeze(-1)
        return 1.0

    def decay(self, x: Tensor, coupling: Coupling) -> Tensor:
        """Return (d + κ)·x, with d the diagonal part of Δ."""
        rate = self.diagonal(coupling) + self.leak
        return (rate.to(x.dtype) if isinstance(rate, Tensor) else rate) * x

    def velocity(self, x: State, coupling: Coupling, values: State, source: State | None) -> Tensor:
        """Return S v − (d + κ)x + βh, at which the state changes."""
        change = coupling.matmul(values) - self.decay(x, coupling)
        if source is None or self.beta == 0.0:
            return change
        return torch.add(change, source, alpha=self.beta)

    def laplacian(
        self, coupling: Coupling, dtype: torch.dtype, shift: float = 0.0
    ) -> Callable[[Tensor], Tensor]:
        """Return the map u ↦ (Δ + shift)u for u [N, H, D] of ``dtype``."""
        diagonal = laplacian_diagonal(coupling, self.form, dtype) + shift
        return lambda u: diagonal * u - coupling @ u

    def exact(
        self, coupling: Coupling, function: Callable[[Tensor], Tensor], v: Tensor
    ) -> Tensor | None:
        """Return f(Δ) v where the coupling knows the eigenvectors of Δ, else ``None``."""
        if self.form == "conservative":
            return coupling.laplacian_function(function, v)
        return None

    def warn_if_rounded(self, coupling: Coupling, rate: float) -> None:
        """Warn where rounding S hides modes that decay at ``rate`` or slower: it may make a singular I − S regular."""
        resolution = torch.finfo(coupling.dtype).eps
        if self.form == "residual" and 0.0 < rate < math.sqrt(resolution):
            warnings.warn(
                f"{self} resolves rates of {rate:.3g} in I − S, whose entries are rounded to {coupling.dtype}: where "
                f"the spectral radius of S is one, up to {min(1.0, resolution / rate):.1g} of the answer is that "
                f"rounding. Take form='conservative', a state in float64, a shorter time or a larger leak.",
                stacklevel=3,
            )

    def extra_repr(self) -> str:
        return f"form={self.form!r}, beta={self.beta:g}, leak={self.leak:g}"


def laplacian_diagonal(coupling: Coupling, form: Form, dtype: torch.dtype) -> Tensor | float:
    """Return the diagonal part of Δ to the precision of ``dtype``; see `Coupling.exact_degree`."""
    if form == "residual":
        return 1.0
    return coupling.exact_degree(dtype).unsqueeze(-1)


def dense_laplacian(
    coupling: Coupling, form: Form, dtype: torch.dtype, shift: float = 0.0
) -> Float[Tensor, "heads N N"]:
    """Return the matrices of Δ + shift, by one product with the identity, which torch differentiates and exports."""
    identity = torch.eye(coupling.num_nodes, dtype=dtype, device=coupling.device)
    matrix = coupling.matmul(identity.unsqueeze(1)).transpose(0, 1)
    if form == "residual":
        return (1.0 + shift) * identity - matrix
    return torch.diag_embed(matrix.sum(2) + shift) - matrix


def working_precision(v: Tensor, x: Tensor, coupling: Coupling) -> Tensor:
    """Return ``v`` in double precision, as long recurrences and ill-conditioned systems need, for every head."""
    v = v.double()
    heads = max(x.size(1), coupling.heads)
    return v.expand(-1, heads, -1) if v.size(1) == 1 else v
