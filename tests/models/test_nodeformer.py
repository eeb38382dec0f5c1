"""NodeFormer against its equations: model and auxiliary loss; and a run that repeats."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, elu, layer_norm, linear

from diffusion_mp import NodeFormer, NodeFormerConv, auxiliary_loss
from diffusion_mp.testing.laws import seeded
from helpers import agree, built, close

DOUBLE = torch.float64
SLIDES = {
    "relational_bias": "sum",
    "logits": "dot",
    "num_samples": 10,
    "jump": "cat",
    "relative_edge_loss": False,
}


def problem(num_nodes: int = 13, channels: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_nodes, channels, generator=generator, dtype=DOUBLE)
    return x, torch.randint(num_nodes, (2, 4 * num_nodes), generator=generator)


def attention(conv: NodeFormerConv, x: Tensor) -> Tensor:
    diffusivity = conv.diffusivity.attention
    w = diffusivity.directions

    def phi(layer: torch.nn.Linear) -> Tensor:
        a = layer(x).view(len(x), conv.heads, -1) / diffusivity.tau**0.5
        return torch.exp(a @ w.t() - a.square().sum(2, keepdim=True) / 2)

    scores = torch.einsum("ihr,jhr->hij", phi(diffusivity.query), phi(diffusivity.key))
    return scores / scores.sum(2, keepdim=True)


@pytest.mark.parametrize(("num_layers", "step"), [(2, None), (5, None), (2, 0.3)])
def test_the_model_is_its_equation(num_layers, step):
    x, edge_index = problem()
    model = (
        NodeFormer(4, 6, 3, num_layers, heads=2, hops=2, tau=0.5, step=step, **SLIDES)
        .double()
        .eval()
    )
    states = [elu(layer_norm(model.encoder(x), (6,)))]
    step = step or {2: 1, 5: 0.4}[num_layers]
    for conv in model.convs:
        states.append(
            layer_norm(step * conv(states[-1], edge_index) + states[-1], (6,))
        )
    expected = linear(torch.cat(states, 1), model.decoder.weight, model.decoder.bias)
    close(model(x, edge_index), expected, "layer")


def test_the_auxiliary_loss_is_the_mean_over_layers_of_the_double_sum():
    """λ L_e = −λ/(N L) Σ_l Σ_(u,v) (1/d_u) log π_uv (slides; ERRATA N5), heads averaged, π without noise."""
    x, edge_index = problem()
    model = (
        NodeFormer(
            4, 6, 3, 2, heads=2, hops=2, tau=0.5, edge_regularization=0.7, **SLIDES
        )
        .double()
        .train()
    )
    inputs = []
    for conv in model.convs:
        conv.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(x, edge_index)
    got = auxiliary_loss(model)
    expected = 0.0
    degree = torch.bincount(edge_index[1], minlength=len(x))
    for conv, z in zip(model.convs, list(inputs), strict=True):
        pi = attention(conv, z)
        for source, target in edge_index.t().tolist():
            expected = expected - pi[:, target, source].log().mean() / degree[target]
    expected = 0.7 * expected / (2 * len(x))
    parameters = [conv.diffusivity.attention.key.weight for conv in model.convs]
    agree(got, expected, parameters, (1e-10, 0), (1e-9, 1e-11))
    assert auxiliary_loss(model.eval()) == got  # until the next forward pass,
    model(x, edge_index)
    assert auxiliary_loss(model) == 0  # which records nothing in evaluation
    model.train()(x)
    assert auxiliary_loss(model) == 0  # nor without a graph


def train(seed: int, steps: int = 4) -> list[Tensor]:
    x, edge_index = problem()
    y = torch.arange(len(x)) % 3
    with seeded(0):
        model = NodeFormer(
            4,
            6,
            3,
            heads=2,
            num_samples=10,
            generator=torch.Generator().manual_seed(seed),
        ).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = torch.get_rng_state()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x, edge_index), y) + auxiliary_loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert torch.equal(torch.get_rng_state(), before)
    return losses + [parameter.detach() for parameter in model.parameters()]


def test_a_seed_repeats_a_run_bit_for_bit_and_another_does_not():
    first = train(1)
    again = train(1)
    other = train(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_threads_that_share_a_model_train_as_one_would():
    """Four threads have, in some order, the losses that one has; with one layer, for their order may change between."""
    x, edge_index = problem()
    shared = NodeFormer(4, 6, 3, 1, heads=2, num_samples=10).double().train()
    alone = copy.deepcopy(shared)
    calls = 40

    def step(model: NodeFormer) -> tuple[float, float]:
        logits = model(x, edge_index)
        edges = auxiliary_loss(model)
        gradients = torch.autograd.grad(
            logits.square().sum() + edges, list(model.parameters())
        )
        return float(logits.detach().square().sum()), float(
            torch.cat([g.flatten() for g in gradients]).sum()
        )

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: step(shared), range(calls)))
    expected = [step(alone) for _ in range(calls)]
    assert len(set(got)) == calls
    assert sorted(got) == sorted(expected)
    for name, buffer in alone.named_buffers():
        assert torch.equal(buffer, shared.get_buffer(name))


def test_a_model_in_the_middle_of_training_is_copied_and_saved():
    x, edge_index = problem()
    model = NodeFormer(4, 6, 3, num_samples=10).double().train()
    first = model(x, edge_index)
    twin = copy.deepcopy(model)
    other = built(lambda: NodeFormer(4, 6, 3, num_samples=10), 5).double().train()
    other.load_state_dict(model.state_dict())
    assert auxiliary_loss(twin) == 0
    second = model(x, edge_index)
    assert not torch.equal(second, first)
    assert torch.equal(twin(x, edge_index), second)
    assert torch.equal(other(x, edge_index), second)
    assert torch.equal(model.eval()(x, edge_index), model(x, edge_index))
