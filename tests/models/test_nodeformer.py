"""NodeFormer against its equations: model and auxiliary loss; and a run that repeats."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, elu, layer_norm

from diffusion_mp import NodeFormer, NodeFormerConv, auxiliary_loss
from helpers import agree, built, close, randn

SLIDES = {
    "relational_bias": "sum",
    "logits": "dot",
    "num_samples": 10,
    "jump": "cat",
    "relative_edge_loss": False,
}


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return randn(13, 4), torch.randint(13, (2, 52), generator=generator)


def small(num_layers: int, **options) -> NodeFormer:
    """The model of the slides."""
    options = {"heads": 2, "hops": 2, "tau": 0.5, **SLIDES, **options}
    return NodeFormer(4, 6, 3, num_layers, **options).double()


def noisy(num_layers: int = 2, seed: int = 0, **options) -> NodeFormer:
    """A model in training, which draws noise."""
    options = {"heads": 2, "num_samples": 10, **options}
    return built(lambda: NodeFormer(4, 6, 3, num_layers, **options), seed).double()


def attention(conv: NodeFormerConv, x: Tensor) -> Tensor:
    diffusivity = conv.diffusivity.attention
    w = diffusivity.directions

    def phi(layer: torch.nn.Linear) -> Tensor:
        a = layer(x).view(len(x), conv.heads, -1) / diffusivity.tau**0.5
        return torch.exp(a @ w.t() - a.square().sum(2, keepdim=True) / 2)

    scores = torch.einsum("ihr,jhr->hij", phi(diffusivity.query), phi(diffusivity.key))
    return scores / scores.sum(2, keepdim=True)


@pytest.mark.parametrize(
    ("num_layers", "step", "expected_step"),
    [(2, None, 1), (5, None, 0.4), (2, 0.3, 0.3)],
)
def test_the_model_is_its_equation(num_layers, step, expected_step):
    x, edge_index = problem()
    model = small(num_layers, step=step).eval()
    state = elu(layer_norm(model.encoder(x), (6,)))
    states = [state]
    for conv in model.convs:
        state = layer_norm(expected_step * conv(state, edge_index) + state, (6,))
        states.append(state)
    close(model(x, edge_index), model.decoder(torch.cat(states, 1)), "layer")


def test_the_auxiliary_loss_is_the_mean_over_layers_of_the_double_sum():
    """λ L_e = −λ/(N L) Σ_l Σ_(u,v) (1/d_u) log π_uv (slides; ERRATA N5), heads averaged, π without noise."""
    x, edge_index = problem()
    model = small(2, edge_regularization=0.7).train()
    inputs = []
    for conv in model.convs:
        conv.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(x, edge_index)
    got = auxiliary_loss(model)
    source, target = edge_index
    degree = torch.bincount(target, minlength=len(x))
    expected = 0.0
    for conv, z in zip(model.convs, inputs, strict=True):
        log_pi = attention(conv, z).log()[:, target, source].mean(0)
        expected = expected - 0.7 * (log_pi / degree[target]).sum() / (2 * len(x))
    parameters = [conv.diffusivity.attention.key.weight for conv in model.convs]
    agree(got, expected, parameters, (1e-10, 0), (1e-9, 1e-11))
    assert auxiliary_loss(model.eval()) == got  # until the next forward pass,
    model(x, edge_index)
    assert auxiliary_loss(model) == 0  # which records nothing in evaluation
    model.train()(x)
    assert auxiliary_loss(model) == 0  # nor without a graph


def train(seed: int) -> list[Tensor]:
    """The losses of four steps."""
    x, edge_index = problem()
    generator = torch.Generator().manual_seed(seed)
    model = noisy(generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = torch.get_rng_state()
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        logits = model(x, edge_index)
        loss = cross_entropy(logits, torch.arange(13) % 3) + auxiliary_loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert torch.equal(torch.get_rng_state(), before)
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def test_a_seed_repeats_a_run_bit_for_bit_and_another_does_not():
    first = train(1)
    assert all(torch.equal(a, b) for a, b in zip(first, train(1), strict=True))
    assert not torch.equal(first[0], train(2)[0])


def test_threads_that_share_a_model_train_as_one_would():
    """Four threads have, in some order, the losses that one has; with one layer, for their order may change between."""
    x, edge_index = problem()
    shared = noisy(1)
    alone = copy.deepcopy(shared)

    def step(model: NodeFormer) -> tuple[float, float]:
        loss = model(x, edge_index).square().sum() + auxiliary_loss(model)
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        return float(loss.detach()), float(sum(slope.sum() for slope in slopes))

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: step(shared), range(40)))
    assert len(set(got)) == 40
    assert sorted(got) == sorted(step(alone) for _ in range(40))
    for name, buffer in alone.named_buffers():
        assert torch.equal(buffer, shared.get_buffer(name))


def test_a_model_in_the_middle_of_training_is_copied_and_saved():
    x, edge_index = problem()
    model = noisy()
    first = model(x, edge_index)
    twin = copy.deepcopy(model)
    other = noisy(seed=5)
    other.load_state_dict(model.state_dict())
    assert auxiliary_loss(twin) == 0
    second = model(x, edge_index)
    assert not torch.equal(second, first)
    assert torch.equal(twin(x, edge_index), second)
    assert torch.equal(other(x, edge_index), second)
    assert torch.equal(model.eval()(x, edge_index), model(x, edge_index))
