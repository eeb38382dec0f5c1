"""NodeFormer's attention and relational bias: the slides' formulas, limits, noise and walks."""

# ruff: noqa: F403, F405 (everything public)
import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.testing import assert_close

from diffusion_mp import *
from diffusion_mp.diagnostics import kernel_error
from diffusion_mp.diffusivities.kernelized_softmax import orthogonal_directions
from diffusion_mp.runtime.noise import gumbel
from diffusion_mp.testing.laws import seeded
from helpers import agree

DOUBLE = torch.float64


def build(channels=6, **options):
    with seeded(7):
        return KernelizedSoftmaxDiffusivity(
            channels, generator=torch.Generator().manual_seed(7), **options
        ).double()


def algorithm_1(module, x, g):
    """Lines 2 to 8 of Algorithm 1 (slides) written out for V = I, the Gumbel factor on the queries too (ERRATA N1)."""
    heads = module.heads
    tau = module.temperature
    w = module.directions
    g = x.new_zeros(len(x), heads, 1) if g is None else g
    q, k = (
        torch.exp(a @ w.t() - a.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(w))
        for a in (
            (x @ linear.weight.t()).view(len(x), heads, -1) / math.sqrt(tau)
            for linear in (module.query, module.key)
        )
    )
    dense = []
    for head in range(heads):
        samples = []
        for s in range(g.size(2)):
            factor = torch.exp(g[:, head, s] / module.tau)[:, None]
            q_s = factor * q[:, head]
            k_s = factor * k[:, head]
            samples.append((q_s @ k_s.t()) / (q_s @ k_s.sum(0))[:, None])
        dense.append(torch.stack(samples).mean(0))
    return torch.stack(dense)


@pytest.mark.parametrize("logits", ["dot", "scaled_dot"])
@pytest.mark.parametrize(("training", "samples"), [(True, 4), (True, 0), (False, 4)])
def test_the_coupling_is_the_slides_formula_in_values_and_gradients(
    logits, training, samples, generator
):
    options = {
        "heads": 2,
        "head_channels": 3,
        "num_features": 9,
        "tau": 0.5,
        "logits": logits,
    }
    module = build(num_samples=samples, **options).train(training)
    x = torch.randn(17, 6, generator=generator, dtype=DOUBLE, requires_grad=True)
    v = torch.randn(17, 2, 5, generator=generator, dtype=DOUBLE)
    noise = (
        gumbel(module.noise_state, x[:, :2, None], 4) if training and samples else None
    )
    coupling = module(x)
    expected = algorithm_1(module, x, noise)
    assert_close(coupling.to_dense(), expected, rtol=0, atol=1e-10)
    leaves = (x, module.query.weight, module.key.weight)
    agree(
        coupling @ v,
        torch.einsum("hij,jhd->ihd", expected, v),
        leaves,
        (0, 1e-10),
        (1e-10, 1e-10),
    )


def test_directions_are_orthogonal_in_blocks_and_gaussian_one_by_one(generator):
    w = orthogonal_directions(20_000 * 3, 3, generator).double().view(-1, 3, 3)
    gram = w @ w.transpose(1, 2)
    assert (gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))).abs().max() < 1e-5
    rows = w.reshape(-1, 3)
    assert rows.mean(0).abs().max() < 0.02
    assert ((rows.t() @ rows) / len(rows) - torch.eye(3)).abs().max() < 0.02
    assert abs(rows.norm(dim=1).pow(4).mean() - 15) < 0.4  # E‖w‖⁴ = d (d + 2)


@pytest.mark.parametrize(
    ("options", "norm"),
    [
        ({}, 0.5),
        ({"logits": "scaled_dot", "heads": 2}, 1.0),
        ({"normalize": "row", "tau": 2.0}, 5.0),
    ],
)
def test_the_error_to_the_exact_softmax_falls_like_one_over_the_root_of_m(
    options, norm, generator
):
    """Where the features resolve the kernel: a feature's relative variance is e^(‖q + k‖²/τ) − 1, moderate here."""
    x = torch.randn(60, 6, generator=generator, dtype=DOUBLE)
    x = norm * x / x.norm(dim=1, keepdim=True)
    errors = kernel_error(build(**options), x, draws=12)
    assert list(errors) == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    slope = np.polyfit(np.log(list(errors)), np.log(list(errors.values())), 1)[0]
    assert abs(slope + 0.5) < 0.1, (slope, errors)


def test_without_rows_there_is_no_error():
    assert kernel_error(build(), torch.zeros(0, 6, dtype=DOUBLE), [16]) == {16: 0.0}


def test_the_error_is_measured_at_the_stated_temperature(generator):
    """exact() is the softmax of q·k/τ (or q·k/(τ√d)); a factor in the temperature would leave an error at any m."""
    x = torch.randn(30, 6, generator=generator, dtype=DOUBLE) / 5
    for logits, tau in (("dot", 0.25), ("scaled_dot", 0.25 * math.sqrt(6))):
        module = build(logits=logits)
        assert module.temperature == pytest.approx(tau)
        q = x @ module.query.weight.t()
        k = x @ module.key.weight.t()
        assert_close(
            module.exact(x).to_dense()[0], torch.softmax(q @ k.t() / tau, dim=1)
        )
    module = build()
    assert kernel_error(module, x, [16, 4096], draws=5)[4096] < 0.05
    module.directions = orthogonal_directions(
        16, 6, torch.Generator().manual_seed(0)
    ).double()
    exact = module.exact(x).to_dense()
    estimate = module.eval()(x).to_dense()
    expected = ((estimate - exact).norm() / exact.norm()).item()
    seed = torch.Generator().manual_seed(0)
    one, two = (
        kernel_error(module, x, [16], draws=1, generator=seed)[16] for _ in range(2)
    )
    assert (one, (one + two) / 2) == pytest.approx(
        (expected, kernel_error(module, x, [16], draws=2)[16]), rel=1e-9
    )


