"""Which backend runs: by name, by environment, or the first that does not decline; never another one silently."""

import pytest

from diffusion_mp.errors import BackendError
from diffusion_mp.kernels.operation import VARIABLE, Implementation, choose, requested

TABLE = {
    "triton": Implementation(lambda n: "triton", lambda named, n: "n is odd" if n % 2 else None),
    "cpu": Implementation(lambda n: "cpu"),
}


@pytest.mark.parametrize(("backend", "n", "expected"), [("auto", 2, "triton"), ("auto", 3, "cpu"), ("cpu", 2, "cpu")])
def test_the_first_that_does_not_decline(backend, n, expected):
    assert choose("an operation", backend, TABLE, n)(n) == expected


def test_a_named_backend_is_taken_or_says_why_not():
    assert choose("an operation", "triton", TABLE, 2)(2) == "triton"
    with pytest.raises(BackendError, match=r"'triton' declines an operation: n is odd\. Take another, or 'auto'"):
        choose("an operation", "triton", TABLE, 3)
    with pytest.raises(BackendError, match=r"'flex' does not have an operation; it has 'triton', 'cpu'"):
        choose("an operation", "flex", TABLE, 2)


@pytest.mark.parametrize(
    ("variable", "backend", "expected"),
    [
        ("", "auto", "auto"),
        ("reference", "auto", "reference"),
        ("reference", "cpu", "cpu"),
        ("pairwise=triton, linear_attention=cpu", "auto", "cpu"),
        ("pairwise=triton", "auto", "auto"),
        ("linear_attention=triton,cpu", "auto", "triton"),
    ],
)
def test_the_call_comes_before_the_environment(monkeypatch, variable, backend, expected):
    monkeypatch.setenv(VARIABLE, variable)
    assert requested("linear_attention", backend) == expected


def test_unknown_names(monkeypatch):
    with pytest.raises(ValueError, match="backend must be one of"):
        requested("linear_attention", "cuda")
    monkeypatch.setenv(VARIABLE, "linear_attention=fast")
    with pytest.raises(ValueError, match="DIFFUSION_MP_BACKEND must be one of"):
        requested("linear_attention", "auto")
    assert requested("pairwise", "auto") == "auto"
