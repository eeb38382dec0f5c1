"""Tests of updates: diffusions with known solutions, by dense linear algebra, and energies that must not rise."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp import checks, errors
from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies import (
    Certificate,
    CouplingTerm,
    Energy,
    EnergyTerm,
    LinearTerm,
    PairTerm,
    ProximalTerm,
    SourceTerm,
    certify,
)
from diffusion_mp.graph import Graph
from diffusion_mp.testing.laws import expect, expect_equal, tolerance
from diffusion_mp.testing.module_laws import random_instance
from diffusion_mp.updates import CertifiedStep, ExplicitEuler, Form, StateUpdate


@dataclass(frozen=True)
class Problem:
    """A diffusion dx/dt = −Δx (− κx + βh) on a small graph, and its exact solutions in double precision.

    Attributes:
        name: for messages and test names.
        matrix: S [N, N], symmetric and nonnegative.
        state: x at time 0 [N, H, D].
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).

    Examples:
        >>> problem = path_problem(5)
        >>> isinstance(problem, Problem), problem.state.shape  # [nodes, heads, channels]
        (True, torch.Size([5, 2, 3]))
    """

    name: str
    matrix: Float[Tensor, "N N"]
    state: Float[Tensor, "N H D"]
    form: Form = "conservative"

    @property
    def coupling(self) -> Coupling:
        """S as a sparse coupling."""
        return SparseCoupling(
            Graph.from_sparse(self.matrix.to_sparse()), symmetric=True, nonnegative=True
        )

    @property
    def laplacian(self) -> Float[Tensor, "N N"]:
        """Δ, dense."""
        if self.form == "residual":
            return torch.eye(len(self.matrix), dtype=self.matrix.dtype) - self.matrix
        return self.matrix.sum(1).diag() - self.matrix

    def heat(self, t: float) -> Float[Tensor, "N H D"]:
        """Return exp(−tΔ) x, the state at time t (``scipy.linalg.expm``)."""
        checks.check_positive(t, "t", allow_zero=True)
        from scipy.linalg import expm

        power = torch.from_numpy(np.asarray(expm(-t * self.laplacian.numpy())))
        return torch.einsum("ij,jhd->ihd", power, self.state)

    def implicit_step(
        self,
        tau: float,
        source: Tensor | None = None,
        *,
        beta: float = 0.0,
        leak: float = 0.0,
    ) -> Float[Tensor, "N H D"]:
        """Return (I + τ(Δ + κ))⁻¹ (x + τβh), by a dense solve."""
        checks.check_positive(tau, "tau", allow_zero=True)
        checks.check_number(beta, "beta")
        source = torch.zeros_like(self.state) if source is None else source
        checks.check_values(source, self.state.size(0), self.state.size(1), "source")
        return self._solve(tau, 1.0, leak, self.state + tau * beta * source)

    def steady_state(
        self, source: Tensor, *, beta: float = 1.0, leak: float = 0.0
    ) -> Float[Tensor, "N H D"]:
        """Return (Δ + κ)⁻¹ βh, by a dense solve."""
        checks.check_number(beta, "beta")
        checks.check_values(source, self.matrix.size(0), 1, "source")
        return self._solve(1.0, 0.0, leak, beta * source)

    def _solve(self, tau: float, mass: float, leak: float, right: Tensor) -> Tensor:
        """Return (mass I + τ(Δ + κ))⁻¹ right."""
        checks.check_positive(leak, "leak", allow_zero=True)
        identity = torch.eye(len(self.matrix), dtype=self.matrix.dtype)
        matrix = tau * self.laplacian + (mass + tau * leak) * identity
        # A reference that lost its digits would blame the update.
        if (
            matrix.numel()
            and torch.linalg.cond(matrix) * torch.finfo(matrix.dtype).eps > 0.01
        ):
            raise errors.SingularSystemError(
                f"the system of leak={leak:g} and tau={tau:g} is singular to working precision, since the Laplacian "
                "has constants in its kernel: raise the leak, or lower tau."
            )
        solution: Tensor = torch.linalg.solve(matrix, right.to(matrix).flatten(1))
        return solution.view_as(right)


def problem_on_graph(
    name: str, adjacency: Tensor, form: Form = "conservative", *, seed: int = 0
) -> Problem:
    """Return a problem with a random state [N, 2, 3] on a graph without isolated nodes; see `Problem` for ``form``.

    ``adjacency`` [N, N] is symmetric and nonnegative. In the residual form S is D^-½AD^-½, as in GCN.

    Examples:
        >>> problem_on_graph("a pair", torch.tensor([[0.0, 1.0], [1.0, 0.0]])).name
        'a pair, conservative'
    """
    checks.check_choice(form, "form", ["conservative", "residual"])
    checks.check_seed(seed)
    checks.check_tensor(adjacency, "adjacency", "[num_nodes, num_nodes]")
    square = adjacency.dim() == 2
    if not (
        square and torch.equal(adjacency, adjacency.mT) and bool((adjacency >= 0).all())
    ):
        raise ValueError(
            f"adjacency must be a symmetric, non-negative matrix; got {checks.describe(adjacency)}."
        )
    checks.check_finite(adjacency, "adjacency")
    adjacency = adjacency.double()
    degree = adjacency.sum(1)
    if form == "residual":
        if not bool((degree > 0).all()):
            raise ValueError(
                "adjacency must have positive row sums for form='residual'; got an isolated node."
            )
        adjacency = adjacency * torch.outer(degree, degree).rsqrt()
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(len(adjacency), 2, 3, dtype=torch.float64, generator=generator)
    return Problem(f"{name}, {form}", adjacency, state, form)


def path_adjacency(num_nodes: int) -> Float[Tensor, "N N"]:
    """Return the adjacency of the path 0 − 1 − … − (N − 1)."""
    checks.check_counts(num_nodes=num_nodes)
    ones = torch.ones(num_nodes - 1, dtype=torch.float64)
    return ones.diag(1) + ones.diag(-1)


def path_problem(num_nodes: int = 12, form: Form = "conservative") -> Problem:
    """Diffusion along a path of N nodes; see `Problem` for ``form``.

    Examples:
        >>> path_problem(5).matrix.shape
        torch.Size([5, 5])
    """
    return problem_on_graph(f"path of {num_nodes}", path_adjacency(num_nodes), form)


def cycle_problem(num_nodes: int = 11, form: Form = "conservative") -> Problem:
    """Diffusion around a cycle of N ≥ 3 nodes; see `Problem` for ``form``.

    Examples:
        >>> cycle_problem(5).matrix.shape
        torch.Size([5, 5])
    """
    checks.check_counts(num_nodes=num_nodes)
    turn = torch.eye(num_nodes, dtype=torch.float64).roll(1, 0)
    return problem_on_graph(f"cycle of {num_nodes}", turn + turn.T, form)


def complete_problem(num_nodes: int = 9, form: Form = "conservative") -> Problem:
    """Diffusion on a complete graph: e^{-tΔ} x is the mean plus e^{-tN} times the rest. See `Problem` for ``form``.

    Examples:
        >>> complete_problem(5).matrix.shape
        torch.Size([5, 5])
    """
    checks.check_counts(num_nodes=num_nodes)
    others = 1 - torch.eye(num_nodes, dtype=torch.float64)
    return problem_on_graph(f"complete graph of {num_nodes}", others, form)


def grid_problem(
    rows: int = 4, columns: int = 5, form: Form = "conservative"
) -> Problem:
    """Diffusion on a rectangular grid, the Kronecker sum of two paths; see `Problem` for ``form``.

    Examples:
        >>> grid_problem(2, 3).matrix.shape
        torch.Size([6, 6])
    """
    checks.check_counts(rows=rows, columns=columns)
    along = torch.kron(torch.eye(rows, dtype=torch.float64), path_adjacency(columns))
    across = torch.kron(path_adjacency(rows), torch.eye(columns, dtype=torch.float64))
    return problem_on_graph(f"{rows} x {columns} grid", along + across, form)


def random_problem(
    num_nodes: int = 40, form: Form = "conservative", *, seed: int = 0
) -> Problem:
    """Diffusion on a random graph of mean degree about six with weights in [½, 3/2], connected by a path.

    Examples:
        >>> random_problem(10, seed=0).matrix.shape
        torch.Size([10, 10])
    """
    checks.check_counts(num_nodes=num_nodes)
    checks.check_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    chance, weight = torch.rand(
        2, num_nodes, num_nodes, dtype=torch.float64, generator=generator
    )
    # The path connects the graph: an isolated part would be an eigenvalue zero of its own.
    linked = (chance < 4.0 / num_nodes) | (path_adjacency(num_nodes) > 0)
    upper = (linked * (weight + 0.5)).triu(1)
    return problem_on_graph(
        f"random graph of {num_nodes}", upper + upper.T, form, seed=seed
    )


def exact_problems() -> list[Problem]:
    """Return a problem for each of these graphs in both forms.

    Examples:
        >>> all(isinstance(problem, Problem) for problem in exact_problems())
        True
    """
    problems: list[Problem] = []
    for form in ("conservative", "residual"):
        problems += [
            path_problem(form=form),
            cycle_problem(form=form),
            complete_problem(form=form),
        ]
        problems += [grid_problem(form=form), random_problem(form=form)]
    return problems


def cosine_mode(num_nodes: int, k: int) -> tuple[Float[Tensor, "N 1 1"], float]:
    """Return the k-th mode of the path [N, 1, 1], cos(πk(i + ½)/N), and its eigenvalue λ = 4 sin²(πk/2N) of D̄ − S.

    Diffusion scales modes by e^{-tλ}, an explicit step by 1 − τλ and an implicit one by 1/(1 + τλ).

    Examples:
        >>> cosine_mode(8, 1)[0].shape
        torch.Size([8, 1, 1])
    """
    checks.check_counts(num_nodes=num_nodes)
    checks.check_counts(0, k=k)
    mode = torch.cos(
        math.pi * k * (torch.arange(num_nodes, dtype=torch.float64) + 0.5) / num_nodes
    )
    return mode[:, None, None], 4.0 * math.sin(math.pi * k / (2 * num_nodes)) ** 2


def order_of_convergence(
    step: Callable[[float], StateUpdate],
    problem: Problem,
    t: float = 0.5,
    counts: Sequence[int] = (64, 128, 256),
) -> float:
    """Return p in error ~ τᵖ for n steps of the update ``step(t / n)``, n in ``counts``, compared with `Problem.heat`.

    Examples:
        >>> round(order_of_convergence(lambda tau: CrankNicolson(tau), path_problem(5), counts=(8, 16, 32)))
        2
    """
    checks.check_function(step, "step", "from a time step to a StateUpdate")
    checks.check_kind(problem, "problem", Problem, "a Problem")
    checks.check_kind(
        counts, "counts", (list, tuple, range), "a list of numbers of steps"
    )
    checks.check_counts(**{f"counts[{k}]": count for k, count in enumerate(counts)})
    if len(set(counts)) < 2:
        raise ValueError(
            f"counts must hold two different numbers of steps, for a slope; got {list(counts)}."
        )
    checks.check_positive(t, "t")
    exact = problem.heat(t)
    missed = []
    for count in counts:
        update = step(t / count)
        x = problem.state
        for _ in range(count):
            x = update(x, problem.coupling)
        missed.append(float((x - exact).norm()))
    slope, _ = np.polyfit(np.log([t / count for count in counts]), np.log(missed), 1)
    return float(slope)


EnergyOfStep = Callable[[Coupling, Tensor], Energy]


def assert_energy_descent(
    layer_or_update: nn.Module,
    energy: Energy | EnergyOfStep | None = None,
    *,
    instances: int = 10,
    steps: int = 5,
    num_nodes: int = 12,
    channels: int = 4,
    seed: int = 0,
) -> None:
    """Assert E(Z_{k+1}, k) ≤ E(Z_k, k) at every step from random states in the unit ball, in double precision.

    An update runs on symmetric graph couplings whose Laplacian has eigenvalues in [0, 2], with a source if its ``beta``
    is not zero, or on the coupling of its penalty. A layer runs on undirected graphs and must map C channels to C.
    Without ``energy`` the step has to be covered by a theorem.

    Args:
        layer_or_update: the layer or update; a copy runs in double and in evaluation mode.
        energy: an `Energy`, or a function of coupling and state before the step that returns one.
            By default the quadratic energy (Theorem 1), that of the layer's penalty (Theorem 7), at the least
            certified λ, or that of a `CertifiedStep` (Theorem T1).
        instances, steps, num_nodes: number of instances, of steps on each, and of nodes.
        channels: C, unless a layer has ``in_channels``.
        seed: seed of the instances.

    Examples:
        >>> assert_energy_descent(ExplicitEuler(tau=0.5), instances=2, steps=2)
    """
    checks.check_kind(
        layer_or_update, "layer_or_update", nn.Module, "a layer or a StateUpdate"
    )
    if energy is not None:
        checks.check_function(
            energy, "energy", "called as energy(coupling, x), or an Energy"
        )
    checks.check_counts(
        instances=instances, steps=steps, num_nodes=num_nodes, channels=channels
    )
    checks.check_seed(seed)
    module = copy.deepcopy(layer_or_update).double().eval()
    width = int(getattr(module, "in_channels", channels))
    generator = torch.Generator().manual_seed(seed)
    run = _run_update if isinstance(module, StateUpdate) else _run_layer
    # Theorems on other updates than the explicit step are about the energy of the state alone.
    with_x = energy is not None or isinstance(
        getattr(module, "update", module), ExplicitEuler
    )
    rtol, atol = tolerance("energy", torch.float64)
    with torch.no_grad():
        for instance in range(instances):
            x = random_instance(num_nodes, width, generator, edges=False).x
            step, theory = run(module, x, generator)
            for k in range(steps):
                where = f"{type(module).__name__}, instance {instance}, step {k}"
                moved, coupling = step(x)
                expect_equal(
                    tuple(moved.shape),
                    tuple(x.shape),
                    f"{where}: the shape of the next state",
                )
                chosen = energy or theory
                if not isinstance(chosen, Energy):
                    chosen = chosen(coupling, x)
                origin = x if with_x else None
                before = float(chosen(x, origin))
                after = float(chosen(moved, origin))
                expect(
                    after <= before + atol + rtol * abs(before),
                    f"{where}: the energy rose from {before:.12g} to {after:.12g}; expected a step that does not "
                    f"raise it",
                )
                x = moved


Run = tuple[Callable[[Tensor], tuple[Tensor, Coupling]], EnergyOfStep]


def _run_update(update: nn.Module, start: Tensor, generator: torch.Generator) -> Run:
    """Return a function from x to the next state and the coupling of the step, and the energy that theory gives it."""
    assert isinstance(update, StateUpdate)
    coupling = _graph_coupling(start, generator)
    source: Tensor | None = None
    if update.beta != 0:
        source = torch.randn(start.shape, generator=generator, dtype=start.dtype)
    return (
        lambda x: (update(x, coupling, source=source), coupling),
        lambda coupling, x: _quadratic(update, coupling, x, source),
    )


def _run_layer(layer: nn.Module, start: Tensor, generator: torch.Generator) -> Run:
    graph = random_instance(start.shape[0], 1, generator).graph().to_undirected()
    return lambda x: layer(x, graph, return_coupling=True), partial(_theory, layer)


def _theory(layer: nn.Module, coupling: Coupling, x: Tensor) -> Energy:
    """Return the energy that a theorem gives for a layer's explicit step."""
    update = getattr(layer, "update", None)
    diffusivity = getattr(layer, "diffusivity", None)
    name = type(layer).__name__
    if not isinstance(update, ExplicitEuler) or update.beta or diffusivity is None:
        raise AssertionError(
            f"{name} has no diffusivity with an explicit step free of a source, so its energy is not known; pass "
            f"assert_energy_descent(layer, energy)."
        )
    if diffusivity.penalty is not None and not diffusivity.needs_graph:
        expect(
            diffusivity.heads == 1,
            f"{name} has several heads, each with its own energy; pass the one to watch.",
        )
        certificate = _covered(
            certify(
                diffusivity,
                x,
                float(update.step_size),
                form=update.form,
                leak=update.leak,
            )
        )
        # A leak of the row-normalised step acts in the metric d̄ of that step (Theorem 7).
        metric = None
        if diffusivity.row_stochastic:
            metric = diffusivity.penalty.coupling(x).degree()
        leak = update.leak * SourceTerm(torch.zeros_like(x), metric)
        return _explicit([PairTerm(diffusivity.penalty), leak], certificate.lam)
    return _quadratic(update, coupling, x)


