"""Capture and export, in processes of their own, and second derivatives."""

import pytest
import torch
from torch.autograd import gradgradcheck

from diffusion_mp.models import DIFFormer
from subrun import RUNS, run_tests


@pytest.mark.parametrize("select", RUNS)
@pytest.mark.parametrize("file", ["compile_cases.py", "export_cases.py"])
def test_programs_are_captured_and_exported(file: str, select: str) -> None:
    run_tests(file, select, typecheck=False)


EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 0, 4]])


@pytest.mark.parametrize("graph", ["sum", "mean", None])
@pytest.mark.parametrize("projection", [None, "separate"])
def test_difformer_s_is_twice_differentiable(
    graph: str | None, projection: str | None
) -> None:
    model = DIFFormer(4, 6, 3, graph=graph, projection=projection, heads=2).double()  # type: ignore[arg-type]
    x = torch.randn(
        5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    assert gradgradcheck(
        lambda x, *_: model(x, EDGES),
        (x, *model.parameters()),
        fast_mode=True,
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.exhaustive
def test_everything_public_has_the_types_and_shapes_that_it_says() -> None:
    run_tests("test_laws.py", "typechecked", typecheck=True)
