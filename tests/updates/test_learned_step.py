"""A step size that is learned, and steps that are told the state before."""

import pytest
import torch
from dense_updates import DOUBLE
from torch import nn
from torch.testing import assert_close

from diffusion_mp import (
    AdjacencyDiffusivity,
    DIFFormer,
    DIFFormerConv,
    DiffusionConv,
    ExplicitEuler,
    Graph,
    HeatKernel,
    MomentumStep,
    SimpleDiffusivity,
)
from diffusion_mp.diffusivities import Positive
from diffusion_mp.testing import random_problem
from helpers import agree, close, randn, refuses

EDGES = torch.tensor(
    [
        [0, 1, 2, 3, 5, 1],
        [1, 0, 3, 2, 4, 2],
    ]
)


def positive(number):
    tau = Positive(number).double()
    tau.reset_parameters()  # in double from the start
    return tau


TAU = torch.tensor(0.3, dtype=DOUBLE)


@pytest.mark.parametrize("form", ["conservative", "residual"])
@pytest.mark.parametrize("tau", [nn.Parameter(TAU), TAU, positive(0.3)], ids=type)
def test_a_learned_step_is_the_step_of_that_size_and_has_its_gradient(form, tau):
    coupling = random_problem(9, form).coupling
    inputs = [randn(9, 2, 3, seed=seed).requires_grad_() for seed in range(3)]

    def loss(size):
        x, values, source = inputs
        step = ExplicitEuler(size, form, beta=0.7, leak=0.2)
        return step(x, coupling, values, source).square().sum()

    agree(loss(tau), loss(0.3), inputs, (1e-10, 1e-12))
    if tau is TAU:
        return
    raw = tau.raw if isinstance(tau, Positive) else tau
    chain = raw.sigmoid() if isinstance(tau, Positive) else 1.0
    (gradient,) = torch.autograd.grad(loss(tau), raw)
    by_tau = (loss(0.3 + 1e-5) - loss(0.3 - 1e-5)) / 2e-5
    assert_close(gradient, by_tau * chain, rtol=1e-7, atol=1e-7)


def test_it_is_a_parameter_or_a_buffer_and_named():
    tau = nn.Parameter(torch.tensor(0.25))
    conv = DIFFormerConv(4, 4, tau=tau, transform=False, bias=False)
    assert conv.state_dict()["update.tau"].item() == 0.25
    assert "tau=learned" in repr(conv)
    assert "tau=" not in repr(ExplicitEuler(Positive(0.5)).extra_repr())
    assert conv.half()(randn(5, 4).half()).dtype == torch.float16
    assert dict(ExplicitEuler(torch.tensor(0.5)).named_buffers()).keys() == {"tau"}


def test_a_layer_of_many_steps_tells_the_state_before():
    x = randn(6, 4)
    graph = Graph(6, EDGES).to_undirected()
    adjacency = AdjacencyDiffusivity("sum")
    options = {"transform": False, "bias": False}
    cases = (
        (MomentumStep(0.1, 0.6, steps=1), 7),
        (MomentumStep(0.1, 0.6, steps=7), 1),
        (ExplicitEuler(0.1), 7),
    )
    many, once, still = (
        DiffusionConv(4, 4, adjacency, step, steps=n, **options) for step, n in cases
    )
    assert_close(many(x, graph), once(x, graph), rtol=1e-12, atol=1e-13)
    assert (many(x, graph) - still(x, graph)).abs().max() > 0.01


def test_the_layers_of_a_model_tell_the_state_before():
    torch.manual_seed(0)
    update = MomentumStep(0.2, 0.5, steps=1, form="residual")
    model = DIFFormer(4, 6, 3, 5, layer_norm=False, update=update).double()
    x = randn(6, 4)
    graph = Graph(6, EDGES)
    state = previous = model.encoder(x).relu()
    for conv in model.convs:
        s = conv.diffusivity(state, graph).to_dense()[0]
        state, previous = (
            state - 0.2 * (state - s @ state) + 0.5 * (state - previous),
            state,
        )
    close(model(x, graph), model.decoder(state), "rearranged")


X = randn(6, 4)
MOMENTUM = DiffusionConv(
    4,
    4,
    SimpleDiffusivity(),
    MomentumStep(0.1, 0.5, steps=1),
    transform=False,
    bias=False,
)
EXPLICIT = DiffusionConv(4, 4, SimpleDiffusivity()).double()


def test_the_state_before_moves_the_state():
    assert_close(MOMENTUM(X, previous=X - 1), MOMENTUM(X) + 0.5)


test_the_state_before_and_options_beside_an_update_are_refused = refuses(
    (
        lambda: EXPLICIT(X, previous=X),
        ValueError,
        "previous is for updates of two steps",
    ),
    (lambda: MOMENTUM(X, previous=X[:, :3]), ValueError, "previous"),
    (lambda: MOMENTUM(X, previous=X[:4]), ValueError, "previous"),
    (
        lambda: MomentumStep(0.1, 0.5)(X, MOMENTUM.diffusivity(X), previous=X),
        ValueError,
        "previous .* steps=10",
    ),
    (
        lambda: DIFFormer(4, 6, 3, update=HeatKernel(1.0), tau=0.1),
        ValueError,
        "tau, beta",
    ),
    (
        lambda: DIFFormer(4, 6, 3, update=HeatKernel(1.0), source=True),
        ValueError,
        "source=True",
    ),
    (lambda: DIFFormer(4, 6, 3, update=0.5), TypeError, "update"),
)


def test_every_layer_of_difformer_has_a_copy_of_its_update():
    model = DIFFormer(4, 6, 3, 2, tau=nn.Parameter(torch.tensor(0.5)), graph=None)
    first, second = (conv.update.tau for conv in model.convs)
    assert first is not second
    with torch.no_grad():
        first.fill_(17.0)
    model.reset_parameters()
    assert (first.item(), second.item()) == (0.5, 0.5)
    model(X.float()).sum().backward()
    assert first.grad is not None