def _quadratic(
    update: StateUpdate, coupling: Coupling, x: Tensor, source: Tensor | None = None
) -> Energy:
    if isinstance(update, CertifiedStep):
        terms: list[EnergyTerm] = [CouplingTerm(coupling)]
        if source is not None:
            terms.append(update.source_weight * SourceTerm(source))
        return Energy(terms, update.constraint)
    form: Form = getattr(update, "form", "conservative")
    leak = getattr(update, "leak", 0.0)
    nothing = torch.zeros_like(x)
    terms = [CouplingTerm(coupling), leak * SourceTerm(nothing)]
    if form == "residual":  # tr Zᵀ(I − S)Z = tr Zᵀ(D − S)Z + Σ_i (1 − d_i)‖z_i‖²
        terms.append(SourceTerm(nothing, 1 - coupling.degree()))
    if source is not None:
        terms.append(update.beta * LinearTerm(source))
    lam = 1.0
    if isinstance(update, ExplicitEuler):
        lam = _covered(
            certify(coupling, None, float(update.step_size), form=form, leak=leak)
        ).lam
    return _explicit(terms, lam)


def _explicit(terms: list[EnergyTerm], lam: float) -> Energy:
    """Return E(Z, k) = ‖Z − Z_k‖² + λ P(Z), in whose P every pair counts twice."""
    return Energy([ProximalTerm(), *(2 * lam * term for term in terms)])


def _covered(certificate: Certificate) -> Certificate:
    expect(bool(certificate), f"no energy is known to descend: {certificate}")
    return certificate


def _graph_coupling(x: Tensor, generator: torch.Generator) -> Coupling:
    """Return a symmetric coupling with row sums below one, so that both Laplacians have eigenvalues in [0, 2)."""
    graph = random_instance(len(x), 1, generator).graph().to_undirected()
    # Divided by the largest degree, so that no step size of a test has to know the graph.
    weight = graph.weights(x) / (1.01 * graph.degree(dtype=x.dtype).max())
    return SparseCoupling(
        Graph(len(x), graph.edges, weight), symmetric=True, nonnegative=True
    )
