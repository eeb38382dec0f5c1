"""Theorems T2, T4, T5 and T6 of docs/certified.md against gradient ascent, which finds rises beyond their numbers."""

import math
from functools import partial

import pytest
import torch
from test_certified_search import CONSTRAINTS, Problems, certified, climb
from torch import Tensor

import diffusion_mp as dm
from diffusion_mp.diagnostics import smoothing_floor
from diffusion_mp.energies import get_constraint
from diffusion_mp.updates import MomentumStep

pytestmark = pytest.mark.usefixtures("no_typecheck")

PENALTIES = [dm.QuadraticPenalty(), dm.SimplePenalty(), dm.SigmoidPenalty(), dm.GaussianPenalty(0.3)]
Free = dict[str, Tensor]


def ascend(rise, free: Free, iterations: int) -> Tensor:
    """The largest rise of every problem on the way up; a rise is a share of what it is a rise of."""
    free = {name: value.clone().requires_grad_() for name, value in free.items()}
    ascent = torch.optim.Adam(free.values(), lr=0.05, maximize=True)
    best = torch.tensor(-math.inf)
    for _ in range(iterations):
        risen = rise(free)
        assert risen.isfinite().all()
        best = torch.maximum(best, risen.detach())
        ascent.zero_grad()
        risen.sum().backward()
        ascent.step()
    return best


def states(count: int, n: int, seed: int, names: str) -> Free:
    """States [count, n, 2] over two decades of size."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** torch.empty(count, 1, 1, dtype=torch.float64).uniform_(-1.5, 0.5, generator=generator)
    shared = {"leak": torch.linspace(-2, 2, count, dtype=torch.float64)}
    return {
        name: shared.get(name, size * torch.randn(count, n, 2, generator=generator, dtype=torch.float64))
        for name in names.split()
    }


def within(penalty: dm.Penalty, x: Tensor) -> Tensor:
    return x / (1 + x.norm(dim=2, keepdim=True)) if math.isfinite(penalty.domain[1]) else x


def pairs(penalty: dm.Penalty, x: Tensor) -> Tensor:
    """Σ_ij δ(‖x_i − x_j‖²) of every problem, from δ(0) on."""
    s = (x.unsqueeze(1) - x.unsqueeze(2)).square().sum(3)
    return (penalty.delta(s) - penalty.delta(torch.zeros_like(s))).sum((1, 2))


def rounding(x: Tensor) -> float:
    """10¹² roundings of `pairs`, whose terms are differences of numbers near one."""
    return 1e-3 * x.size(1) ** 2


def square(x: Tensor) -> Tensor:
    return x.square().sum((1, 2))


def bounds(x: Tensor) -> Tensor:
    return torch.arange(0, x.size(0) * x.size(1) + 1, x.size(1))


def trajectory_rise(free: Free, penalty: dm.Penalty, tau: float, steps: int, share: float) -> Tensor:
    """The largest E(Z_{k+1}, k) − E(Z_k, k), at least the theorem's rise, over E(Z_0, 0), at a share of its λ."""
    x = within(penalty, free["x"])
    lam = x.new_tensor([dm.energies.certify_trajectory(penalty, part, tau).lam for part in x.detach()]) * share
    risen, moved, whole = [], x, lam * pairs(penalty, x)
    for _ in range(steps):
        coupling = penalty.coupling(moved.flatten(0, 1), bounds(x), normalize=True)
        start, average = moved, (coupling @ moved.flatten(0, 1).unsqueeze(1)).view_as(moved)
        moved = start - tau * (start - average)
        after = square(moved - start) + lam * pairs(penalty, moved)
        risen.append((after - lam * pairs(penalty, start)) / (whole + lam * rounding(x)))
    return torch.stack(risen).amax(0)


def search(rise, cases: list[tuple[int, dict]], names: str, count: int, iterations: int):
    return max(
        float(ascend(partial(rise, penalty=penalty, **options), states(count, n, seed, names), iterations).max())
        for seed, penalty in enumerate(PENALTIES)
        for n, options in cases
    )


def search_trajectories(share: float, count: int, iterations: int) -> float:
    cases = [(n, {"tau": tau, "steps": 4, "share": share}) for n, tau in [(2, 1.0), (5, 0.6)]]
    return search(trajectory_rise, cases, "x", count, iterations)


def momentum_rise(free: Free, penalty: dm.Penalty, momentum: float, factor: float) -> Tensor:
    """The rise of P(z) + (2m/τ)‖z − z₋‖² in a step of the library, at the largest τ or a multiple of it."""
    x, previous = within(penalty, free["x"]), within(penalty, free["y"])
    n = x.size(1)
    update = MomentumStep(factor * 2 * (1 - momentum) / (n * float(penalty.f(x.new_zeros(())))), momentum)
    coupling = penalty.coupling(x.flatten(0, 1), bounds(x))
    after = update.advance(x.flatten(0, 1).unsqueeze(1), previous.flatten(0, 1).unsqueeze(1), coupling).view_as(x)
    inside = ((after.unsqueeze(1) - after.unsqueeze(2)).square().sum(3) <= penalty.domain[1]).flatten(1).all(1)
    kinetic = 2 * momentum / update.tau
    before = pairs(penalty, x) + kinetic * square(x - previous)
    risen = (pairs(penalty, after) + kinetic * square(after - x) - before) / (before + rounding(x))
    return torch.where(inside, risen, risen.detach().clamp(max=0))


