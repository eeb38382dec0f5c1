"""`lipschitz` against singular values of Jacobians; `perturbation_bound` and the corrected Theorem 4.7."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion_mp import ConvergenceError, SigmoidDiffusivity
from diffusion_mp.diagnostics import lipschitz, perturbation_bound, roughness
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.layers.sequences import TransformerBlock
from diffusion_mp.models import PDETransformer
from diffusion_mp.testing.laws import seeded
from diffusion_mp.updates import HeatKernel


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (3, 9), (9, 3), (1, 5), (5, 1)])
def test_the_norm_of_a_matrix(generator: torch.Generator, rows: int, columns: int) -> None:
    matrix, x = draw(generator, rows, columns), draw(generator, columns)
    expected = torch.linalg.matrix_norm(matrix, 2).item()
    assert lipschitz(lambda x: matrix @ x, x, tol=1e-12, max_iter=5000) == pytest.approx(expected, rel=1e-9)


def test_the_jacobian_of_an_mlp(generator: torch.Generator) -> None:
    with seeded(0):
        f = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4)).double()
    for _ in range(5):
        x = draw(generator, 6)
        expected = torch.linalg.matrix_norm(jacrev(f)(x), 2).item()
        assert lipschitz(f, x, tol=1e-10) == pytest.approx(expected, rel=1e-8)
        assert 0.98 * expected < lipschitz(f, x) <= expected * (1 + 1e-12), "from below"
    assert all(parameter.grad is None for parameter in f.parameters())


def test_the_jacobian_of_a_transformer_block(generator: torch.Generator) -> None:
    """Fused attention has no second derivative; it is replaced while this runs."""
    with seeded(0):
        block = TransformerBlock(4, 2, mlp_channels=8).double().eval()
    x, mask = draw(generator, 2, 5, 4), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]]).bool()
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(lambda x: block(x, mask)[mask].flatten())(x).flatten(1)
    expected = torch.linalg.matrix_norm(jacobian, 2).item()
    assert lipschitz(lambda x: block(x, mask)[mask], x, tol=1e-10) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize(("size", "dtype"), [(100, torch.float64), (100_000, torch.float64), (100_000, torch.float32)])
def test_a_direction_that_the_start_hardly_has_is_found(size: int, dtype: torch.dtype, tol: float) -> None:
    """One entry of many is steeper. Nearly all of the start lies in the plateau below it, which looks like an end."""
    for steepest in (1.5, 1.05):
        scale = torch.ones(size, dtype=dtype)
        scale[size // 3] = steepest
        found = lipschitz(lambda x, scale=scale: scale * x, torch.zeros(size, dtype=dtype), tol=tol)
        assert found == pytest.approx(steepest, rel=max(tol, 1e-6))


@pytest.mark.parametrize("seed", range(20))
def test_many_nearly_equal_singular_values(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = draw(generator, 120, 150)
    expected = torch.linalg.matrix_norm(matrix, 2).item()
    found = lipschitz(lambda x: matrix @ x, draw(generator, 150), generator=generator)
    assert expected * (1 - 1e-4) <= found <= expected * (1 + 1e-12)


def test_what_does_not_depend_on_x_is_constant(generator: torch.Generator) -> None:
    x = draw(generator, 3)
    assert lipschitz(lambda x: x.detach(), x) == 0
    assert lipschitz(lambda x: x * 0, x) == 0
    assert lipschitz(lambda x: x[:0], x) == 0
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert lipschitz(lambda x: weight * 2, x) == 0


def test_it_leaves_the_point_and_the_random_state_alone(generator: torch.Generator) -> None:
    x, before = draw(generator, 3).requires_grad_(), torch.get_rng_state()
    with torch.no_grad():
        assert lipschitz(torch.sin, x) == pytest.approx(float(x.cos().abs().max()), rel=1e-3)
    assert x.grad is None
    assert torch.equal(before, torch.get_rng_state())
    start = torch.Generator().manual_seed(5)
    assert lipschitz(torch.sin, x, tol=0.5, generator=start) != lipschitz(torch.sin, x, tol=0.5)


def test_it_says_when_it_fails(generator: torch.Generator) -> None:
    scale = torch.linspace(0.99, 1, 50, dtype=torch.float64)
    with pytest.raises(ConvergenceError, match=r"residual .* above tol=1e-06 .* after 3 iterations, at ‖J‖ = 0.99"):
        lipschitz(lambda x: scale * x, draw(generator, 50), tol=1e-6, max_iter=3)
    diffusivity, v = SigmoidDiffusivity(), draw(generator, 5, 1, 2)
    with pytest.raises(RuntimeError, match="once"):
        lipschitz(lambda x: diffusivity(x).matmul(v), draw(generator, 5, 2))
    with pytest.raises(ValueError, match="tol must be finite and > 0"):
        lipschitz(torch.sin, v, tol=0.0)
    with pytest.raises(ValueError, match="x must be finite; 10 of its 10 entries"):
        lipschitz(torch.sin, v / 0)
    with pytest.raises(ValueError, match="f must have a finite derivative at x, below 1e150; its norm there is inf"):
        lipschitz(torch.sqrt, 0 * v)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    ("f", "sentence"),
    [
        (lambda x: "x", r"f\(x\) must be a tensor; got 'x'"),
        (lambda x: (x, x), r"f\(x\) must be a tensor; got \(a float32"),
        (lambda x: x + 1j, r"f\(x\) must be real; got a complex64"),
    ],
)
def test_it_says_what_f_must_give(f: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        lipschitz(f, torch.rand(3))


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e38])
def test_squares_may_leave_the_range_of_single_precision(scale: float, generator: torch.Generator) -> None:
    matrix = torch.randn(4, 3, generator=generator)
    found = lipschitz(lambda x: scale * (matrix @ x), torch.rand(3, generator=generator))
    assert found / scale == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-4)


def test_nothing_to_move_in_stretches_nothing() -> None:
    assert lipschitz(lambda x: torch.ones(2) + x.sum(), torch.rand(0)) == 0.0


MASK = torch.arange(9) < torch.tensor([[9], [5]])


def transformer(placement: str | None = "P1", **options: Any) -> PDETransformer:
    with seeded(0):
        return PDETransformer(2, 6, 3, 2, 3, max_length=9, placement=placement, **options).double()  # type: ignore


class Without(nn.Module):
    """The identity in the place of a diffusion layer."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


