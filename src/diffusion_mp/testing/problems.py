"""Diffusions with known solutions, to test updates.

    for problem in exact_problems():
        expect_close(MyUpdate(t=1.0)(problem.state, problem.coupling), problem.heat(1.0), "solve")
    assert abs(order_of_convergence(MyStep, path_problem(12)) - 1) < 0.05

Solutions are computed from dense matrices by torch and SciPy, independently of couplings.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.errors import (
    check_choice,
    check_counts,
    check_function,
    check_kind,
    check_positive,
    check_seed,
    check_tensor,
    check_values,
    describe,
)
from diffusion_mp.graph import Graph
from diffusion_mp.updates import Form, StateUpdate


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
        receiver, sender = self.matrix.nonzero(as_tuple=True)
        graph = Graph(self.matrix.size(0), torch.stack([sender, receiver]))
        return SparseCoupling(graph, self.matrix[receiver, sender], symmetric=True, nonnegative=True)

    @property
    def laplacian(self) -> Float[Tensor, "N N"]:
        """Δ, dense."""
        diagonal = self.matrix.sum(1) if self.form == "conservative" else torch.ones_like(self.matrix[0])
        return diagonal.diag() - self.matrix

    def heat(self, t: float) -> Float[Tensor, "N H D"]:
        """Return exp(−tΔ) x, the state at time t (``scipy.linalg.expm``)."""
        check_positive(t, "t", allow_zero=True)
        from scipy.linalg import expm

        kernel = torch.from_numpy(np.asarray(expm(-t * self.laplacian.numpy())))
        return torch.einsum("ij,jhd->ihd", kernel, self.state)

    def implicit_step(
        self, tau: float, source: Tensor | None = None, *, beta: float = 0.0, leak: float = 0.0
    ) -> Float[Tensor, "N H D"]:
        """Return (I + τ(Δ + κ))⁻¹ (x + τβh), by a dense solve."""
        check_positive(tau, "tau", allow_zero=True)
        check_positive(leak, "leak", allow_zero=True)
        return self._solve(tau, 1 + tau * leak, self.state if source is None else self.state + tau * beta * source)

    def steady_state(self, source: Tensor, *, beta: float = 1.0, leak: float = 0.0) -> Float[Tensor, "N H D"]:
        """Return (Δ + κ)⁻¹ βh, by a dense solve."""
        check_positive(leak, "leak", allow_zero=True)
        check_values(source, self.matrix.size(0), 1, "source")
        return self._solve(1.0, leak, beta * source)

    def _solve(self, tau: float, shift: float, right: Tensor) -> Tensor:
        """Return (τΔ + shift)⁻¹ right."""
        matrix = tau * self.laplacian + shift * torch.eye(len(self.matrix), dtype=self.matrix.dtype)
        solution: Tensor = torch.linalg.solve(matrix, right.flatten(1))
        return solution.view_as(right)


def problem_on_graph(name: str, adjacency: Tensor, form: Form = "conservative", *, seed: int = 0) -> Problem:
    """Return a problem with a random state [N, 2, 3] on a graph without isolated nodes.

    In the residual form S is D^-½AD^-½, so that I − S is positive semidefinite, as in GCN.

    Args:
        name: of the problem.
        adjacency: [N, N], symmetric and nonnegative.
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
        seed: of the state.

    Raises:
        TypeError, ValueError: the adjacency is not a symmetric, nonnegative matrix.

    Examples:
        >>> problem_on_graph("a pair", torch.tensor([[0.0, 1.0], [1.0, 0.0]])).name
        'a pair, conservative'
    """
    check_choice(form, "form", ["conservative", "residual"])
    check_seed(seed)
    check_tensor(adjacency, "adjacency", "[num_nodes, num_nodes]")
    if adjacency.dim() != 2 or not torch.equal(adjacency, adjacency.mT) or bool((adjacency < 0).any()):
        raise ValueError(f"adjacency must be a symmetric, non-negative matrix; got {describe(adjacency)}.")
    adjacency = adjacency.double()
    if form == "residual":
        scale = adjacency.sum(1).rsqrt()
        adjacency = adjacency * torch.outer(scale, scale)
    state = torch.randn(adjacency.size(0), 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Problem(f"{name}, {form}", adjacency, state, form)


def path_adjacency(num_nodes: int) -> Float[Tensor, "N N"]:
    """Return the adjacency of the path 0 − 1 − … − (N − 1)."""
    check_counts(num_nodes=num_nodes)
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
    check_counts(num_nodes=num_nodes)
    turn = torch.eye(num_nodes, dtype=torch.float64).roll(1, 0)
    return problem_on_graph(f"cycle of {num_nodes}", turn + turn.T, form)


def complete_problem(num_nodes: int = 9, form: Form = "conservative") -> Problem:
    """Diffusion on a complete graph: e^{-tΔ} x is the mean plus e^{-tN} times the rest. See `Problem` for ``form``.

    Examples:
        >>> complete_problem(5).matrix.shape
        torch.Size([5, 5])
    """
    check_counts(num_nodes=num_nodes)
    ones = torch.ones(num_nodes, num_nodes, dtype=torch.float64)
    return problem_on_graph(f"complete graph of {num_nodes}", ones - torch.eye(num_nodes, dtype=torch.float64), form)


def grid_problem(rows: int = 4, columns: int = 5, form: Form = "conservative") -> Problem:
    """Diffusion on a rectangular grid, the Kronecker sum of two paths; see `Problem` for ``form``.

    Examples:
        >>> grid_problem(2, 3).matrix.shape
        torch.Size([6, 6])
    """
    check_counts(rows=rows, columns=columns)
    along = torch.kron(torch.eye(rows, dtype=torch.float64), path_adjacency(columns))
    across = torch.kron(path_adjacency(rows), torch.eye(columns, dtype=torch.float64))
    return problem_on_graph(f"{rows} x {columns} grid", along + across, form)


def random_problem(num_nodes: int = 40, form: Form = "conservative", *, seed: int = 0) -> Problem:
    """Diffusion on a random graph of mean degree about six with weights in [½, 3/2], connected by a path.

    Args:
        num_nodes: N.
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
        seed: of weights, graph and state.

    Examples:
        >>> random_problem(10, seed=0).matrix.shape
        torch.Size([10, 10])
    """
    check_counts(num_nodes=num_nodes)
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(num_nodes, num_nodes, dtype=torch.float64, generator=generator) < 4.0 / num_nodes
    weight = torch.rand(num_nodes, num_nodes, dtype=torch.float64, generator=generator) + 0.5
    upper = ((chosen | (path_adjacency(num_nodes) > 0)) * weight).triu(1)
    return problem_on_graph(f"random graph of {num_nodes}", upper + upper.T, form, seed=seed)


def exact_problems() -> list[Problem]:
    """Return a problem for each of these graphs in both forms.

    Examples:
        >>> all(isinstance(problem, Problem) for problem in exact_problems())
        True
    """
    makers: list[Callable[..., Problem]] = [
        path_problem, cycle_problem, complete_problem, grid_problem, random_problem,
    ]  # fmt: skip
    return [maker(form=form) for maker in makers for form in ("conservative", "residual")]


def cosine_mode(num_nodes: int, k: int) -> tuple[Float[Tensor, "N 1 1"], float]:
    """Return the k-th Neumann mode of the path, cos(πk(i + ½)/N), and its eigenvalue λ = 4 sin²(πk/2N) of D̄ − S.

    Modes are the columns of the DCT-II. Diffusion scales them by e^{-tλ}, an explicit step by 1 − τλ and an implicit
    one by 1/(1 + τλ).

    Args:
        num_nodes: N.
        k: 0 ≤ k.

    Returns:
        The mode [N, 1, 1] and the eigenvalue.

    Examples:
        >>> mode, eigenvalue = cosine_mode(8, 1)
        >>> mode.shape
        torch.Size([8, 1, 1])
    """
    check_counts(num_nodes=num_nodes)
    check_seed(k, "k")
    if k < 0:
        raise ValueError(f"k must be at least 0; got {k}.")
    position = torch.arange(num_nodes, dtype=torch.float64) + 0.5
    mode = torch.cos(math.pi * k * position / num_nodes)
    return mode[:, None, None], 4.0 * math.sin(math.pi * k / (2 * num_nodes)) ** 2


def order_of_convergence(
    step: Callable[[float], StateUpdate],
    problem: Problem,
    t: float = 0.5,
    counts: Sequence[int] = (64, 128, 256),
) -> float:
    """Return p in error ~ τᵖ for n steps of ``step(t / n)``, n in ``counts``, compared with `Problem.heat`.

    Args:
        step: maps a time step to an update.
        problem: the problem, from its state.
        t: final time.
        counts: at least two numbers of steps.

    Examples:
        >>> round(order_of_convergence(lambda tau: CrankNicolson(tau), path_problem(5), counts=(8, 16, 32)))
        2
    """
    check_function(step, "step", "from a time step to a StateUpdate")
    check_kind(problem, "problem", Problem, "a Problem")
    check_kind(counts, "counts", (list, tuple, range), "a list of numbers of steps")
    check_counts(**{f"counts[{k}]": count for k, count in enumerate(counts)})
    if len(counts) < 2:
        raise ValueError(f"counts must hold two numbers of steps at least, for a slope; got {list(counts)}.")
    check_positive(t, "t")
    exact = problem.heat(t)
    errors = []
    for count in counts:
        update, x = step(t / count), problem.state
        for _ in range(count):
            x = update(x, problem.coupling)
        errors.append(float((x - exact).norm()))
    slope, _ = np.polyfit(np.log([t / count for count in counts]), np.log(errors), 1)
    return float(slope)
