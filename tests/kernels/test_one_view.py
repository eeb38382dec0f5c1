"""Attention of a state to itself, where queries, keys and values are views of one tensor."""

import pytest
import torch

from diffusion_mp import SimpleDiffusivity
from diffusion_mp.kernels.linear_attention import blocked
from diffusion_mp.runtime.torch_private import one_view


class _Reversal(torch.autograd.Function):
    """A view whose gradient has the opposite sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


VIEWS = {
    "the same": lambda x: x,
    "detached": lambda x: x.detach(),
    "another leaf": lambda x: x.detach().requires_grad_(),
    "reversed": _Reversal.apply,
    "a part": lambda x: x[:, :6],
}


@pytest.mark.parametrize("name", VIEWS)
def test_gradients_of_views_are_the_gradients_of_copies(name: str) -> None:
    x = torch.randn(70, 6, dtype=torch.float64, requires_grad=True)
    coupling = SimpleDiffusivity(6)(x)
    view = VIEWS[name](x)
    grad = torch.randn(70, 6, dtype=torch.float64)
    inputs = [x, view] if name == "another leaf" else [x]
    found = torch.autograd.grad(coupling @ view, inputs, grad, retain_graph=True)
    expected = torch.autograd.grad(coupling @ view.clone(), inputs, grad)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_a_state_that_attends_to_itself_is_read_once(
    monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    read = []

    def stacks(ptr, rows, results, inputs):
        read.append(len(inputs))
        return original(ptr, rows, results, inputs)

    original = blocked.stacks
    monkeypatch.setattr(blocked, "stacks", stacks)
    x = torch.randn(100_000, 16, requires_grad=True)
    with torch.set_grad_enabled(training):
        SimpleDiffusivity(16)(x.relu()) @ x.relu()
        assert read.pop() == 3
        state = x.relu()
        SimpleDiffusivity(16)(state) @ state
    assert read.pop() == 1


def test_only_views_of_one_tensor_can_replace_each_other() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    column = x.unsqueeze(1)
    assert one_view(column, x.view(5, 1, 4))
    assert one_view(x, x)
    assert not one_view(x, x.detach())
    assert not one_view(column, x.detach().unsqueeze(1))
    assert not one_view(column, _Reversal.apply(x).unsqueeze(1))
    assert not one_view(column, x.clone().unsqueeze(1))
    assert not one_view(column, x.view(5, 4, 1))
    with torch.no_grad():
        assert one_view(x, x.detach())
