"""The three worked examples of CONTRIBUTING run as they stand, are short, and obey the laws."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from diffusion_mp import DiffusionConv
from diffusion_mp.errors import BackendError
from pages.blocks import blocks

CONTRIBUTING = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
BLOCKS = blocks(CONTRIBUTING)
PTR = torch.tensor([0, 3, 3, 4, 9])


@pytest.fixture(scope="module")
def scope() -> dict[str, Any]:
    """What the examples define; the coupling and the diffusivity are checked by their last lines."""
    names: dict[str, Any] = {"__name__": "contributing"}
    for block in BLOCKS:
        exec(compile(block, str(CONTRIBUTING), "exec"), names)
    return names


def test_each_example_is_short():
    assert len(BLOCKS) == 5
    assert all(
        len([line for line in block.splitlines() if line.strip()]) <= 25
        for block in BLOCKS
    )


def test_the_kernel_is_its_reference(scope):
    graph_sum = scope["graph_sum"]
    x = torch.rand(9, 2, 3, dtype=torch.float64, requires_grad=True)
    expected = scope["formula"](x, PTR)
    for backend in ("auto", "cpu", "reference", "matrix"):
        torch.testing.assert_close(graph_sum(x, PTR, backend=backend), expected)
        assert gradcheck(lambda x: graph_sum(x, PTR, backend=backend), x)  # noqa: B023
        assert gradgradcheck(lambda x: graph_sum(x, PTR, backend=backend), x)  # noqa: B023
    torch.library.opcheck(torch.ops.mine.graph_sum.default, (x, PTR, "auto"))
    assert graph_sum(x.bfloat16(), PTR).dtype == torch.bfloat16
    with pytest.raises(BackendError, match="triton"):
        graph_sum(x, PTR, backend="triton")


def test_the_coupling_and_the_diffusivity_are_what_they_say(
    scope,
):
    a, b = torch.rand(2, 9, 2, dtype=torch.float64)
    coupling = scope["GainCoupling"](a, b, PTR)
    graph = torch.repeat_interleave(torch.arange(4), PTR.diff())
    same = graph[:, None] == graph[None, :]
    assert_close(coupling.to_dense(), torch.einsum("ih,jh->hij", a, b) * same)
    conv = DiffusionConv(6, 4, scope["GainDiffusivity"](6))
    batch = torch.tensor([0, 0, 0, 1, 1])
    x = torch.rand(5, 6)
    whole = conv(x, batch=batch)
    whole.sum().backward()
    assert all(parameter.grad is not None for parameter in conv.parameters())
    assert_close(whole[:3], conv(x[:3]))