@pytest.mark.exhaustive
def test_samples_concentrate_with_the_probabilities_of_the_softmax():
    """Theorem 2 of the slides, over 3 000 draws: 500 copies of six nodes with one query, each with its own noise."""
    module = KernelizedSoftmaxDiffusivity(
        2,
        head_channels=1,
        num_features=4096,
        tau=0.1,
        num_samples=1,
        generator=torch.Generator().manual_seed(1),
    )
    with torch.no_grad():
        module.query.weight.copy_(torch.tensor([[1.0, 0.0]]))
        module.key.weight.copy_(torch.tensor([[0.0, 1.0]]))
    # |q + k| ≤ 0.4: the relative error of a kernel value is 3 % and less, and τ times that shifts the logits.
    keys = torch.tensor([0.0, -0.1, -0.2, -0.4, -0.6, -0.8])
    first = torch.arange(500) * 6
    x = torch.stack([torch.full_like(keys, 0.4), keys], dim=1).repeat(500, 1)
    pairs = torch.stack(
        [first[:, None] + torch.arange(6), first[:, None].expand(-1, 6)]
    ).flatten(1)
    graph = Graph(3000, ptr=torch.arange(501) * 6)
    with torch.no_grad():
        rows = torch.cat([module(x, graph).at(pairs).view(-1, 6) for _ in range(6)])
    counts = torch.bincount(rows.argmax(dim=1), minlength=6)
    assert counts.sum() == 3_000
    expected = torch.softmax(0.4 * keys.double(), 0)
    assert chisquare(counts.numpy(), 3_000 * expected.numpy()).pvalue > 0.01
    # The test can tell: uniform draws would not pass.
    assert chisquare(counts.numpy()).pvalue < 1e-6
    assert float((rows.amax(1) > 0.9).float().mean()) > 0.7, (
        "nearly one-hot at this temperature"
    )


def test_features_change_on_request_only(generator):
    module = build()
    other = build()
    module.train()(torch.randn(20, 6, generator=generator, dtype=DOUBLE))
    assert torch.equal(module.directions, other.directions)
    for each in (module, other):
        each.redraw(torch.Generator().manual_seed(3))
    assert not torch.equal(module.directions, build().directions)
    assert torch.equal(module.directions, other.directions)
    assert torch.equal(module.noise_state, other.noise_state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "tau",
    [
        1.0,
        *(pytest.param(tau, marks=pytest.mark.exhaustive) for tau in (0.25, 0.1)),
        0.01,
    ],
)
def test_a_large_graph_stays_finite_at_any_temperature(tau, dtype, generator):
    module = KernelizedSoftmaxDiffusivity(
        8, tau=tau, num_samples=2, generator=generator
    ).to(dtype)
    x = (3 * torch.randn(100_000, 8, generator=generator)).to(dtype).requires_grad_()
    v = torch.randn(100_000, 1, 4, generator=generator).to(dtype)
    out = module(x) @ v
    assert out.dtype == dtype
    gradients = torch.autograd.grad(
        out.float().square().mean(), (x, module.query.weight, module.key.weight)
    )
    assert all(tensor.isfinite().all() for tensor in (out, *gradients))
    # It has not silently become the mean (ERRATA N4).
    assert (out.float() - v.float().mean(0)).abs().max() > 0.05


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", [1, 100, 300, 3000, 1e6, 1e9])
def test_rows_sum_to_one_at_any_norm(norm, training, backend, generator, monkeypatch):
    """By product, entries and transpose; beside a graph of other norms. The rows are not uniform (ERRATA N2, N4)."""
    monkeypatch.setenv("DIFFUSION_MP_BACKEND", f"linear_attention={backend}")
    x = torch.randn(40, 6, generator=generator)
    x = norm * x / x.norm(dim=1, keepdim=True)
    x[30:] *= torch.rand(10, 1, generator=generator)
    module = build(projection=None, num_samples=3).float().train(training)
    coupling = module(x, Graph(40, ptr=torch.tensor([0, 20, 20, 40])))
    one = torch.ones(40, 1, 1)
    pairs = torch.cartesian_prod(torch.arange(40), torch.arange(40)).T.contiguous()
    dense = coupling.to_dense()
    for rows in (
        (coupling @ one).squeeze(2),
        dense.sum(2).T,
        coupling.at(pairs).view(40, 40, 1).sum(0),
        coupling.log_at(pairs).exp().view(40, 40, 1).sum(0),
        (coupling.T @ torch.eye(40).unsqueeze(1)).sum(0).T,
    ):
        assert_close(rows, torch.ones(40, 1), rtol=0, atol=1e-5)
    assert norm < 300 or dense.amax(2).min() > 0.1  # uniform would be 0.05
