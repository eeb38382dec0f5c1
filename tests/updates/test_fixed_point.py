"""The fixed point of a step: the limit of its iteration, and the gradient of that limit."""

import math

import pytest
import torch
from dense_updates import DOUBLE
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

from diffusion_mp.errors import ConvergenceError
from diffusion_mp.models import CertifiedDIFFormer
from diffusion_mp.updates import fixed_point
from diffusion_mp.updates.fixed_point import iterate
from helpers import agree


class Averages(torch.nn.Module):
    """z_i ← ReLU((h_i + μ Σ_j a_ij z_j) / (1 + μ d_i)) on a random graph: the larger μ, the slower."""

    def __init__(self, num_nodes=40, mu=20.0):
        super().__init__()
        generator = torch.Generator().manual_seed(num_nodes)
        a = (
            (torch.rand(num_nodes, num_nodes, generator=generator) < 6 / num_nodes)
            .double()
            .triu(1)
        )
        self.a = a + a.T
        self.mu = torch.nn.Parameter(torch.tensor(mu).double())
        self.h = torch.nn.Parameter(
            torch.randn(num_nodes, 3, generator=generator).double()
        )
        self.steps = 0

    def forward(self, z):
        self.steps += 1
        return self.average(z, self.h, self.mu).relu()

    def average(self, z, h, mu):
        return (h + mu * (self.a @ z)) / (1 + mu * self.a.sum(1, keepdim=True))


def test_values_and_gradients_are_those_of_ten_thousand_steps():
    step = Averages()
    unrolled = step.h
    for _ in range(10_000):
        unrolled = step(unrolled)
    limit = fixed_point(step, step.h)
    agree(limit, unrolled, [step.h, step.mu], (1e-10, 1e-10), (1e-9, 1e-10))


def test_memory_of_the_backward_pass_does_not_grow_with_the_steps():
    def saved(mu):
        step = Averages(mu=mu)
        sizes = []
        with saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            fixed_point(step, step.h).sum().backward()
        return step.steps, sum(sizes)

    (short, little), (many, as_little) = saved(0.1), saved(1000.0)
    assert many > 3 * short
    assert as_little == little


def test_acceleration_takes_a_tenth_of_the_steps():
    step = Averages(200)
    count = []
    for memory in (0, 10):
        step.steps = 0
        iterate(step, step.h, tol=1e-10, max_iter=100_000, memory=memory)
        count.append(step.steps)
    assert count[1] < 0.1 * count[0]


def test_a_worse_residual_sends_it_back_to_the_plain_iteration():
    """A step with kinks jumps between branches where it is mixed; the answer is that of the plain iteration."""
    start = torch.linspace(-3, 3, 50, dtype=DOUBLE)

    def kinked(z):
        return torch.where(
            z.abs() < 0.5, 0.9 * z, 0.45 * z.sign() + 0.1 * (3 * z).sin()
        )

    for step in (torch.cos, kinked):
        plain, mixed = (
            iterate(step, start, tol=1e-13, max_iter=100_000, memory=memory)
            for memory in (0, 10)
        )
        assert_close(mixed, plain, atol=1e-10, rtol=0)


@pytest.mark.parametrize("memory", [1, 10])
@pytest.mark.parametrize("beyond", [1.0, math.nan])
def test_a_mixed_state_that_is_worse_or_nowhere_defined_is_dropped(memory, beyond):
    """z ← z − ½ arctan(z − 1) always contracts, and its secants from afar lead ever further away."""

    def step(z):
        return torch.where(z > 0, 1.0, beyond) * (z - 0.5 * (z - 1).atan())

    limit = iterate(
        step,
        torch.full((1,), 10.0, dtype=DOUBLE),
        tol=1e-12,
        max_iter=100,
        memory=memory,
    )
    assert limit.item() == pytest.approx(1.0, abs=1e-10)


def test_on_a_sphere_the_energy_is_asked_without_attention_too():
    """The first node is sent away from the second and comes back; near the far side, acceleration stops at the pole."""
    model = CertifiedDIFFormer(
        2, 2, 2, None, penalty=None, constraint="sphere", mu=1.0, beta=1.0
    ).double()
    model.encoder = torch.nn.Identity()
    x = torch.tensor([[-0.3, 0.015], [3.0, 0.0]], dtype=DOUBLE)
    before, after = model.energies(x, torch.tensor([[0, 1], [1, 0]]))
    assert after < before - 1


def test_single_precision_empty_states_and_zeros():
    step = Averages().float()
    step.a = step.a.float()
    exact = fixed_point(Averages(), Averages().h)
    assert_close(fixed_point(step, step.h), exact.float(), rtol=1e-3, atol=1e-4)
    assert fixed_point(lambda z: 0.5 * z, torch.zeros(0, 2, 3)).shape == (0, 2, 3)
    assert torch.equal(fixed_point(lambda z: 0.5 * z, torch.zeros(4)), torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_and_autocast_iterate_in_single(dtype, autocast):
    """Half precision has no fixed point to six digits. The acceleration and the backward pass need them all, too."""
    step = Averages(mu=200.0).float()
    step.a = step.a.float()

    def solved(x0):
        step.steps = 0
        limit = fixed_point(step, x0)
        return limit, torch.autograd.grad(limit.float().sum(), step.h)[0]

    limit, slope = solved(torch.zeros(40, 3))
    count = step.steps
    with torch.autocast("cpu", dtype, enabled=autocast):
        got, gradient = solved(
            torch.zeros(40, 3, dtype=torch.float32 if autocast else dtype)
        )
        assert step.steps == count
        with torch.no_grad():
            unrecorded = fixed_point(step, torch.zeros(40, 3, dtype=dtype))
    assert torch.equal(got, limit if autocast else limit.to(dtype))
    assert torch.equal(unrecorded, limit.to(dtype))
    assert_close(gradient, slope, rtol=1e-4, atol=1e-5)


def test_the_result_is_an_image_as_exact_as_is_asked_for():
    limit = fixed_point(lambda z: 0.5 * z + 1, torch.zeros(1), tol=0.1, memory=0)
    assert (limit - 2).item() == -0.125
    h = torch.ones(2, requires_grad=True)
    # A step that does not depend on the state.
    fixed_point(lambda z: 2 * h, torch.zeros(2)).sum().backward()
    assert h.grad.tolist() == [2.0, 2.0]


RUNAWAYS = {
    "reached in max_iter=7": lambda: fixed_point(
        lambda z: z + 1, torch.zeros(3), max_iter=7
    ),
    "moved the state by nan": lambda: fixed_point(
        lambda z: z * math.nan, torch.ones(3)
    ),
    # Its squares overflow, which is no limit.
    "was not reached": lambda: fixed_point(
        lambda z: z * z + 2, torch.zeros(3), memory=0
    ),
    "point was not reached": lambda: fixed_point(lambda z: z * z + 2, torch.zeros(3)),
}


@pytest.mark.parametrize("message", RUNAWAYS)
def test_no_limit_is_an_error_that_says_how_far_it_came(message):
    with pytest.raises(ConvergenceError, match=message):
        RUNAWAYS[message]()


def test_a_large_limit_is_no_runaway():
    limit = fixed_point(lambda z: 0.5 * z + 1e30, torch.zeros(3))
    assert_close(limit, torch.full((3,), 2e30))


def test_a_gradient_that_takes_too_many_steps_is_an_error():
    step = Averages(mu=1000.0)
    limit = fixed_point(step, fixed_point(step, step.h).detach(), max_iter=2)
    with pytest.raises(
        ConvergenceError, match="the gradient of the fixed point was not reached"
    ):
        limit.square().sum().backward()