class Alternating(nn.Module):
    """The roughest of sequences, x_i = (−1)ⁱ."""

    def forward(self, x: Tensor) -> Tensor:
        return (-1.0) ** torch.arange(x.size(1), dtype=x.dtype).view(1, -1, 1) * x.abs().max() + 0 * x


def bump(x: Tensor) -> Tensor:
    """Steepest at |x| = 0.8."""
    return torch.tanh(8 * (x.abs() - 0.8))


def test_a_linear_tail_has_the_norm_of_its_matrix(generator: torch.Generator) -> None:
    """Behind the layer a matrix: Lip(T) is its norm whatever the state, and the truth is ‖(SZ − Z)M‖."""
    layer, tail = PDEDiffusion1d(4).double(), nn.Linear(4, 3).double()
    x = draw(generator, 2, 9, 4)
    found = perturbation_bound(nn.Sequential(layer, tail), layer, x, tol=1e-10)
    moved = layer(x) - x
    assert found.lipschitz == pytest.approx(torch.linalg.matrix_norm(tail.weight, 2).item(), rel=1e-6)
    assert found.truth == pytest.approx((moved @ tail.weight.T).norm().item(), rel=1e-10)
    assert found.step == pytest.approx(moved.norm().item(), rel=1e-12)
    assert found.estimate == found.lipschitz * found.step
    assert found.roughness == pytest.approx(float(roughness(x).sum()), rel=1e-12)
    assert found.size == pytest.approx(x.norm().item(), rel=1e-12)
    alpha = layer.alpha.item()
    assert found.step_bound == pytest.approx(alpha * (8 * found.roughness) ** 0.5, rel=1e-6)


def test_the_estimate_is_not_exceeded_by_random_smooth_tails(generator: torch.Generator) -> None:
    with seeded(0):
        for trial in range(40):
            strides = ((1,), (1, 2), (1, 2, 4), (3,))[trial % 4]
            layer = PDEDiffusion1d(4, heads=2, per="head", strides=strides, alpha=0.45)
            tail = nn.Sequential(nn.Linear(4, 8), (nn.Tanh(), nn.GELU())[trial % 2], nn.Flatten(), nn.Linear(40, 3))
            nn.init.normal_(tail[0].weight, std=0.1 + trial % 5)
            model = nn.Sequential(layer, tail).double()
            found = perturbation_bound(model, layer, 2 * draw(generator, 1, 5, 4), points=9)
            assert found.step_bound is not None
            assert found.roughness_estimate is not None
            assert found.truth <= found.estimate * (1 + 1e-3), trial
            assert found.step <= found.step_bound * (1 + 1e-9), trial
            assert found.truth <= found.roughness_estimate * (1 + 1e-3), trial


