"""Couplings, diffusivities and terms of an energy beside numbers, arrays and tensors, on either side."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_mp import Coupling, Diffusivity, SimpleDiffusivity
from diffusion_mp.couplings import NeumannCoupling, ScaledCoupling, UniformCoupling
from diffusion_mp.diffusivities import ScaledDiffusivity
from diffusion_mp.energies import EnergyTerm, ScaledTerm, SourceTerm

# Our own sentences are tested here, not the annotations.
pytestmark = pytest.mark.usefixtures("no_typecheck")

OPERANDS: dict[str, Callable[[], Any]] = {
    "coupling": lambda: UniformCoupling(6),
    "diffusivity": SimpleDiffusivity,
    "term": lambda: SourceTerm(torch.ones(6, 4)),
}
NUMBERS = {
    "int": 2,
    "float": 2.0,
    "float64": np.float64(2),
    "float32": np.float32(2),
    "float16": np.float16(2),
    "int64": np.int64(2),
    "array": np.array(2.0),
    "array of float32": np.array(2, dtype=np.float32),
    "tensor": torch.tensor(2.0),
}
REFUSED = {
    "array": np.ones(3),
    "matrix": np.ones((6, 6)),
    "objects": np.array([None, None]),
    "tensor": torch.ones(6, 6),
    "flag": True,
    "flag of NumPy": np.bool_(True),
    "complex": np.complex64(2),
    "string": "2",
    "infinite": np.float32("inf"),
    "NaN": np.array(np.nan),
}


def factor(scaled: Any) -> Any:
    return scaled.weight if isinstance(scaled, ScaledTerm) else scaled.scale


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", OPERANDS)
def test_numbers_of_any_kind_scale(name, number):
    for scaled in (
        NUMBERS[number] * OPERANDS[name](),
        OPERANDS[name]() * NUMBERS[number],
    ):
        assert isinstance(scaled, (ScaledCoupling, ScaledDiffusivity, ScaledTerm))
        assert type(factor(scaled)) in (int, float, torch.Tensor)
        assert factor(scaled) == 2


@pytest.mark.parametrize("value", REFUSED)
@pytest.mark.parametrize("name", OPERANDS)
def test_what_is_no_number_is_refused_on_either_side(name, value):
    """An array would make an array of couplings, each with another factor."""
    for product in (
        lambda: OPERANDS[name]() * REFUSED[value],
        lambda: REFUSED[value] * OPERANDS[name](),
    ):
        with pytest.raises((TypeError, ValueError), match=r"(scale|weight) must be"):
            product()


@pytest.mark.parametrize("other", [np.ones(3), torch.ones(6, 6), 1.0], ids=str)
@pytest.mark.parametrize("name", ["coupling", "diffusivity"])
def test_only_what_is_alike_adds(name, other):
    subject = OPERANDS[name]()
    results = [lambda: subject + other, lambda: other + subject]
    if name == "coupling":
        results += [lambda: subject - other, lambda: other - subject]
    for result in results:
        with pytest.raises(TypeError):
            result()


@pytest.mark.parametrize(
    "array", [np.ones(6), np.ones((6, 6)), np.float64(2), torch.ones(6, 6)], ids=str
)
def test_there_are_no_products_from_the_left(array):
    with pytest.raises(TypeError):
        array @ UniformCoupling(6)


@pytest.mark.parametrize(
    "other", [np.ones(3), np.float32(1), torch.ones(3), 1.0, None], ids=str
)
@pytest.mark.parametrize("name", OPERANDS)
def test_comparisons_ask_for_identity(name, other):
    subject: Coupling | Diffusivity | EnergyTerm = OPERANDS[name]()
    assert (subject == other) is (other == subject) is False
    assert (subject != other) is (other != subject) is True
    with pytest.raises(TypeError, match="not supported between"):
        other < subject  # noqa: B015


def test_a_multiple_knows_the_eigenvectors() -> None:
    alpha = torch.full((1, 1), 0.2, dtype=torch.float64)
    coupling = NeumannCoupling(9, alpha, nonnegative=True)
    v = torch.randn(9, 1, 2, dtype=torch.float64)
    known = (0.3 * coupling).laplacian_function(lambda rate: 1 / (1 + rate), v)
    dense = coupling.to_dense()[0]
    laplacian = torch.diag(dense.sum(1)) - dense
    system = torch.eye(9, dtype=torch.float64) + 0.3 * laplacian
    torch.testing.assert_close(known.squeeze(1), torch.linalg.solve(system, v[:, 0]))
