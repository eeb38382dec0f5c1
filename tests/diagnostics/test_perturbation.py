"""`lipschitz` against singular values of Jacobians; `perturbation_bound` and the corrected Theorem 4.7."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion_mp import ConvergenceError
from diffusion_mp.diagnostics import (
    Perturbation,
    lipschitz,
    perturbation_bound,
    roughness,
)
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.layers.sequences import TransformerBlock
from diffusion_mp.models import PDETransformer
from diffusion_mp.testing.laws import seeded
from diffusion_mp.updates import HeatKernel
from helpers import draw, randn, refuses

with seeded(0):
    MLP = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4)).double()
    BLOCK = TransformerBlock(4, 2, mlp_channels=8).double().eval()
KEPT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]]).bool()


def matrix(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    return partial(torch.matmul, randn(rows, columns, seed=rows))


def block(x: Tensor) -> Tensor:
    """A block whose fused attention has no second derivative."""
    return BLOCK(x, KEPT)[KEPT].flatten()


@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (matrix(7, 7), (7,)),
        (matrix(3, 9), (9,)),
        (matrix(1, 5), (5,)),
        (matrix(5, 1), (1,)),
        (matrix(120, 150), (150,)),
        (MLP, (6,)),
        (block, (2, 5, 4)),
    ],
)
def test_it_is_the_norm_of_the_jacobian(generator, f, shape):
    for _ in range(3):
        x = draw(generator, *shape)
        with sdpa_kernel(SDPBackend.MATH):
            expected = torch.linalg.matrix_norm(jacrev(f)(x).flatten(1), 2).item()
        assert lipschitz(f, x, tol=1e-12, max_iter=5000) == pytest.approx(
            expected, rel=1e-9
        )
        found = lipschitz(f, x, generator=generator)  # from below, from any start
        assert expected * (1 - 1e-4) <= found <= expected * (1 + 1e-12)
    assert all(parameter.grad is None for parameter in MLP.parameters())


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(100, torch.float64), (100_000, torch.float64), (100_000, torch.float32)],
)
def test_a_direction_that_the_start_hardly_has_is_found(size, dtype, tol):
    """One entry of many is steeper. Nearly all of the start lies in the plateau below it, which looks like an end."""
    for steepest in (1.5, 1.05):
        scale = torch.ones(size, dtype=dtype)
        scale[size // 3] = steepest
        found = lipschitz(
            lambda x, scale=scale: scale * x, torch.zeros(size, dtype=dtype), tol=tol
        )
        assert found == pytest.approx(steepest, rel=max(tol, 1e-6))


def test_what_does_not_depend_on_x_is_constant():
    x = torch.rand(3)
    weight = torch.ones(3, requires_grad=True)
    for f in (
        lambda x: x.detach(),
        lambda x: x * 0,
        lambda x: x[:0],
        lambda x: weight * 2,
    ):
        assert lipschitz(f, x) == 0
    assert lipschitz(lambda x: torch.ones(2) + x.sum(), torch.rand(0)) == 0


def test_the_point_and_the_global_state_are_left_alone(
    generator,
):
    x = draw(generator, 3).requires_grad_()
    before = torch.get_rng_state()
    expected = float(x.detach().cos().abs().max())
    for switch in (torch.no_grad, torch.inference_mode):
        with switch():
            assert lipschitz(torch.sin, 1 * x) == pytest.approx(expected, rel=1e-3)
    assert x.grad is None
    assert torch.equal(before, torch.get_rng_state())
    other = lipschitz(torch.sin, x, tol=0.5, generator=generator)
    assert other != lipschitz(torch.sin, x, tol=0.5)


V = torch.rand(5, 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SCALE = torch.linspace(0.99, 1, 50, dtype=torch.float64)


def slow() -> float:
    return lipschitz(lambda x: SCALE * x, SCALE.sin(), tol=1e-6, max_iter=3)


test_lipschitz_refuses = refuses(
    (slow, ConvergenceError, "above tol=1e-06 .* after 3 iterations"),
    (lambda: lipschitz(torch.sin, V / 0), ValueError, "x must be finite"),
    (
        lambda: lipschitz(torch.sqrt, 0 * V),
        ValueError,
        "f must have a finite derivative",
    ),
)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e38])
def test_squares_may_leave_the_range_of_single_precision(scale, generator):
    matrix = torch.randn(4, 3, generator=generator)
    found = lipschitz(
        lambda x: scale * (matrix @ x), torch.rand(3, generator=generator)
    )
    assert found / scale == pytest.approx(
        float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-4
    )


MASK = torch.arange(9) < torch.tensor([[9], [5]])


def transformer(placement: str | None = "P1", **options: Any) -> PDETransformer:
    with seeded(0):
        return PDETransformer(
            2, 6, 3, 2, 3, max_length=9, placement=placement, **options
        ).double()  # type: ignore


class Map(nn.Module):
    """A function as a module."""

    def __init__(self, g: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.g = g

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.g(x)


def alternate(x: Tensor) -> Tensor:
    """The roughest of sequences, x_i = (−1)ⁱ."""
    return (-1.0) ** torch.arange(x.size(1), dtype=x.dtype).view(
        1, -1, 1
    ) * x.abs().max() + 0 * x


def bump(x: Tensor) -> Tensor:
    """Steepest at |x| = 0.8."""
    return torch.tanh(8 * (x.abs() - 0.8))


def test_a_linear_tail_has_the_norm_of_its_matrix(generator):
    """Behind the layer a matrix: Lip(T) is its norm whatever the state, and the truth is ‖(SZ − Z)M‖."""
    layer = PDEDiffusion1d(4).double()
    tail = nn.Linear(4, 3).double()
    x = draw(generator, 2, 9, 4)
    found = perturbation_bound(nn.Sequential(layer, tail), layer, x, tol=1e-10)
    moved = layer(x) - x
    rough = float(roughness(x).sum())
    expected = {
        "lipschitz": float(torch.linalg.matrix_norm(tail.weight, 2)),
        "truth": float((moved @ tail.weight.T).norm()),
        "step": float(moved.norm()),
        "estimate": found.lipschitz * found.step,
        "roughness": rough,
        "size": float(x.norm()),
        "step_bound": layer.alpha.item() * (8 * rough) ** 0.5,
    }
    for name, number in expected.items():
        # What is iterated, or made of a number in single precision, has fewer digits.
        rel = {"lipschitz": 1e-6, "step_bound": 1e-6, "truth": 1e-10}.get(name, 1e-12)
        assert getattr(found, name) == pytest.approx(number, rel=rel), name


def test_the_estimate_is_not_exceeded_by_random_smooth_tails(
    generator,
):
    with seeded(0):
        for trial in range(40):
            strides = ((1,), (1, 2), (1, 2, 4), (3,))[trial % 4]
            layer = PDEDiffusion1d(4, heads=2, per="head", strides=strides, alpha=0.45)
            tail = nn.Sequential(
                nn.Linear(4, 8),
                (nn.Tanh(), nn.GELU())[trial % 2],
                nn.Flatten(),
                nn.Linear(40, 3),
            )
            nn.init.normal_(tail[0].weight, std=0.1 + trial % 5)
            model = nn.Sequential(layer, tail).double()
            found = perturbation_bound(
                model, layer, 2 * draw(generator, 1, 5, 4), points=9
            )
            assert found.truth <= found.estimate * (1 + 1e-3), trial
            assert found.step <= found.step_bound * (1 + 1e-9), trial  # type: ignore[operator]


@pytest.mark.parametrize(
    ("g", "points", "place"),
    [(torch.square, 2, 0.0), (torch.sin, 2, 1.0), (bump, 5, 0.5)],
    ids=["beginning", "end", "middle"],
)
def test_the_tail_is_measured_along_the_whole_segment(g, points, place):
    """A square is steepest where the state begins, a sine where diffusion takes it, a bump between the two."""
    layer = PDEDiffusion1d(1, alpha=0.2).double()
    x = torch.ones(1, 20, 1, dtype=torch.float64)
    found = perturbation_bound(
        nn.Sequential(Map(alternate), layer, Map(g)), layer, x, points=points, tol=1e-10
    )
    before = alternate(x)
    after = layer(alternate(x)).detach()

    def steepness(s: float) -> float:
        z = torch.lerp(before, after, s).requires_grad_()
        return float(torch.autograd.grad(g(z).sum(), z)[0].abs().max())

    assert found.lipschitz == pytest.approx(steepness(place), rel=1e-6)
    assert all(
        steepness(place) > 1.05 * steepness(s) for s in {0.0, 0.5, 1.0} - {place}
    )


def test_the_printed_bound_is_violated_and_behind_a_steep_tail_the_estimate_is_none():
    """With Lip(T) = 1, on the alternating sequence α√(2𝓔) of Eq. 10 is too small (P3); no point sees a steep step."""
    layer = PDEDiffusion1d(1, alpha=0.4).double()
    x = torch.ones(1, 200, 1, dtype=torch.float64)
    found = perturbation_bound(
        nn.Sequential(Map(alternate), layer, nn.Identity()), layer, x
    )
    printed = layer.alpha.item() * (2 * found.roughness) ** 0.5
    assert found.lipschitz == pytest.approx(1, rel=1e-6)
    assert found.truth > 1.95 * printed
    assert found.roughness_estimate is not None
    assert 0.98 * found.roughness_estimate < found.truth <= found.roughness_estimate
    steep = Map(lambda z: torch.tanh(60 * (z - 0.73)))
    found = perturbation_bound(
        nn.Sequential(Map(alternate), layer, steep), layer, x[:, :2], points=2
    )
    assert found.truth > 1.9
    assert found.estimate < 1e-3


@pytest.mark.parametrize("placement", ["P1", "P2", "P3", "P4", "P5", "P6", "P7"])
def test_the_truth_is_that_of_the_bypassed_layer(generator, placement):
    model = transformer(placement).eval()
    x = draw(generator, 2, 9, 2)
    name, layer = next(
        (n, m) for n, m in model.named_modules() if isinstance(m, PDEDiffusion1d)
    )
    found = perturbation_bound(model, layer, x, MASK)
    out = model(x, MASK)
    model.set_submodule(name, Map(lambda x: x))
    truth = float((out - model(x, MASK)).norm())
    assert found.truth == pytest.approx(truth, rel=1e-8)
    assert 0 < found.truth <= found.estimate


NUMBERS = ("truth", "lipschitz", "step", "step_bound", "roughness", "size")


def assert_equal_numbers(
    found: Perturbation, expected: Perturbation, rel: float
) -> None:
    for name in NUMBERS:
        number = getattr(expected, name)
        assert getattr(found, name) == pytest.approx(number, rel=rel), name


def test_an_insertion_into_a_baseline_is_the_placement(
    generator,
):
    x = draw(generator, 2, 9, 2)
    model = transformer("P1")
    baseline = transformer(None)
    baseline.load_state_dict(model.state_dict(), strict=False)
    layer = model.after_embedding
    found = perturbation_bound(
        baseline, baseline.after_embedding, x, mask=MASK, diffusion=layer
    )
    assert_equal_numbers(found, perturbation_bound(model, layer, x, mask=MASK), 1e-8)


def test_padding_does_not_matter(generator):
    model = transformer("P2")
    layer = model.blocks[0].after_mlp
    x = draw(generator, 1, 9, 2)
    alone = perturbation_bound(model, layer, x[:, :5], tol=1e-9)
    x[:, 5:] = torch.nan
    padded = perturbation_bound(model, layer, x, MASK[1:], tol=1e-9)
    assert_equal_numbers(padded, alone, 1e-6)


def test_towers_are_perturbed_together(generator):
    model = transformer("P1", task="retrieve").eval()
    x = draw(generator, 2, 9, 2)
    other = draw(generator, 2, 7, 2)
    found = perturbation_bound(model, model.after_embedding, x, None, other)
    out = model(x, None, other)
    states = [model.embed(x), model.embed(other)]
    model.after_embedding = Map(lambda x: x)
    steps = [states[0] - model.embed(x), states[1] - model.embed(other)]
    squares = sum(float(step.square().sum()) for step in steps)
    truth = float((out - model(x, None, other)).norm())
    assert found.truth == pytest.approx(truth, rel=1e-8)
    assert found.step == pytest.approx(squares**0.5, rel=1e-8)
    assert found.truth <= found.estimate


@pytest.mark.parametrize(
    "options",
    [
        {"norm": True},
        {"strides": (2,), "boundary": "replicate"},
        {"boundary": "causal"},
        {"update": HeatKernel(1.0)},
    ],
    ids=["norm", "replicate", "causal", "heat"],
)
def test_a_layer_that_no_theorem_covers_has_no_bound_by_roughness(generator, options):
    layer = PDEDiffusion1d(2, **options).double()
    found = perturbation_bound(
        nn.Sequential(layer, nn.Tanh()), layer, draw(generator, 2, 6, 2)
    )
    assert found.step_bound is None
    assert found.roughness_estimate is None
    assert found.truth <= found.estimate


class Named(nn.Module):
    """Calls its part by keywords of other names."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Bilinear(2, 2, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(input1=x, input2=x)


MODEL = transformer("P1")
NAMED = Named()


def bound(
    model: nn.Module, site: nn.Module, scale: float = 1.0, **options: Any
) -> Callable[[], object]:
    return lambda: perturbation_bound(
        model, site, scale * torch.ones(2, 9, 2, dtype=torch.float64), **options
    )


REPLACED = {"diffusion": PDEDiffusion1d(6).double()}
test_perturbation_bound_refuses = refuses(
    (bound(MODEL, MODEL.blocks[0]), "diffusion must be given"),
    (bound(MODEL, PDEDiffusion1d(6)), "site must be a module of the model"),
    (
        bound(MODEL, MODEL.after_embedding, torch.nan),
        "inputs give at site must be finite",
    ),
    (bound(NAMED, NAMED.part, **REPLACED), r"must be called as module\(x, mask\)"),
)