def search_momentum(factor: float, count: int, iterations: int) -> float:
    cases = [(n, {"momentum": momentum, "factor": factor}) for n, momentum in [(2, 0.9), (4, 0.5), (7, 0.05)]]
    return search(momentum_rise, cases, "x y", count, iterations)


def floor_rise(free: Free, penalty: dm.Penalty, room: float) -> Tensor:
    """How far the floor β/(2 + κ) ‖ΠH‖ (times ``room``) is above ‖ΠZ‖, as a share of that."""
    y, h = within(penalty, free["y"]), free["h"]
    leak = 10 ** (3 * torch.tanh(free["leak"]))
    omega = penalty.f((y.unsqueeze(1) - y.unsqueeze(2)).square().sum(3))
    degree = omega.sum(2, keepdim=True)
    eye = torch.eye(y.size(1), dtype=y.dtype)
    z = torch.linalg.solve((1 + leak.view(-1, 1, 1)) * eye - omega / degree, h)

    def spread(x: Tensor) -> Tensor:
        return (degree * (x - (degree * x).sum(1, keepdim=True) / degree.sum(1, keepdim=True)).square()).sum((1, 2))

    return (room / (2 + leak)).square() * spread(h) / (spread(z) + 1e-300) - 1


def search_floors(room: float, count: int, iterations: int) -> float:
    return search(floor_rise, [(n, {"room": room}) for n in (2, 3, 6)], "y h leak", count, iterations)


SEARCHES = {"T2": search_trajectories, "T4": search_momentum, "T6": search_floors}


@pytest.mark.parametrize(("count", "iterations"), [(12, 12), pytest.param(100, 60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("theorem", SEARCHES)
def test_no_counterexample_is_found(theorem: str, count: int, iterations: int) -> None:
    assert SEARCHES[theorem](1.0, count, iterations) <= 1e-12


@pytest.mark.parametrize(("theorem", "number"), [("T2", 0.4), ("T4", 3.0), ("T6", 4.0)])
def test_beyond_the_theorem_the_search_finds_some(theorem: str, number: float) -> None:
    assert SEARCHES[theorem](number, 12, 12) > 1e-3


def test_the_floor_of_the_search_is_the_diagnostic_s() -> None:
    free = states(1, 5, 0, "y h") | {"leak": torch.zeros(1, dtype=torch.float64)}
    penalty, h = dm.SigmoidPenalty(), free["h"][0]
    omega = penalty.coupling(free["y"][0])
    dense = omega.to_dense()[0]
    z = torch.linalg.solve(2 * torch.eye(5, dtype=h.dtype) - dense / dense.sum(1, keepdim=True), h)
    found = smoothing_floor(omega, z, h, leak=1.0)
    assert float(floor_rise(free, penalty, 1.0)) == pytest.approx((found.floor / found.spread) ** 2 - 1, rel=1e-9)


def mixture(seed: int) -> dm.MixturePenalty:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(2, 1 + seed % 4, generator=generator, dtype=torch.float64) - 0.5
    widths, weights = (10 ** (exponents * torch.tensor([[4.0], [6.0]]))).tolist()
    return dm.MixturePenalty(widths, weights).double().requires_grad_(False)


def search_mixtures(mixtures: int, count: int, iterations: int) -> float:
    worst = -math.inf
    for seed in range(mixtures):
        for k, name in enumerate(CONSTRAINTS):
            graph = (seed + k) % 2 > 0
            attack = partial(certified, penalty=mixture(seed), constraint=get_constraint(name), graph=graph)
            problems = Problems(count, 10 * seed + k, range(2, 8, 2))
            worst = max(worst, float(climb(problems, attack, iterations).max()))
    return worst


@pytest.mark.parametrize("starts", [(4, 9, 4), pytest.param((30, 24, 30), marks=pytest.mark.slow)], ids=str)
def test_no_mixture_makes_the_energy_rise(starts: tuple[int, int, int]) -> None:
    assert search_mixtures(*starts) <= 1e-12


class NotMonotone(dm.MixturePenalty):
    """A mixture with a negative weight, which is not concave."""

    @property
    def weights(self) -> Tensor:
        return super().weights * torch.tensor([1.0, -0.99], dtype=torch.float64)


def test_a_negative_weight_would_be_found() -> None:
    penalty = NotMonotone([1.0, 0.4], [1.0, 1.0]).double().requires_grad_(False)
    attack = partial(certified, penalty=penalty, constraint=get_constraint(None), graph=False)
    assert climb(Problems(12, 0, range(2, 8, 2)), attack, 40).max() > 1e-3
