"""Diffusion problems with known solutions, for tests of updates."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp import checks
from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.graph import Graph
from diffusion_mp.updates import Form, StateUpdate


@dataclass(frozen=True)
class Problem:
    """A diffusion dx/dt = −Δx on a small graph, with its exact solution in double precision.

    Attributes:
        name: the name for messages and tests.
        matrix: S [N, N], symmetric and nonnegative.
        state: x at time 0, [N, H, D].
        form: the Laplacian Δ: D̄ − S for ``"conservative"``, I − S for ``"residual"``. The default is conservative, as
            for updates.

    Examples:
        >>> problem = path_problem(5)
        >>> isinstance(problem, Problem), problem.state.shape  # [nodes, heads, channels]
        (True, torch.Size([5, 2, 3]))
    """

    name: str
    matrix: Float[Tensor, "N N"]
    state: HeadState
    form: Form = "conservative"

    @property
    def coupling(self) -> Coupling:
        """S as a sparse coupling, declared symmetric and nonnegative."""
        return SparseCoupling(
            Graph.from_sparse(self.matrix.to_sparse()), symmetric=True, nonnegative=True
        )

    @property
    def laplacian(self) -> Float[Tensor, "N N"]:
        """Δ as a dense matrix."""
        if self.form == "residual":
            return torch.eye(len(self.matrix), dtype=self.matrix.dtype) - self.matrix
        return self.matrix.sum(1).diag() - self.matrix

    @checks.checked
    def heat(self, t: checks.NonnegativeNumber) -> HeadState:
        """Return the exact state at time t, exp(−tΔ) x, by ``scipy.linalg.expm``.

        Args:
            t: the time, at least 0.
        """
        from scipy.linalg import expm

        # SciPy's exponential, since torch's is among what is tested.
        power = torch.from_numpy(np.asarray(expm(-t * self.laplacian.numpy())))
        return torch.einsum("ij,jhd->ihd", power, self.state)


def _problem(
    name: str, adjacency: Float[Tensor, "N N"], form: Form, seed: int = 0
) -> Problem:
    """Return a problem with a random state [N, 2, 3]; in the residual form S is D^-½AD^-½, as in GCN."""
    if form == "residual":
        # Δ = I − S is positive semi-definite for a normalised S.
        root = adjacency.sum(1).rsqrt()
        adjacency = adjacency * torch.outer(root, root)
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(len(adjacency), 2, 3, dtype=torch.float64, generator=generator)
    return Problem(f"{name}, {form}", adjacency, state, form)


def path_adjacency(num_nodes: int) -> Float[Tensor, "N N"]:
    """Return the adjacency of the path 0 − 1 − … − (N − 1)."""
    ones = torch.ones(num_nodes - 1, dtype=torch.float64)
    return ones.diag(1) + ones.diag(-1)


@checks.checked
def path_problem(num_nodes: int = 12, form: Form = "conservative") -> Problem:
    """Return a diffusion along a path of N nodes.

    Args:
        num_nodes: N, at least 2.
        form: ``"conservative"`` or ``"residual"``, see `Problem`.

    Examples:
        >>> path_problem(5).matrix.shape
        torch.Size([5, 5])
    """
    # A single node would have the degree zero, by which the residual form divides.
    checks.check_counts(2, num_nodes=num_nodes)
    return _problem(f"path of {num_nodes}", path_adjacency(num_nodes), form)


@checks.checked
def random_problem(
    num_nodes: int = 40, form: Form = "conservative", *, seed: checks.Seed = 0
) -> Problem:
    """Return a diffusion on a connected random graph of mean degree about six with weights in [½, 3/2].

    A path through all nodes connects the graph.

    Args:
        num_nodes: N, at least 2.
        form: ``"conservative"`` or ``"residual"``, see `Problem`.
        seed: seed of the graph and of the state; equal seeds give equal problems.

    Examples:
        >>> random_problem(10, seed=0).matrix.shape
        torch.Size([10, 10])
    """
    checks.check_counts(2, num_nodes=num_nodes)
    generator = torch.Generator().manual_seed(seed)
    chance, weight = torch.rand(
        2, num_nodes, num_nodes, dtype=torch.float64, generator=generator
    )
    # The path connects the graph: an isolated part would be an eigenvalue zero of its
    # own.
    linked = (chance < 4.0 / num_nodes) | (path_adjacency(num_nodes) > 0)
    upper = (linked * (weight + 0.5)).triu(1)
    return _problem(f"random graph of {num_nodes}", upper + upper.T, form, seed)


def exact_problems() -> list[Problem]:
    """Return ten problems: a path, a cycle, a complete graph, a grid and a random graph, each in both forms.

    Examples:
        >>> all(isinstance(problem, Problem) for problem in exact_problems())
        True
    """
    # An odd cycle, whose spectrum is not symmetric.
    turn = torch.eye(11, dtype=torch.float64).roll(1, 0)
    along = torch.kron(torch.eye(4, dtype=torch.float64), path_adjacency(5))
    across = torch.kron(path_adjacency(4), torch.eye(5, dtype=torch.float64))
    adjacencies = {
        "cycle of 11": turn + turn.T,
        "complete graph of 9": 1 - torch.eye(9, dtype=torch.float64),
        "4 x 5 grid": along + across,
    }
    problems: list[Problem] = []
    for form in ("conservative", "residual"):
        problems += [path_problem(form=form), random_problem(form=form)]
        problems += [_problem(*named, form) for named in adjacencies.items()]
    return problems


@checks.checked
def cosine_mode(
    num_nodes: checks.Count, k: checks.CountOrZero
) -> tuple[Float[Tensor, "N 1 1"], float]:
    """Return an eigenvector of the path's Laplacian D̄ − S, cos(πk(i + ½)/N), and its eigenvalue λ = 4 sin²(πk/2N).

    Diffusion for a time t multiplies this mode by e^{-tλ}, an explicit step by 1 − τλ, and an implicit step by 1/(1 +
    τλ).

    Args:
        num_nodes: N, the number of nodes of the path.
        k: number of the mode; 0 is the constant mode.

    Shapes:
        mode: [N, 1, 1], in double precision.

    Examples:
        >>> cosine_mode(8, 1)[0].shape
        torch.Size([8, 1, 1])
    """
    frequency = math.pi * k / num_nodes
    node = torch.arange(num_nodes, dtype=torch.float64)
    mode = torch.cos(frequency * (node + 0.5))
    return mode[:, None, None], 4.0 * math.sin(frequency / 2) ** 2


@checks.checked
def order_of_convergence(
    step: Callable[[float], StateUpdate],
    problem: Problem,
    t: checks.PositiveNumber = 0.5,
    count: checks.Count = 128,
) -> float:
    """Measure the order p of an update, with error ~ τᵖ, against the exact solution `Problem.heat`.

    The update runs to time t in ``count`` steps and in twice as many; p is log₂ of the quotient of the two errors.

    Args:
        step: a function from a time step τ to the update, such as ``lambda tau: CrankNicolson(tau)``.
        problem: the diffusion and its exact solution.
        t: the time at which errors are measured.
        count: number of steps of the coarser run. The default 128 makes steps so small that the leading term of the
            error decides.

    Examples:
        >>> round(order_of_convergence(lambda tau: CrankNicolson(tau), path_problem(5), count=16))
        2
    """
    checks.check_function(step, "step", "from a time step to a StateUpdate")
    exact = problem.heat(t)

    def error(steps: int) -> float:
        update = step(t / steps)
        x = problem.state
        for _ in range(steps):
            x = update(x, problem.coupling)
        return float((x - exact).norm())

    # The constant of the error cancels.
    return math.log2(error(count) / error(2 * count))