class Steep(nn.Module):
    """g(z), position by position: ‖J‖ is the largest |g′| over the positions."""

    def __init__(self, g: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.g = g

    def forward(self, x: Tensor) -> Tensor:
        return self.g(x)


@pytest.mark.parametrize(
    ("g", "points", "place"),
    [(torch.square, 2, 0.0), (torch.sin, 2, 1.0), (torch.square, 5, 0.0), (torch.sin, 5, 1.0), (bump, 5, 0.5)],
    ids=["beginning", "end", "beginning-of-five", "end-of-five", "middle"],
)
def test_the_tail_is_measured_along_the_whole_segment(g: Callable[[Tensor], Tensor], points: int, place: float) -> None:
    """A square is steepest where the state begins, a sine where diffusion takes it, a bump between the two."""
    layer = PDEDiffusion1d(1, alpha=0.2).double()
    model = nn.Sequential(Alternating(), layer, Steep(g))
    found = perturbation_bound(model, layer, torch.ones(1, 20, 1, dtype=torch.float64), points=points, tol=1e-10)
    before = Alternating()(torch.ones(1, 20, 1, dtype=torch.float64))
    after = layer(before).detach()

    def steepness(s: float) -> float:
        z = torch.lerp(before, after, s).requires_grad_()
        return float(torch.autograd.grad(g(z).sum(), z)[0].abs().max())

    assert found.lipschitz == pytest.approx(steepness(place), rel=1e-6)
    assert all(steepness(place) > 1.05 * steepness(s) for s in {0.0, 0.5, 1.0} - {place})


def test_behind_a_steep_tail_the_estimate_is_no_bound() -> None:
    """A step of tanh between two points of the segment is seen by neither."""
    layer = PDEDiffusion1d(1, alpha=0.4).double()
    model = nn.Sequential(Alternating(), layer, Steep(lambda z: torch.tanh(60 * (z - 0.73))))
    found = perturbation_bound(model, layer, torch.ones(1, 2, 1, dtype=torch.float64), points=2)
    assert found.truth > 1.9
    assert found.estimate < 1e-3


def test_the_printed_bound_is_violated() -> None:
    """Behind the layer nothing: Lip(T) = 1, and on the alternating sequence α√(2𝓔) of Eq. 10 is too small (P3)."""
    layer = PDEDiffusion1d(1, alpha=0.4).double()
    model = nn.Sequential(Alternating(), layer, nn.Identity())
    found = perturbation_bound(model, layer, torch.ones(1, 200, 1, dtype=torch.float64))
    printed = layer.alpha.item() * (2 * found.roughness) ** 0.5
    assert found.lipschitz == pytest.approx(1, rel=1e-6)
    assert found.truth > 1.95 * printed
    assert found.roughness_estimate is not None
    assert 0.98 * found.roughness_estimate < found.truth <= found.roughness_estimate


@pytest.mark.parametrize("placement", ["P1", "P2", "P3", "P4", "P5", "P6", "P7"])
def test_the_truth_is_that_of_the_bypassed_layer(generator: torch.Generator, placement: str) -> None:
    model, x = transformer(placement).eval(), draw(generator, 2, 9, 2)
    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, PDEDiffusion1d))
    found = perturbation_bound(model, layer, x, MASK)
    with_it = model(x, MASK)
    model.set_submodule(name, Without())
    assert found.truth == pytest.approx((with_it - model(x, MASK)).norm().item(), rel=1e-8)
    assert 0 < found.truth <= found.estimate


def test_an_insertion_into_a_baseline_is_the_placement(generator: torch.Generator) -> None:
    x, layer = draw(generator, 2, 9, 2), PDEDiffusion1d(6).double()
    baseline, model = transformer(None), transformer("P1")
    model.load_state_dict({**baseline.state_dict(), **model.state_dict(), **baseline.state_dict()})
    model.after_embedding.load_state_dict(layer.state_dict())
    found = perturbation_bound(baseline, baseline.after_embedding, x, mask=MASK, diffusion=layer)
    expected = perturbation_bound(model, model.after_embedding, x, mask=MASK)
    for name in ("truth", "lipschitz", "step", "step_bound", "roughness", "size"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-8), name


