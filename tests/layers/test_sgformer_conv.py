"""SGFormerConv: the slides' equation, PyG's attention on one unpadded graph."""

import pytest
import torch
from torch import Tensor
from torch_geometric.nn.attention import SGFormerAttention

from diffusion_mp.layers import SGFormerConv
from diffusion_mp.testing import tolerance

C = 6
RTOL, ATOL = tolerance("parity", torch.float64)


@pytest.fixture(autouse=True)
def _double_and_own_randomness():
    """PyG's attention makes a tensor of ones of the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)


def state(num_nodes: int = 14, seed: int = 1) -> Tensor:
    return torch.randn(num_nodes, C, generator=torch.Generator().manual_seed(seed))


def twins(heads: int) -> tuple[SGFormerConv, SGFormerAttention, list[tuple[Tensor, Tensor]]]:
    ours = SGFormerConv(C, C, heads, beta=1.0)
    theirs = SGFormerAttention(C, heads, head_channels=C)
    layers = (ours.diffusivity.query, theirs.q), (ours.diffusivity.key, theirs.k), (ours.value, theirs.v)
    pairs = [(mine.weight, other.weight) for mine, other in layers]
    with torch.no_grad():
        for mine, other in pairs:
            other.copy_(mine)
    return ours, theirs, pairs


@pytest.mark.parametrize("normalize", ["row", "frobenius"])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_the_equation_of_the_slides(normalize: str, beta: float) -> None:
    conv = SGFormerConv(C, C, 2, beta=beta, normalize=normalize)
    x, initial = state(9).requires_grad_(), state(9, seed=2).requires_grad_()
    got = conv(x, source=initial) if beta < 1 else conv(x)
    maps = (conv.diffusivity.query, conv.diffusivity.key, conv.value)
    q, k, v = (torch.stack((x @ each.weight.T).chunk(2, dim=1)) for each in maps)
    dim = 2 if normalize == "row" else (0, 1, 2)
    q, k = (t / t.square().sum(dim, keepdim=True).sqrt() for t in (q, k))
    d = 1 + (q @ k.transpose(1, 2)).sum(2, keepdim=True) / 9
    mixed = beta * ((v + q @ (k.transpose(1, 2) @ v) / 9) / d).mean(0) + (1 - beta) * initial
    torch.testing.assert_close(got, mixed, rtol=RTOL, atol=ATOL)
    leaves = [x, *conv.parameters(), *([initial] if beta < 1 else [])]
    upstream = state(9, seed=3)
    gradients = [torch.autograd.grad((out * upstream).sum(), leaves) for out in (got, mixed)]
    torch.testing.assert_close(*gradients, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("heads", [1, 3])
def test_parity_with_pyg_on_one_graph(heads: int) -> None:
    ours, theirs, pairs = twins(heads)
    x = state()
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = ours(mine), theirs(other.unsqueeze(0)).squeeze(0)
    torch.testing.assert_close(got, expected, rtol=RTOL, atol=ATOL)
    got.square().sum().backward()
    expected.square().sum().backward()
    for a, b in [(mine, other), *pairs]:
        torch.testing.assert_close(a.grad, b.grad, rtol=RTOL, atol=ATOL)


def test_the_initial_state_is_x_by_default() -> None:
    conv, x = SGFormerConv(C, C, beta=0.4), state(5)
    torch.testing.assert_close(conv(x), conv(x, source=x), rtol=0, atol=0)
    out, coupling = conv(x, return_coupling=True)
    moved = (coupling @ conv.value(x).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(out, 0.4 * moved + 0.6 * x, rtol=RTOL, atol=ATOL)