def test_padding_does_not_matter(generator: torch.Generator) -> None:
    model, x = transformer("P2"), draw(generator, 1, 9, 2)
    layer = model.blocks[0].after_mlp
    alone = perturbation_bound(model, layer, x[:, :5], tol=1e-9)
    padded = perturbation_bound(model, layer, x.index_fill(1, torch.arange(5, 9), torch.nan), MASK[1:], tol=1e-9)
    for name in ("truth", "lipschitz", "step", "step_bound", "roughness", "size"):
        assert getattr(padded, name) == pytest.approx(getattr(alone, name), rel=1e-6), name


def test_two_towers_are_perturbed_together(generator: torch.Generator) -> None:
    model = transformer("P1", task="retrieve").eval()
    x, other = draw(generator, 2, 9, 2), draw(generator, 2, 7, 2)
    found = perturbation_bound(model, model.after_embedding, x, None, other)
    with_it = model(x, None, other)
    states = [model.embed(x), model.embed(other)]
    model.after_embedding = Without()
    moved = sum(float((s - model.embed(t)).square().sum()) for s, t in zip(states, (x, other), strict=True)) ** 0.5
    assert found.truth == pytest.approx((with_it - model(x, None, other)).norm().item(), rel=1e-8)
    assert found.step == pytest.approx(moved, rel=1e-8)
    assert found.truth <= found.estimate


@pytest.mark.parametrize(
    "options",
    [{"norm": True}, {"strides": (2,), "boundary": "replicate"}, {"boundary": "causal"}, {"update": HeatKernel(1.0)}],
    ids=["norm", "replicate", "causal", "heat"],
)
def test_a_layer_that_no_theorem_covers_has_no_bound_by_roughness(
    generator: torch.Generator, options: dict[str, Any]
) -> None:
    layer = PDEDiffusion1d(2, **options).double()
    found = perturbation_bound(nn.Sequential(layer, nn.Tanh()), layer, draw(generator, 2, 6, 2))
    assert found.step_bound is None
    assert found.roughness_estimate is None
    assert found.truth <= found.estimate


def test_the_model_is_left_as_it_was(generator: torch.Generator) -> None:
    model, x = transformer("P3", dropout=0.5), draw(generator, 2, 9, 2)
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    perturbation_bound(model, model.blocks[0].after_block, x, MASK)
    with pytest.raises(ValueError, match="x must be"):
        perturbation_bound(model, model.blocks[0].after_block, x[0], MASK)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(random, torch.get_rng_state())


def test_sequences_of_length_zero_are_not_moved() -> None:
    model = transformer("P1")
    found = perturbation_bound(model, model.after_embedding, torch.zeros(2, 0, 2, dtype=torch.float64))
    assert (found.truth, found.lipschitz, found.roughness_estimate) == (0.0, 0.0, 0.0)


@pytest.mark.usefixtures("no_typecheck")
def test_it_says_what_it_needs(generator: torch.Generator) -> None:
    model, x = transformer("P1"), draw(generator, 2, 9, 2)
    with pytest.raises(ValueError, match="diffusion must be given where site is not a diffusion layer"):
        perturbation_bound(model, model.blocks[0], x)
    with pytest.raises(ValueError, match="site must be a module of the model that these inputs reach"):
        perturbation_bound(model, PDEDiffusion1d(6), x)
    with pytest.raises(ValueError, match="points must be at least 1"):
        perturbation_bound(model, model.after_embedding, x, points=0)
    with pytest.raises(ValueError, match="the state that inputs give at site must be finite; 108 of its 108 entries"):
        perturbation_bound(model, model.after_embedding, x / 0)
    layer = PDEDiffusion1d(6).double()
    pair = nn.Bilinear(2, 2, 6).double()
    with pytest.raises(TypeError, match=r"must be called as module\(x, mask\)"):
        perturbation_bound(Named(pair), pair, x, diffusion=layer)


class Named(nn.Module):
    """Calls its part by keywords of other names."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(input1=x, input2=x)
